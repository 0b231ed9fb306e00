//! Warnings about likely misconfigurations. The first requests of a layer are watched for
//! misconfigurations. After that, the watch costs each request two atomic loads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::header::{FORWARDED, HeaderName, HeaderValue};

use super::charge::access::BoundList;
use super::rule::{BoundRule, MissingKey, RuleMatch};
use super::settings::Settings;
use crate::base::head::Head;
use crate::base::sync::{Mutex, lock};
use crate::key::{AddressSource, Key, Prefixes, peer_address};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::setup_warning::{SetupWarning, SetupWarningKind};

/// The number of first requests that are watched.
const LOOKED_AT: u32 = 256;

/// A rule is reported if it applies to none of this many requests.
const APPLIES_TO_NONE: u32 = 1_000;

/// A rule is reported if it applies to this many requests and none of them has a key.
const KEYLESS: u32 = 32;

/// A rule that trusts networks is reported if this many forwarded requests came from outside of these networks, and
/// no request before them came from a trusted proxy.
const UNTRUSTED: u32 = 32;

/// Replaces [`KEYLESS`] for clients that a proxy does not report, if their requests have no forwarding header,
/// because a proxy's health checks have no such header either.
const UNREPORTED: u32 = 256;

/// Replaces [`KEYLESS`] for a rule that exempts requests without a key, because such requests may be usual.
const KEYLESS_EXEMPT: u32 = 1_000;

/// A rule is reported if it refuses this many requests that can never pass, and no request that could pass
/// came before.
const NEVER_PASSES: u32 = 32;

/// The number of first requests for which a rule is watched.
const RULE_LOOKED_AT: u32 = 10_000;

/// The headers in which proxies report the client.
const FORWARDING: [HeaderName; 3] =
    [HeaderName::from_static("x-forwarded-for"), FORWARDED, HeaderName::from_static("x-real-ip")];

/// The warnings of a layer, and the watches that have not ended.
pub(super) struct Diagnostics {
    observer: Option<Arc<dyn Observer>>,
    /// At most one warning of each kind.
    noticed: Mutex<Vec<SetupWarning>>,
    /// The number of requests that are still watched.
    to_look_at: AtomicU32,
    /// The watch over each rule.
    rules: Box<[KeyWatch]>,
    /// The watch over each access list.
    lists: Box<[KeyWatch]>,
    /// The number of rules and lists that are still watched.
    new: AtomicU32,
    /// For each rule, a watch that ends when a request could pass.
    passing: Box<[KeyWatch]>,
    /// Whether a handler has ended the admission of a request.
    ends_admissions: AtomicBool,
}

/// The watch over one rule or access list, until a request has the key that it needs.
#[derive(Default)]
struct KeyWatch {
    /// Whether the watch has ended.
    known: AtomicBool,
    asked: AtomicU32,
    applied: AtomicU32,
    /// The number of forwarded requests that came from no trusted proxy.
    untrusted: AtomicU32,
}

impl Diagnostics {
    pub(super) fn new(settings: &Settings) -> Self {
        // Watches only rules that every request is matched with. The watch of any other rule might never end, because
        // the rule may apply to some paths only, be disabled, or be found by a source.
        let found = settings.finder().map_or(0, |(_, rules)| rules);
        let is_watched = |(at, bound): (usize, &BoundRule)| {
            at >= found && bound.rule().paths.is_empty() && !bound.rule().is_disabled()
        };
        let watch = |rule| KeyWatch { known: (!is_watched(rule)).into(), ..KeyWatch::default() };
        let rules: Box<[KeyWatch]> = settings.rules.iter().enumerate().map(watch).collect();
        let watched = settings.rules.iter().enumerate().filter(|rule| is_watched(*rule)).count();
        Self {
            observer: settings.observer.clone(),
            noticed: Mutex::default(),
            to_look_at: AtomicU32::new(LOOKED_AT),
            rules,
            lists: settings.access.iter().map(|_| KeyWatch::default()).collect(),
            new: AtomicU32::new(u32::try_from(watched + settings.access.len()).unwrap_or(u32::MAX)),
            passing: settings.rules.iter().map(|_| KeyWatch::default()).collect(),
            ends_admissions: AtomicBool::new(false),
        }
    }

