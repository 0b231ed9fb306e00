//! A handler that calls `admit` itself gets the layer's decision, refusal and charges.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Head, Key, MemoryLimiter, MissingKey, OnError, Policy, Quota, RateLimitLayer, Refusals, Rule,
    clock::ManualClock,
    key,
    limiter::Limiter,
    middleware::{Access, AccessList, Admission, GrpcCode, OnAborted, Refused},
    observe::{Observed, Observer, OutcomeKind},
};

use crate::support::waiting::World;
use crate::support::{Scripted, memory};

const MS: u64 = 1_000;
const HOUR: Duration = Duration::from_secs(3_600);

/// The cost, which only the handler knows.
#[derive(Clone)]
struct Rows(u64);

fn rows(limit: u64) -> Rule {
    Rule::new("rows", Quota::per_hour(limit)).unwrap()
}

fn by_rows(limit: u64) -> Rule {
    rows(limit).cost(|request: &Head<'_>| request.extensions.get().map_or(1, |Rows(rows)| *rows))
}

fn used(limiter: &MemoryLimiter, policy: &Policy) -> u64 {
    policy.quota().capacity() - limiter.peek_one(policy, &Key::global(), 0).remaining()
}

fn head(rows: u64) -> Parts {
    let mut request = Request::new(());
    request.extensions_mut().insert(Rows(rows));
    request.into_parts().0
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<OutcomeKind>>>);

impl Log {
    fn take(&self) -> Vec<OutcomeKind> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Observer for Log {
    fn on_outcome(&self, observed: &Observed<'_>) {
        self.0.lock().unwrap().push(observed.outcome().kind());
    }
}

async fn import(
    State(limit): State<RateLimitLayer<MemoryLimiter>>,
    mut head: Parts,
    body: String,
) -> Result<String, Refused> {
    let rows = body.lines().count() as u64;
    head.extensions.insert(Rows(rows));
    limit.admit(&head).await?.keep();
    Ok(format!("{rows} rows\n"))
}

async fn text(response: Response<Body>) -> (StatusCode, HeaderMap, String) {
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    (parts.status, parts.headers, String::from_utf8(bytes.to_vec()).unwrap())
}

#[tokio::test]
async fn handler_refuses_as_the_layer_does() {
    for refusals in [Refusals::default(), Refusals::json(), Refusals::text()] {
        let (limiter, log) = (memory(&ManualClock::new()), Log::default());
        let layer =
            RateLimitLayer::new(limiter.clone(), by_rows(10), key::global()).refusals(refusals).observer(log.clone());
        let app: Router = Router::new().route("/", post(import)).with_state(layer.clone());
        let send = |body: &str| app.clone().oneshot(Request::post("/").body(Body::from(body.to_owned())).unwrap());
        assert_eq!(text(send("a\nb\nc\n").await.unwrap()).await.2, "3 rows\n");
        assert_eq!(used(&limiter, &rows(10).policies()[0]), 3);
        let refused = text(send(&"row\n".repeat(8)).await.unwrap()).await;
        assert_eq!((refused.0, used(&limiter, &rows(10).policies()[0])), (StatusCode::TOO_MANY_REQUESTS, 3));
        assert_eq!(log.take(), [OutcomeKind::Allowed, OutcomeKind::Limited]);
        // The layer around a service.
        let service =
            layer.layer(service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) }));
        let request = Request::post("/").extension(Rows(8)).body(Body::empty()).unwrap();
        let (parts, body) = service.oneshot(request).await.unwrap().into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let told = (parts.status, parts.headers, String::from_utf8(bytes.to_vec()).unwrap());
        let own = |headers: &HeaderMap| {
            let mut headers = headers.clone();
            headers.remove("content-length"); // axum's, since it has the whole body
            headers
        };
        assert_eq!((refused.0, own(&refused.1), &refused.2), (told.0, own(&told.1), &told.2));
        assert_eq!(refused.1["cache-control"], "no-store");
        assert!(refused.1.contains_key("retry-after") && refused.1.contains_key("ratelimit"));
    }
}

