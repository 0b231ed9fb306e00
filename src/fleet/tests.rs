//! The promises of a fleet, over a text in memory that fails as a test asks.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::base::sync::{Mutex, lock};
use crate::clock::{Clock, ManualClock};
use crate::error::BoxError;
use crate::event::FleetEvent;
use crate::key::Key;
use crate::limiter::{BoxFuture, SharedText, TextRead, VersionedText};
use crate::middleware::charge::access::Access;
use crate::mode::Mode;
use crate::outcome::Observer;
use crate::quota::Quota;

/// The outcome of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    None,
    /// The call fails before it has an effect.
    Away,
    /// Swaps are made, and the answers are lost.
    LostAnswers,
    /// The call has no answer.
    Silent,
    /// A swap and all calls after it have no answer.
    SilentFromSwap,
}

#[derive(Default)]
struct Kept {
    text: Option<VersionedText>,
    fault: Fault,
    loads: usize,
    swaps: usize,
}

#[derive(Clone, Default)]
struct InMemory(Arc<Mutex<Kept>>);

impl InMemory {
    fn set_fault(&self, fault: Fault) {
        lock(&self.0).fault = fault;
    }

    /// Runs a call, and says what becomes of it.
    async fn run<T>(&self, run: impl FnOnce(&mut Kept) -> T) -> Result<T, BoxError> {
        tokio::task::yield_now().await;
        let fault = lock(&self.0).fault;
        match fault {
            Fault::Away => return Err("the store is away".into()),
            Fault::Silent => std::future::pending().await,
            Fault::SilentFromSwap => {
                self.set_fault(Fault::Silent);
                std::future::pending().await
            }
            Fault::None | Fault::LostAnswers => {}
        }
        let done = run(&mut lock(&self.0));
        if fault == Fault::LostAnswers { Err("the answer is lost".into()) } else { Ok(done) }
    }
}

impl SharedText for InMemory {
    fn load(&self, known: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
        let load = move |kept: &mut Kept| {
            kept.loads += 1;
            let is_known = kept.text.as_ref().map(|text| text.version) == known;
            if is_known { TextRead::Unchanged } else { TextRead::Changed(kept.text.clone()) }
        };
        // Reading is not lost, so that a lost answer to a swap is found out.
        Box::pin(async move {
            let fault = lock(&self.0).fault;
            let is_read = matches!(fault, Fault::LostAnswers | Fault::SilentFromSwap);
            if is_read { Ok(load(&mut lock(&self.0))) } else { self.run(load).await }
        })
    }

    fn swap<'a>(&'a self, expect: Option<u128>, next: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(self.run(move |kept| {
            let is_expected = kept.text.as_ref().map(|text| text.version) == expect;
            if is_expected {
                kept.swaps += 1;
                kept.text = Some(next.clone());
            }
            is_expected
        }))
    }
}

async fn fleet(text: &InMemory, clock: &ManualClock) -> Fleet {
    Fleet::over(Arc::new(text.clone()), Arc::new(clock.clone())).await.unwrap()
}

/// Makes two processes with one store.
async fn processes() -> (InMemory, ManualClock, [Fleet; 2]) {
    let (text, clock) = (InMemory::default(), ManualClock::new());
    let both = [fleet(&text, &clock).await, fleet(&text, &clock).await];
    (text, clock, both)
}

/// Lets the next reading happen.
async fn second() {
    tokio::time::sleep(Duration::from_millis(1_001)).await;
}

fn shadow() -> [FleetChange; 1] {
    [FleetChange::mode("client", Mode::Shadow)]
}

