//! The layer reports each likely misconfiguration once, with a fix.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, Response};
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::clock::{Clock, ManualClock, MonotonicClock, Sleep, SystemClock, Timestamp, TokioClock};
use tower_ratelimit::key::{self, Prefixes, TrustedProxies};
use tower_ratelimit::{
    Headers, MemoryLimiter, MissingKey, Policy, Quota, RateLimitLayer, Rule,
    clock::Timer,
    limiter::{BoxLimiter, Limiter},
    middleware::{Access, AccessList},
    observe::{Observer, SetupWarning, SetupWarningKind},
    quota::Anchor,
};

use crate::support::Scripted;

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::default())))
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<SetupWarning>>>);

impl Observer for Log {
    fn on_setup_warning(&self, misuse: &SetupWarning) {
        self.0.lock().unwrap().push(misuse.clone());
    }
}

impl Log {
    fn kinds(&self) -> Vec<SetupWarningKind> {
        self.0.lock().unwrap().iter().map(SetupWarning::kind).collect()
    }
}

fn request(forwarded: &[&'static str], peer: bool) -> Request<Body> {
    let mut request = Request::new(Body::default());
    for name in forwarded {
        request.headers_mut().insert(*name, HeaderValue::from_static("192.0.2.1"));
    }
    if peer {
        request.extensions_mut().insert(SocketAddr::from(([10, 0, 0, 1], 1)));
    }
    request
}

fn named(name: &str, limit: u64) -> Rule {
    Rule::new(name, Quota::per_hour(limit)).unwrap()
}

async fn serve<L: Limiter>(layer: &RateLimitLayer<L>, requests: impl IntoIterator<Item = Request<Body>>) {
    let service = layer.layer(service_fn(answer));
    for request in requests {
        service.clone().oneshot(request).await.unwrap();
    }
}

/// Returns the warnings of two nested layers: of the inner one and of the outer one.
async fn nested<L: Limiter + Clone>(limiters: [L; 2], names: [&str; 2], keys: [u64; 2]) -> [Vec<SetupWarningKind>; 2] {
    let logs = [Log::default(), Log::default()];
    let [outer, inner] = [0, 1].map(|at| {
        let key = keys[at];
        let layer = RateLimitLayer::new(limiters[at].clone(), named(names[at], 1_000), move |_: &_| key);
        layer.headers(Headers::none()).observer(logs[at].clone())
    });
    let stack = ServiceBuilder::new().layer(outer).layer(inner).service(service_fn(answer));
    for _ in 0..20 {
        stack.clone().oneshot(request(&[], false)).await.unwrap();
    }
    let [outer, inner] = logs;
    [inner.kinds(), outer.kinds()]
}

#[tokio::test]
async fn request_charged_twice_by_two_layers_is_reported_once() {
    let limiter = MemoryLimiter::new();
    let both = || [limiter.clone(), limiter.clone()];
    assert_eq!(nested(both(), ["api", "api"], [7, 7]).await, [vec![SetupWarningKind::ChargedTwice], vec![]]);
    assert_eq!(nested(both(), ["api", "other"], [7, 7]).await, [vec![], vec![]]);
    assert_eq!(nested(both(), ["api", "api"], [7, 8]).await, [vec![], vec![]]);
    let two = [MemoryLimiter::new(), MemoryLimiter::new()];
    assert_eq!(nested(two, ["api", "api"], [7, 7]).await, [vec![], vec![]]);
    let boxed = BoxLimiter::new(MemoryLimiter::new());
    assert_eq!(
        nested([boxed.clone(), boxed], ["api", "api"], [7, 7]).await,
        [vec![SetupWarningKind::ChargedTwice], vec![]]
    );
    // A custom limiter without a policy registry.
    let own = Scripted::new();
    assert_eq!(nested([own.clone(), own], ["api", "api"], [7, 7]).await, [vec![], vec![]]);
}

/// The second of two layers refuses each request, because the first one holds the only place.
#[tokio::test]
async fn place_taken_twice_is_reported_though_no_request_passes() {
    let limiter = MemoryLimiter::new();
    let logs = [Log::default(), Log::default()];
    let [outer, inner] = logs.clone().map(|log| {
        let rule = Rule::new("at-once", Quota::concurrent(1)).unwrap();
        RateLimitLayer::new(limiter.clone(), rule, key::global()).observer(log)
    });
    let stack = ServiceBuilder::new().layer(outer).layer(inner).service(service_fn(answer));
    assert_eq!(stack.clone().oneshot(request(&[], false)).await.unwrap().status(), 429);
    assert_eq!(logs.map(|log| log.kinds()), [vec![], vec![SetupWarningKind::ChargedTwice]]);
}

#[tokio::test]
async fn forwarded_request_is_reported_if_no_proxy_is_trusted() {
    for (fields, expected) in [
        (&["x-forwarded-for"][..], vec![SetupWarningKind::ProxyNotTrusted]),
        (&["forwarded"], vec![SetupWarningKind::ProxyNotTrusted]),
        (&["x-request-id"], vec![]),
    ] {
        for prefixes in [Prefixes::default(), Prefixes::exact()] {
            let log = Log::default();
            let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(9), key::peer_network(prefixes));
            let layer = layer.observer(log.clone());
            serve(&layer, (0..5).map(|_| request(fields, true))).await;
            assert_eq!(log.kinds(), expected);
            assert_eq!(layer.check().map_err(|misuse| misuse.kind()).err(), expected.first().copied());
        }
    }
    // Trusted proxies, or another key, are correct.
    let trusting = key::client_ip(TrustedProxies::count(1).unwrap());
    let layer =
        RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(9), trusting).and(Quota::per_hour(8), key::global());
    serve(&layer, [request(&["x-forwarded-for"], true)]).await;
    assert_eq!(layer.check(), Ok(()));
}