#[tokio::test]
async fn handler_of_tonic_refuses_with_a_status() {
    let limiter = memory(&ManualClock::new());
    let layer = RateLimitLayer::new(limiter.clone(), by_rows(10), key::global());
    let call = |rows| {
        let mut call = tonic::Request::new(());
        call.extensions_mut().insert(Rows(rows));
        call
    };
    let admitted = layer.admit_call(&call(7)).await.unwrap();
    assert_eq!(admitted.outcome().kind(), OutcomeKind::Allowed);
    let status = layer.admit_call(&call(7)).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    let wait = tonic_types::StatusExt::get_details_retry_info(&status).unwrap().retry_delay.unwrap();
    assert_eq!(wait, Duration::from_secs(4 * 360));
    let metadata = status.metadata();
    assert_eq!(metadata.get("cache-control").unwrap(), "no-store");
    assert!(metadata.get("ratelimit").is_some() && metadata.get("retry-after").is_some());
    // A request that is not gRPC's gets the equal HTTP status.
    let refused = layer.admit(&head(7)).await.unwrap_err();
    let status = tonic::Status::from(refused);
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert!(status.metadata().get("retry-after").is_some());
    assert_eq!(used(&limiter, &rows(10).policies()[0]), 7);
}

#[tokio::test]
async fn status_of_tonic_reveals_nothing_of_the_server() {
    let failing = Scripted::new();
    failing.fail(true);
    let keyless = |_: &Head<'_>| None::<Key>;
    for refusals in [Refusals::default(), Refusals::default().grpc(false)] {
        let failed = RateLimitLayer::new(failing.clone(), rows(1), key::global()).refusals(refusals.clone());
        let missing = RateLimitLayer::new(memory(&ManualClock::new()), rows(1), keyless).refusals(refusals.clone());
        let limited = RateLimitLayer::new(memory(&ManualClock::new()), rows(0), key::global()).refusals(refusals);
        let call = tonic::Request::new(());
        for (status, code, message) in [
            (failed.admit_call(&call).await, tonic::Code::Unavailable, "cannot accept this request"),
            (missing.admit_call(&call).await, tonic::Code::InvalidArgument, "identifies its client"),
            (limited.admit_call(&call).await, tonic::Code::ResourceExhausted, "costs more than its limit"),
        ] {
            let status = status.unwrap_err();
            assert_eq!(status.code(), code);
            assert!(status.message().contains(message), "{}", status.message());
        }
    }
}

