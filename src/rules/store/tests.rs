//! Changes of rules by operators and by the program at the same time.

use super::*;
use crate::base::time::Timestamp;
use crate::fleet::FleetChange;
use crate::limiter::UnsupportedQuotaKind;
use crate::middleware::{AccessList, Overrides};
use crate::mode::Mode;

type Interrupt = Box<dyn FnOnce() + Send>;

/// A layer that does something while it is asked what it supports, once.
#[derive(Default)]
struct Asked {
    interrupt: Mutex<Option<Interrupt>>,
    /// The limit that the layer does not support.
    unsupported: u64,
    events: Mutex<Vec<RulesEvent>>,
}

impl Follow for Asked {
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        let interrupt = lock(&self.interrupt).take();
        interrupt.into_iter().for_each(|interrupt| interrupt());
        if quota.limit() == self.unsupported {
            Err(UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, quota, "it is large"))
        } else {
            Ok(())
        }
    }

    fn own_names(&self) -> Vec<String> {
        Vec::new()
    }

    fn checks_access(&self) -> bool {
        true
    }

    fn report(&self, event: &RulesEvent) {
        lock(&self.events).push(event.clone());
    }

    fn follow(&self) {}
}

fn text(limit: u64) -> Arc<[u8]> {
    format!("rules: [{{name: a, quota: {limit} per hour, key: peer-ip}}]").into_bytes().into()
}

fn pushed(limit: u64, revision: u64) -> Arc<FleetEntry> {
    let text = String::from_utf8(text(limit).to_vec()).unwrap();
    let target = FleetChange::rules("rules", &*text).target().clone();
    let (at, by, why) = (Timestamp::from_micros(0), "alice".into(), "".into());
    Arc::new(FleetEntry { target, value: text.into(), until: None, revision, at, by, why })
}

fn push(store: &RuleStore, entry: Option<&Arc<FleetEntry>>) {
    store.follow_fleet(entry, FleetRuleSettings::default());
}

fn shadow() -> FleetRuleSettings {
    FleetRuleSettings { modes: [("a".into(), Mode::Shadow)].into(), ..FleetRuleSettings::default() }
}

/// Makes rules with a limit of 1, and their layer.
fn store() -> (Arc<RuleStore>, Arc<Asked>) {
    let store = Arc::new(RuleStore::of_text(Names::default(), text(1).to_vec()).unwrap());
    (Arc::clone(&store), layer(&store, 0))
}

fn layer(store: &RuleStore, unsupported: u64) -> Arc<Asked> {
    let layer = Arc::new(Asked { unsupported, ..Asked::default() });
    let follower: Weak<dyn Follow> = Arc::downgrade(&(Arc::clone(&layer) as Arc<dyn Follow>));
    store.follow(follower);
    layer
}

/// Does something with the rules while the layer is asked about the next ones.
fn interrupt(store: &Arc<RuleStore>, layer: &Asked, run: impl FnOnce(&RuleStore) + Send + 'static) {
    let store = Arc::clone(store);
    *lock(&layer.interrupt) = Some(Box::new(move || run(&store)));
}

fn limit(store: &RuleStore) -> u64 {
    store.state().in_force.quotas[0].0.limit()
}

#[test]
fn push_during_a_replacement_holds() {
    // The second pushed text is that of the rules in force.
    for limit_pushed in [3, 1] {
        let (store, layer) = store();
        interrupt(&store, &layer, move |store| push(store, Some(&pushed(limit_pushed, 1))));
        store.replace(&text(2)).unwrap();
        assert_eq!(limit(&store), limit_pushed);
        push(&store, None);
        assert_eq!(limit(&store), 2, "the replacement was kept");
    }
}

#[test]
fn replacement_during_an_operators_change_holds() {
    let (store, layer) = store();
    interrupt(&store, &layer, |store| drop(store.replace(&text(2))));
    store.follow_fleet(None, shadow());
    assert_eq!((limit(&store), store.state().has_settings()), (2, true));
    push(&store, Some(&pushed(3, 1)));
    interrupt(&store, &layer, |store| drop(store.replace(&text(4))));
    push(&store, None);
    assert_eq!(limit(&store), 4, "the end of a push restores the latest rules of the program");
}

