//! The operators of the page, the actions that they may take, and the actions that they have taken.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use http::StatusCode;
use http::request::Parts;

use super::action::{Done, OperatorAction};
use super::request::Wrong;
use super::target::LayerKeys;
use crate::base::head::Head;
use crate::base::keyed_hash::{Hash, KeyedHash};
use crate::base::sync::{Mutex, contained, lock};
use crate::base::time::Timestamp;
use crate::stats::{Stats, cut};

/// The time for which a token is valid.
pub(super) const OFFER_LASTS: Duration = Duration::from_secs(300);

/// The maximum number of bytes of all offers together. `OFFERS_MAX` is the maximum number of offers.
const OFFERS_BYTES_MAX: usize = 1 << 20;
const OFFERS_MAX: usize = 1_000;

/// The maximum number of actions that the page lists.
const DONE_MAX: usize = 100;

/// The maximum length of a typed key that is remembered, in bytes.
#[cfg(feature = "fleet")]
const TYPED_MAX: usize = 512;

/// The maximum length of an operator's name, in bytes.
const OPERATOR_MAX: usize = 128;

/// Returns the name of the operator who sent a request, or `None` if no operator sent it.
type Who = dyn Fn(&Head<'_>) -> Option<String> + Send + Sync;

/// The application's audit log.
type Audit = dyn Fn(&OperatorAction) + Send + Sync;

/// The operators of a page.
pub(super) struct Operators {
    who: Box<Who>,
    audit: Box<Audit>,
    /// The secret for tokens in this process, which is used if the processes do not share a secret.
    secret: u128,
    /// The source of the random numbers that make tokens differ.
    random: RandomState,
    /// The offers, the latest last.
    offers: Mutex<Offers>,
    /// The actions that were taken, the latest first.
    done: Mutex<VecDeque<OperatorAction>>,
    /// The keys that operators typed into settings and that may be mistyped, the latest last.
    #[cfg(feature = "fleet")]
    typed: Mutex<VecDeque<TypedKey>>,
}

/// A key that may be mistyped. Only the operator who typed it sees it, because keys may be secrets.
#[cfg(feature = "fleet")]
pub(super) struct TypedKey {
    operator: Box<str>,
    /// The name of the entry in forms.
    entry: String,
    text: Box<str>,
}

#[derive(Default)]
struct Offers {
    made: u64,
    open: VecDeque<Offer>,
    /// The tokens that were used, each with the time until which it would be valid.
    taken: VecDeque<(u128, Timestamp)>,
}

/// Keys that an operator has seen, and may act on once.
struct Offer {
    token: u128,
    operator: Box<str>,
    until: Timestamp,
    target: LayerKeys,
}

/// A token: the second until which it is valid, a random number, and a seal over the second, the number, the
/// operator and the keys.
#[derive(Clone, Copy)]
struct Token(u128);

impl Token {
    fn new(secret: u128, operator: &str, target: &LayerKeys, until: Timestamp, random: u32) -> Self {
        let head = (until.as_micros() / 1_000_000) << 32 | u64::from(random);
        Self(u128::from(head) << 64 | u128::from(seal(secret, head, operator, target)))
    }

    fn until(self) -> Timestamp {
        Timestamp::from_micros(((self.0 >> 96) as u64).saturating_mul(1_000_000))
    }

    /// Returns whether the token was made for this operator and these keys, with this secret.
    fn is_of(self, secret: u128, operator: &str, target: &LayerKeys) -> bool {
        self.0 as u64 == seal(secret, (self.0 >> 64) as u64, operator, target)
    }
}

/// Returns a number that nobody can compute without the secret.
fn seal(secret: u128, head: u64, operator: &str, target: &LayerKeys) -> u64 {
    let head = head.to_be_bytes();
    let held = target.held.iter().flat_map(|held| [held.policy.name().as_bytes(), held.key.as_bytes()]);
    let parts = [&head[..], operator.as_bytes(), target.title.as_bytes()].into_iter().chain(held);
    number_of(KeyedHash::new(secret.to_be_bytes()).hash_parts(parts))
}

/// Returns the first half of a hash as a number.
pub(super) fn number_of(hash: Hash) -> u64 {
    (u128::from_be_bytes(hash) >> 64) as u64
}

impl Operators {
    pub(super) fn new(
        who: impl Fn(&Head<'_>) -> Option<String> + Send + Sync + 'static,
        audit: impl Fn(&OperatorAction) + Send + Sync + 'static,
    ) -> Self {
        Self {
            who: Box::new(who),
            audit: Box::new(audit),
            secret: u128::from(RandomState::new().hash_one("secret")) << 64
                | u128::from(RandomState::new().hash_one("secret")),
            random: RandomState::new(),
            offers: Mutex::default(),
            done: Mutex::default(),
            #[cfg(feature = "fleet")]
            typed: Mutex::default(),
        }
    }

    /// Returns the name of the operator who sent a request, without control characters.
    pub(super) fn who(&self, request: &Parts) -> Option<Box<str>> {
        let name = (self.who)(&request.into())?.replace(char::is_control, "\u{fffd}");
        let name = cut(&name, OPERATOR_MAX);
        (!name.trim().is_empty()).then(|| name.into())
    }

    /// Allows an operator to act on these keys once. Returns the token for the operator's action. `secret` is the
    /// secret that all processes share, if there is one.
    pub(super) fn offer(&self, secret: Option<u128>, operator: &str, target: LayerKeys, now: Timestamp) -> String {
        let mut offers = lock(&self.offers);
        offers.made = offers.made.wrapping_add(1);
        let random = self.random.hash_one(offers.made) as u32; // a part of it
        let until = now.saturating_add(OFFER_LASTS);
        let token = Token::new(secret.unwrap_or(self.secret), operator, &target, until, random).0;
        offers.open.push_back(Offer { token, operator: operator.into(), until, target });
        let mut bytes: usize = offers.open.iter().map(|offer| offer.target.bytes()).sum();
        while offers.open.len() > OFFERS_MAX || (bytes > OFFERS_BYTES_MAX && offers.open.len() > 1) {
            bytes -= offers.open.pop_front().map_or(0, |offer| offer.target.bytes());
        }
        format!("{token:032x}")
    }

    /// Returns whether this process has stored the keys of a token.
    pub(super) fn knows(&self, token: &str) -> bool {
        let token = u128::from_str_radix(token, 16).ok();
        lock(&self.offers).open.iter().any(|offer| Some(offer.token) == token)
    }

    /// Takes the offer with this token, and narrows it to the keys of the action. An offer can be taken once, and only
    /// by the operator to whom it was made.
    ///
    /// This process may not know the offer, because another process made it, or because this process has forgotten it.
    /// `explained` then has the keys that were explained again. The token is valid only for the keys for which it was
    /// made.
    pub(super) fn take(
        &self,
        secret: Option<u128>,
        operator: &str,
        token: &str,
        explained: Vec<LayerKeys>,
        narrow: impl FnOnce(&mut LayerKeys) -> Result<(), Wrong>,
        now: Timestamp,
    ) -> Result<LayerKeys, Wrong> {
        let token = u128::from_str_radix(token, 16).ok().map(Token);
        let mut offers = lock(&self.offers);
        offers.open.retain(|offer| offer.until > now);
        offers.taken.retain(|(_, until)| *until > now);
        let is_it = |offer: &Offer| token.is_some_and(|token| token.0 == offer.token) && *offer.operator == *operator;
        let at = offers.open.iter().position(is_it);
        let found = match (at.and_then(|at| offers.open.get(at)), token) {
            (Some(offer), _) => Some(offer.target.clone()),
            (None, Some(token)) => {
                let is_fresh = token.until() > now && token.until() <= now.saturating_add(OFFER_LASTS);
                let is_new = is_fresh && !offers.taken.iter().any(|(taken, _)| *taken == token.0);
                let secret = secret.unwrap_or(self.secret);
                explained.into_iter().find(|target| is_new && token.is_of(secret, operator, target))
            }
            (None, None) => None,
        };
        let (Some(mut target), Some(token)) = (found, token) else {
            let message = "this `token` is unknown: explain the request or the key again. A token is valid for one \
                           action, for five minutes, and for the operator who explained. Another process accepts the \
                           token only if both processes belong to one fleet, and if the fields of the explained \
                           request are sent with the token";
            return Err((StatusCode::CONFLICT, message.into()));
        };
        narrow(&mut target)?;
        if let Some(at) = at {
            offers.open.remove(at);
        }
        offers.taken.push_back((token.0, token.until()));
        if offers.taken.len() > OFFERS_MAX {
            offers.taken.pop_front();
        }
        Ok(target)
    }

    /// Returns the last actions, the latest first.
    pub(super) fn done(&self) -> Vec<OperatorAction> {
        lock(&self.done).iter().cloned().collect()
    }

    /// Remembers a key that an operator typed into the setting with this entry.
    #[cfg(feature = "fleet")]
    pub(super) fn note_typed(&self, operator: &str, entry: String, text: &str) {
        let mut typed = lock(&self.typed);
        typed.retain(|known| known.entry != entry);
        typed.push_back(TypedKey { operator: operator.into(), entry, text: cut(text, TYPED_MAX).into() });
        if typed.len() > DONE_MAX {
            typed.pop_front();
        }
    }

    /// Returns the key that this operator typed into the setting with this entry.
    #[cfg(feature = "fleet")]
    pub(super) fn typed_by(&self, operator: &str, entry: &str) -> Option<Box<str>> {
        let typed = lock(&self.typed);
        let is_it = |known: &&TypedKey| *known.operator == *operator && known.entry == entry;
        typed.iter().find(is_it).map(|known| known.text.clone())
    }

    /// Begins an action. The action is reported when it has ended, even if it is cut off.
    pub(super) fn begin<'a>(&'a self, stats: &'a Stats, operator: &str, done: Done) -> Underway<'a> {
        let error = "the action was cut off, and may have taken effect: look at the page again".into();
        let (at, operator) = (stats.now(), operator.into());
        let action = OperatorAction { at, operator, done, error: Some(error), warning: None };
        Underway { operators: self, stats, action }
    }
}

/// An action that was begun.
pub(super) struct Underway<'a> {
    operators: &'a Operators,
    stats: &'a Stats,
    action: OperatorAction,
}

impl Underway<'_> {
    /// Notes why the action may have no effect although it is done.
    #[cfg(feature = "fleet")]
    pub(super) fn warn(&mut self, warning: Option<String>) {
        self.action.warning = warning.map(Into::into);
    }

    /// Ends the action, and reports it.
    pub(super) fn end(mut self, result: Result<(), String>) -> OperatorAction {
        self.action.error = result.err().map(Into::into);
        self.action.at = self.stats.now();
        self.action.clone()
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        // The clock is the application's code and may panic. The action is listed even if the clock panics.
        contained(|| self.action.at = self.stats.now());
        {
            let mut done = lock(&self.operators.done);
            done.truncate(DONE_MAX - 1);
            done.push_front(self.action.clone());
        }
        contained(|| (self.operators.audit)(&self.action));
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::clock::{Clock, ManualClock};
    use crate::explanation::Explanation;
    use crate::key::{self, PeerAddr};
    use crate::limiter::memory::limiter::MemoryLimiter;
    use crate::middleware::layer::RateLimitLayer;
    use crate::quota::Quota;
    use crate::status::action::Act;
    use crate::status::source::ErasedLayer;

    #[tokio::test]
    async fn offers_are_bounded() {
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder().max_keys(100).clock(clock.clone()).build().unwrap();
        let long = || format!("/{}", "a".repeat(15_000));
        let layer =
            RateLimitLayer::new(limiter, Quota::per_hour(5), key::path()).and(Quota::per_minute(5), key::peer_ip());
        let source: Arc<dyn ErasedLayer> = Arc::new(crate::status::source::LayerSource::new(layer));
        let stats = Stats::builder().clock(clock).build();
        let explain = async |path: String| -> Explanation {
            let mut request = http::Request::get(path).body(()).unwrap().into_parts().0;
            request.extensions.insert(PeerAddr::from(IpAddr::from([192, 0, 2, 1])));
            source.explain(&request).await
        };
        let (short, long) = (explain("/".to_owned()).await, explain(long()).await);
        let target = |explanation| LayerKeys::of_explanation("api", &source, explanation, &stats);
        let operators = Operators::new(|_| None, |_| {});
        let offer = |explanation| operators.offer(None, "alice", target(explanation), stats.now());
        let take = |token: &str| {
            let narrow = |target: &mut LayerKeys| target.narrow(&Act::Reset, &[], &[]);
            operators.take(None, "alice", token, Vec::new(), narrow, stats.now()).is_ok()
        };
        let first = offer(&short);
        let tokens: Vec<String> = (0..10_000).map(|_| offer(&short)).collect();
        assert!(!take(&first) && take(&tokens[9_001]) && take(&tokens[9_999]));
        assert!(lock(&operators.offers).open.len() <= OFFERS_MAX);
        (0..200).for_each(|_| drop(offer(&long)));
        let bytes: usize = lock(&operators.offers).open.iter().map(|offer| offer.target.bytes()).sum();
        assert!((OFFERS_BYTES_MAX / 2..=OFFERS_BYTES_MAX).contains(&bytes), "{bytes}");
    }

    /// Shows a time until it breaks.
    #[derive(Clone, Debug, Default)]
    struct Breaks(Arc<AtomicBool>);

    impl Clock for Breaks {
        fn now(&self) -> Timestamp {
            if self.0.load(Ordering::Relaxed) {
                resume_unwind(Box::new("the clock panics"));
            }
            Timestamp::from_micros(1)
        }
    }

    #[test]
    fn clock_that_panics_hides_no_action() {
        let audited = Arc::new(AtomicBool::new(false));
        let audit = Arc::clone(&audited);
        let operators = Operators::new(|_| None, move |_| audit.store(true, Ordering::Relaxed));
        let clock = Breaks::default();
        let stats = Stats::builder().clock(clock.clone()).build();
        let done = Done::Switched { switch: "a".into(), mode: crate::mode::Mode::Shadow };
        let underway = operators.begin(&stats, "alice", done);
        clock.0.store(true, Ordering::Relaxed);
        assert!(catch_unwind(AssertUnwindSafe(|| underway.end(Ok(())))).is_err());
        assert_eq!((operators.done().len(), audited.load(Ordering::Relaxed)), (1, true));
    }

    #[test]
    fn actions_are_bounded_and_the_latest_is_first() {
        let (operators, stats) = (Operators::new(|_| None, |_| {}), Stats::new());
        for n in 0..1_000 {
            let done = Done::Switched { switch: n.to_string().into(), mode: crate::mode::Mode::Shadow };
            operators.begin(&stats, "alice", done).end(Ok(()));
        }
        let done = operators.done();
        assert_eq!((done.len(), done[0].switched().unwrap().0), (DONE_MAX, "999"));
    }
}
