//! What a layer notices of its own misuse. Requests are looked at while it is new; after that this costs nothing.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http::Extensions;
use http::header::{FORWARDED, HeaderName};
use http::request::Parts;

use super::access::BoundList;
use super::bound::{Asked, BoundRule};
use super::charging::Shared;
use super::decided::Decided;
use super::extract::peer_address;
use super::rule::MissingKey;
use super::settings::Settings;
use crate::key::Key;
use crate::limiter::{Contradiction, Entered, Limiter};
use crate::misuse::{Misuse, MisuseKind};
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// The number of requests of a new layer that are looked at.
const LOOKED_AT: u32 = 256;

/// A rule that applies to none of this many requests is reported.
const APPLIES_TO_NONE: u32 = 1_000;

/// A rule is reported if this many requests that it applies to have no key, and none has one.
const KEYLESS: u32 = 32;

/// As [`KEYLESS`], of a rule that exempts requests without a key: these may be the usual ones.
const KEYLESS_EXEMPT: u32 = 1_000;

/// A rule is looked at for no more requests than this.
const RULE_LOOKED_AT: u32 = 10_000;

/// Headers by which proxies report whom they forward.
const FORWARDING: [HeaderName; 3] =
    [HeaderName::from_static("x-forwarded-for"), FORWARDED, HeaderName::from_static("x-real-ip")];

/// What a layer has noticed.
pub(super) struct Watch {
    /// One of each kind at most.
    noticed: Mutex<Vec<Misuse>>,
    /// Requests that are still looked at.
    to_look_at: AtomicU32,
    /// One for each rule.
    rules: Box<[KeyWatch]>,
    /// One for each list.
    lists: Box<[KeyWatch]>,
    /// How many rules and lists are still looked at.
    new: AtomicU32,
}

/// What is known of a rule or list as long as no request had its key.
#[derive(Default)]
struct KeyWatch {
    /// It is not looked at any more.
    known: AtomicBool,
    asked: AtomicU32,
    applied: AtomicU32,
}

/// What new layers charged a request, in its extensions for the layers within.
#[derive(Clone)]
struct Charged(Arc<Vec<ChargedTo>>);

/// A limiter, the name of a policy, and a key.
#[derive(Clone, PartialEq)]
struct ChargedTo {
    limiter: usize,
    policy: u64,
    key: Key,
}

impl Watch {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            noticed: Mutex::default(),
            to_look_at: AtomicU32::new(LOOKED_AT),
            rules: settings.rules.iter().map(|_| KeyWatch::default()).collect(),
            lists: settings.access.iter().map(|_| KeyWatch::default()).collect(),
            new: AtomicU32::new(u32::try_from(settings.rules.len() + settings.access.len()).unwrap_or(u32::MAX)),
        }
    }

    /// Whether the keys of rules and lists are looked for.
    pub(super) fn looks_for_keys(&self) -> bool {
        self.new.load(Ordering::Relaxed) > 0
    }

    /// Ends the looking at a rule or list. Returns `false` if another thread has ended it.
    fn is_known_now(&self, of: &KeyWatch) -> bool {
        let first = !of.known.swap(true, Ordering::Relaxed);
        self.new.fetch_sub(u32::from(first), Ordering::Relaxed);
        first
    }

    /// Whether requests are still looked at.
    pub(super) fn looks(&self) -> bool {
        self.to_look_at.load(Ordering::Relaxed) > 0
    }

    /// The first that was noticed.
    pub(super) fn first(&self) -> Option<Misuse> {
        self.noticed.lock().unwrap_or_else(PoisonError::into_inner).first().cloned()
    }

    /// Returns the misuse if it is the first of its kind.
    fn note(&self, kind: MisuseKind, text: impl FnOnce() -> String) -> Option<Misuse> {
        let mut noticed = self.noticed.lock().unwrap_or_else(PoisonError::into_inner);
        if noticed.iter().any(|misuse| misuse.kind() == kind) {
            return None;
        }
        let misuse = Misuse::new(kind, text());
        noticed.push(misuse.clone());
        Some(misuse)
    }
}

/// One fewer, unless there are none.
fn count_down(left: &AtomicU32) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

fn forwarding_header(parts: &Parts) -> Option<HeaderName> {
    FORWARDING.into_iter().find(|name| parts.headers.contains_key(name))
}

impl<L> Shared<L> {
    fn notice(&self, kind: MisuseKind, text: impl FnOnce() -> String) {
        // Not reported under the lock.
        let Some(misuse) = self.watch.note(kind, text) else { return };
        match &self.settings.observer {
            Some(observer) => observer.on_misuse(&misuse),
            None => misuse.report(),
        }
    }

    /// Looks at one of the first requests of a layer.
    pub(super) fn look_at_request(&self, parts: &Parts) {
        if count_down(&self.watch.to_look_at) {
            self.look_for_peer(parts);
        }
    }

