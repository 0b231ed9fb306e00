//! Answers Envoy: a server of `envoy.service.ratelimit.v3.RateLimitService`, and an application that reads the same
//! file. Both share one allowance, so a request counts once, whether Envoy asks about it or it comes to the application
//! directly. The messages are written by hand, so there is no `.proto` file and no build step.
//!
//! ```sh
//! cargo run --example envoy                    # or with the names of files, one for each domain
//! ```
//!
//! Point Envoy's filter `envoy.filters.http.ratelimit` at port 8081, with the domain `edge`. The service does what
//! envoyproxy/ratelimit does, except for:
//!
//! * A request that is over a limit is charged to none of the others, as with
//!   `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT=true`.
//! * A descriptor with `hits_addend` 0 is over the limit if nothing remains.
//! * It adds the headers that report the limits to every answer. envoyproxy/ratelimit does so only with
//!   `LIMIT_RESPONSE_HEADERS_ENABLED`, and names them otherwise.
//! * Errors are `INVALID_ARGUMENT` and `UNAVAILABLE`. Envoy lets a request pass after `UNKNOWN`, whatever
//!   `failure_mode_deny` says.
//! * What the file may contain, and what a changed file counts on: see the page "Rules in a file" of the guide.
//!
//! `tower-ratelimit serve` (package `tower-ratelimit-cli`) is such a server for production: with Redis or PostgreSQL,
//! health, metrics, bounds for connections, and an end that loses no request. This example is for those who put the
//! service into a program of their own.

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use http::{Request, Response};
use tonic::body::Body;
use tonic::server::{Grpc, NamedService};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::observe::{LimiterEvent, Observer, RulesEvent};
use tower_ratelimit::rules::{Descriptor, DescriptorLimits, DescriptorRequest, DescriptorStatus, Rules, RulesBuilder};
use tower_ratelimit::{Headers, MemoryLimiter, Quota};

use messages::{RateLimitRequest, RateLimitResponse};

