//! What a script is told of a charge besides its key: the quota, the cost and the effect, once for all keys of a call.

use bytes::Bytes;

use crate::algorithm::{Numbers, PairRules, Rules};
use crate::decision::Receipt;
use crate::limiter::Effect;
use crate::quota::{Anchor, Oldest, Quota, Spec};

/// How a state is kept in Redis. The number stands in forms and, with the format's version 1 in its upper half, at the
/// beginning of each value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// An instant in whole microseconds.
    Whole = 1,
    /// An instant and a numerator.
    Parts = 2,
    StepBucket = 3,
    FixedWindow = 4,
    TwoCounters = 5,
    /// A list of entries whose numbers of units fit 32 bits.
    Narrow = 6,
    /// A list of others.
    Wide = 7,
    /// An instant, a span, and counts.
    Block = 8,
    Meter = 9,
}

/// Format version 1, in the upper half of a value's first byte.
const VERSION: u8 = 0x90;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Take,
    Peek,
    Refund,
    Reset,
}

impl Kind {
    pub(super) fn of(quota: &Quota) -> Self {
        let spec = quota.spec();
        match quota.rules() {
            Rules::Pair(PairRules::Gcra(gcra), _) if gcra.is_whole() => Self::Whole,
            Rules::Pair(PairRules::Gcra(_), _) => Self::Parts,
            Rules::Pair(PairRules::StepBucket(_), _) => Self::StepBucket,
            Rules::Pair(PairRules::FixedWindow(_), _) => Self::FixedWindow,
            Rules::Pair(PairRules::TwoCounters(_), _) => Self::TwoCounters,
            Rules::Pair(PairRules::Block(_), _) => Self::Block,
            Rules::Pair(PairRules::Meter(_), _) => Self::Meter,
            // Each sub-window may hold the most, and denied ones the limit.
            Rules::Trail(trail) => match trail.most().checked_mul(u64::from(spec.buckets) + 2) {
                Some(total) if total < 1 << 32 => Self::Narrow,
                _ => Self::Wide,
            },
        }
    }

    /// What follows the head in a value, or what an entry of a list is.
    fn layout(self) -> (&'static str, usize) {
        match self {
            Self::Whole => ("d", 8),
            Self::Parts | Self::StepBucket | Self::FixedWindow | Self::Meter => ("dd", 16),
            Self::Block => ("ddd", 24),
            Self::TwoCounters => ("dI4I4", 16),
            Self::Narrow => ("dI4I4", 16),
            Self::Wide => ("ddd", 24),
        }
    }

    pub(super) fn is_trail(self) -> bool {
        matches!(self, Self::Narrow | Self::Wide)
    }
}

/// Whether the lean script of its kind can decide charges of this quota.
pub(super) fn is_lean(quota: &Quota) -> bool {
    match quota.rules() {
        Rules::Pair(PairRules::TwoCounters(counters), _) => !counters.is_wide(),
        Rules::Pair(PairRules::Block(_) | PairRules::Meter(_), _) => false,
        Rules::Pair(..) => true,
        Rules::Trail(trail) => !trail.is_wide(),
    }
}

/// What a value of this quota begins with: its kind, and what of the quota gives the state its meaning, so that it can be
/// read when the quota has changed.
pub(super) fn head(kind: Kind, spec: &Spec) -> Vec<u8> {
    let mut head = vec![VERSION | kind as u8];
    let mut number = |mut number: u64| {
        while number >= 0x80 {
            head.push(number as u8 | 0x80); // the lowest seven bits
            number >>= 7;
        }
        head.push(number as u8); // below 128
    };
    match kind {
        Kind::StepBucket | Kind::FixedWindow => number(u64::from(spec.anchor == Anchor::Epoch)),
        Kind::TwoCounters | Kind::Narrow | Kind::Wide => number(match spec.oldest {
            _ if spec.algorithm == crate::quota::Algorithm::SlidingLog => 3,
            Oldest::Weighted => 0,
            Oldest::Dropped => 1,
            Oldest::Counted => 2,
        }),
        Kind::Whole | Kind::Parts | Kind::Meter => {}
        Kind::Block => number(spec.lasting.memory_us),
    }
    number(spec.limit);
    number(spec.period_us);
    if matches!(kind, Kind::Whole | Kind::Parts | Kind::StepBucket) {
        number(spec.burst);
    }
    number(spec.debt);
    if kind.is_trail() {
        number(u64::from(spec.buckets));
    }
    head
}

/// What is above 2^53 is of no receipt of ours: as good as the most that is exact.
fn most_exact(number: u64) -> f64 {
    number.min(1 << 53) as f64
}

/// The form of a charge, or of a look at it.
pub(super) fn form(quota: &Quota, verb: Verb, cost: u64, effect: Effect, receipt: Option<&Receipt>) -> Bytes {
    let kind = Kind::of(quota);
    let head = head(kind, quota.spec());
    let (state, state_size) = kind.layout();
    let force = effect == Effect::Force;
    let numbers = match quota.rules() {
        Rules::Pair(PairRules::Gcra(gcra), _) => gcra.numbers(cost, force),
        Rules::Pair(PairRules::StepBucket(bucket), _) => bucket.numbers(cost, force),
        Rules::Pair(PairRules::FixedWindow(window), _) => window.numbers(cost, force),
        Rules::Pair(PairRules::TwoCounters(counters), _) => counters.numbers(cost, force),
        Rules::Pair(PairRules::Block(block), _) => block.numbers(cost, force),
        Rules::Pair(PairRules::Meter(meter), _) => meter.numbers(cost, force),
        Rules::Trail(trail) => Numbers::from_slice(&trail.numbers(cost, force)),
    };
    // A value's layout has the head in front; a list has it in an element of its own.
    let (layout, size) = if kind.is_trail() {
        (format!("<{state}"), state_size)
    } else {
        (format!("<c{:02}{state}", head.len()), head.len() + state_size)
    };
    let mode = match (verb, effect) {
        (Verb::Peek, _) => 0,
        (Verb::Refund | Verb::Reset, _) => 3,
        (Verb::Take, Effect::Enforce) => 1,
        (Verb::Take, Effect::Observe | Effect::Force | Effect::OnRefusal { .. }) => 2,
    };
    let mut form = Vec::with_capacity(16 + head.len() + 8 * numbers.len());
    form.push(kind as u8);
    form.extend_from_slice(format!("{layout:<9}").as_bytes());
    form.push(head.len() as u8); // below 50
    form.extend_from_slice(&head);
    form.push(size as u8); // below 100
    form.push(mode);
    numbers.iter().for_each(|number| form.extend_from_slice(&number.to_le_bytes()));
    if let Some(receipt) = receipt {
        let (units, num) = match quota.rules() {
            Rules::Pair(PairRules::Gcra(gcra), _) => gcra.refund_numbers(receipt.units()),
            _ => (most_exact(receipt.units()), 0.0),
        };
        for number in [units, num, most_exact(receipt.at_us()), most_exact(receipt.part())] {
            form.extend_from_slice(&number.to_le_bytes());
        }
    }
    form.into()
}