#[tokio::test]
async fn list_that_exempts_everybody_behind_a_proxy_is_noticed() {
    let list = AccessList::new();
    list.set("10.0.0.0/8", Access::Allow).unwrap();
    let proxies = || TrustedProxies::networks(["10.0.0.9"]).unwrap();
    let layer = |name| {
        let layer = RateLimitLayer::new(MemoryLimiter::new(), named(name, 9), key::global());
        [
            layer.clone().access(&list, key::peer_network(Prefixes::exact())),
            layer.clone().access(&list, key::peer_address),
            layer.access(&list, key::client_network(proxies(), Prefixes::exact())),
        ]
    };
    for header in ["x-forwarded-for", "forwarded", "x-real-ip"] {
        for (at, layer) in layer(header).into_iter().enumerate() {
            serve(&layer, [request(&[], true)]).await;
            assert_eq!(layer.check(), Ok(()));
            let log = Log::default();
            let layer = layer.observer(log.clone());
            serve(&layer, (0..3).map(|_| request(&[header], true))).await;
            // The last list names the proxy's address, so this peer is a client that forged the
            // header.
            assert_eq!(log.kinds().contains(&SetupWarningKind::ProxyAllowed), at < 2, "{header} {at}");
        }
    }
    // A list by the peer's address is useless behind a proxy.
    let by_peer = layer("x")[0].clone();
    list.remove("10.0.0.0/8").unwrap();
    serve(&by_peer, [request(&["forwarded"], true)]).await;
    assert_eq!(by_peer.check().unwrap_err().kind(), SetupWarningKind::ProxyNotTrusted);
}

#[tokio::test]
async fn server_that_drops_the_peer_address_is_reported() {
    let rule = named("client", 9).missing_key(MissingKey::Shared);
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::peer_ip());
    serve(&layer, [request(&[], true)]).await;
    assert_eq!(layer.check(), Ok(()));
    serve(&layer, [request(&[], false)]).await;
    let misuse = layer.check().unwrap_err();
    assert_eq!(misuse.kind(), SetupWarningKind::PeerUnknown);
    assert!(misuse.to_string().starts_with("peer-unknown: "), "{misuse}");
    assert!(misuse.to_string().contains("into_make_service_with_connect_info"), "{misuse}");
}

#[tokio::test]
async fn later_requests_are_not_inspected() {
    let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(1_000), key::peer_ip());
    serve(&layer, (0..300).map(|_| request(&[], true))).await;
    serve(&layer, [request(&["x-forwarded-for"], false)]).await;
    assert_eq!(layer.check(), Ok(()));
}

#[tokio::test]
async fn cost_that_can_never_pass_is_reported() {
    let log = Log::default();
    let rule = || named("upload", 9).cost(|request| if request.headers.contains_key("forwarded") { 10 } else { 1 });
    let layer =
        || RateLimitLayer::new(MemoryLimiter::new(), rule(), key::global()).and(named("all", 999), key::global());
    let noticed = layer().observer(log.clone());
    serve(&noticed, (0..31).map(|_| request(&["forwarded"], false))).await;
    assert_eq!(noticed.check(), Ok(()));
    serve(&noticed, (0..9).map(|_| request(&["forwarded"], false))).await;
    assert_eq!(log.kinds(), [SetupWarningKind::NeverPasses]);
    let text = noticed.check().unwrap_err().to_string();
    assert!(text.contains("10 units") && text.contains("\"upload\"") && text.contains("no more than 9"), "{text}");
    // A client may ask for too much. The rule lets another request pass, or could once it has room.
    for (first, later) in [(0, 31), (9, 31), (40, 40)] {
        let layer = layer();
        serve(&layer, (0..first).map(|_| request(&[], false))).await;
        serve(&layer, (0..31).map(|_| request(&["forwarded"], false))).await;
        serve(&layer, [request(&[], false)]).await;
        serve(&layer, (0..later).map(|_| request(&["forwarded"], false))).await;
        assert_eq!(layer.check(), Ok(()));
    }
    // A quota of 0 switches something off, and is no mistake.
    let off = RateLimitLayer::new(MemoryLimiter::new(), named("off", 0), key::global());
    serve(&off, [request(&[], false)]).await;
    assert_eq!(off.check(), Ok(()));
}

