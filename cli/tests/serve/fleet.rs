//! Operators' settings for all processes: several servers with one Redis, and one with a file.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tower_ratelimit::RedisLimiter;
use tower_ratelimit::fleet::{Fleet, FleetChange};

use crate::http::{Answer, Connection, get, post_json, send};
use crate::server::{Folder, Server};
use crate::support::proxy::Proxy;
use crate::support::redis_server;
use crate::wait::{LONG, wait_until, wait_until_ready};

const RULES: &str = "rules: [{name: client, quota: 2 per day, key: client-ip}]\n";
const OPERATOR: (&str, &str) = ("Authorization", "Bearer 0123456789abcdef");

fn serve(arguments: &[&str]) -> Server {
    let folder = Folder::new();
    folder.write("operators", "alice 0123456789abcdef\n");
    Server::start_in(folder, RULES, &[&["--operators", "operators"], arguments].concat())
}

fn set(server: &Server, body: &Value) -> Answer {
    post_json(server.admin, "/v1/settings", &[OPERATOR], &body.to_string())
}

fn settings(server: &Server) -> Value {
    get(server.admin, "/v1/settings", &[OPERATOR]).json()
}

/// Asks about a client. Returns whether it passes, and the status if not.
fn check(server: &Server, client: &str) -> (bool, Option<u64>) {
    let answer = post_json(server.asked, "/v1/check", &[], &json!({ "client": client }).to_string()).json();
    (answer["allowed"].as_bool().unwrap(), answer["status"].as_u64())
}

/// Returns the limit of a client's quota.
fn limit(server: &Server, client: &str) -> u64 {
    let answer = post_json(server.asked, "/v1/check", &[], &json!({ "client": client }).to_string()).json();
    answer["policies"][0]["limit"].as_u64().unwrap()
}

/// Runs the program. Returns its exit code and what it wrote.
fn run(folder: &Folder, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit"));
    let output = command.current_dir(folder.path()).args(arguments).output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    (output.status.code(), out + &err)
}

/// Waits until this number of servers report to the store.
fn wait_until_reported(url: &str, count: usize) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let fleet = runtime.block_on(async {
        let limiter = RedisLimiter::builder().deadline(LONG).connect(url).await.unwrap();
        Fleet::beside(&limiter).await.unwrap()
    });
    wait_until(|| runtime.block_on(fleet.processes()).is_ok_and(|processes| processes.count == count));
}