/// The messages of `envoy/service/ratelimit/v3/rls.proto` and `envoy/extensions/common/ratelimit/v3/ratelimit.proto`,
/// without the fields that this service neither reads nor writes.
pub(crate) mod messages {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct RateLimitRequest {
        #[prost(string, tag = "1")]
        pub(crate) domain: String,
        #[prost(message, repeated, tag = "2")]
        pub(crate) descriptors: Vec<RateLimitDescriptor>,
        #[prost(uint32, tag = "3")]
        pub(crate) hits_addend: u32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct RateLimitDescriptor {
        #[prost(message, repeated, tag = "1")]
        pub(crate) entries: Vec<Entry>,
        #[prost(message, optional, tag = "2")]
        pub(crate) limit: Option<RateLimitOverride>,
        #[prost(message, optional, tag = "3")]
        pub(crate) hits_addend: Option<UInt64Value>,
        #[prost(bool, tag = "4")]
        pub(crate) is_negative_hits: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct Entry {
        #[prost(string, tag = "1")]
        pub(crate) key: String,
        #[prost(string, tag = "2")]
        pub(crate) value: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct RateLimitOverride {
        #[prost(uint32, tag = "1")]
        pub(crate) requests_per_unit: u32,
        #[prost(int32, tag = "2")]
        pub(crate) unit: i32,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct UInt64Value {
        #[prost(uint64, tag = "1")]
        pub(crate) value: u64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct RateLimitResponse {
        #[prost(int32, tag = "1")]
        pub(crate) overall_code: i32,
        #[prost(message, repeated, tag = "2")]
        pub(crate) statuses: Vec<DescriptorStatus>,
        #[prost(message, repeated, tag = "3")]
        pub(crate) response_headers_to_add: Vec<HeaderValue>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct DescriptorStatus {
        #[prost(int32, tag = "1")]
        pub(crate) code: i32,
        #[prost(message, optional, tag = "2")]
        pub(crate) current_limit: Option<RateLimit>,
        #[prost(uint32, tag = "3")]
        pub(crate) limit_remaining: u32,
        #[prost(message, optional, tag = "4")]
        pub(crate) duration_until_reset: Option<Duration>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct RateLimit {
        #[prost(uint32, tag = "1")]
        pub(crate) requests_per_unit: u32,
        #[prost(int32, tag = "2")]
        pub(crate) unit: i32,
        #[prost(string, tag = "3")]
        pub(crate) name: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct Duration {
        #[prost(int64, tag = "1")]
        pub(crate) seconds: i64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(crate) struct HeaderValue {
        #[prost(string, tag = "1")]
        pub(crate) key: String,
        #[prost(string, tag = "2")]
        pub(crate) value: String,
    }
}

const OK: i32 = 1;
const OVER_LIMIT: i32 = 2;

/// The units of the protocol, and their seconds.
const UNITS: [(i32, u64); 7] = [
    (1, 1),
    (2, 60),
    (3, 3_600),
    (4, 86_400),
    (5, 30 * 86_400),  // a month
    (6, 365 * 86_400), // a year
    (7, 7 * 86_400),   // a week
];

/// More descriptors than Envoy sends for a request.
const DESCRIPTORS_MAX: usize = 100;

/// More bytes than such a request has.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// The service, for one or more domains.
pub(crate) struct RateLimitService<L>(Arc<[DescriptorLimits<L>]>);

impl<L: Limiter> RateLimitService<L> {
    pub(crate) fn new(limits: impl IntoIterator<Item = DescriptorLimits<L>>) -> Self {
        Self(limits.into_iter().collect())
    }

    async fn should_rate_limit(&self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        if request.domain.is_empty() {
            return Err(Status::invalid_argument("rate limit domain must not be empty"));
        }
        if request.descriptors.is_empty() {
            return Err(Status::invalid_argument("rate limit descriptor list must not be empty"));
        }
        if request.descriptors.len() > DESCRIPTORS_MAX {
            return Err(Status::invalid_argument(format!("a request has at most {DESCRIPTORS_MAX} descriptors")));
        }
        // In limits of another domain the descriptors match nothing.
        let limits = self.0.iter().find(|limits| limits.domain() == request.domain).or(self.0.first());
        let limits = limits.ok_or_else(|| Status::unavailable("no rate limit configuration loaded"))?;
        // Not UNKNOWN: see the beginning of this file. The observer gets the error.
        let answer = limits.decide(&asked(request)?).await;
        let answer = answer.map_err(|_| Status::unavailable("the limiter cannot answer"))?;
        let headers = answer.headers(&Headers::draft_11());
        let header = |(name, value): (&http::HeaderName, &http::HeaderValue)| messages::HeaderValue {
            key: name.to_string(),
            value: value.to_str().unwrap_or_default().to_owned(),
        };
        Ok(RateLimitResponse {
            overall_code: code(answer.is_over_limit()),
            statuses: answer.statuses().iter().map(status).collect(),
            response_headers_to_add: headers.iter().map(header).collect(),
        })
    }
}

/// Returns what a request asks.
fn asked(request: RateLimitRequest) -> Result<DescriptorRequest, Status> {
    let hits_of_all = u64::from(request.hits_addend.max(1)); // 0 is the same as none
    request.descriptors.into_iter().try_fold(DescriptorRequest::new(request.domain), |asked, descriptor| {
        let hits = descriptor.hits_addend.map_or(hits_of_all, |hits| hits.value);
        let entries = descriptor.entries.into_iter().map(|entry| (entry.key, entry.value));
        let charged = Descriptor::new(entries).hits(hits);
        let quota = descriptor.limit.map(|limit| quota(&limit)).transpose()?;
        Ok(match (quota, descriptor.is_negative_hits) {
            (None, false) => asked.charge(charged),
            (None, true) => asked.refund(charged),
            (Some(quota), false) => asked.charge_under(charged, quota),
            (Some(quota), true) => asked.refund_under(charged, quota),
        })
    })
}

/// Returns the quota that a descriptor brings along. It counts as those of the file do.
fn quota(limit: &messages::RateLimitOverride) -> Result<Quota, Status> {
    let seconds = UNITS.iter().find(|(unit, _)| *unit == limit.unit).map(|(_, seconds)| *seconds);
    let seconds = seconds.ok_or_else(|| Status::invalid_argument("a limit has an unknown unit"))?;
    Quota::fixed_window(u64::from(limit.requests_per_unit), Duration::from_secs(seconds))
        .map_err(|error| Status::invalid_argument(error.to_string()))
}

fn code(is_over: bool) -> i32 {
    if is_over { OVER_LIMIT } else { OK }
}

fn status(status: &DescriptorStatus) -> messages::DescriptorStatus {
    let Some(limit) = status.limit() else {
        let limit_remaining = if status.is_unlimited() { u32::MAX } else { 0 };
        return messages::DescriptorStatus { code: OK, limit_remaining, ..Default::default() };
    };
    let (quota, decision) = (limit.policy().quota(), limit.decision());
    let unit = UNITS.iter().find(|(_, seconds)| Duration::from_secs(*seconds) == quota.period());
    let wait = if status.is_over_limit() { decision.wait().duration() } else { None }.or(decision.reset_after());
    let seconds = |wait: Duration| wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    messages::DescriptorStatus {
        code: code(status.is_over_limit()),
        current_limit: Some(messages::RateLimit {
            requests_per_unit: u32::try_from(quota.limit()).unwrap_or(u32::MAX),
            unit: unit.map_or(0, |(unit, _)| *unit),
            name: status.name().unwrap_or_default().to_owned(),
        }),
        limit_remaining: u32::try_from(decision.remaining()).unwrap_or(u32::MAX),
        duration_until_reset: wait
            .map(|wait| messages::Duration { seconds: i64::try_from(seconds(wait)).unwrap_or(i64::MAX) }),
    }
}

impl<L> Clone for RateLimitService<L> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<L> NamedService for RateLimitService<L> {
    const NAME: &'static str = "envoy.service.ratelimit.v3.RateLimitService";
}

impl<L: Limiter> tower::Service<Request<Body>> for RateLimitService<L> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            if request.uri().path() != "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit" {
                return Ok(Status::new(Code::Unimplemented, "there is no such method").into_http());
            }
            let method = tower::service_fn(move |request: tonic::Request<RateLimitRequest>| {
                let service = service.clone();
                async move { service.should_rate_limit(request.into_inner()).await.map(tonic::Response::new) }
            });
            let codec = ProstCodec::<RateLimitResponse, RateLimitRequest>::default();
            let mut grpc = Grpc::new(codec).max_decoding_message_size(REQUEST_BYTES_MAX);
            Ok(grpc.unary(method, request).await)
        })
    }
}

/// Says which descriptors a request of the application has: the same that Envoy's route makes of it.
fn builder() -> RulesBuilder {
    Rules::builder().reload_every(Duration::from_secs(1)).descriptors(|request| {
        let peer = request.extensions.get::<ConnectInfo<SocketAddr>>();
        let address = peer.map_or_else(String::new, |ConnectInfo(peer)| peer.ip().to_string());
        let path = request.uri.path();
        [
            Descriptor::new([("remote_address", &*address)]),
            Descriptor::new([("path", path), ("remote_address", &*address)]),
        ]
    })
}

/// Prints when a file has changed, and why it is refused.
struct Print;

impl Observer for Print {
    fn on_rules_event(&self, event: &RulesEvent) {
        match event {
            RulesEvent::Loaded { version, rules, file: Some(file), .. } => {
                println!("version {version} is in force: {rules} limits of {}", file.display());
            }
            RulesEvent::Refused { error, .. } => println!("the limits stay as they were:\n{error}"),
            _ => {}
        }
    }

    fn on_limiter_event(&self, event: &LimiterEvent) {
        if let LimiterEvent::Failed { error, .. } = event {
            println!("the limiter failed: {error}");
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut files: Vec<String> = std::env::args().skip(1).collect();
    if files.is_empty() {
        files.push(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/envoy.yaml").to_owned());
    }
    // For several processes, take a `RedisLimiter` instead.
    let limiter = MemoryLimiter::new();
    let mut app = Router::new().fallback(get(|| async { "found\n" }));
    let mut limits: Vec<DescriptorLimits<MemoryLimiter>> = Vec::new();
    for file in &files {
        let rules = builder().read_file(file)?;
        app = app.layer(rules.layer(limiter.clone())?);
        let of_file = rules.descriptor_limits(limiter.clone())?.observer(Print);
        if limits.iter().any(|other| other.domain() == of_file.domain()) {
            return Err(format!("two files have the domain {:?}", of_file.domain()).into());
        }
        limits.push(of_file);
    }

    println!("127.0.0.1:8081 answers Envoy by {files:?}, which is read again when it changes");
    let service = RateLimitService::new(limits);
    let grpc = tonic::transport::Server::builder().add_service(service).serve("127.0.0.1:8081".parse()?);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/search/a | grep -iE '^(HTTP|ratelimit|retry)'");
    let http = axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).into_future();
    tokio::select! {
        ended = grpc => ended?,
        ended = http => ended?,
    }
    Ok(())
}