#[test]
fn name_with_two_quotas_over_one_limiter_is_reported() {
    let log = Log::default();
    let limiter = MemoryLimiter::new();
    let layer = |limit| RateLimitLayer::new(limiter.clone(), named("api", limit), key::global());
    let first = layer(5);
    let service = first.layer(());
    let same = layer(5).headers(Headers::none());
    assert_eq!((first.check(), same.check()), (Ok(()), Ok(())));
    let other = layer(6).observer(log.clone());
    assert!(log.kinds().is_empty());
    let _ = (other.layer(()), other.layer(()), other.clone().layer(()));
    assert_eq!(log.kinds(), [SetupWarningKind::TwoQuotas]);
    // With another limiter, another name, as plans, or after the other layers were dropped, it is
    // no mistake.
    assert_eq!(RateLimitLayer::new(MemoryLimiter::new(), named("api", 7), key::global()).check(), Ok(()));
    assert_eq!(RateLimitLayer::new(limiter.clone(), named("api-7", 7), key::global()).check(), Ok(()));
    let plans = || Rule::plans("plan", [Quota::per_hour(1), Quota::per_hour(9)], |_| 0).unwrap();
    let [one, two] = [0, 1].map(|_| RateLimitLayer::new(limiter.clone(), plans(), key::global()));
    assert_eq!((one.check(), two.check()), (Ok(()), Ok(())));
    drop((first, same, service, other));
    assert_eq!(layer(8).check(), Ok(()));
}

