//! What takes nothing writes nothing: the value and when it ends stay as they are.

use super::{Answer, Ask, Bench};
use crate::algorithm::laws::plans::plans;
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::redis::keys::Stored;
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::time::Timestamp;

/// No state ends as late as this, so the thread that wrote it has ended it earlier.
const LATE_MS: i64 = 40_000_000;

fn value(bench: &mut Bench, stored: &Stored, what: &str) -> Vec<u8> {
    let left: i64 = redis::cmd("PTTL").arg(&*stored.bytes).query(&mut bench.connection).unwrap();
    assert!(left > LATE_MS / 2, "{what} wrote: it ends in {left} ms");
    redis::cmd("DUMP").arg(&*stored.bytes).query(&mut bench.connection).unwrap()
}

#[test]
fn charges_that_take_nothing_leave_the_value_as_it_is() {
    let mut bench = Bench::start();
    let mut number = 0;
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    for from in plans(5) {
        let same = [from];
        let proportional = plans(3).into_iter().filter_map(|plan| plan.in_proportion().ok());
        for to in same.into_iter().chain(plans(3)).chain(proportional) {
            number += 1;
            let key = Key::of(number).unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let stored = bench.space.key(&before, &key);
            let ask = |policy, cost, effect, peek| {
                let charge = Charge::new(policy, &key).cost(cost).effect(effect);
                let charges = std::iter::once((&charge, &stored));
                if peek { Ask::peek(charges) } else { Ask::take(charges) }
            };
            let first = ask(&before, from.capacity().min(5), Effect::Enforce, false);
            bench.ask(&[(now, &first, false)]);
            let _: () = redis::cmd("PEXPIRE").arg(&*stored.bytes).arg(LATE_MS).query(&mut bench.connection).unwrap();
            let kept = value(&mut bench, &stored, "");
            let refund = Refund::new(after.clone(), key.clone(), Receipt::new(3, 1, 0));
            for (what, idle) in [
                ("a peek", ask(&after, 1, Effect::Enforce, true)),
                ("a peek of too much", ask(&after, 99, Effect::Enforce, true)),
                ("a look", ask(&after, 0, Effect::Enforce, false)),
                ("a forced look", ask(&after, 0, Effect::Force, false)),
                ("a denied take", ask(&after, 99, Effect::Enforce, false)),
                ("an observed denial", ask(&after, 99, Effect::Observe, false)),
                ("a refund of nothing", Ask::refund(vec![(refund, bench.space.key(&after, &key))])),
            ] {
                for full in [false, true] {
                    let answer = bench.ask(&[(now, &idle, full)]).remove(0);
                    assert!(matches!(answer, Answer::Decided(_) | Answer::Done), "{answer:?}");
                    let what = format!("{what} of {to}, under {from},");
                    assert!(value(&mut bench, &stored, &what) == kept, "{what} wrote");
                }
            }
        }
    }
}