    /// Whether anything is still watched.
    #[inline]
    pub(super) fn is_watching(&self) -> bool {
        self.looks() || self.looks_for_keys()
    }

    /// Whether the keys of rules and lists are still watched.
    pub(super) fn looks_for_keys(&self) -> bool {
        self.new.load(Ordering::Relaxed) > 0
    }

    /// Ends the watch over a rule or list. Returns `false` if another thread has ended the watch.
    fn is_known_now(&self, of: &KeyWatch) -> bool {
        let first = !of.known.swap(true, Ordering::Relaxed);
        self.new.fetch_sub(u32::from(first), Ordering::Relaxed);
        first
    }

    /// Whether requests are still watched.
    pub(super) fn looks(&self) -> bool {
        self.to_look_at.load(Ordering::Relaxed) > 0
    }

    /// Returns the first warning.
    pub(super) fn first(&self) -> Option<SetupWarning> {
        lock(&self.noticed).first().cloned()
    }

    /// Returns whether no warning of this kind was reported.
    fn is_new(&self, kind: SetupWarningKind) -> bool {
        lock(&self.noticed).iter().all(|setup_warning| setup_warning.kind() != kind)
    }

    /// Reports a warning if it is the first of its kind.
    fn report(&self, kind: SetupWarningKind, text: String) {
        let setup_warning = SetupWarning::new(kind, text);
        let mut noticed = lock(&self.noticed);
        if noticed.iter().any(|other| other.kind() == kind) {
            return; // another thread reported it in the meantime
        }
        noticed.push(setup_warning.clone());
        drop(noticed); // the observer is the application's code
        match &self.observer {
            Some(observer) => observer.on_setup_warning(&setup_warning),
            None => setup_warning.report(),
        }
    }
}

/// Counts down to 0. Returns whether the count was above 0.
fn count_down(left: &AtomicU32) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

fn forwarding_header(head: &Head<'_>) -> Option<HeaderName> {
    FORWARDING.into_iter().find(|name| head.headers.contains_key(name))
}

/// Returns whether a key is the key of the peer's address.
fn is_of_peer(key: Option<&Key>, head: &Head<'_>) -> bool {
    let peer = peer_address(head);
    peer.is_some_and(|peer| [peer, Prefixes::default().group(peer)].into_iter().any(|own| key == Key::of(own).as_ref()))
}

/// Returns whether a forwarding header names the peer, which means that the client runs on the
/// proxy's machine.
fn names_peer(head: &Head<'_>) -> bool {
    let Some(peer) = peer_address(head).map(|peer| peer.to_string()) else { return false };
    let names = |value: &HeaderValue| value.to_str().is_ok_and(|value| value.contains(&peer));
    FORWARDING.into_iter().any(|name| head.headers.get_all(name).iter().any(names))
}

impl Diagnostics {
    /// Reports a warning if it is the first of its kind. Only this method is compiled again for each text.
    pub(super) fn notice(&self, kind: SetupWarningKind, text: impl FnOnce() -> String) {
        if self.is_new(kind) {
            self.report(kind, text());
        }
    }

    /// Watches one of the first requests of a layer.
    pub(super) fn look_at_request(&self, settings: &Settings, head: &Head<'_>) {
        if count_down(&self.to_look_at) {
            self.look_for_peer(settings, head);
        }
    }

