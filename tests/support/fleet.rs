//! Operators' settings in several processes with one store. Each process is a limiter of its own here.
#![allow(dead_code, reason = "each test file uses its part")]

use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::fleet::{Fleet, FleetChange, FleetErrorKind};
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::middleware::{Access, AccessList, Overrides};
use tower_ratelimit::{Key, Quota};

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A process, with what it took.
pub(crate) struct Process {
    pub(crate) fleet: Fleet,
    pub(crate) clients: AccessList,
    pub(crate) customers: Overrides<Quota>,
}

impl Process {
    pub(crate) async fn beside<L: Limiter>(limiter: &L) -> Self {
        let fleet = Fleet::beside(limiter).await.expect("the limiter has a store");
        Self { clients: fleet.access("clients"), customers: fleet.overrides("customer"), fleet }
    }

    pub(crate) fn denies(&self, address: &str) -> bool {
        self.clients.of_address(address.parse().expect("an address")) == Some(Access::Deny)
    }
}

pub(crate) fn deny(address: &str) -> FleetChange {
    FleetChange::network("clients", address, Access::Deny).expect("an address")
}

/// Makes changes as soon as the store answers. A busy one may be too slow for a call, and may yet make its changes: the
/// next call then finds no entries to end.
pub(crate) async fn change_when_it_answers(fleet: &Fleet, changes: impl IntoIterator<Item = FleetChange>) {
    let (began, changes) = (Instant::now(), changes.into_iter().collect::<Vec<_>>());
    while let Err(error) = fleet.change("bob", "", changes.clone()).await {
        if error.kind() == FleetErrorKind::Conflict {
            return;
        }
        assert!(began.elapsed() < LONG, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until all processes are so. Returns how long it took.
pub(crate) async fn until_all(processes: &[Process], is_so: impl Fn(&Process) -> bool) -> Duration {
    let began = Instant::now();
    while !processes.iter().all(&is_so) {
        assert!(began.elapsed() < LONG, "{:?}", processes.iter().map(|process| &process.fleet).collect::<Vec<_>>());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    began.elapsed()
}

/// Changes reach all processes, also ten thousand overrides, and no two operators undo each other.
pub(crate) async fn check_changes(processes: &[Process]) {
    let last = processes.last().expect("there are some");
    change_when_it_answers(&processes[0].fleet, [deny("192.0.2.1")]).await;
    println!("a block is in force after {:?}", until_all(processes, |process| process.denies("192.0.2.1")).await);
    assert!(!processes[0].denies("192.0.2.2"));

    let at_once = processes.iter().enumerate().map(|(n, process)| {
        let fleet = process.fleet.clone();
        tokio::spawn(async move { change_when_it_answers(&fleet, [deny(&format!("198.51.100.{n}"))]).await })
    });
    for change in at_once.collect::<Vec<_>>() {
        change.await.expect("no panic");
    }
    let all_deny = |process: &Process| (0..processes.len()).all(|n| process.denies(&format!("198.51.100.{n}")));
    println!("changes at once are in force after {:?}", until_all(processes, all_deny).await);

    let raised = Quota::per_minute(600);
    let many = (0..10_000).map(|n| FleetChange::override_quota("customer", n, raised).expect("a key"));
    let began = Instant::now();
    change_when_it_answers(&last.fleet, many).await;
    println!("10,000 overrides are written in {:?}", began.elapsed());
    let took = until_all(processes, |process| process.customers.len() == 10_000).await;
    println!("they are in force after {took:?}");
    let key = Key::of(9_999).expect("a key");
    let is_raised = |process: &Process| process.customers.get(&key) == Some(raised);
    assert!(processes.iter().all(|process| process.denies("192.0.2.1") && is_raised(process)));

    let ends = (0..10_000).map(|n| {
        let change = FleetChange::override_quota("customer", n, raised).expect("a key");
        FleetChange::end(change.target().clone())
    });
    change_when_it_answers(&last.fleet, ends).await;
    until_all(processes, |process| process.customers.is_empty()).await;
    assert!(processes.iter().all(all_deny));
}