    fn look_for_peer(&self, parts: &Parts) {
        let user = if self.settings.rules.iter().any(BoundRule::is_by_peer) {
            "a rule counts by key::peer_ip"
        } else if self.settings.access.iter().any(BoundList::is_by_peer) {
            "an access list looks up key::peer_ip"
        } else {
            return;
        };
        if peer_address(parts).is_none() {
            self.peer_is_unknown(user);
        }
        if let Some(name) = forwarding_header(parts) {
            self.notice(MisuseKind::ProxyNotTrusted, || {
                format!(
                    "{user}, and a request has the header {name}: behind a proxy all clients share the proxy's address, so \
                     take key::client_ip(TrustedProxies::count(1)?) or name the proxies' networks; without a proxy a client \
                     has made the header up, and there is nothing to do"
                )
            });
        }
    }

    fn peer_is_unknown(&self, user: &str) {
        self.notice(MisuseKind::PeerUnknown, || {
            format!(
                "{user}, and a request has no peer's address: pass it on (axum: serve \
                 into_make_service_with_connect_info::<SocketAddr>() and enable the feature `axum`; tonic: enable the feature \
                 `tonic`; others: insert a key::PeerAddr into the request's extensions)"
            )
        });
    }

    /// Looks at what a new rule asks of a request.
    #[cold]
    pub(super) fn look_at_rule(&self, at: usize, bound: &BoundRule, asked: &Asked) {
        let Some(rule) = self.watch.rules.get(at).filter(|rule| !rule.known.load(Ordering::Relaxed)) else { return };
        let (applies, has_key) = match asked {
            Asked::Nothing => (false, false),
            Asked::Charge { key, .. } => (true, *key != Key::keyless()),
            Asked::Key | Asked::Exempt => (true, false),
        };
        let asked = rule.asked.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let applied = rule.applied.fetch_add(u32::from(applies), Ordering::Relaxed).saturating_add(u32::from(applies));
        let missing_key = bound.rule().missing_key;
        let keyless = if missing_key == MissingKey::Exempt { KEYLESS_EXEMPT } else { KEYLESS };
        let finding = if has_key || asked >= RULE_LOOKED_AT {
            None
        } else if applied >= keyless {
            Some(MisuseKind::KeyNeverFound)
        } else if applied == 0 && asked >= APPLIES_TO_NONE {
            Some(MisuseKind::NeverApplies)
        } else {
            return;
        };
        if !self.watch.is_known_now(rule) {
            return;
        }
        let name = bound.policies().first().map_or("", Policy::name);
        match finding {
            Some(MisuseKind::NeverApplies) => self.notice(MisuseKind::NeverApplies, || {
                format!(
                    "the policy {name:?} applied to none of the first {asked} requests, so the condition of its rule \
                     (Rule::when) may never hold: inside of axum's `nest` a request's URI lacks the prefix, so test \
                     key::original_uri(request) instead; if such requests are rare, there is nothing to do"
                )
            }),
            Some(_) if bound.needs_peer() => self.peer_is_unknown("a rule counts by the address of the client"),
            Some(_) => self.notice(MisuseKind::KeyNeverFound, || {
                let fate = match missing_key {
                    MissingKey::Reject => "are refused",
                    MissingKey::Shared => "share one allowance",
                    MissingKey::Exempt => "are not limited",
                };
                format!(
                    "none of the first {applied} requests that the policy {name:?} applies to had a key, and requests \
                     without one {fate}: if another layer puts the key into requests (authentication), place that layer \
                     outside of this one; if the extractor reads a header or a cookie, check its name; if no client sent \
                     one yet, there is nothing to do"
                )
            }),
            None => {}
        }
    }

    /// Looks at whether a request has the key of a new list.
    #[cold]
    pub(super) fn look_at_list(&self, at: usize, has_key: bool) {
        let Some(list) = self.watch.lists.get(at).filter(|list| !list.known.load(Ordering::Relaxed)) else { return };
        let asked = list.asked.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if !has_key && asked < KEYLESS_EXEMPT {
            return;
        }
        if self.watch.is_known_now(list) && !has_key {
            self.notice(MisuseKind::KeyNeverFound, || {
                format!(
                    "none of the first {asked} requests had the key by which access list {} of the layer is asked, so it \
                     neither allows nor denies anybody: if another layer puts the key into requests (authentication), \
                     place that layer outside of this one; if the extractor reads a header or a cookie, check its name; \
                     if no client sent one yet, there is nothing to do",
                    at + 1
                )
            });
        }
    }

    /// Looks at one of the first requests that a list exempts.
    #[cold]
    pub(super) fn look_for_allowed_proxy(&self, list: &BoundList, parts: &Parts) {
        let Some(name) = forwarding_header(parts) else { return };
        if list.decided_by_peer(parts) {
            self.notice(MisuseKind::ProxyAllowed, || {
                format!(
                    "an access list allows a request by the address of its peer, and the request has the header {name}: if \
                     the peer is a proxy, the list exempts every client behind it, so take \
                     key::client_network(TrustedProxies::count(1)?, Prefixes::exact()) for the list or name the proxies' \
                     networks"
                )
            });
        }
    }

