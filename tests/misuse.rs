//! What a layer notices of its own misuse: each kind once, with a sentence that says how to mend it.

mod support;

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use support::Scripted;
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::key::{self, Prefixes, TrustedProxies};
use tower_ratelimit::middleware::Sleep;
use tower_ratelimit::{
    Access, AccessList, BoxLimiter, Headers, Limiter, MemoryLimiter, MissingKey, Misuse, MisuseKind, Observer, Policy,
    Quota, RateLimitLayer, Timer,
};

type Body = Full<Bytes>;

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::default())))
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Misuse>>>);

impl Observer for Log {
    fn on_misuse(&self, misuse: &Misuse) {
        self.0.lock().unwrap().push(misuse.clone());
    }
}

impl Log {
    fn kinds(&self) -> Vec<MisuseKind> {
        self.0.lock().unwrap().iter().map(Misuse::kind).collect()
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

fn named(name: &str, limit: u32) -> Policy {
    Policy::new(name, Quota::per_hour(limit)).unwrap()
}

async fn serve<L: Limiter>(layer: &RateLimitLayer<L>, requests: impl IntoIterator<Item = Request<Body>>) {
    let service = layer.layer(service_fn(answer));
    for request in requests {
        service.clone().oneshot(request).await.unwrap();
    }
}

/// What two nested layers notice: the inner one, the outer one.
async fn nested<L: Limiter + Clone>(limiters: [L; 2], names: [&str; 2], keys: [u64; 2]) -> [Vec<MisuseKind>; 2] {
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
async fn a_request_that_two_layers_charge_for_the_same_is_noticed_once() {
    let limiter = MemoryLimiter::new();
    let both = || [limiter.clone(), limiter.clone()];
    assert_eq!(nested(both(), ["api", "api"], [7, 7]).await, [vec![MisuseKind::ChargedTwice], vec![]]);
    assert_eq!(nested(both(), ["api", "other"], [7, 7]).await, [vec![], vec![]]);
    assert_eq!(nested(both(), ["api", "api"], [7, 8]).await, [vec![], vec![]]);
    let two = [MemoryLimiter::new(), MemoryLimiter::new()];
    assert_eq!(nested(two, ["api", "api"], [7, 7]).await, [vec![], vec![]]);
    let boxed = BoxLimiter::new(MemoryLimiter::new());
    assert_eq!(nested([boxed.clone(), boxed], ["api", "api"], [7, 7]).await, [vec![MisuseKind::ChargedTwice], vec![]]);
    // A limiter of one's own that has no roster.
    let own = Scripted::new();
    assert_eq!(nested([own.clone(), own], ["api", "api"], [7, 7]).await, [vec![], vec![]]);
}

#[tokio::test]
async fn a_forwarded_request_is_noticed_where_no_proxy_is_trusted() {
    for (fields, expected) in [
        (&["x-forwarded-for"][..], vec![MisuseKind::ProxyNotTrusted]),
        (&["forwarded"], vec![MisuseKind::ProxyNotTrusted]),
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
    // With trusted proxies, or another key, it is as it should be.
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
            // The last list knows the proxy by its address, so this peer is a client that made the header up.
            assert_eq!(log.kinds().contains(&MisuseKind::ProxyAllowed), at < 2, "{header} {at}");
        }
    }
    // A list by the peer's address is of no use behind a proxy, whatever it says.
    let by_peer = layer("x")[0].clone();
    list.remove("10.0.0.0/8").unwrap();
    serve(&by_peer, [request(&["forwarded"], true)]).await;
    assert_eq!(by_peer.check().unwrap_err().kind(), MisuseKind::ProxyNotTrusted);
}

#[tokio::test]
async fn a_server_that_does_not_pass_the_peers_address_on_is_noticed() {
    let rule = named("client", 9).missing_key(MissingKey::Shared);
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::peer_ip());
    serve(&layer, [request(&[], true)]).await;
    assert_eq!(layer.check(), Ok(()));
    serve(&layer, [request(&[], false)]).await;
    let misuse = layer.check().unwrap_err();
    assert_eq!(misuse.kind(), MisuseKind::PeerUnknown);
    assert!(misuse.to_string().starts_with("peer-unknown: "), "{misuse}");
    assert!(misuse.to_string().contains("into_make_service_with_connect_info"), "{misuse}");
}

#[tokio::test]
async fn only_the_first_requests_are_looked_at() {
    let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(1_000), key::peer_ip());
    serve(&layer, (0..300).map(|_| request(&[], true))).await;
    serve(&layer, [request(&["x-forwarded-for"], false)]).await;
    assert_eq!(layer.check(), Ok(()));
}