#[tokio::test]
async fn call_of_tonic_is_refused_with_the_code_of_the_layer() {
    let fresh = || memory(&ManualClock::new());
    let failing = Scripted::new();
    failing.fail(true);
    let (keyless, list) = (|_: &Head<'_>| None::<Key>, AccessList::new());
    list.set_key("denied".as_bytes(), Access::Deny);
    let denied = |_: &Head<'_>| Key::of("denied".as_bytes());
    let blocking = rows(1).block("closed", Quota::block(1, HOUR, HOUR).unwrap()).unwrap();
    let blocked = RateLimitLayer::new(fresh(), blocking, key::global());
    assert!(blocked.admit(&head(1)).await.is_ok() && blocked.admit(&head(1)).await.is_err());
    let layers = [
        (OutcomeKind::Limited, RateLimitLayer::new(fresh(), rows(0), key::global())),
        (OutcomeKind::Blocked, blocked),
        (OutcomeKind::Denied, RateLimitLayer::new(fresh(), rows(1), key::global()).access(&list, denied)),
        (OutcomeKind::KeyMissing, RateLimitLayer::new(fresh(), rows(1), keyless)),
        (OutcomeKind::KeyMissing, RateLimitLayer::new(fresh(), rows(1), key::peer_ip())),
    ];
    let mut codes: Vec<(OutcomeKind, [i32; 2])> = Vec::new();
    for (kind, layer) in layers {
        codes.push((kind, codes_of(kind, &layer).await));
    }
    let failed = RateLimitLayer::new(failing, rows(1), key::global());
    codes.push((OutcomeKind::FailedClosed, codes_of(OutcomeKind::FailedClosed, &failed).await));
    use OutcomeKind::{Blocked, Denied, FailedClosed, KeyMissing, Limited};
    let expected = [
        (Limited, [8, 14]),
        (Blocked, [8, 14]),
        (Denied, [7, 7]),
        (KeyMissing, [3, 3]),
        (KeyMissing, [13, 13]),
        (FailedClosed, [14, 14]),
    ];
    assert_eq!(codes, expected);
}

/// Returns the code of a refusal, with each code that a layer can have for requests over a quota. The layer answers a
/// call itself, and is asked by a handler: over gRPC, by refusals over plain HTTP, and about a request that is no call.
async fn codes_of<L: Limiter>(kind: OutcomeKind, layer: &RateLimitLayer<L>) -> [i32; 2] {
    let mut codes = Vec::new();
    for code in [GrpcCode::ResourceExhausted, GrpcCode::Unavailable] {
        let over_grpc = layer.clone().refusals(Refusals::default().grpc_status(code));
        let over_http = layer.clone().refusals(Refusals::default().grpc_status(code).grpc(false));
        let passed = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
        let call = Request::post("/a.B/C").version(http::Version::HTTP_2).header("content-type", "application/grpc");
        let refused = over_grpc.layer(passed).oneshot(call.body(Body::empty()).unwrap()).await.unwrap();
        let of_layer: i32 = refused.headers()["grpc-status"].to_str().unwrap().parse().unwrap();
        let call = tonic::Request::new(());
        let refused = over_grpc.admit(&head(1)).await.unwrap_err();
        assert_eq!(refused.kind(), kind);
        for status in [
            over_grpc.admit_call(&call).await.unwrap_err(),
            over_http.admit_call(&call).await.unwrap_err(),
            refused.into(),
        ] {
            assert_eq!(i32::from(status.code()), of_layer, "{kind}: {status}");
        }
        codes.push(of_layer);
    }
    codes.try_into().unwrap()
}

#[tokio::test]
async fn call_of_tonic_is_refused_on_the_wire() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), rows(1), key::global());
    let handler = service_fn(move |call: tonic::Request<String>| {
        let layer = layer.clone();
        async move {
            layer.admit_call(&call).await?.keep();
            Ok::<_, tonic::Status>(tonic::Response::new(call.into_inner()))
        }
    });
    let mut told = Vec::new();
    for _ in 0..2 {
        let request = Request::post("/rows.Rows/Import").version(http::Version::HTTP_2).header("te", "trailers");
        let request = request.header("content-type", "application/grpc").body(Body::from(vec![0; 5])).unwrap();
        let codec = tonic_prost::ProstCodec::<String, String>::default();
        told.push(tonic::server::Grpc::new(codec).unary(handler.clone(), request).await.into_parts().0.headers);
    }
    assert!(!told[0].contains_key("grpc-status") && !told[0].contains_key("retry-after"));
    assert_eq!(
        (&told[1]["grpc-status"], &told[1]["cache-control"]),
        (&"8".parse().unwrap(), &"no-store".parse().unwrap())
    );
    assert!(["retry-after", "ratelimit", "grpc-status-details-bin"].iter().all(|name| told[1].contains_key(*name)));
}

/// Returns the admission after a cost of 30 was stated.
fn stated(admission: Admission) -> Admission {
    admission.usage().unwrap().set(30);
    admission
}

#[tokio::test]
async fn admission_is_kept_refunded_or_settled() {
    type End = fn(Admission);
    // Once with a rule that settles by usage, once without.
    let ends: [(&str, End, [u64; 2], [u64; 2]); 7] = [
        ("dropped", drop, [100, 100], [0, 100]),
        ("kept", Admission::keep, [100, 100], [100, 100]),
        ("refunded", Admission::refund, [0, 0], [0, 0]),
        ("settled by less", |admission| admission.settle(30), [30, 100], [30, 100]),
        ("settled by more", |admission| admission.settle(300), [300, 100], [300, 100]),
        ("stated and kept", |admission| stated(admission).keep(), [30, 100], [30, 100]),
        ("stated and refunded", |admission| stated(admission).refund(), [0, 0], [0, 0]),
    ];
    for (name, end, keep, refund) in ends {
        for (on_aborted, expected) in [(OnAborted::Keep, keep), (OnAborted::Refund, refund)] {
            for observed in [false, true] {
                let limiter = memory(&ManualClock::new());
                let plain = Rule::new("plain", Quota::per_hour(1_000)).unwrap();
                let mut layer = RateLimitLayer::new(
                    limiter.clone(),
                    by_rows(1_000).settle_by_usage().on_aborted(on_aborted),
                    key::global(),
                )
                .and(plain.clone().cost(|_| 100), key::global());
                if observed {
                    layer = layer.observer(Log::default()).expose_outcome(true);
                }
                end(layer.admit(&head(100)).await.unwrap());
                let both = [used(&limiter, &rows(1_000).policies()[0]), used(&limiter, &plain.policies()[0])];
                assert_eq!(both, expected, "{name}, {on_aborted:?}");
            }
        }
    }
}