    fn look_for_peer(&self, settings: &Settings, head: &Head<'_>) {
        let (rules, lists) = settings.of_source();
        let (rule, list) = (
            settings.rules.iter().position(BoundRule::is_by_peer),
            settings.access.iter().position(BoundList::is_by_peer),
        );
        let in_program = "use key::client_ip(TrustedProxies::count(1)?) or name the proxies' networks";
        let (user, remedy) = match (rule, list) {
            (Some(at), _) if at < rules => (
                "a rule counts by `key: peer-ip`",
                "write `key: client-ip`, which uses the trusted proxies (`--trust` of the server, or \
                 RulesBuilder::trusted_proxies)",
            ),
            (Some(_), _) => ("a rule counts by key::peer_ip", in_program),
            (None, Some(at)) if at < lists => (
                "`allow` and `deny` of the rules look up the address of the peer",
                "name the trusted proxies by RulesBuilder::trusted_proxies",
            ),
            (None, Some(_)) => ("an access list looks up key::peer_ip", in_program),
            (None, None) => return,
        };
        if peer_address(head).is_none() {
            self.peer_is_unknown(user);
        }
        if let Some(name) = forwarding_header(head) {
            self.notice(SetupWarningKind::ProxyNotTrusted, || {
                format!(
                    "{user}, and a request has the header {name}: behind a proxy all clients share the proxy's address, so \
                     {remedy}; without a proxy a client has made the header up, and there is nothing to do"
                )
            });
        }
    }

    fn peer_is_unknown(&self, user: &str) {
        self.notice(SetupWarningKind::PeerUnknown, || {
            format!(
                "{user}, and a request has no peer address: pass the address on (axum: serve \
                 into_make_service_with_connect_info::<SocketAddr>() and enable the feature `axum`; tonic: enable the feature \
                 `tonic`; others: insert a key::PeerAddr into the request's extensions); on a Unix socket no client has an \
                 address, so let the proxy in front report the address and use key::client_ip(TrustedProxies::count(1)?)"
            )
        });
    }

    fn client_is_not_reported(&self, policy: &str, requests: u32, head: &Head<'_>) {
        self.notice(SetupWarningKind::ClientNotReported, || {
            let found = match forwarding_header(head) {
                Some(name) => format!("a request has the header {name}"),
                None => "a request has no forwarding header".to_owned(),
            };
            format!(
                "key::client_ip found no client in the first {requests} requests that the policy {policy:?} applies \
                 to: the header is missing, or has fewer entries than there are proxies, and {found}; all \
                 clients of a proxy share one allowance: name the header that your proxy sends \
                 (TrustedProxies::forwarded, or TrustedProxies::single_header(\"x-real-ip\")), correct the count of \
                 proxies, or use key::peer_ip if there is no proxy; if these were health checks of the proxy, there is \
                 nothing to do"
            )
        });
    }