#[test]
fn incident_is_handled_in_all_processes_by_one() {
    let mut redis = redis_server::Server::start();
    let arguments = ["--redis", &redis.url(), "--deadline", "20s"];
    let mut servers = [0, 1].map(|_| serve(&arguments));
    servers.iter().for_each(wait_until_ready);
    // An abuser is blocked at one process.
    let block = json!({"kind": "network", "name": "rules", "subject": "203.0.113.0/24", "value": "deny",
                       "lasting": "1h", "why": "guesses passwords"});
    let began = Instant::now();
    assert_eq!(set(&servers[0], &block).json(), json!({"revision": 1}));
    assert_eq!(check(&servers[0], "203.0.113.9"), (false, Some(403)));
    wait_until(|| check(&servers[1], "203.0.113.9") == (false, Some(403)));
    println!("blocked everywhere after {:?}", began.elapsed());
    // A customer is raised, and keeps what it used.
    let customer = "192.0.2.1";
    assert_eq!([0, 1, 0].map(|at: usize| check(&servers[at], customer).0), [true, true, false]);
    let raise = json!({"kind": "override", "name": "client", "subject": customer, "value": "4 per day",
                       "lasting": "1d", "why": "a sale"});
    assert_eq!(set(&servers[1], &raise).json(), json!({"revision": 2}));
    // The log has it after the rules follow it.
    servers[0].wait_for_line(|line| line["event"] == "fleet-in-force" && line["revision"] == "2");
    assert_eq!([0, 1, 0].map(|at: usize| check(&servers[at], customer).0), [true, true, false]);
    assert_eq!((limit(&servers[0], customer), limit(&servers[0], "192.0.2.2")), (4, 2));
    // A rule that is wrong only watches.
    let shadow = json!({"kind": "mode", "name": "client", "value": "shadow", "why": "too strict", "seen": 2});
    assert_eq!(set(&servers[0], &shadow).status, 200);
    wait_until(|| check(&servers[1], customer).0);
    // Two operators at once: the one who has not seen the change learns of it.
    let late = set(&servers[1], &json!({"kind": "mode", "name": "client", "value": "enforce", "why": "", "seen": 2}));
    assert!(late.status == 409 && late.body.contains("alice changed it in revision 3"), "{late:?}");
    // A process that starts now has all of it, and each says which revision it has.
    let third = serve(&arguments);
    wait_until(|| settings(&third)["revision"] == 3);
    // The tables follow a moment after the revision.
    wait_until(|| check(&third, "203.0.113.9") == (false, Some(403)));
    let [first, third] = [&servers[0], &third].map(settings);
    assert_eq!((&first["hash"], &first["entries"]), (&third["hash"], &third["entries"]));
    // Server 1 has let a request pass, and the revision is in force once all tables follow it. The metrics say so after
    // that, and a store that stood still for a moment cannot be read until the next try.
    wait_until(|| {
        let metrics = get(servers[1].admin, "/metrics", &[]).body;
        metrics.contains("\nratelimit_fleet_revision 3\n") && metrics.contains("\nratelimit_fleet_unreadable 0\n")
    });
    let page = get(servers[1].admin, "/limits", &[OPERATOR]).body;
    for shown in [first["hash"].as_str().unwrap(), "203.0.113.0/24", "guesses passwords"] {
        assert!(page.contains(shown), "{shown}: {page}");
    }
    let json = get(servers[1].admin, "/limits", &[OPERATOR, ("Accept", "application/json")]).json();
    assert_eq!((&json["fleet"]["hash"], &json["fleet"]["entries"][2]["by"]), (&first["hash"], &json!("alice")));
    let by: Vec<_> =
        first["actions"].as_array().unwrap().iter().map(|action| (&action["by"], &action["why"])).collect();
    assert_eq!(by[2], (&json!("alice"), &json!("guesses passwords")));
    // Redis is replaced by an empty one: nothing is lost.
    redis.kill();
    wait_until(|| !settings(&servers[0])["error"].is_null());
    assert_eq!(check(&servers[0], "203.0.113.9"), (false, Some(403)), "it goes on with what it knows");
    wait_until(|| get(servers[0].admin, "/metrics", &[]).body.contains("\nratelimit_fleet_unreadable 1\n"));
    servers[0].wait_for_line(|line| line["message"] == "the operators' settings cannot be read, and stay as they were");
    let page = get(servers[0].admin, "/limits", &[OPERATOR]).body;
    assert!(page.contains("The last known settings stay in force."), "{page}");
    assert!(page.contains("<b>The reports of the processes cannot be read since 20"), "{page}");
    redis.restart();
    let end = json!({"kind": "network", "name": "rules", "subject": "203.0.113.0/24", "why": "it is over"});
    // A try whose answer is late may have ended it.
    wait_until(|| [200, 409].contains(&set(&servers[0], &end).status));
    wait_until(|| check(&servers[1], "203.0.113.9").0);
    // The revision is in force once all tables follow it.
    wait_until(|| settings(&servers[1])["revision"].as_u64() >= Some(4));
}

#[test]
fn lost_settings_are_on_the_page_of_each_server() {
    let redis = redis_server::Server::start();
    let servers = [0, 1].map(|_| serve(&["--redis", &redis.url(), "--deadline", "20s"]));
    servers.iter().for_each(wait_until_ready);
    let shadow = json!({"kind": "mode", "name": "client", "value": "shadow", "why": "too strict"});
    assert_eq!(set(&servers[0], &shadow).status, 200);
    wait_until(|| settings(&servers[1])["revision"] == 1);
    let json = |server: &Server| get(server.admin, "/limits", &[OPERATOR, ("Accept", "application/json")]).json();
    assert!(servers.iter().all(|server| json(server)["fleet"]["restored_at"].is_null()));
    let () = redis::cmd("FLUSHALL").query(&mut redis.connection()).unwrap();
    // One of them writes the settings back, and its report tells the other.
    let total = |server: &Server| {
        let metrics = get(server.admin, "/metrics", &[]).body;
        let line = metrics.lines().find_map(|line| line.strip_prefix("ratelimit_fleet_restored_total "));
        line.unwrap().parse::<u64>().unwrap()
    };
    wait_until(|| servers.iter().map(total).sum::<u64>() == 1);
    for server in &servers {
        wait_until(|| json(server)["fleet"]["restored_at"].is_string());
        // The reports were lost, too, and come again within seconds.
        wait_until(|| {
            let page = get(server.admin, "/limits", &[OPERATOR]).body;
            page.contains("the store had lost the settings for all processes") && page.contains(">wrote them back at ")
        });
    }
    assert!(servers.iter().any(|server| settings(server)["restored_at"].is_string()));
}

#[test]
fn server_without_a_store_has_no_settings_and_says_so() {
    let away = format!("redis://127.0.0.1:{}", redis_server::free_port());
    let mut server = serve(&["--redis", &away, "--on-error", "allow"]);
    let line = server.wait_for_line(|line| line["event"] == "fleet-in-force");
    assert_eq!(line["message"], "no setting of an operator is in force in this server");
    let line = server.wait_for_line(|line| line["event"] == "fleet-unreadable");
    assert_eq!(line["message"], "the operators' settings cannot be read, and this server has none yet");
    let page = get(server.admin, "/limits", &[OPERATOR]).body;
    for said in [
        "None is in force in this process yet.",
        "nothing is set for all processes yet",
        "The reports of the processes cannot be read since the start of this process.",
    ] {
        assert!(page.contains(said), "{said}: {page}");
    }
    assert!(!page.contains("1970") && settings(&server)["since"].is_null(), "{}", settings(&server));
}

