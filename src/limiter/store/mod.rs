//! A limiter over any store that can replace values by compare-and-swap.
//!
//! A store implements [`Store`], which has two methods. [`StoreLimiter`] does the rest: every algorithm, requests in
//! flight, sets that are charged all or nothing, refunds, blocks, meters, settlements, and quotas that change at run
//! time. The guide says [when to write a store, and when a limiter](crate::guide::writing_a_backend).
//!
//! A check is one [`swap`](Store::swap) when this process knows the key's current value, or when the key has no value.
//! The swap names the version of each value on which the decision is based. If another process has written since then,
//! the store changes nothing and returns the current values, and the limiter decides again on these values. Checks of
//! a key that come while a swap of that key is in flight share the next swap.
//!
//! # Stored values
//!
//! The key of a state is `prefix:1:h…:4:name`. Its parts are the prefix, the version of the format, the hash of the
//! caller's key in hexadecimal digits, the length of the policy's name, and that name. The key of a concurrency
//! limit has a `p` before the length. A value is at most 17 kB:
//!
//! | bytes | meaning |
//! |---|---|
//! | 1 | the version of the format, 1 |
//! | 1 | the number of earlier versions of the value, 0 to 4; plus 128 if these are all versions since the key had no value |
//! | 16 each | the earlier versions, the latest first |
//! | 2 | the length of the next field, little-endian |
//! | ≤ 512 | the quota that the value was written under, as text |
//! | the rest | the state. It is usually two numbers of 8 bytes, little-endian. For logs and sliding windows it is entries: the microseconds since the previous entry, and the entry's units, both with 7 bits in a byte, the lowest bits first. For concurrency limits it is rows |
//!
//! A row of a concurrency limit has 36 bytes: the process, its epoch, its units, the instant at
//! which the row lapses, and the number of its resets. Rows of processes with a request in line follow. Such a row
//! has the process's number with the highest bit set, the instant since which the request waits, its cost, the
//! instant at which the row lapses, and the request's number.
//!
//! If a value does not have this form, or its quota could not have written it, the check fails with an
//! error of kind [`Foreign`](crate::limiter::StoreErrorKind::Foreign). The value stays in the store
//! until the key is reset.

mod backend;
mod builder;
mod calls;
mod error;
mod known;
mod limiter;
#[cfg(feature = "postgres")]
pub mod postgres;
mod random;
mod shared_text;
mod silence;
mod store_time;
mod swapper;
#[cfg(test)]
mod tests;
mod value;
mod working_copy;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use crate::base::time::Timestamp;

pub use builder::StoreLimiterBuilder;
pub use error::StoreError;
pub use limiter::{StoreFuture, StoreLimiter};

