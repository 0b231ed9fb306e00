//! A limiter written from nothing: fixed windows in a `Mutex<HashMap>`.
//!
//! It implements the contract of [`Limiter`] in the simplest way and passes the conformance suite
//! at the end of this file. Unlike `MemoryLimiter` it has no memory bound within a day. It supports
//! one kind of quota: fixed windows that divide a day, without options. `Limiter::supports` says
//! so, and charges for other quotas are errors.
//!
//! ```sh
//! cargo run --example custom_limiter
//! cargo test --example custom_limiter --features conformance
//! ```

use std::collections::HashMap;
use std::fmt;
use std::future::Ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{
    Key, Policy, Quota, RateLimitLayer, Wait,
    clock::{Clock, MonotonicClock},
    key,
    limiter::{
        Charge, ChargeDecision, Decision, Effect, Limiter, Receipt, Refund, Reply, UnsupportedQuota,
        UnsupportedQuotaKind,
    },
    quota::Algorithm,
};

const DAY_US: u64 = 86_400_000_000;

/// The limiter. Clones share the counts, as the contract demands.
#[derive(Clone)]
struct Windows {
    clock: Arc<dyn Clock>,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Default)]
struct Counts {
    /// For each policy's name and key the end of the current window and the units taken in it.
    taken: HashMap<(String, Key), (u64, u64)>,
    day: u64,
}

/// The current window of one charge, before anything is taken.
struct Window {
    id: (String, Key),
    used: u64,
    limit: u64,
    ends_us: u64,
    ends_in: Duration,
}

impl Windows {
    fn new(clock: impl Clock + 'static) -> Self {
        Self { clock: Arc::new(clock), counts: Arc::default() }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Each change is one insertion, so a thread that panicked left no partial change.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn decide(&self, charges: &[Charge<'_>], take: bool) -> Decision {
        let mut counts = self.counts();
        // The clock is read under the lock, so no state is newer than the reading.
        let now_us = self.clock.now().as_micros();
        counts.sweep(now_us);
        let windows: Vec<Window> = charges.iter().map(|charge| counts.window(charge, now_us)).collect();

        let fits = |charge: &Charge<'_>, window: &Window| {
            charge.effect == Effect::Force
                || charge.cost == 0
                || charge.cost <= window.limit.saturating_sub(window.used)
        };
        let allowed = charges
            .iter()
            .zip(&windows)
            .all(|(charge, window)| charge.effect != Effect::Enforce || fits(charge, window));

        let answers: Vec<ChargeDecision> = charges
            .iter()
            .zip(windows)
            .map(|(charge, window)| {
                let left = window.limit.saturating_sub(window.used);
                if !fits(charge, &window) {
                    let wait = if charge.cost > window.limit { Wait::Never } else { Wait::After(window.ends_in) };
                    return ChargeDecision::denied(window.limit, left, wait).with_reset_after(window.ends_in);
                }
                if !allowed {
                    return ChargeDecision::allowed(window.limit, left).with_effective_window(window.ends_in);
                }
                // Forced charges go into debt, at most by the quota's capacity, unless more was used under another quota.
                let used = window.used.saturating_add(charge.cost).min(window.used.max(2 * window.limit));
                let answer = ChargeDecision::allowed(window.limit, window.limit.saturating_sub(used))
                    .with_reset_after(window.ends_in)
                    .with_effective_window(window.ends_in);
                if !take || charge.cost == 0 {
                    return answer;
                }
                counts.taken.insert(window.id, (window.ends_us, used));
                // A forced charge may have asked for more than it took.
                answer.with_receipt(Receipt::new(used - window.used, window.ends_us, 0))
            })
            .collect();
        Decision::new(allowed, answers)
    }
}

impl Counts {
    fn window(&self, charge: &Charge<'_>, now_us: u64) -> Window {
        let quota = charge.policy.quota();
        let period_us = u64::try_from(quota.period().as_micros()).unwrap_or(DAY_US).max(1);
        let ends_us = now_us - now_us % period_us + period_us;
        let id = (charge.policy.name().to_owned(), charge.key.clone());
        // The quota may have been changed since. Units of a window of another length count until
        // that window ends.
        let used = self.taken.get(&id).filter(|(ends_us, _)| now_us < *ends_us).map_or(0, |(_, used)| *used);
        Window { id, used, limit: quota.limit(), ends_us, ends_in: Duration::from_micros(ends_us - now_us) }
    }