#[test]
fn pushed_rules_are_in_force_everywhere_until_a_rollback() {
    let redis = redis_server::Server::start();
    let url = redis.url();
    let arguments = ["--redis", &*url, "--deadline", "20s"];
    let servers = [0, 1].map(|_| serve(&arguments));
    servers.iter().for_each(wait_until_ready);
    wait_until_reported(&url, 2);
    let folder = Folder::new();
    let quota = |limit: u64| RULES.replace("2 per day", &format!("{limit} per day"));
    let all_have = |limit_of: u64| {
        wait_until(|| {
            servers.iter().enumerate().all(|(at, server)| limit(server, &format!("192.0.2.{at}")) == limit_of)
        });
    };
    for pushed in [7, 8] {
        folder.write("rules.yaml", &quota(pushed));
        let (code, said) = run(&folder, &["push", "rules.yaml", "--redis", &url, "--by", "bob", "--why", "a test"]);
        assert_eq!(code, Some(0), "{said}");
        all_have(pushed);
    }
    folder.write("wrong.yaml", "rules: [{name: client, quota: 2 per fortnight, key: client-ip}]\n");
    let (code, said) = run(&folder, &["push", "wrong.yaml", "--redis", &url]);
    assert!(code == Some(1) && said.contains("wrong.yaml:1:"), "{said}");
    let (code, said) = run(&folder, &["push", "rules.yaml"]);
    assert!(code == Some(2) && said.contains("--redis or --postgres"), "{said}");
    let (code, said) = run(&folder, &["rollback", "rules", "--redis", &url, "--by", "bob", "--why", "worse"]);
    assert_eq!(code, Some(0), "{said}");
    all_have(7);
    // And over HTTP, back to the file.
    let own = json!({"kind": "rules", "name": "rules", "why": "as before"});
    assert_eq!(set(&servers[0], &own).status, 200);
    all_have(2);
    let (code, said) = run(&folder, &["rollback", "other", "--redis", &url]);
    let words = "none has rules named `other`. Use a name that they have: `rules`";
    assert!(code == Some(2) && said.contains(words), "{said}");
    // Another prefix is another store.
    let (code, said) = run(&folder, &["rollback", "rules", "--redis", &url, "--prefix", "other"]);
    let words = "nothing was changed: no process reports to this store. Check the store and --prefix";
    assert!(code == Some(2) && said.contains(words), "{said}");
}

