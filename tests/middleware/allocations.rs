//! Allocations of the limiter in memory and of the layer: none on the allowed path.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use allocation_counter::measure;
use axum::body::Body;
use http::{HeaderValue, Request, Response};
use tower::{Layer, Service};
use tower_ratelimit::{
    Headers, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::{Charge, Refund},
    observe::Stats,
    rules::{Descriptor, DescriptorRequest, Rules},
};

/// Returns a key of each kind: an address, a number, a short text.
fn keys() -> Vec<Key> {
    vec![
        Key::of(IpAddr::V4(Ipv4Addr::LOCALHOST)).expect("an address makes a key"),
        Key::of(IpAddr::V6(Ipv6Addr::LOCALHOST)).expect("an address makes a key"),
        Key::of(u64::MAX).expect("an integer makes a key"),
        Key::of("a customer's name").expect("a text makes a key"),
    ]
}

/// Returns a quota of each layout, none of which is exhausted here.
fn quotas() -> Vec<Quota> {
    let hour = std::time::Duration::from_secs(3_600);
    let plenty = || -> Result<Vec<Quota>, tower_ratelimit::ConfigError> {
        Ok(vec![
            Quota::per_hour(1_000_000),
            Quota::fixed_window(1_000_000, hour)?,
            Quota::step_bucket(1_000_000, hour)?,
            Quota::sliding_window(1_000_000, hour)?,
            Quota::sliding_window(1_000_000, hour)?.buckets(60)?,
            Quota::sliding_log(6_000, hour)?,
            // A state that does not fit a word.
            Quota::token_bucket(99_999_999, hour)?,
        ])
    };
    plenty().expect("the quotas are possible")
}

fn limiter() -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().expect("the setup is possible")
}

/// Returns the allocations of a thousand runs, after one run to warm up.
fn allocations(mut run: impl FnMut()) -> u64 {
    run();
    measure(|| (0..1_000).for_each(|_| run())).count_total
}

#[test]
fn charge_does_not_allocate() {
    for quota in quotas() {
        let (limiter, policy) = (limiter(), Policy::from(quota));
        for key in keys() {
            assert_eq!(allocations(|| assert!(limiter.take_one(&policy, &key, 1).is_allowed())), 0, "{quota}");
            let taken = || assert!(limiter.take_now(&[Charge::new(&policy, &key)]).is_allowed());
            assert_eq!(allocations(taken), 0, "{quota}");
            assert_eq!(allocations(|| assert!(!limiter.take_one(&policy, &key, u64::MAX).is_allowed())), 0, "{quota}");
            assert_eq!(allocations(|| assert!(limiter.peek_one(&policy, &key, 1).is_allowed())), 0, "{quota}");
        }
    }
}

#[test]
fn new_key_does_not_allocate() {
    for quota in quotas() {
        let (limiter, policy) = (limiter(), Policy::from(quota));
        let mut n = 0_u64;
        let newcomer = || {
            n += 1;
            let key = Key::of(n).expect("an integer makes a key");
            assert!(limiter.take_one(&policy, &key, 1).is_allowed());
        };
        assert_eq!(allocations(newcomer), 0, "{quota}");
    }
}

#[test]
fn up_to_four_charges_ask_for_no_memory() {
    for quota in quotas() {
        let limiter = limiter();
        let policies: Vec<Policy> =
            ["a", "b", "c", "d"].map(|name| Policy::new(name, quota).expect("a name")).into_iter().collect();
        let keys = keys();
        let charges: Vec<Charge<'_>> =
            policies.iter().zip(&keys).map(|(policy, key)| Charge::new(policy, key)).collect();
        for count in 2..=4 {
            let taken = || assert!(limiter.take_now(&charges[..count]).is_allowed());
            assert_eq!(allocations(taken), 0, "{quota}, {count} charges");
            let none = Policy::new("none", Quota::per_hour(1)).expect("a name");
            let _ = limiter.take_one(&none, &keys[0], 1);
            let mut refused = charges[..count].to_vec();
            refused[0] = Charge::new(&none, &keys[0]);
            let refused = || assert!(!limiter.take_now(&refused).is_allowed());
            assert_eq!(allocations(refused), 0, "{quota}, {count} charges, refused");
        }
    }
}

#[test]
fn refund_does_not_allocate() {
    for quota in quotas() {
        let (limiter, policy) = (limiter(), Policy::from(quota));
        let key = &keys()[0];
        let run = || {
            let receipt = limiter.take_one(&policy, key, 1).take_receipt().expect("it took something");
            limiter.refund_now(&[Refund::new(policy.clone(), key.clone(), receipt)]);
        };
        assert_eq!(allocations(run), 0, "{quota}");
    }
}

/// A service that answers at once with a header, so that its header map is allocated
/// already.
#[derive(Clone)]
struct Bare;

