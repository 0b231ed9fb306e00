//! Files in the form of Envoy's rate limit service, decided as envoyproxy/ratelimit decides them.
//!
//! The cases are those of its README ("Examples"), `test/config` and `test/integration`, with files written anew.

use std::convert::Infallible;
use std::future::Ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::Request;
use tower::{Layer, ServiceExt};
use tower_ratelimit::clock::{ManualClock, Timestamp};
use tower_ratelimit::limiter::{Charge, Decision, Limiter, Refund, Reply};
use tower_ratelimit::observe::{Observed, Observer, Outcome, OutcomeKind, RulesEvent};
use tower_ratelimit::rules::{
    Descriptor, DescriptorAnswer, DescriptorLimits, DescriptorRequest, Rules, RulesErrorKind,
};
use tower_ratelimit::{Headers, Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Wait, key};

use crate::support::waiting::at_once;
use crate::support::{Scripted, memory};
use crate::switch::Buckets;

/// Limits over a clock that stands at the beginning of a window of every unit but the week.
struct World {
    clock: ManualClock,
    limits: DescriptorLimits<MemoryLimiter>,
}

impl World {
    fn new(file: &str) -> Self {
        let clock = ManualClock::new();
        let limits = Rules::from_text(file).unwrap().descriptor_limits(memory(&clock)).unwrap();
        Self { clock, limits }
    }

    fn decide(&self, request: &DescriptorRequest) -> DescriptorAnswer {
        at_once(self.limits.decide(request)).unwrap()
    }

    /// Charges descriptors that are written like `path=/a,user=b`.
    fn charge(&self, descriptors: &[&str]) -> DescriptorAnswer {
        self.decide(&request(&self.limits.domain(), descriptors))
    }

    /// Charges one descriptor. Returns its limit and what remains, or `None` if it has no limit.
    fn left(&self, descriptor: &str) -> Option<(u64, u64)> {
        left(&self.charge(&[descriptor]), 0)
    }

    /// Returns how many of some calls pass.
    fn passes(&self, calls: usize, descriptors: &[&str]) -> usize {
        (0..calls).filter(|_| !self.charge(descriptors).is_over_limit()).count()
    }
}

/// February, by the limiter's clock. Now may be another month.
#[test]
fn headers_of_descriptors_have_the_window_of_the_limiters_clock() {
    let world = World::new("domain: edge\ndescriptors:\n- {key: other, rate_limit: {unit: day, requests_per_unit: 1}}");
    world.clock.set(Timestamp::from_micros(1_739_145_600_000_000)); // 2025-02-10
    let client = Descriptor::new([("client", "a")]);
    let request = DescriptorRequest::new("edge").charge_under(client, Quota::per_calendar_month(5));
    let headers = world.decide(&request).headers(&Headers::draft_11());
    let value = |name: &str| headers[name].to_str().unwrap().split_once(';').unwrap().1.to_owned();
    assert_eq!(value("ratelimit-policy"), format!("q=5;w={}", 28 * 86_400));
    assert_eq!(value("ratelimit"), format!("r=4;t={}", 19 * 86_400));
}

fn descriptor(text: &str) -> Descriptor {
    Descriptor::new(text.split(',').filter(|entry| !entry.is_empty()).map(|entry| entry.split_once('=').unwrap()))
}

fn request(domain: &str, descriptors: &[&str]) -> DescriptorRequest {
    descriptors.iter().fold(DescriptorRequest::new(domain), |request, one| request.charge(descriptor(one)))
}

fn left(answer: &DescriptorAnswer, at: usize) -> Option<(u64, u64)> {
    let decision = answer.statuses()[at].limit()?.decision();
    Some((decision.limit(), decision.remaining()))
}

const BASIC: &str = "
domain: shop
descriptors:
  - key: method
    value: POST
    descriptors:
      - {key: tenant, rate_limit: {unit: second, requests_per_unit: 5}}
      - {key: tenant, value: acme, rate_limit: {unit: second, requests_per_unit: 10}}
  - {key: tenant, rate_limit: {unit: minute, requests_per_unit: 20}}
  - {key: tenant, value: acme, rate_limit: {unit: minute, requests_per_unit: 30}}
  - {key: tenant, value: internal}
  - {key: hourly, rate_limit: {unit: HOUR, requests_per_unit: 1}}
  - {key: daily, rate_limit: {unit: day, requests_per_unit: 1}}
  - key: plan
    value: gold
    rate_limit: {unit: day, requests_per_unit: 15}
    descriptors: [{key: feature, value: export, rate_limit: {unit: day, requests_per_unit: 25}}]
  - {key: open, rate_limit: {unlimited: true}}
  - {key: measured, detailed_metric: true, value_to_metric: true, rate_limit: {unit: minute, requests_per_unit: 70}}
";

