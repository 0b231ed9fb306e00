//! actix-web: ten requests a minute for each address, by a middleware function.
//!
//! ```sh
//! cargo run --manifest-path examples/frameworks/Cargo.toml --bin actix_web
//! ```

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderMap as ActixHeaders, HeaderName, HeaderValue};
use actix_web::middleware::{Next, from_fn};
use actix_web::{App, HttpResponse, HttpServer, web};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use tower_ratelimit::middleware::{Refused, WrappedBody};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

type Limit = web::Data<RateLimitLayer<MemoryLimiter>>;
type Error = Box<dyn std::error::Error>;

/// Asks the layer about each request. actix-web has the types of `http` 0.2, the layer those of `http` 1.
async fn limited(
    limit: Limit,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    let head = head_of(&request)?;
    let admission = match limit.admit(&head).await {
        Ok(admission) => admission,
        Err(refused) => return Ok(request.into_response(answer(refused).await).map_into_right_body()),
    };
    let mut response = next.call(request).await?.map_into_left_body();
    // Rules may charge by the status of the response.
    let mut told = http::Response::new(WrappedBody::<Empty<Bytes>>::default());
    *told.status_mut() = status(response.status())?;
    copy_headers(admission.finish(told).headers(), response.headers_mut());
    Ok(response)
}

/// Copies what the rules of a layer read. Leave the headers out if no rule reads them.
fn head_of(request: &ServiceRequest) -> Result<http::Request<()>, actix_web::Error> {
    let mut head = http::Request::builder().method(request.method().as_str()).uri(request.uri().to_string());
    for (name, value) in request.headers() {
        head = head.header(name.as_str(), value.as_bytes());
    }
    if let Some(peer) = request.peer_addr() {
        head = head.extension(key::PeerAddr::from(peer));
    }
    head.body(()).map_err(actix_web::error::ErrorBadRequest)
}

fn status(status: actix_web::http::StatusCode) -> Result<http::StatusCode, actix_web::Error> {
    http::StatusCode::from_u16(status.as_u16()).map_err(actix_web::error::ErrorInternalServerError)
}

fn copy_headers(from: &http::HeaderMap, to: &mut ActixHeaders) {
    for (name, value) in from {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name.as_str()), HeaderValue::from_bytes(value.as_bytes()))
        {
            to.insert(name, value);
        }
    }
}

/// Makes the layer's refusal a response of actix-web.
async fn answer(refused: Refused) -> HttpResponse {
    let (head, body) = refused.into_http().into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let status = actix_web::http::StatusCode::from_u16(head.status.as_u16()).unwrap_or_default();
    let mut response = HttpResponse::build(status).body(body);
    copy_headers(&head.headers, response.headers_mut());
    response
}

fn limit(limiter: MemoryLimiter) -> Result<Limit, Error> {
    let api = Rule::new("api", Quota::per_minute(10))?.refund_when(|response| response.status.is_server_error());
    // Made once. The workers of actix-web share it.
    Ok(web::Data::new(RateLimitLayer::new(limiter, api, key::peer_ip())))
}

#[actix_web::main]
async fn main() -> Result<(), Error> {
    let limit = limit(MemoryLimiter::new())?;
    let app = move || {
        App::new().app_data(limit.clone()).wrap(from_fn(limited)).route("/", web::get().to(|| async { "hello\n" }))
    };
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");
    Ok(HttpServer::new(app).bind(("127.0.0.1", 3000))?.run().await?)
}

#[cfg(test)]
mod tests {
    use actix_web::test::{TestRequest, call_service, init_service};

    use tower_ratelimit::clock::ManualClock;

    use super::*;

    /// Time stands still, so no unit comes back.
    fn limiter() -> MemoryLimiter {
        MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap()
    }

    #[actix_web::test]
    async fn layer_admits_ten_and_refunds_server_errors() {
        let broken = || async { HttpResponse::InternalServerError() };
        let app = App::new()
            .app_data(limit(limiter()).unwrap())
            .wrap(from_fn(limited))
            .route("/", web::get().to(|| async { "hello\n" }))
            .route("/broken", web::get().to(broken));
        let app = init_service(app).await;
        let get = |path: &str, peer: &str| {
            let peer = peer.parse().unwrap();
            call_service(&app, TestRequest::get().uri(path).peer_addr(peer).to_request())
        };
        for left in (0..10).rev() {
            assert_eq!(get("/broken", "192.0.2.1:1").await.status(), 500);
            let response = get("/", "192.0.2.1:1").await;
            assert_eq!(response.status(), 200);
            let headers = response.headers();
            assert!(headers.get("ratelimit").unwrap().to_str().unwrap().starts_with(&format!("\"api\";r={left};")));
        }
        let refused = get("/", "192.0.2.1:2").await;
        assert_eq!(refused.status(), 429);
        assert_eq!(refused.headers().get("retry-after").unwrap(), "6");
        assert_eq!(refused.headers().get("content-type").unwrap(), "application/problem+json");
        assert_eq!(get("/", "192.0.2.2:1").await.status(), 200);
    }
}