#[test]
fn push_and_rollback_say_which_rules_they_replace() {
    let redis = redis_server::Server::start();
    let (url, folder) = (redis.url(), Folder::new());
    let push = |by: &str, limit: u64, seen: &str| {
        folder.write("rules.yaml", &RULES.replace("2 per day", &format!("{limit} per day")));
        run(&folder, &["push", "rules.yaml", "--redis", &url, "--by", by, "--seen", seen, "--first"])
    };
    folder.write("rules.yaml", RULES);
    let (code, said) = run(&folder, &["push", "rules.yaml", "--redis", &url]);
    let words = "nothing was changed: no process reports to this store. Check the store and --prefix, or use --first";
    assert!(code == Some(2) && said.contains(words), "{said}");
    let (code, said) = push("alice", 7, "0");
    let words = "revision 1: no process whose rules are named `rules` reports to this store now: such processes take \
                 these rules when they start, instead of those of their own files";
    assert!(code == Some(0) && said.contains(words), "{said}");
    // The second operator learns of the first.
    let (code, said) = push("bob", 8, "0");
    assert!(code == Some(2) && said.contains("alice (unverified) changed it in revision 1"), "{said}");
    let (code, said) = push("bob", 8, "1");
    assert!(
        code == Some(0)
            && said.contains(
                "instead of those that alice (unverified) put in force in revision 1\nlooser    client: `quota` was"
            ),
        "{said}"
    );
    let rollback = |seen: &str| run(&folder, &["rollback", "rules", "--redis", &url, "--by", "carol", "--seen", seen]);
    let (code, said) = rollback("1");
    assert!(code == Some(2) && said.contains("bob (unverified) changed it in revision 2"), "{said}");
    let (code, said) = rollback("2");
    assert!(code == Some(0) && said.contains("the rules that alice (unverified) put in force in revision 1"), "{said}");
    // The second operator did not see the first one's rollback.
    let (code, said) = rollback("2");
    assert!(code == Some(2) && said.contains("carol (unverified) changed it in revision 3"), "{said}");
    let (code, said) = rollback("9");
    assert!(code == Some(2) && said.contains("the latest is 3"), "{said}");
    let server = serve(&["--redis", &url, "--deadline", "20s"]);
    wait_until_ready(&server);
    wait_until(|| settings(&server)["revision"] == 3);
    let over_http = |seen: u64| {
        let body = json!({"name": "rules", "why": "", "seen": seen}).to_string();
        post_json(server.admin, "/v1/rollback", &[OPERATOR], &body)
    };
    assert_eq!(over_http(2).status, 409);
    // One step is kept, so nobody restores the rules of bob that were rolled back.
    let refused = over_http(3);
    let said = "the rules that bob (unverified) put in force in revision 2 were rolled back or ended";
    assert!(refused.status == 409 && refused.body.contains(said), "{refused:?}");
    let (code, said) = rollback("3");
    assert!(code == Some(2) && said.contains("there is no push to roll back"), "{said}");
    let undone = settings(&server);
    let undone = undone["entries"].as_array().unwrap().iter().find(|entry| entry["kind"] == "undone-rules").unwrap();
    assert!(undone["value"].as_str().unwrap().contains("8 per day"), "{undone}");
    let (code, said) = push("bob", 9, "3");
    assert!(
        code == Some(0) && said.contains("instead of those that carol (unverified) put in force in revision 3"),
        "{said}"
    );
    let (code, said) = push("bob", 9, "4");
    assert!(
        code == Some(0) && said.contains("which are those that bob (unverified) put in force in revision 4"),
        "{said}"
    );
    wait_until(|| settings(&server)["revision"] == 5);
    let restored = json!({"by": "carol (unverified)", "why": "rolled back to revision 1", "revision": 3});
    assert_eq!(over_http(5).json(), json!({"revision": 6, "restored": restored}));
    let own = json!({"kind": "rules", "name": "rules", "why": ""});
    let ended = set(&server, &own).json();
    assert!(
        ended["message"].as_str().unwrap().starts_with("each server uses the rules of its own file again"),
        "{ended}"
    );
    let nothing = set(&server, &own);
    assert!(nothing.status == 409 && nothing.body.contains("nothing to end"), "{nothing:?}");
    let ended = over_http(7);
    assert!(ended.status == 409 && ended.body.contains("the rules that alice put in force in revision 6"), "{ended:?}");
    // A push has the notes of `check`. It does not know the rules of each server's file.
    let (code, said) = push("bob", 0, "7");
    let note = "rules.yaml:1:31: note: the quota of the rule `client` is 0, so each request";
    assert!(
        code == Some(0)
            && said.starts_with(note)
            && said.contains("nothing is compared here: the status page of each server says what changes"),
        "{said}"
    );
}

#[test]
fn push_says_how_many_servers_take_the_rules() {
    let redis = redis_server::Server::start();
    let (url, folder) = (redis.url(), Folder::new());
    folder.write("rules.yaml", RULES);
    let servers = [0, 1].map(|_| serve(&["--redis", &*url, "--deadline", "20s"]));
    servers.iter().for_each(wait_until_ready);
    wait_until_reported(&url, 2);
    let push = |more: &[&str]| run(&folder, &[&["push", "rules.yaml", "--redis", &url, "--by", "bob"], more].concat());
    let (code, said) = push(&["--name", "rule"]);
    assert_eq!(code, Some(2), "{said}");
    let reason =
        "error: nothing was changed: of the 2 processes that report to this store, none has rules named `rule`";
    assert!(said.starts_with(reason) && said.contains("a name that they have: `rules`"), "{said}");
    assert_eq!(settings(&servers[0])["revision"], 0);
    let (code, said) = push(&[]);
    let words = "revision 1: 2 processes whose rules are named `rules` take these rules within two seconds";
    assert!(code == Some(0) && said.starts_with(words), "{said}");
}

#[test]
fn push_reaches_a_store_that_is_far_away() {
    let mut redis = redis_server::Server::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let proxy = runtime.block_on(async { Proxy::start(redis.port()) });
    proxy.delay(Duration::from_millis(300));
    let folder = Folder::new();
    folder.write("rules.yaml", RULES);
    let push = || run(&folder, &["push", "rules.yaml", "--first", "--redis", &proxy.url()]);
    let (code, said) = push();
    assert!(code == Some(0) && said.starts_with("revision 1: "), "{said}");
    redis.kill();
    let (code, said) = push();
    assert!(code == Some(2) && said.starts_with("error: nothing was changed: the store failed: "), "{said}");
}