    /// Watches how a rule matches a request.
    #[cold]
    pub(super) fn look_at_rule(&self, at: usize, bound: &BoundRule, matched: RuleMatch<'_, &Key>, head: &Head<'_>) {
        let applies = matched.applies();
        let key = if let RuleMatch::Charged { key, .. } = matched { Some(key) } else { None };
        let Some(rule) = self.rules.get(at).filter(|rule| !rule.known.load(Ordering::Relaxed)) else {
            return;
        };
        // A rule that trusts networks cannot find the client if the peer's address is unknown. A rule that counts
        // proxies needs no peer address.
        if bound.is_by_proxies() && applies && key.is_none_or(|key| *key == Key::keyless()) {
            self.peer_is_unknown("a rule counts by key::client_ip with TrustedProxies::networks");
            self.is_known_now(rule);
            return;
        }
        let is_unreported = bound.is_by_proxies() && key.is_some_and(Key::is_unnamed);
        let has_key = !is_unreported && key.is_some_and(|key| *key != Key::keyless());
        let asked = rule.asked.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        // A peer that is not a trusted proxy is either the client itself, or a proxy that the networks do not
        // include.
        if bound.is_by_proxies() && has_key && asked < RULE_LOOKED_AT && is_of_peer(key, head) {
            self.look_for_untrusted_proxy(rule, bound, head);
            return;
        }
        let applied = rule.applied.fetch_add(u32::from(applies), Ordering::Relaxed).saturating_add(u32::from(applies));
        let missing_key = bound.rule().missing_key;
        let keyless = if missing_key == MissingKey::Exempt { KEYLESS_EXEMPT } else { KEYLESS };
        let unreported = if forwarding_header(head).is_some() { KEYLESS } else { UNREPORTED };
        let finding = if has_key || asked >= RULE_LOOKED_AT {
            None
        } else if is_unreported {
            if applied < unreported {
                return;
            }
            Some(SetupWarningKind::ClientNotReported)
        } else if applied >= keyless {
            Some(SetupWarningKind::KeyNeverFound)
        } else if applied == 0 && asked >= APPLIES_TO_NONE {
            Some(SetupWarningKind::NeverApplies)
        } else {
            return;
        };
        if !self.is_known_now(rule) {
            return;
        }
        let name = bound.policies().first().map_or("", Policy::name);
        match finding {
            Some(SetupWarningKind::NeverApplies) => self.notice(SetupWarningKind::NeverApplies, || {
                format!(
                    "the policy {name:?} applied to none of the first {asked} requests, so the condition of its rule \
                     (Rule::when) may never hold, or the requests bring no quota (Rule::quota_from); a condition \
                     on the URI never holds inside of axum's `nest` if it names the prefix, which the URI lacks \
                     there, so test key::original_uri(request) instead; if the rule is for rare requests, there is \
                     nothing to do"
                )
            }),
            Some(SetupWarningKind::ClientNotReported) => self.client_is_not_reported(name, applied, head),
            Some(_) if bound.needs_peer() => self.peer_is_unknown("a rule counts by the address of the client"),
            Some(_) => self.notice(SetupWarningKind::KeyNeverFound, || {
                let handling = match missing_key {
                    MissingKey::Reject => "are refused",
                    MissingKey::Shared => "share one allowance",
                    MissingKey::Exempt => "are not limited",
                };
                let peer = match peer_address(head) {
                    None => "a request has no peer address, so if the extractor reads that address, make the server pass it on; ",
                    Some(_) => "",
                };
                format!(
                    "none of the first {applied} requests that the policy {name:?} applies to had a key, and requests \
                     without a key {handling}: {peer}if another layer puts the key into requests (authentication), \
                     place that layer outside of this one; if the extractor reads a header or a cookie, check its \
                     name; if it reads axum's matched route, use Router::route_layer or key::matched_route; if no \
                     client sent a key yet, there is nothing to do"
                )
            }),
            None => {}
        }
    }

    /// Watches a request whose peer is in none of the networks that a rule trusts.
    fn look_for_untrusted_proxy(&self, rule: &KeyWatch, bound: &BoundRule, head: &Head<'_>) {
        let Some(header) = forwarding_header(head).filter(|_| !names_peer(head)) else { return };
        let untrusted = rule.untrusted.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if untrusted < UNTRUSTED || !self.is_known_now(rule) {
            return;
        }
        self.notice(SetupWarningKind::ProxyNotTrusted, || {
            format!(
                "{untrusted} requests that the policy {:?} applies to were forwarded, the last one with the header {header}, \
                 and none so far came from a network that TrustedProxies::networks names: if the peers are proxies, all \
                 clients of a proxy share its address and one allowance, so name the network from which the proxies \
                 reach this server; if there is no proxy, clients have made the header up, and there is nothing to do",
                bound.policies().first().map_or("", Policy::name)
            )
        });
    }

    /// Watches whether a request has the key of a list.
    #[cold]
    pub(super) fn look_at_list(&self, at: usize, by: AddressSource, key: Option<&Key>) {
        if by == AddressSource::Proxies && key.is_none() {
            self.peer_is_unknown("an access list looks up key::client_ip with TrustedProxies::networks");
        }
        let has_key = key.is_some_and(|key| !key.is_unnamed());
        let Some(list) = self.lists.get(at).filter(|list| !list.known.load(Ordering::Relaxed)) else {
            return;
        };
        let asked = list.asked.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if !has_key && asked < KEYLESS_EXEMPT {
            return;
        }
        if self.is_known_now(list) && !has_key {
            self.notice(SetupWarningKind::KeyNeverFound, || {
                format!(
                    "none of the first {asked} requests had the key that access list {} of the layer looks up, so the \
                     list neither allows nor denies anybody: if another layer puts the key into requests \
                     (authentication), place that layer outside of this one; if the extractor reads a header or a \
                     cookie, check its name; if no client sent a key yet, there is nothing to do",
                    at + 1
                )
            });
        }
    }

