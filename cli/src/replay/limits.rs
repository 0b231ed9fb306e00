//! The real layer on a clock that stands at the log's time.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fmt;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use foldhash::fast::RandomState;
use http::header::{HOST, HeaderName, HeaderValue, USER_AGENT};
use http::request::Parts;
use http::{Method, Uri};
use percent_encoding::{AsciiSet, CONTROLS, percent_encode};
use tower_ratelimit::clock::{ManualClock, Timestamp};
use tower_ratelimit::key::{self, PeerAddr, TrustedProxies};
use tower_ratelimit::middleware::Admission;
use tower_ratelimit::observe::{LimiterEvent, Observed, Observer, OutcomeKind, SetupWarning};
use tower_ratelimit::quota::Algorithm;
use tower_ratelimit::rules::{Rules, RulesError};
use tower_ratelimit::{Key, MemoryLimiter, Mode, Policy, RateLimitLayer, Rule};

use super::args::{KeyWord, Through};
use super::read::request::{Keep, Request, Texts};

/// The decision of a layer about a request.
#[derive(Debug, Default)]
pub(crate) struct Decided {
    pub(crate) kind: Option<OutcomeKind>,
    pub(crate) policies: Vec<PolicyDecision>,
}

#[derive(Clone, Debug)]
pub(crate) struct PolicyDecision {
    /// The policy's place among [`Limits::policies`].
    pub(crate) policy: usize,
    pub(crate) key: Key,
    pub(crate) cost: u64,
    pub(crate) mode: Mode,
    /// Whether the request was over the quota, whatever the mode.
    pub(crate) is_over: bool,
    /// The time from the request to the end of its window, if the quota has fixed windows.
    pub(crate) window_left: Option<Duration>,
}

/// A layer with its own limiter and its own clock.
pub(crate) struct Limits {
    layer: RateLimitLayer<MemoryLimiter>,
    limiter: MemoryLimiter,
    clock: ManualClock,
    decided: Arc<Shared>,
    /// Whether a policy limits requests in flight.
    has_places: bool,
    /// The requests in flight, if they hold places, by their ends.
    in_flight: Mutex<BTreeMap<(u64, u64), Admission>>,
}

/// The most requests that hold places at once. Others end at once.
const IN_FLIGHT_MAX: usize = 200_000;

/// The outcomes that the layer's observer saw.
struct Shared {
    policies: Arc<[Policy]>,
    /// The places of the policies of each name. The plans of a rule have one name.
    by_name: HashMap<String, Vec<usize>, RandomState>,
    decided: Mutex<Decided>,
    notes: Mutex<Notes>,
}

/// The reports of a layer and its limiter.
#[derive(Clone, Debug, Default)]
pub(crate) struct Notes {
    pub(crate) warnings: Vec<String>,
    /// Keys that were forgotten while they had no allowance left.
    pub(crate) forgotten: u64,
    /// Requests that held places, and had to end at once because too many were in flight.
    pub(crate) not_held: u64,
}

const WARNINGS_MAX: usize = 10;

