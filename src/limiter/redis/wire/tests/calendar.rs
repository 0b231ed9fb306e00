//! Windows of the calendar, which a call names and a script does not know.

use crate::clock::wall_now;
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::{Charge, Refund};
use crate::policy::Policy;
use crate::quota::Quota;

use super::{Answered, Bench, CallTime, NUMBER, RedisAnswer, WireOperation, WireRequest, call, decoded};
use crate::base::time::Timestamp;

const MONTH_US: u64 = 40 * 86_400_000_000;

fn is_outside(answer: &Answered) -> bool {
    let Ok(RedisAnswer::Outside(now)) = answer else { return false };
    now.as_micros().abs_diff(wall_now().as_micros()) < 60_000_000
}

#[test]
fn window_that_is_not_the_servers_is_answered_and_not_written() {
    let mut bench = Bench::start();
    let key = Key::of("many").unwrap();
    let [monthly, minutely] = [Quota::per_calendar_month(5), Quota::per_minute(5)]
        .map(|quota| Policy::new(format!("p{}", quota.period().as_secs()), quota).unwrap());
    let stored = [&monthly, &minutely].map(|policy| bench.space.key(policy, &key));
    let charges = [&monthly, &minutely].map(|policy| Charge::new(policy, &key));
    let take = |places: &[usize]| {
        let chosen = places.iter().map(|place| (&charges[*place], &stored[*place]));
        WireRequest::charge(WireOperation::Take, chosen)
    };
    let receipt = Receipt::new(1, wall_now().as_micros(), 0);
    let refund = WireRequest::refund(&Refund::new(monthly.clone(), key.clone(), receipt), &stored[0]);
    let (lone, set, other) = (take(&[0]), take(&[1, 0]), take(&[1]));
    let mut ask = |requests: &[&WireRequest], time: CallTime| {
        let reply = bench.run(&[call(requests, NUMBER, time)]).remove(0);
        let kept: u64 = redis::cmd("DBSIZE").query(&mut bench.connection).unwrap();
        (decoded(requests, &reply), kept)
    };
    let now = wall_now().as_micros();
    for wrong in [0, now - MONTH_US, now + MONTH_US].map(|us| CallTime::OfServer(Timestamp::from_micros(us))) {
        for request in [&lone, &set, &refund] {
            let (answers, kept) = ask(&[request], wrong);
            assert!(answers.iter().all(is_outside) && kept == 0, "{answers:?}, and {kept} keys");
        }
    }
    // Requests of other quotas in the same call are decided.
    let wrong = CallTime::OfServer(Timestamp::from_micros(now - MONTH_US));
    let (answers, kept) = ask(&[&other, &set, &lone], wrong);
    assert!(matches!(answers[0], Ok(RedisAnswer::Decided(_))) && answers[1..].iter().all(is_outside) && kept == 1);
    let (answers, kept) = ask(&[&lone, &set], CallTime::OfServer(wall_now()));
    assert!(answers.iter().all(|answer| matches!(answer, Ok(RedisAnswer::Decided(_)))) && kept == 2, "{answers:?}");
}
