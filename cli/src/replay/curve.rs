//! Many limits of one quota at once, to draw whom each of them would refuse.
//!
//! The real limiter decides each of them, at the log's time. Two things make it quick:
//!
//! * A key that was idle for two periods and a refill has its whole allowance again, and no limit refuses the first
//!   units up to its capacity. So requests are kept until a session has more, and then the limit is asked about all of
//!   them.
//! * Only clients that a limit refused have a record of refusals.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tower_ratelimit::clock::{ManualClock, Timestamp};
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::observe::Observer;
use tower_ratelimit::quota::Algorithm;
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};

/// The number of limits that are tried.
pub(crate) const LIMITS: usize = 24;

/// The log is split into at most this many parts of equal size, to compare its halves.
const PARTS: usize = 128;

/// The most states of all limits and keys.
const STATES: usize = 2 << 20;

/// The most requests that are kept for limits that are not asked yet.
const KEPT_MAX: usize = 4 << 20;

/// Asks limits about each request of a policy.
pub(crate) struct Curve {
    pub(crate) limits: Vec<Limit>,
    asks: Asks,
    /// The time after which an unused key has its whole allowance again.
    idle_us: u64,
    keys: Vec<KeyState>,
    kept: usize,
    kept_max: usize,
    parts: Parts,
}

/// The part that decides whether a request passes.
enum Asks {
    Limiter(CurveLimiter),
    /// Limits of requests in flight need no clock: a request holds its units until it ends.
    Counts(Counts),
}

/// The limiter of all curves. Its clock goes back when requests that were kept are asked about.
#[derive(Clone, Debug)]
pub(crate) struct CurveLimiter {
    limiter: MemoryLimiter,
    clock: ManualClock,
}

impl CurveLimiter {
    pub(crate) fn new(start_us: u64, observer: impl Observer + 'static) -> Result<Self, String> {
        let clock = ManualClock::at(Timestamp::from_micros(start_us));
        let limiter = MemoryLimiter::builder().max_keys(STATES).clock(clock.clone()).observer(observer);
        Ok(Self { limiter: limiter.build().map_err(|error| error.to_string())?, clock })
    }

    fn is_over(&self, limit: &Limit, key: &Key, cost: u64, at_us: u64) -> bool {
        self.clock.set(Timestamp::from_micros(at_us));
        !self.limiter.take_one(&limit.policy, key, cost).is_allowed()
    }
}

pub(crate) struct Limit {
    pub(crate) quota: Quota,
    policy: Policy,
    /// Requests refused in each part of the log.
    refused: [u64; PARTS],
}

/// The parts of the log. When there are too many, every two become one.
struct Parts {
    size: u64,
    requests: u64,
}

#[derive(Default)]
struct KeyState {
    last_us: u64,
    /// Units of this session, and its requests with their costs, as long as not all limits are asked.
    used: u64,
    kept: Vec<(u64, u64)>,
    /// The number of limits that are asked.
    asked: u8,
    is_new: bool,
    seen: Span,
    refused: Option<Box<[Refused; LIMITS]>>,
}

/// The first and the last part in which something was.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    first: u8,
    last: u8,
}

#[derive(Clone, Copy, Debug, Default)]
struct Refused {
    count: u32,
    span: Span,
}

/// Whom a limit would have refused in a section of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) requests: u64,
    pub(crate) refused: u64,
    pub(crate) clients: u64,
    pub(crate) touched: u64,
}

impl Curve {
    /// Makes a curve around a quota. Returns `None` if the quota has no limit that could be varied, or if none of the
    /// varied quotas can be kept.
    pub(crate) fn new(policy: &Policy, limiter: CurveLimiter) -> Option<Self> {
        let quota = policy.quota();
        if quota.limit() == 0
            || matches!(quota.algorithm(), Algorithm::Block | Algorithm::Meter | Algorithm::Concurrency)
        {
            return None;
        }
        let quotas = grid(quota.limit()).into_iter().filter_map(|limit| with_limit(quota, limit));
        let limits: Vec<Limit> = quotas
            .filter(|quota| limiter.limiter.supports(quota).is_ok())
            .enumerate()
            .filter_map(|(at, quota)| Limit::new(policy, at, quota))
            .collect();
        let micros = |quota: &Quota| {
            let period = quota.period().saturating_mul(2).saturating_add(quota.refill_time());
            u64::try_from(period.as_micros()).unwrap_or(u64::MAX)
        };
        let idle_us = limits.iter().map(|limit| micros(&limit.quota)).max()?;
        Some(Self::of(limits, Asks::Limiter(limiter), idle_us))
    }

