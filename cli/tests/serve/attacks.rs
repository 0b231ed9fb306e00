//! Attacks of a client that reaches the server past the proxy, or that has taken over a peer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::http::{Connection, get, post_json, send};
use crate::server::{Server, rules};

const NGINX: [(&str, &str); 3] =
    [("X-Original-Method", "GET"), ("X-Original-URI", "/"), ("X-Forwarded-For", "203.0.113.9")];

/// Returns what comes until the connection ends.
fn rest(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut bytes = Vec::new();
    let mut part = [0; 4_096];
    // A reset is an end as well.
    while let Ok(count) = stream.read(&mut part) {
        if count == 0 {
            break;
        }
        bytes.extend_from_slice(&part[..count]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn stranger_is_not_answered() {
    let mut server = Server::start(&rules(), &["--trust", "192.0.2.1"]);
    for bytes in ["GET /auth/nginx HTTP/1.1\r\nHost: a\r\n\r\n", "POST /v1/check HTTP/1.1\r\nHost: a\r\n\r\n", ""] {
        let mut stream = TcpStream::connect(server.asked).unwrap();
        let _ = stream.write_all(bytes.as_bytes());
        assert_eq!(rest(&mut stream), "", "{bytes}");
    }
    let line = server.wait_for_line(|line| line["event"] == "untrusted");
    assert!(line["message"].as_str().unwrap().contains("127.0.0.1 may not ask: --trust"), "{line}");
    let notes = server.lines().iter().filter(|line| line["event"] == "untrusted").count();
    assert_eq!(notes, 1, "a flood of strangers is no flood of lines");
}

#[test]
fn claims_of_the_client_do_not_add_up_to_another_client() {
    let server = Server::start(&rules(), &[]);
    // The proxy appends the client's address to what the client has sent.
    let refused = (0..40).filter(|n| {
        let forwarded = format!("198.51.100.{n}, 203.0.113.9");
        let headers = [NGINX[0], NGINX[1], ("X-Forwarded-For", &forwarded)];
        get(server.asked, "/auth/nginx", &headers).status == 401
    });
    assert_eq!(refused.count(), 10, "it has 30 a minute");
    // Without the header, and with one that is none, all share an allowance that is not that of others.
    for forwarded in ["", "unknown", "a\u{fe}", "203.0.113.9, not an address"] {
        let headers = [NGINX[0], NGINX[1], ("X-Forwarded-For", forwarded)];
        assert_eq!(get(server.asked, "/auth/nginx", &headers).status, 200, "{forwarded}");
    }
}

#[test]
fn question_without_a_request_is_an_error() {
    let server = Server::start(&rules(), &[]);
    for (path, headers) in [
        ("/auth/nginx", &[][..]),
        ("/auth/nginx", &[("X-Original-Method", "GET"), ("X-Original-Method", "POST"), ("X-Original-URI", "/")]),
        ("/auth/nginx", &[("X-Original-Method", "GET"), ("X-Original-URI", "no path")]),
        ("/auth/caddy", &[("X-Original-Method", "GET"), ("X-Original-URI", "/")]),
    ] {
        let answer = get(server.asked, path, headers);
        assert_eq!(answer.status, 400, "{path} {headers:?}: {answer:?}");
    }
    for path in ["/", "/auth", "/auth/apache", "/metrics", "/limits", "/v1/reset", "/v1/explain"] {
        assert_eq!(get(server.asked, path, &NGINX).status, 404, "{path}");
    }
}

#[test]
fn large_head_and_body_are_refused() {
    let server = Server::start(&rules(), &[]);
    let long = "a".repeat(100_000);
    let mut stream = TcpStream::connect(server.asked).unwrap();
    let _ = stream.write_all(format!("GET /auth/nginx HTTP/1.1\r\nHost: a\r\nX-Long: {long}\r\n\r\n").as_bytes());
    assert!(rest(&mut stream).starts_with("HTTP/1.1 431"));
    let many = "X-Many: a\r\n".repeat(1_000);
    let mut stream = TcpStream::connect(server.asked).unwrap();
    let _ = stream.write_all(format!("GET /auth/nginx HTTP/1.1\r\nHost: a\r\n{many}\r\n").as_bytes());
    assert!(rest(&mut stream).starts_with("HTTP/1.1 431"));

    assert_eq!(post_json(server.asked, "/v1/check", &[], &format!("{{\"path\":\"/{long}\"}}")).status, 413);
    let deep = format!("{{\"headers\":{}", "[".repeat(10_000));
    assert_eq!(post_json(server.asked, "/v1/check", &[], &deep).status, 400);
    // A path of 60,000 bytes is read, and one client has one allowance whatever it sends.
    let path = format!("/{}", &long[..40_000]);
    let headers = [NGINX[0], ("X-Original-URI", &*path), NGINX[2]];
    assert_eq!(get(server.asked, "/auth/nginx", &headers).status, 200);
    assert_eq!(get(server.asked, "/auth/nginx", &NGINX).status, 200);
}

#[test]
fn slow_client_is_cut_off() {
    let server = Server::start(&rules(), &["--idle", "3s"]);
    let begun =
        ["", "P", "PRI * HTTP/2.0\r\n\r\nSM", "GET /auth/nginx HT", "GET /auth/nginx HTTP/1.1\r\nHost: a\r\nX-"];
    let mut slow: Vec<TcpStream> = (0..50)
        .map(|n| {
            let mut stream = TcpStream::connect(if n % 2 == 0 { server.asked } else { server.admin }).unwrap();
            stream.write_all(begun[n % begun.len()].as_bytes()).unwrap();
            stream
        })
        .collect();
    assert_eq!(get(server.asked, "/auth/nginx", &NGINX).status, 200, "others are answered meanwhile");
    let started = Instant::now();
    for stream in &mut slow {
        rest(stream);
    }
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    // A body that does not come.
    let mut stream = TcpStream::connect(server.asked).unwrap();
    let head = "POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{";
    stream.write_all(head.as_bytes()).unwrap();
    assert!(rest(&mut stream).starts_with("HTTP/1.1 408"));
}

#[test]
fn connections_are_bounded_and_the_next_waits() {
    let server = Server::start(&rules(), &["--max-connections", "20"]);
    let mut held: Vec<Connection> = (0..20).map(|_| Connection::open(server.asked).unwrap()).collect();
    for connection in &mut held {
        assert_eq!(connection.send("GET", "/auth/nginx", &NGINX, "").unwrap().status, 200);
    }
    let asked = server.asked;
    let waiting = std::thread::spawn(move || get(asked, "/live", &[]).status);
    // The others go on, and the operators' address has places of its own.
    assert_eq!(held[7].send("GET", "/auth/nginx", &NGINX, "").unwrap().status, 200);
    assert_eq!(get(server.admin, "/live", &[]).status, 200);
    assert!(!waiting.is_finished());
    held.pop();
    assert_eq!(waiting.join().unwrap(), 200);
}

#[test]
fn many_keys_leave_the_limits_of_others_as_they_are() {
    let server = Server::start(&rules(), &["--max-keys", "20000"]);
    let mut connection = Connection::open(server.asked).unwrap();
    let mut check = |client: &str, key: &str| {
        let forwarded = [NGINX[0], NGINX[1], ("X-Forwarded-For", client), ("X-Api-Key", key)];
        connection.send("GET", "/auth/nginx", &forwarded, "").unwrap().status
    };
    for _ in 0..5 {
        assert_eq!(check("203.0.113.9", "small"), 200);
    }
    assert_eq!(check("203.0.113.9", "small"), 401);
    for n in 0..10_000_u32 {
        let [_, _, a, b] = n.to_be_bytes();
        assert_eq!(check(&format!("198.18.{a}.{b}"), &format!("key-{n}")), 200);
    }
    assert_eq!(check("203.0.113.9", "small"), 401, "it is not forgotten");
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    let kilobytes: u64 = peak.trim_end_matches(" kB").parse().unwrap();
    assert!(kilobytes < 200_000, "{peak}"); // without optimisation
}

#[test]
fn body_is_read_as_json_only() {
    let server = Server::start(&rules(), &[]);
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let answer = send(server.asked, "POST", "/v1/check", &[("Content-Type", kind)], "{}");
        assert_eq!(answer.status, 415, "{kind}");
    }
    assert_eq!(send(server.asked, "GET", "/v1/check", &[], "").status, 405);
}