#[test]
fn name_that_two_rules_of_a_layer_have_is_reported_once() {
    let log = Log::default();
    let one = RateLimitLayer::new(MemoryLimiter::new(), named("api", 5), key::peer_ip());
    assert_eq!(one.check(), Ok(()));
    let two = one.and(named("api", 9), key::global()).and(named("api", 7), key::global()).observer(log.clone());
    assert!(log.kinds().is_empty());
    let _ = (two.layer(()), two.clone().layer(()));
    assert_eq!(log.kinds(), [SetupWarningKind::NameTaken]);
    let text = two.check().unwrap_err().to_string();
    assert!(text.contains(r#"named "api", so the second rule is "api-2""#), "{text}");
    // Two equal quotas without names, by address and by user, are two allowances on purpose.
    let unnamed = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(5), key::peer_ip());
    assert_eq!(unnamed.and(Quota::per_minute(5), key::global()).check(), Ok(()));
    let plans = Rule::plans("plan", [Quota::per_hour(1), Quota::per_hour(9)], |_| 0).unwrap();
    assert_eq!(RateLimitLayer::new(MemoryLimiter::new(), plans, key::global()).check(), Ok(()));
}

#[test]
fn quota_of_bytes_without_a_cost_is_reported() {
    let rule = |cost: bool| {
        let rule = Rule::new("upload", Quota::per_hour(1 << 20).in_bytes().unwrap()).unwrap();
        if cost { rule.cost(|_| 64 << 10) } else { rule }
    };
    let layer = |rule: Rule| RateLimitLayer::new(MemoryLimiter::new(), rule, key::global());
    assert_eq!(layer(rule(false)).check().unwrap_err().kind(), SetupWarningKind::NoCost);
    assert_eq!(layer(rule(true)).check(), Ok(()));
    assert_eq!(layer(rule(false).settle_by_body()).check(), Ok(()));
}

/// A clock that says nothing of the calendar, as on a target without an operating system.
#[derive(Debug)]
struct OwnClock;

impl Clock for OwnClock {
    fn now(&self) -> Timestamp {
        Timestamp::default()
    }
}

/// The same, and it says that it follows the calendar.
#[derive(Debug)]
struct Following;

impl Clock for Following {
    fn now(&self) -> Timestamp {
        Timestamp::default()
    }

    fn follows_calendar(&self) -> bool {
        true
    }
}

#[test]
fn clock_that_does_not_follow_the_calendar_is_reported() {
    let day = Duration::from_secs(86_400);
    let of_days = Quota::fixed_window(5, 7 * day).unwrap();
    let own = |clock: Arc<dyn Clock>| MemoryLimiter::builder().max_keys(1_000).clock(clock).build().unwrap();
    let check = |limiter: MemoryLimiter, quota: Quota| {
        RateLimitLayer::new(limiter, Rule::new("plan", quota).unwrap(), key::global()).check()
    };
    let lagging: [Arc<dyn Clock>; 3] =
        [Arc::new(MonotonicClock::new()), Arc::new(TokioClock::new()), Arc::new(OwnClock)];
    for clock in lagging {
        for quota in [Quota::per_calendar_month(5), of_days] {
            let warning = check(own(Arc::clone(&clock)), quota).unwrap_err();
            assert_eq!(warning.kind(), SetupWarningKind::CalendarNotFollowed);
            let text = warning.to_string();
            assert!(text.contains("\"plan\"") && text.contains("Clock::follows_calendar"), "{text}");
        }
        // Nothing of these ends with a date.
        let hours = Quota::fixed_window(5, day / 24).unwrap();
        let from_the_first = of_days.anchor(Anchor::FirstRequest).unwrap();
        for quota in [hours, from_the_first, Quota::per_day(5), Quota::unlimited(), Quota::concurrent(5)] {
            assert_eq!(check(own(Arc::clone(&clock)), quota), Ok(()), "{quota}");
        }
    }
    let following: [Arc<dyn Clock>; 3] =
        [Arc::new(SystemClock::new()), Arc::new(ManualClock::new()), Arc::new(Following)];
    for clock in following {
        assert_eq!(check(own(clock), Quota::per_calendar_month(5)), Ok(()));
    }
    assert_eq!(check(MemoryLimiter::new(), Quota::per_calendar_month(5)), Ok(()), "the default follows it");
}

#[test]
fn settled_policy_without_debt_is_reported() {
    let quota = Quota::per_hour(100).max_debt(0).unwrap();
    let rule = Rule::new("tokens", quota).unwrap().cost(|_| 10).settle_by_usage();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::global());
    assert_eq!(layer.check().unwrap_err().kind(), SetupWarningKind::NoDebt);
    let rule = Rule::new("requests", quota).unwrap().charge_when(|response| response.status == 401);
    assert_eq!(RateLimitLayer::new(MemoryLimiter::new(), rule, key::global()).check(), Ok(()));
    // Meters and blocks have none that could be given.
    let hour = Duration::from_secs(3_600);
    for quota in [Quota::meter(100, hour), Quota::block(5, hour, hour)] {
        let rule = Rule::new("tokens", quota.unwrap()).unwrap().settle_by_usage();
        assert_eq!(RateLimitLayer::new(MemoryLimiter::new(), rule, key::global()).check(), Ok(()));
    }
}

#[test]
fn queue_without_timer_and_timer_without_queue_are_reported() {
    #[derive(Debug)]
    struct Never;
    impl Timer for Never {
        fn now(&self) -> Duration {
            Duration::ZERO
        }
        fn sleep_until(&self, _: Duration) -> Sleep {
            Box::pin(std::future::pending())
        }
    }
    let queue = Rule::new("queue", Quota::leaky_queue(5, Duration::from_secs(1)).unwrap()).unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("api", 5), key::global()).and(queue, key::global());
    let misuse = layer.check().unwrap_err();
    assert_eq!((misuse.kind(), misuse.kind().as_str()), (SetupWarningKind::NoTimer, "no-timer"));
    assert!(
        misuse.to_string().contains("\"queue\"") && misuse.to_string().contains("RateLimitLayer::timer"),
        "{misuse}"
    );
    assert_eq!(layer.timer(Never).check(), Ok(()));
    // A timer without a queue is reported, too.
    let log = Log::default();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("api", 5), key::global()).observer(log.clone());
    assert_eq!(layer.check(), Ok(()));
    let idle = layer.timer(Never);
    let _service = idle.layer(());
    assert_eq!(log.kinds(), [SetupWarningKind::NoQueue]);
    let misuse = idle.check().unwrap_err();
    assert!(misuse.to_string().starts_with("no-queue: ") && misuse.to_string().contains("leaky_queue"), "{misuse}");
    // The next version of a file may have a queue.
    let rules =
        tower_ratelimit::rules::Rules::from_text("rules: [{name: api, quota: 5 per hour, key: global}]").unwrap();
    assert_eq!(rules.layer(MemoryLimiter::new()).unwrap().timer(Never).check(), Ok(()));
}

