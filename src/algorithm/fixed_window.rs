//! Fixed window: a counter that starts again from 0 in each period.
//!
//! # 1 Definition and laws
//!
//! Windows begin at whole multiples of the period since the Unix epoch, at the key's first request, or
//! with a day, week, month, quarter or year of a calendar. At exactly the end of the window, the key's
//! whole limit is free again.
//!
//! A fixed window guarantees at most `limit` units in each window, and therefore at most `2·limit` units in any
//! period. The known weakness of a fixed window is that twice the limit can pass around the edge of two
//! windows. Choose a fixed window for budgets per hour, day or month.
//!
//! # 2 Parameters
//!
//! The limit, and either a calendar, or a period with its anchor. The quota may count denied requests, up to
//! the limit. An unlimited quota takes every charge like a forced charge, and its count stops at the
//! limit.
//!
//! # 3 State
//!
//! A [`Pair`]: the window's end, and the count. The algorithm asks a calendar only which window
//! contains an instant, and which window is next. If the clock steps back into the previous window, the
//! count stays in the later window. If the clock steps back further, the count moves to the first
//! window that ends at least a whole window after now. However far the clock steps back, a key loses at
//! most one window, and cannot use the limit twice for the same time.

use crate::base::calendar::{CalendarWindow, CalendarWindows};
use crate::base::time::PERIOD_US_MAX;
use crate::decision::ChargeDecision;
use crate::quota::spec::{Anchor, Spec};

use super::divisor::Divisor;
use super::state::{Layout, Next, Pair, PairAlgorithm, Transition, WORD_AHEAD_US, bits};
#[cfg(feature = "_redis")]
use super::state::{LuaNumbers, UNBOUNDED, numbers};
use super::used::{Carried, Dated, Used};

/// The edges of every calendar are whole seconds.
const EDGE_US: u64 = 1_000_000;

/// The state of a calendar ends at most this number of longest windows ahead of now. In fact it ends with the next
/// window at the latest, but a time zone may make a window a day longer.
const AHEAD_PERIODS: u64 = 4;
const _: () = assert!(AHEAD_PERIODS * PERIOD_US_MAX <= WORD_AHEAD_US, "the state of a yearly window fits into a word");

/// Decides by a fixed window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedWindow {
    limit: u64,
    period_us: u64,
    /// The period as a divisor, to find the window of an instant.
    grid: Divisor,
    /// The length of two windows. The end of a state's window is valid if it is ahead by at most two windows. A
    /// calendar's windows differ in length, so this is the shortest time that two of them can take. An end within
    /// this time is surely valid, so most decisions do not ask the calendar (`benches/instructions`).
    near_us: u64,
    calendar: Option<&'static CalendarWindows>,
    debt: u64,
    anchor: Anchor,
    count_denied: bool,
    unlimited: bool,
}

/// The window in which a request is counted.
#[derive(Clone, Copy)]
struct Window {
    end: u64,
    count: u64,
    moved: bool,
}

impl FixedWindow {
    pub(crate) fn new(spec: &Spec) -> Self {
        let Spec { limit, period_us, debt, anchor, calendar, count_denied, unlimited, .. } = *spec;
        let near_us = calendar.map_or(2 * period_us, |calendar| calendar.shortest_us(2));
        let (grid, calendar) = (Divisor::new(period_us), calendar.map(CalendarWindows::of));
        Self { limit, period_us, grid, near_us, calendar, debt, anchor, count_denied, unlimited }
    }

    pub(crate) fn layout(&self) -> Layout {
        let grid = match (self.calendar, self.anchor) {
            (Some(_), _) => Some(EDGE_US),
            (None, Anchor::Epoch) => Some(self.period_us),
            (None, Anchor::FirstRequest) => None,
        };
        Layout::of(bits(self.limit + self.debt), grid, self.calendar.map_or(2, |_| AHEAD_PERIODS) * self.period_us)
    }

    /// Returns the windows of the calendar, if the quota has a calendar.
    pub(crate) fn calendar(&self) -> Option<&'static CalendarWindows> {
        self.calendar
    }

    // Windows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline]
    fn window(&self, state: Option<Pair>, now: u64) -> Window {
        match state {
            Some(state) if state.at > now && state.at - now <= self.near_us => {
                Window { end: state.at, count: state.n, moved: false }
            }
            state => {
                if let Some(calendar) = self.calendar {
                    return calendar_window(calendar, state, now);
                }
                let past = if self.anchor == Anchor::Epoch { now - self.grid.round_down(now) } else { 0 };
                let end = now - past + self.period_us;
                match state {
                    Some(state) if state.at > now => {
                        let whole = if past > 0 { end + self.period_us } else { end }; // at least a period away
                        Window { end: whole, count: state.n, moved: true }
                    }
                    _ => Window { end, count: 0, moved: false },
                }
            }
        }
    }

    /// Returns the window that counts the units of another quota. The returned window is the first window that
    /// ends no earlier than the last unit is freed, and at least a whole window after the units were taken.
    fn calendar_to_hold(calendar: &CalendarWindows, carried: &Carried, now: u64) -> CalendarWindow {
        let open = calendar.at(now);
        let taken = carried.taken().unwrap_or(now).min(now);
        let is_open_enough = open.begins_at(now) || open.begins_at(taken) && carried.back() <= open.end;
        if is_open_enough { open } else { calendar.after(open) }
    }

    #[inline]
    fn store(&self, window: Window) -> Next {
        if window.count == 0 { Next::Clear } else { Next::Set(Pair { at: window.end, n: window.count }) }
    }

    #[inline]
    fn describe(&self, window: Window, now: u64, retry_us: Option<u64>) -> ChargeDecision {
        let left_us = window.end - now;
        let remaining = self.limit.saturating_sub(window.count);
        let reset_us = if window.count == 0 { 0 } else { left_us };
        ChargeDecision::found(self.limit, remaining, reset_us, left_us, retry_us)
    }
}