fn response(status: u16, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// A layer around a service that answers so, and a handler that finishes its admission with the same response.
#[tokio::test]
async fn finished_admission_is_settled_as_by_the_layer() {
    let rule = || rows(1_000).cost(|_: &Head<'_>| 100);
    let from_head = |response: &http::response::Parts| response.headers.get("x-rows")?.to_str().ok()?.parse().ok();
    type Change = fn(Rule) -> Rule;
    let rules: [(&str, Change); 5] = [
        ("plain", |rule| rule),
        ("charge_when", |rule| rule.charge_when(|response| response.status == 401)),
        ("refund_when", |rule| rule.refund_when(|response| response.status.is_server_error())),
        ("settle_by_body", Rule::settle_by_body),
        ("all", |rule| rule.charge_when(|response| response.status == 401).settle_by_usage().settle_by_body()),
    ];
    let rules = rules.map(|(name, change)| (name, change(rule())));
    let rules = rules.into_iter().chain([("settle_by_response", rule().settle_by_response(from_head))]);
    for (name, rule) in rules {
        for (status, is_dropped) in [(200, false), (401, false), (500, false), (302, false), (401, true), (200, true)] {
            let answer = move || {
                let mut answer = response(status, Body::from("seven b"));
                answer.headers_mut().insert("x-rows", "30".parse().unwrap());
                // What an inner layer reports is merged.
                answer.headers_mut().insert("ratelimit", "\"inner\";r=1;t=1".parse().unwrap());
                answer
            };
            let end = async |response: Response<Body>| {
                let (head, body) = response.into_parts();
                if !is_dropped {
                    body.collect().await.unwrap();
                }
                (head.status, head.headers)
            };
            let limiter = memory(&ManualClock::new());
            let layer = RateLimitLayer::new(limiter.clone(), rule.clone(), key::global());
            let service = layer.layer(service_fn(move |_: Request<Body>| async move { Ok::<_, Infallible>(answer()) }));
            let by_layer = end(service.oneshot(Request::new(Body::empty())).await.unwrap()).await;
            let of_layer = used(&limiter, &rows(1_000).policies()[0]);

            let limiter = memory(&ManualClock::new());
            let layer = RateLimitLayer::new(limiter.clone(), rule.clone(), key::global());
            let admission = layer.admit(&head(0)).await.unwrap();
            let by_hand = end(admission.finish(answer())).await;
            assert_eq!(by_hand, by_layer, "{name}, {status}, {is_dropped}");
            assert_eq!(used(&limiter, &rows(1_000).policies()[0]), of_layer, "{name}, {status}, {is_dropped}");
            assert_eq!(layer.check(), Ok(()), "{name}");
        }
    }
}

#[tokio::test]
async fn finished_admission_counts_usage_until_the_body_ends() {
    let limiter = memory(&ManualClock::new());
    let layer = RateLimitLayer::new(limiter.clone(), by_rows(1_000).settle_by_usage(), key::global());
    let admission = layer.admit(&head(100)).await.unwrap();
    let usage = admission.usage().unwrap().clone();
    let response = admission.finish(response(200, Body::from("body")));
    usage.set(7);
    assert_eq!(used(&limiter, &rows(1_000).policies()[0]), 100);
    response.into_body().collect().await.unwrap();
    assert_eq!(used(&limiter, &rows(1_000).policies()[0]), 7);
    assert!(!usage.set(8));
    let plain = RateLimitLayer::new(memory(&ManualClock::new()), rows(5), key::global());
    assert!(plain.admit(&head(1)).await.unwrap().usage().is_none());
}

#[tokio::test]
async fn admission_adds_the_headers_of_the_layer() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), by_rows(10), key::global());
    let mut headers = HeaderMap::new();
    headers.insert("ratelimit", "\"rows\";r=9;t=1, \"inner\";r=1;t=1".parse().unwrap());
    let admission = layer.admit(&head(3)).await.unwrap();
    admission.add_headers(&mut headers);
    assert_eq!(headers["ratelimit"], "\"rows\";r=7;t=2520, \"inner\";r=1;t=1");
    assert_eq!(headers["ratelimit-policy"], "\"rows\";q=10;w=3600");
    let headers = admission.headers();
    assert_eq!((headers.len(), &headers["ratelimit"]), (2, &"\"rows\";r=7;t=2520".parse().unwrap()));
    let silent = layer.headers(tower_ratelimit::Headers::none());
    assert!(silent.admit(&head(3)).await.unwrap().headers().is_empty());
}

