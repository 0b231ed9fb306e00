//! The laws of the algorithms, as properties over random schedules, and step for step against the oracle.
//!
//! A schedule mixes takes, looks, forced charges, refunds, changes of quota, and time that stands, creeps, jumps to the
//! edges that were reported, idles for years, or steps back. [`run::Run`] plays it on one key and checks after each
//! step; laws that need a schedule of their own follow below.

mod drift;
pub(crate) mod key;
pub(crate) mod plans;
mod proportion;
pub(crate) mod quotas;
mod refunds;
pub(crate) mod run;
mod stories;

use proptest::prelude::*;

use crate::base::sampling::config;
use crate::base::wait::Wait;
use crate::quota::{Algorithm, Anchor};

use key::State;
use quotas::{quota, shapes};
use run::{Run, Step, steps};

/// Random schedules of each algorithm.
const SCHEDULES: u32 = 10_000;

/// The instants at which time begins: the epoch, near it, today, and the last year that is exact.
pub(crate) fn beginnings() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0..100_u64, 1_790_000_000_000_000..1_800_000_000_000_000_u64, Just(5_680_000_000_000_000)]
}

/// The actions of a schedule besides takes and looks.
#[derive(Clone, Copy, Debug)]
enum Mix {
    Nothing,
    /// Forced charges, refunds and changes of quota.
    Everything,
    /// All that, and a clock that steps back.
    EverythingAndBackwards,
}

fn mixes() -> impl Strategy<Value = Mix> {
    prop_oneof![Just(Mix::Nothing), Just(Mix::Everything), Just(Mix::EverythingAndBackwards)]
}

fn play(algorithm: Algorithm, anchor: Anchor, shape: &[u64; 6], begin: u64, steps: &[Step], mix: Mix) {
    let mut run = Run::new(quota(algorithm, anchor, shape), begin);
    for step in steps {
        run.step(&match mix {
            Mix::Nothing => step.only_takes().only_forwards(),
            Mix::Everything => step.only_forwards(),
            Mix::EverythingAndBackwards => *step,
        });
    }
    run.check_safety();
}

/// Calls a macro with each algorithm whose units come back with time, and each anchor. The laws hold for all of them,
/// and their Lua twins agree with them.
macro_rules! for_each_algorithm {
    ($call:ident) => {
        $call! {
            token_bucket: TokenBucket, Epoch;
            gcra: Gcra, Epoch;
            leaky_bucket: LeakyBucket, Epoch;
            leaky_queue: LeakyQueue, Epoch;
            step_bucket_of_the_epoch: StepBucket, Epoch;
            step_bucket_of_the_first_request: StepBucket, FirstRequest;
            fixed_window_of_the_epoch: FixedWindow, Epoch;
            fixed_window_of_the_first_request: FixedWindow, FirstRequest;
            sliding_window: SlidingWindow, Epoch;
            sliding_log: SlidingLog, Epoch;
            block: Block, FirstRequest;
            meter: Meter, Epoch;
        }
    };
}
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) use for_each_algorithm;

macro_rules! laws {
    ($($name:ident: $algorithm:ident, $anchor:ident;)*) => {$(
        mod $name {
            use super::*;

            const ALGORITHM: Algorithm = Algorithm::$algorithm;
            const ANCHOR: Anchor = Anchor::$anchor;

            proptest! {
                #![proptest_config(config(SCHEDULES))]

                #[test]
                fn keeps_the_laws(shape in shapes(), begin in beginnings(), steps in steps(), mix in mixes()) {
                    play(ALGORITHM, ANCHOR, &shape, begin, &steps, mix);
                }
            }

            proptest! {
                #![proptest_config(config(SCHEDULES / 5))]

                #[test]
                fn passes_exactly_its_capacity_at_once_from_rest(shape in shapes(), now in beginnings()) {
                    let quota = quota(ALGORITHM, ANCHOR, &shape);
                    let (capacity, rest) = (quota.capacity(), State::new(&quota));
                    prop_assert_eq!(rest.look(now, 0).remaining(), capacity);
                    prop_assert!(rest.admits(now, capacity), "not one fewer");
                    prop_assert_eq!(rest.look(now, capacity + 1).wait(), Wait::Never, "and never one more");
                    let mut full = rest.clone();
                    full.decide(now, capacity, false);
                    prop_assert!(!full.admits(now, 1), "not one more at the same instant");
                    let mut one_by_one = rest;
                    for _ in 0..capacity.min(50) {
                        prop_assert!(one_by_one.decide(now, 1, false).0.is_allowed());
                    }
                    prop_assert_eq!(one_by_one.admits(now, 1), capacity > 50);
                }

                #[test]
                fn a_lone_refund_is_never_laxer_than_no_take(
                    shape in shapes(), begin in beginnings(), steps in steps(), chosen in any::<prop::sample::Index>(),
                ) {
                    let quota = quota(ALGORITHM, ANCHOR, &shape);
                    // A refused request that counts, and an anchor, are what the refunded request did besides taking.
                    if !quota.counts_denied() && ANCHOR == Anchor::Epoch {
                        run::lone_refund(&quota, begin, &steps, chosen);
                    }
                }
            }
        }
    )*};
}

for_each_algorithm!(laws);

/// An algorithm that the list lacks does not compile.
macro_rules! listed {
    ($($name:ident: $algorithm:ident, $anchor:ident;)*) => {
        #[allow(unreachable_patterns, reason = "some are listed with each anchor")]
        const _: fn(Algorithm) = |algorithm| match algorithm {
            $(Algorithm::$algorithm => {})*
            Algorithm::Concurrency => {} // it has no clock: its laws are in algorithm/places.rs
        };

        const LISTED: &[(Algorithm, Anchor)] = &[$((Algorithm::$algorithm, Anchor::$anchor),)*];
    };
}

for_each_algorithm!(listed);

#[test]
fn algorithm_with_anchors_has_the_laws_for_each() {
    for algorithm in Algorithm::timed() {
        let has_anchors = quota(algorithm, Anchor::Epoch, &[0; 6]).anchor(Anchor::FirstRequest).is_ok();
        for anchor in [Anchor::Epoch, Anchor::FirstRequest] {
            let is_listed = LISTED.contains(&(algorithm, anchor));
            assert!(is_listed || !has_anchors, "no laws for a {algorithm} with {anchor:?}");
        }
    }
}
