//! Rules from a file beside the same rules in code.
//!
//! `cargo bench --features rules --bench rules`
//!
//! The file has ten thousand rules, of which a request matches three. The layer in code has only those three. They cost
//! different things: the index of paths finds the three rules, which the layer in code applies without asking.
//!
//! On a busy machine of two shared processors (Xeon, 2.5 GHz, rustc 1.95, LTO) the file was loaded in 0.08 s, and a
//! request cost 1.19 times as much as with the layer in code, with ten thousand rules in the file and with three.

mod support;

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::hint::black_box;
use std::time::Instant;

use axum::body::Body;
use http::{Request, Response};
use support::{Contender, Numbers, is_smoke, median, print_case, race};
use tower::{Layer, Service};
use tower_ratelimit::rules::Rules;
use tower_ratelimit::{Head, MemoryLimiter, Quota, RateLimitLayer, Rule};

const RULES: usize = 10_000;
const CLIENTS: u64 = 10_000;
/// The rules that a request matches, and which of three thousand paths it has.
const PATH: &str = "/v1/1234/orders";

#[derive(Clone, Copy)]
struct Client(u64);

fn client(parts: &Head<'_>) -> Option<u64> {
    parts.extensions.get().map(|Client(number)| *number)
}

/// Returns a file. Every three rules have a path in common.
fn file(rules: usize) -> String {
    let mut text = "rules:\n".to_owned();
    for rule in 0..rules {
        let quota = ["1000000 per second", "100000000 per minute", "1000000000 per hour"][rule % 3];
        let of = 1_234 + rule / 3;
        text += &format!(
            "  - {{name: rule-{rule}, quota: {quota}, key: client, match: {{path: '/v1/{of}/{{resource}}'}}}}\n"
        );
    }
    text
}

fn rules(text: &str) -> Rules {
    Rules::builder().key("client", client).read_text(text).expect("the file is valid")
}

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::default()))
}

fn contender<'a>(name: &'static str, layer: &RateLimitLayer<MemoryLimiter>) -> Contender<'a> {
    let mut service = layer.layer(tower::service_fn(answer));
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime can be built");
    Contender::new(name, move |count| {
        runtime.block_on(async {
            for _ in 0..count {
                let mut request = Request::get(PATH).body(Body::empty()).expect("the request is valid");
                request.extensions_mut().insert(Client(numbers.below(CLIENTS)));
                let response = service.call(request).await.expect("the service is infallible");
                assert!(response.status().is_success());
                black_box(&response);
            }
        });
    })
}

#[expect(clippy::disallowed_methods, reason = "a bench reads the clock")]
fn main() {
    let text = file(RULES);
    let times = (0..if is_smoke() { 1 } else { 9 }).map(|_| {
        let started = Instant::now();
        black_box(rules(&text));
        started.elapsed().as_secs_f64()
    });
    println!("{RULES} rules, {} KiB: loaded in {:.3} s", text.len() / 1024, median(times.collect()));

    let limiter = || MemoryLimiter::builder().max_keys(100_000).build().expect("the capacity is possible");
    let quotas = [Quota::per_second(1_000_000), Quota::per_minute(100_000_000), Quota::per_hour(1_000_000_000)];
    let [first, second, third] =
        [0, 1, 2].map(|at| Rule::new(format!("rule-{at}"), quotas[at]).expect("the name is possible"));
    let in_code = RateLimitLayer::new(limiter(), first, client).and(second, client).and(third, client);
    let layer = |rules: usize| self::rules(&file(rules)).layer(limiter()).expect("the limiter supports the quotas");
    let mut contenders = [
        contender("three rules in code", &in_code),
        contender("three rules in a file", &layer(3)),
        contender("three of ten thousand rules in a file", &layer(RULES)),
    ];
    let times = race(&mut contenders);
    print_case("a request that three rules count, in 10k keys", &contenders, &times);
}