    /// Forgets everything when a new day begins, because every window that divides the day has
    /// ended.
    fn sweep(&mut self, now_us: u64) {
        let day = now_us / DAY_US;
        if day > self.day {
            self.taken.clear();
            self.day = day;
        }
    }
}

/// The error of a charge that the limiter does not support.
#[derive(Debug)]
enum Unsupported {
    Quota(UnsupportedQuota),
    Effect(Effect),
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quota(unsupported) => unsupported.fmt(f),
            Self::Effect(effect) => write!(f, "this limiter does not support charges of the effect {effect:?}"),
        }
    }
}

impl std::error::Error for Unsupported {}

/// Returns an error for a charge that the limiter does not support. Such a charge is never ignored.
fn known(charges: &[Charge<'_>]) -> Result<(), Unsupported> {
    for charge in charges {
        supported(charge.policy.quota()).map_err(Unsupported::Quota)?;
        if !matches!(charge.effect, Effect::Enforce | Effect::Observe | Effect::Force) {
            return Err(Unsupported::Effect(charge.effect));
        }
    }
    Ok(())
}

fn supported(quota: &Quota) -> Result<(), UnsupportedQuota> {
    let unsupported = |kind, reason| Err(UnsupportedQuota::new(kind, quota, reason));
    if quota.algorithm() != Algorithm::FixedWindow {
        return unsupported(UnsupportedQuotaKind::Algorithm, "it has fixed windows only, use Quota::fixed_window");
    }
    if u128::from(DAY_US) % quota.period().as_micros() != 0 {
        return unsupported(UnsupportedQuotaKind::Option, "its periods must divide a day");
    }
    if Quota::fixed_window(quota.limit(), quota.period()).as_ref() != Ok(quota) {
        return unsupported(UnsupportedQuotaKind::Option, "it has no options, use Quota::fixed_window alone");
    }
    Ok(())
}

impl Limiter for Windows {
    type Error = Unsupported;
    type Future<T: Send + 'static> = Ready<Result<T, Unsupported>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Unsupported, Self::Future<Decision>> {
        Reply::Now(known(charges).map(|()| self.decide(charges, true)))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Unsupported, Self::Future<Decision>> {
        Reply::Now(known(charges).map(|()| self.decide(charges, false)))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Unsupported, Self::Future<()>> {
        let mut counts = self.counts();
        for refund in refunds {
            let id = (refund.policy.name().to_owned(), refund.key);
            // The units of a window that has ended are available again already.
            if let Some((ends_us, used)) = counts.taken.get_mut(&id) {
                if *ends_us == refund.receipt.at_us() {
                    *used = used.saturating_sub(refund.receipt.units());
                }
            }
        }
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Unsupported, Self::Future<()>> {
        self.counts().taken.remove(&(policy.name().to_owned(), key.clone()));
        Reply::Now(Ok(()))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        supported(quota)
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let quota = Quota::fixed_window(10, Duration::from_secs(60)).expect("a minute divides a day");
    let limit = RateLimitLayer::new(Windows::new(MonotonicClock::new()), quota, key::global());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");
    axum::serve(listener, app).await
}

#[cfg(all(test, feature = "conformance"))]
mod tests {
    use std::time::Duration;

    use tower_ratelimit::clock::ManualClock;
    use tower_ratelimit::conformance::{Subject, check};

    use super::Windows;

    struct Mine(ManualClock);

    impl Subject for Mine {
        type Limiter = Windows;

        async fn limiter(&self) -> Windows {
            Windows::new(self.0.clone())
        }

        async fn advance(&self, by: Duration) {
            self.0.advance(by);
        }
    }

    #[tokio::test]
    async fn custom_limiter_keeps_every_promise() {
        let report = check(&Mine(ManualClock::new())).await.unwrap_or_else(|failures| panic!("{failures}"));
        println!("{report}");
        assert_eq!(report.tested().len(), 2, "{report}");
    }
}
