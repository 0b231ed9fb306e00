//! The cases of the contract of [`Store`], for stores that users write.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::Location;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use super::FailuresKind;
use crate::base::random;
use crate::error::debug_as_text;
use crate::limiter::store::{Change, Store, StoreError, Swapped, Then, Value, Version};

/// The time to live of the values of the suite.
const LIVES: Duration = Duration::from_secs(600);

/// The longest time that a call may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The largest value that the limiter stores, rounded up.
const LARGEST: usize = 17 * 1_024;

/// The number of concurrent swaps of one key, and how often they are repeated.
const RIVALS: usize = 8;
const ROUNDS: usize = 20;

/// Checks that a store keeps the contract of [`Store`]: versions, conflicting swaps, swaps of several keys, kept and
/// removed values, repeated swaps, keys that look alike, concurrent swaps, and calls that are dropped or not polled.
/// Expiry is not checked.
///
/// The function writes keys that begin with `conformance:` and a number that is new in each call. Each of these keys
/// has a time to live of ten minutes. So the function may be called again on the same store, also concurrently.
///
/// # Errors
/// Returns the promises that were not kept.
pub async fn check_store<S: Store>(store: &S) -> Result<(), StoreFailures> {
    let bench = Bench { store, call: random::secret(), versions: AtomicU64::new(1) };
    let mut failures = Vec::new();
    macro_rules! cases {
        ($($promise:literal: $case:ident,)+) => {
            $(if let Err(found) = bench.$case().await {
                failures.push(StoreFailure { case: stringify!($case), promise: $promise, found });
            })+
        };
    }
    cases! {
        "a value that was put is loaded with its version, byte for byte": values_are_kept,
        "a swap that expects a wrong value changes nothing and returns the current values": conflicts,
        "a swap of several keys is all or nothing, whichever key has changed": all_or_nothing,
        "a swap that only keeps a value succeeds if the value is the expected one, and does not change it": keep,
        "a value is removed only if it is the expected value": delete,
        "a swap that is sent again changes nothing, and returns the values that the first swap wrote": sent_again,
        "values are returned in the order of the keys": order,
        "keys are different if they differ only in case, blanks, wildcards, or the last of 320 bytes": alike,
        "if several concurrent swaps expect the same version, one of them is made": rivals,
        "a swap whose future is dropped is made as a whole or not at all": dropped,
        "each swap of a call is made or refused independently, and the answers are in the order of the swaps": each,
        "if several concurrent calls have several swaps each, at most one swap of each key is made": rivals_in_calls,
        "a call whose future is not polled for a while keeps no other call waiting": held,
        "the store's time does not step back": time,
    }
    if failures.is_empty() { Ok(()) } else { Err(StoreFailures(failures)) }
}

/// The promises that a store did not keep.
#[derive(Clone)]
pub struct StoreFailures(Vec<StoreFailure>);

impl StoreFailures {
    /// Returns the kind of the failures: [`BrokenPromises`](FailuresKind::BrokenPromises).
    #[must_use]
    pub fn kind(&self) -> FailuresKind {
        FailuresKind::BrokenPromises
    }
}

#[derive(Clone, Debug)]
struct StoreFailure {
    case: &'static str,
    promise: &'static str,
    found: String,
}

debug_as_text!(StoreFailures);

impl fmt::Display for StoreFailures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} promises of tower_ratelimit::limiter::store::Store were not kept:", self.0.len())?;
        self.0.iter().try_for_each(|StoreFailure { case, promise, found }| {
            writeln!(f, "\n{case}\n  promise: {promise}\n  found:   {found}")
        })
    }
}

impl std::error::Error for StoreFailures {}

struct Bench<'a, S> {
    store: &'a S,
    /// A random number that distinguishes this call of `check_store` from other calls.
    call: u64,
    versions: AtomicU64,
}

type CaseResult = Result<(), String>;

#[track_caller]
fn ensure(kept: bool, found: impl fmt::Debug) -> CaseResult {
    if kept { Ok(()) } else { Err(format!("{found:?} ({})", Location::caller())) }
}

fn failed(error: &StoreError) -> String {
    format!("the store failed: {}", crate::error::WithSources(error))
}

fn put(value: &Value) -> Then {
    Then::Put(value.clone(), LIVES)
}