#[test]
fn most_specific_descriptor_of_the_same_depth_matches() {
    let world = World::new(BASIC);
    for (descriptor, limit) in [
        ("", None),
        ("method=GET", None),
        ("method=POST", None),
        ("method=POST,tenant=x", Some((5, 4))),
        ("method=POST,tenant=acme", Some((10, 9))),
        ("method=POST,tenant=x,more=y", None),
        ("tenant=x", Some((20, 19))),
        ("tenant=y", Some((20, 19))),
        ("tenant=acme", Some((30, 29))),
        ("tenant=internal", None),
        ("tenant=acme,user=x", None),
        ("tenant=x,method=POST", None),
        ("hourly=x", Some((1, 0))),
        ("daily=x", Some((1, 0))),
        ("plan=gold", Some((15, 14))),
        ("plan=gold,feature=export", Some((25, 24))),
        ("plan=gold,feature=import", None),
        ("measured=x", Some((70, 69))),
        ("measured=y", Some((70, 69))),
        ("Tenant=x", None),
    ] {
        assert_eq!(world.left(descriptor), limit, "{descriptor}");
    }
}

#[test]
fn other_domain_has_no_limits() {
    let world = World::new(BASIC);
    let answer = world.decide(&request("other", &["daily=x", "daily=x"]));
    assert_eq!((answer.is_over_limit(), answer.statuses().len()), (false, 2));
    let quota = Quota::per_day(0);
    let answer = world.decide(&DescriptorRequest::new("other").charge_under(descriptor("a=b"), quota));
    assert!(!answer.is_over_limit() && answer.statuses()[0].limit().is_none());
    assert_eq!(answer.outcome().kind(), OutcomeKind::Exempt);
}

#[test]
fn unlimited_descriptor_differs_from_one_without_a_limit() {
    let world = World::new(BASIC);
    let answer = world.charge(&["open=x", "tenant=internal"]);
    let unlimited: Vec<bool> = answer.statuses().iter().map(|status| status.is_unlimited()).collect();
    assert_eq!(unlimited, [true, false]);
    assert!(answer.statuses().iter().all(|status| status.limit().is_none() && !status.is_over_limit()));
}

#[test]
fn counter_is_over_after_its_limit_until_its_window_ends() {
    let world = World::new(BASIC);
    assert_eq!(world.passes(25, &["tenant=a"]), 20);
    let status = world.charge(&["tenant=a"]).statuses()[0].limit().unwrap().clone();
    assert_eq!((status.decision().remaining(), status.decision().wait()), (0, Wait::After(Duration::from_secs(60))));
    world.clock.advance(Duration::from_secs(59));
    let status = world.charge(&["tenant=a"]).statuses()[0].limit().unwrap().clone();
    assert_eq!(status.decision().wait(), Wait::After(Duration::from_secs(1)), "windows are those of the clock");
    world.clock.advance(Duration::from_secs(1));
    assert_eq!(world.passes(25, &["tenant=a"]), 20);
}

#[test]
fn request_over_one_limit_leaves_the_others_as_they_are() {
    let world = World::new(
        "{domain: a, descriptors: [
           {key: k2, rate_limit: {unit: minute, requests_per_unit: 20}},
           {key: k3, rate_limit: {unit: hour, requests_per_unit: 10}}]}",
    );
    for call in 1..=15 {
        let answer = world.charge(&["k2=x", "k3=x"]);
        assert_eq!(answer.is_over_limit(), call > 10, "{call}");
        let over: Vec<bool> = answer.statuses().iter().map(|status| status.is_over_limit()).collect();
        assert_eq!(over, [false, call > 10]);
        let used = call.min(10);
        assert_eq!([left(&answer, 0), left(&answer, 1)], [Some((20, 20 - used)), Some((10, 10 - used))]);
    }
}

#[test]
fn readme_examples_have_their_limits() {
    // Example 2: marketing messages to a number, and all messages to it.
    let messages = World::new(
        "domain: messages
descriptors:
- {key: kind, value: news, descriptors: [{key: to, rate_limit: {unit: day, requests_per_unit: 5}}]}
- {key: to, rate_limit: {unit: day, requests_per_unit: 100}}",
    );
    assert_eq!(messages.passes(7, &["kind=news,to=1", "to=1"]), 5);
    assert_eq!(messages.passes(7, &["kind=news,to=2", "to=2"]), 5, "each number has its own counter");
    assert_eq!(messages.passes(100, &["to=1"]), 95);
    // Example 3: an address is banned, whatever the others may do.
    let banned = World::new(
        "domain: edge
descriptors:
- {key: remote_address, rate_limit: {unit: second, requests_per_unit: 10}}
- {key: remote_address, value: 192.0.2.5, rate_limit: {unit: second, requests_per_unit: 0}}",
    );
    assert_eq!(banned.passes(12, &["remote_address=192.0.2.1"]), 10);
    assert_eq!(banned.passes(12, &["remote_address=192.0.2.5"]), 0);
    // Example 4: the depth must be the same.
    let flat =
        World::new("{domain: d, descriptors: [{key: k, value: v, rate_limit: {unit: second, requests_per_unit: 1}}]}");
    assert_eq!(flat.passes(9, &["k=v,s=t"]), 9);
    let deep = World::new(
        "{domain: d, descriptors: [{key: k, value: v, descriptors: [{key: s, rate_limit: {unit: second, requests_per_unit: 1}}]}]}",
    );
    assert_eq!(deep.passes(9, &["k=v,s=t"]), 1);
    // Example 9: a pattern, each of whose values has its counter.
    let pattern =
        World::new("{domain: d, descriptors: [{key: k, value: v*, rate_limit: {unit: minute, requests_per_unit: 2}}]}");
    assert_eq!([pattern.passes(3, &["k=v1"]), pattern.passes(3, &["k=v2"]), pattern.passes(3, &["k=w"])], [2, 2, 3]);
}