    /// Makes a curve of limits of requests in flight: around a policy's own, or from 1 on if the policy has a rate.
    pub(crate) fn of_requests_in_flight(policy: &Policy) -> Self {
        let (own, is_own) = (policy.quota(), policy.quota().algorithm() == Algorithm::Concurrency);
        let own = if is_own { *own } else { Quota::concurrent(1) };
        let quotas = grid(own.limit().max(1)).into_iter().filter_map(|limit| with_limit(&own, limit));
        let limits = quotas.enumerate().filter_map(|(at, quota)| Limit::new(policy, at, quota)).collect();
        Self::of(limits, Asks::Counts(Counts::default()), 0)
    }

    fn of(limits: Vec<Limit>, asks: Asks, idle_us: u64) -> Self {
        let parts = Parts { size: 1, requests: 0 };
        Self { limits, asks, idle_us, keys: Vec::new(), kept: 0, kept_max: KEPT_MAX, parts }
    }

    /// Returns the most units that each key had in flight, in no order. It is empty unless this counts requests in
    /// flight.
    pub(crate) fn peaks(&self) -> Vec<u32> {
        match &self.asks {
            Asks::Limiter(_) => Vec::new(),
            Asks::Counts(counts) => counts.keys.iter().map(|key| key.peak).collect(),
        }
    }

    /// Asks about a request, which ends at `until_us`. Keys are numbered without gaps, and instants never go back.
    pub(crate) fn take(&mut self, key: usize, cost: u64, at_us: u64, until_us: u64) {
        let part = self.part();
        if self.keys.len() <= key {
            self.keys.resize_with(key + 1, || KeyState { is_new: true, ..KeyState::default() });
        }
        if self.kept >= self.kept_max {
            self.ask_all(at_us);
        }
        let Some(state) = self.keys.get_mut(key) else { return };
        if std::mem::take(&mut state.is_new) {
            state.seen.first = part;
        }
        state.seen.last = part;
        if cost == 0 {
            return;
        }
        let limiter = match &mut self.asks {
            Asks::Limiter(limiter) => limiter,
            Asks::Counts(counts) => {
                let refusing = counts.take(&self.limits, key, cost, (at_us, until_us));
                for (at, limit) in self.limits.iter_mut().enumerate().filter(|(at, _)| refusing >> at & 1 == 1) {
                    state.refuse(limit, at, part);
                }
                return;
            }
        };
        if at_us.saturating_sub(state.last_us) >= self.idle_us {
            self.kept -= state.kept.len();
            state.kept.clear();
            (state.used, state.asked) = (0, 0);
        }
        (state.last_us, state.used) = (at_us, state.used.saturating_add(cost));
        let name = Key::of(key as u64).unwrap_or_else(Key::global);
        while let Some(limit) = self.limits.get(usize::from(state.asked)) {
            if state.used <= limit.quota.capacity() {
                break;
            }
            replay(limiter, limit, &name, &state.kept);
            state.asked += 1;
        }
        if usize::from(state.asked) < self.limits.len() {
            state.kept.push((at_us, cost));
            self.kept += 1;
        } else {
            self.kept -= state.kept.len();
            state.kept = Vec::new();
        }
        for (at, limit) in self.limits.iter_mut().enumerate().take(usize::from(state.asked)) {
            if limiter.is_over(limit, &name, cost, at_us) {
                state.refuse(limit, at, part);
            }
        }
    }

    /// Asks all limits about what is kept, so that nothing is.
    #[cold]
    fn ask_all(&mut self, now_us: u64) {
        let Asks::Limiter(limiter) = &self.asks else { return };
        for (key, state) in self.keys.iter_mut().enumerate() {
            let kept = std::mem::take(&mut state.kept);
            if kept.is_empty() || now_us.saturating_sub(state.last_us) >= self.idle_us {
                continue;
            }
            let name = Key::of(key as u64).unwrap_or_else(Key::global);
            for limit in self.limits.iter().skip(usize::from(state.asked)) {
                replay(limiter, limit, &name, &kept);
            }
            state.asked = self.limits.len() as u8; // at most LIMITS
        }
        self.kept = 0;
    }