#[test]
fn rules_are_checked_for_a_layer_that_comes_meanwhile() {
    let (store, first) = store();
    let second: Arc<Mutex<Option<Arc<Asked>>>> = Arc::default();
    let made = Arc::clone(&second);
    interrupt(&store, &first, move |store| *lock(&made) = Some(layer(store, 2)));
    assert!(store.replace(&text(2)).is_err());
    assert_eq!(limit(&store), 1);
}

#[test]
fn error_of_own_rules_outlives_what_operators_change() {
    let (store, layer) = store();
    let error = store.replace(&Arc::from(*b"rules: [")).unwrap_err();
    let refused = RulesEvent::refused(error.to_string());
    let unused = RulesEvent::unused("alice", 1, Some(error.to_string()));
    let entry = pushed(3, 1);
    for (entry, settings, last) in [
        (None, FleetRuleSettings::default(), &refused),
        (None, shadow(), &refused),
        (Some(&entry), shadow(), &unused),
        (Some(&entry), FleetRuleSettings::default(), &unused),
        (None, FleetRuleSettings::default(), &refused),
    ] {
        store.follow_fleet(entry, settings);
        assert_eq!(store.error().as_ref(), Some(&error));
        assert_eq!(lock(&layer.events).last(), Some(last));
    }
    store.replace(&text(1)).unwrap();
    assert_eq!(store.error(), None);
    assert!(matches!(lock(&layer.events).last(), Some(RulesEvent::Loaded { version: 4, rules: 1, .. })));
}

#[test]
fn change_of_operators_is_named() {
    let (store, layer) = store();
    let clients = || FleetRuleSettings { clients: Some(AccessList::new()), ..FleetRuleSettings::default() };
    let overrides = || FleetRuleSettings { overrides: [("a".into(), Overrides::new())].into(), ..clients() };
    for (settings, expected) in [
        (shadow(), "a: 1 per hour, token bucket -> 1 per hour, token bucket (shadow)"),
        (FleetRuleSettings::default(), "a: 1 per hour, token bucket (shadow) -> 1 per hour, token bucket"),
        (clients(), "operators allow or deny clients"),
        (overrides(), "a: 1 per hour, token bucket -> 1 per hour, token bucket, unless overridden for a key"),
        (clients(), "a: 1 per hour, token bucket, unless overridden for a key -> 1 per hour, token bucket"),
        (FleetRuleSettings::default(), "operators allow and deny no clients any more"),
    ] {
        store.follow_fleet(None, settings);
        let events = lock(&layer.events);
        let Some(RulesEvent::Loaded { changes, .. }) = events.last() else { panic!("{events:?}") };
        assert_eq!(changes, expected);
    }
}

#[test]
fn error_of_pushed_rules_outlives_own_rules() {
    let (store, _first) = store();
    let layer = layer(&store, 13);
    push(&store, Some(&pushed(13, 1)));
    let error = store.error().unwrap();
    assert!(error.to_string().starts_with("alice pushed these rules in revision 1: 1:"), "{error}");
    store.replace(&text(2)).unwrap();
    assert_eq!((limit(&store), store.error().as_ref()), (2, Some(&error)));
    assert_eq!(lock(&layer.events).last(), Some(&RulesEvent::refused(error.to_string())));
    push(&store, None);
    assert_eq!((store.error(), lock(&layer.events).last()), (None, Some(&RulesEvent::loaded(1, None, 1, ""))));
}

#[test]
fn equal_rules_have_the_origin_of_the_last_ones() {
    let path = std::env::temp_dir().join(format!("tower-ratelimit-origin-{}", std::process::id()));
    std::fs::write(&path, text(1)).unwrap();
    let store = RuleStore::of_file(Names::default(), &path).unwrap();
    let origin = || {
        let state = store.state();
        (state.in_force.text.file.is_some(), state.in_force.text.pushed.is_some())
    };
    assert_eq!(origin(), (true, false));
    store.replace(&text(1)).unwrap();
    assert_eq!(origin(), (false, false));
    push(&store, Some(&pushed(1, 1)));
    assert_eq!(origin(), (false, true));
    store.reload(|_| true).unwrap().unwrap();
    assert_eq!(origin(), (false, true));
    push(&store, None);
    assert_eq!(origin(), (true, false));
    assert_eq!(store.version(), 0);
    std::fs::remove_file(path).unwrap();
}
