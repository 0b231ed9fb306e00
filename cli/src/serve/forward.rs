//! Forward authentication: a proxy asks about each request before it passes it on.
//!
//! | path | proxy | where the request is described | a refusal |
//! |---|---|---|---|
//! | `/auth/nginx` | nginx, `auth_request` | `X-Original-Method`, `X-Original-URI`, `Host` | 401, see below |
//! | `/auth/caddy`, `/auth/traefik`, `/auth/haproxy` | Caddy `forward_auth`, Traefik `ForwardAuth`, HAProxy with our script | `X-Forwarded-Method`, `-Uri`, `-Host` | as the client gets it |
//! | `/auth/envoy/…` | Envoy `ext_authz` over HTTP | the request itself, behind the prefix | as the client gets it |
//!
//! The client's address is in `X-Forwarded-For`. Only a trusted proxy reaches this code.
//!
//! A request that may pass is answered with 200 and the headers that report limits. nginx knows 2xx, 401 and 403, and
//! answers everything else with 500. So a refusal is 401 for it, with the true status and the body in headers, from
//! which nginx makes the response. 403 stays for clients that an access list denies.

use std::net::IpAddr;

use http::header::HOST;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use http_body_util::BodyExt;
use tower_ratelimit::middleware::Refused;

use super::described::Described;
use super::respond::{Body, body, text};
use super::server::Server;
use super::uri::{self, Paths};

/// How a proxy describes a request, and how it reads a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proxy {
    Nginx,
    /// Caddy, Traefik and HAProxy.
    Forwarded,
    Envoy,
}

/// The beginning of the paths that Envoy asks.
const ENVOY: &str = "/auth/envoy";

const ORIGINAL_METHOD: HeaderName = HeaderName::from_static("x-original-method");
const ORIGINAL_URI: HeaderName = HeaderName::from_static("x-original-uri");
const ORIGINAL_LENGTH: HeaderName = HeaderName::from_static("x-original-content-length");
const FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The status of a refusal and its body, for nginx.
const STATUS: HeaderName = HeaderName::from_static("x-ratelimit-status");
const BODY: HeaderName = HeaderName::from_static("x-ratelimit-body");

/// The largest body that is handed over in a header. nginx reads a response's head into 4 or 8 KiB.
const HEADER_BODY_MAX: usize = 2 << 10;

impl Proxy {
    /// Returns the proxy that asks at a path.
    pub(crate) fn of_path(path: &str) -> Option<Self> {
        match path {
            "/auth/nginx" => Some(Self::Nginx),
            "/auth/caddy" | "/auth/traefik" | "/auth/haproxy" => Some(Self::Forwarded),
            _ => path.strip_prefix(ENVOY).filter(|rest| rest.starts_with('/')).map(|_| Self::Envoy),
        }
    }

    /// Returns the request that the proxy asks about.
    fn described(self, mut asked: Parts, peer: IpAddr, paths: Paths) -> Result<Described, String> {
        let (method, target, host, length) = match self {
            Self::Nginx => {
                let method = only(&mut asked.headers, &ORIGINAL_METHOD)?;
                let target = only(&mut asked.headers, &ORIGINAL_URI)?;
                let length = at_most_one(&mut asked.headers, &ORIGINAL_LENGTH)?;
                let host = at_most_one(&mut asked.headers, &HOST)?;
                (method, target, host, length)
            }
            Self::Forwarded => {
                let method = only(&mut asked.headers, &FORWARDED_METHOD)?;
                let target = only(&mut asked.headers, &FORWARDED_URI)?;
                let host = at_most_one(&mut asked.headers, &FORWARDED_HOST)?;
                let host = host.or_else(|| asked.headers.remove(HOST));
                (method, target, host, None)
            }
            Self::Envoy => {
                let target = asked.uri.path_and_query().map_or("/", |target| target.as_str());
                let target = HeaderValue::from_str(target.strip_prefix(ENVOY).unwrap_or(target));
                let target = target.map_err(|_| "the path is none".to_owned())?;
                let method = HeaderValue::from_str(asked.method.as_str());
                let method = method.map_err(|_| "the method is none".to_owned())?;
                // In HTTP/2 the host is in the URI.
                let host = asked.uri.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
                let host = host.or_else(|| asked.headers.remove(HOST));
                // Envoy sends the body's length as it is, if it sends no body.
                (method, target, host, None)
            }
        };
        let method = Method::from_bytes(method.as_bytes()).map_err(|_| "the method is none".to_owned())?;
        let uri = uri::read(target.as_bytes(), paths).ok_or("the path is none, or too long")?;
        Ok(Described { method, uri, host, length, headers: asked.headers, peer })
    }
}

/// Takes a header that the proxy has to set, once.
fn only(headers: &mut HeaderMap, name: &HeaderName) -> Result<HeaderValue, String> {
    at_most_one(headers, name)?.ok_or_else(|| format!("the proxy has to set the header {name}"))
}

/// Takes a header that the proxy sets at most once.
fn at_most_one(headers: &mut HeaderMap, name: &HeaderName) -> Result<Option<HeaderValue>, String> {
    if headers.get_all(name).iter().nth(1).is_some() {
        return Err(format!("the header {name} comes twice: the proxy has to replace that of the client"));
    }
    Ok(headers.remove(name))
}

