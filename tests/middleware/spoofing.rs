//! No header makes a client appear as another client.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};

use axum::body::Body;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, service_fn};
use tower_ratelimit::key::{self, PeerAddr, Prefixes, TrustedProxies};
use tower_ratelimit::rules::Rules;
use tower_ratelimit::{
    Head, Key, MemoryLimiter,
    middleware::{Access, AccessList},
};

const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9));

fn parts(name: &'static str, lines: &[Vec<u8>]) -> Parts {
    let (mut parts, ()) = http::Request::new(()).into_parts();
    parts.extensions.insert(PeerAddr::from(PEER));
    for line in lines {
        if let Ok(value) = HeaderValue::from_bytes(line) {
            parts.headers.append(HeaderName::from_static(name), value);
        }
    }
    parts
}

/// Makes any bytes of a header value that a client may send, mostly meaningful ones.
fn claim() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just("for=6.6.6.6".as_bytes().to_vec()),
        Just(b"6.6.6.6".to_vec()),
        Just(b"\"[2001:db8::6]:1\"".to_vec()),
        Just(b"for=".to_vec()),
        Just(b"unknown".to_vec()),
        prop::sample::select(b",;=\"\\[]:% ".to_vec()).prop_map(|byte| vec![byte]),
        prop::collection::vec(prop_oneof![0x20..=0x7e_u8, 0x80..=0xff_u8], 0..4),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

fn append(claim: &[u8], told: &str) -> Vec<u8> {
    [claim, b", ", told.as_bytes()].concat()
}

fn ways() -> [TrustedProxies; 2] {
    [TrustedProxies::count(1).unwrap(), TrustedProxies::networks(["10.0.0.0/8"]).unwrap()]
}

/// A CDN, its header, how to read it, the header's lines, and the client that they mean.
type CdnRow<'a> = (&'a str, &'static str, TrustedProxies, &'a [&'a str], Option<&'a str>);