impl<S: Store> Bench<'_, S> {
    fn key(&self, name: &str) -> Arc<str> {
        format!("conformance:{:016x}:{name}", self.call).into()
    }

    /// Returns a value with a new version.
    fn value(&self, bytes: &[u8]) -> Value {
        let number = self.versions.fetch_add(1, Ordering::Relaxed);
        let mut version = [0xa5; 16];
        version[..8].copy_from_slice(&number.to_be_bytes());
        Value::new(Version::from_bytes(version), bytes)
    }

    async fn load(&self, keys: &[&str]) -> Result<Vec<Option<Value>>, String> {
        let keys: Vec<Arc<str>> = keys.iter().map(|name| self.key(name)).collect();
        let loaded = self.store.load(&keys).await.map_err(|error| failed(&error))?;
        ensure(loaded.values().len() == keys.len(), loaded.values())?;
        Ok(loaded.values().to_vec())
    }

    async fn swap(&self, changes: &[(&str, Option<&Value>, Then)]) -> Result<Swapped, String> {
        let changes = self.changes(changes);
        let swapped = self.store.swap(&changes).await.map_err(|error| failed(&error))?;
        ensure(swapped.current().is_none_or(|current| current.len() == changes.len()), &swapped)?;
        Ok(swapped)
    }

    fn changes(&self, changes: &[(&str, Option<&Value>, Then)]) -> Vec<Change> {
        let change = |(name, expect, then): &(&str, Option<&Value>, Then)| {
            Change::new(self.key(name), expect.map(|value| value.version), then.clone())
        };
        changes.iter().map(change).collect()
    }

    /// Makes a swap that must succeed.
    async fn must(&self, changes: &[(&str, Option<&Value>, Then)]) -> CaseResult {
        let swapped = self.swap(changes).await?;
        ensure(swapped.is_done(), swapped)
    }

    /// Makes a swap that must change nothing, and that must return the values `current`.
    async fn must_not(&self, changes: &[(&str, Option<&Value>, Then)], current: &[Option<&Value>]) -> CaseResult {
        let swapped = self.swap(changes).await?;
        let current: Vec<Option<Value>> = current.iter().map(|value| value.cloned()).collect();
        ensure(swapped.current() == Some(&current), (&swapped, "expected", &current))?;
        let names: Vec<&str> = changes.iter().map(|(name, _, _)| *name).collect();
        let loaded = self.load(&names).await?;
        ensure(loaded == current, (loaded, "expected", &current))
    }

    async fn values_are_kept(&self) -> CaseResult {
        let largest: Vec<u8> = (0..LARGEST).map(|at| (at % 251) as u8).collect();
        let all: Vec<u8> = (0..=255).collect();
        let values = [self.value(&[]), self.value(&all), self.value(&largest)];
        ensure(self.load(&["kept"]).await? == [None], "the key has a value already")?;
        let mut before = None;
        for value in &values {
            self.must(&[("kept", before, put(value))]).await?;
            let loaded = self.load(&["kept"]).await?;
            ensure(loaded == [Some(value.clone())], loaded)?;
            before = Some(value);
        }
        Ok(())
    }

    async fn conflicts(&self) -> CaseResult {
        let [first, second, third] = [b"first", b"secnd", b"third"].map(|bytes| self.value(bytes));
        self.must_not(&[("conflicts", Some(&first), put(&second))], &[None]).await?;
        self.must(&[("conflicts", None, put(&first))]).await?;
        self.must_not(&[("conflicts", None, put(&second))], &[Some(&first)]).await?;
        self.must(&[("conflicts", Some(&first), put(&second))]).await?;
        self.must_not(&[("conflicts", Some(&first), put(&third))], &[Some(&second)]).await
    }

    async fn all_or_nothing(&self) -> CaseResult {
        let [one, two, new] = [b"1", b"2", b"3"].map(|bytes| self.value(bytes));
        self.must(&[("set1", None, put(&one)), ("set2", None, put(&two))]).await?;
        let stale = self.value(b"0");
        let current = [Some(&one), Some(&two), None];
        for wrong in 0..3 {
            let mut expected = current;
            expected[wrong] = if wrong == 1 { None } else { Some(&stale) };
            let names = ["set1", "set2", "set3"];
            let changes = [0, 1, 2].map(|at| (names[at], expected[at], put(&new)));
            self.must_not(&changes, &current).await?;
            let removing =
                [0, 1, 2].map(|at| (names[at], expected[at], if at == 2 { put(&new) } else { Then::Delete }));
            self.must_not(&removing, &current).await?;
        }
        Ok(())
    }

    async fn keep(&self) -> CaseResult {
        let [one, two, new] = [b"1", b"2", b"3"].map(|bytes| self.value(bytes));
        self.must(&[("keep1", None, put(&one))]).await?;
        self.must(&[("keep1", Some(&one), Then::Keep), ("keep2", None, put(&two))]).await?;
        let loaded = self.load(&["keep1", "keep2"]).await?;
        ensure(loaded == [Some(one.clone()), Some(two.clone())], loaded)?;
        let stale = self.value(b"0");
        let current = [Some(&one), Some(&two)];
        self.must_not(&[("keep1", Some(&stale), Then::Keep), ("keep2", Some(&two), put(&new))], &current).await?;
        self.must_not(&[("keep1", None, Then::Keep), ("keep2", Some(&two), put(&new))], &current).await?;
        self.must_not(&[("keep3", Some(&stale), Then::Keep), ("keep2", Some(&two), put(&new))], &[None, Some(&two)])
            .await?;
        self.must(&[("keep3", None, Then::Keep), ("keep2", Some(&two), put(&new))]).await?;
        ensure(self.load(&["keep3"]).await? == [None], "a swap that only keeps a key gave it a value")
    }

    async fn delete(&self) -> CaseResult {
        let [one, two] = [b"1", b"2"].map(|bytes| self.value(bytes));
        self.must(&[("gone", None, put(&one))]).await?;
        self.must_not(&[("gone", Some(&two), Then::Delete)], &[Some(&one)]).await?;
        self.must(&[("gone", Some(&one), Then::Delete)]).await?;
        self.must_not(&[("gone", Some(&one), Then::Delete)], &[None]).await?;
        self.must(&[("gone", None, put(&two))]).await?;
        // A value that was removed and written again has a new version.
        self.must_not(&[("gone", Some(&one), Then::Delete)], &[Some(&two)]).await
    }

    async fn sent_again(&self) -> CaseResult {
        let [one, two] = [b"1", b"2"].map(|bytes| self.value(bytes));
        self.must(&[("again", None, put(&one))]).await?;
        self.must_not(&[("again", None, put(&one))], &[Some(&one)]).await?;
        self.must(&[("again", Some(&one), put(&two))]).await?;
        self.must_not(&[("again", Some(&one), put(&two))], &[Some(&two)]).await
    }

    async fn order(&self) -> CaseResult {
        let names: Vec<String> = (0..64).map(|number| format!("order{}", number * 37 % 64)).collect();
        let values: Vec<Value> = names.iter().map(|name| self.value(name.as_bytes())).collect();
        let changes: Vec<_> =
            names.iter().zip(&values).map(|(name, value)| (name.as_str(), None, put(value))).collect();
        self.must(&changes).await?;
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        names.insert(5, "nothing");
        names.reverse();
        for (name, value) in names.iter().zip(self.load(&names).await?) {
            let expected = if *name == "nothing" { None } else { Some(name.as_bytes()) };
            ensure(value.as_ref().map(|value| &*value.bytes) == expected, (name, value))?;
        }
        Ok(())
    }

    async fn alike(&self) -> CaseResult {
        let long = "k".repeat(320 - self.key("").len() - 1);
        let long = ["a", "b"].map(|last| format!("{long}{last}"));
        let short = ["a", "A", "a ", " a", "a_", "a%", "a*", "a?", "a'", "a\"", "a\\", "a{}", "a:", "aa"];
        let names: Vec<&str> = short.into_iter().chain(long.iter().map(String::as_str)).collect();
        let values: Vec<Value> = names.iter().map(|name| self.value(name.as_bytes())).collect();
        for (name, value) in names.iter().zip(&values) {
            self.must(&[(name, None, put(value))]).await?;
        }
        for (name, value) in names.iter().zip(&values) {
            let loaded = self.load(&[name]).await?;
            ensure(loaded == [Some(value.clone())], (name, loaded))?;
        }
        Ok(())
    }

    async fn rivals(&self) -> CaseResult {
        let mut before: Option<Value> = None;
        for _ in 0..ROUNDS {
            let values: Vec<Value> = (0..RIVALS).map(|number| self.value(&[number as u8])).collect();
            let changes: Vec<_> =
                values.iter().map(|value| self.changes(&[("rivals", before.as_ref(), put(value))])).collect();
            let swaps = changes.iter().map(|changes| self.store.swap(changes));
            let mut made = Vec::new();
            for (value, swapped) in values.iter().zip(together(swaps).await) {
                if swapped.map_err(|error| failed(&error))?.is_done() {
                    made.push(value.clone());
                }
            }
            ensure(made.len() == 1, format!("{} of {RIVALS} swaps were made", made.len()))?;
            before = made.pop();
            let loaded = self.load(&["rivals"]).await?;
            ensure(loaded == [before.clone()], loaded)?;
        }
        Ok(())
    }

    /// Makes several swaps in as few calls as the store allows. A swap that the store skips is sent
    /// alone.
    async fn swap_each(&self, swaps: &[Vec<Change>]) -> Result<Vec<Swapped>, String> {
        let swaps: Vec<&[Change]> = swaps.iter().map(Vec::as_slice).collect();
        let mut answers = Vec::new();
        for swaps in swaps.chunks(self.store.max_swaps().max(1)) {
            let swapped = self.store.swap_each(swaps).await;
            ensure(swapped.len() == swaps.len(), &swapped)?;
            for (changes, swapped) in swaps.iter().zip(swapped) {
                let mut swapped = swapped.map_err(|error| failed(&error))?;
                if swapped.is_skipped() {
                    swapped = self.store.swap(changes).await.map_err(|error| failed(&error))?;
                }
                ensure(swapped.current().is_none_or(|current| current.len() == changes.len()), &swapped)?;
                answers.push(swapped);
            }
        }
        Ok(answers)
    }

    async fn each(&self) -> CaseResult {
        let [one, two, new, stale] = [b"1", b"2", b"3", b"0"].map(|bytes| self.value(bytes));
        self.must(&[("each1", None, put(&one)), ("each2", None, put(&two)), ("each3", None, put(&one))]).await?;
        self.must(&[("each4", None, put(&one)), ("each5", None, put(&two))]).await?;
        let is_timed = self.store.load(&[self.key("each1")]).await.map_err(|error| failed(&error))?.now().is_some();
        let swaps = [
            // A value is replaced.
            self.changes(&[("each1", Some(&one), put(&new))]),
            // The stored value is not the value that the swap expects.
            self.changes(&[("each2", Some(&stale), put(&new))]),
            // A swap of two keys writes a value of a new key, and replaces the value of the other key.
            self.changes(&[("each6", None, put(&new)), ("each3", Some(&one), put(&new))]),
            // A swap of two keys correctly expects no value of one key, and expects a wrong value of the other.
            self.changes(&[("each8", None, put(&new)), ("each4", Some(&stale), put(&new))]),
            // A value is deleted.
            self.changes(&[("each5", Some(&two), Then::Delete)]),
            // A value is new.
            self.changes(&[("each9", None, put(&new))]),
            // A swap of three keys writes two new values. It expects no value of the third key, and writes none.
            self.changes(&[("each12", None, put(&new)), ("each13", None, put(&new)), ("each14", None, Then::Keep)]),
            // The swap expects a value, but the key has no value.
            self.changes(&[("each15", Some(&stale), put(&new))]),
        ];
        let expected: [Option<&[Option<Value>]>; 8] =
            [None, Some(&[Some(two.clone())]), None, Some(&[None, Some(one.clone())]), None, None, None, Some(&[None])];
        let answers = self.swap_each(&swaps).await?;
        for (at, (answer, expected)) in answers.iter().zip(expected).enumerate() {
            ensure(answer.current() == expected && answer.is_done() == expected.is_none(), (at, answer))?;
            ensure(answer.now().is_some() == is_timed, (at, answer))?;
        }
        let again = self.swap_each(&swaps).await?;
        let made: Vec<bool> = again.iter().map(Swapped::is_done).collect();
        ensure(made == [false; 8], (made, "a call that was sent again changes nothing"))?;
        let names =
            ["each1", "each2", "each3", "each4", "each5", "each6", "each8", "each9", "each12", "each13", "each14"];
        let loaded = self.load(&names).await?;
        let (new, two) = (Some(new), Some(two));
        let current = [&new, &two, &new, &Some(one), &None, &new, &None, &new, &new, &new, &None];
        ensure(loaded.iter().eq(current), (&loaded, "expected", current))?;
        ensure(self.swap_each(&[]).await?.is_empty(), "no swaps have answers")?;
        // Replaces many values, one of which has changed since it was read.
        let names: Vec<String> = (0..40).map(|number| format!("many{}", number * 7 % 40)).collect();
        let [before, after] = [0, 1].map(|round| {
            let value = |name: &String| self.value(format!("{name}-{round}").as_bytes());
            names.iter().map(value).collect::<Vec<_>>()
        });
        let swaps = |from: Option<&[Value]>, to: &[Value]| -> Vec<Vec<Change>> {
            let swap = |at: usize| self.changes(&[(&names[at], from.map(|from| &from[at]), put(&to[at]))]);
            (0..names.len()).map(swap).collect()
        };
        let answers = self.swap_each(&swaps(None, &before)).await?;
        ensure(answers.iter().all(Swapped::is_done), answers)?;
        self.must(&[(&names[3], Some(&before[3]), put(&stale))]).await?;
        let answers = self.swap_each(&swaps(Some(&before), &after)).await?;
        for (at, answer) in answers.iter().enumerate() {
            let expected = (at == 3).then(|| vec![Some(stale.clone())]);
            ensure(answer.current() == expected.as_deref(), (at, answer))?;
        }
        Ok(())
    }

    async fn rivals_in_calls(&self) -> CaseResult {
        const KEYS: usize = 5;
        let count = KEYS.min(self.store.max_swaps().max(1));
        let names: Vec<String> = (0..count).map(|key| format!("calls{key}")).collect();
        let mut before: Vec<Option<Value>> = vec![None; count];
        for round in 0..ROUNDS {
            let values: Vec<Vec<Value>> =
                (0..RIVALS).map(|_| (0..count).map(|key| self.value(&[key as u8])).collect()).collect();
            // Each call names the keys in another order, and some swaps have two keys.
            let calls = (0..RIVALS).map(|rival| {
                let change = |at: usize| {
                    let key = (at + rival) % count;
                    (names[key].as_str(), before[key].as_ref(), put(&values[rival][key]))
                };
                let joint = if (rival + round) % 3 == 0 { count.min(2) } else { 1 };
                let mut swaps = vec![self.changes(&(0..joint).map(change).collect::<Vec<_>>())];
                swaps.extend((joint..count).map(|at| self.changes(&[change(at)])));
                swaps
            });
            let calls: Vec<Vec<Vec<Change>>> = calls.collect();
            let answers = together(calls.iter().map(|swaps| self.swap_each(swaps))).await;
            let mut made: Vec<Vec<Value>> = vec![Vec::new(); count];
            for (rival, (swaps, answers)) in calls.iter().zip(answers).enumerate() {
                for (changes, _) in swaps.iter().zip(answers?).filter(|(_, answer)| answer.is_done()) {
                    for change in changes {
                        let key = names.iter().position(|name| self.key(name) == change.key).unwrap_or_default();
                        made[key].push(values[rival][key].clone());
                    }
                }
            }
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let loaded = self.load(&names).await?;
            for (key, made) in made.iter().enumerate() {
                // Possibly no swap of a key is made, because a swap of two keys is also refused if another swap has
                // changed the second key.
                ensure(made.len() <= 1, format!("{} of {RIVALS} swaps of one key were made", made.len()))?;
                let expected = made.first().or(before[key].as_ref());
                ensure(loaded[key].as_ref() == expected, (&loaded[key], "expected", expected))?;
            }
            ensure(made.iter().any(|made| !made.is_empty()), "none of the rivals made a swap")?;
            before = loaded;
        }
        Ok(())
    }

    async fn dropped(&self) -> CaseResult {
        let mut before: [Option<Value>; 2] = [None, None];
        for polls in 0..ROUNDS {
            let values = [self.value(b"1"), self.value(b"2")];
            let changes = self.changes(&[
                ("dropped1", before[0].as_ref(), put(&values[0])),
                ("dropped2", before[1].as_ref(), put(&values[1])),
            ]);
            {
                let mut swap = pin!(self.store.swap(&changes));
                let mut left = polls % 4;
                poll_fn(|cx| {
                    let is_over = left == 0 || swap.as_mut().poll(cx).is_ready();
                    left = left.saturating_sub(1);
                    if is_over { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
            }
            // The dropped swap is made before the following swaps, after them, or never.
            let next = [self.value(b"3"), self.value(b"4")];
            let mut tries = 0;
            loop {
                tries += 1;
                ensure(tries <= ROUNDS, "no swap succeeds any more")?;
                let loaded = self.load(&["dropped1", "dropped2"]).await?;
                let is_made = [&loaded[0], &loaded[1]] == [&Some(values[0].clone()), &Some(values[1].clone())];
                ensure(is_made || loaded == before, loaded.clone())?;
                let changes =
                    [("dropped1", loaded[0].as_ref(), put(&next[0])), ("dropped2", loaded[1].as_ref(), put(&next[1]))];
                if self.swap(&changes).await?.is_done() {
                    break;
                }
            }
            before = next.map(Some);
        }
        Ok(())
    }

    async fn held(&self) -> CaseResult {
        for polls in 1..4 {
            let (held, other) = (format!("held{polls}"), format!("other{polls}"));
            let [one, two] = [b"1", b"2"].map(|bytes| self.value(bytes));
            let changes = self.changes(&[(&held, None, put(&one))]);
            let mut swap = pin!(self.store.swap(&changes));
            let mut swapped = None;
            for number in 0..polls {
                if swapped.is_none() {
                    swapped = poll_fn(|cx| match swap.as_mut().poll(cx) {
                        Poll::Ready(swapped) => Poll::Ready(Some(swapped)),
                        Poll::Pending => Poll::Ready(None),
                    })
                    .await;
                }
                // The store may go on with the swap between two polls, during these calls.
                let other = format!("{other}-{number}");
                let calls = async {
                    self.load(&[&held, &other]).await?;
                    self.must(&[(&other, None, put(&two))]).await
                };
                let waits = "a call waits for another call whose future is not polled: hold no lock across an await";
                within_patience(calls).await.unwrap_or_else(|| Err(waits.to_owned()))?;
            }
            let swapped = match swapped {
                Some(swapped) => swapped,
                None => swap.await,
            };
            ensure(swapped.map_err(|error| failed(&error))?.is_done(), "the swap was not made")?;
        }
        Ok(())
    }

    async fn time(&self) -> CaseResult {
        let mut last = None;
        for _ in 0..ROUNDS {
            let loaded = self.store.load(&[self.key("time")]).await.map_err(|error| failed(&error))?;
            let swapped = self.store.swap(&self.changes(&[("time", None, Then::Keep)])).await;
            let swapped = swapped.map_err(|error| failed(&error))?;
            for now in [loaded.now(), swapped.now()] {
                ensure(last.is_none() || now >= last, (last, "and then", now))?;
                last = now;
            }
        }
        Ok(())
    }
}

/// Returns the output of a future, or `None` if the future takes longer than [`PATIENCE`]. Outside of a Tokio
/// runtime the wait has no bound.
async fn within_patience<T>(calls: impl Future<Output = T>) -> Option<T> {
    if tokio::runtime::Handle::try_current().is_err() {
        return Some(calls.await);
    }
    tokio::time::timeout(PATIENCE, calls).await.ok()
}

/// Polls several futures concurrently, until each is ready.
async fn together<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<Pin<Box<F>>> = futures.map(Box::pin).collect();
    let mut outputs: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    poll_fn(|cx| {
        let mut is_ready = true;
        for (future, output) in running.iter_mut().zip(&mut outputs).filter(|(_, output)| output.is_none()) {
            match future.as_mut().poll(cx) {
                Poll::Ready(ready) => *output = Some(ready),
                Poll::Pending => is_ready = false,
            }
        }
        if is_ready { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}
