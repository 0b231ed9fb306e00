//! Counting what a policy decided, in bounded memory.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hasher};
use std::net::IpAddr;

use foldhash::fast::RandomState;
use tower_ratelimit::key::{Prefixes, host};
use tower_ratelimit::{Key, Mode, Policy, Quota};

use super::curve::Curve;
use super::limits::{Head, PolicyDecision, is_of_requests_in_flight};
use super::read::request::{Request, path};

/// The windows in which the peak use of a client is counted, in microseconds: 1 s, 1 min, 1 h, 1 day of UTC.
pub(crate) const WINDOWS: [u64; 4] = [1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000];

/// The decisions of a policy.
pub(crate) struct Tally {
    pub(crate) policy: Policy,
    pub(crate) mode: Mode,
    pub(crate) requests: u64,
    pub(crate) over: u64,
    /// The requests over the limit if those of each second come at once.
    pub(crate) over_as_burst: u64,
    pub(crate) hours: Timeline,
    ids: HashMap<u64, u32, RandomState>,
    seeds: RandomState,
    pub(crate) clients: Vec<Client>,
    /// Requests of clients that are not followed.
    pub(crate) unfollowed: u64,
    pub(crate) curve: Option<Curve>,
    /// The requests in flight, and limits of them.
    pub(crate) in_flight: Option<Curve>,
}

/// A value of the policy's key.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) who: Who,
    pub(crate) requests: u32,
    pub(crate) over: u32,
    pub(crate) is_over_as_burst: bool,
    run: u32,
    /// The most refusals in a row.
    pub(crate) longest_run: u32,
    /// Requests that passed here, whose answer is in the log, and those of them with 2xx or 3xx.
    pub(crate) answered: u32,
    pub(crate) answered_well: u32,
    /// Periods of the quota in which it was refused.
    pub(crate) windows_over: u32,
    last_window_over: u64,
    peaks: [Peak; WINDOWS.len()],
    agents: u64,
    /// Its refused requests, if there are any.
    pub(crate) refusals: Option<Box<Refusals>>,
}

/// The refused requests of a client, in less than a kilobyte.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    pub(crate) first_us: u64,
    pub(crate) last_us: u64,
    /// The user agent of the first one, cut.
    pub(crate) agent: Box<str>,
    /// The first paths, cut and without their queries, and how often each was refused.
    pub(crate) paths: Vec<(Box<str>, u32)>,
    /// The refused requests for other paths.
    pub(crate) elsewhere: u32,
}

/// The most paths that are kept of a client, and the longest path and user agent, in bytes.
const PATHS: usize = 3;
const PATH_MAX: usize = 80;
const AGENT_MAX: usize = 150;

#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    window: u32,
    count: u32,
    most: u32,
}

/// The parts that a key was made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Address(IpAddr),
    /// A path, a host or a method.
    Text(Box<str>),
    All,
    /// Anything else, which may be a secret, as a hash and as text.
    Other(u32, Box<str>),
}

impl Tally {
    pub(crate) fn new(policy: Policy, curve: Option<Curve>) -> Self {
        Self {
            policy,
            mode: Mode::Enforce,
            requests: 0,
            over: 0,
            over_as_burst: 0,
            hours: Timeline::default(),
            ids: HashMap::default(),
            seeds: RandomState::default(),
            clients: Vec::new(),
            unfollowed: 0,
            curve,
            in_flight: None,
        }
    }

    /// Returns the period in which the refusals of a client count once: the quota's, or a minute if it has none. For a
    /// quota of the calendar it is the length of the longest window.
    pub(crate) fn period_us(&self) -> u64 {
        match u64::try_from(self.quota().period().as_micros()).unwrap_or(u64::MAX) {
            0 => WINDOWS[1],
            period_us => period_us,
        }
    }

    pub(crate) fn quota(&self) -> &Quota {
        self.policy.quota()
    }

    /// Returns whether the log has user agents.
    pub(crate) fn has_agents(&self) -> bool {
        self.clients.iter().any(|client| client.agents != 0)
    }