#[test]
fn pushed_rules_that_a_server_cannot_use_are_logged() {
    let redis = redis_server::Server::start();
    let (url, folder) = (redis.url(), Folder::new());
    let arguments = ["--redis", &*url, "--deadline", "20s", "--reload-every", "100ms"];
    // A program that uses the library could use this file, but `serve` cannot count requests in flight.
    folder.write("rules.yaml", &RULES.replace("2 per day", "3 at once"));
    let (code, said) = run(&folder, &["push", "rules.yaml", "--redis", &url]);
    assert!(code == Some(1) && said.contains("rules.yaml:1:") && said.contains("does not support"), "{said}");
    // Only programs know the names that they register, so these rules are pushed.
    let registered = RULES.replace("2 per day", "3 at once").replace("client-ip", "customer");
    folder.write("rules.yaml", &registered);
    let (code, said) = run(&folder, &["push", "rules.yaml", "--first", "--redis", &url, "--by", "mallory"]);
    assert!(code == Some(0) && said.contains("`serve` cannot use them"), "{said}");
    folder.write("other.yaml", RULES);
    let (code, said) = run(&folder, &["push", "other.yaml", "--first", "--redis", &url, "--by", "bob"]);
    assert_eq!(code, Some(0), "{said}");
    let mut server = serve(&arguments);
    wait_until_ready(&server);
    let refused = server.wait_for_line(|line| line["event"] == "rules-refused");
    let said = refused["message"].as_str().unwrap();
    assert!(
        said.starts_with("the rules stay as they were: mallory (unverified) pushed these rules in revision 1: 1:"),
        "{said}"
    );
    let unknown = server.wait_for_line(|line| line["event"] == "rules-unknown");
    let said = unknown["message"].as_str().unwrap();
    assert!(said.starts_with("bob (unverified) pushed rules in revision 2 under the name `other`"), "{said}");
    assert!(said.ends_with("named `rules`"), "{said}");
    wait_until(|| limit(&server, "192.0.2.1") == 2);
    // The server's own file is used until rules are in force that an operator pushed.
    server.folder.write("rules.yaml", &RULES.replace("2 per day", "5 per day"));
    wait_until(|| limit(&server, "192.0.2.1") == 5);
    let pushed = json!({"kind": "rules", "name": "rules", "value": RULES.replace("2 per", "7 per"), "why": ""});
    assert_eq!(set(&server, &pushed).status, 200);
    assert_eq!(limit(&server, "192.0.2.1"), 7);
    server.folder.write("rules.yaml", "rules: [{name: client}]\n");
    let unused = server.wait_for_line(|line| line["event"] == "rules-unused");
    let said = unused["message"].as_str().unwrap();
    let reason = "because the rules that alice pushed in revision 3 are in force; the file has problems: ";
    assert!(said.contains(reason), "{said}");
    assert_eq!((unused["revision"].as_str(), limit(&server, "192.0.2.1")), (Some("3"), 7));
    let is_unknown = |line: &&Value| line["event"] == "rules-unknown";
    assert_eq!(server.lines().iter().filter(is_unknown).count(), 1, "it is logged once");
}

/// Another program, whose limiter can count requests in flight, pushes rules that `serve` cannot use.
#[test]
fn server_restarts_beside_rules_that_it_cannot_use() {
    let redis = redis_server::Server::start();
    let url = redis.url();
    let arguments = ["--redis", &*url, "--deadline", "20s", "--reload-every", "100ms"];
    let first = serve(&arguments);
    wait_until_ready(&first);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let limiter = RedisLimiter::builder().deadline(LONG).connect(&url).await.unwrap();
        let fleet = Fleet::beside(&limiter).await.unwrap();
        let rules = FleetChange::rules("rules", RULES.replace("2 per day", "3 at once"));
        fleet.change("mallory", "", [rules]).await.unwrap();
    });
    let reason = "mallory pushed these rules in revision 1: 1:";
    let shows_it = |server: &Server| {
        let page = get(server.admin, "/limits", &[OPERATOR]).body;
        let json = get(server.admin, "/limits", &[OPERATOR, ("Accept", "application/json")]).json();
        let metrics = get(server.admin, "/metrics", &[]).body;
        let is_on_page = page.contains("Rules were refused, and others are in force.") && page.contains(reason);
        is_on_page
            && json["rules"]["error"].as_str().is_some_and(|error| error.starts_with(reason))
            && metrics.contains("\nratelimit_rules_refused 1\n")
    };
    wait_until(|| shows_it(&first));
    assert_eq!(limit(&first, "192.0.2.1"), 2);
    drop(first);
    let mut second = serve(&arguments);
    wait_until_ready(&second);
    let refused = second.wait_for_line(|line| line["event"] == "rules-refused");
    let said = refused["message"].as_str().unwrap();
    assert!(said.starts_with(&format!("the rules stay as they were: {reason}")), "{said}");
    assert!(said.contains("does not support the quota"), "{said}");
    wait_until(|| shows_it(&second));
    assert_eq!(limit(&second, "192.0.2.2"), 2);
    // The server follows its own file meanwhile, and still says what was refused.
    second.folder.write("rules.yaml", &RULES.replace("2 per day", "5 per day"));
    wait_until(|| limit(&second, "192.0.2.3") == 5);
    wait_until(|| shows_it(&second));
    let end = json!({"kind": "rules", "name": "rules", "why": "it cannot be used"});
    assert_eq!(set(&second, &end).status, 200);
    assert!(!shows_it(&second));
    assert_eq!(limit(&second, "192.0.2.4"), 5);
}

