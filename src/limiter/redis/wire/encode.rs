//! Encodes the head of a stored value, and the form of a charge. `wire/mod.rs` describes both
//! formats.

use std::time::Duration;

use smallvec::SmallVec;

use crate::algorithm::places::HELD_MAX;
use crate::algorithm::{Decider, PairAlgorithm, PairDecider};
use crate::base::calendar::{CalendarUnit, CalendarWindows};
use crate::decision::Receipt;
use crate::limiter::{Effect, FirstInLine, Standing};
use crate::quota::spec::{Lasting, Spec};
use crate::quota::{Algorithm, Anchor, Oldest, Quota};

use super::charge::WireCharge;
use crate::base::time::micros_floor;
use crate::limiter::remote::Claim;

/// The kind of a state in Redis. A form contains the number of a kind. A value has the number in the lower half of
/// its first byte, below the format's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum StateKind {
    /// An instant in whole microseconds.
    Whole = 1,
    /// An instant and a numerator.
    Parts = 2,
    StepBucket = 3,
    FixedWindow = 4,
    TwoCounters = 5,
    /// A list of entries whose numbers of units fit into 32 bits.
    Narrow = 6,
    /// A list of entries with larger numbers.
    Wide = 7,
    /// An instant, a span, and counts.
    Block = 8,
    Meter = 9,
    /// Rows of units that are held.
    Places = 10,
    /// A fixed window of a calendar: its end, its count, and its start.
    Calendar = 11,
}

/// The format's version, in the upper half of a value's first byte.
const VERSION: u8 = 0xa0;

impl StateKind {
    pub(super) fn of(quota: &Quota) -> Self {
        match quota.decider() {
            Decider::Pair(PairDecider::Gcra(gcra), _) if gcra.is_whole() => Self::Whole,
            Decider::Pair(PairDecider::WideGcra(gcra), _) if gcra.is_whole() => Self::Whole,
            Decider::Pair(PairDecider::Gcra(_) | PairDecider::WideGcra(_), _) => Self::Parts,
            Decider::Pair(PairDecider::StepBucket(_), _) => Self::StepBucket,
            Decider::Pair(PairDecider::FixedWindow(window), _) if window.calendar().is_some() => Self::Calendar,
            Decider::Pair(PairDecider::FixedWindow(_), _) => Self::FixedWindow,
            Decider::Pair(PairDecider::TwoCounterWindow(_), _) => Self::TwoCounters,
            Decider::Pair(PairDecider::Block(_), _) => Self::Block,
            Decider::Pair(PairDecider::Meter(_), _) => Self::Meter,
            Decider::Places(_) => Self::Places,
            // Each sub-window can hold up to `most` units, and the number of denied units can reach the limit.
            Decider::EntryLog(log) => match log.most().checked_mul(u64::from(quota.spec().buckets) + 2) {
                Some(total) if total < 1 << 32 => Self::Narrow,
                _ => Self::Wide,
            },
        }
    }

    /// The layout and the size of the state in a value, or of an entry in a list.
    pub(super) fn layout(self) -> (&'static str, usize) {
        match self {
            Self::Whole => ("d", 8),
            Self::Parts | Self::StepBucket | Self::FixedWindow | Self::Meter => ("dd", 16),
            Self::TwoCounters | Self::Narrow => ("dI4I4", 16),
            Self::Block | Self::Wide | Self::Calendar => ("ddd", 24),
            Self::Places => ("", 0), // `places.lua` has it
        }
    }

    fn is_list(self) -> bool {
        matches!(self, Self::Narrow | Self::Wide)
    }
}

/// The longest head of a quota without a time zone has 61 bytes.
pub(super) type ValueHead = SmallVec<[u8; 64]>;

