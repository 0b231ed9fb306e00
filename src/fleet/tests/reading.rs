//! Readings of the text: failures, lost and foreign texts, entries that end, and events.

use std::sync::mpsc;

use super::*;
use crate::clock::Clock;
use crate::event::FleetEvent;
use crate::middleware::charge::access::Access;
use crate::outcome::{Observed, Observer};

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
        assert!(both.iter().any(|fleet| fleet.in_force().restored_at.is_some()));
        let kept = lock(&text.0).text.clone().unwrap();
        assert!(kept.text.starts_with("tower-ratelimit-fleet 1 2\n"), "{}", kept.text);
    }
}

/// Without an answer, the process learns from its next reading that its text is in the store.
#[tokio::test(start_paused = true)]
async fn write_back_without_an_answer_is_reported_once() {
    let (text, clock) = (InMemory::default(), ManualClock::new());
    let only = fleet(&text, &clock).await;
    only.mode("client", Mode::Enforce);
    only.change("alice", "", shadow()).await.unwrap();
    let seen = Revisions::default();
    only.observe(seen.clone());
    lock(&text.0).text = None;
    text.set_fault(Fault::LostAnswers);
    second().await;
    text.set_fault(Fault::None);
    second().await;
    second().await;
    let restored = lock(&seen.0).iter().filter(|event| **event == FleetEvent::restored(1)).count();
    assert!(restored == 1 && only.in_force().restored_at.is_some(), "{:?}", lock(&seen.0));
}

/// A page asks for the secret when an operator explains a request.
#[cfg(feature = "status")]
#[tokio::test(start_paused = true)]
async fn secret_of_the_pages_is_no_revision() {
    let (text, clock, [here, there]) = processes().await;
    let seen = Revisions::default();
    there.observe(seen.clone());
    here.mode("client", Mode::Enforce);
    let secret = here.shared_secret().await;
    assert!(secret.is_some());
    second().await;
    assert_eq!([&here, &there].map(|fleet| (fleet.in_force().revision, fleet.secret())), [(0, secret); 2]);
    assert!(here.actions().is_empty());
    assert_eq!(lock(&seen.0).len(), 1, "nothing else is in force");
    // A store that was emptied has it again, and the first change is made on it.
    lock(&text.0).text = None;
    second().await;
    let new = fleet(&text, &clock).await;
    assert_eq!((new.secret(), new.in_force().revision), (secret, 0));
    assert_eq!(here.change("alice", "", shadow()).await.unwrap(), 1);
    second().await;
    assert_eq!((there.in_force().revision, there.secret()), (1, secret));
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

#[derive(Clone, Default)]
struct Revisions(Arc<Mutex<Vec<FleetEvent>>>);

impl Observer for Revisions {
    fn on_outcome(&self, _: &Observed<'_>) {}

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
async fn observers_hear_once_that_the_store_is_away_and_back() {
    let (text, _, [here, _]) = processes().await;
    let seen = Revisions::default();
    here.observe(seen.clone());
    lock(&seen.0).clear();
    let kinds = || -> Vec<&str> {
        let kind = |event: &FleetEvent| match event {
            FleetEvent::Unreadable { revision: Some(0), .. } => "unreadable",
            FleetEvent::Readable { revision: 0 } => "readable",
            _ => "other",
        };
        lock(&seen.0).iter().map(kind).collect()
    };
    for (fault, expected) in [
        (Fault::Away, &["unreadable"][..]),
        (Fault::None, &["unreadable", "readable"]),
        (Fault::Away, &["unreadable", "readable", "unreadable"]),
    ] {
        text.set_fault(fault);
        for _ in 0..3 {
            second().await;
        }
        assert_eq!(kinds(), expected);
    }
}

#[cfg(feature = "status")]
#[tokio::test(start_paused = true)]
async fn process_reports_while_the_store_answers() {
    let (text, _, [here, _]) = processes().await;
    here.report_by(|fleet| format!("revision {}", fleet.in_force.revision));
    for (fault, reports) in [(Fault::None, 3), (Fault::Away, 3), (Fault::None, 5)] {
        text.set_fault(fault);
        for _ in 0..12 {
            second().await;
        }
        assert_eq!(lock(&text.0).reports.len(), reports, "{fault:?}");
    }
    assert!(lock(&text.0).reports.iter().all(|report| &*report.text == "revision 0"));
}

/// An observer that is slow with its first event.
struct Slow {
    seen: Revisions,
    entered: mpsc::Sender<()>,
    goes_on: Mutex<mpsc::Receiver<()>>,
}

impl Observer for Slow {
    fn on_outcome(&self, _: &Observed<'_>) {}

    fn on_fleet_event(&self, event: &FleetEvent) {
        if lock(&self.seen.0).is_empty() && self.entered.send(()).is_ok() {
            let _ = lock(&self.goes_on).recv();
        }
        self.seen.on_fleet_event(event);
    }
}

/// Otherwise a gauge of the revision would keep the older one.
#[tokio::test(start_paused = true)]
async fn observers_get_events_in_order_and_changes_wait_for_them() {
    let (_, _, [here, _]) = processes().await;
    here.mode("client", Mode::Enforce);
    let seen = Revisions::default();
    let ((entered, has_entered), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
    let slow = Slow { seen: seen.clone(), entered, goes_on: Mutex::new(goes_on) };
    let observing = std::thread::spawn({
        let here = here.clone();
        move || here.observe(slow)
    });
    has_entered.recv().unwrap();
    let change = tokio::spawn({
        let here = here.clone();
        async move { here.change("alice", "", shadow()).await }
    });
    while here.in_force().revision == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(lock(&seen.0).is_empty() && !change.is_finished(), "{:?}", lock(&seen.0));
    go_on.send(()).unwrap();
    observing.join().unwrap();
    assert_eq!(change.await.unwrap().unwrap(), 1);
    let revisions: Vec<_> =
        lock(&seen.0).iter().map(|event| matches!(event, FleetEvent::InForce { revision: 1, .. })).collect();
    assert_eq!(revisions, [false, true], "{:?}", lock(&seen.0));
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