#[test]
fn settings_of_a_server_in_memory_are_in_a_file() {
    let folder = Folder::new();
    let file = folder.path().join("set").display().to_string();
    let block = json!({"kind": "network", "name": "rules", "subject": "203.0.113.9", "value": "deny", "why": "x"});
    {
        let server = serve(&["--fleet", &file]);
        for (wrong, said) in [
            (json!({"kind": "network", "name": "rules", "value": "deny", "why": "x"}), "name one"),
            (
                json!({"kind": "network", "name": "ruless", "subject": "::1", "value": "deny", "why": ""}),
                "it has `rules`",
            ),
            (json!({"kind": "network", "name": "rules", "subject": "::1", "value": "denied", "why": ""}), "none of"),
            (json!({"kind": "blocks", "name": "rules", "why": ""}), "none of"),
            (json!({"kind": "mode", "name": "client", "value": "shadow"}), "`why`"),
            (json!({"kind": "mode", "name": "client", "value": "shadow", "why": "", "until": "x"}), "no field `until`"),
        ] {
            let answer = set(&server, &wrong);
            assert!(answer.status == 400 && answer.body.contains(said), "{wrong}: {answer:?}");
        }
        let unnamed = post_json(server.admin, "/v1/settings", &[], &block.to_string());
        assert_eq!(unnamed.status, 401);
        assert_eq!(set(&server, &block).status, 200);
        // A refusal that comes while somebody reads the statistics is not noted.
        wait_until(|| {
            assert_eq!(check(&server, "203.0.113.9"), (false, Some(403)));
            let page = get(server.admin, "/limits", &[OPERATOR, ("Accept", "application/json")]).json();
            page["recent_refusals"][0]["network"] == "203.0.113.9/32"
        });
        let page = get(server.admin, "/limits", &[OPERATOR]).body;
        assert!(page.contains("network 203.0.113.9/32<span class=\"mode\">denied"), "{page}");
    }
    let mut server = serve(&["--fleet", &file]);
    // A server that has no time to read the file listens before it has read it.
    wait_until(|| check(&server, "203.0.113.9") == (false, Some(403)));
    assert_eq!(settings(&server)["entries"][0]["by"], "alice");
    let shadow = json!({"kind": "mode", "name": "client", "value": "shadow", "why": "too strict"});
    assert_eq!(set(&server, &shadow).status, 200);
    let is_loaded = |line: &Value| line["event"] == "rules-loaded" && line["version"] == "2";
    assert!(server.wait_for_line(is_loaded)["file"].as_str().unwrap().ends_with("rules.yaml"));
    let pushed = json!({"kind": "rules", "name": "rules", "value": RULES.replace("2 per", "3 per"), "why": "more"});
    assert_eq!(set(&server, &pushed).status, 200);
    let line = server.wait_for_line(|line| line["event"] == "rules-loaded" && line["version"] == "3");
    let message = line["message"].as_str().unwrap();
    let said = "1 rules, which operators have pushed, are in force: client: 2 per day, ";
    assert!(line["file"].is_null() && message.starts_with(said) && message.contains(" -> 3 per day, "), "{line}");
    // A key that nobody used may be mistyped, and a fingerprint is no key.
    let raise_of = |subject: &str| json!({"kind": "override", "name": "client", "subject": subject, "value": "9 per day", "why": "a sale"});
    let fingerprint = || {
        let _ = check(&server, "192.0.2.7");
        let listed = get(server.admin, "/limits", &[OPERATOR, ("Accept", "application/json")]).json();
        listed["policies"][0]["most_used"][0]["fingerprint"].as_str().map(str::to_owned)
    };
    wait_until(|| fingerprint().is_some());
    let unused = set(&server, &raise_of("192.0.2.8"));
    assert!(unused.json()["warning"].as_str().unwrap().starts_with("nothing is counted for this key"), "{unused:?}");
    let used = set(&server, &raise_of("192.0.2.7"));
    assert!(used.status == 200 && used.json()["warning"].is_null(), "{used:?}");
    let refused = set(&server, &raise_of(&fingerprint().unwrap()));
    assert!(refused.status == 400 && refused.body.contains("is the fingerprint of a key"), "{refused:?}");
    // The log has the fingerprint of a key, as the page has, whether the change is made or not.
    let raise = |value: &str| json!({"kind": "override", "name": "client", "subject": "198.51.100.77", "value": value, "why": "a sale"});
    assert_eq!(["9 per day", "nine per day"].map(|value| set(&server, &raise(value)).status), [200, 400]);
    let page = get(server.admin, "/limits", &[OPERATOR]).body;
    assert!(page.contains("3 per day, token bucket, unless overridden for a key"), "{page}");
    for (result, value) in [("ok", "9 per day"), ("failed", "nine per day")] {
        let is_it = |line: &Value| line["result"] == result && line["request"].to_string().contains(value);
        let line = server.wait_for_line(is_it);
        let request: Value = serde_json::from_str(line["request"].as_str().unwrap()).unwrap();
        assert!(page.contains(request["subject"].as_str().unwrap()), "{request}: {page}");
    }
    assert!(server.lines().iter().all(|line| !line.to_string().contains("198.51.100.77")), "{:?}", server.lines());
    // A setting that applies to no client is refused, and so is one that denies every client.
    let wrong = set(&server, &raise_of("198.51.100.77:80"));
    assert!(wrong.status == 400 && wrong.body.contains("write one without a port"), "{wrong:?}");
    for (kind, subject, said) in [
        ("network", "198.51.100.77/24", "write 198.51.100.0/24 for the network"),
        ("network", "0.0.0.0/0", "To refuse everybody on purpose"),
        ("key", "198.51.100.77", "set a `network`"),
    ] {
        let deny = json!({"kind": kind, "name": "rules", "subject": subject, "value": "deny", "why": ""});
        let wrong = set(&server, &deny);
        assert!(wrong.status == 400 && wrong.body.contains(said), "{wrong:?}");
    }
    // A large network may be meant, so it is denied with a warning.
    let deny = |network: &str| {
        let denied = json!({"kind": "network", "name": "rules", "subject": network, "value": "deny", "why": ""});
        let answer = set(&server, &denied);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["warning"].as_str().map(str::to_owned)
    };
    let said = deny("192.0.0.0/2").unwrap();
    assert!(said.starts_with("the denied network is a /2, which has one of 4 of all IPv4 addresses"), "{said}");
    assert!(deny("203.0.0.0/8").is_some_and(|said| said.contains("one of 256 of all IPv4")));
    assert!(deny("2001::/16").is_some_and(|said| said.contains("one of 65536 of all IPv6")));
    assert_eq!([deny("203.0.0.0/9"), deny("2001::/17")], [None, None]);
    let foreign = set(&server, &json!({"kind": "plan", "name": "client", "subject": "a", "why": ""}));
    assert!(foreign.status == 400 && foreign.body.contains("a server has no `plan`"), "{foreign:?}");
    let without = serve(&[]);
    let answer = set(&without, &block);
    assert!(answer.status == 404 && answer.body.contains("--fleet"), "{answer:?}");
}

