//! tower-ratelimit's limiter, with and without leases.

use std::time::Duration;

use tower_ratelimit::{
    Key, Policy, Quota, RedisLimiter,
    limiter::{Charge, Limiter},
};

use super::contender::{Connecting, RedisContender, remote};

pub struct Ours {
    pub leases: bool,
}

impl RedisContender for Ours {
    fn name(&self) -> &'static str {
        if self.leases { "tower-ratelimit, leases" } else { crate::contenders::NAME }
    }

    fn connect<'a>(&'a self, url: &'a str, denied: bool) -> Connecting<'a> {
        Box::pin(async move {
            let name = if self.leases { "leased" } else { "bench" };
            let quota = if denied { Quota::per_hour(1) } else { Quota::per_second(1_000_000) };
            let policy = Policy::new(name, quota).expect("a good name");
            // No check times out while another contender has the processor.
            let builder = RedisLimiter::builder().deadline(Duration::from_secs(5));
            let builder = if self.leases { builder.lease_units(10_000) } else { builder };
            let limiter = builder.connect(url).await.expect("the server is there");
            remote(move |key| {
                let key = Key::of(key).unwrap_or(Key::global());
                let answer = limiter.take(&[Charge::new(&policy, &key)]);
                async move { answer.await.expect("the server answers").is_allowed() }
            })
        })
    }
}
