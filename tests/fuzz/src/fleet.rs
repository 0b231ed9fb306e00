//! The operators' settings with any text in the store, as another program or another version could have written it: an
//! error that says so, or entries and actions that can be shown, changed and read again. What another version knows stays.
#![no_main]

mod support;

use std::sync::Arc;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::fleet::{Fleet, FleetChange};
use tower_ratelimit::limiter::store::{StoreLimiter, StoreLimiterBuilder, Value, Version};
use tower_ratelimit::{Mode, Quota};

use support::{InMemory, RUNTIME};

/// The first line of a text.
const TITLE: &str = "tower-ratelimit-fleet 1 ";

fn limiter(store: &InMemory) -> StoreLimiter<InMemory> {
    let builder = StoreLimiterBuilder::new().deadline(Duration::from_secs(5));
    builder.build(store.clone()).expect("the setup is possible")
}

async fn fleet(limiter: &StoreLimiter<InMemory>) -> Fleet {
    let fleet = Fleet::beside(limiter).await.expect("there is a runtime, and a store");
    drop((fleet.mode("r", Mode::Enforce), fleet.quota("r", Quota::per_second(1)), fleet.overrides("r")));
    drop((fleet.plans("r"), fleet.access("r")));
    fleet
}

async fn read(store: &InMemory, text: &str) {
    let limiter = limiter(store);
    let known = fleet(&limiter).await;
    let before = known.in_force();
    let shown = known.to_json();
    assert!(serde_json::from_str::<serde_json::Value>(&shown).is_ok(), "{shown}");
    let changes = [FleetChange::mode("r", Mode::Shadow), FleetChange::quota("r", Quota::per_second(2))];
    let Ok(revision) = known.change("a b%", "why \u{85}", changes).await else { return };
    assert_eq!(before.revision.checked_add(1), Some(revision), "{text}");
    let again = fleet(&limiter).await;
    assert_eq!(again.in_force().error, None, "a text that was written is read");
    // A foreign text may have several authors of one revision.
    let set = |fleet: &Fleet| -> Vec<_> {
        fleet.entries().into_iter().map(|entry| (entry.target, entry.value, entry.until)).collect()
    };
    assert_eq!((set(&again), again.actions()), (set(&known), known.actions()), "{text}");
    assert!(again.entries().len() >= 2);
}

// The first byte says whether the text has its first line already.
fuzz_target!(|bytes: &[u8]| {
    let Some((which, rest)) = bytes.split_first() else { return };
    let rest = String::from_utf8_lossy(rest);
    let text = if *which & 1 == 0 { format!("{TITLE}{rest}") } else { rest.into_owned() };
    // The number of the form, no parts, and the text.
    let stored: Arc<[u8]> = [&[1, 0], text.as_bytes()].concat().into();
    let store = InMemory::with(Value::new(Version::from_bytes([1; 16]), stored));
    RUNTIME.block_on(async {
        read(&store, &text).await;
        tokio::time::advance(Duration::from_secs(2)).await; // the tasks of the fleets end
    });
});
