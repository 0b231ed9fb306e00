//! What a request is charged, and what was decided about it.

use smallvec::SmallVec;

use super::late::Record;
use crate::decision::{self, ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::policy::Policy;

/// A charge that owns its key; its policy is one of the layer's.
pub(super) struct OwnedCharge {
    pub(super) policy: usize,
    pub(super) key: Key,
    pub(super) cost: u64,
    pub(super) manner: Manner,
}

impl OwnedCharge {
    /// One that is enforced, by the first policy.
    #[inline(always)]
    pub(super) fn usual(key: Key, cost: u64) -> Self {
        Self { policy: 0, key, cost, manner: Manner::of(Mode::Enforce) }
    }

    /// One that is enforced, and was not taken.
    pub(super) fn asked_for(Owed { policy, key, receipt }: Owed) -> Self {
        Self { policy, key, cost: receipt.units(), manner: Manner::of(Mode::Enforce) }
    }

    #[inline(always)]
    pub(super) fn of<'a>(&'a self, policy: &'a Policy) -> Charge<'a> {
        Charge::new(policy, &self.key).cost(self.cost).effect(self.effect())
    }

    #[inline]
    pub(super) fn mode(&self) -> Mode {
        self.manner.mode()
    }

    #[inline]
    pub(super) fn effect(&self) -> Effect {
        self.manner.effect()
    }
}

/// The mode that a charge is taken in, and its effect. In one word: what was written in bytes would have to be waited for
/// when it is moved as a word.
#[derive(Clone, Copy)]
pub(super) struct Manner(u64);

impl Manner {
    const EFFECT: u32 = 8;
    const PARTNERS: u32 = 16;

    /// Of a rule in this mode.
    #[inline]
    pub(super) fn of(mode: Mode) -> Self {
        Self::new(mode, mode.effect())
    }

    /// With another effect than the mode's: the rule has a block or a meter.
    #[inline]
    pub(super) fn new(mode: Mode, effect: Effect) -> Self {
        let (kind, partners) = match effect {
            Effect::Enforce => (0, 0),
            Effect::Observe => (1, 0),
            Effect::Force => (2, 0),
            Effect::OnRefusal { of } => (3, u64::from(of)),
        };
        Self(u64::from(mode.number()) | kind << Self::EFFECT | partners << Self::PARTNERS)
    }

    fn mode(self) -> Mode {
        Mode::of_number(self.0 as u8) // the lowest byte
    }

    fn effect(self) -> Effect {
        match (self.0 >> Self::EFFECT) as u8 {
            0 => Effect::Enforce,
            1 => Effect::Observe,
            2 => Effect::Force,
            _ => Effect::OnRefusal { of: (self.0 >> Self::PARTNERS) as u8 },
        }
    }
}

/// What a request is charged. No two charges are for the same policy and key: the policies of a layer differ by name.
///
/// One charge, the usual case, is apart from several here and below, so that it is not moved as if there were several.
pub(super) enum Charges {
    One(OwnedCharge),
    Several(SmallVec<[OwnedCharge; decision::INLINE]>),
    /// Besides, a rule in this mode had no key.
    Unkeyed(SmallVec<[OwnedCharge; decision::INLINE]>, Mode),
}

impl Charges {
    pub(super) fn as_slice(&self) -> &[OwnedCharge] {
        match self {
            Self::One(charge) => std::slice::from_ref(charge),
            Self::Several(charges) | Self::Unkeyed(charges, _) => charges,
        }
    }

    fn get_mut(&mut self, at: usize) -> Option<&mut OwnedCharge> {
        match self {
            Self::One(charge) => (at == 0).then_some(charge),
            Self::Several(charges) | Self::Unkeyed(charges, _) => charges.get_mut(at),
        }
    }

    /// Moves them out, and leaves none.
    pub(super) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Several(SmallVec::new()))
    }

    /// The mode of rules that had no key to charge.
    pub(super) fn unkeyed(&self) -> Mode {
        if let Self::Unkeyed(_, mode) = self { *mode } else { Mode::Enforce }
    }
}

/// What a request's head says.
#[expect(clippy::large_enum_variant, reason = "it stays on the stack of the call that made it")]
pub(super) enum Asking {
    Exempt,
    /// A rule in this mode had no key: one that enforces, or the only one that applies.
    Unkeyed(Mode),
    Denied,
    Charges(Charges),
}

/// What was decided about a request.
pub(super) struct Decided {
    pub(super) kind: OutcomeKind,
    pub(super) answer: Answer,
}

/// What the limiter answered, and to what.
pub(super) enum Answer {
    /// It was not asked.
    Nothing,
    One {
        charge: OwnedCharge,
        decision: ChargeDecision,
    },
    /// Of several charges only what may have to be given back: nothing else will be asked for.
    Owed(Owing),
    Several(Box<Record>),
}

/// What a request took, with room for the usual charges.
pub(super) type Owing = SmallVec<[Owed; decision::INLINE]>;

