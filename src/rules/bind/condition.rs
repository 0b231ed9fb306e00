//! The conditions of a rule: which requests it charges, and how they are explained.

use std::sync::Arc;

use http::HeaderName;
use http::header::USER_AGENT;

use super::super::names::Names;
use super::super::pattern::AnyOf;
use super::super::spec::{MatchSpec, Wildcard};
use crate::explanation::NotCharged;
use crate::head::Head;
use crate::key;
use crate::middleware::rule::{Condition, Read};

/// Makes the conditions of a rule, which must all hold, but for the path's.
pub(super) fn conditions(spec: &MatchSpec, names: &Names) -> Vec<Condition> {
    let mut all: Vec<Condition> = Vec::new();
    let mut add = |of: NotCharged, expected: String, holds: Read<bool>| {
        all.push(Condition { of, expected: Some(shortened(expected).into()), holds });
    };
    let MatchSpec { method, path: _, host, header, client, user_agent, action } = spec.clone();
    if !method.is_empty() {
        add(NotCharged::Method, either(&method), Arc::new(move |head| method.contains(head.method)));
    }
    if !host.is_empty() {
        let expected = either(host.iter().map(|Wildcard(host)| host));
        let hosts = AnyOf::new(host.iter().map(|Wildcard(host)| &**host), false);
        let holds = move |head: &Head<'_>| match key::host_of(head) {
            Ok(name) if is_plain_host(&name) => hosts.matches(&name),
            // A request that hides its host, or has several, must not escape the rule. Servers read `a.b:x` as
            // `a.b`.
            _ => true,
        };
        add(NotCharged::Host, expected, Arc::new(holds));
    }
    for (name, value) in header {
        let expected = format!("{name}: {}", value.0);
        let values = AnyOf::new([&*value.0], false);
        let holds = move |head: &Head<'_>| has_value(head, &name, |own| values.matches(own));
        add(NotCharged::Header, expected, Arc::new(holds));
    }
    if !user_agent.is_empty() {
        let expected = either(user_agent.iter().map(|Wildcard(agent)| agent));
        let agents = AnyOf::new(user_agent.iter().map(|Wildcard(agent)| &**agent), true);
        let holds = move |head: &Head<'_>| has_value(head, &USER_AGENT, |own| agents.matches(own));
        add(NotCharged::UserAgent, expected, Arc::new(holds));
    }
    if !client.is_empty() {
        let (expected, proxies) = (either(&client), names.proxies.clone());
        let holds = move |head: &Head<'_>| {
            let address = match &proxies {
                Some(proxies) => key::client_address(proxies, head),
                None => key::peer_address(head),
            };
            // A client that hides its address must not escape the rule.
            address.is_none_or(|address| {
                let address = address.to_canonical();
                client.iter().any(|network| network.contains(&address))
            })
        };
        add(NotCharged::Client, expected, Arc::new(holds));
    }
    if !action.is_empty() {
        let expected = either(action.iter().map(|action| &action.value));
        let actions: Vec<Read<bool>> =
            action.iter().filter_map(|action| names.actions.get(&*action.value).cloned()).collect();
        debug_assert!(actions.len() == action.len(), "the reader refuses an action that is not registered");
        add(NotCharged::Action, expected, Arc::new(move |head| actions.iter().any(|is_it| is_it(head))));
    }
    all
}

/// Lists values of which one must hold.
fn either(values: impl IntoIterator<Item: ToString>) -> String {
    // Enough of them for a text that is shortened.
    values.into_iter().take(EXPECTED_MAX).map(|value| value.to_string()).collect::<Vec<_>>().join(" or ")
}

/// The most characters of a condition's words.
const EXPECTED_MAX: usize = 80;

fn shortened(text: String) -> String {
    match text.char_indices().nth(EXPECTED_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

/// Returns whether all servers read a host alike: it is a name of letters, digits, `-`, `_` and `.`, or an address in
/// brackets.
fn is_plain_host(host: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    match host {
        [b'[', address @ .., b']'] => address.iter().all(|byte| is_plain(byte) || *byte == b':'),
        name => name.iter().all(is_plain),
    }
}

fn has_value(head: &Head<'_>, name: &HeaderName, is_it: impl Fn(&[u8]) -> bool) -> bool {
    head.headers.get_all(name).iter().any(|value| is_it(value.as_bytes().trim_ascii()))
}
