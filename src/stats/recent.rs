//! The last refusals, in bounded memory.
//!
//! Refusals are stored in sets of sixteen entries. A key's fingerprint selects its set, in which a new refusal replaces
//! the oldest refusal. Therefore a client that is refused all the time displaces no refusals of clients whose keys are
//! in other sets.
//!
//! Each entry has its own lock. A writer only tries to lock an entry, so a refusal never waits for a reader. Requests
//! that pass are not stored, and take no lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::HeaderName;
use ipnet::IpNet;

use super::names::{KeyNames, KnownKey, cut, short_fingerprint};
use crate::base::head::Head;
use crate::base::sync::{Mutex, lock, try_lock};
use crate::base::time::Timestamp;
use crate::key::{Key, original_uri};
use crate::outcome::{Observed, OutcomeKind, PolicyStatus};

const WAYS: usize = 16;

/// The maximum number of refusals that are stored.
const REFUSALS_MAX: usize = 10_000;

/// The maximum length of the method and the path together, in bytes.
const REQUEST_MAX: usize = 256;

/// The maximum length of a request's id, in bytes.
const ID_MAX: usize = 128;

/// The settings of recent refusals.
#[derive(Default)]
pub(super) struct RecentSettings {
    pub(super) max: usize,
    pub(super) paths: bool,
    pub(super) request_id: Option<HeaderName>,
}

pub(super) struct Recent {
    setup: RecentSettings,
    sets: Box<[RecentSet]>,
}

#[derive(Default)]
struct RecentSet {
    /// The number of refusals that were written. This number modulo the number of entries is the index of the next
    /// entry.
    written: AtomicUsize,
    places: [Mutex<Option<RecentRefusal>>; WAYS],
}

impl Recent {
    /// Makes the storage of refusals, or returns `None` if no refusals are to be stored.
    pub(super) fn new(setup: RecentSettings) -> Option<Self> {
        let sets = setup.max.min(REFUSALS_MAX).div_ceil(WAYS);
        (sets > 0).then(|| Self { setup, sets: (0..sets).map(|_| RecentSet::default()).collect() })
    }

    /// Stores a request if it was refused.
    pub(super) fn note(&self, names: &KeyNames, at: Timestamp, observed: &Observed<'_>) {
        let outcome = observed.outcome();
        let is_refused = match outcome.kind() {
            OutcomeKind::Abandoned => false,
            OutcomeKind::Overflowed => true,
            kind => !kind.passed(),
        };
        if !is_refused {
            return;
        }
        let statuses = outcome.policies();
        let status = outcome.binding().filter(|status| status.refuses());
        let place = status.and_then(|status| statuses.iter().position(|other| std::ptr::eq(other, status)));
        let key = place.and_then(|at| observed.key_of_status(at));
        let fingerprint = key.map(|key| names.fingerprint(key));
        let request = observed.head();
        let refusal = RecentRefusal {
            at,
            outcome: outcome.kind(),
            status: status.cloned(),
            fingerprint,
            known: key.map(|key| names.known(key)).unwrap_or_default(),
            request: self.setup.paths.then(|| line(request)),
            request_id: self.setup.request_id.as_ref().and_then(|header| id(request, header)),
            network: observed.denied_network(),
        };
        self.write(fingerprint.unwrap_or(0), refusal);
    }

    fn write(&self, fingerprint: u64, refusal: RecentRefusal) {
        let Some(set) = self.sets.get(fingerprint as usize % self.sets.len()) else { return }; // any bits do
        // The first try fails only while a reader or writer holds the oldest entry. A reader goes from newer to older
        // entries, and holds one entry at a time. So it does not hold the entry of the second try, unless sixteen
        // refusals are written between the two tries.
        for _ in 0..2 {
            let next = set.written.fetch_add(1, Ordering::Relaxed) % WAYS;
            if let Some(mut place) = set.places.get(next).and_then(try_lock) {
                let former = place.replace(refusal);
                drop(place);
                drop(former); // not under the lock: it frees memory
                return;
            }
        }
    }

    /// Returns the refusals, the latest first.
    pub(super) fn read(&self) -> Vec<RecentRefusal> {
        let mut all = Vec::new();
        for set in &self.sets {
            let written = set.written.load(Ordering::Relaxed);
            let latest_first = (1..=WAYS).filter_map(|back| set.places.get(written.wrapping_sub(back) % WAYS));
            all.extend(latest_first.filter_map(|place| lock(place).clone()));
        }
        all.sort_by_key(|refusal| std::cmp::Reverse(refusal.at)); // stable: within a set the order is that of writing
        all
    }
}