impl Observer for Shared {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let mut decided = lock(&self.decided);
        decided.kind = Some(observed.outcome().kind());
        for status in observed.outcome().policies() {
            let policy = status.policy();
            let Some(key) = observed.key(policy.name()) else { continue };
            let places = self.by_name.get(policy.name()).into_iter().flatten().copied();
            let is_own = |at: &usize| self.policies.get(*at).is_some_and(|own| own.quota() == policy.quota());
            let Some(at) = places.into_iter().find(is_own) else { continue };
            decided.policies.push(PolicyDecision {
                policy: at,
                key: key.clone(),
                cost: status.cost(),
                mode: status.mode(),
                is_over: status.is_exceeded(),
                window_left: match policy.quota().algorithm() {
                    Algorithm::FixedWindow => status.decision().reset_after(),
                    _ => None,
                },
            });
        }
    }

    fn on_setup_warning(&self, warning: &SetupWarning) {
        let mut notes = lock(&self.notes);
        let warning = warning.to_string();
        if notes.warnings.len() < WARNINGS_MAX && !notes.warnings.contains(&warning) {
            notes.warnings.push(warning);
        }
    }

    fn on_limiter_event(&self, event: &LimiterEvent) {
        // `Full` cannot come: by default the limiter forgets a key instead.
        if matches!(event, LimiterEvent::Evicted { throttled: true, .. }) {
            lock(&self.notes).forgotten += 1;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Limits {
    /// Makes the layer. Its time begins at `start_us`.
    pub(crate) fn new(
        through: &Through<'_>,
        proxies: Option<&TrustedProxies>,
        clients: usize,
        start_us: u64,
    ) -> Result<Self, String> {
        let clock = ManualClock::at(Timestamp::from_micros(start_us));
        let limiter = MemoryLimiter::builder().max_keys(clients.max(1_000)).clock(clock.clone());
        let limiter = limiter.build().map_err(|error| error.to_string())?;
        let layer = match through {
            Through::Rules { file, names } => {
                let mut rules = Rules::builder()
                    .trusted_proxies(proxies.map_or_else(no_proxy, |p| Ok(p.clone()))?)
                    .clock(clock.clone());
                for (name, word) in *names {
                    rules = rules.key(name, extract(word, proxies));
                }
                let unread = |error: RulesError| match error.source() {
                    Some(why) => format!("{error}: {why}"),
                    None => error.to_string(),
                };
                let rules = rules.read_file(file).map_err(unread)?;
                rules.layer(limiter.clone()).map_err(|error| error.to_string())?
            }
            Through::Quota { key, quota } => {
                let rule = Rule::new(policy_name(key), **quota).map_err(|error| error.to_string())?;
                RateLimitLayer::new(limiter.clone(), rule, extract(key, proxies))
            }
        };
        let policies = layer.policies();
        let mut by_name: HashMap<String, Vec<usize>, RandomState> = HashMap::default();
        for (at, policy) in policies.iter().enumerate() {
            by_name.entry(policy.name().to_owned()).or_default().push(at);
        }
        let decided = Arc::new(Shared { policies, by_name, decided: Mutex::default(), notes: Mutex::default() });
        let has_places = decided.policies.iter().any(is_of_requests_in_flight);
        // The layer hands the observer on to its limiter.
        let layer = layer.observer(Arc::clone(&decided));
        Ok(Self { layer, limiter, clock, decided, has_places, in_flight: Mutex::default() })
    }

    /// Returns the policies.
    pub(crate) fn policies(&self) -> &[Policy] {
        &self.decided.policies
    }

    /// Asks the layer about a request at an instant, and hands what it decided to `read`. If it passes, it holds its
    /// places until it has taken `duration_us`.
    pub(crate) fn decide<T>(&self, parts: &Parts, at_us: u64, duration_us: u64, read: impl FnOnce(&Decided) -> T) -> T {
        self.clock.set(Timestamp::from_micros(at_us));
        self.end_until(at_us);
        // A limiter in memory answers at once, and without a timer no request waits.
        let admitted = pin!(self.layer.admit(parts)).poll(&mut Context::from_waker(Waker::noop()));
        if let Poll::Ready(Ok(admission)) = admitted {
            self.hold(admission, at_us, duration_us);
        }
        let mut decided = lock(&self.decided.decided);
        let result = read(&decided);
        (decided.kind, _) = (None, decided.policies.clear());
        result
    }

    /// Keeps an admission until its request has ended.
    fn hold(&self, admission: Admission, at_us: u64, duration_us: u64) {
        let mut in_flight = lock(&self.in_flight);
        if !self.has_places || duration_us == 0 {
            admission.keep();
        } else if in_flight.len() < IN_FLIGHT_MAX {
            let until_us = at_us.saturating_add(duration_us);
            let same =
                in_flight.range((until_us, 0)..=(until_us, u64::MAX)).next_back().map_or(0, |((_, at), _)| at + 1);
            in_flight.insert((until_us, same), admission);
        } else {
            admission.keep();
            lock(&self.decided.notes).not_held += 1;
        }
    }

    /// Ends the requests that have ended by then.
    fn end_until(&self, at_us: u64) {
        let mut in_flight = lock(&self.in_flight);
        while let Some(first) = in_flight.first_entry().filter(|first| first.key().0 <= at_us) {
            first.remove().keep();
        }
    }

    /// Repeats a decision at another instant. Returns whether the request is over the quota. The decision is the only
    /// one about its request: then the layer would ask its limiter for nothing else. Returns `None` if the quota limits
    /// requests in flight, whose places only the layer returns.
    pub(crate) fn repeat(&self, decision: &PolicyDecision, at_us: u64) -> Option<bool> {
        let policy = self.policies().get(decision.policy).filter(|policy| !is_of_requests_in_flight(policy))?;
        self.clock.set(Timestamp::from_micros(at_us));
        Some(!self.limiter.take_one(policy, &decision.key, decision.cost).is_allowed())
    }

    pub(crate) fn notes(&self) -> Notes {
        lock(&self.decided.notes).clone()
    }
}

pub(crate) fn is_of_requests_in_flight(policy: &Policy) -> bool {
    policy.quota().algorithm() == Algorithm::Concurrency
}

/// Returns the name of the policy of `--quota`.
pub(crate) fn policy_name(key: &KeyWord) -> String {
    match key {
        KeyWord::Client => "client".to_owned(),
        KeyWord::User => "user".to_owned(),
        KeyWord::Path => "path".to_owned(),
        KeyWord::Host => "host".to_owned(),
        KeyWord::Method => "method".to_owned(),
        KeyWord::Global => "global".to_owned(),
        KeyWord::Header(name) => name.as_str().to_owned(),
    }
}

/// Trusts no address that a log can have, so that the client is the one that the log names.
fn no_proxy() -> Result<TrustedProxies, String> {
    TrustedProxies::networks(["0.0.0.0/32"]).map_err(|error| error.to_string())
}

/// The user that the log names.
#[derive(Clone, Debug)]
struct User(String);

type Extract = Box<dyn Fn(&tower_ratelimit::Head<'_>) -> Option<Key> + Send + Sync>;

fn extract(word: &KeyWord, proxies: Option<&TrustedProxies>) -> Extract {
    match word {
        KeyWord::Client => match proxies {
            Some(proxies) => Box::new(key::client_ip(proxies.clone())),
            None => {
                let peer = key::peer_ip();
                Box::new(move |parts| Key::of(peer(parts)))
            }
        },
        KeyWord::User => Box::new(key::extension(|user: &User| user.0.clone())),
        KeyWord::Path => Box::new(key::path()),
        KeyWord::Host => Box::new(key::host()),
        KeyWord::Method => Box::new(key::method()),
        KeyWord::Global => Box::new(key::global()),
        KeyWord::Header(name) => Box::new(key::header(name.as_str())),
    }
}

/// Returns which texts requests need, beside the client's address.
pub(crate) fn texts_to_keep(through: &Through<'_>, proxies: Option<&TrustedProxies>) -> Keep {
    let is_plain = matches!(through, Through::Quota { key: KeyWord::Client | KeyWord::Global, .. });
    if is_plain && proxies.is_none() { Keep::Samples } else { Keep::All }
}

/// The head of a request, used again for each one.
pub(crate) struct Head {
    pub(crate) parts: Parts,
    headers: Vec<HeaderName>,
    /// The index of the user agent among them.
    agent: Option<usize>,
    keep: Keep,
    proxies: Option<TrustedProxies>,
}

/// The characters that a URI cannot have.
const IN_URI: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'\\')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}')
    .add(b'#');

impl Head {
    /// `keep` says which texts the requests will have.
    pub(crate) fn new(keep: Keep, proxies: Option<&TrustedProxies>) -> Self {
        let (parts, ()) = http::Request::new(()).into_parts();
        Self { parts, headers: Vec::new(), agent: None, keep, proxies: proxies.cloned() }
    }

    /// Notes the headers of the log's format, to which a directive of the log may add some.
    pub(crate) fn note_headers(&mut self, headers: &[HeaderName]) {
        if headers.len() != self.headers.len() {
            self.headers = headers.to_vec();
            self.agent = headers.iter().position(|name| *name == USER_AGENT);
        }
    }

    /// Returns the user agent of a request, or nothing.
    pub(crate) fn agent<'t>(&self, texts: &'t Texts) -> &'t [u8] {
        self.agent.map_or(&[], |at| texts.header(at))
    }

    /// Returns the client's address as the rules see it.
    pub(crate) fn client(&self) -> Option<IpAddr> {
        match &self.proxies {
            Some(proxies) => key::client_address(proxies, &(&self.parts).into()),
            None => key::peer_address(&(&self.parts).into()),
        }
    }

    /// Makes this the head of a request.
    pub(crate) fn set(&mut self, request: &Request) {
        let parts = &mut self.parts;
        match (request.client, parts.extensions.get_mut::<PeerAddr>()) {
            (Some(client), Some(peer)) => *peer = client.into(),
            (Some(client), None) => drop(parts.extensions.insert(PeerAddr::from(client))),
            (None, _) => drop(parts.extensions.remove::<PeerAddr>()),
        }
        let Some(texts) = request.texts.as_ref().filter(|_| self.keep == Keep::All) else { return };
        // A line without a method, such as a scanner's, is no GET.
        parts.method =
            Method::from_bytes(texts.method()).unwrap_or_else(|_| Method::from_bytes(b"-").unwrap_or_default());
        parts.uri = uri(texts.target());
        parts.headers.clear();
        let mut add = |name: HeaderName, value: &[u8]| {
            if let (false, Ok(value)) = (value.is_empty(), HeaderValue::from_bytes(value)) {
                parts.headers.append(name, value);
            }
        };
        add(HOST, texts.host());
        for (at, name) in self.headers.iter().enumerate() {
            add(name.clone(), texts.header(at));
        }
        match std::str::from_utf8(texts.user()) {
            Ok("") | Err(_) => drop(parts.extensions.remove::<User>()),
            Ok(user) => drop(parts.extensions.insert(User(user.to_owned()))),
        }
    }
}

/// Returns a target as a URI. What a URI cannot have is percent-encoded; what is none even so is `/`.
fn uri(target: &[u8]) -> Uri {
    let target = target.split(|byte| *byte == b'#').next().unwrap_or_default();
    let plain = || Uri::try_from(target).ok();
    let encoded = || percent_encode(target, IN_URI).to_string().parse().ok();
    if target.is_empty() { Uri::default() } else { plain().or_else(encoded).unwrap_or_default() }
}

impl fmt::Debug for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limits").finish_non_exhaustive()
    }
}