impl Service<Request<Body>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        let mut response = Response::new(Body::empty());
        response.headers_mut().insert("server", HeaderValue::from_static("bare"));
        ready(Ok(response))
    }
}

/// Returns the allocations of one request.
fn of_one_request<S, B>(mut service: S, status: u16) -> u64
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let mut context = Context::from_waker(Waker::noop());
    let mut run = |checked: bool| {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(SocketAddr::from(([127, 0, 0, 1], 4_711)));
        assert!(service.poll_ready(&mut context).is_ready());
        match pin!(service.call(request)).poll(&mut context) {
            Poll::Ready(Ok(response)) => assert!(!checked || response.status() == status, "{}", response.status()),
            _ => panic!("the service answers at once"),
        }
    };
    // The quota of one is used up, and the layer has inspected enough requests for its setup
    // warnings.
    (0..300).for_each(|_| run(false));
    let all = allocations(|| run(true));
    assert_eq!(all % 1_000, 0, "each request is like the others");
    all / 1_000
}

fn layer(quota: Quota) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(limiter(), quota, key::peer_ip())
}

#[test]
fn allowed_request_without_headers_does_not_allocate() {
    let bare = of_one_request(Bare, 200);
    for quota in quotas() {
        let mut several = layer(quota).headers(Headers::none());
        assert_eq!(of_one_request(several.clone().layer(Bare), 200), bare, "{quota}");
        let more = [Quota::per_minute(1_000_000), Quota::per_day(10_000_000), quota];
        for (number, quota) in more.into_iter().enumerate() {
            several = several.and(quota, move |_: &tower_ratelimit::Head<'_>| Some(number as u64));
            assert_eq!(of_one_request(several.clone().layer(Bare), 200), bare, "{quota}, {} policies", number + 2);
        }
    }
}

#[test]
fn statistics_do_not_allocate() {
    let bare = of_one_request(Bare, 200);
    let counted = layer(Quota::per_hour(1_000_000)).headers(Headers::none()).observer(Stats::new());
    assert_eq!(of_one_request(counted.layer(Bare), 200), bare);
    let refusing = || layer(Quota::per_hour(1));
    let refused = of_one_request(refusing().layer(Bare), 429);
    assert_eq!(of_one_request(refusing().observer(Stats::new()).layer(Bare), 429), refused);
}

#[test]
fn plans_allocate_no_more_than_one_quota() {
    let bare = of_one_request(Bare, 200);
    let quotas = || [Quota::per_minute(1_000_000), Quota::per_hour(9_000_000), Quota::per_day(70_000_000)];
    let layer = |rule: Rule| RateLimitLayer::new(limiter(), rule, key::peer_ip());
    let several = Rule::all_of("client", quotas()).expect("they differ");
    assert_eq!(of_one_request(layer(several.clone()).headers(Headers::none()).layer(Bare), 200), bare);
    for plan in 0..3 {
        let chosen = Rule::plans("client", quotas(), move |_| plan).expect("a name");
        assert_eq!(of_one_request(layer(chosen.clone()).headers(Headers::none()).layer(Bare), 200), bare);
        // One for `RateLimit`. `RateLimit-Policy` is prepared for each plan.
        assert_eq!(of_one_request(layer(chosen).layer(Bare), 200), bare + 1);
    }
}

#[test]
fn descriptor_of_many_entries_takes_memory_in_proportion() {
    let rules = Rules::from_text("{domain: d, descriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]}");
    let limits = rules.and_then(|rules| rules.descriptor_limits(limiter())).expect("the file is valid");
    let entries = (0..5_000).map(|at| (at.to_string(), at.to_string()));
    let request = DescriptorRequest::new("d").charge_under(Descriptor::new(entries), Quota::per_hour(9));
    let decide = || drop(pin!(limits.decide(&request)).poll(&mut Context::from_waker(Waker::noop())));
    let bytes = measure(decide).bytes_total;
    assert!(bytes < 2_000_000, "{bytes} bytes");
}

/// A service that runs for years reloads its rules thousands of times.
#[test]
fn rules_that_are_replaced_leave_no_memory_behind() {
    let text = |version: u64| {
        let others = (0..version % 3)
            .map(|other| format!("  - {{name: other-{other}, quota: {} per second, key: global}}\n", 5 + version % 7));
        let first = format!("rules:\n  - {{name: total, quota: {} per hour, key: global}}\n", 1_000_000 + version % 6);
        if version % 6 == 5 {
            "rules: [{name: total, quota: 5 per".to_owned()
        } else {
            first + &others.collect::<String>()
        }
    };
    let (rules, limiter) = (Rules::from_text(text(0)).expect("the file is valid"), limiter());
    let layers = [(); 2].map(|()| rules.layer(limiter.clone()).expect("the rules fit"));
    let mut services = layers.each_ref().map(|layer| layer.layer(Bare));
    let mut reload = |versions: std::ops::Range<u64>| {
        for version in versions {
            assert_eq!(rules.replace(text(version)).is_ok(), version % 6 != 5);
            for service in &mut services {
                let answer =
                    pin!(service.call(Request::new(Body::empty()))).poll(&mut Context::from_waker(Waker::noop()));
                assert!(answer.is_ready(), "the service answers at once");
            }
        }
    };
    reload(0..84);
    let measured = measure(|| reload(84..84 + 42 * 10));
    assert_eq!(measured.bytes_current, 0, "{measured:?}");
}

/// A request is charged by few of many rules, and waits with what it holds.
#[test]
fn rules_that_do_not_apply_take_no_memory_of_a_request() {
    let policy = |number: u32| Rule::new(format!("rule-{number}"), Quota::per_hour(9)).expect("the name is valid");
    let never = |number| policy(number).when(|_| false);
    let of = |rules: u32| {
        let first = RateLimitLayer::new(limiter(), policy(0), key::global());
        (1..rules).fold(first, |layer, number| layer.and(never(number), key::global()))
    };
    let bytes = |layer: &RateLimitLayer<MemoryLimiter>| {
        let mut service = layer.layer(Bare);
        let mut run = || drop(service.call(Request::new(Body::default())));
        run();
        measure(run).bytes_max
    };
    assert_eq!(bytes(&of(1_000)), bytes(&of(20)));
}

#[test]
fn nested_layers_ask_for_memory_only_if_they_refund() {
    let bare = of_one_request(Bare, 200);
    let silent = || layer(Quota::per_hour(1_000_000)).headers(Headers::none());
    let two = silent().layer(silent().layer(Bare));
    assert_eq!(of_one_request(two.clone(), 200), bare);
    assert_eq!(of_one_request(silent().layer(two), 200), bare);
    // The token, the counter of its copies, and what is pending. A second layer that refunds adds
    // its counter to the token.
    let refunding = silent().refund_nested(true).layer(silent().layer(Bare));
    assert_eq!(of_one_request(refunding.clone(), 200), bare + 3);
    assert_eq!(of_one_request(silent().refund_nested(true).layer(refunding), 200), bare + 5);
}

/// `RateLimit` is written anew for each response, `RateLimit-Policy` is not.
#[test]
fn allowed_request_allocates_once_for_each_changing_header() {
    let bare = of_one_request(Bare, 200);
    for quota in quotas() {
        assert_eq!(of_one_request(layer(quota).layer(Bare), 200), bare + 1, "{quota}");
    }
}

/// Allocations of one request to an axum router, as `axum::serve` calls it.
fn of_one_routed_request(router: axum::Router, status: u16) -> u64 {
    of_one_request(router.with_state::<()>(()).into_service::<Body>(), status)
}

/// axum boxes and clones every layer's service. What it allocates for a layer that captures a value
/// is not the rate limit's.
#[test]
fn axum_router_allocates_no_more_than_for_any_layer() {
    let router = || axum::Router::new().route("/", axum::routing::get(async || "home"));
    let captured = std::sync::Arc::new(());
    let any = tower::util::MapRequestLayer::new(move |request: Request<Body>| {
        let _ = &captured;
        request
    });
    let any = of_one_routed_request(router().layer(any), 200);
    let quota = || layer(Quota::per_hour(1_000_000));
    let silent = || quota().headers(Headers::none());
    let routed = |layer: RateLimitLayer<MemoryLimiter>| of_one_routed_request(router().layer(layer), 200);
    assert_eq!(routed(silent()), any);
    assert_eq!(routed(quota()), any + 1, "the value of `RateLimit`");
    assert_eq!(of_one_routed_request(router().layer(silent().wrap_body()), 200), any + 1, "axum boxes other bodies");
    let counted = Rule::from(Quota::per_hour(1_000_000)).settle_by_body();
    let counted = RateLimitLayer::new(limiter(), counted, key::peer_ip()).headers(Headers::none());
    assert_eq!(routed(counted), any + 3, "what is pending, the count of bytes, and the box of the body");
}

/// The refusal takes over the extensions of the request (3 allocations). Its own are the header map
/// (2), the value of `RateLimit` (1), the outcome in the extensions (1), and the box in axum's body
/// (1). The bytes of the body and the other header values are shared.
#[test]
fn refused_request_allocates_a_known_number_of_times() {
    let none = Quota::per_hour(1);
    let refused = |headers: Headers| of_one_request(layer(none).headers(headers).layer(Bare), 429);
    assert_eq!(of_one_request(Bare, 200), 5);
    assert_eq!(refused(Headers::none()), 7);
    assert_eq!(refused(Headers::default()), 8);
}