/// Answers a proxy.
pub(crate) async fn answer(server: &Server, proxy: Proxy, asked: Parts, peer: IpAddr) -> Response<Body> {
    let described = match proxy.described(asked, peer, server.paths) {
        Ok(described) => described,
        Err(message) => {
            server.log_sometimes("proxy", &message);
            return text(StatusCode::BAD_REQUEST, &message);
        }
    };
    match server.limits.admit(&described.into_head()).await {
        Some(Ok(admission)) => {
            let mut response = Response::new(body(""));
            admission.add_headers(response.headers_mut());
            admission.keep(); // nobody says how the request ends
            response
        }
        Some(Err(refused)) => refusal(proxy, *refused).await,
        None => {
            text(StatusCode::NOT_IMPLEMENTED, "the file of rules has Envoy's form, and says nothing about requests")
        }
    }
}

/// Makes the refusal that the proxy passes on.
async fn refusal(proxy: Proxy, refused: Refused) -> Response<Body> {
    let (mut parts, refusal) = refused.into_http().into_parts();
    let bytes = refusal.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    if proxy == Proxy::Nginx && parts.status != StatusCode::FORBIDDEN {
        if let Ok(status) = HeaderValue::from_str(parts.status.as_str()) {
            parts.headers.insert(STATUS, status);
        }
        let line = HeaderValue::from_bytes(&bytes).ok().filter(|_| bytes.len() <= HEADER_BODY_MAX);
        line.into_iter().for_each(|line| drop(parts.headers.insert(BODY, line)));
        // Everything else but 403 is 500 for nginx. That fits a limiter that fails.
        if !parts.status.is_server_error() {
            parts.status = StatusCode::UNAUTHORIZED;
        }
    }
    Response::from_parts(parts, body(bytes))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn described(proxy: Proxy, uri: &str, headers: &[(&str, &str)]) -> Result<Parts, String> {
        let mut request = Request::get(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (asked, ()) = request.body(()).unwrap().into_parts();
        Ok(proxy.described(asked, [127, 0, 0, 1].into(), Paths::Normalized)?.into_head())
    }

    #[test]
    fn each_proxy_describes_the_request_in_its_own_headers() {
        let nginx: &[_] = &[
            ("x-original-method", "POST"),
            ("x-original-uri", "/a//b?c"),
            ("x-original-content-length", "7"),
            ("content-length", "0"),
            ("host", "shop.example"),
            ("x-forwarded-uri", "/of-the-client"),
            ("connection", "close"),
            ("x-api-key", "k"),
        ];
        let head = described(Proxy::Nginx, "/auth/nginx", nginx).unwrap();
        assert_eq!((head.method.as_str(), head.uri.to_string().as_str()), ("POST", "/a/b?c"));
        assert_eq!(head.headers["host"], "shop.example");
        assert_eq!(head.headers["content-length"], "7");
        assert!(head.headers.contains_key("x-api-key") && !head.headers.contains_key("connection"));

        let forwarded: &[_] = &[
            ("x-forwarded-method", "PUT"),
            ("x-forwarded-uri", "/x"),
            ("x-forwarded-host", "shop.example"),
            ("host", "limiter:8080"),
            ("x-original-uri", "/of-the-client"),
            ("content-length", "3"),
        ];
        let head = described(Proxy::Forwarded, "/auth/caddy", forwarded).unwrap();
        assert_eq!((head.method.as_str(), head.uri.path()), ("PUT", "/x"));
        assert_eq!(head.headers["host"], "shop.example");
        assert!(!head.headers.contains_key("content-length"), "it is that of the proxy's question");

        let head = described(Proxy::Envoy, "/auth/envoy/x/../y?z=1", &[("host", "shop.example")]).unwrap();
        assert_eq!((head.method.as_str(), head.uri.to_string().as_str()), ("GET", "/y?z=1"));
        assert_eq!(head.headers["host"], "shop.example");
    }

    #[test]
    fn header_of_the_client_never_replaces_one_of_the_proxy() {
        for headers in [
            &[("x-original-method", "GET")][..],
            &[("x-original-uri", "/a")],
            &[("x-original-method", "GET"), ("x-original-uri", "/a"), ("x-original-uri", "/b")],
            &[("x-original-method", "G T"), ("x-original-uri", "/a")],
            &[("x-original-method", "GET"), ("x-original-uri", "a")],
            &[("x-forwarded-method", "GET"), ("x-forwarded-uri", "/a")],
            &[("x-original-method", "GET"), ("x-original-uri", "/a"), ("host", "a.example"), ("host", "b.example")],
            &[
                ("x-original-method", "PUT"),
                ("x-original-uri", "/a"),
                ("x-original-content-length", "1"),
                ("x-original-content-length", "9"),
            ],
        ] {
            assert!(described(Proxy::Nginx, "/auth/nginx", headers).is_err(), "{headers:?}");
        }
        let hosts = [
            ("x-forwarded-method", "GET"),
            ("x-forwarded-uri", "/a"),
            ("x-forwarded-host", "a.example"),
            ("x-forwarded-host", "b.example"),
        ];
        assert!(described(Proxy::Forwarded, "/auth/caddy", &hosts).is_err());
    }

    #[test]
    fn path_names_the_proxy() {
        for (path, proxy) in [
            ("/auth/nginx", Some(Proxy::Nginx)),
            ("/auth/traefik", Some(Proxy::Forwarded)),
            ("/auth/envoy/a", Some(Proxy::Envoy)),
            ("/auth/envoyer", None),
            ("/auth", None),
        ] {
            assert_eq!(Proxy::of_path(path), proxy, "{path}");
        }
    }
}
