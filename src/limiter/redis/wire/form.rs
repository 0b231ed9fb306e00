//! What a script is told of a charge besides its key: the quota, the cost and the effect, once for all keys of a call.

use bytes::Bytes;
use smallvec::SmallVec;

use crate::algorithm::{PairRules, Rules};
use crate::decision::Receipt;
use crate::limiter::Effect;
use crate::policy::{Policy, Siblings};
use crate::quota::{Anchor, Oldest, Quota, Spec};

/// How a state is kept in Redis. The number stands in forms and, with the format's version 1 in its upper half, at the
/// beginning of each value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// An instant, a span, and counts. The number before it stands for values of several states.
    Block = 9,
    Meter = 10,
}

/// Format version 1, in the upper half of a value's first byte.
const VERSION: u8 = 0x90;

/// In place of a kind: a value holds the states of several quotas. It begins with how many, and the heads of all.
const PACKED: u8 = 8;

/// A rule of more quotas keeps each of their states in a value of its own.
const PACKED_MAX: usize = 32;

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
    pub(super) fn layout(self) -> (&'static str, usize) {
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

/// The quotas with whose states this policy's is in one value, if it is: those of its rule whose states are a few numbers.
///
/// That it is depends on the rule's name and its own quota alone, so that a state is found where it was left when the rule's
/// other quotas change, and by processes that have them already, or not yet.
pub(in crate::limiter::redis) fn packed(policy: &Policy) -> Option<&Siblings> {
    policy.siblings().filter(|siblings| siblings.quotas().len() <= PACKED_MAX && can_be_packed(policy.quota()))
}

/// Whether the state of a rule's quota can be in one value with others.
pub(super) fn can_be_packed(quota: &Quota) -> bool {
    !Kind::of(quota).is_trail() && is_lean(quota)
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
        Kind::Block => [spec.lasting.memory_us, spec.lasting.length_us].into_iter().for_each(&mut number),
        Kind::Whole | Kind::Parts | Kind::Meter => {}
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

/// Upon a kind's number in a form, which the lean scripts pass over: what is converted keeps the share that is used.
const IN_PROPORTION: u8 = 128;

/// What a form begins with.
fn number(quota: &Quota) -> u8 {
    Kind::of(quota) as u8 | if quota.spec().proportional { IN_PROPORTION } else { 0 }
}

/// A charge of a form, or a look at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub(super) quota: &'a Quota,
    pub(super) cost: u64,
    pub(super) effect: Effect,
    /// What it belongs to, if it is on refusal.
    pub(super) partners: Option<&'a Partners>,
    /// It is only looked at.
    pub(super) looks: bool,
}

/// What a charge on refusal belongs to.
#[derive(Clone, Debug, Default)]
pub(super) struct Partners {
    /// One of them was refused, as was heard before this was asked for by itself.
    pub(super) refused: bool,
    /// Their places among the answers.
    pub(super) places: SmallVec<[usize; 4]>,
    /// Its denial denies the set.
    pub(super) binds: bool,
    /// It is written although the set is denied.
    pub(super) outlives: bool,
}

/// In place of a partner's number: it was refused.
const REFUSED: u16 = 0;

/// What is to be done with a charge. The numbers stand in forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Mode {
    Peek = 0,
    Enforce = 1,
    /// Its denial is in nobody's way.
    Yield = 2,
    Refund = 3,
    /// A refund of one of the states that a value holds.
    RefundPacked = 4,
    /// One of the states that a value holds is to be forgotten.
    ResetPacked = 5,
    /// On refusal, of what is only observed.
    Seen = 6,
    /// On refusal; its denial denies the set.
    Bound = 7,
    /// And it is written although the set is denied.
    Struck = 8,
}