/// The headers of CDNs and clouds, read as the guide says: the header's lines, and the client that they mean. The
/// first entries are a client's own claims.
#[test]
fn headers_of_cdns_and_clouds_name_the_client() {
    let count = |count| TrustedProxies::count(count).unwrap();
    let single = |name| TrustedProxies::networks(["10.0.0.0/8"]).unwrap().single_header(name).unwrap();
    let (v4, v6) = ("203.0.113.9", "2001:db8:1:2:3:4:5:6");
    let cloudfront = "cloudfront-viewer-address";
    let rows: [CdnRow<'_>; 36] = [
        ("AWS", "x-forwarded-for", count(1), &["6.6.6.6, 203.0.113.9"], Some(v4)),
        ("AWS", "x-forwarded-for", count(1), &["6.6.6.6", "2001:db8:1:2:3:4:5:6"], Some(v6)),
        ("AWS, with ports", "x-forwarded-for", count(1), &["6.6.6.6:1, 203.0.113.9:46532"], Some(v4)),
        ("AWS, with ports", "x-forwarded-for", count(1), &["[2001:db8:1:2:3:4:5:6]:46532"], Some(v6)),
        ("CloudFront", cloudfront, single(cloudfront), &["203.0.113.9:46532"], Some(v4)),
        ("CloudFront", cloudfront, single(cloudfront), &["2001:db8:1:2:3:4:5:6:46532"], Some(v6)),
        ("CloudFront", cloudfront, single(cloudfront), &["[2001:db8:1:2:3:4:5:6]:46532"], Some(v6)),
        ("CloudFront", cloudfront, single(cloudfront), &["2001:db8::9:46532"], Some("2001:db8::9")),
        ("CloudFront", cloudfront, single(cloudfront), &["2001:db8::9:1"], Some("2001:db8::9")),
        ("CloudFront", cloudfront, single(cloudfront), &["::ffff:203.0.113.9:46532"], Some(v4)),
        ("CloudFront, no port", cloudfront, single(cloudfront), &["2001:db8:1:2:3:4:5:6"], Some(v6)),
        ("CloudFront, no port", cloudfront, single(cloudfront), &["203.0.113.9"], Some(v4)),
        ("CloudFront, forged", cloudfront, single(cloudfront), &["6.6.6.6:1", "203.0.113.9:46532"], None),
        ("CloudFront, forged", cloudfront, single(cloudfront), &["6.6.6.6:1, 203.0.113.9:46532"], None),
        ("CloudFront, text", cloudfront, single(cloudfront), &["2001:db8::9:port"], None),
        ("CloudFront and AWS", "x-forwarded-for", count(2), &["6.6.6.6, 203.0.113.9, 130.176.0.1"], Some(v4)),
        ("CloudFront and AWS", "x-forwarded-for", count(2), &["2001:db8:1:2:3:4:5:6, 130.176.0.1"], Some(v6)),
        ("Cloudflare", "cf-connecting-ip", single("cf-connecting-ip"), &["203.0.113.9"], Some(v4)),
        ("Cloudflare", "cf-connecting-ip", single("cf-connecting-ip"), &["2001:db8:1:2:3:4:5:6"], Some(v6)),
        ("Cloudflare, forged", "cf-connecting-ip", single("cf-connecting-ip"), &["6.6.6.6", "203.0.113.9"], None),
        ("Fly", "fly-client-ip", single("fly-client-ip"), &["203.0.113.9"], Some(v4)),
        ("Fly", "fly-client-ip", single("fly-client-ip"), &["2001:db8:1:2:3:4:5:6"], Some(v6)),
        ("Akamai", "true-client-ip", single("true-client-ip"), &["203.0.113.9"], Some(v4)),
        ("Akamai", "true-client-ip", single("true-client-ip"), &["2001:db8:1:2:3:4:5:6"], Some(v6)),
        ("Azure Front Door", "x-azure-socketip", single("x-azure-socketip"), &["203.0.113.9"], Some(v4)),
        ("Azure Front Door", "x-azure-socketip", single("x-azure-socketip"), &["2001:db8:1:2:3:4:5:6"], Some(v6)),
        ("Azure gateway", "x-forwarded-for", count(1), &["6.6.6.6, 203.0.113.9:50123"], Some(v4)),
        ("Azure gateway", "x-forwarded-for", count(1), &["6.6.6.6, [2001:db8:1:2:3:4:5:6]:50123"], Some(v6)),
        ("Google", "x-forwarded-for", count(2), &["6.6.6.6, 203.0.113.9,34.120.0.1"], Some(v4)),
        ("Google", "x-forwarded-for", count(2), &["6.6.6.6,2001:db8:1:2:3:4:5:6,2600:1901::1"], Some(v6)),
        ("Google and nginx", "x-forwarded-for", count(3), &["203.0.113.9,34.120.0.1, 35.191.0.1"], Some(v4)),
        ("Google, too short", "x-forwarded-for", count(2), &["203.0.113.9"], None),
        ("Fastly", "fastly-client-ip", single("fastly-client-ip"), &["203.0.113.9"], Some(v4)),
        ("Fastly", "fastly-client-ip", single("fastly-client-ip"), &["2001:db8:1:2:3:4:5:6"], Some(v6)),
        ("Heroku", "x-forwarded-for", count(1), &["6.6.6.6,203.0.113.9"], Some(v4)),
        ("Heroku", "x-forwarded-for", count(1), &["6.6.6.6,2001:db8:1:2:3:4:5:6"], Some(v6)),
    ];
    for (cdn, name, proxies, lines, expected) in rows {
        let lines: Vec<Vec<u8>> = lines.iter().map(|line| line.as_bytes().to_vec()).collect();
        let found = key::client_address(&proxies, &Head::from(&parts(name, &lines)));
        assert_eq!(found, expected.map(|address| address.parse().unwrap()), "{cdn}: {lines:?}");
    }
    // No other header is split at its last colon: this is an address.
    let plain = parts("x-real-ip", &[b"2001:db8::9:46532".to_vec()]);
    let whole = key::client_address(&single("x-real-ip"), &Head::from(&plain));
    assert_eq!(whole, "2001:db8::9:46532".parse().ok());
}

/// Returns a client's headers as a trusted proxy sends them on: it appends to the last line, or adds a line.
fn forwarded_by_proxy(claims: &[Vec<u8>], told: &str, own_line: bool) -> Vec<Vec<u8>> {
    let mut lines = claims.to_vec();
    match lines.last_mut().filter(|_| !own_line) {
        Some(last) => *last = append(last, told),
        None => lines.push(told.as_bytes().to_vec()),
    }
    lines
}

/// A list that allows the proxy's network, and denies another.
fn list() -> AccessList {
    let list = AccessList::new();
    list.set("10.0.0.0/8", Access::Allow).unwrap();
    list.set("198.51.100.0/24", Access::Deny).unwrap();
    list
}

const HEADERS: [&str; 4] = ["x-forwarded-for", "forwarded", "x-real-ip", "connection"];