    /// Returns the part of the log that the next request is in.
    fn part(&mut self) -> u8 {
        if self.parts.requests / self.parts.size >= PARTS as u64 {
            self.parts.size *= 2;
            let halved = |span: &mut Span| *span = Span { first: span.first / 2, last: span.last / 2 };
            for state in &mut self.keys {
                halved(&mut state.seen);
                state
                    .refused
                    .iter_mut()
                    .flat_map(|refused| refused.iter_mut())
                    .for_each(|refused| halved(&mut refused.span));
            }
            for limit in &mut self.limits {
                let mut merged = [0; PARTS];
                for (into, two) in merged.iter_mut().zip(limit.refused.chunks(2)) {
                    *into = two.iter().sum();
                }
                limit.refused = merged;
            }
        }
        let part = self.parts.requests / self.parts.size;
        self.parts.requests += 1;
        u8::try_from(part).unwrap_or(u8::MAX)
    }

    /// Returns whom each limit would have refused: in the first half of the log, in the second half, and in all of it.
    pub(crate) fn points(&self) -> Vec<[Point; 3]> {
        let Parts { size, requests } = self.parts;
        // The first part of the second half.
        let half = requests.div_ceil(size).div_ceil(2);
        let in_first = requests.min(half * size);
        let sections = [(0, half, in_first), (half, u64::MAX, requests - in_first), (0, u64::MAX, requests)];
        let is_in = |span: &Span, (from, to, _)| u64::from(span.first) < to && u64::from(span.last) >= from;
        let mut clients = [0; 3];
        let mut touched = [[0; 3]; LIMITS];
        for state in self.keys.iter().filter(|state| !state.is_new) {
            for (clients, section) in clients.iter_mut().zip(sections) {
                *clients += u64::from(is_in(&state.seen, section));
            }
            for (touched, refused) in touched.iter_mut().zip(state.refused.iter().flat_map(|refused| refused.iter())) {
                for (touched, section) in touched.iter_mut().zip(sections) {
                    *touched += u64::from(refused.count > 0 && is_in(&refused.span, section));
                }
            }
        }
        let refused = |limit: &Limit, (from, to, _): (u64, u64, u64)| {
            limit.refused.iter().zip(0..).filter(|(_, part)| (from..to).contains(part)).map(|(count, _)| count).sum()
        };
        let point = |limit: &Limit, touched: &[u64; 3], at: usize| {
            let section = sections.get(at).copied().unwrap_or_default();
            let count = |of: &[u64; 3]| of.get(at).copied().unwrap_or(0);
            Point {
                requests: section.2,
                refused: refused(limit, section),
                clients: count(&clients),
                touched: count(touched),
            }
        };
        let limits = self.limits.iter().zip(&touched);
        limits.map(|(limit, touched)| [0, 1, 2].map(|at| point(limit, touched, at))).collect()
    }

    /// Returns how many requests a limit refused to each client that it refused most, the largest first.
    pub(crate) fn worst(&self, at: usize, most: usize) -> Vec<u64> {
        let counts = self.keys.iter().filter_map(|state| Some(state.refused.as_ref()?.get(at)?.count));
        let mut counts: Vec<u64> = counts.filter(|count| *count > 0).map(u64::from).collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        counts.truncate(most);
        counts
    }
}

impl Limit {
    fn new(policy: &Policy, at: usize, quota: Quota) -> Option<Self> {
        Some(Self { quota, policy: limited(policy, at, quota)?, refused: [0; PARTS] })
    }
}

impl KeyState {
    /// Notes that the limit of this index refused a request in a part of the log.
    fn refuse(&mut self, limit: &mut Limit, at: usize, part: u8) {
        if let Some(count) = limit.refused.get_mut(usize::from(part)) {
            *count += 1;
        }
        if let Some(refused) = self.refused.get_or_insert_default().get_mut(at) {
            if refused.count == 0 {
                refused.span.first = part;
            }
            refused.span.last = part;
            refused.count = refused.count.saturating_add(1);
        }
    }
}

fn replay(limiter: &CurveLimiter, limit: &Limit, key: &Key, requests: &[(u64, u64)]) {
    for (at_us, cost) in requests {
        limiter.is_over(limit, key, *cost, *at_us);
    }
}

/// Makes the policy of the limit of this index. No two curves share a name, and so no states.
fn limited(policy: &Policy, at: usize, quota: Quota) -> Option<Policy> {
    let quota_of = super::read::request::hash(policy.quota().to_string().as_bytes()) as u32;
    let name = super::read::request::hash(policy.name().as_bytes());
    Policy::new(format!("{name:x}-{quota_of:x}-{at}"), quota).ok()
}

