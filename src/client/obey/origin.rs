//! The default key of a request: the origin.

use crate::base::head::Head;
use crate::key::Key;

/// Returns the origin of a request: scheme, host and port. Returns the global key if neither the
/// URI nor a `Host` header names a host, because the service is then connected to one server.
pub(super) fn origin(head: &Head<'_>) -> Option<Key> {
    let of_header = || head.headers.get(http::header::HOST)?.to_str().ok()?.parse().ok();
    let Some(authority) = head.uri.authority().cloned().or_else(of_header) else { return Some(Key::global()) };
    let scheme = head.uri.scheme_str().unwrap_or("http").to_ascii_lowercase();
    let default = if scheme == "https" || scheme == "wss" { 443 } else { 80 };
    let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
    // The origin is one text, so that errors show it as it is usually written.
    Key::of(format!("{scheme}://{host}:{}", authority.port_u16().unwrap_or(default)).as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn shown(uri: &str, host: Option<&str>) -> Option<String> {
        let mut request = Request::builder().uri(uri);
        if let Some(host) = host {
            request = request.header("host", host);
        }
        let parts = request.body(()).unwrap().into_parts().0;
        origin(&Head::from(&parts)).map(|key| key.display().to_string())
    }

    #[test]
    fn origin_is_scheme_host_and_port() {
        for (uri, host, expected) in [
            ("http://example.org/a?b", None, Some("http://example.org:80")),
            ("https://Example.ORG./", None, Some("https://example.org:443")),
            ("https://example.org:8443/", Some("other"), Some("https://example.org:8443")),
            ("http://user:word@[::1]:81/", None, Some("http://[::1]:81")),
            ("/a", Some("example.org:99"), Some("http://example.org:99")),
            ("/a", Some("exa mple"), Some("(all requests)")),
            ("/a", None, Some("(all requests)")),
            ("*", None, Some("(all requests)")),
        ] {
            assert_eq!(shown(uri, host).as_deref(), expected, "{uri} {host:?}");
        }
    }
}
