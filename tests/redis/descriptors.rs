//! Descriptors of Envoy's form are decided on Redis as in memory.

use tower_ratelimit::clock::{ManualClock, Timestamp};
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::rules::{Descriptor, DescriptorLimits, DescriptorRequest, Rules};

use crate::support::memory;
use crate::support::redis_server::Server;

const FILE: &str = "
domain: d
descriptors:
- {key: window, rate_limit: {unit: minute, requests_per_unit: 10}}
- key: bucket
  rate_limit: {unit: minute, requests_per_unit: 10}
  metadata: {tower_ratelimit: {options: 'token bucket, burst 6'}}
- key: sliding
  rate_limit: {unit: minute, requests_per_unit: 10}
  metadata: {tower_ratelimit: {options: sliding window}}
- {key: shadow, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 2}}
";

/// Each step charges, looks or refunds, so that limits are reached and left again.
fn steps() -> Vec<DescriptorRequest> {
    let request = || DescriptorRequest::new("d");
    let mut steps = Vec::new();
    for round in 0..8_u64 {
        for key in ["window", "bucket", "sliding", "shadow"] {
            let of = |hits| Descriptor::new([(key, "a")]).hits(hits);
            steps.push(request().charge(of(round % 4)));
            steps.push(request().charge(of(3)).charge(Descriptor::new([("window", "b")])));
            steps.push(request().refund(of(round % 3)));
            steps.push(request().charge(of(0)).charge(Descriptor::new([("bucket", "b")])));
            steps.push(request().refund(of(1)).charge(of(2)));
        }
    }
    steps
}

async fn answers<L: Limiter>(limits: &DescriptorLimits<L>) -> Vec<String> {
    let mut answers = Vec::new();
    for step in steps() {
        let answer = limits.decide(&step).await.unwrap();
        let left = answer.statuses().iter().map(|status| {
            let decision = status.limit().unwrap().decision();
            (status.is_over_limit(), decision.remaining(), decision.wait().duration())
        });
        answers.push(format!("{step:?}: {} {:?}", answer.is_over_limit(), left.collect::<Vec<_>>()));
    }
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_decides_descriptors_as_memory_does() {
    let server = Server::start();
    let clock = ManualClock::at(Timestamp::from_micros(1_800_000_000_000_000));
    let redis = super::connected(super::patient().clock(clock.clone()).max_denials(0), &server.url()).await;
    let rules = Rules::from_text(FILE).unwrap();
    let (on_redis, in_memory) =
        (rules.descriptor_limits(redis).unwrap(), rules.descriptor_limits(memory(&clock)).unwrap());
    let (on_redis, in_memory) = (answers(&on_redis).await, answers(&in_memory).await);
    assert!(in_memory.iter().filter(|answer| answer.contains(": true [")).count() > 20, "{in_memory:#?}");
    assert_eq!(on_redis, in_memory);
}