/// Charges, and the answer if there was one.
pub(super) struct Answered {
    pub(super) charges: Charges,
    pub(super) decision: Option<Decision>,
}

impl Answered {
    pub(super) fn of_one(charge: OwnedCharge, decision: ChargeDecision) -> Self {
        Self { charges: Charges::One(charge), decision: Some(Decision::one(true, decision)) }
    }

    pub(super) fn boxed(charges: Charges, decision: Option<Decision>) -> Answer {
        Answer::Several(Box::new(Record::Known(Self { charges, decision })))
    }

    /// Moves over what the charges took.
    pub(super) fn owe(&mut self, owed: &mut Owing) {
        if let Some(decision) = &mut self.decision {
            owe(owed, &mut self.charges, decision);
        }
    }
}

/// What a charge took, or, until the limiter has answered, is to take.
pub(super) struct Owed {
    pub(super) policy: usize,
    pub(super) key: Key,
    pub(super) receipt: Receipt,
}

impl Owed {
    /// For a charge that is not taken yet.
    #[inline(always)]
    pub(super) fn asked(policy: usize, key: Key, cost: u64) -> Self {
        Self { policy, key, receipt: Receipt::new(cost, 0, 0) }
    }
}

impl Decided {
    pub(super) fn without_charges(kind: OutcomeKind) -> Self {
        Self { kind, answer: Answer::Nothing }
    }

    /// Where nothing was decided, or nothing is left to be done.
    pub(super) fn nothing() -> Self {
        Self::without_charges(OutcomeKind::Exempt)
    }

    /// One charge that is enforced.
    #[inline(always)]
    pub(super) fn one(allowed: bool, charge: OwnedCharge, decision: ChargeDecision) -> Self {
        let kind = if allowed { OutcomeKind::Allowed } else { OutcomeKind::Limited };
        Self { kind, answer: Answer::One { charge, decision } }
    }

    /// Charges that were taken, and of which nobody is told.
    #[inline(always)]
    pub(super) fn owing(owed: Owing) -> Self {
        Self { kind: OutcomeKind::Allowed, answer: Answer::Owed(owed) }
    }

    pub(super) fn kind(&self) -> OutcomeKind {
        self.kind
    }

    /// Whether the outcome is told to the service, whether or not the layer exposes outcomes.
    #[inline(always)]
    pub(super) fn is_told(&self) -> bool {
        self.kind.is_told()
    }

    pub(super) fn passes(&self) -> bool {
        self.kind.passed()
    }

    /// A charge, and its answer.
    pub(super) fn answer_mut(&mut self, at: usize) -> Option<(&mut OwnedCharge, &mut ChargeDecision)> {
        match &mut self.answer {
            Answer::Nothing | Answer::Owed(_) => None,
            Answer::One { charge, decision } => (at == 0).then_some((charge, decision)),
            Answer::Several(record) => {
                let Record::Known(Answered { charges, decision }) = &mut **record else { return None };
                Some((charges.get_mut(at)?, decision.as_mut()?.charge_mut(at)?))
            }
        }
    }

    /// Something of it is settled after the response.
    #[inline]
    pub(super) fn is_late(&self) -> bool {
        matches!(&self.answer, Answer::Several(record) if matches!(**record, Record::Late(_)))
    }

    /// What was charged: the policies and the keys.
    pub(super) fn charges(&self) -> impl Iterator<Item = (usize, &Key)> {
        let owed = if let Answer::Owed(owed) = &self.answer { owed.as_slice() } else { &[] };
        let answered = self.answers().0.iter().map(|charge| (charge.policy, &charge.key));
        answered.chain(owed.iter().map(|owed| (owed.policy, &owed.key)))
    }

    /// The charges, and how many of them were answered: all or none.
    pub(super) fn answers(&self) -> (&[OwnedCharge], &[ChargeDecision]) {
        let answered = match &self.answer {
            Answer::Nothing | Answer::Owed(_) => return (&[], &[]),
            Answer::One { charge, decision } => return (std::slice::from_ref(charge), std::slice::from_ref(decision)),
            Answer::Several(record) => record.answered(),
        };
        (answered.charges.as_slice(), answered.decision.as_ref().map_or(&[], Decision::charges))
    }
}

/// Moves over what charges took.
pub(super) fn owe(owed: &mut Owing, charges: &mut Charges, decision: &mut Decision) {
    let mut take = |at: usize, OwnedCharge { policy, key, .. }| {
        if let Some(receipt) = decision.charge_mut(at).and_then(ChargeDecision::take_receipt) {
            owed.push(Owed { policy, key, receipt });
        }
    };
    match charges {
        Charges::One(_) => {
            if let Charges::One(charge) = charges.take() {
                take(0, charge);
            }
        }
        Charges::Several(charges) | Charges::Unkeyed(charges, _) => {
            charges.drain(..).enumerate().for_each(|(at, charge)| take(at, charge));
        }
    }
}
