//! A change is made once and in each process, or says that it was not made.

use super::*;
use crate::key::Key;
use crate::middleware::charge::access::Access;
use crate::quota::Quota;

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
async fn override_follows_its_latest_value_and_end() {
    let (_, clock, [here, there]) = processes().await;
    let overrides = [&here, &there].map(|fleet| fleet.overrides("customer"));
    let (acme, other) = (Key::of("acme").unwrap(), Key::of("other").unwrap());
    let set = |key: &str, limit| FleetChange::override_quota("customer", key, Quota::per_hour(limit)).unwrap();
    here.change("alice", "", [set("other", 3)]).await.unwrap();
    for (change, limit) in [
        (set("acme", 7), 7),
        (set("acme", 8), 8),
        (set("acme", 8).lasting(Duration::from_secs(3_600)), 8),
        (set("acme", 9).lasting(Duration::from_secs(7_200)), 9),
    ] {
        here.change("alice", "", [change]).await.unwrap();
        second().await;
        for own in &overrides {
            assert_eq!((own.get(&acme), own.get(&other)), (Some(Quota::per_hour(limit)), Some(Quota::per_hour(3))));
            assert_eq!(own.len(), 2);
        }
    }
    clock.advance(Duration::from_secs(7_199));
    second().await;
    assert!(overrides.iter().all(|own| own.get(&acme).is_some()));
    clock.advance(Duration::from_secs(1));
    second().await;
    assert!(overrides.iter().all(|own| own.get(&acme).is_none() && own.get(&other).is_some()));
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