#[tokio::test]
async fn proxy_that_reports_no_client_is_reported() {
    let one = || TrustedProxies::count(1).unwrap();
    let known = || TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
    let two = TrustedProxies::count(2).unwrap();
    let real_ip = || one().single_header("x-real-ip").unwrap();
    let reported = Some(SetupWarningKind::ClientNotReported);
    for (proxies, header, count, expected) in [
        (one(), &["x-real-ip"][..], 32, reported),
        (known(), &["x-real-ip"], 32, reported),
        (one(), &["forwarded"], 32, reported),
        (real_ip(), &["x-forwarded-for"], 32, reported),
        (two, &["x-forwarded-for"], 32, reported), // too few entries
        (one(), &[], 256, reported),
        (known(), &[], 256, reported),
        // Not yet, or correct.
        (one(), &["x-real-ip"], 31, None),
        (one(), &[], 255, None),
        (one(), &["x-forwarded-for"], 300, None),
        (known(), &["x-forwarded-for"], 300, None),
        (real_ip(), &["x-real-ip"], 300, None),
    ] {
        let log = Log::default();
        let by = key::client_ip(proxies.clone());
        let layer = RateLimitLayer::new(MemoryLimiter::new(), named("api", 9), by).observer(log.clone());
        serve(&layer, (0..count).map(|_| request(header, true))).await;
        let case = format!("{proxies:?} {header:?} {count}");
        assert_eq!(log.kinds(), Vec::from_iter(expected), "{case}");
        assert_eq!(layer.check().map_err(|misuse| misuse.kind()).err(), expected, "{case}");
    }
    // One request whose client is reported ends the watch. A client that connects directly does not.
    let log = Log::default();
    let by = key::client_ip(known());
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("api", 9), by).observer(log.clone());
    let direct = || {
        let mut request = request(&[], false);
        request.extensions_mut().insert(SocketAddr::from(([203, 0, 113, 9], 1)));
        request
    };
    serve(&layer, [direct(), direct()]).await;
    serve(&layer, (0..31).map(|_| request(&["x-real-ip"], true))).await;
    assert_eq!(log.kinds(), []);
    let other = layer.clone().observer(log.clone());
    serve(&other, (0..32).map(|_| request(&["x-real-ip"], true))).await;
    assert_eq!(log.kinds(), [SetupWarningKind::ClientNotReported]);
    let text = other.check().unwrap_err().to_string();
    assert!(text.contains("\"api\"") && text.contains("the header x-real-ip"), "{text}");
    serve(&layer, [request(&["x-forwarded-for"], true)]).await;
    serve(&layer, (0..300).map(|_| request(&["x-real-ip"], true))).await;
    assert_eq!(layer.check(), Ok(()));
}

#[tokio::test]
async fn proxies_outside_of_the_trusted_networks_are_reported() {
    let by_networks = |network: &str| {
        let by = key::client_ip(TrustedProxies::networks([network]).unwrap());
        RateLimitLayer::new(MemoryLimiter::new(), named("api", 9), by)
    };
    let forwarded = |count| (0..count).map(|_| request(&["x-forwarded-for"], true));
    let layer = by_networks("10.9.0.0/16");
    serve(&layer, (0..300).map(|_| request(&[], true))).await;
    serve(&layer, forwarded(31)).await;
    assert_eq!(layer.check(), Ok(()));
    serve(&layer, forwarded(1)).await;
    let warning = layer.check().unwrap_err();
    assert_eq!(warning.kind(), SetupWarningKind::ProxyNotTrusted);
    let text = warning.to_string();
    assert!(text.contains("\"api\"") && text.contains("the header x-forwarded-for"), "{text}");
    // The networks are right: one request of a trusted proxy shows that the others made their headers up.
    let layer = by_networks("10.9.0.0/16");
    let mut trusted = request(&["x-forwarded-for"], false);
    trusted.extensions_mut().insert(SocketAddr::from(([10, 9, 0, 1], 1)));
    serve(&layer, [trusted]).await;
    serve(&layer, forwarded(300)).await;
    assert_eq!(layer.check(), Ok(()));
    // The peers are proxies of the networks.
    let layer = by_networks("10.0.0.0/8");
    serve(&layer, forwarded(300)).await;
    assert_eq!(layer.check(), Ok(()));
    // The client is on the machine of the proxy.
    let local = || {
        let mut request = request(&[], true);
        request.headers_mut().insert("x-forwarded-for", HeaderValue::from_static("10.0.0.1"));
        request
    };
    for proxies in [TrustedProxies::networks(["10.0.0.0/8"]), TrustedProxies::count(1)] {
        let layer = RateLimitLayer::new(MemoryLimiter::new(), named("api", 9), key::client_ip(proxies.unwrap()));
        serve(&layer, (0..300).map(|_| local())).await;
        assert_eq!(layer.check(), Ok(()));
    }
}