    /// Queues are there to be waited in, and timers to wait by.
    fn look_for_timer(&self) {
        let queue = self.policies.iter().find(|policy| policy.quota().algorithm() == Algorithm::LeakyQueue);
        if queue.is_none() && self.delays.is_some() {
            self.notice(MisuseKind::NoQueue, || {
                "the layer has a timer (RateLimitLayer::delay), and no rule tells requests when to depart, so that none ever \
                 waits and those over a quota are refused: give a rule a Quota::leaky_queue, or leave the timer out"
                    .to_owned()
            });
        }
        if let Some(policy) = queue.filter(|_| self.delays.is_none()) {
            self.notice(MisuseKind::NoTimer, || {
                format!(
                    "the policy {:?} ({}) tells requests when to depart, and the layer has no timer, so that those in the \
                     queue go on at once: give it one by RateLimitLayer::delay, or take Quota::leaky_bucket",
                    policy.name(),
                    policy.quota()
                )
            });
        }
    }

    /// A request was refused that can never pass.
    #[cold]
    pub(super) fn look_for_never(&self, outcome: &Outcome) {
        let never = outcome.violated().find(|standing| {
            // What is too much for a quota may be meant for its meter, which now is full.
            let metered = self.settings.rules.iter().filter(|bound| bound.policies().contains(standing.policy()));
            let mut meters = metered.filter_map(|bound| bound.rule().companion.as_ref()).filter(|own| own.meters);
            let fits = meters.any(|meter| standing.cost() <= meter.policy.quota().capacity());
            standing.decision().is_never() && !fits
        });
        // A quota of 0 is a switch.
        if let Some(standing) = never.filter(|standing| standing.policy().quota().limit() > 0) {
            self.notice(MisuseKind::NeverPasses, || {
                format!(
                    "a request cost {} units of the policy {:?} ({}), of which no more than {} can pass at once, so it is \
                     refused for good: raise the quota's burst or limit, lower the cost, or answer such requests otherwise",
                    standing.cost(),
                    standing.policy().name(),
                    standing.policy().quota(),
                    standing.policy().quota().capacity(),
                )
            });
        }
    }
}

impl<L: Limiter> Shared<L> {
    /// What can be seen without a request.
    pub(super) fn look_at_setup(&self) {
        if !self.settings.enabled {
            return;
        }
        for bound in self.settings.rules.iter().filter(|bound| bound.after().is_settled()) {
            if let Some(policy) = bound.policies().iter().find(|policy| policy.quota().spec().debt == 0) {
                self.notice(MisuseKind::NoDebt, || {
                    format!(
                        "the policy {:?} settles what a request cost above its reservation, and its quota ({}) remembers \
                         no debt: give it one by Quota::max_debt",
                        policy.name(),
                        policy.quota()
                    )
                });
            }
        }
        if let Some((policy, error)) = self.unsupported.first().and_then(|(at, error)| Some((self.policy(*at)?, error)))
        {
            self.notice(MisuseKind::UnsupportedQuota, || {
                format!(
                    "the policy {:?}: {error}; its requests are decided as if the limiter had failed",
                    policy.name()
                )
            });
        }
        self.look_for_timer();
        self.look_for_contradiction();
    }

    /// Compares the layer's policies with those of the other layers over its limiter.
    fn look_for_contradiction(&self) {
        let entered = self.entered.get_or_init(|| Some(self.limiter.roster()?.enter(&self.policies)));
        let Some(Contradiction { own, other, unnamed }) = entered.as_ref().and_then(Entered::contradiction) else {
            return;
        };
        if unnamed {
            self.notice(MisuseKind::UnnamedQuota, || {
                format!(
                    "this layer and another one over the same limiter have the unnamed quota \"{}\" ({:?} in headers and \
                     stored keys), and both count in the same states: name each policy by Policy::new; if the layers are to \
                     share an allowance, make both from clones of one layer or policy",
                    own.quota(),
                    own.name()
                )
            });
        } else {
            self.notice(MisuseKind::TwoQuotas, || {
                format!(
                    "the policy {:?} is \"{}\" in this layer and \"{}\" in another one over the same limiter, and both \
                     count in the same states: give one of them another name, or make them plans by Policy::choose",
                    own.name(),
                    own.quota(),
                    other.quota()
                )
            });
        }
    }

    /// Compares what this layer charged with what outer layers did while they were new, and leaves word for those within.
    #[cold]
    pub(super) fn look_for_double_charge(&self, extensions: &mut Extensions, decided: &Decided) {
        let Some(limiter) = self.limiter.roster().map(|roster| roster.id()) else { return };
        let mut all = extensions.get().map_or_else(Vec::new, |Charged(outer)| Vec::clone(outer));
        for (at, key) in decided.charges() {
            let Some(policy) = self.policy(at) else { continue };
            let own = ChargedTo { limiter, policy: policy.name_fingerprint(), key: key.clone() };
            if all.contains(&own) {
                self.notice(MisuseKind::ChargedTwice, || {
                    format!(
                        "a request was charged for the policy {:?} and the same key by this layer and by an outer one, over \
                         the same limiter: leave one of them out, or give the policies different names",
                        policy.name()
                    )
                });
            }
            all.push(own);
        }
        extensions.insert(Charged(Arc::new(all)));
    }
}