    /// Counts a decision. Returns the client's number if it is followed; `may_follow` says whether a new client may be.
    pub(crate) fn count(
        &mut self,
        decision: &PolicyDecision,
        request: &Request,
        head: &Head,
        at_us: u64,
        may_follow: bool,
    ) -> Option<usize> {
        self.mode = decision.mode;
        self.requests += 1;
        self.over += u64::from(decision.is_over);
        self.hours.count(at_us, decision.is_over);
        let Some(id) = self.id(&decision.key, may_follow, request, head) else {
            self.unfollowed += 1;
            return None;
        };
        // The end of a window tells it from others, wherever the calendar or the first request begins it.
        let window = match decision.window_left {
            Some(left) if !left.is_zero() => at_us.saturating_add(u64::try_from(left.as_micros()).unwrap_or(u64::MAX)),
            _ => at_us / self.period_us(),
        };
        let client = self.clients.get_mut(id)?;
        client.count(decision.is_over, request, at_us, window);
        if decision.is_over {
            client.refusals.get_or_insert_default().count(request, head, at_us);
        }
        if let Some(curve) = &mut self.curve {
            curve.take(id, decision.cost, at_us, at_us);
        }
        if let Some(in_flight) = &mut self.in_flight {
            let until_us = at_us.saturating_add(request.duration_us.unwrap_or(0));
            // A limit beside a rate counts requests, whatever they cost.
            let units = if is_of_requests_in_flight(&self.policy) { decision.cost } else { 1 };
            in_flight.take(id, units, at_us, until_us);
        }
        Some(id)
    }

    /// Counts a decision about the same request at the beginning of its second.
    pub(crate) fn count_burst(&mut self, is_over: bool, client: Option<usize>) {
        if is_over {
            self.over_as_burst += 1;
            if let Some(client) = client.and_then(|id| self.clients.get_mut(id)) {
                client.is_over_as_burst = true;
            }
        }
    }

    fn id(&mut self, key: &Key, may_follow: bool, request: &Request, head: &Head) -> Option<usize> {
        let mut hasher = self.seeds.build_hasher();
        hasher.write(key.as_bytes());
        let hash = hasher.finish();
        if let Some(id) = self.ids.get(&hash) {
            return Some(*id as usize);
        }
        if !may_follow {
            return None;
        }
        let id = u32::try_from(self.clients.len()).ok()?;
        self.ids.insert(hash, id);
        self.clients.push(Client::new(who(key, request, head)));
        Some(id as usize)
    }
}

impl Client {
    fn new(who: Who) -> Self {
        Self {
            who,
            requests: 0,
            over: 0,
            is_over_as_burst: false,
            run: 0,
            longest_run: 0,
            answered: 0,
            answered_well: 0,
            windows_over: 0,
            last_window_over: u64::MAX,
            peaks: [Peak::default(); WINDOWS.len()],
            agents: 0,
            refusals: None,
        }
    }

    fn count(&mut self, is_over: bool, request: &Request, at_us: u64, window: u64) {
        self.requests = self.requests.saturating_add(1);
        for (peak, length) in self.peaks.iter_mut().zip(WINDOWS) {
            let window = (at_us / length) as u32; // only equal numbers matter
            if peak.window != window {
                (peak.window, peak.count) = (window, 0);
            }
            peak.count = peak.count.saturating_add(1);
            peak.most = peak.most.max(peak.count);
        }
        if request.agent != 0 {
            self.agents |= 1 << (request.agent >> 58);
        }
        if !is_over {
            self.run = 0;
            self.answered = self.answered.saturating_add(u32::from(request.status != 0));
            self.answered_well = self.answered_well.saturating_add(u32::from((200..400).contains(&request.status)));
            return;
        }
        self.over = self.over.saturating_add(1);
        self.run = self.run.saturating_add(1);
        self.longest_run = self.longest_run.max(self.run);
        if window != self.last_window_over {
            self.last_window_over = window;
            self.windows_over = self.windows_over.saturating_add(1);
        }
    }

    /// Returns the most requests in a window, by the window's index in [`WINDOWS`].
    pub(crate) fn peak(&self, window: usize) -> u32 {
        self.peaks.get(window).map_or(0, |peak| peak.most)
    }

    /// Returns about how many user agents the client has, by linear counting over 64 bits. More than 63 are 63.
    pub(crate) fn agents(&self) -> u32 {
        let zeros = self.agents.count_zeros().max(1);
        (-64.0 * (f64::from(zeros) / 64.0).ln()).round().min(63.0) as u32
    }
}

impl Refusals {
    fn count(&mut self, request: &Request, head: &Head, at_us: u64) {
        let Some(texts) = &request.texts else { return };
        if self.last_us == 0 {
            self.first_us = at_us;
            self.agent = cut(head.agent(texts), AGENT_MAX);
        }
        self.last_us = at_us;
        let path = cut(path(texts.target()), PATH_MAX);
        let has_room = self.paths.len() < PATHS;
        match self.paths.iter_mut().find(|(known, _)| *known == path) {
            Some((_, count)) => *count = count.saturating_add(1),
            None if has_room => self.paths.push((path, 1)),
            None => self.elsewhere = self.elsewhere.saturating_add(1),
        }
    }
}