#[tokio::test(start_paused = true)]
async fn change_is_in_force_everywhere_after_a_second() {
    let (_, _, [here, there]) = processes().await;
    let mut seen = Vec::new();
    for fleet in [&here, &there] {
        let mode = fleet.mode("client", Mode::Enforce);
        let quota = fleet.quota("search", Quota::per_minute(10));
        let (overrides, plans) = (fleet.overrides("customer"), fleet.plans("customer"));
        seen.push((mode, quota, overrides, plans, fleet.access("clients")));
    }
    let changes = [
        FleetChange::mode("client", Mode::Shadow),
        FleetChange::quota("search", Quota::per_minute(20)),
        FleetChange::override_quota("customer", "acme", Quota::per_hour(7)).unwrap(),
        FleetChange::plan("customer", "acme", 2).unwrap(),
        FleetChange::network("clients", "203.0.113.0/24", Access::Deny).unwrap(),
        FleetChange::key("clients", "leaked", Access::Allow).unwrap(),
    ];
    let targets: Vec<FleetTarget> = changes.iter().map(|change| change.target.clone()).collect();
    assert_eq!(here.change("alice", "an incident", changes).await.unwrap(), 1);
    let acme = Key::of("acme").unwrap();
    for (at, (mode, quota, overrides, plans, access)) in seen.iter().enumerate() {
        if at == 1 {
            assert_eq!(mode.get(), Mode::Enforce, "the other process has not read yet");
            second().await;
        }
        assert_eq!((mode.get(), quota.get()), (Mode::Shadow, Quota::per_minute(20)));
        assert_eq!((overrides.get(&acme), plans.get(&acme)), (Some(Quota::per_hour(7)), Some(2)));
        assert_eq!(access.of_address("203.0.113.9".parse().unwrap()), Some(Access::Deny));
        assert_eq!(access.of_key(&Key::of("leaked").unwrap()), Some(Access::Allow));
    }
    assert_eq!(here.in_force().hash, there.in_force().hash);
    there.change("bob", "it is over", targets.into_iter().map(FleetChange::end)).await.unwrap();
    second().await;
    for (mode, quota, overrides, plans, access) in &seen {
        assert_eq!((mode.get(), quota.get()), (Mode::Enforce, Quota::per_minute(10)));
        assert!(overrides.is_empty() && plans.is_empty() && access.is_empty());
    }
    let actions: Vec<_> = here.actions().iter().map(|action| (action.revision, action.by.to_string())).collect();
    assert_eq!((actions.len(), &*actions[0].1, &*actions[11].1), (12, "bob", "alice"));
}

#[tokio::test(start_paused = true)]
async fn value_that_is_taken_late_follows_what_was_set() {
    let (_, _, [here, there]) = processes().await;
    here.mode("client", Mode::Enforce);
    here.change("alice", "", shadow()).await.unwrap();
    second().await;
    assert_eq!(there.mode("client", Mode::Enforce).get(), Mode::Shadow);
}

#[tokio::test(start_paused = true)]
async fn operators_at_once_do_not_undo_each_other() {
    let (text, _, both) = processes().await;
    for fleet in &both {
        (0..20).for_each(|n| drop(fleet.mode(format!("m{n}"), Mode::Enforce)));
    }
    let changes = (0..20).map(|n| {
        let fleet = both[n % 2].clone();
        tokio::spawn(async move {
            fleet.change("alice", "", [FleetChange::mode(format!("m{n}"), Mode::Shadow)]).await.unwrap()
        })
    });
    let mut revisions = Vec::new();
    for change in changes.collect::<Vec<_>>() {
        revisions.push(change.await.unwrap());
    }
    revisions.sort_unstable();
    assert_eq!(revisions, (1..=20).collect::<Vec<_>>());
    second().await;
    for fleet in &both {
        assert!((0..20).all(|n| fleet.mode(format!("m{n}"), Mode::Enforce).get() == Mode::Shadow));
    }
    assert_eq!(lock(&text.0).swaps, 20);
}

#[tokio::test(start_paused = true)]
async fn change_whose_answer_is_lost_is_made_once() {
    let (text, _, [here, _]) = processes().await;
    here.mode("client", Mode::Enforce);
    text.set_fault(Fault::LostAnswers);
    assert_eq!(here.change("alice", "", shadow()).await.unwrap(), 1);
    assert_eq!((lock(&text.0).swaps, here.actions().len()), (1, 1));
}

