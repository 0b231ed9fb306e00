//! The cost of each feature: the time that a layer adds to an allowed request in an axum router.

use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::ConfigError;
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::limiter::{BoxLimiter, Limiter};
use tower_ratelimit::middleware::{IntoRule, Usage};
use tower_ratelimit::observe::{Observed, Observer};
use tower_ratelimit::{Headers, MemoryLimiter, Quota, RateLimitLayer, Rule, key};

use crate::contender::LayerSetup;
use crate::race::{Plan, Run};
use crate::report::{Better, Case};
use crate::requests::drive_app;

const PLAIN: &str = "plain: a token bucket, default headers";
const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "features, 10k addresses, in an axum router";

/// Sends requests through one application, for a profiler: `NAME COUNT`.
pub const CHILD: &str = "feature";

/// The process for a profiler.
pub fn child(arguments: &[String]) {
    let [name, count] = arguments else { panic!("a name and a number") };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _in_runtime = runtime.enter();
    let keys = 1_000;
    let apps = apps(keys).expect("the quotas are possible").into_iter().chain([("no layer", app())]);
    let (_, app) = apps.into_iter().find(|(of, _)| of == name).expect("a feature has this name");
    drive_app(app, &LayerSetup { keys, denied: false, headers: true })(count.parse().expect("a number"));
}

pub fn run(plan: &Plan) -> Vec<Case> {
    if !plan.is_wanted(NAME) {
        return Vec::new();
    }
    // Axum wants a runtime to be made in, and so does a timer.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _in_runtime = runtime.enter();
    let keys = plan.scaled(10_000);
    let setup = LayerSetup { keys, denied: false, headers: true };
    let mut names = Vec::new();
    let mut runs: Vec<Run<'_>> = vec![drive_app(app(), &setup)];
    for (name, app) in apps(keys).expect("the quotas are possible") {
        names.push(name);
        runs.push(drive_app(app, &setup));
    }
    for run in &mut runs {
        run(2 * keys as u64);
    }
    let added = plan.race(&mut runs).beyond_first();
    let mut case = Case::new(NAME.to_owned(), "ns added", Better::Lower, PLAIN, names, &added.medians());
    case.steadiness(&added);
    vec![case.told()]
}

/// Counts nothing.
struct Silent;

impl Observer for Silent {
    fn on_outcome(&self, _: &Observed<'_>) {}
}

fn app() -> Router {
    Router::new().route("/", get(|| async { "hello" }))
}

/// An application that states what each request cost.
fn billing() -> Router {
    let state = |axum::Extension(usage): axum::Extension<Usage>| async move {
        usage.set(1);
        "hello"
    };
    Router::new().route("/", get(state))
}

fn memory(keys: usize) -> MemoryLimiter {
    let builder = MemoryLimiter::builder().max_keys(8 * keys).min_entries(500 * keys);
    builder.build().expect("the setup is possible")
}

fn apps(keys: usize) -> Result<Vec<(&'static str, Router)>, ConfigError> {
    fn with<L: Limiter + Clone + 'static>(limiter: L, rule: impl IntoRule) -> RateLimitLayer<L> {
        RateLimitLayer::new(limiter, rule, key::peer_ip())
    }
    let bucket = || Rule::new("bucket", Quota::per_second(10_000)).expect("a name");
    let layer = |rule: &dyn Fn() -> RateLimitLayer<MemoryLimiter>| app().layer(rule());
    let plain = || with(memory(keys), bucket());
    let of = |quota: Quota| app().layer(with(memory(keys), quota));
    let three =
        || plain().and(Quota::per_minute(500_000), key::peer_ip()).and(Quota::per_hour(20_000_000), key::peer_ip());
    let failed = |response: &http::response::Parts| response.status.is_server_error();
    let inner = || with(memory(keys), Rule::new("inner", Quota::per_second(10_000)).expect("a name"));
    Ok(vec![
        (PLAIN, layer(&plain)),
        ("no headers", app().layer(plain().headers(Headers::none()))),
        ("three policies", app().layer(three())),
        ("three policies, no headers", app().layer(three().headers(Headers::none()))),
        ("fixed window", of(Quota::fixed_window(100_000, SECOND)?)),
        ("sliding window", of(Quota::sliding_window(100_000, SECOND)?)),
        ("sliding window of 60 buckets", of(Quota::sliding_window(500_000, 60 * SECOND)?.buckets(60)?)),
        ("sliding log of 1,000", of(Quota::sliding_log(1_000, SECOND)?)),
        ("expose_outcome", app().layer(plain().expose_outcome(true))),
        ("an observer", app().layer(plain().observer(Silent))),
        ("a BoxLimiter", app().layer(with(BoxLimiter::new(memory(keys)), bucket()))),
        ("refund_when", app().layer(with(memory(keys), bucket().charge_when(move |response| !failed(response))))),
        ("settle_by_usage", billing().layer(with(memory(keys), bucket().settle_by_usage()))),
        ("settle_by_body", app().layer(with(memory(keys), bucket().settle_by_body()))),
        (
            "a queue with delay, not full",
            app().layer(
                with(memory(keys), Quota::leaky_queue(10_000, SECOND)?.queue(5_000)?.delay_after(2_500)?)
                    .timer(TokioTimer::new()),
            ),
        ),
        ("two layers", app().layer(inner()).layer(plain())),
        ("two layers, the outer refunds", app().layer(inner()).layer(plain().refund_nested(true))),
    ])
}
