//! A request that somebody describes: the head that an application behind the proxy would get.

use std::net::IpAddr;

use http::header::{
    CONNECTION, CONTENT_LENGTH, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};
use tower_ratelimit::key::PeerAddr;

/// The header in which proxies report clients.
pub(crate) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The most headers of a described request: as many as hyper reads of one that is sent.
pub(crate) const HEADERS_MAX: usize = 100;

/// A request as a proxy or an application describes it.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    /// The host that the client asked for.
    pub(crate) host: Option<HeaderValue>,
    /// The length of its body.
    pub(crate) length: Option<HeaderValue>,
    /// The other headers.
    pub(crate) headers: HeaderMap,
    /// The peer that describes it. Its `X-Forwarded-For` is believed if it is trusted.
    pub(crate) peer: IpAddr,
}

/// Headers that concern the connection between the proxy and this server.
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    CONTENT_LENGTH,
];

impl Described {
    /// Makes the head.
    pub(crate) fn into_head(self) -> Parts {
        let (mut head, ()) = Request::new(()).into_parts();
        // In HTTP/2 a request without `Content-Length` has a body of unknown length. The proxy may have got one in
        // chunks and does not say so.
        head.version = Version::HTTP_2;
        (head.method, head.uri, head.headers) = (in_upper_case(self.method), self.uri, self.headers);
        for name in &HOP_BY_HOP {
            head.headers.remove(name);
        }
        head.headers.remove(HOST);
        for (name, value) in [(HOST, self.host), (CONTENT_LENGTH, self.length)] {
            value.into_iter().for_each(|value| drop(head.headers.insert(name.clone(), value)));
        }
        head.extensions.insert(PeerAddr::from(self.peer));
        head
    }
}

/// Returns the usual method that this one is in another case. Some proxies pass `post` on, and some applications take
/// it for `POST`: a client must not avoid the rules of a method by it.
fn in_upper_case(method: Method) -> Method {
    const USUAL: [Method; 9] = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::PATCH,
        Method::OPTIONS,
        Method::CONNECT,
        Method::TRACE,
    ];
    USUAL.into_iter().find(|usual| usual.as_str().eq_ignore_ascii_case(method.as_str())).unwrap_or(method)
}