    /// Watches one of the first requests that a list exempts.
    #[cold]
    pub(super) fn look_for_allowed_proxy(&self, list: &BoundList, head: &Head<'_>) {
        let Some(name) = forwarding_header(head) else { return };
        if list.decided_by_peer(head) {
            self.notice(SetupWarningKind::ProxyAllowed, || {
                format!(
                    "an access list allows a request by the address of its peer, and the request has the header {name}: if \
                     the peer is a proxy, the list exempts every client behind it, so use \
                     key::client_network(TrustedProxies::count(1)?, Prefixes::exact()) for the list or name the proxies' \
                     networks"
                )
            });
        }
    }

    /// Records that a rule applied to a request whose cost fits into the rule's quota.
    pub(super) fn can_pass(&self, rule: usize) {
        if let Some(passing) = self.passing.get(rule) {
            passing.known.store(true, Ordering::Relaxed);
        }
    }

    /// Counts a request that was refused because it costs more than a policy's quota can ever allow, and warns when
    /// a rule has [`NEVER_PASSES`] of them. After a request whose cost fits into the rule's quota, no request of
    /// the rule is counted. A single client may send a request that costs too much, but a rule that allows no
    /// request at all is a mistake.
    pub(super) fn cannot_pass(&self, rule: usize, policy: &Policy, cost: u64) {
        let Some(passing) = self.passing.get(rule).filter(|passing| !passing.known.load(Ordering::Relaxed)) else {
            return;
        };
        let refused = passing.applied.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if refused < NEVER_PASSES {
            return;
        }
        self.notice(SetupWarningKind::NeverPasses, || {
            format!(
                "none of the first {refused} requests that the policy {:?} ({}) applied to can ever pass: the last one \
                 cost {cost} units, but no more than {} can pass at once, so it was refused for good: raise the \
                 quota's burst or limit, lower the cost, or answer such requests otherwise",
                policy.name(),
                policy.quota(),
                policy.quota().capacity(),
            )
        });
    }

    /// Records that a handler ended an admission.
    pub(super) fn admission_has_ended(&self) {
        self.ends_admissions.store(true, Ordering::Relaxed);
    }

    /// Warns about an admission that a handler dropped, though the charge of this policy is settled after the response.
    /// A handler that is dropped because its client disconnected also drops its admission. So the layer warns only if
    /// its handlers have ended no admission.
    #[cold]
    pub(super) fn look_for_dropped_admission(&self, policy: &Policy) {
        if self.ends_admissions.load(Ordering::Relaxed) {
            return;
        }
        self.notice(SetupWarningKind::NotSettled, || {
            format!(
                "a handler dropped the Admission of a request, and the rule of the policy {:?} is settled after the \
                 response (charge_when, refund_when, settle_by_… or on_aborted), so the request was settled as an \
                 aborted one: end the admission by Admission::finish, with the response, or by settle, keep or refund; \
                 if the client disconnected, there is nothing to do",
                policy.name()
            )
        });
    }

    /// Warns about a connection that goes on after its response, while its request no longer holds units.
    #[cold]
    pub(super) fn look_for_released_upgrade(&self) {
        self.notice(SetupWarningKind::NotHeld, || {
            "a response switched protocols (101, or a success of CONNECT), so its body has ended, and its request does not \
             count as in flight any more: take InFlight from the request's extensions, call hold(), and move the place \
             into the task that serves the connection; if the connection is not to count, set Rule::until_head"
                .to_owned()
        });
    }

    /// Warns about a cost that a handler stated, if no rule of the layer is settled by usage.
    #[cold]
    pub(super) fn look_for_lost_cost(&self) {
        self.notice(SetupWarningKind::NotSettled, || {
            "a handler ended an admission by Admission::settle, and no rule of the layer is settled by usage, so all \
             charges stayed as they were: add Rule::settle_by_usage to the rule whose cost the handler states"
                .to_owned()
        });
    }
}
