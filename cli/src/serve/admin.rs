//! The operators' address: health, metrics, the status page, and what operators do.
//!
//! Health and metrics are for everybody who reaches the address. If there is a file of operators, all else is for them.
//! Without it the address is a loopback one, nothing can be changed, and only health is for requests to any name.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::json;
use tower_ratelimit::observe::Stats;
use tower_service::Service;

use super::operators::Operator;
use super::respond::{self, Body, body, text};
use super::server::Server;
use super::{api, audit, fleet};

const NO_FLEET: &str = "nothing is kept for all processes: name a store by --redis or --postgres, or a file by --fleet";
const NO_OPERATORS: &str = "only an operator may change anything: name them by --operators FILE";

/// Says that the process runs.
pub(super) fn live() -> Response<Body> {
    text(StatusCode::OK, "alive")
}

/// Says whether the server should get requests.
pub(super) fn ready(server: &Server) -> Response<Body> {
    match server.health.readiness() {
        Ok(message) => text(StatusCode::OK, &message),
        Err(message) => text(StatusCode::SERVICE_UNAVAILABLE, &message),
    }
}

/// Answers an operator, or whoever asks about health and metrics.
pub(super) async fn answer(server: &Arc<Server>, peer: IpAddr, mut request: Request<Incoming>) -> Response<Body> {
    match request.uri().path() {
        "/live" => return live(),
        "/ready" => return ready(server),
        _ => {}
    }
    if server.operators.is_none() && !is_known_name(&request, &server.admin_hosts) {
        let message = "this address has another name: list it by --admin-hosts";
        return text(StatusCode::MISDIRECTED_REQUEST, message);
    }
    match request.uri().path() {
        "/metrics" => {
            let mut response = Response::new(body(server.stats.to_prometheus() + &own_metrics(server)));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(Stats::CONTENT_TYPE));
            return response;
        }
        "/openapi.json" => return respond::response(StatusCode::OK, "application/json", api::OPENAPI),
        _ => {}
    }
    let operator = server.operators.as_ref().and_then(|operators| operators.who(request.headers()));
    if server.operators.is_some() && operator.is_none() {
        if request.headers().contains_key(AUTHORIZATION) {
            let count = server.unauthorized.fetch_add(1, Ordering::Relaxed) + 1;
            let message = format!("{peer} sent a wrong name or token; {count} such requests came since the start");
            server.log_sometimes("unauthorized", &message);
        }
        let mut response = text(StatusCode::UNAUTHORIZED, "this is for operators: send your name and token");
        let asks = HeaderValue::from_static("Basic realm=\"tower-ratelimit\", charset=\"UTF-8\"");
        response.headers_mut().insert(WWW_AUTHENTICATE, asks);
        return response;
    }
    if let Some(operator) = &operator {
        request.extensions_mut().insert(operator.clone());
    }
    match request.uri().path() {
        "/" | "/limits" => {
            let Ok(response) = server.page.clone().call(request).await;
            response.map(|body| body.map_err(Into::into).boxed_unsync())
        }
        "/v1/settings" if request.method() == Method::GET => match &server.limits.fleet {
            Some(fleet) => respond::response(StatusCode::OK, "application/json", fleet.to_json() + "\n"),
            None => text(StatusCode::NOT_FOUND, NO_FLEET),
        },
        "/v1/settings" | "/v1/rollback" => set(server, operator.as_ref(), request).await,
        "/v1/explain" | "/v1/reset" => act(server, peer, operator.as_ref(), request).await,
        _ => api::not_found(),
    }
}

/// Returns the metrics that only the server has.
fn own_metrics(server: &Server) -> String {
    let (name, count) = ("ratelimit_operators_unauthorized_total", server.unauthorized.load(Ordering::Relaxed));
    format!("# HELP {name} Requests to --admin with a wrong name or token.\n# TYPE {name} counter\n{name} {count}\n")
}

/// Returns whether a request was sent to an address, `localhost`, or a name that the settings list. A foreign site
/// that a browser on this machine visits may have given this address a name of its own, and would be answered.
fn is_known_name<B>(request: &Request<B>, names: &[String]) -> bool {
    let host = request.uri().authority().cloned();
    let host = host.or_else(|| request.headers().get(HOST).and_then(|host| host.to_str().ok()?.parse().ok()));
    host.is_some_and(|host: Authority| {
        let name = host.host();
        let bare = name.trim_start_matches('[').trim_end_matches(']');
        let is_listed = names.iter().any(|listed| listed.eq_ignore_ascii_case(name));
        bare.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost") || is_listed
    })
}

/// Sets something in all processes.
async fn set(server: &Arc<Server>, operator: Option<&Operator>, request: Request<Incoming>) -> Response<Body> {
    let Some(fleet) = server.limits.fleet.clone() else { return text(StatusCode::NOT_FOUND, NO_FLEET) };
    let (head, incoming) = request.into_parts();
    let fields = match api::posted(&head, incoming).await {
        Ok(fields) => fields,
        Err(response) => return *response,
    };
    let Some(operator) = operator.cloned() else { return text(StatusCode::FORBIDDEN, NO_OPERATORS) };
    let server = Arc::clone(server);
    // The change goes on if the operator hangs up, so that the log has its result.
    let changing = tokio::spawn(async move {
        let asked = audit::of_change(&server.stats, &fields);
        let answer = match head.uri.path() {
            "/v1/rollback" => fleet::rollback(&fleet, &operator, fields).await,
            _ => fleet::change(&fleet, &server.page, &operator, fields).await,
        };
        log(&server, &operator, "set something in all processes", answer.is_ok(), &[("request", &asked)]);
        answer
    });
    let failed = |_| Err((StatusCode::INTERNAL_SERVER_ERROR, "it is unknown whether the change was made".to_owned()));
    api::response(changing.await.unwrap_or_else(failed))
}

/// Writes what an operator did.
fn log(server: &Server, Operator(name): &Operator, what: &str, is_done: bool, asked: &[(&str, &str)]) {
    let result = if is_done { "ok" } else { "failed" };
    let fields = [&[("operator", name.as_str()), ("result", result)], asked].concat();
    server.log.write(super::log::Level::Info, "operator", what, &fields);
}

/// Explains a request, or resets its keys.
async fn act(server: &Server, peer: IpAddr, operator: Option<&Operator>, request: Request<Incoming>) -> Response<Body> {
    let (head, incoming) = request.into_parts();
    let fields = match api::posted(&head, incoming).await {
        Ok(fields) => fields,
        Err(response) => return *response,
    };
    if head.uri.path() == "/v1/explain" {
        return api::response(api::explain(server, fields, peer).await);
    }
    let Some(operator) = operator else { return text(StatusCode::FORBIDDEN, NO_OPERATORS) };
    let asked = audit::of_request(&server.stats, &fields);
    let answer = api::reset(server, fields, peer).await;
    let keys = answer.iter().flatten().map(|key| server.stats.shown_key(key)).collect::<Vec<_>>().join(", ");
    log(server, operator, "reset the keys of a request", answer.is_ok(), &[("request", &asked), ("keys", &keys)]);
    api::response(answer.map(|keys| json!({ "keys": keys.len() })))
}