proptest! {
    #[test]
    fn x_forwarded_for_of_a_client_changes_nothing(claims in prop::collection::vec(claim(), 1..4), own_line: bool) {
        for proxies in ways() {
            let client = key::client_ip(proxies);
            for told in ["203.0.113.9", "203.0.113.9:4711", "::ffff:203.0.113.9"] {
                let lines = forwarded_by_proxy(&claims, told, own_line);
                prop_assert_eq!(client(&Head::from(&parts("x-forwarded-for", &lines))), Key::of(CLIENT));
            }
        }
    }

    #[test]
    fn forwarded_of_a_client_changes_nothing(claims in prop::collection::vec(claim(), 1..4), own_line: bool) {
        for proxies in ways() {
            let client = key::client_ip(proxies.forwarded());
            for told in ["for=203.0.113.9", "for=\"203.0.113.9:4711\";proto=https", "by=\"_p\";for=\"203.0.113.9\""] {
                let lines = forwarded_by_proxy(&claims, told, own_line);
                prop_assert_eq!(client(&Head::from(&parts("forwarded", &lines))), Key::of(CLIENT));
            }
        }
    }

    /// For anything that the client writes into any forwarding header, and each way in which the
    /// proxy appends.
    #[test]
    fn list_never_takes_a_client_for_the_proxy(
        claims in prop::collection::vec((prop::sample::select(HEADERS.to_vec()), claim()), 0..6),
        told in prop::option::of(prop::sample::select(HEADERS.to_vec())),
        own_line: bool,
        denied: bool,
    ) {
        let list = list();
        let client = if denied { "198.51.100.7" } else { "203.0.113.9" };
        let mut parts = parts("x-request-id", &[]);
        for name in HEADERS {
            let mut lines: Vec<_> = claims.iter().filter(|claim| claim.0 == name).map(|claim| claim.1.clone()).collect();
            if told == Some(name) {
                let told = if name == "forwarded" { format!("for={client}") } else { client.to_owned() };
                lines = forwarded_by_proxy(&lines, &told, own_line);
            }
            for line in lines {
                parts.headers.append(name, HeaderValue::from_bytes(&line).unwrap());
            }
        }
        for proxies in ways() {
            let single = proxies.clone().single_header("x-real-ip").unwrap();
            for (name, proxies) in [(HEADERS[0], proxies.clone()), (HEADERS[1], proxies.forwarded()), (HEADERS[2], single)] {
                let address = key::client_address(&proxies, &Head::from(&parts));
                let key = key::client_network(proxies, Prefixes::exact())(&Head::from(&parts));
                let access = list.of_key(key.as_ref().unwrap());
                prop_assert_ne!(address, Some(PEER));
                if told != Some(name) {
                    continue; // what the client wrote is believed, or nothing is
                }
                prop_assert!(address.is_none() || address == client.parse().ok(), "{name}: {address:?}");
                prop_assert_ne!(access, Some(Access::Allow));
                prop_assert!(access == Some(Access::Deny) || !denied, "{name}: {parts:?}");
            }
        }
    }

    #[test]
    fn extractors_never_panic_on_any_claim(claims in prop::collection::vec(claim(), 0..4)) {
        for name in ["cookie", "authorization", "host", "x-api-key", "x-forwarded-for", "forwarded"] {
            let parts = parts(name, &claims);
            let _ = (key::cookie("6")(&Head::from(&parts)), key::bearer_token()(&Head::from(&parts)), key::host()(&Head::from(&parts)));
            let _ = key::header("x-api-key")(&Head::from(&parts));
            let single = TrustedProxies::count(1).unwrap().single_header("x-forwarded-for").unwrap();
            prop_assert!(key::client_ip(single)(&Head::from(&parts)).is_some());
        }
    }
}

#[test]
fn forwarding_header_of_any_length_changes_nothing() {
    // An open quote, empty list items, and text without a comma: 380 kB each before what the proxy
    // appends.
    for junk in ["\"", ",", "a", "\\", "\\\"", "for=\"\\\\\\\"\","] {
        let junk = junk.repeat(380_000 / junk.len());
        for (name, proxies) in [("x-forwarded-for", ways()), ("forwarded", ways().map(TrustedProxies::forwarded))] {
            let told = if name == "forwarded" { "for=203.0.113.9" } else { "203.0.113.9" };
            let appended = parts(name, &[append(junk.as_bytes(), told)]);
            let alone = parts(name, &[junk.as_bytes().to_vec()]);
            for proxies in proxies {
                let client = key::client_ip(proxies);
                assert_eq!(client(&Head::from(&appended)), Key::of(CLIENT));
                assert_ne!(client(&Head::from(&alone)), Key::of(CLIENT));
            }
        }
    }
}