#[tokio::test]
async fn layer_warns_of_handlers_that_do_not_settle() {
    let layer = |rule: Rule| RateLimitLayer::new(memory(&ManualClock::new()), rule, key::global());
    let warned = |layer: &RateLimitLayer<MemoryLimiter>| layer.check().err().map(|warning| warning.to_string());
    for rule in [
        by_rows(9).charge_when(|response| response.status == 401),
        by_rows(9).refund_when(|response| response.status == 500),
        by_rows(9).settle_by_response(|_| None),
        by_rows(9).settle_by_body(),
        by_rows(9).settle_by_usage(),
    ] {
        let dropped = layer(rule.clone());
        drop(dropped.admit(&head(1)).await.unwrap());
        let text = warned(&dropped).unwrap();
        assert!(text.starts_with("not-settled: ") && text.contains("\"rows\"") && text.contains("finish"), "{text}");
        // A layer whose handlers end their admissions may have clients that disconnect.
        let ended = layer(rule);
        ended.admit(&head(1)).await.unwrap().keep();
        drop(ended.admit(&head(1)).await.unwrap());
        assert_eq!(warned(&ended), None);
    }
    let plain = layer(by_rows(9));
    drop(plain.admit(&head(1)).await.unwrap());
    assert_eq!(warned(&plain), None);
    plain.admit(&head(1)).await.unwrap().settle(3);
    let text = warned(&plain).unwrap();
    assert!(text.starts_with("not-settled: ") && text.contains("settle_by_usage"), "{text}");
}

/// Compiles only if `?` converts it.
#[tokio::test]
async fn refusal_is_a_boxed_error() {
    async fn import(limit: &RateLimitLayer<MemoryLimiter>) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        limit.admit(&head(1)).await?.keep();
        Ok(())
    }
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), rows(0), key::global());
    let layer = layer.refusals(Refusals::with(|_| Response::new(Body::from("own"))));
    let error = import(&layer).await.unwrap_err();
    assert_eq!(error.to_string(), "the request was refused: limited");
    let refused = error.downcast::<Refused>().unwrap();
    assert_eq!(refused.kind(), OutcomeKind::Limited);
    assert_eq!(refused.into_http().into_body().collect().await.unwrap().to_bytes(), "own");
}

#[tokio::test]
async fn admission_of_a_layer_without_headers_is_refunded() {
    let limiter = memory(&ManualClock::new());
    let others = Rule::new("others", Quota::per_hour(10)).unwrap();
    let layer = RateLimitLayer::new(limiter.clone(), by_rows(10), key::global())
        .and(others.clone(), key::global())
        .headers(tower_ratelimit::Headers::none());
    layer.admit(&head(3)).await.unwrap().refund();
    assert_eq!([used(&limiter, &rows(10).policies()[0]), used(&limiter, &others.policies()[0])], [0, 0]);
}