#[tokio::test]
async fn rule_that_never_applies_is_noticed() {
    let log = Log::default();
    let never = named("export", 9).when(|request| request.uri.path().starts_with("/api/export"));
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("all", 9_999), key::global()).and(never, key::global());
    let layer = layer.observer(log.clone());
    serve(&layer, (0..999).map(|_| request(&[], false))).await;
    assert_eq!(layer.check(), Ok(()));
    serve(&layer, (0..20).map(|_| request(&[], false))).await;
    assert_eq!(log.kinds(), [SetupWarningKind::NeverApplies]);
    let text = layer.check().unwrap_err().to_string();
    assert!(text.starts_with("never-applies: ") && text.contains("\"export\""), "{text}");
    assert!(text.contains("original_uri"), "{text}");

    // A rule that applies to a single request is correct.
    let rare = named("rare", 9).when(|request| request.headers.contains_key("forwarded"));
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rare, key::global());
    serve(&layer, (0..2_000).map(|at| request(if at == 900 { &["forwarded"] } else { &[] }, false))).await;
    assert_eq!(layer.check(), Ok(()));
}

/// For every extractor that may find no key, for example because the layer is outside of
/// authentication.
#[tokio::test]
async fn rule_whose_key_is_never_there_is_noticed() {
    struct User(u64);
    let rules: [fn(Policy) -> RateLimitLayer<MemoryLimiter>; 7] = [
        |rule| RateLimitLayer::new(MemoryLimiter::new(), Rule::from(rule), key::extension(|user: &User| user.0)),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), Rule::from(rule), key::header("x-user")),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), Rule::from(rule), key::bearer_token()),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), Rule::from(rule), key::cookie("session")),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), Rule::from(rule), key::host()),
        |rule| {
            RateLimitLayer::new(MemoryLimiter::new(), Rule::from(rule), key::both(key::path(), key::header("x-user")))
        },
        |rule| {
            RateLimitLayer::new(MemoryLimiter::new(), Rule::from(rule), |request| {
                request.headers.get("x-user").cloned()
            })
        },
    ];
    for (at, layer) in rules.into_iter().enumerate() {
        let log = Log::default();
        let layer = layer(named("user", 9).policies()[0].clone()).observer(log.clone());
        serve(&layer, (0..31).map(|_| request(&[], true))).await;
        assert_eq!(layer.check(), Ok(()), "{at}");
        serve(&layer, (0..31).map(|_| request(&[], true))).await;
        assert_eq!(log.kinds(), [SetupWarningKind::KeyNeverFound], "{at}");
        let text = layer.check().unwrap_err().to_string();
        assert!(text.contains("\"user\"") && text.contains("are refused") && text.contains("authentication"), "{text}");
    }
}

#[tokio::test]
async fn optional_key_is_looked_for_in_more_requests() {
    for (missing_key, most) in [(MissingKey::Reject, 31), (MissingKey::Shared, 31), (MissingKey::Exempt, 999)] {
        let layer = || {
            let rule = named("user", 9).missing_key(missing_key);
            RateLimitLayer::new(MemoryLimiter::new(), rule, key::header("forwarded"))
        };
        let never = layer();
        serve(&never, (0..most).map(|_| request(&[], true))).await;
        assert_eq!(never.check(), Ok(()));
        serve(&never, [request(&[], true)]).await;
        assert_eq!(never.check().unwrap_err().kind(), SetupWarningKind::KeyNeverFound);
        let once = layer();
        serve(&once, [request(&["forwarded"], true)]).await;
        serve(&once, (0..2_000).map(|_| request(&[], true))).await;
        assert_eq!(once.check(), Ok(()));
    }
    // If only the peer's address can be missing, the warning says so.
    let proxies = TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("client", 9), key::client_ip(proxies));
    serve(&layer, [request(&["x-forwarded-for"], false)]).await;
    assert_eq!(layer.check().unwrap_err().kind(), SetupWarningKind::PeerUnknown, "at the first request");
    assert!(layer.check().unwrap_err().to_string().contains("Unix socket"));
    // A count of proxies needs no peer.
    let one = key::client_ip(TrustedProxies::count(1).unwrap());
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("client", 99), one);
    serve(&layer, (0..40).map(|_| request(&["x-forwarded-for"], false))).await;
    assert_eq!(layer.check(), Ok(()));
}

