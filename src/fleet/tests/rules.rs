//! Rules of a file whose quotas, modes and texts operators change.

use super::*;
use crate::clock::{CalendarClock, Clock};
use crate::event::RulesEvent;
use crate::key::Key;
use crate::middleware::charge::access::Access;
use crate::outcome::{Observed, Observer};
use crate::quota::Quota;
use crate::rules::Rules;

#[derive(Clone, Default)]
struct RulesEvents(Arc<Mutex<Vec<RulesEvent>>>);

impl RulesEvents {
    fn take(&self) -> Vec<RulesEvent> {
        std::mem::take(&mut *lock(&self.0))
    }
}

impl Observer for RulesEvents {
    fn on_outcome(&self, _: &Observed<'_>) {}

    fn on_rules_event(&self, event: &RulesEvent) {
        lock(&self.0).push(event.clone());
    }
}

fn hourly(limit: u64) -> String {
    format!("rules: [{{name: a, quota: {limit} per hour, key: peer-ip}}]")
}

#[tokio::test(start_paused = true)]
async fn entry_for_a_client_is_refused_where_it_has_no_effect() {
    const ENVOY: &str = "{domain: edge, descriptors: [{key: a, rate_limit: {unit: hour, requests_per_unit: 1}}]}";
    let (_, _, [fleet, _]) = processes().await;
    let network = || FleetChange::network("edge", "203.0.113.0/24", Access::Deny).unwrap();
    let change = async |change: FleetChange| {
        fleet.change("alice", "", [change]).await.map_err(|error| (error.kind(), error.to_string()))
    };
    let rules = Rules::builder().fleet(&fleet, "edge").descriptors(|_| Vec::new()).read_text(ENVOY).unwrap();
    let _layer = rules.layer(crate::MemoryLimiter::new()).unwrap();
    assert_eq!(change(network()).await, Ok(1), "a layer knows the client");
    let _limits = rules.descriptor_limits(crate::MemoryLimiter::new()).unwrap();
    let (kind, said) = change(network()).await.unwrap_err();
    assert!(kind == FleetErrorKind::Invalid && said.contains("`requests_per_unit: 0`"), "{said}");
    let key = FleetChange::key("edge", "leaked", Access::Deny).unwrap();
    let (kind, said) = change(key).await.unwrap_err();
    assert!(kind == FleetErrorKind::Invalid && said.contains("set a `network`"), "{said}");
    assert_eq!(change(FleetChange::end(network().target)).await, Ok(2), "it can be ended");
}

#[tokio::test(start_paused = true)]
async fn override_is_refused_for_a_key_that_the_rule_never_has() {
    const TEXT: &str =
        "rules: [{name: client, quota: 3 per hour, key: peer-ip}, {name: user, quota: 9 per hour, key: header x-user}]";
    let (_, _, [fleet, _]) = processes().await;
    let _rules = Rules::builder().fleet(&fleet, "rules").read_text(TEXT).unwrap();
    let set = async |rule: &str, key: &str| {
        let change = FleetChange::of_text(FleetKind::Override, rule, Some(key), Some("5 per hour")).unwrap();
        fleet.change("alice", "", [change]).await.map_err(|error| error.to_string())
    };
    for key in ["192.0.2.67:80", "192.0.2.0/24", "acme", "[2001:db8::]"] {
        let said = set("client", key).await.unwrap_err();
        assert!(said.contains("`client` counts by addresses") && !said.contains(key), "{key}: {said}");
    }
    let said = set("client", "2001:db8:1:2:3::4").await.unwrap_err();
    assert!(said.contains("64 zero bits at its end") && !said.contains("3::4"), "{said}");
    for (rule, key) in [
        ("client", "192.0.2.67"),
        ("client", "2001:db8:1:2::"),
        ("client", "::ffff:192.0.2.1"),
        ("user", "192.0.2.67:80"),
    ] {
        assert!(set(rule, key).await.is_ok(), "{rule} {key}");
    }
    // Clients whose addresses are unknown have keys that are no addresses. Each change of several is checked.
    let quota = Quota::per_hour(5);
    let unknown = FleetChange::override_quota("client", Key::ambiguous(), quota).unwrap();
    let text = FleetChange::override_quota("client", "192.0.2.9:80", quota).unwrap();
    assert!(fleet.change("alice", "", [unknown.clone()]).await.is_ok());
    assert!(fleet.change("alice", "", [unknown, text]).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn rules_stay_in_force_since_they_were_loaded() {
    let (_, _, [fleet, _]) = processes().await;
    let rules = Rules::builder().fleet(&fleet, "rules").read_text(hourly(1)).unwrap();
    let first = rules.in_force();
    // The calendar advances by at least a microsecond.
    while CalendarClock.now() <= first.loaded_at {}
    fleet.change("alice", "", [FleetChange::mode("a", Mode::Shadow)]).await.unwrap();
    let with_mode = rules.in_force();
    assert_eq!((with_mode.version, with_mode.loaded_at), (first.version + 1, first.loaded_at));
    fleet.change("alice", "", [FleetChange::rules("rules", hourly(2))]).await.unwrap();
    assert!(rules.in_force().loaded_at > first.loaded_at);
}

#[tokio::test(start_paused = true)]
async fn rules_of_a_file_keep_it_after_a_change() {
    let path = std::env::temp_dir().join(format!("tower-ratelimit-fleet-rules-{}", std::process::id()));
    std::fs::write(&path, hourly(1)).unwrap();
    let (_, _, [fleet, _]) = processes().await;
    let rules = Rules::builder().fleet(&fleet, "rules").read_file(&path).unwrap();
    let events = RulesEvents::default();
    let _layer = rules.layer(crate::MemoryLimiter::new()).unwrap().observer(events.clone());
    let pushed = FleetChange::rules("rules", hourly(2));
    let own = FleetChange::end(pushed.target.clone());
    for change in [FleetChange::mode("a", Mode::Shadow), pushed, own] {
        fleet.change("alice", "", [change]).await.unwrap();
    }
    let file_of = |event| if let RulesEvent::Loaded { file, .. } = event { Some(file) } else { None };
    let files: Vec<_> = events.take().into_iter().filter_map(file_of).collect();
    assert_eq!(files, [Some(path.clone()), None, Some(path.clone())]);
    std::fs::remove_file(path).unwrap();
}

#[tokio::test(start_paused = true)]
async fn pushed_rules_are_in_force_until_they_are_rolled_back() {
    let (text, _, fleets) = processes().await;
    let rules = fleets.each_ref().map(|fleet| Rules::builder().fleet(fleet, "rules").read_text(hourly(1)).unwrap());
    let layers = rules.each_ref().map(|rules| rules.layer(crate::MemoryLimiter::new()).unwrap());
    let limits = || layers.each_ref().map(|layer| layer.policies()[0].quota().limit());
    let push = |text: String| fleets[0].change("alice", "", [FleetChange::rules("rules", text)]);
    let error = push("rules: [{name: a}]".to_owned()).await.unwrap_err();
    assert!(error.to_string().contains("quota"), "{error}");
    push(hourly(2)).await.unwrap();
    push(hourly(3)).await.unwrap();
    second().await;
    assert_eq!(limits(), [3, 3]);
    // Rules that the process reads itself wait while those of operators are in force.
    rules[1].replace(hourly(9)).unwrap();
    assert!(rules[1].replace("rules: [{name: a}]").is_err());
    assert_eq!(limits(), [3, 3]);
    assert_eq!(rules[0].in_force().hash, rules[1].in_force().hash);
    // A process that starts now has them, too.
    let clock = ManualClock::new();
    let late = Rules::builder().fleet(&fleet(&text, &clock).await, "rules").read_text(hourly(1)).unwrap();
    assert_eq!(late.in_force().hash, rules[0].in_force().hash);
    let error = fleets[1].rollback("bob", "it was worse", "rules", Some(1)).await.unwrap_err();
    assert_eq!(error.kind(), FleetErrorKind::Conflict, "{error}");
    let done = fleets[1].rollback("bob", "it was worse", "rules", Some(2)).await.unwrap();
    let restored = done.restored.unwrap();
    assert_eq!((done.revision, restored.revision, &*restored.by), (3, 1, "alice"));
    second().await;
    assert_eq!(limits(), [2, 2]);
    let why = |fleet: &Fleet| fleet.actions()[0].why.to_string();
    assert_eq!(why(&fleets[0]), "rolled back to revision 1: it was worse");
    let own = FleetChange::of_text(FleetKind::Rules, "rules", None, None).unwrap();
    fleets[1].change("bob", "", [own]).await.unwrap();
    second().await;
    assert_eq!(limits(), [1, 9]);
}

#[tokio::test(start_paused = true)]
async fn rules_of_a_file_follow_what_is_set_for_them() {
    use std::net::IpAddr;

    use crate::key::PeerAddr;
    const TEXT: &str = "
access: {allow: [198.51.100.0/24]}
rules:
- {name: client, was: old, quota: 3 per hour, key: peer-ip}
- {name: other, quota: {limit: 9, per: hour}, key: peer-ip}
";
    let (_, _, fleets) = processes().await;
    let text = TEXT.replace("{limit: 9, per: hour}", "9 per hour");
    let rules = fleets.each_ref().map(|fleet| Rules::builder().fleet(fleet, "rules").read_text(&*text).unwrap());
    // Both processes have one limiter, as with Redis.
    let limiter = crate::MemoryLimiter::new();
    let layers = rules.each_ref().map(|rules| rules.layer(limiter.clone()).unwrap());
    let request = |client: &str| {
        let (mut head, ()) = http::Request::new(()).into_parts();
        head.extensions.insert(PeerAddr::from(client.parse::<IpAddr>().unwrap()));
        head
    };
    let passes = async |at: usize, client: &str| match layers[at].admit(&request(client)).await {
        Ok(admission) => {
            admission.keep();
            true
        }
        Err(_) => false,
    };
    let change = |change: FleetChange| async {
        let target = change.target().clone();
        fleets[0].change("alice", "", [change]).await.unwrap();
        second().await;
        target
    };
    for _ in 0..3 {
        assert!(passes(0, "192.0.2.1").await);
    }
    assert!(!passes(1, "192.0.2.1").await);
    // A raised customer keeps what it used; others have what the file says.
    let raised = FleetChange::override_quota("client", "192.0.2.1".parse::<IpAddr>().unwrap(), Quota::per_hour(5));
    let raised = change(raised.unwrap()).await;
    assert!(passes(1, "192.0.2.1").await && passes(0, "192.0.2.1").await && !passes(1, "192.0.2.1").await);
    for _ in 0..3 {
        assert!(passes(1, "192.0.2.2").await);
    }
    assert!(!passes(1, "192.0.2.2").await);
    // A rule that is wrong is watched only, and a file that is read again changes nothing about that.
    let watched = change(FleetChange::mode("client", Mode::Shadow)).await;
    assert!(passes(1, "192.0.2.2").await);
    rules[1].replace(format!("{text}# again")).unwrap();
    assert!(passes(1, "192.0.2.2").await);
    change(FleetChange::end(watched)).await;
    change(FleetChange::end(raised)).await;
    assert!(!passes(1, "192.0.2.2").await && !passes(1, "192.0.2.1").await);
    // An operator's entry for a client counts before that of the file.
    assert!(passes(1, "198.51.100.1").await);
    let blocked = change(FleetChange::network("rules", "198.51.100.0/24", Access::Deny).unwrap()).await;
    assert!(!passes(1, "198.51.100.1").await);
    change(FleetChange::end(blocked)).await;
    assert!(passes(1, "198.51.100.1").await);
    let mode = FleetChange::mode("clientt", Mode::Shadow);
    let raised = FleetChange::override_quota("clientt", "a", Quota::per_hour(5)).unwrap();
    for unknown in [mode, raised] {
        let error = fleets[0].change("alice", "", [unknown]).await.unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Invalid);
        assert!(error.to_string().ends_with("of the name `clientt`; it has `client`, `other`"), "{error}");
    }
}

/// An operator's entry is made under the rule's name, and then the rule gets another name.
#[tokio::test(start_paused = true)]
async fn settings_of_a_renamed_rule_follow_its_old_name() {
    let (_, _, [here, _]) = processes().await;
    let text = |name: &str| format!("rules: [{{name: {name}, quota: 1 per hour, key: header x-api-key}}]\n");
    let rules = Rules::builder().fleet(&here, "rules").read_text(text("old")).unwrap();
    let layer = rules.layer(crate::MemoryLimiter::new()).unwrap();
    let limit = async |key: &str| {
        let request = http::Request::builder().header("x-api-key", key).body(()).unwrap();
        let head = request.into_parts().0;
        let explanation = layer.explain(&head).await;
        let rule = explanation.rules().first().unwrap();
        (rule.statuses().first().unwrap().decision().limit(), rule.mode())
    };
    let of = |name: &str, key: &str, limit| FleetChange::override_quota(name, key, Quota::per_hour(limit)).unwrap();
    let changes = [of("old", "acme", 5), of("old", "both", 5), FleetChange::mode("old", Mode::Shadow)];
    here.change("alice", "", changes).await.unwrap();
    assert_eq!((limit("acme").await, limit("x").await), ((5, Mode::Shadow), (1, Mode::Shadow)));
    rules.replace(text("new, was: old")).unwrap();
    assert_eq!((limit("acme").await, limit("x").await), ((5, Mode::Shadow), (1, Mode::Shadow)));
    // An entry under the new name comes first.
    here.change("alice", "", [of("new", "both", 7), FleetChange::mode("new", Mode::Enforce)]).await.unwrap();
    assert_eq!((limit("acme").await, limit("both").await), ((5, Mode::Enforce), (7, Mode::Enforce)));
    rules.replace(text("new")).unwrap();
    assert_eq!((limit("acme").await, limit("both").await), ((1, Mode::Enforce), (7, Mode::Enforce)));
}

/// A limiter in memory has no room for this log.
const UNSUPPORTED: &str = "rules: [{name: a, quota: \"1000000 per hour, sliding log\", key: peer-ip}]";

/// The operators' program does not check the rules, because it has none of its own.
#[tokio::test(start_paused = true)]
async fn pushed_rules_that_are_not_supported_do_not_stop_a_start() {
    let (_, _, [operators, fleet]) = processes().await;
    let push = |text: &str| operators.change("mallory", "", [FleetChange::rules("rules", text)]);
    push(UNSUPPORTED).await.unwrap();
    second().await;
    let small = || crate::MemoryLimiter::builder().max_keys(100).build().unwrap();
    let rules = Rules::builder().fleet(&fleet, "rules").read_text(hourly(1)).unwrap();
    let events = RulesEvents::default();
    let layer = rules.layer(small()).unwrap().observer(events.clone());
    let limit = || layer.policies()[0].quota().limit();
    assert_eq!(limit(), 1);
    let error = rules.error().unwrap().to_string();
    assert!(error.starts_with("mallory pushed these rules in revision 1: 1:"), "{error}");
    // The other settings apply to the program's own rules, which can be replaced.
    fleet.change("alice", "", [FleetChange::mode("a", Mode::Shadow)]).await.unwrap();
    assert_eq!(rules.error().unwrap().to_string(), error);
    assert_eq!(events.take().len(), 2, "the rules were changed, and the pushed ones are refused");
    fleet.change("alice", "", [FleetChange::network("rules", "::1", Access::Deny).unwrap()]).await.unwrap();
    fleet.change("alice", "", [FleetChange::network("rules", "::2", Access::Deny).unwrap()]).await.unwrap();
    events.take();
    fleet.change("alice", "", [FleetChange::network("rules", "::3", Access::Deny).unwrap()]).await.unwrap();
    assert_eq!(events.take(), [], "nothing has changed");
    rules.replace(hourly(2)).unwrap();
    assert_eq!(limit(), 2);
    push(&hourly(3)).await.unwrap();
    second().await;
    assert_eq!((limit(), rules.error()), (3, None));
    // Rules that a running process cannot use are not its rules after they end.
    push(UNSUPPORTED).await.unwrap();
    second().await;
    assert_eq!(limit(), 3);
    assert!(rules.error().unwrap().to_string().starts_with("mallory pushed these rules in revision 7: 1:"));
    let own = FleetChange::of_text(FleetKind::Rules, "rules", None, None).unwrap();
    operators.change("bob", "", [own]).await.unwrap();
    second().await;
    assert_eq!((limit(), rules.error()), (2, None));
}

#[tokio::test(start_paused = true)]
async fn own_rules_that_are_not_used_are_reported_once() {
    let (_, _, [fleet, _]) = processes().await;
    let rules = Rules::builder().fleet(&fleet, "rules").read_text(hourly(1)).unwrap();
    let events = RulesEvents::default();
    let layer = rules.layer(crate::MemoryLimiter::new()).unwrap().observer(events.clone());
    fleet.change("alice", "", [FleetChange::rules("rules", hourly(3))]).await.unwrap();
    events.take();
    for own in [2, 2] {
        rules.replace(hourly(own)).unwrap();
    }
    assert_eq!(events.take(), [RulesEvent::unused("alice", 1, None)]);
    let error = rules.replace("rules: [{name: a}]").unwrap_err();
    assert_eq!(rules.error().as_ref(), Some(&error));
    assert_eq!(events.take(), [RulesEvent::unused("alice", 1, Some(error.to_string()))]);
    rules.replace(hourly(2)).unwrap();
    assert_eq!((rules.error(), events.take()), (None, vec![RulesEvent::unused("alice", 1, None)]));
    assert_eq!(layer.policies()[0].quota().limit(), 3);
}

#[cfg(feature = "status")]
#[tokio::test(start_paused = true)]
async fn report_names_the_rules_that_follow() {
    let (text, _, [fleet, _]) = processes().await;
    let _rules = Rules::builder().fleet(&fleet, "edge").read_text(hourly(1)).unwrap();
    fleet.mode("client", Mode::Enforce);
    fleet.report_by(|fleet| fleet.lines_of_rules().collect());
    second().await;
    second().await;
    assert_eq!(lock(&text.0).reports.iter().map(|report| &*report.text).collect::<Vec<_>>(), ["rules edge\n"]);
}

#[tokio::test(start_paused = true)]
async fn override_of_a_rule_is_no_misconfiguration() {
    let (_, _, [fleet, _]) = processes().await;
    let text = "rules: [{name: client, quota: 3 per hour, key: peer-ip}]";
    let rules = Rules::builder().fleet(&fleet, "rules").read_text(text).unwrap();
    let layer = rules.layer(crate::MemoryLimiter::new()).unwrap();
    let checked = || layer.check().map_err(|warning| warning.to_string());
    assert_eq!(checked(), Ok(()));
    let raised =
        FleetChange::override_quota("client", std::net::Ipv4Addr::new(192, 0, 2, 1), Quota::per_hour(5)).unwrap();
    let end = FleetChange::end(raised.target().clone());
    for change in [raised, end] {
        fleet.change("alice", "", [change]).await.unwrap();
        assert_eq!(checked(), Ok(()));
    }
}