/// Envoy names no client, so an entry for one would have no effect.
#[test]
fn network_is_refused_for_a_file_in_envoys_form() {
    let folder = Folder::new();
    let file = folder.path().join("set").display().to_string();
    folder.write("operators", "alice 0123456789abcdef\n");
    let rules = "{domain: edge, descriptors: [{key: a, rate_limit: {unit: hour, requests_per_unit: 1}}]}\n";
    let server = Server::start_in(folder, rules, &["--operators", "operators", "--fleet", &file]);
    let block = json!({"kind": "network", "name": "rules", "subject": "203.0.113.9", "value": "deny", "why": "x"});
    let answer = set(&server, &block);
    assert!(answer.status == 400 && answer.body.contains("block the network in Envoy"), "{answer:?}");
    let page = get(server.admin, "/limits", &[OPERATOR]).body;
    assert!(!page.contains("network rules"), "the form does not offer it: {page}");
}

/// Sends a form to the status page, as a program does.
fn form(server: &Server, fields: &str) -> Answer {
    let headers = [OPERATOR, ("Accept", "application/json"), ("Content-Type", "application/x-www-form-urlencoded")];
    send(server.admin, "POST", "/limits", &headers, fields)
}

#[test]
fn page_of_any_process_acts_for_all() {
    let redis = redis_server::Server::start();
    let servers = ["one", "two"].map(|name| serve(&["--redis", &redis.url(), "--deadline", "20s", "--name", name]));
    servers.iter().for_each(wait_until_ready);
    // One explains, and the other one resets.
    while check(&servers[0], "192.0.2.1").0 {}
    let hash = |at: usize| settings(&servers[at])["hash"].clone();
    let nothing = hash(0);
    // The first explanation makes the secret that all share. If the store is slow, a token is of one process only.
    let explain = || form(&servers[0], "action=explain&uri=%2F&client=192.0.2.1").json()[0]["token"].clone();
    wait_until(|| explain().is_string() && hash(0) != nothing);
    let reset = format!("action=reset&token={}", explain().as_str().unwrap());
    wait_until(|| hash(1) == hash(0)); // the secret is shared, and nothing is set
    assert_eq!(settings(&servers[1])["revision"], 0);
    assert_eq!(form(&servers[1], &reset).status, 409);
    let described = format!("{reset}&uri=%2F&client=192.0.2.1");
    let done = form(&servers[1], &described);
    assert_eq!((done.status, form(&servers[1], &described).status), (200, 409), "{done:?}");
    wait_until(|| check(&servers[0], "192.0.2.1").0);
    // A setting is made at one, and ended at the other.
    while check(&servers[0], "192.0.2.1").0 {}
    assert_eq!(form(&servers[0], "action=set&setting=mode+client&value=shadow&why=too+strict").status, 200);
    wait_until(|| check(&servers[1], "192.0.2.1").0);
    let page = |at: usize| get(servers[at].admin, "/limits", &[OPERATOR, ("Accept", "application/json")]).json();
    // The page shows a setting once all tables follow it.
    wait_until(|| page(1)["fleet"]["revision"] == 1);
    let entry = page(1)["fleet"]["entries"][0]["entry"].as_str().unwrap().to_owned();
    assert_eq!(form(&servers[1], &format!("action=end&entry={entry}&seen=1&why=over")).status, 200);
    wait_until(|| !check(&servers[0], "192.0.2.1").0);
    // The page of each shows both, and the sums.
    for at in [0, 1] {
        let sum_of = |page: &Value| {
            let processes = page["all_processes"]["processes"].as_array()?.iter();
            let shown: Vec<_> = processes.map(|of| (of["name"].as_str(), of["requests"].as_u64())).collect();
            let [(Some("one"), Some(first)), (Some("two"), Some(second))] = shown[..] else { return None };
            Some((first, second, page["all_processes"]["requests"].as_u64()?))
        };
        wait_until(|| sum_of(&page(at)).is_some_and(|(one, two, all)| one > 3 && two > 0 && one + two == all));
        // It says of both since when they have their rules and settings, as each says of itself.
        let since = || {
            let shown = page(at);
            let processes = shown["all_processes"]["processes"].as_array()?.clone().into_iter();
            Some(processes.map(|of| [of["rules_since"].clone(), of["settings_since"].clone()]).collect::<Vec<_>>())
        };
        let own = |at: usize| [page(at)["rules"]["loaded_at"].clone(), page(at)["fleet"]["since"].clone()];
        assert!(own(at).iter().all(Value::is_string), "{:?}", own(at));
        wait_until(|| since().is_some_and(|since| since == [own(0), own(1)]));
        let shown = own(at).map(|since| format!(">since {}<", since.as_str().unwrap()));
        wait_until(|| {
            let html = get(servers[at].admin, "/limits", &[OPERATOR]).body;
            let is_of_both = html.contains("All 2 processes") && html.contains("this one");
            is_of_both && shown.iter().all(|shown| html.contains(shown))
        });
    }
}

