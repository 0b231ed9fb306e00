//! Whatever a client writes, it is not taken for somebody else.

use std::net::IpAddr;

use http::request::Parts;
use http::{HeaderName, HeaderValue};
use proptest::prelude::*;
use tower_ratelimit::key::{self, PeerAddr, TrustedProxies};

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

/// What a client may send: anything that a header field's value can hold, mostly made of what has a meaning there.
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

proptest! {
    #[test]
    fn what_a_client_writes_into_x_forwarded_for_changes_nothing(claims in prop::collection::vec(claim(), 1..4)) {
        for proxies in ways() {
            let client = key::client_ip(proxies);
            let mut lines = claims.clone();
            lines.push(CLIENT.to_string().into_bytes());
            prop_assert_eq!(client(&parts("x-forwarded-for", &lines)), Some(CLIENT));
            lines.pop();
            let last = lines.pop().unwrap_or_default();
            lines.push(append(&last, "203.0.113.9:4711"));
            prop_assert_eq!(client(&parts("x-forwarded-for", &lines)), Some(CLIENT));
        }
    }

    #[test]
    fn what_a_client_writes_into_forwarded_hides_it_behind_its_proxy_at_most(claims in prop::collection::vec(claim(), 1..4)) {
        for proxies in ways() {
            let client = key::client_ip(proxies.forwarded());
            let mut lines = claims.clone();
            lines.push(b"for=203.0.113.9".to_vec());
            prop_assert_eq!(client(&parts("forwarded", &lines)), Some(CLIENT));
            lines.pop();
            let last = lines.pop().unwrap_or_default();
            for told in ["for=203.0.113.9", "for=\"203.0.113.9:4711\";proto=https", "by=\"_p\";for=\"203.0.113.9\""] {
                let mut lines = lines.clone();
                lines.push(append(&last, told));
                let found = client(&parts("forwarded", &lines));
                prop_assert!(found == Some(CLIENT) || found == Some(PEER), "{found:?}");
            }
        }
    }

    #[test]
    fn no_claim_makes_an_extractor_panic(claims in prop::collection::vec(claim(), 0..4)) {
        for name in ["cookie", "authorization", "host", "x-api-key", "x-forwarded-for", "forwarded"] {
            let parts = parts(name, &claims);
            let _ = (key::cookie("6")(&parts), key::bearer_token()(&parts), key::host()(&parts));
            let _ = key::header("x-api-key")(&parts);
            let single = TrustedProxies::count(1).unwrap().single_header("x-forwarded-for").unwrap();
            prop_assert!(key::client_ip(single)(&parts).is_some());
        }
    }
}