/// A store of values that can be replaced if they have not changed.
///
/// # Contract
///
/// * **All or nothing.** [`swap`](Self::swap) makes all changes if every value is the expected one, and none
///   otherwise, in one atomic step. A store that cannot swap several keys together returns an error of kind
///   [`Misconfigured`](crate::limiter::StoreErrorKind::Misconfigured) for more than one change. A store that cannot
///   lock what is missing may have looked earlier for a value that is [kept](Then::Keep) and expected to be missing.
///   Then a charge of cost 0 for a key without a state is decided at an earlier instant than the other charges of its
///   set.
/// * **Current.** A load that begins after a swap has returned sees the values that the swap wrote, in each
///   process. The answer to a swap that changed nothing has equally current values.
/// * **Expiry.** The store may forget a value after its time to live, and not before.
/// * **Lost answers.** A swap that returns an error may have been made or not, and may even be made later. If the error
///   is [`Unavailable`](crate::limiter::StoreErrorKind::Unavailable), because the connection was cut or there is no
///   connection, the limiter sends the swap again and finds out whether the first swap was made. A store must not
///   repeat a swap that may have been made.
/// * **Cancel safety.** A dropped future may have made its swap or not, but never a part of it.
/// * **Several swaps in one call.** [`swap_each`](Self::swap_each) makes or refuses each swap in the same way
///   as `swap` would for that swap alone. By default, `swap_each` calls `swap` for each swap. Implement `swap_each`
///   if one call costs the store less than many calls, for example because each transaction waits for a disk. In that
///   case, [`max_swaps`](Self::max_swaps) has to return the number of swaps that a call may have.
/// * **No waiting for each other.** The limiter may begin a future and then not poll it for a while. This future must
///   not make another call wait. So a store holds no lock across an `await`, and has a connection for each call, or one
///   connection that all calls share.
/// * **Time.** A call that has no answer by the deadline fails its checks. The limiter waits for the answer for up to
///   five seconds more, to notice that the store is not dead and to refund the charged units. Then it drops the call.
///   So a store needs no timeout of its own.
/// * The keys of a call are all different.
///
/// `conformance::check_store` checks this contract (feature `conformance`).
///
/// # Examples
///
/// A store in memory.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::{Arc, Mutex};
/// use tower_ratelimit::limiter::store::{
///     Change, Loaded, Store, StoreError, Swapped, Then, Value,
/// };
///
/// #[derive(Default)]
/// struct InMemory(Mutex<HashMap<Arc<str>, Value>>);
///
/// impl Store for InMemory {
///     async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
///         let values = self.0.lock().unwrap();
///         Ok(Loaded::new(keys.iter().map(|key| values.get(key).cloned()).collect()))
///     }
///
///     async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
///         let mut values = self.0.lock().unwrap();
///         let current: Vec<_> =
///             changes.iter().map(|change| values.get(&change.key).cloned()).collect();
///         if changes
///             .iter()
///             .zip(&current)
///             .any(|(change, value)| !change.expects(value.as_ref()))
///         {
///             return Ok(Swapped::conflict(current));
///         }
///         for change in changes {
///             match &change.then {
///                 Then::Keep => {}
///                 Then::Put(value, _time_to_live) => {
///                     drop(values.insert(change.key.clone(), value.clone()))
///                 }
///                 Then::Delete => drop(values.remove(&change.key)),
///             }
///         }
///         Ok(Swapped::done())
///     }
/// }
/// ```
///
/// If your store can compare only its own revisions, as etcd does, keep the version in a separate
/// key, and compare that key's value in the same transaction. If the version is not in a separate
/// key, each swap has to read the revision first, and costs a round trip more.
pub trait Store: Send + Sync + 'static {
    /// Returns the value of each key, in order.
    ///
    /// # Errors
    /// Returns an error if the store did not answer. The error's kind says what to do about it.
    fn load(&self, keys: &[Arc<str>]) -> impl Future<Output = Result<Loaded, StoreError>> + Send;

    /// Makes all changes if each value is the [expected](Change::expects) one, and otherwise none.
    /// There are at most 64 changes, unless one request has more charges.
    ///
    /// # Errors
    /// Returns an error if the store did not answer. If the error's kind is
    /// [`Unavailable`](crate::limiter::StoreErrorKind::Unavailable), the limiter sends the same
    /// changes again within the deadline. No call is sent again after a timeout.
    fn swap(&self, changes: &[Change]) -> impl Future<Output = Result<Swapped, StoreError>> + Send;

    /// Makes or refuses several swaps, each of which is all-or-nothing, and returns the answer to each, in order. There
    /// are at most [`max_swaps`](Self::max_swaps) swaps, and no key is in two of these swaps. The store may
    /// [skip](Swapped::skipped) a swap that would keep the other swaps waiting. The limiter then sends that swap with
    /// [`swap`](Self::swap).
    ///
    /// By default, this method calls `swap` for all swaps at the same time.
    ///
    /// # Errors
    /// Each answer can be an error of [`swap`](Self::swap).
    fn swap_each(&self, swaps: &[&[Change]]) -> impl Future<Output = Vec<Result<Swapped, StoreError>>> + Send {
        join_all(swaps.iter().map(|changes| self.swap(changes)))
    }

    /// Returns how many swaps one call of [`swap_each`](Self::swap_each) takes. The default is 1: then
    /// the limiter calls only [`swap`](Self::swap).
    fn max_swaps(&self) -> usize {
        1
    }

    /// Returns how many calls the store carries at a time. Further calls would wait at the store, so the limiter
    /// collects their swaps for the next call instead. By default there is no maximum.
    fn max_calls(&self) -> usize {
        usize::MAX
    }

    /// Returns the name of the store in events and errors, such as its host and port. By default `the store`.
    fn name(&self) -> String {
        "the store".to_owned()
    }
}

/// The version of a value: 128 random bits, new with each write. The limiter makes the version. The store keeps the
/// version with the value, and compares it with the expected version.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Version([u8; 16]);

impl Version {
    /// Makes the version that was stored as these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the version as bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// A stored value and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Value {
    /// The version, which is new with each write.
    pub version: Version,
    /// The value, at most 17 kB.
    pub bytes: Arc<[u8]>,
}

