//! Envoy's questions, answered by rules about requests.
//!
//! The entries of all descriptors together describe one request:
//!
//! | key of an entry | part of the request |
//! |---|---|
//! | `remote_address` | the client's address |
//! | `:method` or `method` | the method; `GET` without it |
//! | `:path` or `path` | the path with its query; without it every rule applies, whatever path it names |
//! | `:authority` or `host` | the host |
//! | any other | a header of this name |
//!
//! `hits_addend` is the header `hits-addend`, for rules with `cost: {header: hits-addend, at-most: …}`. A limit that a
//! descriptor brings along, and hits of its own, are errors: rules about requests know no descriptors.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use http_body_util::{BodyExt, Collected};
use tower_ratelimit::observe::{Outcome, OutcomeKind};

use super::messages::{DescriptorStatus, RateLimitRequest, RateLimitResponse};
use super::status::{code, headers, policy_status};
use crate::serve::described::{Described, X_FORWARDED_FOR};
use crate::serve::grpc::{Code, Status};
use crate::serve::limits::Layer;
use crate::serve::uri::{self, Paths};

const HITS: HeaderName = HeaderName::from_static("hits-addend");

/// Decides about the request that the descriptors describe.
pub(super) async fn answer(
    layer: &Layer,
    request: RateLimitRequest,
    peer: IpAddr,
    paths: Paths,
) -> Result<RateLimitResponse, Status> {
    let count = request.descriptors.len();
    let described = described(request, peer, paths)?;
    match layer.admit(&described.into_head()).await {
        Ok(admission) => {
            let response = response(admission.outcome(), count, &admission.headers());
            admission.keep(); // nobody says how the request ends
            Ok(response)
        }
        Err(refused) if refused.kind() == OutcomeKind::FailedClosed => {
            Err(Status::new(Code::Unavailable, "the limiter cannot answer"))
        }
        Err(refused) => {
            let outcome = refused.outcome().clone();
            let (parts, body) = refused.into_http().into_parts();
            let body = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
            Ok(RateLimitResponse { raw_body: body.to_vec(), ..response(&outcome, count, &parts.headers) })
        }
    }
}

/// Envoy wants a status for each descriptor. All of them describe one request, so each gets that of the policy which
/// decides about the request.
fn response(outcome: &Outcome, count: usize, response_headers: &HeaderMap) -> RateLimitResponse {
    let is_over = !outcome.kind().passed();
    let status = match outcome.binding() {
        Some(policy) => policy_status(policy, is_over, Some(policy.policy().name())),
        None => DescriptorStatus {
            code: code(is_over),
            limit_remaining: if is_over { 0 } else { u32::MAX },
            ..Default::default()
        },
    };
    RateLimitResponse {
        overall_code: code(is_over),
        statuses: vec![status; count],
        response_headers_to_add: headers(response_headers),
        raw_body: Vec::new(),
    }
}

fn described(request: RateLimitRequest, peer: IpAddr, paths: Paths) -> Result<Described, Status> {
    let invalid = |message: String| Status::new(Code::InvalidArgument, message);
    let (mut method, mut path, mut host, mut client) = (None, None, None, None);
    let mut headers = HeaderMap::new();
    for descriptor in request.descriptors {
        if descriptor.limit.is_some() || descriptor.hits_addend.is_some() || descriptor.is_negative_hits {
            let message = "a descriptor has no limit and no hits of its own for rules about requests: use a file in \
                           Envoy's form";
            return Err(invalid(message.to_owned()));
        }
        for entry in descriptor.entries {
            let slot = match &*entry.key {
                ":method" | "method" => &mut method,
                ":path" | "path" => &mut path,
                ":authority" | "host" => &mut host,
                "remote_address" => &mut client,
                name => {
                    let name = HeaderName::from_bytes(name.as_bytes())
                        .map_err(|_| invalid(format!("the key {name:?} of a descriptor is not a header name")))?;
                    let value = HeaderValue::from_str(&entry.value)
                        .map_err(|_| invalid(format!("the value of {name} is not a header value")))?;
                    if !headers.get_all(&name).iter().any(|known| known == value) {
                        headers.append(name, value);
                    }
                    continue;
                }
            };
            if slot.get_or_insert_with(|| entry.value.clone()) != &entry.value {
                return Err(invalid(format!("the descriptors have two values of {}", entry.key)));
            }
        }
    }
    headers.remove(X_FORWARDED_FOR);
    if let Some(client) = client {
        let client =
            HeaderValue::from_str(&client).map_err(|_| invalid("remote_address is not an IP address".to_owned()))?;
        headers.insert(X_FORWARDED_FOR, client);
    }
    headers.insert(HITS, HeaderValue::from(request.hits_addend.max(1)));
    let method = method.map_or(Ok(Method::GET), |method| Method::from_bytes(method.as_bytes()));
    let host = host.map(|host| HeaderValue::from_str(&host)).transpose();
    let uri = path.map_or(Some(Uri::from_static("*")), |path| uri::read(path.as_bytes(), paths));
    Ok(Described {
        method: method.map_err(|_| invalid("the method is none".to_owned()))?,
        uri: uri.ok_or_else(|| invalid("the path is none".to_owned()))?,
        host: host.map_err(|_| invalid("the host is none".to_owned()))?,
        length: None,
        headers,
        peer,
    })
}
