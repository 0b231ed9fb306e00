//! Replies of Redis with anything in them: an error, or a decision within its bounds.
#![no_main]

mod support;

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use redis::aio::ConnectionLike;
use redis::{Arg, Cmd, Pipeline, RedisFuture, Value};
use tower_ratelimit::limiter::{Charge, Limiter, Refund};
use tower_ratelimit::{Key, Policy, RedisLimiter};

use support::{RUNTIME, quotas};

static POLICIES: LazyLock<Vec<Policy>> = LazyLock::new(|| {
    quotas().into_iter().enumerate().map(|(at, quota)| Policy::new(format!("p{at}"), quota).expect("a name")).collect()
});

/// A connection whose replies are given.
#[derive(Clone)]
struct Given(Arc<Mutex<VecDeque<Vec<u8>>>>);

impl Given {
    /// Returns the next reply to a call of the script. A reply has the call's number first, so most replies are given
    /// it.
    fn reply(&self, command: &Cmd) -> redis::RedisResult<Value> {
        let arguments: Vec<&[u8]> = command
            .args_iter()
            .map(|argument| match argument {
                Arg::Simple(bytes) => bytes,
                _ => &[],
            })
            .collect();
        let keys = arguments.get(2).and_then(|count| std::str::from_utf8(count).ok()?.parse::<usize>().ok());
        let number = keys.and_then(|keys| arguments.get(4 + keys)).filter(|number| number.len() == 8);
        let Some(number) = number else { return Ok(Value::BulkString(Vec::new())) }; // that of the rights
        let Some(reply) = self.0.lock().expect("no thread panics").pop_front() else { return Ok(Value::Nil) };
        match reply.split_first() {
            Some((0xff, raw)) => redis::parse_redis_value(raw),
            _ => Ok(Value::BulkString([*number, &*reply].concat())),
        }
    }
}

impl ConnectionLike for Given {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async { self.reply(command) })
    }

    fn req_packed_commands<'a>(&'a mut self, _: &'a Pipeline, _: usize, _: usize) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn get_db(&self) -> i64 {
        0
    }
}

async fn ask(which: u8, replies: VecDeque<Vec<u8>>) {
    let given = Given(Arc::new(Mutex::new(replies)));
    let limiter =
        RedisLimiter::builder().deadline(Duration::from_secs(5)).over(given).await.expect("it has the rights");
    let one = &POLICIES[usize::from(which) % POLICIES.len()];
    let other = &POLICIES[usize::from(which / 16) % POLICIES.len()];
    let key = Key::global();
    let mut charges = vec![Charge::new(one, &key).cost(2)];
    if one != other {
        charges.push(Charge::new(other, &key));
    }
    if let Ok(decision) = limiter.peek(&charges).await {
        assert_eq!(decision.charges().len(), charges.len());
    }
    let mut receipts = Vec::new();
    if let Ok(mut decision) = limiter.take(&charges).await {
        assert!(decision.charges().iter().all(|charge| charge.remaining() <= charge.limit()), "{decision:?}");
        receipts = decision.take_receipts().into_iter().collect();
    }
    let refund = |(receipt, policy): (Option<_>, &Policy)| Some(Refund::new(policy.clone(), key.clone(), receipt?));
    let _ = limiter.refund(receipts.into_iter().zip([one, other]).filter_map(refund).collect()).await;
    let _ = limiter.reset(one, &key).await;
    limiter.close();
}

// The first byte chooses the policies. Each reply begins with its length.
fuzz_target!(|bytes: &[u8]| {
    let Some((which, mut rest)) = bytes.split_first() else { return };
    let mut replies = VecDeque::new();
    while let Some((length, after)) = rest.split_first() {
        let (reply, after) = after.split_at(usize::from(*length).min(after.len()));
        replies.push_back(reply.to_vec());
        rest = after;
    }
    RUNTIME.block_on(ask(*which, replies));
});
