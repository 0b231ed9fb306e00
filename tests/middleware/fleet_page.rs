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
    let subject = "action=set&setting=network+clients&subject=203.0.113.7%2F24&value=deny&why=an+abuser";
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
    assert_eq!(shown().await, ("the rules that bob pushed in revision 1".to_owned(), serde_json::json!([])));
    assert!(html().await.contains("the same as the rules that bob pushed in revision 1"));
    drop(rules);
    push(format!("{}\n# {}", text(4), "a".repeat(70_000))).await;
    assert_eq!(shown().await, ("the rules that bob pushed in revision 2".to_owned(), Value::Null));
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
