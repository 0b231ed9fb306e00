//! The protocol of a request, in which the refusal must be sent.

use http::header::{ACCEPT, CONTENT_TYPE, TE};
use http::{HeaderMap, HeaderValue, Method, Version};

use crate::base::fields::is_unacceptable;
use crate::base::head::Head;

/// The protocol in which a client expects its answer.
///
/// A gRPC refusal has the HTTP status 200, which a cache takes for a success. Therefore only
/// requests that are gRPC requests in every respect get a gRPC refusal. A `Content-Type` alone is
/// no proof, because any client can send it with a `GET`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Protocol {
    /// Anything but gRPC.
    Http,
    /// gRPC: a `POST` with one `Content-Type`, which is `application/grpc`, alone or with a `+`
    /// suffix. The request comes over HTTP/2 or later, or has `TE: trailers`.
    Grpc,
    /// gRPC-Web: a `POST` with one `Content-Type`, which is `application/grpc-web` or
    /// `application/grpc-web-text`, alone or with a `+` suffix.
    GrpcWeb {
        /// Whether the answer has the `-text` type, which is base64.
        text: bool,
    },
}

impl Protocol {
    /// Returns the protocol of a request, for middleware of your own that refuses requests.
    ///
    /// A client chooses the protocol by its headers. So do not write a rule that applies to one protocol only:
    /// a client could avoid the rule. Use the path, which also names the method of a gRPC call.
    ///
    /// ```
    /// use http::{Request, Version};
    /// use tower_ratelimit::{Head, middleware::Protocol};
    ///
    /// let call = Request::post("/greeter.Greeter/Greet")
    ///     .version(Version::HTTP_2)
    ///     .header("content-type", "application/grpc")
    ///     .body(())?;
    /// assert_eq!(Protocol::of(&Head::from(&call)), Protocol::Grpc);
    /// # Ok::<(), http::Error>(())
    /// ```
    #[must_use]
    pub fn of(head: &Head<'_>) -> Self {
        if head.method != Method::POST {
            return Self::Http;
        }
        let headers = head.headers;
        match of_content(headers) {
            Self::Grpc if head.version < Version::HTTP_2 && !has_te_trailers(headers) => Self::Http,
            Self::GrpcWeb { text } => Self::GrpcWeb { text: accepts_text(headers).unwrap_or(text) },
            protocol => protocol,
        }
    }

    /// The `Content-Type` of a response without messages.
    pub(super) fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Http | Self::Grpc => "application/grpc",
            Self::GrpcWeb { text: false } => "application/grpc-web+proto",
            Self::GrpcWeb { text: true } => "application/grpc-web-text+proto",
        })
    }
}

/// Returns the protocol of the request's content. A request with several content types, in several
/// header lines or in one line, is not gRPC.
fn of_content(headers: &HeaderMap) -> Protocol {
    let mut lines = headers.get_all(CONTENT_TYPE).iter();
    match (lines.next(), lines.next()) {
        (Some(only), None) if !only.as_bytes().contains(&b',') => of_type(only.as_bytes()),
        _ => Protocol::Http,
    }
}

/// Returns the protocol of a media type. The parameters of the media type do not matter, and
/// `application/grpcfoo` is not gRPC.
fn of_type(media_type: &[u8]) -> Protocol {
    const TYPES: [(&[u8], Protocol); 3] = [
        (b"application/grpc", Protocol::Grpc),
        (b"application/grpc-web", Protocol::GrpcWeb { text: false }),
        (b"application/grpc-web-text", Protocol::GrpcWeb { text: true }),
    ];
    let essence = media_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let (name, suffix) = match essence.iter().position(|byte| *byte == b'+') {
        Some(plus) => essence.split_at(plus),
        None => (essence, &[][..]),
    };
    if suffix.iter().any(|byte| !is_token(*byte)) {
        return Protocol::Http;
    }
    TYPES.iter().find(|(known, _)| name.eq_ignore_ascii_case(known)).map_or(Protocol::Http, |(_, protocol)| *protocol)
}

/// The maximum number of members that are read from a list in a header, because a client can send
/// many.
const MEMBERS_MAX: usize = 64;

