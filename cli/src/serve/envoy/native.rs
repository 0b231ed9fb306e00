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
use crate::serve::described::{Described, HEADERS_MAX, X_FORWARDED_FOR};
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
                    if headers.len() > HEADERS_MAX {
                        return Err(invalid(format!("the descriptors have more than {HEADERS_MAX} headers")));
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

#[cfg(test)]
mod tests {
    use super::super::messages::{Entry, RateLimitDescriptor};
    use super::*;

    fn described_by(entries: impl Iterator<Item = (String, String)>) -> Result<Described, Code> {
        let entries = entries.map(|(key, value)| Entry { key, value }).collect();
        let descriptors = vec![RateLimitDescriptor { entries, ..Default::default() }];
        let request = RateLimitRequest { domain: "shop".to_owned(), descriptors, hits_addend: 0 };
        described(request, [127, 0, 0, 1].into(), Paths::Normalized).map_err(|status| status.0)
    }

    #[test]
    fn request_of_many_headers_is_refused() {
        let named = |count: u32| described_by((0..count).map(|n| (format!("x-{n}"), "a".to_owned())));
        assert!(named(100).is_ok());
        assert_eq!(named(101).unwrap_err(), Code::InvalidArgument);
        // As many values of one header as a message has room for.
        let of_one = described_by((0..13_000).map(|n| ("x".to_owned(), n.to_string())));
        assert_eq!(of_one.unwrap_err(), Code::InvalidArgument);
        let same = described_by((0..13_000).map(|_| ("x".to_owned(), "a".to_owned())));
        assert_eq!(same.unwrap().headers.get_all("x").iter().count(), 1);
    }

    #[test]
    fn client_cannot_be_named_in_a_header() {
        let entry = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let entries = [entry("x-forwarded-for", "203.0.113.9"), entry("remote_address", "192.0.2.1")];
        let head = described_by(entries.into_iter()).unwrap().into_head();
        assert_eq!(head.headers.get_all(X_FORWARDED_FOR).iter().collect::<Vec<_>>(), ["192.0.2.1"]);
        let hidden = described_by([entry("X-Forwarded-For", "203.0.113.9")].into_iter()).unwrap().into_head();
        assert!(!hidden.headers.contains_key(X_FORWARDED_FOR));
        let two = [entry("remote_address", "192.0.2.1"), entry("remote_address", "203.0.113.9")];
        assert_eq!(described_by(two.into_iter()).unwrap_err(), Code::InvalidArgument);
    }
}