/// Returns the method and the path of a request.
fn line(request: &Head<'_>) -> Box<str> {
    let (method, path) = (request.method.as_str(), original_uri(request).path());
    let method = cut(method, REQUEST_MAX);
    let path = cut(path, REQUEST_MAX.saturating_sub(method.len() + 1));
    format!("{method} {path}").into()
}

/// Returns the id of a request, with its control characters replaced, because they could move a terminal's cursor.
fn id(request: &Head<'_>, header: &HeaderName) -> Option<Box<str>> {
    let value = request.headers.get(header)?.as_bytes();
    let text = String::from_utf8_lossy(value.get(..ID_MAX).unwrap_or(value)).replace(char::is_control, "\u{fffd}");
    Some(cut(&text, ID_MAX)).filter(|text| !text.is_empty()).map(Into::into)
}

/// A recently refused request, which
/// [`max_recent_refusals`](super::StatsBuilder::max_recent_refusals) keeps.
#[derive(Clone)]
pub struct RecentRefusal {
    at: Timestamp,
    outcome: OutcomeKind,
    status: Option<PolicyStatus>,
    fingerprint: Option<u64>,
    known: KnownKey,
    request: Option<Box<str>>,
    request_id: Option<Box<str>>,
    network: Option<IpNet>,
}

impl RecentRefusal {
    /// Returns the full fingerprint of the key, and also the key's name and the key itself if these
    /// are stored.
    pub(super) fn known(&self) -> Option<(u64, &KnownKey)> {
        Some((self.fingerprint?, &self.known)).filter(|(_, known)| !known.is_none())
    }

    /// Returns the time at which the request was refused, on the clock of the statistics.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Returns what the middleware did with the request.
    #[must_use]
    pub fn outcome(&self) -> OutcomeKind {
        self.outcome
    }

    /// Returns the status of the policy that refused the request: its name and quota, the cost of the request, the
    /// remaining units, and the wait. If several policies refused the request, returns the status of the policy with
    /// the longest wait.
    ///
    /// Returns `None` if no policy refused the request: an access list denied the request, the request had no key, or
    /// the limiter failed.
    #[must_use]
    pub fn status(&self) -> Option<&PolicyStatus> {
        self.status.as_ref()
    }

    /// Returns the [fingerprint](super::TopKey::fingerprint) of the key that was charged under this policy.
    #[must_use]
    pub fn fingerprint(&self) -> Option<String> {
        self.fingerprint.map(short_fingerprint)
    }

    /// Returns the name that [`reveal`](super::StatsBuilder::reveal) gave to the key, if it gave a name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.known.name.as_deref()
    }

    /// Returns the method and the path, such as `GET /posts`, if
    /// [`keep_paths`](super::StatsBuilder::keep_paths) is on.
    #[must_use]
    pub fn request(&self) -> Option<&str> {
        self.request.as_deref()
    }

    /// Returns the id of the request, if it had the header that [`request_id`](super::StatsBuilder::request_id) names.
    #[must_use]
    pub fn request_id(&self) -> Option<&str> {
        self.request_id.as_deref()
    }

    /// Returns the network, such as `203.0.113.0/24`, if an access list denied the request because it denies this
    /// network.
    #[must_use]
    pub fn network(&self) -> Option<String> {
        self.network.map(|network| network.to_string())
    }

    /// Returns whether the key has this fingerprint, in its full length.
    pub(crate) fn is_of(&self, fingerprint: u64) -> bool {
        self.fingerprint == Some(fingerprint)
    }

    /// Returns the full fingerprint and the key, if the key is stored.
    pub(crate) fn kept(&self) -> Option<(u64, &Arc<Key>)> {
        Some((self.fingerprint?, self.known.key.as_ref()?))
    }
}

impl fmt::Debug for RecentRefusal {
    /// Leaves out the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecentRefusal")
            .field("at", &self.at)
            .field("outcome", &self.outcome)
            .field("status", &self.status)
            .field("fingerprint", &self.fingerprint())
            .field("name", &self.known.name)
            .field("request", &self.request)
            .field("request_id", &self.request_id)
            .field("network", &self.network)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::Request;