#[test]
fn shadow_mode_counts_and_is_never_over() {
    let world = World::new(
        "{domain: d, descriptors: [{key: service, descriptors: [
           {key: user, value: a, rate_limit: {unit: second, requests_per_unit: 1}, shadow_mode: true},
           {key: user, value: b, rate_limit: {unit: second, requests_per_unit: 2}}]}]}",
    );
    assert_eq!(world.passes(5, &["service=auth,user=a"]), 5);
    let answer = world.charge(&["service=auth,user=a"]);
    let status = answer.statuses()[0].limit().unwrap();
    assert_eq!((status.mode(), status.refuses(), status.is_exceeded()), (Mode::Shadow, false, true));
    assert_eq!(answer.outcome().kind(), OutcomeKind::ShadowLimited);
    assert!(answer.headers(&Headers::draft_11()).is_empty());
    assert_eq!(world.passes(5, &["service=auth,user=b"]), 2);
}

const REPLACES: &str = "
domain: d
descriptors:
- {key: a, descriptors: [{key: user, rate_limit: {name: common, unit: minute, requests_per_unit: 2}}]}
- {key: b, descriptors: [{key: user, rate_limit: {replaces: [{name: common}], unit: minute, requests_per_unit: 4}}]}
- {key: c, rate_limit: {replaces: [{name: common}], unlimited: true}}
- {key: x, rate_limit: {name: x, replaces: [{name: y}], unit: minute, requests_per_unit: 1}}
- {key: y, rate_limit: {name: y, replaces: [{name: x}], unit: minute, requests_per_unit: 1}}
";

#[test]
fn replaced_limit_neither_counts_nor_refuses() {
    let world = World::new(REPLACES);
    assert_eq!(world.passes(5, &["a=1,user=u", "b=1,user=u"]), 4);
    assert_eq!(world.passes(5, &["a=1,user=u"]), 2, "nothing was charged to it");
    assert_eq!(world.passes(5, &["a=1,user=u", "c=1"]), 5, "an unlimited one replaces, too");
    assert_eq!(world.passes(5, &["x=1", "y=1"]), 5, "each replaces the other");
    let answer = world.charge(&["a=2,user=u"]);
    assert_eq!(answer.statuses()[0].name(), Some("common"));
}

#[test]
fn unlimited_descriptor_stays_so_if_it_is_replaced() {
    let world = World::new(
        "
domain: d
descriptors:
- {key: a, rate_limit: {unlimited: true, name: free}}
- {key: b, rate_limit: {unit: minute, requests_per_unit: 2, replaces: [{name: free}]}}
",
    );
    let answer = world.charge(&["a=1", "b=1"]);
    assert!(answer.statuses()[0].is_unlimited() && answer.statuses()[1].limit().is_some());
}

#[test]
fn descriptor_that_comes_twice_is_charged_twice() {
    let world = World::new(BASIC);
    let answer = world.charge(&["tenant=x", "tenant=x"]);
    let after = [left(&answer, 0), left(&answer, 1)];
    assert_eq!(after, [left(&answer, 0); 2], "both statuses show what is left after both");
    let one = world.charge(&["tenant=x"]);
    assert_eq!(left(&one, 0).map(|(limit, left)| (limit, left + 1)), after[0]);
}

const PATTERNS: &str = "
domain: d
descriptors:
- {key: wild, value: foo*, rate_limit: {unit: minute, requests_per_unit: 20}}
- {key: plain, value: foo, rate_limit: {unit: minute, requests_per_unit: 20}}
- {key: middle, value: /api*v1, rate_limit: {unit: minute, requests_per_unit: 20}}
- {key: several, value: svc*ep*rpc, rate_limit: {unit: minute, requests_per_unit: 20}}
- {key: order, value: a*, rate_limit: {unit: minute, requests_per_unit: 1}}
- {key: order, value: ab*, rate_limit: {unit: minute, requests_per_unit: 2}}
- {key: order, value: abc, rate_limit: {unit: minute, requests_per_unit: 3}}
- {key: order, rate_limit: {unit: minute, requests_per_unit: 4}}
- {key: up, value: x*, descriptors: [{key: down, value: y*, rate_limit: {unit: minute, requests_per_unit: 5}}]}
";

#[test]
fn first_pattern_of_the_file_matches_after_exact_values() {
    let world = World::new(PATTERNS);
    let limit = |descriptor| world.left(descriptor).map(|(limit, _)| limit);
    for (descriptor, expected) in [
        ("wild=foo1", Some(20)),
        ("wild=foo", Some(20)),
        ("wild=bar", None),
        ("plain=foo1", None),
        ("middle=/api/x/v1", Some(20)),
        ("middle=/api/v2", None),
        ("several=svc1ep2rpc", Some(20)),
        ("several=svc1rpc", None),
        ("order=abd", Some(1)),
        ("order=abc", Some(3)),
        ("order=b", Some(4)),
        ("up=x1,down=y1", Some(5)),
        ("up=x1,down=z", None),
    ] {
        assert_eq!(limit(descriptor), expected, "{descriptor}");
    }
}

