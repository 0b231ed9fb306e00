//! The Lua files know the states of each algorithm.

use std::collections::BTreeSet;

use crate::algorithm::properties::plans::plans;
use crate::base::time::Timestamp;
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::{Charge, Refund};
use crate::policy::Policy;
use crate::quota::Quota;

use super::{Bench, WireOperation, WireRequest};

/// Names at once each part of look.lua and refund.lua that lacks an algorithm. The parity tests check what the parts
/// do.
#[test]
fn script_knows_the_states_of_each_algorithm() {
    let mut bench = Bench::start();
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    let bucket = Quota::per_minute(5);
    let (mut number, mut missing) = (0_u64, BTreeSet::new());
    for quota in plans(5) {
        for (from, to) in [(quota, quota), (quota, bucket), (bucket, quota)] {
            number += 1;
            let key = Key::of(number).unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let stored = bench.space.key(&after, &key);
            let [first, second] = [&before, &after].map(|policy| {
                WireRequest::charge(WireOperation::Take, std::iter::once((&Charge::new(policy, &key), &stored)))
            });
            let receipt = Receipt::new(1, now.as_micros(), 0);
            let refund = WireRequest::refund(&Refund::new(after.clone(), key.clone(), receipt), &stored);
            let answers = bench.ask(&[(now, &first), (now, &second), (now, &refund)]);
            missing.extend(answers.into_iter().filter_map(Result::err).map(|error| error.to_string()));
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}