#[tokio::test]
async fn a_cost_that_can_never_pass_is_noticed() {
    let log = Log::default();
    let rule = named("upload", 9).cost(|request| u64::from(request.headers.contains_key("forwarded")) * 10);
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::global()).observer(log.clone());
    serve(&layer, [request(&[], false)]).await;
    assert_eq!(layer.check(), Ok(()));
    serve(&layer, (0..5).map(|_| request(&["forwarded"], false))).await;
    assert_eq!(log.kinds(), [MisuseKind::NeverPasses]);
    let text = layer.check().unwrap_err().to_string();
    assert!(text.contains("10 units") && text.contains("\"upload\"") && text.contains("no more than 9"), "{text}");
    // A quota of nothing is a switch, not a mistake.
    let off = RateLimitLayer::new(MemoryLimiter::new(), named("off", 0), key::global());
    serve(&off, [request(&[], false)]).await;
    assert_eq!(off.check(), Ok(()));
}

#[test]
fn one_name_with_two_quotas_over_one_limiter_is_noticed_when_the_second_layer_serves() {
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
    assert_eq!(log.kinds(), [MisuseKind::TwoQuotas]);
    // Over another limiter, under another name, as plans, or once the others are gone, it is no mistake.
    assert_eq!(RateLimitLayer::new(MemoryLimiter::new(), named("api", 7), key::global()).check(), Ok(()));
    assert_eq!(RateLimitLayer::new(limiter.clone(), named("api-7", 7), key::global()).check(), Ok(()));
    let plans = || Policy::choose("plan", [Quota::per_hour(1), Quota::per_hour(9)], |_| 0).unwrap();
    let [one, two] = [0, 1].map(|_| RateLimitLayer::new(limiter.clone(), plans(), key::global()));
    assert_eq!((one.check(), two.check()), (Ok(()), Ok(())));
    drop((first, same, service, other));
    assert_eq!(layer(8).check(), Ok(()));
}

#[test]
fn a_layer_that_is_not_enabled_is_not_looked_at() {
    let limiter = MemoryLimiter::new();
    let _first = RateLimitLayer::new(limiter.clone(), named("api", 5), key::global()).layer(());
    let off = RateLimitLayer::new(limiter, named("api", 6), key::global()).enabled(false);
    assert_eq!(off.check(), Ok(()));
}

#[test]
fn a_settled_policy_without_debt_is_noticed() {
    let quota = Quota::per_hour(100).max_debt(0).unwrap();
    let rule = Policy::new("tokens", quota).unwrap().cost(|_| 10).settle_by_bill();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::global());
    assert_eq!(layer.check().unwrap_err().kind(), MisuseKind::NoDebt);
    let rule = Policy::new("requests", quota).unwrap().charge_when(|response| response.status == 401);
    assert_eq!(RateLimitLayer::new(MemoryLimiter::new(), rule, key::global()).check(), Ok(()));
}

#[test]
fn a_queue_in_which_nobody_waits_is_noticed_and_a_timer_without_a_queue() {
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
    let queue = Policy::new("queue", Quota::leaky_queue(5, Duration::from_secs(1)).unwrap()).unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("api", 5), key::global()).and(queue, key::global());
    let misuse = layer.check().unwrap_err();
    assert_eq!((misuse.kind(), misuse.kind().as_str()), (MisuseKind::NoTimer, "no-timer"));
    assert!(
        misuse.to_string().contains("\"queue\"") && misuse.to_string().contains("RateLimitLayer::delay"),
        "{misuse}"
    );
    assert_eq!(layer.delay(Never).check(), Ok(()));
    // And so is a timer by which nobody waits.
    let log = Log::default();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("api", 5), key::global()).observer(log.clone());
    assert_eq!(layer.check(), Ok(()));
    let idle = layer.delay(Never);
    let _service = idle.layer(());
    assert_eq!(log.kinds(), [MisuseKind::NoQueue]);
    let misuse = idle.check().unwrap_err();
    assert!(misuse.to_string().starts_with("no-queue: ") && misuse.to_string().contains("leaky_queue"), "{misuse}");
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
    assert_eq!(log.kinds(), [MisuseKind::NeverApplies]);
    let text = layer.check().unwrap_err().to_string();
    assert!(text.starts_with("never-applies: ") && text.contains("\"export\""), "{text}");
    assert!(text.contains("original_uri"), "{text}");

    // One that applies to a single request is as it should be.
    let rare = named("rare", 9).when(|request| request.headers.contains_key("forwarded"));
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rare, key::global());
    serve(&layer, (0..2_000).map(|at| request(if at == 900 { &["forwarded"] } else { &[] }, false))).await;
    assert_eq!(layer.check(), Ok(()));
}

