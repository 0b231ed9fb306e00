//! Values as bytes: what is written is read again, and what is not of this crate stays and does no harm.

use std::sync::Arc;
use std::time::Duration;

use super::lab::Lab;
use super::{hourly, key, left, patient, take};
use crate::base::sync::lock;
use crate::event::StoreErrorKind;
use crate::limiter::store::value::{History, Quotas, STATE_MAX, StateForm, StoredState, state_bytes_max};
use crate::limiter::store::{Value, Version};
use crate::limiter::{Charge, Limiter, TextRead, VersionedText};
use crate::policy::Policy;
use crate::quota::{Oldest, Quota};

fn version(number: u8) -> Version {
    Version::from_bytes([number; 16])
}

fn only_value(lab: &Lab) -> (Arc<str>, Value) {
    let values = lock(&lab.0.values);
    assert_eq!(values.len(), 1);
    values.iter().next().map(|(key, value)| (Arc::clone(key), value.clone())).unwrap()
}

#[tokio::test]
async fn value_has_the_documented_form() {
    let (lab, policy) = (Lab::default(), Policy::new("api", Quota::per_hour(10)).unwrap());
    let limiter = patient().prefix("shop").build(lab.clone()).unwrap();
    take(&limiter, &policy, "alice").await;
    let (stored, first) = only_value(&lab);
    let (before, after) = stored.split_once(":1:h").unwrap();
    assert!(before == "shop" && after.len() == 32 + ":3:api".len() && after.ends_with(":3:api"), "{stored}");
    assert!(!stored.contains("alice"));
    take(&limiter, &policy, "alice").await;
    let (_, second) = only_value(&lab);
    let text = "10 per hour, token bucket";
    assert_eq!(second.bytes[..2], [1, 128 + 1]);
    assert_eq!(second.bytes[2..18], first.version.to_bytes());
    assert_eq!(second.bytes[18..20], (text.len() as u16).to_le_bytes());
    assert_eq!(&second.bytes[20..20 + text.len()], text.as_bytes());
    assert_eq!(second.bytes.len(), 20 + text.len() + 16);
}

#[tokio::test]
async fn foreign_value_is_an_error_and_stays() {
    let (lab, policy) = (Lab::default(), hourly(10));
    let limiter = patient().build(lab.clone()).unwrap();
    take(&limiter, &policy, "a").await;
    let (stored, value) = only_value(&lab);
    let foreign = Value::new(value.version, *b"another program's");
    lock(&lab.0.values).insert(Arc::clone(&stored), foreign.clone());
    let limiter = patient().build(lab.clone()).unwrap();
    for _ in 0..2 {
        let error = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap_err();
        assert!(error.kind() == StoreErrorKind::Foreign && error.to_string().contains(&*stored), "{error}");
    }
    assert_eq!(only_value(&lab).1, foreign);
    // It fails no other key, and a reset removes it.
    assert!(take(&limiter, &policy, "b").await.is_allowed());
    limiter.reset(&policy, &key("a")).await.unwrap();
    assert_eq!(left(&limiter, &policy, "a").await, 10);
}

#[test]
fn history_keeps_four_versions_and_knows_whether_they_are_all() {
    let mut history = History::fresh();
    for number in 0..6 {
        assert_eq!(history.is_whole(), number <= 4, "{number}");
        history = history.after(version(number));
        assert!(history.has(version(number)) && history.has(version(number.saturating_sub(3))));
        assert!(!history.has(version(number + 1)));
    }
    assert!(!history.has(version(1)), "the fifth");
}

fn quotas() -> Vec<Quota> {
    let hour = Duration::from_secs(3_600);
    vec![
        Quota::per_second(5).burst(10).unwrap(),
        Quota::sliding_log(100, hour).unwrap(),
        Quota::sliding_window(100, hour).unwrap().buckets(60).unwrap().oldest(Oldest::Dropped).unwrap(),
        Quota::block(2, hour, hour).unwrap(),
        Quota::meter(10, hour).unwrap(),
    ]
}

/// Any change of any byte gives an error or another state, and no panic.
#[tokio::test]
async fn changed_values_never_panic() {
    for quota in quotas() {
        let (lab, policy) = (Lab::default(), Policy::new("p", quota).unwrap());
        let limiter = patient().max_denials(0).build(lab.clone()).unwrap();
        for _ in 0..3 {
            limiter.settle(&[Charge::new(&policy, &key("a")).effect(crate::limiter::Effect::Force)]).await.unwrap();
        }
        let (stored, value) = only_value(&lab);
        let known = Quotas::default();
        assert!(known.read(&value, None).is_ok());
        let mut variants: Vec<Vec<u8>> = (0..value.bytes.len()).map(|length| value.bytes[..length].to_vec()).collect();
        for at in 0..value.bytes.len() {
            for change in [1, 0x80, 0xff] {
                let mut bytes = value.bytes.to_vec();
                bytes[at] ^= change;
                variants.push(bytes);
            }
        }
        let mut long = value.bytes.to_vec();
        long.resize(40_000, 1);
        variants.push(long);
        for (number, bytes) in variants.into_iter().enumerate() {
            let changed = Value::new(Version::from_bytes((number as u128).to_be_bytes()), bytes);
            lock(&lab.0.values).insert(Arc::clone(&stored), changed);
            let limiter = patient().max_denials(0).build(lab.clone()).unwrap();
            let answer = limiter.take(&[Charge::new(&policy, &key("a"))]).await;
            assert!(answer.is_ok_and(|answer| answer.charges().len() == 1) || number < 4_000);
        }
    }
}