/// The one action of a rollback is not kept after a change of 100 entries.
#[tokio::test(start_paused = true)]
async fn change_that_later_ones_displaced_is_not_made_again() {
    let (text, _, [here, there]) = processes().await;
    there.overrides("customer");
    for rules in ["one", "two"] {
        here.change("alice", "", [FleetChange::rules("rules", rules)]).await.unwrap();
    }
    text.set_fault(Fault::LostAnswers);
    let rollback = tokio::spawn({
        let here = here.clone();
        async move { here.rollback("alice", "", "rules", None).await }
    });
    while lock(&text.0).swaps < 3 {
        tokio::task::yield_now().await;
    }
    text.set_fault(Fault::None);
    let many = (0..100).map(|n| FleetChange::override_quota("customer", n, Quota::per_hour(1)).unwrap());
    assert_eq!(there.change("bob", "", many).await.unwrap(), 4);
    let error = rollback.await.unwrap().unwrap_err();
    assert!(error.to_string().starts_with("it is unknown whether the change was made"), "{error}");
    let rules = here.entries().into_iter().find(|entry| entry.target.kind == FleetKind::Rules);
    assert_eq!((&*rules.unwrap().value, lock(&text.0).swaps), ("one", 4));
}

#[tokio::test(start_paused = true)]
async fn change_ends_although_the_store_falls_silent() {
    let (text, _, [here, _]) = processes().await;
    here.mode("client", Mode::Enforce);
    text.set_fault(Fault::SilentFromSwap);
    let began = tokio::time::Instant::now();
    let error = here.change("alice", "", shadow()).await.unwrap_err();
    assert_eq!(error.kind(), FleetErrorKind::Unavailable, "{error}");
    assert!(began.elapsed() <= Duration::from_secs(10), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn change_waits_until_the_store_answers_again() {
    let (text, _, [here, _]) = processes().await;
    here.mode("client", Mode::Enforce);
    for fault in [Fault::Away, Fault::Silent] {
        let before = here.in_force().revision;
        text.set_fault(fault);
        let change = tokio::spawn({
            let here = here.clone();
            async move { here.change("alice", "", shadow()).await }
        });
        tokio::time::sleep(Duration::from_secs(5)).await; // a failover
        text.set_fault(Fault::None);
        assert_eq!(change.await.unwrap().unwrap(), before + 1, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn change_that_was_never_sent_says_that_nothing_changed() {
    let (text, _, [here, _]) = processes().await;
    here.mode("client", Mode::Enforce);
    for fault in [Fault::Away, Fault::Silent] {
        text.set_fault(fault);
        let began = tokio::time::Instant::now();
        let error = here.change("alice", "", shadow()).await.unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Unavailable);
        assert!(error.to_string().starts_with("nothing was changed within"), "{error}");
        assert_eq!(began.elapsed().as_secs(), 10);
    }
    assert_eq!(lock(&text.0).swaps, 0);
}

#[tokio::test(start_paused = true)]
async fn process_that_cannot_read_goes_on_and_says_so() {
    let (text, clock, [here, there]) = processes().await;
    let mode = there.mode("client", Mode::Enforce);
    here.mode("client", Mode::Enforce);
    here.change("alice", "", shadow()).await.unwrap();
    second().await;
    let read_at = there.in_force().read_at;
    for fault in [Fault::Away, Fault::Silent] {
        text.set_fault(fault);
        clock.advance(Duration::from_secs(1));
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(mode.get(), Mode::Shadow, "{fault:?}");
        let in_force = there.in_force();
        assert!(in_force.error.is_some() && in_force.read_at == read_at, "{fault:?}: {in_force:?}");
        let error = there.change("bob", "", shadow()).await.unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Unavailable);
        // A process that starts now knows nothing, and serves.
        assert!(fleet(&text, &clock).await.in_force().error.is_some());
    }
    text.set_fault(Fault::None);
    second().await;
    assert!(there.in_force().error.is_none() && there.in_force().read_at > read_at);
}

#[tokio::test(start_paused = true)]
async fn text_that_the_store_lost_is_put_back() {
    let (text, _, both) = processes().await;
    both.iter().for_each(|fleet| drop(fleet.mode("client", Mode::Enforce)));
    both[0].change("alice", "", shadow()).await.unwrap();
    let older = lock(&text.0).text.clone();
    both[0].change("alice", "", [FleetChange::end(shadow()[0].target.clone())]).await.unwrap();
    second().await;
    let observers = [Revisions::default(), Revisions::default()];
    both.iter().zip(&observers).for_each(|(fleet, observer)| fleet.observe(observer.clone()));
    for (lost, reported) in [(None, 1), (older, 2)] {
        lock(&text.0).text = lost;
        second().await;
        // The process that wrote the text back reports it.
        let events = observers.each_ref().map(|observer| lock(&observer.0).clone()).concat();
        assert_eq!(events.iter().filter(|event| **event == FleetEvent::restored(2)).count(), reported, "{events:?}");
        assert!(both.iter().all(|fleet| fleet.in_force().revision == 2));
        let kept = lock(&text.0).text.clone().unwrap();
        assert!(kept.text.starts_with("tower-ratelimit-fleet 1 2\n"), "{}", kept.text);
    }
}

#[tokio::test(start_paused = true)]
async fn history_in_the_store_wins_over_one_as_long() {
    let (text, clock, [here, there]) = processes().await;
    let modes = [&here, &there].map(|fleet| fleet.mode("client", Mode::Enforce));
    here.change("alice", "", shadow()).await.unwrap();
    // A failover to a server that never got it, and another operator there.
    lock(&text.0).text = None;
    let new = fleet(&text, &clock).await;
    new.mode("client", Mode::Enforce);
    new.change("bob", "", [FleetChange::mode("client", Mode::Degrade)]).await.unwrap();
    second().await;
    second().await;
    assert!(modes.iter().all(|mode| mode.get() == Mode::Degrade));
}

#[tokio::test(start_paused = true)]
async fn entry_ends_by_time_within_a_second() {
    let (_, clock, [here, there]) = processes().await;
    let modes = [&here, &there].map(|fleet| fleet.mode("client", Mode::Enforce));
    let list = there.access("clients");
    let deny = FleetChange::network("clients", "192.0.2.1", Access::Deny).unwrap();
    here.access("clients");
    let hour = Duration::from_secs(3_600);
    let changes = [shadow()[0].clone(), deny].map(|change| change.lasting(hour));
    here.change("alice", "", changes).await.unwrap();
    second().await;
    clock.advance(hour - Duration::from_secs(1));
    second().await;
    assert!(modes.iter().all(|mode| mode.get() == Mode::Shadow) && list.len() == 1);
    clock.advance(Duration::from_secs(1));
    second().await;
    assert!(modes.iter().all(|mode| mode.get() == Mode::Enforce) && list.is_empty());
    assert!(there.entries().is_empty());
}

#[tokio::test(start_paused = true)]
async fn change_that_means_nothing_here_is_refused() {
    let (text, _, [here, _]) = processes().await;
    here.mode("client", Mode::Enforce);
    here.quota("search", Quota::per_minute(1));
    for (change, said) in [
        (FleetChange::mode("clientt", Mode::Shadow), "no `mode` of the name `clientt`; it has `client`"),
        (FleetChange::quota("client", Quota::per_minute(1)), "it has `search`"),
        (FleetChange::of_text(FleetKind::Mode, "client", None, Some("off")).unwrap(), "the value cannot be read"),
        (FleetChange::of_text(FleetKind::FormerRules, "client", None, Some("")).unwrap(), "former rules"),
        (FleetChange::mode("a".repeat(600), Mode::Shadow), "1 to 512 bytes"),
    ] {
        let error = here.change("alice", "", [change]).await.unwrap_err();
        assert!(error.kind() == FleetErrorKind::Invalid && error.to_string().contains(said), "{error}");
    }
    for (kind, subject) in [(FleetKind::Mode, Some("a")), (FleetKind::Key, None), (FleetKind::Network, Some("x"))] {
        assert!(FleetChange::of_text(kind, "client", subject, None).is_err());
    }
    assert_eq!(lock(&text.0).swaps, 0);
}

#[derive(Clone, Default)]
struct Revisions(Arc<Mutex<Vec<FleetEvent>>>);

impl Observer for Revisions {
    fn on_outcome(&self, _: &crate::outcome::Observed<'_>) {}

    fn on_fleet_event(&self, event: &FleetEvent) {
        lock(&self.0).push(event.clone());
    }

    fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

#[tokio::test(start_paused = true)]
async fn observers_get_each_event_once() {
    let (_, _, [here, _]) = processes().await;
    let both = [Revisions::default(), Revisions::default()];
    for observer in [&both[0], &both[0], &both[1]] {
        here.observe(observer.clone());
    }
    here.mode("client", Mode::Enforce);
    here.change("alice", "", shadow()).await.unwrap();
    // The revision in force when the observer came, and the one that the change made.
    let seen = both.map(|observer| lock(&observer.0).len());
    assert_eq!(seen, [2, 2]);
}

#[tokio::test(start_paused = true)]
async fn text_of_another_form_is_left_alone() {
    let (text, _, [here, _]) = processes().await;
    let mode = here.mode("client", Mode::Enforce);
    here.change("alice", "", shadow()).await.unwrap();
    let foreign = VersionedText::new(7, "tower-ratelimit-fleet 2 9\n");
    lock(&text.0).text = Some(foreign.clone());
    second().await;
    assert_eq!(mode.get(), Mode::Shadow);
    assert!(here.in_force().error.is_some());
    assert_eq!(here.change("alice", "", shadow()).await.unwrap_err().kind(), FleetErrorKind::Foreign);
    assert_eq!(lock(&text.0).text, Some(foreign));
}

#[tokio::test]
async fn file_keeps_what_was_set_over_a_restart() {
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-fleet-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("settings");
    {
        let fleet = Fleet::in_file(&path).await.unwrap();
        fleet.mode("client", Mode::Enforce);
        fleet.change("alice", "", shadow()).await.unwrap();
        fleet.change("alice", "again", shadow()).await.unwrap();
    }
    let fleet = Fleet::in_file(&path).await.unwrap();
    assert_eq!(fleet.mode("client", Mode::Enforce).get(), Mode::Shadow);
    assert_eq!((fleet.in_force().revision, &*fleet.entries()[0].why), (2, "again"));
    std::fs::write(&path, "no such form").unwrap();
    assert!(Fleet::in_file(&path).await.is_err());
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn change_that_the_disk_refuses_says_so_at_once() {
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-fleet-disk-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("settings.new")).unwrap(); // a folder where the new file would be written
    let fleet = Fleet::in_file(folder.join("settings")).await.unwrap();
    fleet.mode("client", Mode::Enforce);
    // The ten seconds of a change end in another error.
    let error = fleet.change("alice", "", shadow()).await.unwrap_err();
    assert_eq!((error.kind(), &*error.to_string()), (FleetErrorKind::Unavailable, "nothing was changed"));
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("settings: "), "{cause}");
    std::fs::remove_dir(folder.join("settings.new")).unwrap();
    assert_eq!(fleet.change("alice", "", shadow()).await.unwrap(), 1);
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(start_paused = true)]
async fn unchanged_text_is_read_once_a_second() {
    let (text, clock) = (InMemory::default(), ManualClock::new());
    let only = fleet(&text, &clock).await;
    tokio::time::sleep(Duration::from_millis(10_500)).await;
    assert_eq!(lock(&text.0).loads, 11);
    drop(only);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(lock(&text.0).loads <= 12, "the task ends");
    assert!(clock.now() > crate::base::time::Timestamp::from_micros(0));
}

/// Rules that note which revision is in force when they get a text, and then wait for the test.
#[cfg(feature = "rules")]
struct SlowRules {
    fleet: Fleet,
    begun: tokio::sync::mpsc::UnboundedSender<(String, u64)>,
    goes_on: Mutex<std::sync::mpsc::Receiver<()>>,
}

#[cfg(feature = "rules")]
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

    #[cfg(feature = "status")]
    fn own_text(&self) -> Arc<[u8]> {
        Arc::default()
    }

    fn check_text(&self, _: &str) -> Result<(), String> {
        Ok(())
    }
}

#[cfg(feature = "rules")]
type Begun = tokio::sync::mpsc::UnboundedReceiver<(String, u64)>;

/// Makes slow rules with the name `slow`. Returns what begins, and what lets the rules go on.
#[cfg(feature = "rules")]
fn slow_rules(fleet: &Fleet) -> (Arc<SlowRules>, Begun, std::sync::mpsc::Sender<()>) {
    let (begun, follows) = tokio::sync::mpsc::unbounded_channel();
    let (go_on, goes_on) = std::sync::mpsc::channel();
    let rules = Arc::new(SlowRules { fleet: fleet.clone(), begun, goes_on: Mutex::new(goes_on) });
    let followed: std::sync::Weak<dyn FollowFleet> = Arc::downgrade(&(Arc::clone(&rules) as Arc<dyn FollowFleet>));
    fleet.follow_rules("slow", &followed);
    (rules, follows, go_on)
}

/// Starts a change of the slow rules.
#[cfg(feature = "rules")]
fn push(fleet: &Fleet, text: &'static str) -> tokio::task::JoinHandle<Result<u64, FleetError>> {
    let fleet = fleet.clone();
    tokio::spawn(async move { fleet.change("alice", "", [FleetChange::rules("slow", text)]).await })
}

/// A second change comes while the tables follow the first one.
#[cfg(feature = "rules")]
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

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn change_that_is_not_in_force_yet_says_so() {
    let (_, _, [fleet, _]) = processes().await;
    let (_rules, mut follows, go_on) = slow_rules(&fleet);
    let change = push(&fleet, "one");
    assert!(follows.recv().await.is_some());
    tokio::time::advance(Duration::from_secs(10)).await;
    let error = change.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "revision 1 was made, but is not in force in this process yet");
    go_on.send(()).unwrap();
}

/// Another thread makes the tables follow meanwhile, and is busy with other rules.
#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn new_rules_have_their_overrides_at_once() {
    use crate::rules::Rules;

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

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn entry_for_a_client_is_refused_where_it_has_no_effect() {
    use crate::rules::Rules;

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

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn rules_of_a_file_keep_it_after_a_change() {
    use std::path::PathBuf;

    use crate::event::RulesEvent;
    use crate::outcome::{Observed, Observer};
    use crate::rules::Rules;

    /// Notes the files of the rules that come into force.
    #[derive(Clone, Default)]
    struct Files(Arc<Mutex<Vec<Option<PathBuf>>>>);

    impl Observer for Files {
        fn on_outcome(&self, _: &Observed<'_>) {}

        fn on_rules_event(&self, event: &RulesEvent) {
            if let RulesEvent::Loaded { file, .. } = event {
                lock(&self.0).push(file.clone());
            }
        }
    }

    let path = std::env::temp_dir().join(format!("tower-ratelimit-fleet-rules-{}", std::process::id()));
    std::fs::write(&path, "rules: [{name: a, quota: 1 per hour, key: peer-ip}]").unwrap();
    let (_, _, [fleet, _]) = processes().await;
    let rules = Rules::builder().fleet(&fleet, "rules").read_file(&path).unwrap();
    let files = Files::default();
    let _layer = rules.layer(crate::MemoryLimiter::new()).unwrap().observer(files.clone());
    let pushed = FleetChange::rules("rules", "rules: [{name: a, quota: 2 per hour, key: peer-ip}]");
    let own = FleetChange::end(pushed.target.clone());
    for change in [FleetChange::mode("a", Mode::Shadow), pushed, own] {
        fleet.change("alice", "", [change]).await.unwrap();
    }
    assert_eq!(*lock(&files.0), [Some(path.clone()), None, Some(path.clone())]);
    std::fs::remove_file(path).unwrap();
}

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn pushed_rules_are_in_force_until_they_are_rolled_back() {
    use crate::rules::Rules;

    let (text, _, fleets) = processes().await;
    let quota = |limit: u64| format!("rules: [{{name: a, quota: {limit} per hour, key: peer-ip}}]");
    let rules = fleets.each_ref().map(|fleet| Rules::builder().fleet(fleet, "rules").read_text(quota(1)).unwrap());
    let layers = rules.each_ref().map(|rules| rules.layer(crate::MemoryLimiter::new()).unwrap());
    let limits = || layers.each_ref().map(|layer| layer.policies()[0].quota().limit());
    let push = |text: String| fleets[0].change("alice", "", [FleetChange::rules("rules", text)]);
    let error = push("rules: [{name: a}]".to_owned()).await.unwrap_err();
    assert!(error.to_string().contains("quota"), "{error}");
    push(quota(2)).await.unwrap();
    push(quota(3)).await.unwrap();
    second().await;
    assert_eq!(limits(), [3, 3]);
    // Rules that the process reads itself wait while those of operators are in force.
    rules[1].replace(quota(9)).unwrap();
    assert!(rules[1].replace("rules: [{name: a}]").is_err());
    assert_eq!(limits(), [3, 3]);
    assert_eq!(rules[0].in_force().hash, rules[1].in_force().hash);
    // A process that starts now has them, too.
    let clock = ManualClock::new();
    let late = Rules::builder().fleet(&fleet(&text, &clock).await, "rules").read_text(quota(1)).unwrap();
    assert_eq!(late.in_force().hash, rules[0].in_force().hash);
    let error = fleets[1].rollback("bob", "it was worse", "rules", Some(1)).await.unwrap_err();
    assert_eq!(error.kind(), FleetErrorKind::Conflict, "{error}");
    let done = fleets[1].rollback("bob", "it was worse", "rules", Some(2)).await.unwrap();
    let restored = done.restored.unwrap();
    assert_eq!((done.revision, restored.revision, &*restored.by), (3, 1, "alice"));
    second().await;
    assert_eq!(limits(), [2, 2]);
    let own = FleetChange::of_text(FleetKind::Rules, "rules", None, None).unwrap();
    fleets[1].change("bob", "", [own]).await.unwrap();
    second().await;
    assert_eq!(limits(), [1, 9]);
}

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn rules_of_a_file_follow_what_is_set_for_them() {
    use std::net::IpAddr;

    use crate::key::PeerAddr;
    use crate::rules::Rules;

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
#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn settings_of_a_renamed_rule_follow_its_old_name() {
    use crate::rules::Rules;

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

#[cfg(feature = "rules")]
#[derive(Clone, Default)]
struct RulesEvents(Arc<Mutex<Vec<crate::event::RulesEvent>>>);

#[cfg(feature = "rules")]
impl RulesEvents {
    fn take(&self) -> Vec<crate::event::RulesEvent> {
        std::mem::take(&mut *lock(&self.0))
    }
}

#[cfg(feature = "rules")]
impl crate::outcome::Observer for RulesEvents {
    fn on_outcome(&self, _: &crate::outcome::Observed<'_>) {}

    fn on_rules_event(&self, event: &crate::event::RulesEvent) {
        lock(&self.0).push(event.clone());
    }
}

#[cfg(feature = "rules")]
fn hourly(limit: u64) -> String {
    format!("rules: [{{name: a, quota: {limit} per hour, key: peer-ip}}]")
}

/// A limiter in memory has no room for this log.
#[cfg(feature = "rules")]
const UNSUPPORTED: &str = "rules: [{name: a, quota: \"1000000 per hour, sliding log\", key: peer-ip}]";

/// The operators' program does not check the rules, because it has none of its own.
#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn pushed_rules_that_are_not_supported_do_not_stop_a_start() {
    use crate::rules::Rules;

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

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn own_rules_that_are_not_used_are_reported_once() {
    use crate::event::RulesEvent;
    use crate::rules::Rules;

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

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn override_of_a_rule_is_no_misconfiguration() {
    use crate::rules::Rules;

    let (_, _, [fleet, _]) = processes().await;
    let text = "rules: [{name: client, quota: 3 per hour, key: peer-ip}]";
    let rules = Rules::builder().fleet(&fleet, "rules").read_text(text).unwrap();
    let layer = rules.layer(crate::MemoryLimiter::new()).unwrap();
    let checked = || layer.check().map_err(|warning| warning.to_string());
    assert_eq!(checked(), Ok(()));
    let raised = FleetChange::override_quota("client", "192.0.2.1", Quota::per_hour(5)).unwrap();
    let end = FleetChange::end(raised.target().clone());
    for change in [raised, end] {
        fleet.change("alice", "", [change]).await.unwrap();
        assert_eq!(checked(), Ok(()));
    }
}