/// Returns the head of a value under this quota: its kind, and the numbers of the quota that give the state
/// its meaning. So the state can be read even after the quota has changed.
pub(super) fn head(kind: StateKind, spec: &Spec) -> ValueHead {
    let mut head = ValueHead::from_iter([VERSION | kind as u8]);
    if let Some(calendar) = spec.calendar {
        // Writes the unit, the first day, the length of the zone's name, and the name.
        let unit = CalendarUnit::ALL.iter().position(|unit| *unit == calendar.unit).unwrap_or(0) as u8; // below 5
        let zone = calendar.zone.name().as_bytes();
        let zone = zone.get(..ZONE_MAX).unwrap_or(zone);
        head.extend_from_slice(&[unit, calendar.first, zone.len() as u8]); // all below 128
        head.extend_from_slice(zone);
    }
    let mut number = |mut number: u64| {
        while number >= 0x80 {
            head.push(number as u8 | 0x80); // the lowest seven bits
            number >>= 7;
        }
        head.push(number as u8); // below 128
    };
    match kind {
        StateKind::StepBucket | StateKind::FixedWindow => number(u64::from(spec.anchor == Anchor::Epoch)),
        StateKind::TwoCounters | StateKind::Narrow | StateKind::Wide => number(match spec.oldest {
            _ if spec.algorithm == Algorithm::SlidingLog => 3,
            Oldest::Weighted => 0,
            Oldest::Dropped => 1,
            Oldest::Counted => 2,
        }),
        StateKind::Block => {
            let Lasting { length_us, factor, longest_us, memory_us, .. } = spec.lasting;
            [memory_us, length_us, factor, longest_us].into_iter().for_each(&mut number);
        }
        StateKind::Whole | StateKind::Parts | StateKind::Meter | StateKind::Calendar => {}
        // The head of held units has no numbers of the quota, because the units do not depend on the quota.
        StateKind::Places => return head,
    }
    number(spec.limit);
    number(spec.period_us);
    if matches!(kind, StateKind::Whole | StateKind::Parts | StateKind::StepBucket) {
        number(spec.burst);
    }
    number(spec.debt);
    if kind.is_list() {
        number(u64::from(spec.buckets));
    }
    head
}

/// The maximum number of bytes of a zone's name in a head. The longest name in the time zone database has 32
/// bytes.
const ZONE_MAX: usize = 64;

/// The position, in a run, of three instants of a calendar: the start and the end of a window, and the end of
/// the next window. The instants are filled in when the run is sent, for the window that contains the server's
/// time.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowPlace {
    at: usize,
    windows: &'static CalendarWindows,
}

impl WindowPlace {
    /// Fills in the window of an instant, in a run that begins at `start`.
    pub(super) fn fill(self, program: &mut [u8], start: usize, now: u64) {
        let open = self.windows.at(now);
        let numbers = [open.end as f64 - open.length as f64, open.end as f64, self.windows.after(open).end as f64];
        let at = start + self.at;
        if let Some(place) = program.get_mut(at..at + size_of_val(&numbers)) {
            place.copy_from_slice(numbers.map(f64::to_le_bytes).as_flattened());
        }
    }
}

/// The positions of windows in a run.
pub(super) type WindowPlaces = SmallVec<[WindowPlace; 0]>;

/// The effect of a denial of a charge. The numbers stand in forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Mode {
    /// A denial denies the request.
    Enforce = 1,
    /// A denial does not deny the request.
    Yield = 2,
    /// The charge is on refusal, and its partners are only observed or forced.
    Seen = 3,
    /// The charge is on refusal, and its denial denies the request.
    Bound = 4,
    /// The charge is on refusal, and is written although the request is denied.
    Struck = 5,
}

/// The number that replaces the first partner's number if one of the partners is known to be refused.
const REFUSED: u16 = 0;

/// Writes the form of a charge. Returns the position of the form's window, if the form has a window.
pub(super) fn charge(form: &mut Vec<u8>, charge: &WireCharge) -> Option<WindowPlace> {
    let (mode, partners) = match (&charge.partners, charge.effect) {
        (Some(partners), _) => {
            let mode = match partners {
                _ if partners.outlives => Mode::Struck,
                _ if partners.binds => Mode::Bound,
                _ => Mode::Seen,
            };
            let places = &partners.places;
            // Positions count from 1, and the range includes its last position.
            (mode, if partners.refused { [REFUSED, REFUSED] } else { [places.start as u16 + 1, places.end as u16] })
        }
        (None, Effect::Enforce) => (Mode::Enforce, [1, 0]),
        (None, _) => (Mode::Yield, [1, 0]),
    };
    let quota = charge.policy.quota();
    let numbers = match StateKind::of(quota) {
        StateKind::Places => places(quota, charge.cost, charge.effect == Effect::Force, &charge.claim),
        _ => numbers(quota, charge.cost, charge.effect),
    };
    let mut extra: SmallVec<[u8; 20]> = SmallVec::from_slice(partners.map(u16::to_le_bytes).as_flattened());
    let (waited, number, stays) = match charge.claim.standing {
        Standing::Newcomer | Standing::Left => return write(form, quota, mode, &numbers, &extra),
        Standing::HeldBack => (-1.0, 0, Duration::ZERO),
        Standing::First(FirstInLine { number, waited, asks_within }) => {
            (micros_floor(waited) as f64, number, asks_within)
        }
    };
    extra.extend(waited.to_le_bytes());
    extra.extend(number.to_le_bytes());
    extra.extend(u32::try_from(stays.as_millis()).unwrap_or(u32::MAX).to_le_bytes());
    write(form, quota, mode, &numbers, &extra)
}

