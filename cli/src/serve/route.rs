//! Finds the part of the server that answers a request.

use std::net::IpAddr;
use std::sync::Arc;

use http::{Request, Response, Version};
use hyper::body::Incoming;

use super::respond::Body;
use super::server::{Role, Server};
use super::{admin, api, envoy, forward, grpc, health};

/// Answers a request.
pub(crate) async fn answer(
    server: &Arc<Server>,
    role: Role,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Response<Body> {
    match role {
        Role::Admin => admin::answer(server, peer, request).await,
        Role::Asked => answer_asked(server, peer, request).await,
    }
}

/// Answers a proxy or an application.
async fn answer_asked(server: &Server, peer: IpAddr, request: Request<Incoming>) -> Response<Body> {
    let (head, incoming) = request.into_parts();
    if let Some(proxy) = forward::Proxy::of_path(head.uri.path()) {
        return forward::answer(server, proxy, head, peer).await;
    }
    if head.version == Version::HTTP_2 && grpc::is_call(&head) {
        return answer_call(server, peer, head.uri.path(), incoming).await;
    }
    match head.uri.path() {
        "/live" => admin::live(),
        "/ready" => admin::ready(server),
        path @ ("/v1/check" | "/v1/report") => {
            let fields = match api::posted(&head, incoming).await {
                Ok(fields) => fields,
                Err(response) => return *response,
            };
            let answer =
                if path == "/v1/check" { api::check(server, fields, peer).await } else { api::report(server, fields) };
            api::response(answer)
        }
        _ => api::not_found(),
    }
}

/// Answers a call of gRPC.
async fn answer_call(server: &Server, peer: IpAddr, path: &str, incoming: Incoming) -> Response<Body> {
    match path {
        envoy::METHOD => {
            let answer = match grpc::read::<envoy::RateLimitRequest>(incoming).await {
                Ok(request) => envoy::answer(server, request, peer).await,
                Err(status) => Err(status),
            };
            grpc::respond::<envoy::RateLimitResponse>(answer)
        }
        health::CHECK => {
            let asked = grpc::read::<health::Request>(incoming).await;
            grpc::respond::<health::Answer>(asked.and_then(|request| server.health.check(&request)))
        }
        health::WATCH => match grpc::read::<health::Request>(incoming).await {
            Ok(request) => server.health.watch(request),
            Err(status) => grpc::respond::<health::Answer>(Err(status)),
        },
        _ => grpc::respond::<health::Answer>(Err(grpc::Status::new(
            grpc::Code::Unimplemented,
            "there is no such method",
        ))),
    }
}