/// Returns the calendar's window in which a charge at `now` is counted, with the units that the state has counted in
/// that window.
#[inline(never)]
fn calendar_window(calendar: &CalendarWindows, state: Option<Pair>, now: u64) -> Window {
    let open = calendar.at(now);
    let Some(state) = state.filter(|state| state.at > now) else {
        return Window { end: open.end, count: 0, moved: false };
    };
    if state.at == open.end || state.at <= calendar.after(open).end {
        return Window { end: state.at, count: state.n, moved: false };
    }
    let whole = if open.begins_at(now) { open } else { calendar.after(open) };
    Window { end: whole.end, count: state.n, moved: true }
}

impl PairAlgorithm for FixedWindow {
    #[inline(always)]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let window = self.window(state, now);
        let kept = if window.moved && cost > 0 { self.store(window) } else { Next::Keep };
        let count = window.count.saturating_add(cost);
        if count > self.limit && !force && cost > 0 && !self.unlimited {
            let retry_us = (cost <= self.limit).then_some(window.end - now);
            let counted = Window { count: window.count.max(count.min(self.limit)), ..window };
            let seen = if self.count_denied { counted } else { window };
            let next = if self.count_denied { self.store(counted) } else { kept };
            return Transition { decision: self.describe(seen, now, retry_us), next };
        }
        let count = count.min((self.limit + self.debt).max(window.count));
        let after = Window { count, ..window };
        let decision = self.describe(after, now, Some(0));
        if count == window.count {
            return Transition { decision, next: kept };
        }
        Transition { decision: decision.receipted(count - window.count, window.end, 0), next: self.store(after) }
    }

    /// Refunds `units` that were counted in the window that ends at `own.at`, while this window lasts.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        if state.at != own.at || state.at <= now || units == 0 {
            return Next::Keep;
        }
        self.store(Window { end: state.at, count: state.n.saturating_sub(units), moved: false })
    }

    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers {
        let most = self.limit + self.debt;
        let bound = if force || cost == 0 || self.unlimited { UNBOUNDED } else { self.limit };
        let (epoch, count_denied) = (u64::from(self.anchor == Anchor::Epoch), u64::from(self.count_denied));
        // The open window of a calendar depends on the time of the Redis server, so the window is added when
        // the call is sent.
        let period_us = if self.calendar.is_some() { 0 } else { self.period_us };
        numbers(&[cost.min(most + 1), bound, self.limit, most, period_us, epoch, count_denied])
    }

    fn carried(&self, state: Pair, now: u64, _sliced: bool) -> Carried {
        if let Some(calendar) = self.calendar {
            if state.at <= now {
                return Carried::new(Used::units(0), []);
            }
            // If the clock stepped back, the window's end may be too late. The quota that converts this state limits
            // the window's end.
            let start = calendar.at(state.at - 1).start();
            return Carried::new(Used::units(state.n), [Dated::new(Some(start.min(now)), state.at, state.n)]);
        }
        let Window { end, count, .. } = self.window(Some(state), now);
        let dated = Dated::new(Some(end.saturating_sub(self.period_us).min(now)), end, count);
        Carried::new(Used::units(count), [dated])
    }

    /// Counts all units in one window: the first that ends at or after [`Carried::until`]. With a calendar,
    /// [`calendar_to_hold`](Self::calendar_to_hold) chooses the window.
    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let count = carried.used.units_ceil().min(self.limit + self.debt);
        if let Some(calendar) = self.calendar {
            return (count > 0).then(|| Pair { at: Self::calendar_to_hold(calendar, carried, now).end, n: count });
        }
        let until = carried.until(now, self.period_us);
        let end = match self.anchor {
            Anchor::FirstRequest => until,
            Anchor::Epoch => self.window(None, now).end.max(until.next_multiple_of(self.period_us)),
        };
        (count > 0).then_some(Pair { at: end, n: count })
    }

    fn most(&self) -> u64 {
        self.limit + self.debt
    }

    /// If units of another quota are freed later than this time from now, even a denied charge writes the
    /// converted state.
    fn longest_us(&self, now: u64) -> u64 {
        self.calendar.map_or(2 * self.period_us, |calendar| calendar.after(calendar.at(now)).end - now)
    }

    /// A calendar's state only has to end at a whole second, because a process with other time zone
    /// data may compute another edge.
    fn could_be(&self, state: Pair) -> bool {
        let is_edge = match (self.calendar, self.anchor) {
            (Some(_), _) => state.at % EDGE_US == 0,
            (None, Anchor::Epoch) => state.at % self.period_us == 0,
            (None, Anchor::FirstRequest) => true,
        };
        state.n <= self.limit + self.debt && is_edge
    }

    /// Whether a decision at `now` would move this state back.
    #[inline]
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        let ahead_us = state.at.saturating_sub(now);
        ahead_us > self.near_us
            && self.calendar.is_none_or(|calendar| {
                let open = calendar.at(now);
                state.at != open.end && state.at > calendar.after(open).end // the first is usual, and known
            })
    }

    #[inline(always)]
    fn counts_anew(&self, state: Option<Pair>, now: u64) -> bool {
        state.is_none_or(|state| state.at <= now)
    }
}