    use super::*;
    use crate::base::wait::Wait;
    use crate::decision::ChargeDecision;
    use crate::mode::Mode;
    use crate::outcome::Outcome;
    use crate::policy::Policy;
    use crate::quota::Quota;

    fn recent(max: usize) -> Recent {
        Recent::new(RecentSettings { max, ..RecentSettings::default() }).unwrap()
    }

    /// Refuses requests of numbered keys.
    struct Refuser(Policy, Outcome);

    impl Refuser {
        fn new() -> Self {
            let policy = Policy::new("client", Quota::per_minute(5)).unwrap();
            let decision = ChargeDecision::denied(5, 2, Wait::After(Duration::from_secs(9)));
            let status = PolicyStatus {
                policy: policy.clone(),
                cost: 3,
                mode: Mode::Enforce,
                refuses: true,
                near: false,
                taken: 0,
                decision,
            };
            Self(policy, Outcome::new(OutcomeKind::Limited, [status].into_iter().collect()))
        }

        fn refuse(&self, recent: &Recent, names: &KeyNames, at: u64, key: u64) {
            let (request, key) = (Request::new(()), Key::of(key).unwrap());
            let head = Head::from(&request);
            let observed = Observed::new(&self.1, &head, [(&self.0, &key)].into_iter());
            recent.note(names, Timestamp::from_micros(at), &observed);
        }
    }

    fn times(recent: &Recent) -> Vec<u64> {
        recent.read().iter().map(|refusal| refusal.at.as_micros()).collect()
    }

    #[test]
    fn million_refusals_are_bounded_and_allocate_nothing() {
        let (refuser, recent, names) = (Refuser::new(), recent(100), KeyNames::new(None));
        let allocated = allocation_counter::measure(|| {
            (0..1_000_000).for_each(|n| refuser.refuse(&recent, &names, n, n));
        });
        assert_eq!(allocated.count_total, 0);
        let times = times(&recent);
        assert_eq!(times.len(), 112, "a multiple of 16");
        assert!(times.is_sorted_by(|a, b| a >= b) && times[0] == 999_999, "{times:?}");
        assert!(size_of::<RecentRefusal>() <= 300, "{}", size_of::<RecentRefusal>());
    }

    #[test]
    fn refusals_of_one_key_keep_those_of_other_keys() {
        let (refuser, recent, names) = (Refuser::new(), recent(1_000), KeyNames::new(None));
        let set = |key| names.fingerprint(&Key::of(key).unwrap()) as usize % recent.sets.len();
        let quiet = (2..).find(|key| set(*key) != set(1)).unwrap();
        refuser.refuse(&recent, &names, 7, quiet);
        (100..10_100).for_each(|at| refuser.refuse(&recent, &names, at, 1));
        let expected: Vec<u64> = (10_084..10_100).rev().chain([7]).collect();
        assert_eq!(times(&recent), expected);
    }

    #[test]
    fn refusals_are_kept_while_they_are_read() {
        let (recent, names) = (recent(16), KeyNames::new(None));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (recent, names) = (&recent, &names);
                scope.spawn(move || {
                    let refuser = Refuser::new();
                    (0..20_000).for_each(|at| refuser.refuse(recent, names, at, thread));
                });
            }
            while recent.sets[0].written.load(Ordering::Relaxed) < 80_000 {
                assert!(recent.read().len() <= WAYS);
            }
        });
        assert_eq!(times(&recent).len(), WAYS);
    }

    #[test]
    fn texts_of_a_request_are_cut_and_have_no_controls() {
        let header = HeaderName::from_static("x-request-id");
        let of = |value: &[u8]| {
            let request = Request::get("/").header("x-request-id", value).body(()).unwrap();
            id(&Head::from(&request), &header).map(String::from)
        };
        assert_eq!(of(b"4bf92f\t3577").as_deref(), Some("4bf92f\u{fffd}3577"));
        assert_eq!((of(b""), of(&[0xc3; 500]).unwrap().len()), (None, 126), "of whole characters");
        let request = Request::get(format!("/{}?token=1", "ab".repeat(500))).body(()).unwrap();
        let line = line(&Head::from(&request));
        assert!(line.starts_with("GET /abab") && line.len() == REQUEST_MAX, "{line}");
        let method = http::Method::from_bytes("M".repeat(1_000).as_bytes()).unwrap();
        let request = Request::builder().method(method).body(()).unwrap();
        assert!(super::line(&Head::from(&request)).len() <= REQUEST_MAX + 1);
    }
}
