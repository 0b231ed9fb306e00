//! Attacks of a client that reaches the server past the proxy, or that has taken over a peer.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::http::{Connection, get, post_json, send};
use crate::server::{Server, rules};
use crate::support::redis_server::free_port;
use crate::wait::LONG;

const NGINX: [(&str, &str); 3] =
    [("X-Original-Method", "GET"), ("X-Original-URI", "/"), ("X-Forwarded-For", "203.0.113.9")];

const JSON: (&str, &str) = ("Content-Type", "application/json");

/// Returns what comes until the connection ends.
fn rest(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut bytes = Vec::new();
    // A reset is an end as well. A signal that interrupts a read is no end.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn stranger_is_not_answered() {
    let mut server = Server::start(&rules(), &["--trust", "192.0.2.1"]);
    let began = Instant::now();
    for bytes in ["GET /auth/nginx HTTP/1.1\r\nHost: a\r\n\r\n", "POST /v1/check HTTP/1.1\r\nHost: a\r\n\r\n", ""] {
        let mut stream = TcpStream::connect(server.asked).unwrap();
        let _ = stream.write_all(bytes.as_bytes());
        assert_eq!(rest(&mut stream), "", "{bytes}");
    }
    let line = server.wait_for_line(|line| line["event"] == "untrusted");
    assert!(line["message"].as_str().unwrap().contains("127.0.0.1 may not ask: --trust"), "{line}");
    let notes = server.lines().iter().filter(|line| line["event"] == "untrusted").count();
    let most = 1 + began.elapsed().as_secs() as usize / 10;
    assert!((1..=most).contains(&notes), "a flood of strangers is no flood of lines: {notes}");
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
    let mut server = Server::start(&rules(), &[]);
    let long = "a".repeat(100_000);
    let mut stream = TcpStream::connect(server.asked).unwrap();
    let _ = stream.write_all(format!("GET /auth/nginx HTTP/1.1\r\nHost: a\r\nX-Long: {long}\r\n\r\n").as_bytes());
    assert!(rest(&mut stream).starts_with("HTTP/1.1 431"));
    let many = "X-Many: a\r\n".repeat(1_000);
    let mut stream = TcpStream::connect(server.asked).unwrap();
    let _ = stream.write_all(format!("GET /auth/nginx HTTP/1.1\r\nHost: a\r\n{many}\r\n").as_bytes());
    assert!(rest(&mut stream).starts_with("HTTP/1.1 431"));
    let line = server.wait_for_line(|line| line["event"] == "large-head");
    assert_eq!(line["message"], "127.0.0.1 sent a head that is too large, and got the status 431");

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
    // A body that does not come. With a short --idle the connection might end before its head is read.
    let server = Server::start(&rules(), &[]);
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

/// Connects from one of this machine's addresses.
fn connect_from(runtime: &tokio::runtime::Runtime, source: &str, address: SocketAddr) -> TcpStream {
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(format!("{source}:0").parse().unwrap()).unwrap();
        socket.connect(address).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream
}

#[test]
fn strangers_cannot_fill_the_operators_address() {
    let mut server = Server::start(&rules(), &[]);
    let admin = server.admin;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut began = Instant::now();
    let mut held: Vec<TcpStream> = Vec::new();
    // On a slow machine the first connections may have ended before there are enough.
    for round in 0..20 {
        if round >= 2 && server.lines().iter().any(|line| line["event"] == "crowded") {
            break;
        }
        began = Instant::now();
        held.drain(..held.len().saturating_sub(300));
        for stranger in ["127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6"].iter().cycle().take(300) {
            let mut stream = connect_from(&runtime, stranger, admin);
            let _ = stream.write_all(b"GET /live HTTP/1.1\r\nHost: a\r\nX-"); // it may be closed by then
            held.push(stream);
        }
        let ask = || {
            let mut operator = connect_from(&runtime, "127.0.0.2", admin);
            let _ = operator.write_all(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
            rest(&mut operator)
        };
        let (asked, mut answer) = (Instant::now(), ask());
        // A connection without a request ends after five seconds, so an operator who stood still connects again.
        while answer.is_empty() && (5..60).contains(&asked.elapsed().as_secs()) {
            answer = ask();
        }
        assert!(answer.starts_with("HTTP/1.1 200"), "in round {round}: {answer}");
    }
    let line = server.wait_for_line(|line| line["event"] == "crowded");
    let said = line["message"].as_str().unwrap();
    assert!(said.starts_with("256 connections are open: the oldest one of 127.0.0."), "{said}");
    // The heads have five seconds, however long --idle is.
    held.iter_mut().for_each(|stream| drop(rest(stream)));
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    assert_eq!(get(admin, "/ready", &[]).status, 200);
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
    assert!(peak_of(&server) < 200_000, "{} kB", peak_of(&server)); // without optimisation
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

/// Frames of HTTP/2, as a client writes them by hand.
mod frames {
    pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    pub(super) const DATA: u8 = 0;
    pub(super) const HEADERS: u8 = 1;
    pub(super) const RST_STREAM: u8 = 3;
    pub(super) const SETTINGS: u8 = 4;
    pub(super) const CONTINUATION: u8 = 9;
    pub(super) const END_STREAM: u8 = 1;
    pub(super) const END_HEADERS: u8 = 4;

    pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// Returns the head of a request: `GET` or `POST`, `http`, a path, and a host.
    pub(super) fn head(method: &str, path: &str) -> Vec<u8> {
        let path_length = u8::try_from(path.len()).unwrap();
        let method = if method == "POST" { 0x83 } else { 0x82 };
        [&[method, 0x86, 0x04, path_length], path.as_bytes(), &[0x01, 0x01, b'a']].concat()
    }
}

/// Returns the memory that a process has ever used, in kilobytes.
fn peak_of(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    peak.trim_end_matches(" kB").parse().unwrap()
}

/// Writes bytes, and returns whether the other side has ended the connection after that. Some of them may wait in the
/// system's buffers.
fn ends_while_written_to(stream: &mut TcpStream, bytes: impl Iterator<Item = Vec<u8>>) -> bool {
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let is_late = |error: &std::io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    for part in bytes {
        if let Err(error) = stream.write_all(&part) {
            return !is_late(&error);
        }
    }
    // A signal that interrupts a read is no end.
    !stream.read_to_end(&mut Vec::new()).is_err_and(|error| is_late(&error))
}

#[test]
fn flood_of_resets_and_heads_ends_its_connection_only() {
    use frames::{CONTINUATION, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame, head};
    let server = Server::start(&rules(), &[]);
    let before = peak_of(&server);
    for address in [server.asked, server.admin] {
        // Requests that are taken back at once.
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).unwrap();
        let resets = (0..200_000_u32).map(|n| {
            let (stream, asks) = (2 * n + 1, head("GET", "/live"));
            let asked = frame(HEADERS, END_HEADERS | END_STREAM, stream, &asks);
            [asked, frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
        });
        assert!(ends_while_written_to(&mut stream, resets), "the connection stays open after 200,000 resets");
        // A head that never ends.
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).unwrap();
        stream.write_all(&frame(HEADERS, END_STREAM, 1, &head("GET", "/live"))).unwrap();
        // A header `a` with a value of 100 bytes, which is not indexed.
        let header = [&[0x00, 0x01, b'a', 100][..], &[b'b'; 100]].concat().repeat(100);
        let endless = (0..10_000).map(|_| frame(CONTINUATION, 0, 1, &header));
        assert!(ends_while_written_to(&mut stream, endless), "the connection stays open after a head of 100 MB");
        assert_eq!(get(address, "/live", &[]).status, 200);
    }
    assert!(peak_of(&server) < before + 30_000, "{before} kB, then {}", peak_of(&server));
}

#[test]
fn bodies_that_nobody_reads_take_little_memory() {
    use frames::{DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, head};
    let server = Server::start(&rules(), &[]);
    let before = peak_of(&server);
    let mut streams = Vec::new();
    for _ in 0..50 {
        let mut stream = TcpStream::connect(server.asked).unwrap();
        stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).unwrap();
        stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        let requests = [1, 3, 5, 7];
        let heads = requests.map(|id| frame(HEADERS, END_HEADERS, id, &head("POST", "/v1/check")));
        let part = requests.map(|id| frame(DATA, 0, id, &[b' '; 16_000])).concat();
        if stream.write_all(&heads.concat()).is_ok() {
            let _ = (0..25).try_for_each(|_| stream.write_all(&part));
        }
        streams.push(stream);
    }
    assert_eq!(get(server.asked, "/live", &[]).status, 200);
    // Each request holds at most the 64 KiB of a body that is read, and each connection has a window of 256 KiB for
    // what is not read yet: with four requests 26 MB for 50 connections, which send 80 MB.
    assert!(peak_of(&server) < before + 60_000, "{before} kB, then {}", peak_of(&server));
}

#[test]
fn question_of_many_parts_is_refused() {
    let server = Server::start(&rules(), &[]);
    let many: serde_json::Map<String, serde_json::Value> =
        (0..200).map(|n| (format!("x-{n}"), serde_json::json!("a"))).collect();
    let twice = serde_json::json!({"headers": {"a": vec!["b"; 200]}});
    for body in [serde_json::json!({ "headers": many }), twice] {
        let answer = post_json(server.asked, "/v1/check", &[], &body.to_string());
        assert!(answer.status == 400 && answer.body.contains("at most 100 headers"), "{answer:?}");
    }
    let most = serde_json::json!({"headers": {"a": vec!["b"; 100]}});
    assert_eq!(post_json(server.asked, "/v1/check", &[], &most.to_string()).status, 200);
}

#[test]
fn stranger_at_the_operators_address_learns_nothing() {
    let folder = crate::server::Folder::new();
    folder.write("operators", "alice 0123456789abcdef\n");
    let away = format!("redis://user:secret-of-redis@127.0.0.1:{}", free_port());
    let mut server = Server::start_in(folder, &rules(), &["--operators", "operators", "--redis", &away]);
    for path in ["/live", "/ready", "/metrics", "/openapi.json", "/", "/limits", "/v1/settings", "/v1/explain", "/x"] {
        for headers in [&[][..], &[("Authorization", "Bearer 0123456789abcdeX")]] {
            let answer = format!("{:?}", get(server.admin, path, headers));
            for secret in ["alice", "0123456789abcdef", "secret-of-redis", "127.0.0.1:", "rules.yaml", "203.0.113"] {
                assert!(!answer.contains(secret), "{path} gives {secret} away: {answer}");
            }
        }
    }
    let line = server.wait_for_line(|line| line["event"] == "unauthorized");
    assert!(line["message"].as_str().unwrap().contains("127.0.0.1 sent a wrong name or token"), "{line}");
    let metrics = get(server.admin, "/metrics", &[]).body;
    assert!(metrics.ends_with("\nratelimit_operators_unauthorized_total 5\n"), "{metrics}");
    let lines = server.lines();
    let noted = lines.iter().filter(|line| line["event"] == "unauthorized").count();
    assert!(noted < 5, "{noted} lines of 5 requests");
    for line in lines {
        assert!(!line.to_string().contains("0123456789abcde"), "no token is in the log: {line}");
        assert!(!line.to_string().contains("secret-of-redis"), "no password is in the log: {line}");
    }
}

#[test]
fn foreign_site_in_a_browser_of_this_machine_is_not_answered() {
    // It has given the address a name of its own, so that the browser takes both for one site.
    let server = Server::start(&rules(), &["--admin-hosts", "limits.example"]);
    let port = server.admin.port();
    for (host, known) in [
        ("evil.example".to_owned(), false),
        (format!("evil.example:{port}"), false),
        ("".to_owned(), false),
        (format!("127.0.0.1:{port}"), true),
        (format!("[::1]:{port}"), true),
        ("localhost".to_owned(), true),
        ("LIMITS.example".to_owned(), true),
    ] {
        for path in ["/limits", "/", "/metrics", "/openapi.json"] {
            let status = get(server.admin, path, &[("Host", &host)]).status;
            assert_eq!(status, if known { 200 } else { 421 }, "{host} {path}");
        }
        let explain = send(server.admin, "POST", "/v1/explain", &[("Host", &host), JSON], "{}");
        assert_eq!(explain.status, if known { 200 } else { 421 }, "{host}");
    }
    let origin = ("Origin", "http://evil.example:8080");
    for path in ["/v1/check", "/v1/report"] {
        assert_eq!(send(server.asked, "POST", path, &[JSON, origin], "{}").status, 403, "{path}");
    }
}
