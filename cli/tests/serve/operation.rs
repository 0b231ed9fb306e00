//! Starting, watching, changing and ending the server.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::http::{Connection, get, post_json, send};
use crate::proxies;
use crate::server::{Folder, Server, example, rules};
use crate::support::redis_server::{self, free_port};
use crate::wait::{LONG, wait_until, wait_until_ready};

const RULES: &str = "rules: [{name: client, quota: 2 per hour, key: client-ip}]\n";
const CHECK: &str = "{\"client\": \"203.0.113.9\"}";

fn is_allowed(server: &Server) -> bool {
    post_json(server.asked, "/v1/check", &[], CHECK).json()["allowed"].as_bool().unwrap()
}

/// Runs the program until it ends. Returns its exit code and what it wrote.
fn ends(folder: &Folder, arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit"))
        .current_dir(folder.path())
        .arg("serve")
        .args(arguments)
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn operators_see_health_metrics_and_status() {
    let folder = Folder::new();
    folder.write("operators", "alice 0123456789abcdef\n");
    let server = Server::start_in(folder, RULES, &["--operators", "operators"]);
    assert_eq!([(); 3].map(|()| is_allowed(&server)), [true, true, false]);
    for (address, path) in [(server.admin, "/live"), (server.admin, "/ready"), (server.asked, "/ready")] {
        assert_eq!(get(address, path, &[]).status, 200, "{path}");
    }
    let metrics = get(server.admin, "/metrics", &[]);
    assert!(metrics.body.contains("ratelimit_requests_total{outcome=\"limited\"} 1\n"), "{}", metrics.body);
    assert!(metrics.header("content-type").starts_with("text/plain"), "{metrics:?}");

    // All else is for operators.
    for path in ["/", "/limits", "/v1/explain", "/v1/reset", "/nothing"] {
        let stranger = get(server.admin, path, &[("Authorization", "Bearer 0123456789abcdeX")]);
        assert_eq!(stranger.status, 401, "{path}");
        assert!(stranger.header("www-authenticate").starts_with("Basic "), "{path}");
    }
    let alice = ("Authorization", "Basic YWxpY2U6MDEyMzQ1Njc4OWFiY2RlZg==");
    let page = get(server.admin, "/limits", &[alice]);
    assert!(page.status == 200 && page.body.contains("client") && page.body.contains("2 per hour"), "{page:?}");

    // She unblocks a client on the page.
    let form = [alice, ("Accept", "application/json"), ("Content-Type", "application/x-www-form-urlencoded")];
    let explained = send(server.admin, "POST", "/limits", &form, "action=explain&client=203.0.113.9").json();
    let token = explained[0]["token"].as_str().unwrap().to_owned();
    let done = send(server.admin, "POST", "/limits", &form, &format!("action=reset&token={token}"));
    assert_eq!(done.status, 200, "{done:?}");
}

#[test]
fn operators_follow_their_file() {
    let status = |server: &Server, token: &str| {
        get(server.admin, "/limits", &[("Authorization", &format!("Bearer {token}"))]).status
    };
    let (alice, bob, carol) = ("alice-0123456789", "bob-0123456789ab", "carol-0123456789");
    let both = |other: &str| format!("alice {alice}\n{other}\n");
    for (every, by_signal) in [("100ms", false), ("1h", true)] {
        let folder = Folder::new();
        folder.write("operators", &both(&format!("bob {bob}")));
        let mut server = Server::start_in(folder, RULES, &["--operators", "operators", "--reload-every", every]);
        let change = |server: &Server, text: &str| {
            server.folder.write("operators", text);
            if by_signal {
                server.signal("HUP");
            }
        };
        assert_eq!([bob, carol].map(|token| status(&server, token)), [200, 401]);
        change(&server, &both(&format!("carol {carol}")));
        wait_until(|| status(&server, bob) == 401);
        assert_eq!([alice, carol].map(|token| status(&server, token)), [200, 200]);
        // A file that names nobody leaves them as they were.
        for (broken, said) in [("", "there is none"), ("alice short", "line 1: write a name and a token")] {
            change(&server, broken);
            let line = server.wait_for_line(|line| {
                line["event"] == "operators-refused" && line["message"].as_str().unwrap().contains(said)
            });
            assert!(
                line["message"].as_str().unwrap().contains("the operators stay as they were: operators: "),
                "{line}"
            );
            assert_eq!([alice, carol].map(|token| status(&server, token)), [200, 200], "{line}");
        }
        change(&server, &both(""));
        wait_until(|| status(&server, carol) == 401);
        assert_eq!(status(&server, alice), 200);
        wait_until(|| server.lines().iter().filter(|line| line["event"] == "operators-loaded").count() == 2);
    }
}

#[test]
fn page_names_who_is_refused() {
    for (reveal, shown, hidden) in [
        ("networks", "203.0.113.0/24", "203.0.113.9"),
        ("addresses", "203.0.113.9", "203.0.113.0/24"),
        ("nothing", "key ", "203.0.113"),
    ] {
        let server = Server::start(RULES, &["--reveal", reveal]);
        (0..5).for_each(|_| _ = is_allowed(&server));
        let page = get(server.admin, "/limits", &[]).body;
        assert!(page.contains(shown) && !page.contains(hidden), "{reveal}: {page}");
        let metrics = get(server.admin, "/metrics", &[]).body;
        assert!(!metrics.contains("203.0.113"), "{metrics}");
    }
}

#[test]
fn page_without_operators_changes_nothing() {
    let server = Server::start(RULES, &[]);
    assert_eq!(get(server.admin, "/limits", &[]).status, 200);
    assert_eq!(post_json(server.admin, "/v1/explain", &[], CHECK).status, 200);
    assert_eq!(post_json(server.admin, "/v1/reset", &[], CHECK).status, 403);
    let form = [("Accept", "application/json"), ("Content-Type", "application/x-www-form-urlencoded")];
    let explained = send(server.admin, "POST", "/limits", &form, "action=explain&client=203.0.113.9").json();
    assert!(explained[0]["token"].is_null(), "{explained}");
}

#[test]
fn changed_file_is_in_force_and_a_wrong_one_is_not() {
    let mut server = Server::start(RULES, &["--reload-every", "1h"]);
    assert_eq!([(); 3].map(|()| is_allowed(&server)), [true, true, false]);
    server.folder.write("rules.yaml", &RULES.replace("2 per", "two per"));
    server.signal("HUP");
    let line = server.wait_for_line(|line| line["event"] == "rules-refused");
    assert!(line["message"].as_str().unwrap().contains("rules.yaml:1"), "{line}");
    assert!(!is_allowed(&server));
    server.folder.write("rules.yaml", &RULES.replace("2 per", "5 per"));
    server.signal("HUP");
    let line = server.wait_for_line(|line| line["event"] == "rules-loaded" && line["version"] == "1");
    let message = line["message"].as_str().unwrap();
    assert!(message.starts_with("1 rules are in force: client: 2 per ") && message.contains(" -> 5 per "), "{line}");
    assert!(is_allowed(&server));
    // What cannot hold here is refused at a change as at the start.
    server.folder.write("rules.yaml", "rules: [{name: client, quota: 3 at once, key: client-ip}]\n");
    server.signal("HUP");
    server.wait_for_line(|line| line["message"].to_string().contains("a proxy does not say when a request has ended"));
    assert!(is_allowed(&server));
}

#[test]
fn wrong_setting_ends_the_program_with_its_name() {
    let folder = Folder::new();
    folder.write("rules.yaml", RULES);
    folder.write("wrong.yaml", "rules: [{name: a, quota: 5 per our, key: client-ip}]\n");
    folder.write("places.yaml", "rules: [{name: a, quota: 3 at once, key: client-ip}]\n");
    folder.write("upper.yaml", "rules: [{name: a, quota: 5 per hour, key: client-ip, match: {path: /Login}}]\n");
    folder.write("settings", "listen = 127.0.0.1:0\nlissten = 1\n");
    folder.write("pace.yaml", "rules: [{name: a, quota: 1 MB per second, key: client-ip, pace: responses}]\n");
    for (arguments, code, said) in [
        (&["pace.yaml"][..], 1, "this program sees only heads"),
        (&["upper.yaml", "--paths", "folded"], 1, "no path matches `/Login`"),
        (&["wrong.yaml"], 1, "wrong.yaml:1:26"),
        (&["places.yaml"], 1, "a proxy does not say when a request has ended"),
        (&["missing.yaml"], 1, "missing.yaml"),
        (&[], 2, "<RULES>"),
        (&["rules.yaml", "--trust", "everybody"], 2, "--trust"),
        (&["rules.yaml", "--admin", "0.0.0.0:0"], 2, "name who may, by --operators"),
        (&["rules.yaml", "--operators", "missing"], 2, "the operators in missing"),
        (&["rules.yaml", "--settings", "settings"], 2, "line 2: there is no setting `lissten`"),
        (&["rules.yaml", "--redis", "http://a"], 2, "a URL for Redis begins with"),
        (&["rules.yaml", "--redis", "redis://a", "--postgres", "postgres://a"], 2, "cannot be used with"),
        (&["rules.yaml", "--on-error", "maybe"], 2, "--on-error"),
    ] {
        let (ended, err) = ends(&folder, arguments);
        assert_eq!(ended, Some(code), "{arguments:?}: {err}");
        assert!(err.contains(said), "{arguments:?}: {err}");
    }
}

#[test]
fn trust_of_everybody_is_warned_of() {
    let mut server = Server::start(RULES, &["--trust", "0.0.0.0/0,10.0.0.0/8,::1"]);
    let line = server.wait_for_line(|line| line["event"] == "trust");
    assert!(line["message"].as_str().unwrap().starts_with("--trust has 0.0.0.0/0: a client in this network may"));
    assert_eq!(server.lines().iter().filter(|line| line["event"] == "trust").count(), 1, "{:?}", server.lines());
}

#[test]
fn settings_come_from_flags_variables_and_a_file() {
    let help = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit")).args(["serve", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let flags =
        help.lines().filter_map(|line| line.trim().strip_prefix("--")).map(|rest| rest.split(' ').next().unwrap());
    let mut count = 0;
    for flag in flags {
        let variable = format!("[env: TOWER_RATELIMIT_{}", flag.to_uppercase().replace('-', "_"));
        assert!(help.contains(&variable), "{variable}");
        count += 1;
    }
    assert!(count > 20, "{count} flags: {help}");

    let folder = Folder::new();
    folder.write("settings", "# as in production\non-error = allow\nheaders = x-ratelimit\n");
    let server = Server::start_in(folder, RULES, &["--settings", "settings"]);
    let answer = post_json(server.asked, "/v1/check", &[], CHECK).json();
    assert_eq!(answer["headers"]["x-ratelimit-remaining"], "1", "{answer}");
}

#[test]
fn server_drains_at_its_end() {
    // The system gives this port to no other process once the server has ended.
    let listen = format!("127.0.0.1:{}", free_port());
    let mut server = Server::start(RULES, &["--listen", &listen, "--drain-delay", "1h"]);
    let mut kept = Connection::open(server.asked).unwrap();
    assert_eq!(kept.send("GET", "/ready", &[], "").unwrap().header("connection"), "");
    let mut idle = Connection::open(server.asked).unwrap();
    assert_eq!(idle.send("GET", "/ready", &[], "").unwrap().status, 200);
    server.signal("TERM");
    server.wait_for_line(|line| line["event"] == "drain");
    // It is not ready, still answers, and asks clients to close.
    let answer = kept.send("GET", "/ready", &[], "").unwrap();
    assert_eq!((answer.status, answer.header("connection")), (503, "close"));
    assert_eq!(get(server.asked, "/live", &[]).status, 200);
    server.signal("TERM"); // it need not wait for balancers any longer
    assert_eq!(server.wait(), Some(0));
    assert!(Connection::open(server.asked).is_err());
    assert!(idle.send("GET", "/ready", &[], "").is_err());
    server.wait_for_line(|line| line["event"] == "end");
}

#[test]
fn waiting_request_is_answered_before_the_end() {
    let rules = "rules: [{name: line, quota: '1 per 5 seconds, leaky queue, queue 10', key: global}]\n";
    let mut server = Server::start(rules, &["--drain-delay", "0s"]);
    let check = |mut connection: Connection| {
        let json = [("Content-Type", "application/json")];
        let answer = connection.send("POST", "/v1/check", &json, "{}").unwrap().json();
        assert_eq!(answer["allowed"], true, "{answer}");
        connection
    };
    // The first request departs at once. Its answer shows that the connection is accepted, over which the next one comes.
    let connection = check(Connection::open(server.asked).unwrap());
    let (mut sent, began) = (std::thread::spawn(move || check(connection)), Instant::now());
    while !get(server.admin, "/metrics", &[]).body.contains("ratelimit_waiting{policy=\"line\"} 1\n") {
        assert!(began.elapsed() < LONG, "{}", get(server.admin, "/metrics", &[]).body);
        // On a slow machine it may have departed before anybody looked.
        if sent.is_finished() {
            let connection = sent.join().unwrap();
            sent = std::thread::spawn(move || check(connection));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    server.signal("TERM");
    drop(sent.join().unwrap());
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn rolling_restart_loses_no_request() {
    restarts_without_loss(proxies::nginx_of);
    restarts_without_loss(proxies::caddy_of);
    restarts_without_loss(|limiters| proxies::haproxy_of(limiters, &example("haproxy.lua")));
}

/// Two servers restart one after the other, twice, while a proxy asks them.
fn restarts_without_loss(proxy_of: impl Fn(&[u16]) -> proxies::Setup) {
    let port = [free_port(), free_port()];
    let start = |n: usize| {
        let listen = format!("127.0.0.1:{}", port[n]);
        Server::start(
            &rules().replace("30 per hour", "1000000 per hour"),
            &["--listen", &listen, "--drain-delay", "300ms"],
        )
    };
    let mut servers = [Some(start(0)), Some(start(1))];
    let proxy = proxy_of(&port);
    let (address, ended) = (proxy.proxy.address, Arc::new(AtomicBool::new(false)));
    let sent = Arc::new(AtomicU32::new(0));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (ended, sent) = (Arc::clone(&ended), Arc::clone(&sent));
            std::thread::spawn(move || {
                let mut lost = Vec::new();
                while !ended.load(Ordering::Relaxed) {
                    let mut connection = Connection::open(address).unwrap();
                    for _ in 0..20 {
                        let answer = connection.send("GET", "/", &[], "");
                        sent.fetch_add(1, Ordering::Relaxed);
                        if answer.as_ref().map_or(0, |answer| answer.status) != 200 {
                            lost.push(format!("{answer:?}"));
                            break;
                        }
                    }
                }
                lost
            })
        })
        .collect();
    let deadline = Instant::now() + LONG;
    for _ in 0..2 {
        for n in [0, 1] {
            let goal = sent.load(Ordering::Relaxed) + 100;
            while sent.load(Ordering::Relaxed) < goal && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            let mut old = servers[n].take().unwrap();
            old.signal("TERM");
            assert_eq!(old.wait(), Some(0));
            servers[n] = Some(start(n));
        }
    }
    ended.store(true, Ordering::Relaxed);
    let lost: Vec<String> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    assert!(sent.load(Ordering::Relaxed) >= 400, "{sent:?} requests were sent");
    assert!(lost.is_empty(), "{} of {}: {:?}", lost.len(), sent.load(Ordering::Relaxed), lost.first());
}

#[test]
fn servers_share_their_limits_in_redis() {
    let mut redis = redis_server::Server::start();
    let url = redis.url();
    let servers = [0, 1].map(|_| Server::start(RULES, &["--redis", &url, "--deadline", "20s"]));
    servers.iter().for_each(wait_until_ready);
    assert_eq!([0, 1, 0].map(|n: usize| is_allowed(&servers[n])), [true, true, false]);
    // While Redis is away nothing passes, and balancers learn it.
    redis.kill();
    let answer = post_json(servers[0].asked, "/v1/check", &[], "{\"client\": \"203.0.113.10\"}").json();
    assert_eq!((&answer["allowed"], &answer["status"]), (&false.into(), &503.into()), "{answer}");
    let nginx = [("X-Original-Method", "GET"), ("X-Original-URI", "/"), ("X-Forwarded-For", "203.0.113.10")];
    assert_eq!(get(servers[0].asked, "/auth/nginx", &nginx).status, 503);
    wait_until(|| get(servers[1].admin, "/ready", &[]).status == 503);
    assert_eq!(get(servers[1].admin, "/live", &[]).status, 200);
}