/// The bound that `supports` goes by.
#[test]
fn largest_state_of_a_supported_quota_fits() {
    let hour = Duration::from_secs(3_600);
    let quota = Quota::sliding_log(1_100, hour).unwrap();
    assert!(state_bytes_max(&quota) <= STATE_MAX as u64);
    let policy = Policy::new("p", quota).unwrap();
    let quotas = Quotas::default();
    let crate::algorithm::Decider::EntryLog(log) = quota.decider() else { panic!("it is a log") };
    let apart = 2 * 3_600_000_000 / log.most();
    let entries: Vec<_> = (1..=log.most()).map(|number| (1_800_000_000_000_000 + number * apart, 1)).collect();
    let state = StoredState { written: quotas.of(&policy), form: StateForm::Entries(entries.clone()) };
    let mut history = History::fresh();
    (0..9).for_each(|number| history = history.after(version(number)));
    let value = Value::new(version(9), state.write(&history));
    assert!(value.bytes.len() <= 17 * 1_024);
    let (read, state) = quotas.read(&value, None).unwrap();
    assert_eq!((read, state.form), (history, StateForm::Entries(entries)));
}

/// Its sub-windows are as long as the entries of a log, but their units count in part, so more of them are kept.
#[tokio::test]
async fn states_that_do_not_fit_a_value_are_refused() {
    let limiter = patient().build(Lab::default()).unwrap();
    for (units, fits) in [(1_000, true), (10_000, false)] {
        let policy = hourly(units);
        assert_eq!(limiter.supports(policy.quota()).is_ok(), fits, "{units}");
        let answer = limiter.take(&[Charge::new(&policy, &key("a"))]).await;
        assert_eq!(answer.is_ok(), fits);
    }
}

#[tokio::test]
async fn window_with_sub_windows_of_a_microsecond_is_read() {
    let clock = crate::clock::ManualClock::new();
    let quota = Quota::sliding_window(4, Duration::from_micros(2)).unwrap().buckets(2).unwrap().max_debt(2).unwrap();
    let policy = Policy::new("p", quota).unwrap();
    let limiter = patient().max_denials(0).clock(clock.clone()).build(Lab::default()).unwrap();
    for _ in 0..6 {
        limiter.settle(&[Charge::new(&policy, &key("a")).cost(4).effect(crate::limiter::Effect::Force)]).await.unwrap();
        clock.advance(Duration::from_micros(1));
    }
}

#[tokio::test]
async fn shared_text_without_a_part_counts_as_none() {
    let lab = Lab::default();
    let limiters = [patient().build(lab.clone()).unwrap(), patient().build(lab.clone()).unwrap()];
    let [old, new] = limiters.each_ref().map(|limiter| limiter.hooks().shared_text().unwrap());
    let text = VersionedText::new(7, "a".repeat(40_000));
    assert!(old.swap(None, &text).await.unwrap());
    assert_eq!(new.load(None).await.unwrap(), TextRead::Changed(Some(text.clone())));
    lock(&lab.0.values).retain(|key, _| !key.ends_with(":1"));
    assert_eq!(new.load(None).await.unwrap(), TextRead::Unchanged, "none is what it knew");
    let mut loads = 0;
    while old.load(Some(7)).await.unwrap() == TextRead::Unchanged {
        loads += 1;
    }
    assert!(loads < 60, "{loads}");
    assert!(old.swap(None, &text).await.unwrap() && !new.swap(None, &text).await.unwrap());
    assert_eq!(new.load(None).await.unwrap(), TextRead::Changed(Some(text.clone())));
    // The one that knows the text replaces it, whatever became of its parts.
    lock(&lab.0.values).retain(|key, _| !key.ends_with(":0"));
    let next = VersionedText::new(8, "b");
    assert!(!new.swap(Some(6), &next).await.unwrap() && new.swap(Some(7), &next).await.unwrap());
    assert_eq!(old.load(Some(7)).await.unwrap(), TextRead::Changed(Some(next)));
    assert_eq!(lock(&lab.0.values).len(), 1);
}

#[tokio::test]
async fn reports_of_processes_have_places_of_their_own() {
    let limiter = patient().build(Lab::default()).unwrap();
    let text = limiter.hooks().shared_text().unwrap();
    let (first, second) = (VersionedText::new(1, "first"), VersionedText::new(2, "second"));
    let put =
        async |place: usize, report: &VersionedText| text.put_report(place, report, Duration::from_secs(20)).await;
    assert!(put(3, &first).await.unwrap() && !put(3, &second).await.unwrap() && put(4, &second).await.unwrap());
    let again = VersionedText::new(1, "again");
    assert!(put(3, &again).await.unwrap());
    assert_eq!(text.reports().await.unwrap(), [again, second]);
}