/// Returns whether a token of RFC 9110 may contain this byte.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Returns whether the client says that it reads trailers, as gRPC's HTTP/2 mapping requires.
fn has_te_trailers(headers: &HeaderMap) -> bool {
    let mut members = headers.get_all(TE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    members.by_ref().take(MEMBERS_MAX).any(|member| member.trim_ascii().eq_ignore_ascii_case(b"trailers"))
}

/// Returns whether the client accepts the `-text` type. Returns `None` if it names neither this type nor the binary
/// type. A client that names only one of the two types, with the weight 0, gets the other type.
fn accepts_text(headers: &HeaderMap) -> Option<bool> {
    let (mut best, mut members) = (None, 0);
    for value in headers.get_all(ACCEPT) {
        for range in value.as_bytes().split(|byte| *byte == b',') {
            members += 1;
            if members > MEMBERS_MAX {
                break;
            }
            if let Protocol::GrpcWeb { text } = of_type(range) {
                best = best.max(Some((!is_unacceptable(range), text)));
            }
        }
    }
    best.map(|(is_accepted, text)| text == is_accepted)
}

#[cfg(test)]
mod tests {
    use http::{Request, request};

    use super::*;

    fn post(content_type: &str) -> request::Builder {
        Request::post("/").version(Version::HTTP_2).header(CONTENT_TYPE, content_type)
    }

    fn protocol(request: request::Builder) -> Protocol {
        Protocol::of(&Head::from(&request.body(()).unwrap()))
    }

    const WEB: Protocol = Protocol::GrpcWeb { text: false };
    const WEB_TEXT: Protocol = Protocol::GrpcWeb { text: true };

    #[test]
    fn a_media_type_names_its_protocol() {
        for (content_type, expected) in [
            ("application/grpc", Protocol::Grpc),
            ("application/grpc+proto", Protocol::Grpc),
            ("Application/GRPC", Protocol::Grpc),
            ("application/grpc;charset=utf-8", Protocol::Grpc),
            ("application/grpc ; charset=utf-8", Protocol::Grpc),
            ("application/grpc+json; a=b", Protocol::Grpc),
            ("application/grpc+proto text/html", Protocol::Http),
            ("application/grpc text/html", Protocol::Http),
            ("application/grpc, text/html", Protocol::Http),
            ("application/grpc+proto,text/html", Protocol::Http),
            ("application/grpc;a=b, text/html", Protocol::Http),
            ("text/html, application/grpc", Protocol::Http),
            ("application/grpcfoo", Protocol::Http),
            ("application/grpc-foo", Protocol::Http),
            ("application/grp", Protocol::Http),
            ("application/json", Protocol::Http),
            ("application/json;a=application/grpc", Protocol::Http),
            (";application/grpc", Protocol::Http),
            ("+", Protocol::Http),
            ("", Protocol::Http),
            ("application/grpc-web", WEB),
            ("application/grpc-web+proto", WEB),
            ("application/grpc-webby", Protocol::Http),
            ("application/grpc-web-text", WEB_TEXT),
            ("application/grpc-web-text+proto", WEB_TEXT),
            ("application/grpc-web-texts", Protocol::Http),
        ] {
            assert_eq!(protocol(post(content_type)), expected, "{content_type:?}");
        }
        assert_eq!(protocol(Request::post("/").version(Version::HTTP_2)), Protocol::Http);
    }

    #[test]
    fn grpc_is_a_post_over_http_2_or_with_te_trailers() {
        for method in ["GET", "HEAD", "PUT", "OPTIONS", "post", "POSTS", "QUERY"] {
            for content_type in ["application/grpc", "application/grpc-web", "application/grpc-web-text"] {
                let request = post(content_type).header(TE, "trailers").method(method);
                assert_eq!(protocol(request), Protocol::Http, "{method} {content_type}");
            }
        }
        for (version, te, expected) in [
            (Version::HTTP_3, None, Protocol::Grpc),
            (Version::HTTP_2, None, Protocol::Grpc),
            (Version::HTTP_11, None, Protocol::Http),
            (Version::HTTP_10, None, Protocol::Http),
            (Version::HTTP_11, Some("trailers"), Protocol::Grpc),
            (Version::HTTP_11, Some("deflate;q=0.5, Trailers"), Protocol::Grpc),
            (Version::HTTP_11, Some("trailersx"), Protocol::Http),
            (Version::HTTP_11, Some("gzip"), Protocol::Http),
        ] {
            let request = post("application/grpc").version(version);
            let request = te.into_iter().fold(request, |request, te| request.header(TE, te));
            assert_eq!(protocol(request), expected, "{version:?} {te:?}");
        }
        assert_eq!(protocol(post("application/grpc-web").version(Version::HTTP_11)), WEB);
    }

    #[test]
    fn two_content_types_are_none() {
        for (first, second) in [("application/grpc", "text/html"), ("text/html", "application/grpc-web")] {
            assert_eq!(protocol(post(first).header(CONTENT_TYPE, second)), Protocol::Http);
        }
        assert_eq!(protocol(post("application/grpc").header(CONTENT_TYPE, "application/grpc")), Protocol::Http);
    }

    #[test]
    fn a_web_client_gets_the_type_it_accepts() {
        let text = |content_type, accept| protocol(post(content_type).header(ACCEPT, accept)) == WEB_TEXT;
        assert!(text("application/grpc-web", "application/grpc-web-text"));
        assert!(text("application/grpc-web", "text/html, Application/gRPC-Web-Text+proto;q=0.9"));
        assert!(text("application/grpc-web", "application/grpc-web, application/grpc-web-text"));
        assert!(!text("application/grpc-web-text", "application/grpc-web"));
        assert!(!text("application/grpc-web", "*/*"));
        assert!(text("application/grpc-web-text", "*/*"));
        // A kind that the client does not take is not chosen.
        assert!(!text("application/grpc-web-text", "application/grpc-web-text;q=0"));
        assert!(!text("application/grpc-web", "application/grpc-web-text; q=0.00, application/grpc-web"));
        assert!(text("application/grpc-web", "application/grpc-web;Q=0, */*"));
        assert!(text("application/grpc-web", "application/grpc-web;q=0, application/grpc-web-text;q=0.001"));
    }

    #[test]
    fn lists_are_read_as_far_as_64_members() {
        let (few, many) = (",".repeat(63), ",".repeat(64));
        let te =
            |commas: &str| post("application/grpc").version(Version::HTTP_11).header(TE, format!("{commas}trailers"));
        assert_eq!([te(&few), te(&many)].map(protocol), [Protocol::Grpc, Protocol::Http]);
        let accept =
            |commas: &str| post("application/grpc-web").header(ACCEPT, format!("{commas}application/grpc-web-text"));
        assert_eq!([accept(&few), accept(&many)].map(protocol), [WEB_TEXT, WEB]);
    }
}
