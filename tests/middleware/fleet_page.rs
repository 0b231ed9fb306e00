//! Operators change the settings of all processes on the status page, and its tokens hold in all.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;
use tower_ratelimit::fleet::{Fleet, FleetChange};
use tower_ratelimit::middleware::{Access, AccessList, ModeSwitch};
use tower_ratelimit::observe::{OperatorAction, Stats, StatusPage};
use tower_ratelimit::rules::Rules;
use tower_ratelimit::{Head, MemoryLimiter, Mode, Quota, RateLimitLayer, Rule, key};

/// Two processes with one fleet and one limiter, each with a page.
struct World {
    file: PathBuf,
    fleet: Fleet,
    mode: ModeSwitch,
    clients: AccessList,
    layer: RateLimitLayer<MemoryLimiter>,
    pages: [StatusPage; 2],
    audit: Arc<Mutex<Vec<OperatorAction>>>,
}

fn who(request: &Head<'_>) -> Option<String> {
    Some(request.headers.get("operator")?.to_str().ok()?.to_owned())
}

impl World {
    async fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let file = std::env::temp_dir().join(format!("fleet-page-{}-{number}", std::process::id()));
        let fleet = Fleet::in_file(&file).await.unwrap();
        let (mode, clients) = (fleet.mode("client", Mode::Enforce), fleet.access("clients"));
        let rule = Rule::new("client", Quota::per_hour(2)).unwrap().mode(&mode);
        let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::header("x-api-key"));
        let audit: Arc<Mutex<Vec<OperatorAction>>> = Arc::default();
        let page = |_| {
            let audited = Arc::clone(&audit);
            StatusPage::new(Stats::new())
                .layer("api", &layer)
                .fleet(&fleet)
                .operators(who, move |action| audited.lock().unwrap().push(action.clone()))
        };
        let pages = [0, 1].map(page);
        Self { file, fleet, mode, clients, layer, pages, audit }
    }

    /// Sends a form to a page. Returns the status and the JSON or the text.
    async fn post(&self, page: usize, operator: &str, fields: &str) -> (StatusCode, Value) {
        let (status, text) = self.send(page, operator, "application/json", Some(fields)).await;
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    async fn send(&self, page: usize, operator: &str, accept: &str, fields: Option<&str>) -> (StatusCode, String) {
        let request = fields.map_or_else(|| Request::get("/"), |_| Request::post("/"));
        let request = request.header("content-type", "application/x-www-form-urlencoded").header("accept", accept);
        let request = if operator.is_empty() { request } else { request.header("operator", operator) };
        let request = request.body(Body::from(fields.unwrap_or_default().to_owned())).unwrap();
        let response = self.pages[page].clone().oneshot(request).await.unwrap();
        let (status, body) = (response.status(), response.into_body());
        (status, String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap())
    }

    /// Takes a unit of a key. Returns whether it passes.
    async fn passes(&self, key: &str) -> bool {
        let (head, ()) = Request::get("/").header("x-api-key", key).body(()).unwrap().into_parts();
        match self.layer.admit(&head).await {
            Ok(admission) => {
                admission.keep();
                true
            }
            Err(_) => false,
        }
    }

    fn audited(&self) -> Vec<String> {
        let actions = std::mem::take(&mut *self.audit.lock().unwrap());
        actions.iter().map(|action| action.to_string().split_once("Z ").unwrap().1.to_owned()).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

#[tokio::test]
async fn operator_sets_changes_and_ends_an_entry() {
    let world = World::new().await;
    let set = "action=set&setting=mode+client&value=shadow&why=it+refuses+too+many&seen=0";
    let (status, done) = world.post(0, "alice", set).await;
    assert_eq!((status, done["actions"][0]["setting"].as_str()), (StatusCode::OK, Some("mode client")), "{done}");
    assert_eq!(world.mode.get(), Mode::Shadow);
    let shown = world.send(1, "bob", "application/json", None).await.1;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let (entry, revision) = (&shown["fleet"]["entries"][0], &shown["fleet"]["revision"]);
    assert_eq!((entry["value"].as_str(), entry["why"].as_str()), (Some("shadow"), Some("it refuses too many")));
    let entry = format!("entry={}&seen={revision}", entry["entry"].as_str().unwrap());
    let changed = format!("action=set&{entry}&value=degrade&lasting=1h&why=better");
    assert_eq!(world.post(1, "bob", &changed).await.0, StatusCode::OK);
    assert_eq!(world.mode.get(), Mode::Degrade);
    assert!(world.fleet.entries()[0].until.is_some());
    // Alice has not seen that.
    let (status, late) = world.post(0, "alice", &format!("action=end&{entry}&why=over")).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(late["actions"][0]["error"].as_str().unwrap().contains("bob changed it in revision 2"), "{late}");
    let end = format!("action=end&{}&why=over", entry.split_once('&').unwrap().0);
    assert_eq!(world.post(0, "alice", &end).await.0, StatusCode::OK);
    assert_eq!(world.post(0, "alice", &end).await.0, StatusCode::CONFLICT, "it has ended");
    assert_eq!(world.mode.get(), Mode::Enforce);
    let subject = "action=set&setting=network+clients&subject=203.0.113.0%2F24&value=deny&why=an+abuser";
    assert_eq!(world.post(0, "alice", subject).await.0, StatusCode::OK);
    assert_eq!(world.clients.of_address("203.0.113.9".parse().unwrap()), Some(Access::Deny));
    let audited = world.audited();
    assert_eq!(audited[0], "alice: set mode client to shadow for all processes: done");
    assert_eq!(audited[1], "bob: set mode client to degrade for all processes: done");
    assert!(audited[2].starts_with("alice: end mode client for all processes: failed: bob changed"), "{audited:?}");
    assert_eq!(audited[3], "alice: end mode client for all processes: done");
    assert_eq!(audited[4], "alice: set network clients 203.0.113.0/24 to deny for all processes: done");
    let (_, actions) = world.send(0, "", "text/html", None).await;
    assert!(actions.contains("Last 4 changes for all processes") && actions.contains("an abuser"), "{actions}");
}

#[tokio::test]
async fn form_for_all_processes_is_checked() {
    let world = World::new().await;
    for (fields, status, said) in [
        ("action=set&setting=mode+client&value=shadow", StatusCode::BAD_REQUEST, "say why"),
        ("action=set&setting=mode&value=shadow&why=a", StatusCode::BAD_REQUEST, "`mode login`"),
        ("action=set&setting=moods+client&value=shadow&why=a", StatusCode::BAD_REQUEST, "moods"),
        ("action=set&setting=mode+client&value=off&why=a", StatusCode::BAD_REQUEST, "the value cannot be read"),
        ("action=set&setting=mode+clientt&value=shadow&why=a", StatusCode::BAD_REQUEST, "it has `client`"),
        ("action=set&setting=network+clients&value=deny&why=a", StatusCode::BAD_REQUEST, "name one"),
        ("action=set&setting=mode+client&value=shadow&why=a&lasting=soon", StatusCode::BAD_REQUEST, "`1 hour`"),
        ("action=set&setting=mode+client&value=shadow&why=a&seen=now", StatusCode::BAD_REQUEST, "a revision"),
        ("action=rollback&setting=mode+client&why=a", StatusCode::BAD_REQUEST, "only rules"),
        ("action=rollback&setting=rules+rules&why=a", StatusCode::BAD_REQUEST, "no rules were put in force"),
        ("action=end&entry=0123456789abcdef&why=a", StatusCode::CONFLICT, "load the page again"),
    ] {
        let (found, answer) = world.post(0, "alice", fields).await;
        assert!(found == status && answer.to_string().contains(said), "{fields}: {found} {answer}");
        assert_eq!(world.post(0, "", fields).await.0, StatusCode::FORBIDDEN, "{fields}");
    }
    assert_eq!((world.fleet.in_force().revision, world.mode.get()), (0, Mode::Enforce));
    let page = StatusPage::new(Stats::new()).operators(who, |_| {});
    let request = Request::post("/").header("content-type", "application/x-www-form-urlencoded");
    let request = request.header("operator", "alice").body(Body::from("action=end&setting=mode+client&why=a"));
    assert_eq!(page.oneshot(request.unwrap()).await.unwrap().status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn page_has_the_forms_for_operators_only() {
    let world = World::new().await;
    world.post(0, "alice", "action=set&setting=key+clients&subject=secret-key&value=deny&why=%3Cb%3Eleaked").await;
    let (_, page) = world.send(0, "alice", "text/html", None).await;
    for part in [
        "<option value=\"mode client\">mode client</option>",
        "<option value=\"network clients\">",
        "<button name=\"action\" value=\"end\">End</button>",
        "&lt;b&gt;leaked",
        "name=\"seen\" value=\"1\"",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains("secret-key") && !page.contains("<b>leaked"), "{page}");
    let (_, page) = world.send(0, "", "text/html", None).await;
    assert!(page.contains("&lt;b&gt;leaked") && !page.contains("<select") && !page.contains("value=\"end\""), "{page}");
    // What an operator typed is there again if it was wrong.
    let wrong = "action=set&setting=mode+client&value=%22of%22&why=an+incident&lasting=1h";
    let (status, page) = world.send(0, "alice", "text/html", Some(wrong)).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    for part in ["<b>Not done.</b>", "value=\"mode client\" selected", "value=\"&quot;of&quot;\"", "value=\"1h\""] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let right = "action=set&setting=mode+client&value=shadow&why=an+incident";
    assert_eq!(world.send(0, "alice", "text/html", Some(right)).await.0, StatusCode::SEE_OTHER);
}

#[tokio::test]
async fn page_says_what_pushed_rules_change() {
    let world = World::new().await;
    let text = |limit: u64| format!("rules: [{{name: <login>, quota: {limit} per hour, key: peer-ip}}]");
    let rules = Rules::builder().fleet(&world.fleet, "rules").read_text(text(5)).unwrap();
    let push = async |text: String| world.fleet.change("bob", "", [FleetChange::rules("rules", text)]).await.unwrap();
    let shown = async || {
        let (_, shown) = world.send(0, "", "application/json", None).await;
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let entries = shown["fleet"]["entries"].as_array().unwrap().clone();
        let entry = entries.into_iter().find(|entry| entry["kind"] == "rules").unwrap();
        (entry["compared_with"].as_str().unwrap().to_owned(), entry["changes"].clone())
    };
    let html = async || world.send(0, "", "text/html", None).await.1;
    push(text(3)).await;
    let (before, changes) = shown().await;
    assert_eq!((&*before, changes[0]["kind"].as_str()), ("this process's own rules", Some("stricter")));
    assert_eq!(changes[0]["rule"].as_str(), Some("<login>"));
    let page = html().await;
    assert!(page.contains("1 change of this process&#39;s own rules"), "{page}");
    assert!(page.contains("<li>stricter <span class=\"name\">&lt;login&gt;</span>"), "{page}");
    push(text(3) + "\n# a comment").await;
    assert_eq!(shown().await, ("the rules that bob put in force in revision 1".to_owned(), serde_json::json!([])));
    assert!(html().await.contains("the same as the rules that bob put in force in revision 1"));
    drop(rules);
    push(format!("{}\n# {}", text(4), "a".repeat(70_000))).await;
    assert_eq!(shown().await, ("the rules that bob put in force in revision 2".to_owned(), Value::Null));
    assert!(html().await.contains("too long to be compared here"));
    // Nothing is known of the rules of other programs.
    world.fleet.change("bob", "", [FleetChange::rules("other", text(1))]).await.unwrap();
    let (_, shown) = world.send(0, "", "application/json", None).await;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let other = shown["fleet"]["entries"].as_array().unwrap().iter().find(|entry| entry["name"] == "other").unwrap();
    assert!(other["changes"].is_null() && other["compared_with"].is_null(), "{other}");
}

#[tokio::test]
async fn token_holds_in_another_process_once() {
    let world = World::new().await;
    let described = "uri=%2F&headers=x-api-key%3A+acme";
    let explain = format!("action=explain&{described}");
    let token = async |page: usize| {
        let (_, explained) = world.post(page, "alice", &explain).await;
        explained[0]["token"].as_str().unwrap().to_owned()
    };
    let used_up = async || {
        while world.passes("acme").await {}
    };
    used_up().await;
    let first = token(0).await;
    let reset = format!("action=reset&token={first}");
    // It is for these keys and this operator, and the process has to learn the keys.
    for (operator, fields) in [
        ("alice", reset.clone()),
        ("alice", format!("{reset}&uri=%2F&headers=x-api-key%3A+other")),
        ("bob", format!("{reset}&{described}")),
        ("alice", format!("action=reset&token={}&{described}", "0".repeat(32))),
        ("alice", format!("action=reset&token={}&{described}", "f".repeat(32))),
        ("alice", format!("{reset}&fingerprint=00000000")),
    ] {
        assert_eq!(world.post(1, operator, &fields).await.0, StatusCode::CONFLICT, "{operator} {fields}");
    }
    assert!(!world.passes("acme").await);
    assert_eq!(world.post(1, "alice", &format!("{reset}&{described}")).await.0, StatusCode::OK);
    assert!(world.passes("acme").await);
    assert_eq!(world.post(1, "alice", &format!("{reset}&{described}")).await.0, StatusCode::CONFLICT, "once");
    // Once in the process that made it, too.
    let second = format!("action=reset&token={}&{described}", token(0).await);
    assert_eq!(world.post(0, "alice", &second).await.0, StatusCode::OK);
    assert_eq!(world.post(0, "alice", &second).await.0, StatusCode::CONFLICT);
    // The page sends what describes the request.
    let (_, page) = world.send(0, "alice", "text/html", Some(&explain)).await;
    let hidden = "<input type=\"hidden\" name=\"headers\" value=\"x-api-key: acme\">";
    assert!(page.contains(hidden), "{page}");
    // A process with another fleet knows none of it.
    let stranger = World::new().await;
    let third = format!("action=reset&token={}&{described}", token(0).await);
    assert_eq!(stranger.post(0, "alice", &third).await.0, StatusCode::CONFLICT);
}

#[tokio::test]
async fn page_offers_a_rollback_only_after_a_push() {
    let world = World::new().await;
    let text = |limit: u64| format!("rules: [{{name: login, quota: {limit} per hour, key: peer-ip}}]");
    let _rules = Rules::builder().fleet(&world.fleet, "rules").read_text(text(5)).unwrap();
    let push = async |limit| {
        world.fleet.change("bob", "", [FleetChange::rules("rules", text(limit))]).await.unwrap();
    };
    let offers = async || world.send(0, "alice", "text/html", None).await.1.contains("value=\"rollback\"");
    let rollback = "action=rollback&setting=rules+rules&why=worse";
    push(3).await;
    push(4).await;
    assert!(offers().await);
    assert_eq!(world.post(0, "alice", rollback).await.0, StatusCode::OK);
    let (_, page) = world.send(0, "alice", "text/html", None).await;
    assert!(!page.contains("value=\"rollback\"") && page.contains("undone-rules"), "{page}");
    assert!(page.contains("1 change of the rules that bob put in force in revision 2"), "{page}");
    let (status, refused) = world.post(0, "alice", rollback).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let error = refused["actions"][0]["error"].as_str().unwrap();
    assert!(error.contains("the rules that bob put in force in revision 2 were rolled back or ended"), "{error}");
    push(6).await;
    assert!(offers().await);
}

/// Makes both pages those of a process with rules of a file, which are keyed by a header.
fn with_rules(world: &mut World) -> RateLimitLayer<MemoryLimiter> {
    let text = "rules: [{name: customer, quota: 3 per hour, key: header x-api-key}, \
                {name: pair, quota: [9 per hour, 99 per day], key: header x-api-key}]";
    let rules = Rules::builder().fleet(&world.fleet, "rules").read_text(text).unwrap();
    let stats = Stats::builder().count_use(true).build();
    let layer = rules.layer(MemoryLimiter::new()).unwrap().observer(stats.clone());
    let audit = Arc::clone(&world.audit);
    let page = StatusPage::new(stats).layer("rules", &layer).fleet(&world.fleet);
    let page = page.operators(who, move |action| audit.lock().unwrap().push(action.clone()));
    world.pages = [page.clone(), page];
    layer
}

/// Asks a layer about a request with a key.
async fn admits(layer: &RateLimitLayer<MemoryLimiter>, key: &str) -> bool {
    let (head, ()) = Request::get("/").header("x-api-key", key).body(()).unwrap().into_parts();
    layer.admit(&head).await.map(tower_ratelimit::middleware::Admission::keep).is_ok()
}

#[tokio::test]
async fn fingerprint_is_not_taken_for_a_key() {
    let mut world = World::new().await;
    let layer = with_rules(&mut world);
    while admits(&layer, "acme").await {}
    let shown: Value = serde_json::from_str(&world.send(0, "alice", "application/json", None).await.1).unwrap();
    let fingerprint = shown["most_limited"][0]["fingerprint"].as_str().unwrap().to_owned();
    let set = |subject: &str| format!("action=set&setting=override+customer&subject={subject}&value=9+per+hour&why=a");
    for typed in [fingerprint.clone(), format!("key+{fingerprint}")] {
        let (status, answer) = world.post(0, "alice", &set(&typed)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        let error = answer["actions"][0]["error"].as_str().unwrap();
        assert!(error.contains("is the fingerprint of a key") && error.contains("click the key"), "{error}");
    }
    assert!(world.fleet.entries().is_empty());
    // The form has the typed values again.
    let (_, page) = world.send(0, "alice", "text/html", Some(&set(&fingerprint))).await;
    assert!(page.contains("<b>Not done.</b>") && page.contains(&format!("value=\"{fingerprint}\"")), "{page}");
    // A text of this form may be a key that the page does not list.
    assert_eq!(world.post(0, "alice", &set("00000000")).await.0, StatusCode::OK);
}

#[tokio::test]
async fn setting_for_a_key_that_nobody_used_has_a_warning() {
    let mut world = World::new().await;
    let layer = with_rules(&mut world);
    assert!(admits(&layer, "acme").await);
    let set = |subject: &str, value: &str| {
        format!("action=set&setting=override+customer&subject={subject}&value={value}+per+hour&why=a+sale")
    };
    let warning = async |subject: &str, value: &str| {
        let (status, answer) = world.post(0, "alice", &set(subject, value)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer["actions"][0]["warning"].as_str().map(str::to_owned)
    };
    assert_eq!(warning("acme", "9").await, None);
    let said = warning("acmee", "9").await.unwrap();
    assert!(said.starts_with("nothing is counted for this key under `customer` now"), "{said}");
    assert_eq!(warning("acmee", "8").await, None, "the operator knows it");
    let said = warning("00000000", "9").await.unwrap();
    assert!(said.contains("A fingerprint is not a key"), "{said}");
    let said = warning("2001:db8::7:1", "9").await.unwrap();
    assert!(said.contains("The clients of a /64 usually share one key") && !said.contains("2001"), "{said}");
    assert!(world.audited().iter().any(|line| line.contains("done, with a warning: nothing is counted")));
    // A browser gets the warning at once, because the next page may be that of another process.
    let (status, page) = world.send(0, "alice", "text/html", Some(&set("acne", "9"))).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains("<b>Done, with a warning.</b>"), "{page}");
    assert_eq!(page.matches("nothing is counted for this key").count(), 5, "also in the list of actions: {page}");
    // Only the operator who typed a key that may be mistyped sees it again.
    for (operator, typed) in [("alice", ["acmee", "acne"].as_slice()), ("bob", &[]), ("", &[])] {
        let (_, page) = world.send(0, operator, "text/html", None).await;
        for key in ["acme", "acmee", "acne"] {
            assert_eq!(page.contains(&format!(">you typed {key}<")), typed.contains(&key), "{operator} {key}: {page}");
        }
    }
    let ended = "action=end&setting=override+customer&subject=acne&why=over";
    assert!(world.post(0, "alice", ended).await.1["actions"][0]["warning"].is_null());
}

#[tokio::test]
async fn denial_of_a_very_large_network_has_a_warning() {
    let world = World::new().await;
    let warning = async |setting: &str, value: &str| {
        let (status, answer) = world.post(0, "alice", &format!("action=set&{setting}&value={value}&why=a")).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer["actions"][0]["warning"].as_str().map(str::to_owned)
    };
    let typed = "setting=network+clients&subject=128.0.0.0%2F1";
    assert_eq!(warning(typed, "limit").await, None);
    let json: Value = serde_json::from_str(&world.send(0, "alice", "application/json", None).await.1).unwrap();
    let clicked = format!("entry={}", json["fleet"]["entries"][0]["entry"].as_str().unwrap());
    for setting in [typed, &clicked] {
        let said = warning(setting, "deny").await.unwrap();
        assert!(said.starts_with("the denied network is a /1, which has one of 2 of all IPv4 addresses"), "{said}");
    }
    assert_eq!(warning(&clicked, "allow").await, None);
}

#[tokio::test]
async fn page_says_which_settings_name_no_rule() {
    let mut world = World::new().await;
    let _layer = with_rules(&mut world);
    let change = async |change: FleetChange| world.fleet.change("alice", "", [change]).await.unwrap();
    let shown = async || {
        let page = world.send(0, "alice", "text/html", None).await.1;
        let json: Value = serde_json::from_str(&world.send(0, "alice", "application/json", None).await.1).unwrap();
        let marks = ["no rule of this process has this name", "no rules of this process have this name"];
        let count = marks.iter().map(|mark| page.matches(mark).count()).sum::<usize>();
        let entries = json["fleet"]["entries"].as_array().unwrap();
        assert_eq!(entries.iter().filter(|entry| entry["names_no_rule"] == true).count(), count);
        assert!(json["fleet"]["actions"][0]["names_no_rule"].is_null());
        (count, page.contains("1 setting names no rule"))
    };
    change(FleetChange::override_quota("customer", "acme", Quota::per_hour(9)).unwrap()).await;
    change(FleetChange::mode("client", Mode::Shadow)).await; // the program has this mode
    assert_eq!(shown().await, (0, false));
    let renamed = |more: &str| format!("rules: [{{name: buyer{more}, quota: 3 per hour, key: header x-api-key}}]");
    change(FleetChange::rules("rules", renamed(""))).await;
    assert_eq!(shown().await, (1, true));
    change(FleetChange::rules("rules", renamed(", was: customer"))).await;
    assert_eq!(shown().await, (0, false));
    // A program without rules can push them under a name that no process has.
    let other = Fleet::in_file(&world.file).await.unwrap();
    other.change("bob", "", [FleetChange::rules("rulez", renamed(""))]).await.unwrap();
    change(FleetChange::mode("client", Mode::Enforce)).await; // reads the other change
    assert_eq!(shown().await, (1, true));
}

#[tokio::test]
async fn key_is_denied_on_its_page_for_a_time() {
    let mut world = World::new().await;
    let layer = with_rules(&mut world);
    assert!(admits(&layer, "acme").await);
    let explain = "action=explain&uri=%2F&headers=x-api-key%3A+acme";
    let (_, page) = world.send(0, "alice", "text/html", Some(explain)).await;
    for part in [
        "Deny the key, or change its quota",
        "<option value=\"customer\">customer</option>",
        "0 per minute denies under this rule only",
        "To deny a client under all rules, set its address to <b>deny</b> as a <b>network</b>",
        "name=\"value\" required value=\"0 per minute\"",
        "name=\"lasting\" placeholder=\"until it is ended\" value=\"1 hour\"",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(!page.contains("<option value=\"pair\">"), "its quotas cannot be overridden: {page}");
    assert!(!page.contains("hides the address"), "the operator stated the request: {page}");
    let (_, page) = world.send(0, "", "text/html", Some(explain)).await;
    assert!(!page.contains("Deny the key"), "{page}");
    let token = async || world.post(0, "alice", explain).await.1[0]["token"].as_str().unwrap().to_owned();
    let deny = "policy=customer&value=0+per+minute&lasting=1+hour&why=guesses";
    // A mistake does not use up the token.
    let first = token().await;
    for (fields, said) in [
        (format!("action=set&token={first}&policy=customer&value=0+per+minute"), "say why"),
        (format!("action=set&token={first}&policy=customer&value=zero&why=a"), "the quota cannot be read"),
        (
            format!("action=set&token={first}&policy=client&value=0+per+minute&why=a"),
            "no policy `client` was explained",
        ),
        (format!("action=end&token={first}&policy=customer&why=a"), "a `token` is for `set`"),
    ] {
        let (status, answer) = world.post(0, "alice", &fields).await;
        assert!(status == StatusCode::BAD_REQUEST && answer.to_string().contains(said), "{fields}: {answer}");
    }
    let fields = format!("action=set&token={first}&{deny}");
    assert_eq!(world.post(0, "bob", &fields).await.0, StatusCode::CONFLICT, "it is the token of another operator");
    let (status, done) = world.post(0, "alice", &fields).await;
    assert_eq!((status, &done["actions"][0]["warning"]), (StatusCode::OK, &Value::Null), "{done}");
    assert!(!admits(&layer, "acme").await && admits(&layer, "other").await);
    let entry = world.fleet.entries().remove(0);
    assert_eq!((entry.target.subject().as_deref(), &*entry.by, &*entry.why), (Some("acme"), "alice", "guesses"));
    assert!(entry.until.is_some());
    let audited = world.audited();
    assert!(audited.last().unwrap().starts_with("alice: set override customer "), "{audited:?}");
    assert!(!audited.concat().contains("acme"), "the log has the fingerprint: {audited:?}");
    assert_eq!(world.post(0, "alice", &fields).await.0, StatusCode::CONFLICT, "once");
    // So it is on the page of a listed key, which is stored at its second refusal.
    for key in ["other", "acme"].repeat(6) {
        let _ = admits(&layer, key).await;
    }
    let shown: Value = serde_json::from_str(&world.send(0, "alice", "application/json", None).await.1).unwrap();
    let listed = shown["most_limited"].as_array().unwrap().iter().map(|key| key["fingerprint"].as_str().unwrap());
    for fingerprint in listed {
        let explain = format!("action=explain&fingerprint={fingerprint}");
        let (_, page) = world.send(0, "alice", "text/html", Some(&explain)).await;
        assert!(page.contains("This page hides the address: take it from the log of your proxy"), "{page}");
        let (_, explained) = world.post(0, "alice", &explain).await;
        let token = explained[0]["token"].as_str();
        let fields = format!("action=set&token={}&{deny}", token.unwrap_or_else(|| panic!("{explained}")));
        assert_eq!(world.post(0, "alice", &fields).await.0, StatusCode::OK);
    }
    assert_eq!(world.fleet.entries().len(), 2);
}