/// A layer watches its first requests. After them, the usual request has a shorter path.
#[tokio::test]
async fn admission_after_the_first_requests_has_its_charges() {
    let limiter = memory(&ManualClock::new());
    let policy = rows(1_000_000);
    let layer = RateLimitLayer::new(limiter.clone(), policy.clone(), key::global());
    for _ in 0..300 {
        layer.admit(&head(1)).await.unwrap().keep();
    }
    let admission = layer.admit(&head(1)).await.unwrap();
    assert_eq!(admission.outcome().policies()[0].decision().remaining(), 1_000_000 - 301);
    admission.refund();
    assert_eq!(used(&limiter, &policy.policies()[0]), 300);
}

#[tokio::test]
async fn handler_is_answered_whatever_the_outcome() {
    let (limiter, log) = (Scripted::new().later(), Log::default());
    let list = AccessList::new();
    list.set_key("denied".as_bytes(), Access::Deny);
    let client = |request: &Head<'_>| Key::of(request.headers.get("client")?.as_bytes());
    let layer = RateLimitLayer::new(limiter.clone(), rows(1), client).access(&list, client).observer(log.clone());
    let ask = async |layer: &RateLimitLayer<Scripted>, client: Option<&str>| {
        let mut request = Request::new(());
        client.into_iter().for_each(|client| drop(request.headers_mut().insert("client", client.parse().unwrap())));
        layer.admit(&request.into_parts().0).await.map_or_else(|refused| refused.into_http().status().as_u16(), |_| 0)
    };
    let mut told = Vec::new();
    for client in [Some("alice"), Some("alice"), Some("denied"), None] {
        told.push(ask(&layer, client).await);
    }
    limiter.fail(true);
    told.push(ask(&layer, Some("bob")).await);
    told.push(ask(&layer.clone().on_error(OnError::Allow), Some("bob")).await);
    assert_eq!(told, [0, 429, 403, 400, 503, 0]);
    use OutcomeKind::{Allowed, Denied, FailedClosed, FailedOpen, KeyMissing, Limited};
    assert_eq!(log.take(), [Allowed, Limited, Denied, KeyMissing, FailedClosed, FailedOpen]);
    let free = RateLimitLayer::new(limiter.clone(), rows(1).missing_key(MissingKey::Exempt), client);
    assert_eq!(ask(&free, None).await, 0);
}

#[test]
fn handler_waits_for_its_departure_and_leaves_if_dropped() {
    let mut world: World<u64> = World::new();
    let limiter = memory(&world.clock);
    let policy =
        Rule::new("queue", Quota::leaky_queue(100, Duration::from_secs(1)).unwrap().queue(5).unwrap()).unwrap();
    let log = Log::default();
    let layer = RateLimitLayer::new(limiter.clone(), policy.clone(), key::global())
        .timer(world.timer.clone())
        .observer(log.clone());
    let sent = [(); 4].map(|()| {
        let (layer, timer) = (layer.clone(), world.timer.clone());
        world.spawn(async move {
            layer.admit(&head(0)).await.unwrap().keep();
            timer.now_us()
        })
    });
    assert_eq!(layer.waiting(), 3);
    world.cancel(sent[1]);
    world.pass(100 * MS);
    assert_eq!(sent.map(|sent| world.done[sent]), [Some(0), None, Some(10 * MS), Some(20 * MS)]);
    assert_eq!((layer.waiting(), limiter.peek_one(&policy.policies()[0], &Key::global(), 0).remaining()), (0, 6));
    use OutcomeKind::{Abandoned, Allowed, Delayed};
    assert_eq!(log.take(), [Allowed, Abandoned, Delayed, Delayed]);
}

#[tokio::test]
async fn call_of_tonic_escapes_no_rule_by_its_path() {
    let rules = "rules:
      - {name: reads, quota: 9 per hour, key: global, match: {path: '/rows.Rows/{*method}'}}
      - {name: writes, quota: 1 per hour, key: global, match: {path: /rows.Rows/Write}}";
    let rules = tower_ratelimit::rules::Rules::from_text(rules).unwrap();
    let layer = rules.layer(memory(&ManualClock::new())).unwrap();
    assert!(layer.admit_call(&tonic::Request::new(())).await.is_ok());
    assert!(layer.admit_call(&tonic::Request::new(())).await.is_err());
}