/// Whatever needs the peer's address: a rule that shares or exempts requests without a key, or an access list.
#[tokio::test]
async fn missing_peer_is_reported_at_the_first_request() {
    let proxies = || TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
    for missing in [MissingKey::Reject, MissingKey::Shared, MissingKey::Exempt] {
        for by_peer in [false, true] {
            let rule = named("client", 9).missing_key(missing);
            let layer = match by_peer {
                true => RateLimitLayer::new(MemoryLimiter::new(), rule, key::peer_ip()),
                false => RateLimitLayer::new(MemoryLimiter::new(), rule, key::client_ip(proxies())),
            };
            serve(&layer, [request(&["x-forwarded-for"], false)]).await;
            assert_eq!(layer.check().unwrap_err().kind(), SetupWarningKind::PeerUnknown, "{missing:?}");
        }
    }
    let list = AccessList::new();
    list.set("192.0.2.0/24", Access::Deny).unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("all", 9), key::global())
        .access(&list, key::client_network(proxies(), Prefixes::exact()));
    serve(&layer, [request(&["x-forwarded-for"], false)]).await;
    assert_eq!(layer.check().unwrap_err().kind(), SetupWarningKind::PeerUnknown);
}

/// No client can change that its server does not know its address.
#[tokio::test]
async fn missing_peer_is_the_servers_error() {
    let networks = key::client_ip(TrustedProxies::networks(["10.0.0.0/8"]).unwrap());
    let status = async |layer: RateLimitLayer, content: &'static str| {
        let mut request = request(&[], false);
        (*request.method_mut(), *request.version_mut()) = (http::Method::POST, http::Version::HTTP_2);
        request.headers_mut().insert("content-type", HeaderValue::from_static(content));
        let response = layer.layer(service_fn(answer)).oneshot(request).await.unwrap();
        let code = response.headers().get("grpc-status").map(|code| code.to_str().unwrap().to_owned());
        (response.status().as_u16(), code)
    };
    let by_peer = || RateLimitLayer::new(MemoryLimiter::new(), named("client", 9), key::peer_ip());
    let several = || by_peer().and(named("all", 9), key::global());
    let behind = || RateLimitLayer::new(MemoryLimiter::new(), named("client", 9), networks.clone());
    let by_header = || RateLimitLayer::new(MemoryLimiter::new(), named("client", 9), key::header("x-api-key"));
    for layer in [by_peer(), several(), behind(), by_peer().observer(Log::default())] {
        assert_eq!(status(layer.clone(), "text/plain").await, (500, None));
        assert_eq!(status(layer, "application/grpc").await, (200, Some("13".into())));
    }
    assert_eq!(status(by_header(), "text/plain").await, (400, None));
    assert_eq!(status(by_header(), "application/grpc").await, (200, Some("3".into())));
}

/// In a `Router::layer`, requests for unknown paths have no matched route.
#[tokio::test]
async fn unknown_paths_share_an_allowance_and_get_the_routers_404() {
    let limit = || RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(2), key::matched_route());
    let get = |path: &'static str| Request::get(path).body(Body::empty()).unwrap();
    let router = || axum::Router::new().route("/a/{id}", axum::routing::get(async || "a"));
    let layered = router().layer(limit());
    let mut statuses = Vec::new();
    for path in ["/a/1", "/a/2", "/a/3", "/x", "/y", "/z"] {
        statuses.push(layered.clone().oneshot(get(path)).await.unwrap().status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 429, 404, 404, 429]);
    let inside = router().route_layer(limit());
    assert_eq!(inside.oneshot(get("/x")).await.unwrap().status(), 404);
    // Around the router no route is matched yet.
    let around = limit();
    serve(&around, (0..32).map(|_| get("/a/1"))).await;
    assert_eq!(around.check().unwrap_err().kind(), SetupWarningKind::KeyNeverFound);
}

/// A list whose key is set by an inner layer denies no request.
#[tokio::test]
async fn list_whose_key_is_never_there_is_noticed() {
    let layer = || {
        let layer = RateLimitLayer::new(MemoryLimiter::new(), named("all", 9_999), key::global());
        layer.access(&AccessList::new(), key::header("forwarded"))
    };
    let never = layer();
    serve(&never, (0..999).map(|_| request(&[], true))).await;
    assert_eq!(never.check(), Ok(()));
    serve(&never, [request(&[], true)]).await;
    let misuse = never.check().unwrap_err();
    assert_eq!(misuse.kind(), SetupWarningKind::KeyNeverFound);
    assert!(misuse.to_string().contains("access list 1"), "{misuse}");
    let once = layer();
    serve(&once, (0..2_000).map(|at| request(if at == 900 { &["forwarded"] } else { &[] }, true))).await;
    assert_eq!(once.check(), Ok(()));
}

#[cfg(not(feature = "tracing"))]
fn never_passes(name: &str) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(MemoryLimiter::new(), named(name, 9).cost(|_| 10), key::global())
}

