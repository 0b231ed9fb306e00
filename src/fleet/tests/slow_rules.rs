//! A revision is in force only when the tables and the rules follow it, however long they take.

use super::*;
use crate::key::Key;
use crate::quota::Quota;
use crate::rules::Rules;

/// Rules that note which revision is in force when they get a text, and then wait for the test.
struct SlowRules {
    fleet: Fleet,
    begun: tokio::sync::mpsc::UnboundedSender<(String, u64)>,
    goes_on: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl FollowFleet for SlowRules {
    fn follow_fleet(&self, pushed: Option<&Arc<FleetEntry>>, _: FleetRuleSettings) {
        let Some(FleetEntry { value, .. }) = pushed.map(|entry| &**entry) else { return };
        self.begun.send((value.to_string(), self.fleet.in_force().revision)).unwrap();
        lock(&self.goes_on).recv().unwrap();
    }

    fn rule_names(&self, _: FleetKind) -> Vec<Box<str>> {
        Vec::new()
    }

    #[cfg(feature = "status")]
    fn has_rule(&self, _: &str) -> bool {
        false
    }

    fn check_access(&self, _: FleetKind) -> Result<(), &'static str> {
        Ok(())
    }

    fn check_key(&self, _: &str, _: &Key) -> Result<(), String> {
        Ok(())
    }

    #[cfg(feature = "status")]
    fn own_text(&self) -> Arc<[u8]> {
        Arc::default()
    }

    fn check_text(&self, _: &str) -> Result<(), String> {
        Ok(())
    }
}

type Begun = tokio::sync::mpsc::UnboundedReceiver<(String, u64)>;

/// Makes slow rules with the name `slow`. Returns what begins, and what lets the rules go on.
fn slow_rules(fleet: &Fleet) -> (Arc<SlowRules>, Begun, std::sync::mpsc::Sender<()>) {
    let (begun, follows) = tokio::sync::mpsc::unbounded_channel();
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let rules = Arc::new(SlowRules { fleet: fleet.clone(), begun, goes_on: Mutex::new(goes_on) });
    let followed: std::sync::Weak<dyn FollowFleet> = Arc::downgrade(&(Arc::clone(&rules) as Arc<dyn FollowFleet>));
    fleet.follow_rules("slow", &followed);
    (rules, follows, go_on)
}

/// Starts a change of the slow rules.
fn push(fleet: &Fleet, text: &'static str) -> tokio::task::JoinHandle<Result<u64, FleetError>> {
    let fleet = fleet.clone();
    tokio::spawn(async move { fleet.change("alice", "", [FleetChange::rules("slow", text)]).await })
}

/// A second change comes while the tables follow the first one.
#[tokio::test(start_paused = true)]
async fn revision_is_in_force_after_its_tables_follow() {
    let (text, _, [fleet, _]) = processes().await;
    let (_rules, mut follows, go_on) = slow_rules(&fleet);
    let first = push(&fleet, "one");
    assert_eq!(follows.recv().await, Some(("one".to_owned(), 0)));
    let second = push(&fleet, "two");
    while lock(&text.0).swaps < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!((fleet.in_force().revision, fleet.entries().len(), fleet.actions().len()), (0, 0, 0));
    assert!(!first.is_finished() && !second.is_finished());
    go_on.send(()).unwrap();
    // The rules never go back from the second text to the first one.
    assert_eq!(follows.recv().await, Some(("two".to_owned(), 1)), "the first is in force meanwhile");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(first.await.unwrap().unwrap(), 1, "the first change does not wait for the second");
    assert!(!second.is_finished());
    go_on.send(()).unwrap();
    assert_eq!(second.await.unwrap().unwrap(), 2);
    assert!(follows.try_recv().is_err());
    assert_eq!((fleet.in_force().revision, &*fleet.entries()[0].value), (2, "two"));
}

#[tokio::test(start_paused = true)]
async fn change_that_is_not_in_force_yet_says_so() {
    let (_, _, [fleet, _]) = processes().await;
    let (_rules, mut follows, go_on) = slow_rules(&fleet);
    let change = push(&fleet, "one");
    assert!(follows.recv().await.is_some());
    tokio::time::advance(Duration::from_secs(10)).await;
    let error = change.await.unwrap().unwrap_err();
    let said = "revision 1 was made, but is not in force in this process yet: do not make the change again. ";
    assert!(error.to_string().starts_with(said), "{error}");
    go_on.send(()).unwrap();
}

/// Another thread makes the tables follow meanwhile, and is busy with other rules.
#[tokio::test(start_paused = true)]
async fn new_rules_have_their_overrides_at_once() {
    const TEXT: &str = "rules: [{name: client, quota: 3 per hour, key: peer-ip}]";
    let (text, clock, [here, there]) = processes().await;
    there.overrides("client");
    there.mode("client", Mode::Enforce);
    let (_rules, mut follows, go_on) = slow_rules(&here);
    push(&there, "one").await.unwrap().unwrap();
    assert!(follows.recv().await.is_some());
    let raised = FleetChange::override_quota("client", "192.0.2.1", Quota::per_hour(5)).unwrap();
    there.change("alice", "", [raised]).await.unwrap();
    here.wait_until_read(Duration::from_secs(1)).await.unwrap();
    let version = |fleet: &Fleet| Rules::builder().fleet(fleet, "rules").read_text(TEXT).unwrap().version();
    assert_eq!(version(&here), 1, "with the overrides");
    go_on.send(()).unwrap();
    there.change("alice", "", shadow()).await.unwrap();
    let new = fleet(&text, &clock).await;
    assert_eq!(version(&new), 1, "the modes and the overrides come together");
}
