//! The conditions that say which requests a rule charges, and the words that explain the
//! conditions.

use std::borrow::Cow;
use std::iter;
use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderName;
use http::header::USER_AGENT;
use percent_encoding::percent_decode_str;

use super::super::names::Names;
use super::super::pattern::{AnyOf, MatchResult};
use super::super::spec::{MatchSpec, Wildcard};
use super::super::times::Times;
use crate::base::head::Head;
use crate::base::time::Humane;
use crate::clock::Clock;
use crate::explanation::NotCharged;
use crate::key::{self, QueryParameter};
use crate::middleware::rule::{Condition, PathIndex, PathPattern, Read, Words};

/// Makes the conditions of a rule, except the condition of the path. All of them must hold.
pub(super) fn conditions(spec: &MatchSpec, names: &Names) -> Vec<Condition> {
    let MatchSpec { not, .. } = spec;
    let wanted = comparisons(spec, names).into_iter().map(|Comparison { of, expected, find }| Condition {
        of,
        expected: Some(expected),
        holds: Arc::new(move |head| find(head) != MatchResult::No),
    });
    let left_out = not.iter().map(|not| {
        let mut all = comparisons(not, names);
        all.extend(path_comparison(&not.path));
        let words: Vec<(&str, Words)> = all.iter().map(|one| (noun(one.of), Arc::clone(&one.expected))).collect();
        let words = move || {
            let words: Vec<String> = words.iter().map(|(noun, expected)| format!("{noun} {}", expected())).collect();
            shortened(words.join(" and ")).into()
        };
        Condition {
            of: NotCharged::LeftOut,
            expected: Some(Arc::new(words)),
            holds: Arc::new(move |head| all.iter().any(|one| (one.find)(head) != MatchResult::Yes)),
        }
    });
    wanted.chain(left_out).collect()
}

/// A comparison of requests with one field of `match` or `not`.
struct Comparison {
    of: NotCharged,
    expected: Words,
    find: Read<MatchResult>,
}

/// Makes the comparisons of `match` or of one entry of `not`, except the comparison of the path.
fn comparisons(spec: &MatchSpec, names: &Names) -> Vec<Comparison> {
    let mut all: Vec<Comparison> = Vec::new();
    let mut add = |of: NotCharged, expected: String, find: Read<MatchResult>| {
        all.push(Comparison { of, expected: words(expected), find });
    };
    let MatchSpec { method, path: _, host, header, query, client, user_agent, action, time, not: _ } = spec.clone();
    if !method.is_empty() {
        add(NotCharged::Method, either(&method), Arc::new(move |head| method.contains(head.method).into()));
    }
    if !host.is_empty() {
        let expected = either(host.iter().map(|Wildcard(host)| host));
        let hosts = AnyOf::new(host.iter().map(|Wildcard(host)| &**host), false);
        let find = move |head: &Head<'_>| match key::host_of(head) {
            Ok(name) if is_plain_host(&name) => hosts.find(&name),
            // The request hides its host, has several hosts, or has a host such as `a.b:x`, which servers read as
            // `a.b`.
            _ => MatchResult::Unclear,
        };
        add(NotCharged::Host, expected, Arc::new(find));
    }
    for (name, value) in header {
        let expected = format!("{name}: {}", value.0);
        let values = AnyOf::new([&*value.0], false);
        add(NotCharged::Header, expected, Arc::new(move |head| find_value(head, &name, &values)));
    }
    for (name, value) in query {
        let expected = format!("{name}={}", value.0);
        let values = AnyOf::new([&*value.0], false);
        let find = move |head: &Head<'_>| match key::parameter(head, &name) {
            QueryParameter::Absent => MatchResult::No,
            QueryParameter::Value(value) => values.find(value.as_bytes()),
            QueryParameter::Unclear => MatchResult::Unclear,
        };
        add(NotCharged::Query, expected, Arc::new(find));
    }
    if !user_agent.is_empty() {
        let expected = either(user_agent.iter().map(|Wildcard(agent)| agent));
        let agents = AnyOf::new(user_agent.iter().map(|Wildcard(agent)| &**agent), true);
        add(NotCharged::UserAgent, expected, Arc::new(move |head| find_value(head, &USER_AGENT, &agents)));
    }
    if !client.is_empty() {
        let (expected, proxies) = (either(&client), names.proxies.clone());
        let find = move |head: &Head<'_>| {
            let address = match &proxies {
                Some(proxies) => key::client_address(proxies, head),
                None => key::peer_address(head),
            };
            // A request without an address is unclear, because a client may hide its address.
            address.map_or(MatchResult::Unclear, |address| {
                let address = address.to_canonical();
                let translated = key::translated_ipv4(address).map(IpAddr::V4);
                let mut addresses = iter::once(address).chain(translated);
                addresses.any(|address| client.iter().any(|network| network.contains(&address))).into()
            })
        };
        add(NotCharged::Client, expected, Arc::new(find));
    }
    if !action.is_empty() {
        let expected = either(action.iter().map(|action| &action.value));
        let actions: Vec<Read<bool>> =
            action.iter().filter_map(|action| names.actions.get(&*action.value).cloned()).collect();
        debug_assert!(actions.len() == action.len(), "the reader refuses an action that is not registered");
        add(NotCharged::Action, expected, Arc::new(move |head| actions.iter().any(|is_it| is_it(head)).into()));
    }
    if !time.is_empty() {
        all.push(time_comparison(&time, names.clock()));
    }
    all
}

