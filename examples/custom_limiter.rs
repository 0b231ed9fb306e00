//! A limiter from nothing: fixed windows in a `Mutex<HashMap>`.
//!
//! It implements the whole contract of [`Limiter`], in the plainest way. What it lacks beside
//! `MemoryLimiter`: its memory has no bound within a day, it knows one algorithm, whatever limit a quota asks for, and its
//! quotas may not be longer than a day. It has no blocks and no meters, and says so instead of passing over them.
//!
//! ```sh
//! cargo run --example custom_limiter
//! ```

use std::collections::HashMap;
use std::fmt;
use std::future::Ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{
    Algorithm, Charge, ChargeDecision, Clock, Decision, Effect, Key, Limiter, MonotonicClock, Policy, Quota,
    RateLimitLayer, Receipt, Refund, Reply, key,
};

/// Clones share the windows, as the contract demands: they are behind one `Arc`.
#[derive(Clone)]
struct Windows {
    clock: MonotonicClock,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Default)]
struct Counts {
    /// Units taken, by policy and key, with the number of the window since the epoch in which they were.
    taken: HashMap<(String, Key), (u64, u64)>,
    day: u64,
}

/// One charge as it stands before anything is taken.
struct Standing {
    id: (String, Key),
    window: u64,
    used: u64,
    limit: u64,
    ends_in: Duration,
}

impl Windows {
    fn new() -> Self {
        Self { clock: MonotonicClock::new(), counts: Arc::default() }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Each change is one insertion, so a thread that panicked left nothing half done.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn decide(&self, charges: &[Charge<'_>], take: bool) -> Decision {
        let now_us = self.clock.now().as_micros();
        let mut counts = self.counts();
        counts.sweep(now_us);
        let standings: Vec<Standing> = charges.iter().map(|charge| counts.standing(charge, now_us)).collect();

        let fits = |charge: &Charge<'_>, standing: &Standing| {
            charge.effect == Effect::Force
                || charge.cost == 0
                || charge.cost <= standing.limit.saturating_sub(standing.used)
        };
        let allowed = charges
            .iter()
            .zip(&standings)
            .all(|(charge, standing)| charge.effect != Effect::Enforce || fits(charge, standing));

        let answers: Vec<ChargeDecision> = charges
            .iter()
            .zip(standings)
            .map(|(charge, standing)| {
                let left = standing.limit.saturating_sub(standing.used);
                if !fits(charge, &standing) {
                    let helps = charge.cost <= standing.limit;
                    return ChargeDecision::denied(standing.limit, left, helps.then_some(standing.ends_in))
                        .with_reset_after(standing.ends_in);
                }
                if !allowed {
                    return ChargeDecision::allowed(standing.limit, left).with_effective_window(standing.ends_in);
                }
                let used = standing.used.saturating_add(charge.cost);
                let answer = ChargeDecision::allowed(standing.limit, standing.limit.saturating_sub(used))
                    .with_reset_after(standing.ends_in)
                    .with_effective_window(standing.ends_in);
                if !take || charge.cost == 0 {
                    return answer;
                }
                counts.taken.insert(standing.id, (standing.window, used));
                answer.with_receipt(&Receipt::new(charge.cost, now_us, standing.window))
            })
            .collect();
        Decision::new(allowed, answers)
    }
}

impl Counts {
    fn standing(&self, charge: &Charge<'_>, now_us: u64) -> Standing {
        let period_us = u64::try_from(charge.policy.quota().period().as_micros()).unwrap_or(u64::MAX).max(1);
        let window = now_us / period_us;
        let id = (charge.policy.name().to_owned(), charge.key.clone());
        let used = self.taken.get(&id).filter(|taken| taken.0 == window).map_or(0, |taken| taken.1);
        let ends_in = Duration::from_micros(period_us - now_us % period_us);
        Standing { id, window, used, limit: charge.policy.quota().limit(), ends_in }
    }

    /// Forgets everything when a new day begins: every window of a day or less that divides the day has ended then.
    fn sweep(&mut self, now_us: u64) {
        let day = now_us / 86_400_000_000;
        if day > self.day {
            self.taken.clear();
            self.day = day;
        }
    }
}

/// The limiter was asked for what it does not have.
#[derive(Debug)]
struct NotHere;

impl fmt::Display for NotHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this limiter has neither blocks nor meters nor charges on refusal: use `MemoryLimiter`")
    }
}

impl std::error::Error for NotHere {}

/// What a limiter does not know it must not pass over.
fn known(charges: &[Charge<'_>]) -> Result<(), NotHere> {
    let is_known = |charge: &Charge<'_>| {
        let effect = matches!(charge.effect, Effect::Enforce | Effect::Observe | Effect::Force);
        effect && !matches!(charge.policy.quota().algorithm(), Algorithm::Block | Algorithm::Meter)
    };
    if charges.iter().all(is_known) { Ok(()) } else { Err(NotHere) }
}

impl Limiter for Windows {
    type Error = NotHere;
    type Future<T: Send + 'static> = Ready<Result<T, NotHere>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, NotHere, Self::Future<Decision>> {
        Reply::Now(known(charges).map(|()| self.decide(charges, true)))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, NotHere, Self::Future<Decision>> {
        Reply::Now(known(charges).map(|()| self.decide(charges, false)))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), NotHere, Self::Future<()>> {
        let mut counts = self.counts();
        for refund in refunds {
            let id = (refund.policy.name().to_owned(), refund.key);
            // What was taken in a window that has passed is given back already.
            if let Some((window, used)) = counts.taken.get_mut(&id) {
                if *window == refund.receipt.part() {
                    *used = used.saturating_sub(refund.receipt.units());
                }
            }
        }
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), NotHere, Self::Future<()>> {
        self.counts().taken.remove(&(policy.name().to_owned(), key.clone()));
        Reply::Now(Ok(()))
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let limit = RateLimitLayer::new(Windows::new(), Quota::per_minute(10), key::global());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");
    axum::serve(listener, app).await
}
