//! The usual request of several policies of which nobody is told, once it has passed: all that is kept of it is what it took.
//!
//! Charges and answers have room for several, and so are large. Here a key is written once, to where it stays until the
//! request has its response, and of the limiter's answer only the receipts are moved.

use std::sync::atomic::Ordering;

use http::request::Parts;
use smallvec::SmallVec;

use super::bound::Asked;
use super::charging::Shared;
use super::decided::{Asking, Charges, Owed, Owing, OwnedCharge};
use crate::decision::{self, Receipt};
use crate::limiter::{Charge, Limiter};
use crate::mode::Mode;

impl<L: Limiter> Shared<L> {
    /// Whether nobody is told of a request that passes, and each of several rules is enforced as it is.
    #[inline(always)]
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet && !self.is_screened.load(Ordering::Relaxed)
    }

    /// Moves the charges of a request to `owed`; something else becomes of it if there are none, or a key is missing.
    #[inline(always)]
    fn ask_quietly(&self, parts: &Parts, owed: &mut Owing) -> Option<Asking> {
        for bound in &self.settings.rules {
            let (key, cost) = match bound.ask(parts) {
                Asked::Charge { key, cost } => (key, cost),
                Asked::Nothing | Asked::Exempt => continue,
                Asked::Key => return Some(Asking::Unkeyed(Mode::Enforce)),
            };
            let charged = bound.charged(parts);
            let last = charged.end.saturating_sub(1);
            for policy in charged.start..last {
                owed.push(Owed::asked(policy, key.clone(), cost));
            }
            owed.push(Owed::asked(last, key, cost));
        }
        owed.is_empty().then_some(Asking::Exempt)
    }

    /// Takes what a request is charged, which then is in `owed`; or says what to do instead, and has taken nothing.
    #[inline(never)]
    pub(super) fn take_quietly(&self, parts: &Parts, owed: &mut Owing) -> Option<Asking> {
        if let Some(asking) = self.ask_quietly(parts, owed) {
            return Some(asking);
        }
        let mut receipts = [Receipt::NOTHING; decision::INLINE];
        if self.take_asked(owed, &mut receipts) {
            settle_on(owed, receipts);
            return None;
        }
        Some(Asking::Charges(asked_for(owed)))
    }

    #[inline(always)]
    fn take_asked(&self, owed: &Owing, receipts: &mut [Receipt]) -> bool {
        let Some(receipts) = receipts.get_mut(..owed.len()) else { return false };
        let mut charges: SmallVec<[Charge<'_>; decision::INLINE]> = SmallVec::new();
        for owed in owed {
            if let Some(policy) = self.policy(owed.policy) {
                charges.push(Charge::new(policy, &owed.key).cost(owed.receipt.units()));
            }
        }
        self.limiter.take_quietly(&charges, receipts)
    }
}

/// Moves the receipts over. What took nothing owes nothing.
#[inline(always)]
fn settle_on(owed: &mut Owing, receipts: [Receipt; decision::INLINE]) {
    let mut all = true;
    for (owed, receipt) in owed.iter_mut().zip(receipts) {
        all &= receipt.units() > 0;
        owed.receipt = receipt;
    }
    if !all {
        owed.retain(|owed| owed.receipt.units() > 0);
    }
}

/// The charges that were asked for.
#[cold]
#[inline(never)]
fn asked_for(owed: &mut Owing) -> Charges {
    let mut charges: SmallVec<[OwnedCharge; decision::INLINE]> = owed.drain(..).map(OwnedCharge::asked_for).collect();
    match charges.pop() {
        Some(charge) if charges.is_empty() => Charges::One(charge),
        last => {
            charges.extend(last);
            Charges::Several(charges)
        }
    }
}