/// Serves HTTP/1 and HTTP/2 behind the layer of these rules, with a list.
async fn serve(rules: &str, list: &AccessList) -> SocketAddr {
    let layer = Rules::from_text(rules).unwrap().layer(MemoryLimiter::new()).unwrap();
    let layer = layer.access(list, key::header("x-api-key"));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // The service shows that both hosts arrive.
    let both = |request: Request<hyper::body::Incoming>| async move {
        let header = request.headers().get("host").map_or("none", |host| host.to_str().unwrap());
        let hosts = format!("{} {header}", request.uri().host().unwrap_or("none"));
        let key = request.headers().get("x-api-key").cloned().unwrap_or(HeaderValue::from_static("none"));
        Ok::<_, Infallible>(Response::builder().header("hosts", hosts).header("key", key).body(Body::empty()).unwrap())
    };
    let service = layer.layer(service_fn(both));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            tokio::spawn(async move { server.serve_connection(TokioIo::new(stream), service).await.map_err(drop) });
        }
    });
    address
}

/// Each request is counted for its host, and `closed.example` is closed.
async fn serve_hosts() -> SocketAddr {
    let rules = "rules:
- {name: closed, quota: 0 per hour, key: global, match: {host: closed.example}}
- {name: host, quota: 1 per hour, key: host}
";
    serve(rules, &AccessList::new()).await
}

/// Sends a request over HTTP/1. Returns the status and the hosts that the service saw.
async fn over_http1(address: SocketAddr, target: &str, host: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let hosts = answer.lines().find_map(|line| line.strip_prefix("hosts: ")).unwrap_or_default();
    (status, hosts.to_owned())
}

/// Sends a request over HTTP/2.
async fn send_over_http2(address: SocketAddr, request: http::request::Builder) -> Response<hyper::body::Incoming> {
    let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    sender.send_request(request.body(Body::empty()).unwrap()).await.unwrap()
}

/// Sends a request over HTTP/2, with a `host` header beside `:authority`.
async fn over_http2(address: SocketAddr, authority: &str, host: &str) -> (u16, String) {
    let request = Request::get(format!("http://{authority}/")).header("host", host);
    let response = send_over_http2(address, request).await;
    let hosts = response.headers().get("hosts").map_or("", |hosts| hosts.to_str().unwrap());
    (response.status().as_u16(), hosts.to_owned())
}

#[tokio::test]
async fn contradicting_hosts_escape_no_rule() {
    let refused = (429, String::new());
    let address = serve_hosts().await;
    assert_eq!(over_http1(address, "http://closed.example/", "a.example").await, refused);
    assert_eq!(over_http1(address, "http://a.example/", "closed.example").await, refused);
    assert_eq!(over_http2(address, "closed.example", "a.example").await, refused);
    assert_eq!(over_http2(address, "a.example", "closed.example").await, refused);
    // They match every `host`, so also the closed one.
    assert_eq!(over_http1(address, "http://a.example/", "b.example").await, refused);
    // Hosts that agree are one host.
    assert_eq!(over_http1(address, "http://a.example/", "A.example:80").await, (200, "a.example A.example:80".into()));
    assert_eq!(over_http2(address, "b.example:80", "b.example").await, (200, "b.example b.example".into()));
    assert_eq!(over_http1(address, "/", "a.example").await, refused, "its allowance is used up");
    assert_eq!(over_http1(address, "/", "c.example").await, (200, "none c.example".into()));
}

/// HTTP/1 takes them out, and HTTP/2 does not. A service that trims its keys reads them alike.
#[tokio::test]
async fn spaces_around_a_header_make_no_other_client() {
    let list = AccessList::new();
    list.set_key("leaked", Access::Deny);
    let address = serve("rules: [{name: key, quota: 1 per hour, key: header x-api-key}]", &list).await;
    let ask = async |key: &'static str| {
        let response = send_over_http2(address, Request::get("http://a.example/").header("x-api-key", key)).await;
        (response.status().as_u16(), response.headers().get("key").cloned())
    };
    assert_eq!(ask(" alice").await, (200, Some(HeaderValue::from_static(" alice"))), "the spaces arrive");
    for key in ["alice", " alice", "alice\t", "  alice "] {
        assert_eq!(ask(key).await.0, 429, "{key:?}");
    }
    for key in ["leaked", " leaked", "leaked\t"] {
        assert_eq!(ask(key).await.0, 403, "{key:?}");
    }
}