/// The form of what one stored key is asked for: how its value is laid out, and of each charge the mode and the numbers.
pub(super) fn form(parts: &[Part<'_>], packed: bool) -> Bytes {
    let mut form = match parts {
        [part] if !packed => {
            let kind = Kind::of(part.quota);
            Form::begin(number(part.quota), &head(kind, part.quota.spec()), &[kind])
        }
        parts => {
            let kinds: SmallVec<[Kind; 4]> = parts.iter().map(|part| Kind::of(part.quota)).collect();
            let mut heads = vec![VERSION | PACKED, parts.len() as u8]; // a few times `PACKED_MAX` at most
            for (part, kind) in parts.iter().zip(&kinds) {
                heads.extend(head(*kind, part.quota.spec()));
            }
            Form::begin(PACKED, &heads, &kinds)
        }
    };
    for part in parts {
        let mode = match part.effect {
            _ if part.looks => Mode::Peek,
            Effect::Enforce => Mode::Enforce,
            Effect::Observe | Effect::Force => Mode::Yield,
            Effect::OnRefusal { .. } => match part.partners {
                Some(Partners { outlives: true, .. }) => Mode::Struck,
                Some(Partners { binds: false, .. }) => Mode::Seen,
                _ => Mode::Bound,
            },
        };
        form.charge(part, mode);
        if mode as u8 >= Mode::Seen as u8 {
            form.partners(part.partners);
        }
    }
    form.0.into()
}

/// What is above 2^53 is of no receipt of ours: as good as the most that is exact.
fn most_exact(number: u64) -> f64 {
    number.min(1 << 53) as f64
}

/// The form of a refund to one policy.
pub(super) fn refund(policy: &Policy, receipt: &Receipt) -> Bytes {
    let mode = if packed(policy).is_some() { Mode::RefundPacked } else { Mode::Refund };
    let mut form = Form::of_one(policy.quota(), mode);
    let (units, num) = match policy.quota().rules() {
        Rules::Pair(PairRules::Gcra(gcra), _) => gcra.refund_numbers(receipt.units()),
        _ => (most_exact(receipt.units()), 0.0),
    };
    form.numbers([units, num, most_exact(receipt.at_us()), most_exact(receipt.part())]);
    form.0.into()
}

/// The form with which one of the states that a value holds is forgotten; none if it is the only one.
pub(super) fn reset(policy: &Policy) -> Option<Bytes> {
    packed(policy).map(|_| Form::of_one(policy.quota(), Mode::ResetPacked).0.into())
}

/// The kind, the layout and the head of the value, the value's size, and for each charge its mode and numbers.
struct Form(Vec<u8>);

impl Form {
    fn begin(number: u8, head: &[u8], kinds: &[Kind]) -> Self {
        let mut layout = String::from("<");
        // A value's layout has the head in front; a list has it in an element of its own.
        let in_front = if kinds.iter().any(|kind| kind.is_trail()) { 0 } else { head.len() };
        if in_front > 0 {
            layout.push_str(&format!("c{in_front}"));
        }
        kinds.iter().for_each(|kind| layout.push_str(kind.layout().0));
        let size = in_front + kinds.iter().map(|kind| kind.layout().1).sum::<usize>();
        let mut form = Vec::with_capacity(16 + layout.len() + head.len() + 80 * kinds.len());
        form.push(number);
        form.extend_from_slice(&(layout.len() as u16).to_le_bytes()); // some five times the kinds
        form.extend_from_slice(layout.as_bytes());
        form.extend_from_slice(&(head.len() as u16).to_le_bytes()); // below 50 for each
        form.extend_from_slice(head);
        form.extend_from_slice(&(size as u16).to_le_bytes()); // below 80 for each
        Self(form)
    }

    fn of_one(quota: &Quota, mode: Mode) -> Self {
        let kind = Kind::of(quota);
        let mut form = Self::begin(number(quota), &head(kind, quota.spec()), &[kind]);
        let part = Part { quota, cost: 0, effect: Effect::Enforce, partners: None, looks: true };
        form.charge(&part, mode);
        form
    }

    fn charge(&mut self, part: &Part<'_>, mode: Mode) {
        self.0.push(mode as u8);
        let on_refusal = matches!(part.effect, Effect::OnRefusal { .. });
        let (cost, force) = (part.cost, on_refusal || part.effect == Effect::Force);
        match part.quota.rules() {
            Rules::Pair(PairRules::Gcra(gcra), _) => self.numbers(gcra.numbers(cost, force)),
            Rules::Pair(PairRules::StepBucket(bucket), _) => self.numbers(bucket.numbers(cost, force)),
            Rules::Pair(PairRules::FixedWindow(window), _) => self.numbers(window.numbers(cost, force)),
            Rules::Pair(PairRules::TwoCounters(counters), _) => self.numbers(counters.numbers(cost, force)),
            Rules::Pair(PairRules::Block(block), _) => self.numbers(block.numbers(cost, force)),
            Rules::Pair(PairRules::Meter(meter), _) => self.numbers(meter.numbers(cost, force && !on_refusal)),
            Rules::Trail(trail) => self.numbers(trail.numbers(cost, force)),
        }
    }

    fn partners(&mut self, partners: Option<&Partners>) {
        let Some(partners) = partners else { return self.0.push(0) };
        let places = partners.places.iter().map(|place| *place as u16 + 1);
        let places: SmallVec<[u16; 4]> = partners.refused.then_some(REFUSED).into_iter().chain(places).collect();
        self.0.push(places.len() as u8); // of a charge's `of`
        places.iter().for_each(|place| self.0.extend_from_slice(&place.to_le_bytes()));
    }

    fn numbers(&mut self, numbers: impl IntoIterator<Item = f64>) {
        numbers.into_iter().for_each(|number| self.0.extend_from_slice(&number.to_le_bytes()));
    }
}