/// Makes the comparison with times of the week.
fn time_comparison(time: &[(Box<str>, Times)], clock: Arc<dyn Clock>) -> Comparison {
    let text = shortened(either(time.iter().map(|(text, _)| text)));
    let times = Arc::new(Times::any_of(time.iter().map(|(_, times)| times)));
    let (same, now) = (Arc::clone(&times), Arc::clone(&clock));
    let expected = move || {
        let now = now.now();
        let changes = if same.contains(now) { "ends" } else { "begins" };
        match same.changes_in(now) {
            Some(change) => format!("{text}, which {changes} in {}", Humane(change)).into(),
            None => (*text).into(),
        }
    };
    let find = move |_: &Head<'_>| times.contains(clock.now()).into();
    Comparison { of: NotCharged::Time, expected: Arc::new(expected), find: Arc::new(find) }
}

/// Makes a condition's words, which do not change with time.
fn words(text: String) -> Words {
    let text: Arc<str> = shortened(text).into();
    Arc::new(move || (*text).into())
}

/// Makes the comparison with the paths of an entry of `not`. The paths of `match` are in the index of the layer.
fn path_comparison(patterns: &[PathPattern]) -> Option<Comparison> {
    let index = PathIndex::new(iter::once(patterns))?;
    let find = move |head: &Head<'_>| match index.rules(head).is_empty() {
        true => MatchResult::No,
        false if is_plain_path(key::original_uri(head).path()) => MatchResult::Yes,
        false => MatchResult::Unclear,
    };
    Some(Comparison { of: NotCharged::Path, expected: words(either(patterns)), find: Arc::new(find) })
}

/// Returns the words for a part of a request.
fn noun(part: NotCharged) -> &'static str {
    match part {
        NotCharged::Path => "the path",
        NotCharged::Method => "the method",
        NotCharged::Host => "the host",
        NotCharged::Header => "the header",
        NotCharged::Query => "the parameter",
        NotCharged::UserAgent => "the user agent",
        NotCharged::Client => "the client",
        NotCharged::Time => "the time",
        _ => "the action",
    }
}

/// Lists alternative values, joined by "or".
fn either(values: impl IntoIterator<Item: ToString>) -> String {
    // Takes at most as many values as a shortened text can show.
    values.into_iter().take(EXPECTED_MAX).map(|value| value.to_string()).collect::<Vec<_>>().join(" or ")
}

/// The maximum number of characters in the words of a condition.
const EXPECTED_MAX: usize = 80;

fn shortened(text: String) -> String {
    match text.char_indices().nth(EXPECTED_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

/// Returns whether all servers read a host in the same way. The result is true for a name of letters, digits, `-`, `_`
/// and `.`, or an address in brackets.
fn is_plain_host(host: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    match host {
        [b'[', address @ .., b']'] => address.iter().all(|byte| is_plain(byte) || *byte == b':'),
        name => name.iter().all(is_plain),
    }
}

/// Returns whether no server resolves the path to another path. For example, a server may resolve `/public/../admin` to
/// `/admin`.
fn is_plain_path(path: &str) -> bool {
    let is_odd = |byte: u8| byte == b'/' || byte == b'\\';
    let is_dots = |segment: &str| {
        let name = segment.split(';').next().unwrap_or_default();
        let name: Cow<'_, [u8]> = percent_decode_str(name).into();
        name.iter().copied().any(is_odd) || matches!(&*name, b"." | b"..")
    };
    path.starts_with('/') && !path.split('/').any(is_dots)
}

/// Compares the values of a header. An empty value matches nothing, not even `*`, because some proxies send an empty
/// header in place of one that the client did not send. If only some of several values match, the result is unclear,
/// because other programs may read any one of the values.
fn find_value(head: &Head<'_>, name: &HeaderName, values: &AnyOf) -> MatchResult {
    let mut found = head.headers.get_all(name).iter().map(|value| match value.as_bytes().trim_ascii() {
        b"" => MatchResult::No,
        value => values.find(value),
    });
    let Some(first) = found.next() else { return MatchResult::No };
    found.fold(first, |all, one| if all == one { all } else { MatchResult::Unclear })
}