/// Returns the limits to try: this one, and 1, 2, 3, 5, 7, then 10, 15, 20, 30, 50, 70 and so on, from a hundredth of
/// it, if that is more than 1.
fn grid(limit: u64) -> Vec<u64> {
    let decades = (0..18).map(|exponent| 10_u64.pow(exponent));
    let steps = decades.flat_map(|ten| [10, 15, 20, 30, 50, 70].map(|step| (step * ten) / 10));
    let mut steps: Vec<u64> = steps.collect();
    steps.dedup();
    let begin = steps.iter().rposition(|step| *step <= (limit / 100).max(1)).unwrap_or(0);
    let mut limits: Vec<u64> = steps.into_iter().skip(begin).take(LIMITS).collect();
    if let Err(at) = limits.binary_search(&limit) {
        limits.insert(at, limit);
        limits.truncate(LIMITS);
    }
    limits
}

/// Returns the quota with another limit. Its burst or queue keeps its proportion to the limit, rounded up; everything
/// else stays. Returns `None` if there is no such quota.
fn with_limit(quota: &Quota, limit: u64) -> Option<Quota> {
    let text = quota.to_string();
    let (first, options) = text.split_once(", ").unwrap_or((&text, ""));
    let (_, rest) = first.split_at(first.find(" per ").or_else(|| first.find(" at once"))?);
    // A quota of bytes has a unit behind each number of them.
    let unit = if quota.counts_bytes() { " B" } else { "" };
    let scaled = |amount: &str| -> Option<u64> {
        let scaled = (u128::from(units(amount)?) * u128::from(limit)).div_ceil(u128::from(quota.limit()));
        u64::try_from(scaled).ok()
    };
    let mut parts = vec![format!("{limit}{unit}{rest}")];
    for part in options.split(", ") {
        let option = ["burst ", "queue ", "delay after "].iter().find(|option| part.starts_with(**option));
        parts.push(match option.and_then(|option| part.strip_prefix(option).map(|amount| (option, amount))) {
            Some((option, amount)) => format!("{option}{}{unit}", scaled(amount)?),
            None => part.to_owned(),
        });
    }
    parts.join(", ").parse().ok()
}

/// Returns the units of an amount as a quota's text has it, such as `20` or `20 MiB`.
fn units(amount: &str) -> Option<u64> {
    format!("{amount} per s").parse().ok().map(|quota: Quota| quota.limit())
}

/// The units that requests hold under limits of requests in flight.
#[derive(Default)]
struct Counts {
    keys: Vec<InFlight>,
    /// The ends of the requests in flight.
    ends: BinaryHeap<Reverse<End>>,
}

/// The units that the requests of a key have in flight.
#[derive(Default)]
struct InFlight {
    units: u32,
    peak: u32,
    /// The units that each limit admitted. `None` as long as every limit admitted all of them.
    admitted: Option<Box<[u32; LIMITS]>>,
}

/// The end of a request.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct End {
    at_us: u64,
    key: usize,
    units: u32,
    /// The limits that admitted the request: a bit for each.
    admitted_by: u32,
}

/// The most requests whose ends are known. Others count as if they had ended at once.
const ENDS_MAX: usize = 2 << 20;

impl Counts {
    /// Counts a request from its beginning to its end. Returns the limits that refuse it: a bit for each.
    fn take(&mut self, limits: &[Limit], key: usize, cost: u64, (at_us, until_us): (u64, u64)) -> u32 {
        self.end_until(at_us);
        if self.keys.len() <= key {
            self.keys.resize_with(key + 1, InFlight::default);
        }
        let Some(own) = self.keys.get_mut(key) else { return 0 };
        let units = u32::try_from(cost).unwrap_or(u32::MAX);
        let fits = |held: u32, limit: &Limit| u64::from(held) + u64::from(units) <= limit.quota.limit();
        if own.admitted.is_none() && !limits.iter().all(|limit| fits(own.units, limit)) {
            own.admitted = Some(Box::new([own.units; LIMITS])); // so far each limit admitted all
        }
        own.units = own.units.saturating_add(units);
        own.peak = own.peak.max(own.units);
        let mut refusing = 0;
        for (at, (held, limit)) in own.admitted.iter_mut().flat_map(|held| held.iter_mut()).zip(limits).enumerate() {
            if fits(*held, limit) {
                *held = held.saturating_add(units);
            } else {
                refusing |= 1 << at;
            }
        }
        let end = End { at_us: until_us, key, units, admitted_by: !refusing };
        if self.ends.len() < ENDS_MAX {
            self.ends.push(Reverse(end));
        } else {
            own.end(&end);
        }
        refusing
    }