/// Returns a text of at most this many bytes, or of as many and an ellipsis.
fn cut(text: &[u8], most: usize) -> Box<str> {
    match text.get(..most) {
        Some(begin) if text.len() > most => {
            // The cut may be within a character.
            let begin = String::from_utf8_lossy(begin);
            format!("{}…", begin.trim_end_matches(char::REPLACEMENT_CHARACTER)).into()
        }
        _ => String::from_utf8_lossy(text).into(),
    }
}

impl Who {
    /// Keeps what a report shows of a text.
    fn text(text: &str) -> Self {
        Self::Text(text.chars().take(200).collect())
    }
}

/// Returns what a key was made of.
fn who(key: &Key, request: &Request, head: &Head) -> Who {
    let parts = &head.parts;
    let is = |other: Option<Key>| other.as_ref() == Some(key);
    if *key == Key::global() {
        return Who::All;
    }
    if let Some(client) = head.client() {
        let network = Prefixes::default().group(client);
        if is(Key::of(network)) || is(Key::of(client)) {
            return Who::Address(client);
        }
    }
    let path = parts.uri.path();
    if request.texts.is_some() {
        if is(Key::of(path)) {
            return Who::text(path);
        }
        if is(Key::of(parts.method.as_str())) {
            return Who::text(parts.method.as_str());
        }
        let found = host()(&parts.into());
        if is(found) {
            let host = request.texts.as_ref().map_or(&b""[..], |texts| texts.host());
            let host = if host.is_empty() { parts.uri.host().unwrap_or_default().as_bytes() } else { host };
            return Who::text(&String::from_utf8_lossy(host));
        }
    }
    let hash = super::read::request::hash(key.as_bytes()) as u32;
    // A key's bytes have the kinds and the lengths of its parts between the parts.
    let text: String = String::from_utf8_lossy(key.as_bytes()).chars().filter(|c| !c.is_control()).take(80).collect();
    Who::Other(hash, text.into())
}

/// Requests over time, in at most [`BUCKETS`](Self::BUCKETS) parts of equal length: hours, or more if the log is long.
#[derive(Clone, Debug)]
pub(crate) struct Timeline {
    pub(crate) length_us: u64,
    /// The number of a part, its requests, and those over the limit.
    pub(crate) parts: BTreeMap<u64, (u64, u64)>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { length_us: 3_600_000_000, parts: BTreeMap::new() }
    }
}

impl Timeline {
    const BUCKETS: usize = 400;

    fn count(&mut self, at_us: u64, is_over: bool) {
        let (requests, over) = self.parts.entry(at_us / self.length_us).or_default();
        *requests += 1;
        *over += u64::from(is_over);
        while self.parts.len() > Self::BUCKETS {
            self.length_us *= 2;
            for (part, (requests, over)) in std::mem::take(&mut self.parts) {
                let merged = self.parts.entry(part / 2).or_default();
                *merged = (merged.0 + requests, merged.1 + over);
            }
        }
    }
}

/// The number of requests of each address, for the first addresses.
#[derive(Default)]
pub(crate) struct Addresses {
    pub(crate) counts: HashMap<IpAddr, u32, RandomState>,
    /// Requests of addresses that came when the table was full.
    pub(crate) others: u64,
}

impl Addresses {
    pub(crate) fn count(&mut self, address: IpAddr, most: usize) {
        let is_full = self.counts.len() >= most;
        match self.counts.entry(address) {
            std::collections::hash_map::Entry::Vacant(_) if is_full => self.others += 1,
            entry => {
                let count = entry.or_default();
                *count = count.saturating_add(1);
            }
        }
    }
}

/// The names of the clients that the log has no addresses of, by the addresses that stand for them.
#[derive(Default)]
pub(crate) struct Hosts {
    pub(crate) names: HashMap<IpAddr, Box<str>, RandomState>,
    pub(crate) requests: u64,
}

impl Hosts {
    pub(crate) fn count(&mut self, address: IpAddr, name: &str, most: usize) {
        self.requests += 1;
        if self.names.len() < most && !self.names.contains_key(&address) {
            self.names.insert(address, name.into());
        }
    }
}

/// Returns the network that stands for an address in a report: a /24 or a /48.
pub(crate) fn network(address: IpAddr) -> (IpAddr, u8) {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            (IpAddr::from([a, b, c, 0]), 24)
        }
        IpAddr::V6(v6) => {
            let [a, b, c, ..] = v6.segments();
            (IpAddr::from([a, b, c, 0, 0, 0, 0, 0]), 48)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_text_is_bounded_and_whole_characters() {
        assert_eq!(&*cut(b"abc", 3), "abc");
        assert_eq!(&*cut(b"abcd", 3), "abc…");
        assert_eq!(&*cut("aé€".as_bytes(), 5), "aé…");
        // A byte that is not text becomes a character of three.
        assert!(cut(&[0xff; 1_000], PATH_MAX).len() <= PATH_MAX * 3 + 3);
    }
}