/// The test runs itself as a child process, and reads its stderr.
#[cfg(not(feature = "tracing"))]
#[test]
fn setup_warning_without_observer_goes_to_stderr_once() {
    const CHILD: &str = "RATELIMIT_MISUSE_CHILD";
    struct Deaf;
    impl Observer for Deaf {}
    if let Ok(child) = std::env::var(CHILD) {
        let layer = match child.as_str() {
            "none" => never_passes("upload"),
            "deaf" => never_passes("upload").observer(Deaf),
            _ => never_passes("upload").observer(Log::default()),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(serve(&layer, (0..40).map(|_| request(&[], false))));
        assert!(layer.check().is_err());
        return;
    }
    for (child, lines) in [("none", 1), ("deaf", 1), ("log", 0)] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "setup_warnings::setup_warning_without_observer_goes_to_stderr_once", "--nocapture"])
            .env(CHILD, child)
            .output()
            .unwrap();
        let written = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{written}");
        assert_eq!(written.matches("tower-ratelimit: never-passes: ").count(), lines, "{child}: {written}");
    }
}

/// The test runs itself as a child process, and reads its stderr.
#[cfg(not(feature = "tracing"))]
#[test]
fn refused_rules_without_observer_go_to_stderr() {
    use tower_ratelimit::observe::{RulesEvent, Stats};
    use tower_ratelimit::rules::Rules;
    const CHILD: &str = "RATELIMIT_REFUSED_CHILD";
    struct Deaf;
    impl Observer for Deaf {}
    struct Hears;
    impl Observer for Hears {
        fn on_rules_event(&self, _: &RulesEvent) {}
    }
    if let Ok(child) = std::env::var(CHILD) {
        let rules = Rules::from_text("rules: []").unwrap();
        let layer = rules.layer(MemoryLimiter::new()).unwrap();
        let _layer = match child.as_str() {
            "none" => layer,
            "deaf" => layer.observer(Deaf),
            "stats" => layer.observer(Stats::new()),
            "silent stats" => layer.observer(Stats::builder().print_warnings(false).build()),
            _ => layer.observer(Hears),
        };
        rules.replace("rules: [{name: a}]").unwrap_err();
        rules.replace("[]").unwrap();
        return;
    }
    for (child, lines) in [("none", 1), ("deaf", 1), ("stats", 1), ("silent stats", 0), ("hears", 0)] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "setup_warnings::refused_rules_without_observer_go_to_stderr", "--nocapture"])
            .env(CHILD, child)
            .output()
            .unwrap();
        let written = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{written}");
        let said = "tower-ratelimit: rules-refused: the rules stay as they were: 1:";
        assert_eq!(written.matches(said).count(), lines, "{child}: {written}");
        assert_eq!(written.matches("tower-ratelimit: ").count(), lines, "{child}: {written}");
    }
}

#[tokio::test]
async fn headers_that_are_never_sent_are_reported() {
    let layer = |headers: Headers| {
        let tokens = named("tokens", 100).unit("token").unwrap();
        let layer = RateLimitLayer::new(MemoryLimiter::new(), named("requests", 10), |_: &_| 1);
        layer.and(tokens, |_: &_| 1).headers(headers)
    };
    let draft = Headers::draft_11;
    for headers in [draft(), draft().for_policy("tokens"), draft().for_unit("token"), draft().for_unit("requests")] {
        assert_eq!(layer(headers).check(), Ok(()));
    }
    for headers in [draft().for_policy("token"), draft().for_unit("tokens")] {
        let layer = layer(headers);
        serve(&layer, [request(&[], false)]).await;
        let warning = layer.check().unwrap_err();
        assert_eq!(warning.kind(), SetupWarningKind::HeadersUnsent);
        assert!(
            warning.to_string().starts_with("headers-unsent: the headers ratelimit-policy, ratelimit"),
            "{warning}"
        );
    }
}

/// A thousand policies on each request would be tens of kilobytes. Conditions choose some of many rules.
#[test]
fn headers_that_few_clients_accept_are_reported() {
    let layer = |count: usize, conditional: bool| {
        let rule = |at: usize| {
            let rule = named(&format!("policy-{at}"), 5);
            if conditional { rule.when(|request| request.method == "GET") } else { rule }
        };
        let first = RateLimitLayer::new(MemoryLimiter::new(), rule(0), key::global());
        (1..count).fold(first, |layer, at| layer.and(rule(at), key::global()))
    };
    assert_eq!(layer(50, false).check(), Ok(()));
    let warning = layer(300, false).check().unwrap_err();
    assert_eq!(warning.kind(), SetupWarningKind::HeadersLong, "{warning}");
    assert_eq!(layer(300, true).check(), Ok(()));
    assert_eq!(layer(300, false).headers(Headers::github()).check(), Ok(()));
}
