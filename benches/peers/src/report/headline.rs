//! The cases of the first table.

/// The cases of the first table, each with the peer that it is compared with.
pub const HEADLINE: [(&str, &str, &str, &str); 11] = [
    ("axum router, allowed, no headers", "router", "allowed, no headers, 10k addresses", "tower_governor"),
    ("axum router, allowed, headers", "router", "allowed, headers, 10k addresses", "tower_governor"),
    ("axum router, refused, headers", "router", "refused, headers, 10k addresses", "tower_governor"),
    ("whole server, allowed, no headers", "server", "allowed, no headers, 10k addresses", "tower_governor"),
    ("whole server, allowed, headers", "server", "allowed, headers, 10k addresses", "tower_governor"),
    ("whole server, refused, headers", "server", "refused, headers, 10k addresses", "tower_governor"),
    ("check, 10k addresses", "check", "allowed, 10k addresses", "governor"),
    ("check, 1M addresses", "check", "allowed, 1M addresses", "governor"),
    ("check, 10k texts", "check", "allowed, 10k texts", "governor"),
    ("check, 10k addresses, denied", "check", "denied, 10k addresses", "governor"),
    ("check, 10k addresses, two threads", "check", "allowed, two threads, 10k addresses", "governor"),
];

/// The peer that a case is compared with in the first table, if it is there.
pub fn peer_in_the_first_table(family: &str, name: &str) -> Option<&'static str> {
    let found = HEADLINE.iter().find(|(_, of, case, _)| *of == family && *case == name)?;
    Some(found.3)
}