/// A process is killed while operators change something, and another one starts.
#[test]
fn killed_process_takes_no_setting_with_it() {
    let redis = redis_server::Server::start();
    let arguments = ["--redis", &redis.url(), "--deadline", "20s"];
    let [first, second] = [0, 1].map(|_| serve(&arguments));
    [&first, &second].into_iter().for_each(wait_until_ready);
    let client = |n: usize| format!("10.0.{}.{}", n / 256, n % 256);
    let admin = first.admin;
    let changes = std::thread::spawn(move || {
        let change = |n: &usize| {
            let deny = json!({"kind": "network", "name": "rules", "subject": client(*n), "value": "deny", "why": ""});
            let headers = [OPERATOR, ("Content-Type", "application/json")];
            let sent = Connection::open(admin)
                .and_then(|mut connection| connection.send("POST", "/v1/settings", &headers, &deny.to_string()));
            sent.is_ok_and(|answer| answer.status == 200)
        };
        (0..10_000).take_while(change).count()
    });
    wait_until(|| settings(&second)["revision"].as_u64() >= Some(3));
    drop(first); // by SIGKILL
    let made = changes.join().unwrap();
    println!("{made} changes were made before it was killed");
    let third = serve(&arguments);
    // The store may decide before it has answered with the settings, and the tables follow a moment later.
    wait_until(|| settings(&third)["entries"].as_array().unwrap().len() >= made);
    wait_until(|| check(&third, &client(made - 1)) == (false, Some(403)));
    for n in (0..made).rev().take(20) {
        assert_eq!(check(&third, &client(n)), (false, Some(403)), "{n} of {made}");
    }
    wait_until(|| settings(&second)["hash"] == settings(&third)["hash"]);
}
