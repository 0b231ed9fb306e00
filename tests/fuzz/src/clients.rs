//! Addresses of clients behind proxies: what a client writes never changes the key that the trusted proxy's entry
//! gives.
#![no_main]

use std::net::IpAddr;

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::Key;
use tower_ratelimit::key::TrustedProxies;

fuzz_target!(|bytes: &[u8]| {
    let peer: Option<IpAddr> = "10.0.0.5".parse().ok();
    let client = Key::of("203.0.113.9".parse::<IpAddr>().expect("an address"));
    let each = || [TrustedProxies::count(1), TrustedProxies::networks(["10.0.0.0/8"])].map(|it| it.expect("possible"));
    let written: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    for (proxies, entry) in each()
        .map(|proxies| (proxies, "203.0.113.9"))
        .into_iter()
        .chain(each().map(|proxies| (proxies.forwarded(), "for=203.0.113.9;proto=https")))
    {
        // A proxy adds a line of its own, or adds to the last one.
        let mut lines = written.clone();
        lines.push(entry.as_bytes());
        assert_eq!(proxies.client_key(peer, lines), client, "{proxies:?}");
        if proxies.header() == "x-forwarded-for" {
            let joined = [bytes, b", ", entry.as_bytes()].concat();
            assert_eq!(proxies.client_key(peer, [joined.as_slice()]), client, "{proxies:?}");
        }
        // Without that entry there may be any client, but no panic.
        let _ = proxies.client_key(peer, written.clone());
        let _ = proxies.client_key(None, written.clone());
    }
});