/// A layer outside of authentication, a header of another name, and so on: for every extractor that may find no key.
#[tokio::test]
async fn rule_whose_key_is_never_there_is_noticed() {
    struct User(u64);
    let rules: [fn(Policy) -> RateLimitLayer<MemoryLimiter>; 7] = [
        |rule| RateLimitLayer::new(MemoryLimiter::new(), rule, key::extension(|user: &User| user.0)),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), rule, key::header("x-user")),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), rule, key::bearer_token()),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), rule, key::cookie("session")),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), rule, key::host()),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), rule, key::both(key::path(), key::header("x-user"))),
        |rule| RateLimitLayer::new(MemoryLimiter::new(), rule, |request| request.headers.get("x-user").cloned()),
    ];
    for (at, layer) in rules.into_iter().enumerate() {
        let log = Log::default();
        let layer = layer(named("user", 9)).observer(log.clone());
        serve(&layer, (0..31).map(|_| request(&[], true))).await;
        assert_eq!(layer.check(), Ok(()), "{at}");
        serve(&layer, (0..31).map(|_| request(&[], true))).await;
        assert_eq!(log.kinds(), [MisuseKind::KeyNeverFound], "{at}");
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
        assert_eq!(never.check().unwrap_err().kind(), MisuseKind::KeyNeverFound);
        let once = layer();
        serve(&once, [request(&["forwarded"], true)]).await;
        serve(&once, (0..2_000).map(|_| request(&[], true))).await;
        assert_eq!(once.check(), Ok(()));
    }
    // Where only the peer's address can be missing, that is what is said.
    let proxies = TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), named("client", 9), key::client_ip(proxies));
    serve(&layer, (0..40).map(|_| request(&["x-forwarded-for"], false))).await;
    assert_eq!(layer.check().unwrap_err().kind(), MisuseKind::PeerUnknown);
}

/// A list by what an inner layer puts into requests denies nobody.
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
    assert_eq!(misuse.kind(), MisuseKind::KeyNeverFound);
    assert!(misuse.to_string().contains("access list 1"), "{misuse}");
    let once = layer();
    serve(&once, (0..2_000).map(|at| request(if at == 900 { &["forwarded"] } else { &[] }, true))).await;
    assert_eq!(once.check(), Ok(()));
}

fn never_passes(name: &str) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(MemoryLimiter::new(), named(name, 9).cost(|_| 10), key::global())
}

/// The test runs itself as a process of its own, to see what that writes.
#[cfg(all(debug_assertions, not(feature = "tracing")))]
#[test]
fn misuse_that_nobody_observes_is_written_to_stderr_once() {
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
        runtime.block_on(serve(&layer, (0..5).map(|_| request(&[], false))));
        assert!(layer.check().is_err());
        return;
    }
    for (child, lines) in [("none", 1), ("deaf", 1), ("log", 0)] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "misuse_that_nobody_observes_is_written_to_stderr_once", "--nocapture"])
            .env(CHILD, child)
            .output()
            .unwrap();
        let written = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{written}");
        assert_eq!(written.matches("tower-ratelimit: never-passes: ").count(), lines, "{child}: {written}");
    }
}

#[cfg(feature = "tracing")]
#[tokio::test]
async fn misuse_that_nobody_observes_is_a_warning_of_tracing() {
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    #[derive(Clone, Default)]
    struct Events(Arc<Mutex<Vec<String>>>);
    struct Written(String);
    impl Visit for Written {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            self.0 += &format!("{field}={value:?};");
        }
    }
    impl Subscriber for Events {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "tower_ratelimit" && *metadata.level() == Level::WARN
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut written = Written(String::new());
            event.record(&mut written);
            self.0.lock().unwrap().push(written.0);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }
    let events = Events::default();
    // For the whole process: one for this thread alone misses events if other tests report at the same time.
    tracing::subscriber::set_global_default(events.clone()).unwrap();
    serve(&never_passes("traced"), (0..5).map(|_| request(&[], false))).await;
    serve(&never_passes("observed").observer(Log::default()), [request(&[], false)]).await;
    let events = events.0.lock().unwrap();
    let of = |policy: &'static str| events.iter().filter(move |event| event.contains(policy)).collect::<Vec<_>>();
    assert_eq!(of("\"observed\"").len(), 0);
    let [event] = of("\"traced\"")[..] else { panic!("{events:?}") };
    assert!(event.contains("kind=\"never-passes\";") && event.contains("message=a request cost 10 units"), "{event}");
}