impl Value {
    /// Makes a value.
    #[must_use]
    pub fn new(version: Version, bytes: impl Into<Arc<[u8]>>) -> Self {
        Self { version, bytes: bytes.into() }
    }
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// The key: printable text of at most 320 bytes.
    pub key: Arc<str>,
    /// The version that the value must have. `None` if there must be no value.
    pub expect: Option<Version>,
    /// The change of the value if all values are the expected ones.
    pub then: Then,
}

impl Change {
    /// Makes a change.
    #[must_use]
    pub fn new(key: impl Into<Arc<str>>, expect: Option<Version>, then: Then) -> Self {
        Self { key: key.into(), expect, then }
    }

    /// Returns whether the current value of the key is the expected one.
    #[must_use]
    pub fn expects(&self, current: Option<&Value>) -> bool {
        current.map(|value| value.version) == self.expect
    }
}

/// The change that a swap makes to a value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store that ignored an unknown change would lose the change")]
pub enum Then {
    /// Keeps the value. The decision depends on the value, so the value must have the expected version.
    Keep,
    /// Replaces the value with this value, for at least the given time: from a second to some years. The value may stay
    /// longer, so keys may share an expiry.
    Put(Value, Duration),
    /// The value is removed.
    Delete,
}

/// The answer to a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    values: Vec<Option<Value>>,
    now: Option<Timestamp>,
}

impl Loaded {
    /// Makes the answer from the values, in the order of the keys.
    #[must_use]
    pub fn new(values: Vec<Option<Value>>) -> Self {
        Self { values, now: None }
    }

    /// Adds the store's time, which then is the limiter's time. Without the store's time, the limiter uses the clock
    /// of its process.
    ///
    /// Either each answer of a store has a time, or no answer has a time. All times are readings of one clock. The
    /// times should be exact to some milliseconds, because an error of the time is an error of the decisions. If a
    /// time is off by more than 100 milliseconds, a check can take two more swaps.
    #[must_use]
    pub fn at(self, now: Timestamp) -> Self {
        Self { now: Some(now), ..self }
    }

    /// Returns the store's time, if the store reports its time.
    #[must_use]
    pub fn now(&self) -> Option<Timestamp> {
        self.now
    }

    /// Returns the values, in the order of the keys.
    #[must_use]
    pub fn values(&self) -> &[Option<Value>] {
        &self.values
    }
}

/// The answer to a swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swapped {
    result: Result<(), NotSwapped>,
    now: Option<Timestamp>,
}

/// Why nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NotSwapped {
    /// A value is not the expected one. These are the current values.
    Conflict(Vec<Option<Value>>),
    /// The swap was skipped, and has to be sent alone.
    Skipped,
}

impl Swapped {
    /// Makes the answer that all changes were made.
    #[must_use]
    pub fn done() -> Self {
        Self { result: Ok(()), now: None }
    }

    /// Makes the answer that nothing was changed, because a value is not the expected one.
    /// `current` are the values of all keys, in the order of the changes.
    #[must_use]
    pub fn conflict(current: Vec<Option<Value>>) -> Self {
        Self { result: Err(NotSwapped::Conflict(current)), now: None }
    }

    /// Makes the answer that nothing was changed, because the swap would have kept the other swaps
    /// of its call waiting. Only [`Store::swap_each`] may answer so.
    #[must_use]
    pub fn skipped() -> Self {
        Self { result: Err(NotSwapped::Skipped), now: None }
    }

    /// Adds the store's time, as [`Loaded::at`] does.
    #[must_use]
    pub fn at(self, now: Timestamp) -> Self {
        Self { now: Some(now), ..self }
    }

    /// Returns the store's time, if the store reports its time.
    #[must_use]
    pub fn now(&self) -> Option<Timestamp> {
        self.now
    }

    /// Returns whether the changes were made.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.result.is_ok()
    }

    /// Returns whether the swap was skipped, and has to be sent alone.
    #[must_use]
    pub fn is_skipped(&self) -> bool {
        self.result == Err(NotSwapped::Skipped)
    }

    /// Returns the current values if a value was not the expected one, in the order of the changes.
    #[must_use]
    pub fn current(&self) -> Option<&[Option<Value>]> {
        match &self.result {
            Err(NotSwapped::Conflict(current)) => Some(current),
            Ok(()) | Err(NotSwapped::Skipped) => None,
        }
    }
}
