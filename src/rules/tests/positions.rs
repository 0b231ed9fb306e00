//! The content of a file arrives in the spec, and problems have the positions that people see.

use std::time::Duration;

use super::super::error::Problems;
use super::super::problem::{Position, RulesErrorKind, similar};
use super::super::read::{KnownNames, can_be_registered, read};
use super::super::report::NameKind;
use super::super::spec::{CostSpec, FileSpec, KeySpec, QuotaSpec};
use super::{NAMES, accepted, spec};
use crate::middleware::rule::Segment;
use crate::quota::Quota;
use crate::{MissingKey, Mode};

fn accepted_file(title: &str) -> super::FileSpec {
    let case = accepted().into_iter().find(|case| case.title == title).unwrap();
    spec(&case.text).unwrap()
}

#[test]
fn every_field_arrives() {
    let file = accepted_file("every field");
    let rule = file.rules.first().unwrap();
    assert_eq!((&**rule.name, rule.name.position), ("search", Position { line: 3, column: 11 }));
    assert_eq!(&***rule.was.as_ref().unwrap(), "find");
    let QuotaSpec::All(quotas) = &rule.quota else { panic!("{rule:?}") };
    assert_eq!(quotas.first().unwrap().value, Quota::per_minute(100).burst(20).unwrap());
    let key: Vec<&KeySpec> = rule.key.iter().map(|key| &key.value).collect();
    let header = KeySpec::Header(http::HeaderName::from_static("x-api-key"));
    let (cookie, query) = (KeySpec::Cookie("sid".into()), KeySpec::Query("user".into()));
    assert_eq!(key, [&header, &cookie, &query, &KeySpec::Registered("tenant".into())]);
    let matches = &rule.matches;
    assert_eq!(matches.method, ["GET", "POST", "PURGE"]);
    let paths: Vec<&[Segment]> = matches.path.iter().map(|path| path.segments.as_slice()).collect();
    let literal = |text: &str| Segment::Literal(text.into());
    let expected: [&[Segment]; 5] = [
        &[literal("v1"), Segment::Any],
        &[literal("v1"), Segment::Any, literal("files"), Segment::Rest],
        &[literal("")],
        &[literal("v2"), literal("")],
        &[literal("{a}")],
    ];
    assert_eq!(paths, expected);
    let hosts: Vec<&str> = matches.host.iter().map(|host| &*host.0).collect();
    assert_eq!(hosts, ["*.example.com", "[2001:db8::1]"]);
    let headers: Vec<(&str, &str)> = matches.header.iter().map(|(name, value)| (name.as_str(), &*value.0)).collect();
    assert_eq!(headers, [("x-beta", "*"), ("accept", "application/*")]);
    let parameters: Vec<(&str, &str)> = matches.query.iter().map(|(name, value)| (&**name, &*value.0)).collect();
    assert_eq!(parameters, [("debug", "*"), ("sort by", "name*")]);
    assert_eq!(
        matches.client.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["10.0.0.0/8", "2001:db8::/32", "192.0.2.1/32"]
    );
    assert_eq!(matches.user_agent.iter().map(|agent| &*agent.0).collect::<Vec<_>>(), ["*bot*"]);
    assert_eq!(matches.action.iter().map(|action| &***action).collect::<Vec<_>>(), ["create_post"]);
    let cost = CostSpec::Header { name: http::HeaderName::from_static("x-cost"), at_most: 20 };
    assert_eq!(rule.cost.as_ref().unwrap().value, cost);
    assert_eq!((rule.mode, rule.missing_key, rule.warn_at), (Mode::Degrade, MissingKey::Shared, Some(80)));
    let (minutes, hour) = (Duration::from_secs(600), Duration::from_secs(3_600));
    assert_eq!(rule.block.as_ref().unwrap().value, Quota::block(5, minutes, hour).unwrap());
    assert_eq!(rule.candidate.as_ref().unwrap().value, Quota::per_minute(60));
    assert!(!rule.is_enabled);
    let networks = |list: &[super::super::spec::At<ipnet::IpNet>]| {
        list.iter().map(|network| network.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(networks(&file.access.allow), ["192.0.2.0/24"]);
    assert_eq!(networks(&file.access.deny), ["203.0.113.7/32"]);
}

#[test]
fn what_is_left_out_arrives() {
    let file = accepted_file("what a rule leaves out");
    let [all, some] = file.rules.as_slice() else { panic!("{file:?}") };
    let [not] = all.matches.not.as_slice() else { panic!("{all:?}") };
    assert_eq!((not.method.len(), not.path.len(), not.host.len(), not.header.len()), (2, 1, 1, 1));
    assert_eq!((not.query.len(), not.client.len(), not.user_agent.len(), not.action.len()), (1, 2, 1, 1));
    assert_eq!((some.matches.path.len(), some.matches.not.len()), (1, 2));
    assert!(some.matches.client.is_empty() && some.matches.not.iter().all(|not| not.not.is_empty()));
}

#[test]
fn defaults_are_those_of_rules() {
    let file = accepted_file("the smallest rule");
    let rule = file.rules.first().unwrap();
    assert_eq!((rule.mode, rule.missing_key, rule.warn_at), (Mode::Enforce, MissingKey::Reject, None));
    assert!(rule.is_enabled);
    assert!(rule.cost.is_none() && rule.block.is_none() && rule.candidate.is_none() && rule.was.is_none());
    assert!(rule.matches.method.is_empty() && rule.matches.path.is_empty() && rule.matches.action.is_empty());
}

#[test]
fn plans_arrive_in_their_order() {
    let file = accepted_file("plans");
    let QuotaSpec::Plans(plans) = &file.rules.first().unwrap().quota else { panic!("{file:?}") };
    let quotas: Vec<(&str, String)> = plans.quotas.iter().map(|(name, quota)| (&***name, quota.to_string())).collect();
    let pro = "100000 per 30 days, token bucket".to_owned();
    assert_eq!(quotas, [("free", "10 per minute, token bucket".to_owned()), ("pro", pro)]);
    assert_eq!(plans.otherwise, 0);
    assert_eq!(plans.by.value, KeySpec::Header(http::HeaderName::from_static("x-plan")));
}

#[test]
fn short_list_counts_clients_by_action() {
    let file = accepted_file("the short list");
    let actions =
        file.rules.iter().map(|rule| (&**rule.name, rule.key.first().unwrap().value.clone(), &rule.matches.action));
    for (name, key, action) in actions {
        assert_eq!(key, KeySpec::ClientIp);
        assert_eq!(action.iter().map(|action| &***action).collect::<Vec<_>>(), [name]);
    }
    let buy = accepted_file("a short list with more");
    assert!(buy.rules.first().unwrap().matches.action.is_empty());
}

#[test]
fn names_that_may_be_registered_are_noted_once() {
    let text = "- {action: buy, unit: day, requests_per_unit: 5, key: [tenant, somebody]}\n\
                - {action: sell, unit: day, requests_per_unit: 5, key: [somebody, clinet-ip]}\n";
    assert!(spec(text).is_err());
    let names = KnownNames { are_all: false, ..NAMES };
    let noted = read(text.as_bytes(), names, |_, problems| problems.take_names()).unwrap();
    let noted: Vec<_> = noted.iter().map(|name| (name.kind(), name.name(), name.problem().line())).collect();
    let expected = [
        (NameKind::Action, "buy", 1),
        (NameKind::Key, "somebody", 1),
        (NameKind::Action, "sell", 2),
        (NameKind::Key, "clinet-ip", 2),
    ];
    assert_eq!(noted, expected);
    let misspelt = read(text.as_bytes(), names, |_, problems| problems.take_names()).unwrap().pop().unwrap();
    assert_eq!(misspelt.problem().suggestion(), Some("client-ip"));
    assert_eq!(misspelt.problem().excerpt(), text.lines().nth(1).unwrap());
}

#[test]
fn registered_names_differ_from_ready_made_ones() {
    assert!(can_be_registered("tenant"));
    for name in ["", "client-ip", "header", "cookie", "header:x", "cookie=x", "/x", "two words", "a\tb"] {
        assert!(!can_be_registered(name), "{name:?}");
    }
}

/// A later step reports its own problems in the same way.
#[test]
fn problems_of_a_later_step_have_their_lines() {
    let text = "rules:\r\n- {name: a, quota: 5/s, key: tenant}\r\n";
    let error = read(text.as_bytes(), NAMES, |file, problems| {
        let position = file.rules.first().and_then(|rule| rule.key.first()).map(|key| key.position).unwrap();
        problems.add(RulesErrorKind::Name, position, "the tenants are away");
    });
    let error = error.unwrap_err();
    let line = "- {name: a, quota: 5/s, key: tenant}\n                             ^";
    assert_eq!(error.to_string(), format!("2:30: the tenants are away\n{line}"));
    assert_eq!(error.kind(), RulesErrorKind::Name);
    let [problem] = error.problems() else { panic!("{error}") };
    assert_eq!((problem.line(), problem.column(), problem.message()), (2, 30, "the tenants are away"));
    assert_eq!(problem.to_string(), "2:30: the tenants are away");
}

#[test]
fn lines_are_counted_as_the_parser_counts_them() {
    for text in
        ["a: 1\nrulez: 1", "a: 1\r\nrulez: 1", "a: 1\rrulez: 1", "\u{feff}a: 1\nrulez: 1", "a: é\u{85}\nrulez: 1"]
    {
        let error = spec(text).unwrap_err();
        let problem = error.problems().iter().find(|problem| problem.suggestion() == Some("rules"));
        let problem = problem.unwrap_or_else(|| panic!("{text:?}: {error}"));
        assert_eq!((problem.line(), problem.column(), problem.excerpt()), (2, 1, "rulez: 1"), "{text:?}");
    }
}

#[test]
fn only_the_first_problems_are_kept() {
    let text = format!("rules:\n{}", "- {}\n".repeat(50));
    let error = spec(&text).unwrap_err();
    assert_eq!((error.problems().len(), error.more()), (100, 50));
    assert!(error.to_string().ends_with("\nand 50 more problems"));
    let mut problems = Problems::new("");
    problems.add(RulesErrorKind::File, Position::START, "the file does not exist");
    assert_eq!(problems.into_error().to_string(), "the file does not exist");
}

#[test]
fn files_that_are_not_text_are_refused_where_they_end() {
    let refused = |bytes: &[u8]| read(bytes, NAMES, |_, _| ()).unwrap_err().to_string();
    let utf8 = "the file is not UTF-8: save it in this encoding";
    assert_eq!(refused(b"a: 1\nb: \xff\n"), format!("2:4: {utf8}\nb:\n   ^"));
    assert!(refused(b"\xff\xfer\0u\0").starts_with(&format!("1:1: {utf8}")));
    assert!(refused(b"rules: []\x1b[2J").starts_with("1:10: the file has the control character U+001B"));
}

#[test]
fn words_are_similar_if_they_could_be_misspelt() {
    let similar = |word| similar(word, ["quota", "key", "missing-key", "match"]);
    for (word, meant) in [("quotas", "quota"), ("Key", "key"), ("missing_key", "missing-key"), ("macth", "match")] {
        assert_eq!(similar(word), Some(meant));
    }
    for word in ["", "x", "limit", "quotation", &"quota".repeat(100)] {
        assert_eq!(similar(word), None, "{word}");
    }
}

/// The comparison takes a time in proportion to the square of the length.
#[test]
fn long_words_are_compared_with_none() {
    let known = "n".repeat(64);
    let similar = |length| similar(&"n".repeat(length), [&*known]);
    assert_eq!([63, 64, 65, 66].map(|length| similar(length).is_some()), [true, true, false, false]);
}

/// Places are looked up in their order, so each part of a line is passed once.
#[test]
fn excerpts_of_one_long_line_are_those_of_their_columns() {
    for (before, unit) in [("", "{quote: 5}, "), ("é", "{quöte: 5}, ")] {
        let text = format!("# {before}\r\n{{rules: [{}]}}", unit.repeat(30));
        let error = spec(&text).unwrap_err();
        let line: Vec<char> = text.lines().nth(1).unwrap().chars().collect();
        for problem in error.problems() {
            assert_eq!(problem.line(), 2);
            let shown = problem.to_string().len() + 1; // where the excerpt begins in the alternate form
            let alternate = format!("{problem:#}");
            let (excerpt, mark) = alternate[shown..].split_once('\n').unwrap();
            let marked = excerpt.chars().nth(mark.chars().count() - 1);
            assert_eq!(marked, line.get(problem.column() - 1).copied(), "{alternate}");
        }
        assert!(error.problems().iter().any(|problem| problem.column() > 250), "{error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn problems_in_one_line_cost_as_little_as_in_many() {
    let names = KnownNames { are_all: false, ..NAMES };
    // The error keeps the first hundred problems, and all names that are not registered.
    for (wrong, problems) in [(r#""quote": "5/s""#, 100), (r#""quota": "5/s", "key": "=N""#, 9_900)] {
        let of = |separator: &str| {
            let rule = |n: usize| format!(r#"{{"name": "r{n}", {}}}"#, wrong.replace('N', &n.to_string()));
            let text = format!("{{\"rules\": [{}]}}", (0..9_900).map(rule).collect::<Vec<_>>().join(separator));
            let began = super::running_time();
            let count = match read(text.as_bytes(), names, |_, problems| problems.take_names().len()) {
                Ok(count) => count,
                Err(error) => error.problems().len(),
            };
            assert_eq!(count, problems);
            super::running_time() - began
        };
        let (many, one) = (of(",\n"), of(","));
        assert!(one < 2 * many, "{one} ns, and {many} ns in lines");
    }
}

#[test]
fn rules_take_over_what_they_do_not_say_themselves() {
    let text = "defaults: {quota: 5/s, mode: shadow, match: {path: /d, method: GET}}
templates:
  t: {quota: 6/s, key: host, match: {path: /t}}
rules:
  - {name: a, key: path}
  - {name: b, use: t}
  - {name: c, use: t, quota: 7/s, match: {path: /c}, mode: enforce}";
    let FileSpec { rules, unused, .. } = spec(text).unwrap();
    assert!(unused.is_empty());
    let seen = rules.iter().map(|rule| {
        let QuotaSpec::All(quotas) = &rule.quota else { panic!("no rule has plans") };
        let paths: Vec<String> = rule.matches.path.iter().map(ToString::to_string).collect();
        (
            quotas[0].limit(),
            quotas[0].position.line,
            rule.key[0].position.line,
            paths.concat(),
            rule.matches.method.len(),
            rule.mode,
        )
    });
    let expected = [
        (5, 1, 5, "/d".to_owned(), 1, Mode::Shadow),
        (6, 3, 3, "/t".to_owned(), 0, Mode::Shadow),
        (7, 7, 3, "/c".to_owned(), 0, Mode::Enforce),
    ];
    assert!(seen.eq(expected));
}