    /// Ends the requests that have ended by then.
    fn end_until(&mut self, at_us: u64) {
        while self.ends.peek().is_some_and(|Reverse(end)| end.at_us <= at_us) {
            let Some(Reverse(end)) = self.ends.pop() else { return };
            if let Some(own) = self.keys.get_mut(end.key) {
                own.end(&end);
            }
        }
    }
}

impl InFlight {
    fn end(&mut self, end: &End) {
        self.units = self.units.saturating_sub(end.units);
        if self.units == 0 {
            self.admitted = None;
        }
        for (at, held) in self.admitted.iter_mut().flat_map(|held| held.iter_mut()).enumerate() {
            if end.admitted_by >> at & 1 == 1 {
                *held = held.saturating_sub(end.units);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUOTAS: [&str; 8] = [
        "5 per minute",
        "20 per 10 s burst 5",
        "5 per minute, gcra",
        "4 per minute, queue 8, leaky queue",
        "6 per minute, fixed window",
        "6 per minute, sliding window",
        "6 per minute, sliding log",
        "6 per minute, step bucket",
    ];

    struct Silent;

    impl Observer for Silent {}

    fn curve(quota: &Quota, start_us: u64) -> Curve {
        let limiter = CurveLimiter::new(start_us, Silent).unwrap();
        Curve::new(&Policy::new("client", *quota).unwrap(), limiter).unwrap()
    }

    /// Keys, costs and instants: some keys are busy, and all pause now and then.
    fn requests(mut seed: u64) -> Vec<(usize, u64, u64)> {
        let mut at_us = 1_735_689_600_000_000;
        let mut random = move |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        (0..4_000)
            .map(|_| {
                at_us += if random(200) == 0 { random(400_000_000) } else { random(2_000_000) };
                let key = random(12) as usize % (1 + random(12) as usize);
                (key, 1 + random(40) / 39, at_us)
            })
            .collect()
    }

    #[test]
    fn limits_decide_as_if_each_request_were_asked_at_once() {
        for (seed, text) in (1..).zip(QUOTAS) {
            for kept_max in [KEPT_MAX, 40] {
                let quota: Quota = text.parse().unwrap();
                let start_us = 1_735_689_600_000_000;
                let mut curve = curve(&quota, start_us);
                curve.kept_max = kept_max;
                let clock = ManualClock::at(Timestamp::from_micros(start_us));
                let limiter = MemoryLimiter::builder().clock(clock.clone()).build().unwrap();
                let policies: Vec<Policy> = curve.limits.iter().map(|limit| limit.policy.clone()).collect();
                let mut refused = vec![vec![0; 12]; policies.len()];
                for (key, cost, at_us) in requests(seed) {
                    curve.take(key, cost, at_us, at_us);
                    clock.set(Timestamp::from_micros(at_us));
                    for (policy, refused) in policies.iter().zip(&mut refused) {
                        let name = Key::of(key as u64).unwrap();
                        refused[key] += u64::from(!limiter.take_one(policy, &name, cost).is_allowed());
                    }
                }
                assert!(refused[0].iter().sum::<u64>() > 100, "{text}: the smallest limit refuses");
                let points = curve.points();
                for (at, refused) in refused.iter().enumerate() {
                    let [first, second, point] = points[at];
                    assert_eq!(point.refused, refused.iter().sum::<u64>(), "{text}, limit {at}");
                    assert_eq!(point.touched, refused.iter().filter(|count| **count > 0).count() as u64, "{text}");
                    assert_eq!(curve.worst(at, 1).first(), refused.iter().max().filter(|count| **count > 0), "{text}");
                    assert_eq!(first.refused + second.refused, point.refused, "{text}");
                    assert_eq!(first.requests + second.requests, 4_000);
                    assert!(first.requests.abs_diff(second.requests) <= 64, "{first:?} {second:?}");
                }
            }
        }
    }

    /// Against the limiter itself, which holds what requests take until they end.
    #[test]
    fn limits_of_requests_in_flight_decide_as_the_limiter() {
        let own = Policy::new("client", Quota::concurrent(5)).unwrap();
        let mut curve = Curve::of_requests_in_flight(&own);
        assert_eq!(curve.limits[3].quota.to_string(), "5 at once");
        let limiter = MemoryLimiter::new();
        let policies: Vec<Policy> = curve.limits.iter().map(|limit| limit.policy.clone()).collect();
        let (mut refused, mut peaks) = (vec![[0; 12]; policies.len()], [0; 12]);
        // The ends of requests, with their keys, costs and what they hold of each limit.
        let mut running: Vec<(u64, usize, u32, Vec<Option<tower_ratelimit::limiter::Place>>)> = Vec::new();
        for (at, (key, cost, at_us)) in requests(3).into_iter().enumerate() {
            let until_us = at_us + (at as u64 * 7_919_313) % 20_000_000;
            curve.take(key, cost, at_us, until_us);
            running.retain(|(end_us, ..)| *end_us > at_us);
            let held = policies.iter().zip(&mut refused).map(|(policy, refused)| {
                let held = limiter.hold(policy, &Key::of(key as u64).unwrap(), cost);
                refused[key] += u64::from(held.is_err());
                held.ok()
            });
            running.push((until_us, key, cost as u32, held.collect()));
            let own = running.iter().filter(|(_, other, ..)| *other == key).map(|(_, _, cost, _)| cost).sum();
            peaks[key] = peaks[key].max(own);
        }
        assert!(refused[3].iter().sum::<u64>() > 100, "{:?}", refused[3]);
        for (at, (refused, [_, _, point])) in refused.iter().zip(curve.points()).enumerate() {
            assert_eq!(point.refused, refused.iter().sum::<u64>(), "limit {at}");
            assert_eq!(point.touched, refused.iter().filter(|count| **count > 0).count() as u64, "limit {at}");
        }
        assert_eq!(curve.peaks(), peaks);
    }

    #[test]
    fn halves_of_the_log_have_points_of_their_own() {
        let mut curve = curve(&Quota::per_minute(1), 0);
        // One client comes twice in the first half, another twice in the second.
        for n in 0..1_000_u64 {
            let key = if n < 500 { 0 } else { 1 };
            let is_close = n == 1 || n == 901;
            let at_us = n * 3_600_000_000 + if is_close { 0 } else { 3_599_000_000 };
            curve.take(key, 1, at_us, at_us);
        }
        let [first, second, all] = curve.points()[0];
        assert_eq!(first, Point { requests: 504, refused: 1, clients: 2, touched: 1 });
        assert_eq!(second, Point { requests: 496, refused: 1, clients: 1, touched: 1 });
        assert_eq!(all.touched, 2);
    }

    #[test]
    fn grid_is_round_and_around_the_limit() {
        let all = grid(100);
        assert_eq!(all[..8], [1, 2, 3, 5, 7, 10, 15, 20]);
        assert_eq!((all.len(), all[23]), (LIMITS, 10_000));
        assert_eq!(grid(5)[0], 1);
        assert_eq!(grid(100_000)[..3], [1_000, 1_500, 2_000]);
        let odd = grid(25);
        assert_eq!((odd.len(), &odd[6..10]), (LIMITS, &[15, 20, 25, 30][..]));
        let quota: Quota = "100 per minute, burst 20".parse().unwrap();
        assert_eq!(with_limit(&quota, 150).unwrap().to_string(), "150 per minute, burst 30, token bucket");
        assert_eq!(with_limit(&quota, 1).unwrap().to_string(), "1 per minute, token bucket");
    }

    #[test]
    fn limits_of_bytes_are_around_the_limit() {
        for (text, limit, expected) in [
            ("100 MiB per hour", 150, "150 B per hour, token bucket"),
            ("100 kB per hour, burst 20 kB", 50_000, "50 kB per hour, burst 10 kB, token bucket"),
            ("1 MB per day, fixed window", 1_500_000, "1500 kB per day, fixed window"),
            ("3 at once, wait 10 seconds", 5, "5 at once, wait 10 seconds"),
        ] {
            let quota: Quota = text.parse().unwrap();
            assert_eq!(with_limit(&quota, limit).unwrap().to_string(), expected, "{text}");
            assert_eq!(with_limit(&quota, quota.limit()), Some(quota), "{text}");
        }
        let curve = curve(&"100 kB per hour, burst 20 kB".parse().unwrap(), 0);
        let limits: Vec<u64> = curve.limits.iter().map(|limit| limit.quota.limit()).collect();
        assert_eq!((limits.len(), limits[0], limits[12]), (LIMITS, 1_000, 100_000), "{limits:?}");
    }
}
