//! In which protocol a request was made, and so how a refusal must look.

use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};

/// The protocol a request speaks, told by its `Content-Type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Protocol {
    /// Anything but gRPC.
    Http,
    /// gRPC: `application/grpc`, alone or with a `+` suffix.
    Grpc,
    /// gRPC-Web: `application/grpc-web` or `application/grpc-web-text`, likewise.
    GrpcWeb {
        /// The answer is to be of the `-text` type, which is base64.
        text: bool,
    },
}

/// In which protocol refusals are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProtocolRule {
    /// In that of the request.
    #[default]
    Auto,
    /// As plain HTTP, whatever the request says. gRPC clients cannot read that.
    AlwaysHttp,
    /// As gRPC; to gRPC-Web requests as gRPC-Web.
    AlwaysGrpc,
}

impl Protocol {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let kind = headers.get(CONTENT_TYPE).map(|value| kind(value.as_bytes()));
        match kind {
            Some(Kind::Grpc) => Self::Grpc,
            Some(Kind::Web) => Self::GrpcWeb { text: accepts_text(headers).unwrap_or(false) },
            Some(Kind::WebText) => Self::GrpcWeb { text: accepts_text(headers).unwrap_or(true) },
            Some(Kind::Other) | None => Self::Http,
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

impl ProtocolRule {
    pub(super) fn apply(self, protocol: Protocol) -> Protocol {
        match (self, protocol) {
            (Self::AlwaysHttp, _) => Protocol::Http,
            (Self::AlwaysGrpc, Protocol::Http) => Protocol::Grpc,
            (Self::Auto | Self::AlwaysGrpc, protocol) => protocol,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Grpc,
    Web,
    WebText,
    Other,
}

/// A media type ends where a `+` suffix, a parameter or nothing follows: `application/grpcfoo` is not gRPC.
fn kind(media_type: &[u8]) -> Kind {
    const TYPES: [(&[u8], Kind); 3] = [
        (b"application/grpc-web-text", Kind::WebText),
        (b"application/grpc-web", Kind::Web),
        (b"application/grpc", Kind::Grpc),
    ];
    let media_type = media_type.trim_ascii();
    for (name, kind) in TYPES {
        let Some((start, rest)) = media_type.split_at_checked(name.len()) else {
            continue;
        };
        if start.eq_ignore_ascii_case(name) && matches!(rest.first(), None | Some(b'+' | b';' | b' ' | b'\t')) {
            return kind;
        }
    }
    Kind::Other
}

/// Whether the client asked for a text answer; nothing if it named neither kind.
fn accepts_text(headers: &HeaderMap) -> Option<bool> {
    let kinds = || {
        let accepted = headers.get_all(ACCEPT).iter();
        accepted.flat_map(|value| value.as_bytes().split(|byte| *byte == b',')).map(kind)
    };
    if kinds().any(|kind| kind == Kind::WebText) {
        return Some(true);
    }
    kinds().any(|kind| kind == Kind::Web).then_some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol(content_type: &'static str, accept: Option<&'static str>) -> Protocol {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(accept) = accept {
            headers.insert(ACCEPT, HeaderValue::from_static(accept));
        }
        Protocol::of(&headers)
    }

    #[test]
    fn the_protocol_is_told_by_the_content_type() {
        let (web, web_text) = (Protocol::GrpcWeb { text: false }, Protocol::GrpcWeb { text: true });
        for (content_type, expected) in [
            ("application/grpc", Protocol::Grpc),
            ("application/grpc+proto", Protocol::Grpc),
            ("Application/GRPC", Protocol::Grpc),
            ("application/grpc;charset=utf-8", Protocol::Grpc),
            ("application/grpc ; charset=utf-8", Protocol::Grpc),
            ("application/grpcfoo", Protocol::Http),
            ("application/grpc-foo", Protocol::Http),
            ("application/grp", Protocol::Http),
            ("application/json", Protocol::Http),
            ("", Protocol::Http),
            ("application/grpc-web", web),
            ("application/grpc-web+proto", web),
            ("application/grpc-webby", Protocol::Http),
            ("application/grpc-web-text", web_text),
            ("application/grpc-web-text+proto", web_text),
            ("application/grpc-web-texts", Protocol::Http),
        ] {
            assert_eq!(protocol(content_type, None), expected, "{content_type:?}");
        }
        assert_eq!(Protocol::of(&HeaderMap::new()), Protocol::Http);
    }

    #[test]
    fn a_web_client_gets_the_type_it_accepts() {
        let text = |content_type, accept| protocol(content_type, Some(accept)) == Protocol::GrpcWeb { text: true };
        assert!(text("application/grpc-web", "application/grpc-web-text"));
        assert!(text("application/grpc-web", "text/html, Application/gRPC-Web-Text+proto;q=0.9"));
        assert!(!text("application/grpc-web-text", "application/grpc-web"));
        assert!(!text("application/grpc-web", "*/*"));
        assert!(text("application/grpc-web-text", "*/*"));
    }

    #[test]
    fn a_rule_overrides_what_the_request_says() {
        let web = Protocol::GrpcWeb { text: true };
        assert_eq!(ProtocolRule::AlwaysHttp.apply(web), Protocol::Http);
        assert_eq!(ProtocolRule::AlwaysGrpc.apply(Protocol::Http), Protocol::Grpc);
        assert_eq!(ProtocolRule::AlwaysGrpc.apply(web), web);
        assert_eq!(ProtocolRule::Auto.apply(Protocol::Http), Protocol::Http);
    }
}