/// Writes the form of a return of units that are held. The form has one more byte if the process has left the
/// line for the units.
pub(super) fn return_units(form: &mut Vec<u8>, quota: &Quota, units: u64, claim: &Claim) -> Option<WindowPlace> {
    let left: &[u8] = if claim.standing == Standing::Left { &[1] } else { &[] };
    write(form, quota, Mode::Enforce, &places(quota, units, false, claim), left)
}

/// Writes the form of a refund. Returns the position of the form's window, if the form has a window.
pub(super) fn refund(form: &mut Vec<u8>, quota: &Quota, receipt: &Receipt) -> Option<WindowPlace> {
    // No receipt of this crate has numbers above 2^53.
    let exact = |number: u64| number.min(1 << 53) as f64;
    let (units, part) = match quota.decider() {
        Decider::Pair(PairDecider::Gcra(gcra), _) => gcra.refund_numbers(receipt.units()),
        Decider::Pair(PairDecider::WideGcra(gcra), _) => gcra.refund_numbers(receipt.units()),
        _ => (exact(receipt.units()), 0.0),
    };
    let held = [units, part, exact(receipt.at_us()), exact(receipt.part())].map(f64::to_le_bytes);
    write(form, quota, Mode::Enforce, &numbers(quota, 0, Effect::Enforce), held.as_flattened())
}

fn write(form: &mut Vec<u8>, quota: &Quota, mode: Mode, numbers: &[f64; 10], extra: &[u8]) -> Option<WindowPlace> {
    let kind = StateKind::of(quota);
    let head = head(kind, quota.spec());
    let (layout, size) = kind.layout();
    // A value that is a string has the head in front of the state. A list has the head in an element of its own.
    let in_front = if kind.is_list() { 0 } else { head.len() };
    let mut text: SmallVec<[u8; 16]> = SmallVec::from_slice(b"<");
    if in_front > 0 {
        text.push(b'c');
        text.extend_from_slice(itoa::Buffer::new().format(in_front).as_bytes());
    }
    text.extend_from_slice(layout.as_bytes());
    form.extend_from_slice(&[kind as u8, text.len() as u8]);
    form.extend_from_slice(&text);
    form.push(head.len() as u8); // at most 61, and 67 of a calendar
    form.extend_from_slice(&head);
    form.extend_from_slice(&[(in_front + size) as u8, mode as u8]); // at most 155
    let window_at = form.len() + WINDOW_NUMBER * size_of::<f64>();
    form.extend_from_slice(numbers.map(f64::to_le_bytes).as_flattened());
    form.extend_from_slice(&(1 + extra.len() as u16).to_le_bytes());
    form.push(u8::from(quota.spec().proportional));
    form.extend_from_slice(extra);
    match quota.decider() {
        Decider::Pair(PairDecider::FixedWindow(window), _) => {
            window.calendar().map(|windows| WindowPlace { at: window_at, windows })
        }
        _ => None,
    }
}

/// The index, in a form, of the first of the three numbers that describe a window.
const WINDOW_NUMBER: usize = 7;

/// Returns the numbers for the algorithm's Lua twin.
fn numbers(quota: &Quota, cost: u64, effect: Effect) -> [f64; 10] {
    let on_refusal = matches!(effect, Effect::OnRefusal { .. });
    let force = on_refusal || effect == Effect::Force;
    let numbers = match quota.decider() {
        Decider::EntryLog(log) => return log.numbers(cost, force),
        Decider::Pair(PairDecider::Meter(meter), _) => meter.numbers(cost, force && !on_refusal),
        Decider::Pair(decider, _) => decider.get().numbers(cost, force),
        Decider::Places(_) => return [0.0; 10], // see `places`
    };
    let mut all = [0.0; 10];
    all.iter_mut().zip(numbers).for_each(|(place, number)| *place = number);
    all
}

/// Returns the numbers for `places.lua`.
fn places(quota: &Quota, cost: u64, force: bool, claim: &Claim) -> [f64; 10] {
    let Claim { holder, resets, epoch, base, lapse_us, keeps_row, .. } = *claim;
    // A cost above `HELD_MAX` is above every limit, so any such cost may be sent as `HELD_MAX + 1`.
    let (cost, limit) = (cost.min(HELD_MAX + 1), quota.spec().limit);
    let switches = [u64::from(force), u64::from(keeps_row)];
    [cost, limit, switches[0], holder, u64::from(resets), epoch, base, lapse_us, switches[1], 0]
        .map(|number| number as f64)
}