#[test]
fn share_threshold_counts_all_values_of_its_pattern_together() {
    let world = World::new(
        "domain: d
descriptors:
- {key: file, value: one, rate_limit: {unit: minute, requests_per_unit: 9}}
- {key: file, value: f/*, share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 3}}
- key: path
  value: p/*
  share_threshold: true
  descriptors:
  - key: sub
    value: s/*
    share_threshold: false
    descriptors: [{key: kind, rate_limit: {unit: minute, requests_per_unit: 9}}]
  - key: all
    value: '*'
    share_threshold: true
    value_to_metric: true
    rate_limit: {unit: minute, requests_per_unit: 9}",
    );
    let left = |descriptor| world.left(descriptor).unwrap().1;
    assert_eq!([left("file=f/1"), left("file=f/2"), left("file=f/3"), left("file=one")], [2, 1, 0, 8]);
    assert!(world.charge(&["file=f/4"]).is_over_limit());
    assert_eq!([left("path=p/1,all=x"), left("path=p/2,all=y")], [8, 7], "both levels are shared");
    assert_eq!([left("path=p/1,sub=s/1,kind=k"), left("path=p/2,sub=s/1,kind=k")], [8, 7], "the first level is shared");
    assert_eq!([left("path=p/1,sub=s/2,kind=k"), left("path=p/1,sub=s/1,kind=l")], [8, 8], "the others are not");
}

#[test]
fn hits_are_summed_looked_at_and_refunded() {
    let world = World::new("{domain: d, descriptors: [{key: t, rate_limit: {unit: minute, requests_per_unit: 10}}]}");
    let of = |hits| descriptor("t=a").hits(hits);
    let asked = || DescriptorRequest::new("d");
    assert_eq!(left(&world.decide(&asked().charge(of(3)).charge(of(4))), 1), Some((10, 3)), "one counter");
    assert_eq!(left(&world.decide(&asked().charge(of(0))), 0), Some((10, 3)));
    assert_eq!(left(&world.decide(&asked().refund(of(5))), 0), Some((10, 8)));
    assert_eq!(left(&world.decide(&asked().refund(of(u64::MAX))), 0), Some((10, 10)), "no more than is used");
    assert_eq!(left(&world.decide(&asked().refund(of(7)).charge(of(1))), 1), Some((10, 9)));
    assert!(world.decide(&asked().charge(of(u64::MAX)).charge(of(u64::MAX))).is_over_limit());
    assert_eq!(left(&world.decide(&asked().refund(of(4))), 0), Some((10, 4)), "and at the limit");
}

/// Tokens of a language model are known after the response: the request looks, and the response charges.
#[test]
fn charge_beyond_the_limit_uses_it_up_so_that_looks_are_over() {
    let world =
        World::new("{domain: d, descriptors: [{key: tokens, rate_limit: {unit: minute, requests_per_unit: 10}}]}");
    let look = || world.decide(&DescriptorRequest::new("d").charge(descriptor("tokens=a").hits(0)));
    let used = |hits| world.decide(&DescriptorRequest::new("d").charge(descriptor("tokens=a").hits(hits)));
    assert!(!look().is_over_limit() && !used(8).is_over_limit() && !look().is_over_limit());
    let over = used(5);
    assert_eq!((over.is_over_limit(), left(&over, 0)), (true, Some((10, 0))), "what remained is used up");
    let answer = look();
    let status = &answer.statuses()[0];
    assert!(status.is_over_limit());
    assert_eq!(status.limit().unwrap().decision().wait(), Wait::After(Duration::from_secs(60)));
    // A look that is over keeps the other descriptors from being charged.
    let both = || DescriptorRequest::new("d").charge(descriptor("tokens=b")).charge(descriptor("tokens=a").hits(0));
    assert_eq!(left(&world.decide(&both()), 0), Some((10, 10)));
    world.clock.advance(Duration::from_secs(60));
    assert_eq!(left(&world.decide(&both()), 0), Some((10, 9)));
}

/// A limiter whose clock goes on by 20 seconds before each charge that is settled.
#[derive(Clone)]
struct Slow {
    limiter: MemoryLimiter,
    clock: ManualClock,
}

impl Limiter for Slow {
    type Error = Infallible;
    type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.limiter.take(charges)
    }

    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.clock.advance(Duration::from_secs(20));
        self.limiter.settle(charges)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.limiter.peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Self::Future<()>> {
        self.limiter.refund(refunds)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Self::Future<()>> {
        self.limiter.reset(policy, key)
    }
}

#[test]
fn window_that_ends_meanwhile_is_not_used_up_in_the_next() {
    let text = "{domain: d, descriptors: [{key: tokens, rate_limit: {unit: minute, requests_per_unit: 10}}]}";
    // Some units are used, or none; the window lasts when the rest is charged, or has ended.
    for (used, second, left_after) in [(8, 30, 0), (0, 30, 0), (8, 50, 10), (0, 50, 10)] {
        let clock = ManualClock::new();
        let limiter = Slow { limiter: memory(&clock), clock: clock.clone() };
        let limits = Rules::from_text(text).unwrap().descriptor_limits(limiter).unwrap();
        let charge = |hits| {
            let asked = DescriptorRequest::new("d").charge(descriptor("tokens=a").hits(hits));
            at_once(limits.decide(&asked)).unwrap()
        };
        charge(used);
        clock.advance(Duration::from_secs(second));
        let over = charge(15);
        assert!(over.is_over_limit());
        assert_eq!(left(&over, 0), Some((10, if left_after == 0 { 0 } else { 10 - used })), "{used} {second}");
        assert_eq!(left(&charge(0), 0), Some((10, left_after)), "{used} {second}");
    }
}

#[test]
fn quota_of_the_caller_has_a_counter_of_its_own() {
    let world = World::new(BASIC);
    let under = |text, quota| DescriptorRequest::new("shop").charge_under(descriptor(text), quota);
    let per_day = |limit| Quota::fixed_window(limit, Duration::from_secs(86_400)).unwrap();
    assert_eq!(left(&world.decide(&under("tenant=acme", per_day(10))), 0), Some((10, 9)));
    assert_eq!(left(&world.decide(&under("tenant=acme", per_day(42))), 0), Some((42, 40)), "what was used stays");
    let refund = DescriptorRequest::new("shop").refund_under(descriptor("tenant=acme"), per_day(42));
    assert_eq!(left(&world.decide(&refund), 0), Some((42, 41)));
    assert_eq!(left(&world.decide(&under("tenant=ac", per_day(42))), 0), Some((42, 41)));
    assert_eq!(left(&world.decide(&under("ten=antacme", per_day(42))), 0), Some((42, 41)));
    assert_eq!(left(&world.decide(&under("tenant=internal", per_day(0))), 0), Some((0, 0)));
    assert_eq!(world.left("tenant=acme"), Some((30, 29)), "the file's counter is untouched");
}

#[test]
fn options_in_metadata_choose_how_is_counted() {
    let world = World::new(
        "domain: d
descriptors:
- key: a
  rate_limit: {unit: minute, requests_per_unit: 6}
  metadata: {tower_ratelimit: {options: 'token bucket, burst 2'}, owner: team, other: [1, {x: y}]}
- key: b
  metadata: anything
  rate_limit: {unit: month, requests_per_unit: 6}
- {key: c, rate_limit: {unit: YEAR, requests_per_unit: 4294967295}}
- {key: e, rate_limit: {unit: week, requests_per_unit: 1}}",
    );
    assert_eq!(world.passes(6, &["a=x"]), 2);
    world.clock.advance(Duration::from_secs(10));
    assert_eq!(world.passes(6, &["a=x"]), 1);
    let periods: Vec<u64> = ["a=x", "b=x", "c=x", "e=x"]
        .into_iter()
        .map(|text| world.charge(&[text]).statuses()[0].limit().unwrap().policy().quota().period().as_secs() / 60)
        .collect();
    assert_eq!(periods, [1, 43_200, 525_600, 10_080]);
}

#[test]
fn headers_report_the_tightest_limit() {
    let world = World::new(BASIC);
    let answer = world.charge(&["daily=x", "tenant=x"]);
    let headers = answer.headers(&Headers::draft_11());
    let limits = headers["ratelimit"].to_str().unwrap();
    assert!(limits.contains("\"shop:daily\";r=0") && limits.contains("\"shop:tenant\";r=19"), "{limits}");
    assert!(!headers.contains_key("retry-after"));
    let answer = world.charge(&["daily=x", "tenant=x"]);
    assert_eq!(answer.headers(&Headers::draft_11())["retry-after"], "86400");
    assert!(world.charge(&["open=x"]).headers(&Headers::draft_11()).is_empty());
}

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<String>>>);

impl Observer for Seen {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let outcome = observed.outcome();
        let keys = outcome.policies().iter().filter(|status| observed.key(status.policy().name()).is_some()).count();
        self.0.lock().unwrap().push(format!("{} {keys}", outcome.kind().as_str()));
    }

    fn on_rules_event(&self, event: &RulesEvent) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

#[test]
fn observer_sees_outcomes_and_reloads() {
    let rules = Rules::from_text(BASIC).unwrap();
    let seen = Seen::default();
    let limits = rules.descriptor_limits(memory(&ManualClock::new())).unwrap().observer(seen.clone());
    for _ in 0..2 {
        at_once(limits.decide(&request("shop", &["daily=x", "tenant=x"]))).unwrap();
    }
    at_once(limits.decide(&request("shop", &["nothing=x"]))).unwrap();
    rules.replace("{domain: shop, descriptors: []}").unwrap();
    rules.replace("domain: ''").unwrap_err();
    let seen = seen.0.lock().unwrap();
    assert_eq!(seen[..3], ["allowed 2", "limited 2", "exempt 0"]);
    assert!(seen[3].starts_with("Loaded { version: 1, file: None, rules: 0, changes: "), "{seen:?}");
    assert!(seen[4].starts_with("Refused"), "{seen:?}");
}

#[test]
fn replaced_file_keeps_what_was_used() {
    let text = |limit: u32| {
        format!("{{domain: d, descriptors: [{{key: t, rate_limit: {{unit: minute, requests_per_unit: {limit}}}}}]}}")
    };
    let rules = Rules::from_text(text(10)).unwrap();
    let limits = rules.descriptor_limits(memory(&ManualClock::new())).unwrap();
    let charged = || left(&at_once(limits.decide(&request("d", &["t=a"]))).unwrap(), 0);
    assert_eq!([charged(), charged()], [Some((10, 9)), Some((10, 8))]);
    rules.replace(text(5)).unwrap();
    assert_eq!(charged(), Some((5, 2)));
    rules.replace(text(0)).unwrap();
    assert_eq!(charged(), Some((0, 0)));
    rules.replace("{domain: d, descriptors: []}").unwrap();
    assert_eq!(charged(), None);
    // A file of another form or domain would limit none of the requests.
    for other in ["rules: []", "domain: other"] {
        let error = rules.replace(other).unwrap_err();
        assert_eq!((error.kind(), rules.version()), (RulesErrorKind::Value, 3), "{error}");
    }
}

#[test]
fn limits_that_the_limiter_does_not_support_are_not_taken() {
    let text = |options: &str| {
        format!(
            "domain: d
descriptors:
- {{key: t, rate_limit: {{unit: minute, requests_per_unit: 10}}, metadata: {{tower_ratelimit: {{options: '{options}'}}}}}}"
        )
    };
    let rules = Rules::from_text(text("token bucket")).unwrap();
    let limits = rules.descriptor_limits(Buckets(Scripted::new())).unwrap();
    let error = rules.replace(text("sliding log")).unwrap_err();
    assert!(error.to_string().contains("it has buckets only"), "{error}");
    assert_eq!(rules.version(), 0);
    drop(limits);
    rules.replace(text("sliding log")).unwrap(); // no limiter is asked any more
}

#[test]
fn descriptors_and_layers_need_what_they_are_made_of() {
    let native = Rules::from_text("rules: []").unwrap();
    assert_eq!(native.descriptor_limits(MemoryLimiter::new()).unwrap_err().kind(), RulesErrorKind::File);
    let error = Rules::from_text(BASIC).unwrap().layer(MemoryLimiter::new()).unwrap_err();
    assert!(error.to_string().contains("RulesBuilder::descriptors"), "{error}");
}

fn answer(_: Request<Body>) -> std::future::Ready<Result<http::Response<Body>, Infallible>> {
    std::future::ready(Ok(http::Response::default()))
}

fn get(layer: &RateLimitLayer<MemoryLimiter>, path: &str) -> http::Response<Body> {
    let request = Request::builder().uri(path).body(Body::empty()).unwrap();
    at_once(layer.layer(tower::service_fn(answer)).oneshot(request)).unwrap()
}

#[test]
fn layer_and_service_share_one_allowance() {
    let rules = Rules::builder()
        .descriptors(|request| {
            let path = Descriptor::new([("path", request.uri.path())]);
            let twice = request.uri.query().map(|query| Descriptor::new([("path", query)]).hits(2));
            [path].into_iter().chain(twice)
        })
        .read_text("{domain: edge, descriptors: [{key: path, rate_limit: {unit: minute, requests_per_unit: 4}}]}")
        .unwrap();
    let limiter = memory(&ManualClock::new());
    let (layer, limits) = (rules.layer(limiter.clone()).unwrap(), rules.descriptor_limits(limiter).unwrap());
    let layer = layer.headers(Headers::draft_11());
    assert_eq!(get(&layer, "/a").status(), 200);
    assert_eq!(left(&at_once(limits.decide(&request("edge", &["path=/a"]))).unwrap(), 0), Some((4, 2)));
    // Two descriptors of a request can name one counter, and one limit has many counters.
    assert_eq!(get(&layer, "/b?/a").status(), 200);
    let refused = get(&layer, "/b?/a");
    assert_eq!(refused.status(), 429);
    assert_eq!(
        left(&at_once(limits.decide(&request("edge", &["path=/b"]))).unwrap(), 0),
        Some((4, 2)),
        "all or nothing"
    );
    assert_eq!([get(&layer, "/c?/c").status(), get(&layer, "/c?/c").status()], [200, 429]);
    assert_eq!(layer.check(), Ok(()));
    let (head, ()) = Request::builder().uri("/b").body(()).unwrap().into_parts();
    let explained = at_once(layer.explain(&head)).to_string();
    assert!(explained.contains("edge:path: charges 1 to /b"), "{explained}");
    rules
        .replace(
            "{domain: edge, descriptors: [{key: path, value: /b, rate_limit: {unit: minute, requests_per_unit: 0}}]}",
        )
        .unwrap();
    assert_eq!([get(&layer, "/a").status(), get(&layer, "/b").status()], [200, 429]);
    let (head, ()) = Request::builder().uri("/a").body(()).unwrap().into_parts();
    let explained = at_once(layer.explain(&head)).to_string();
    assert!(explained.contains("no descriptor of the request matches"), "{explained}");
}

#[test]
fn refund_returns_what_was_used_under_each_algorithm() {
    for options in [
        "fixed window",
        "sliding window",
        "sliding log",
        "token bucket",
        "gcra, burst 10",
        "leaky bucket",
        "leaky queue, queue 10",
        "step bucket",
    ] {
        let world = World::new(&format!(
            "domain: d
descriptors:
- {{key: t, rate_limit: {{unit: minute, requests_per_unit: 10}}, metadata: {{tower_ratelimit: {{options: '{options}'}}}}}}",
        ));
        let asked = || DescriptorRequest::new("d");
        let of = |hits| descriptor("t=a").hits(hits);
        let fresh = left(&world.decide(&asked().charge(of(0))), 0).unwrap().1;
        let used = left(&world.decide(&asked().charge(of(5))), 0).unwrap().1;
        assert_eq!(fresh - used, 5, "{options}");
        assert_eq!(left(&world.decide(&asked().refund(of(3))), 0).unwrap().1, fresh - 2, "{options}");
        assert_eq!(left(&world.decide(&asked().refund(of(9))), 0).unwrap().1, fresh, "{options}");
        world.decide(&asked().charge(of(fresh)));
        assert_eq!(left(&world.decide(&asked().refund(of(1))), 0).unwrap().1, 1, "{options}: nothing was left");
    }
}

#[test]
fn request_with_too_many_counters_is_over_and_not_charged() {
    let world = World::new("{domain: d, descriptors: [{key: t, rate_limit: {unit: minute, requests_per_unit: 2}}]}");
    let many = |count: u32| {
        (0..count)
            .fold(DescriptorRequest::new("d"), |request, at| request.charge(Descriptor::new([("t", at.to_string())])))
    };
    let answer = world.decide(&many(10_000));
    assert_eq!((answer.is_over_limit(), answer.statuses().len()), (true, 10_000));
    assert!(!answer.headers(&Headers::draft_11()).contains_key("ratelimit"));
    assert!(world.decide(&many(1_001)).is_over_limit());
    assert_eq!(world.left("t=0"), Some((2, 1)), "nothing was charged");
    let same = (0..10_000).fold(DescriptorRequest::new("d"), |request, _| request.charge(descriptor("t=0").hits(0)));
    assert!(!world.decide(&same).is_over_limit(), "they are one counter");
}

#[test]
fn thousand_counters_are_charged_together() {
    let limiter = MemoryLimiter::builder().max_keys(10_000).clock(ManualClock::new()).build().unwrap();
    let rules =
        Rules::from_text("{domain: d, descriptors: [{key: t, rate_limit: {unit: minute, requests_per_unit: 1}}]}");
    let limits = rules.unwrap().descriptor_limits(limiter).unwrap();
    let from = |from: u32| {
        (from..from + 1_000)
            .fold(DescriptorRequest::new("d"), |request, at| request.charge(Descriptor::new([("t", at.to_string())])))
    };
    let passes = |request: &DescriptorRequest| !at_once(limits.decide(request)).unwrap().is_over_limit();
    assert!(passes(&from(0)) && !passes(&from(999)) && passes(&from(1_000)));
}

#[test]
fn ten_thousand_limits_are_read_and_found() {
    let mut text = "domain: d\ndescriptors:\n".to_owned();
    for number in 0..5_000 {
        text += &format!(
            "- {{key: k{}, value: v{number}, rate_limit: {{unit: minute, requests_per_unit: 1}}}}\n",
            number % 10
        );
        text += &format!(
            "- {{key: k{}, value: w{number}*, rate_limit: {{unit: minute, requests_per_unit: 1}}}}\n",
            number % 7
        );
    }
    let world = World::new(&text);
    for number in 0..2_000 {
        assert_eq!(world.left(&format!("k{}=v{number}", number % 10)), Some((1, 0)));
        assert_eq!(world.left(&format!("k1=none{number}")), None);
    }
    let mut more = text;
    more += "- {key: more}\n";
    let error = Rules::from_text(more).unwrap_err();
    assert_eq!(error.kind(), RulesErrorKind::TooLarge, "{error}");
}

#[test]
fn deep_files_are_refused_and_deep_descriptors_match_nothing() {
    let nested = |levels: usize| {
        let open = "[{key: k, descriptors: ".repeat(levels);
        format!(
            "{{domain: d, descriptors: {open}[{{key: k, rate_limit: {{unit: day, requests_per_unit: 1}}}}]{}}}",
            "}]".repeat(levels)
        )
    };
    assert_eq!(Rules::from_text(nested(20)).unwrap_err().kind(), RulesErrorKind::TooLarge);
    assert!(Rules::from_text(nested(10_000)).is_err());
    let world = World::new(&nested(13));
    let deep = |levels: usize| vec!["k=v"; levels].join(",");
    assert_eq!([world.left(&deep(13)), world.left(&deep(14)), world.left(&deep(15))], [None, Some((1, 0)), None]);
    assert_eq!(world.left(&deep(100_000)), None);
}

#[test]
fn allowance_is_exact_while_envoy_and_clients_ask_at_once() {
    const LIMIT: usize = 6_000;
    let text = |version: usize| {
        let others: String =
            (0..version % 5).map(|at| format!("{{key: o{at}, rate_limit: {{unlimited: true}}}}, ")).collect();
        format!(
            "{{domain: edge, descriptors: [{others}{{key: path, rate_limit: {{unit: day, requests_per_unit: {LIMIT}}}}}]}}"
        )
    };
    let builder = Rules::builder().descriptors(|_| [Descriptor::new([("path", "/a")])]);
    let rules = builder.read_text(text(0)).unwrap();
    let limiter = memory(&ManualClock::new());
    let (layer, limits) = (rules.layer(limiter.clone()).unwrap(), rules.descriptor_limits(limiter).unwrap());
    let passed = std::sync::atomic::AtomicUsize::new(0);
    let done = std::sync::atomic::AtomicBool::new(false);
    let count = |passes: bool| passed.fetch_add(usize::from(passes), std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..4)
            .map(|thread| {
                let (layer, limits, rules, count) = (&layer, &limits, &rules, &count);
                scope.spawn(move || {
                    for nth in 0..LIMIT / 2 {
                        // The other thread may get the processor late.
                        while nth == LIMIT / 4 && rules.version() <= 2 {
                            std::thread::yield_now();
                        }
                        count(if thread % 2 == 0 {
                            get(layer, "/a").status() == 200
                        } else {
                            !at_once(limits.decide(&request("edge", &["path=/a"]))).unwrap().is_over_limit()
                        });
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            for version in 1.. {
                rules.replace(text(version)).unwrap();
                if done.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
            }
        });
        asking.into_iter().for_each(|thread| thread.join().unwrap());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(passed.into_inner(), LIMIT);
    assert!(rules.version() > 2, "{}", rules.version());
}

#[test]
fn refunds_at_once_never_return_more_than_was_used() {
    let world = World::new("{domain: d, descriptors: [{key: t, rate_limit: {unit: day, requests_per_unit: 100}}]}");
    let (limits, asked) = (&world.limits, || DescriptorRequest::new("d"));
    let half = descriptor("t=a").hits(50);
    at_once(limits.decide(&asked().charge(half))).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..1_000 {
                    let one = at_once(limits.decide(&asked().charge(descriptor("t=a").hits(3)))).unwrap();
                    if !one.is_over_limit() {
                        at_once(limits.decide(&asked().refund(descriptor("t=a").hits(3)))).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(world.left("t=a"), Some((100, 49)));
}

/// Makes rules in which each part of a request's query is a descriptor.
fn by_query(file: &str) -> Rules {
    let describe = |request: &tower_ratelimit::Head<'_>| {
        let query = request.uri.query().unwrap_or_default();
        query.split('&').map(descriptor).collect::<Vec<_>>()
    };
    Rules::builder().descriptors(describe).read_text(file).unwrap()
}

const USERS_AND_PATHS: &str = "{domain: d, descriptors: [
    {key: user, rate_limit: {unit: minute, requests_per_unit: 2}},
    {key: path, rate_limit: {unit: minute, requests_per_unit: 50}}]}";

#[test]
fn policy_of_several_keys_is_in_headers_once() {
    let rules = by_query(USERS_AND_PATHS);
    let layer = rules.layer(memory(&ManualClock::new())).unwrap().headers(Headers::draft_11());
    let limits = rules.descriptor_limits(memory(&ManualClock::new())).unwrap();
    for (query, policies, expected) in [
        ("user=a", "\"d:user\";q=2;w=60", "\"d:user\";r=1;t=60"),
        ("user=b&user=a", "\"d:user\";q=2;w=60", "\"d:user\";r=0;t=60"),
        ("user=c&user=a", "\"d:user\";q=2;w=60", "\"d:user\";r=0;t=60"),
        (
            "user=c&path=x&user=d&path=x",
            "\"d:user\";q=2;w=60, \"d:path\";q=50;w=60",
            "\"d:user\";r=1;t=60, \"d:path\";r=48;t=60",
        ),
    ] {
        let response = get(&layer, &format!("/?{query}"));
        let answer = at_once(limits.decide(&request("d", &query.split('&').collect::<Vec<_>>()))).unwrap();
        for headers in [response.headers().clone(), answer.headers(&Headers::draft_11())] {
            assert_eq!([&headers["ratelimit-policy"], &headers["ratelimit"]], [policies, expected], "{query}");
        }
    }
}

#[test]
fn layer_refuses_too_many_counters_as_the_service_does() {
    let many = |count: u32| format!("/?{}", (0..count).map(|at| format!("user={at}")).collect::<Vec<_>>().join("&"));
    let limiter = memory(&ManualClock::new());
    let layer = by_query(USERS_AND_PATHS).layer(limiter.clone()).unwrap();
    assert_eq!([get(&layer, &many(5_000)).status(), get(&layer, &many(1_001)).status()], [429, 429]);
    assert_eq!([get(&layer, "/?user=0").status(), get(&layer, "/?user=0").status()], [200, 200], "nothing was charged");
    let (head, ()) = Request::builder().uri(many(1_001)).body(()).unwrap().into_parts();
    assert!(!at_once(layer.explain(&head)).passes());
    // Own rules are charged in the same step.
    let own = layer.clone().and(Quota::per_minute(5), key::global());
    assert_eq!(get(&own, &many(1_000)).status(), 429);
    let shadow = layer.mode(Mode::Shadow).expose_outcome(true);
    let response = get(&shadow, &many(1_001));
    assert_eq!(response.status(), 200);
    assert_eq!(response.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::ShadowLimited);
}
