//! Properties: every header that is sent can be parsed.

use proptest::prelude::*;
use sfv::{BareItem, Item, ListEntry, Parser};

use super::*;
use crate::base::fields;
use crate::base::wait::Wait;
use crate::quota::UNITS_MAX;

/// Parses a list by the draft's rules: the name of each item and its parameters.
fn parse(value: &HeaderValue) -> Vec<(String, Vec<(String, i64)>)> {
    let list: sfv::List = Parser::parse_list(value.as_bytes()).unwrap_or_else(|error| panic!("{value:?}: {error}"));
    let item = |entry: ListEntry| match entry {
        ListEntry::Item(Item { bare_item: BareItem::String(name), params }) => {
            let params = params.iter().filter_map(|(key, value)| Some((key.to_string(), value.as_int()?)));
            (name.to_string(), params.collect())
        }
        other => panic!("{other:?}"),
    };
    assert!(!list.is_empty());
    list.into_iter().map(item).collect()
}

fn any_name() -> impl Strategy<Value = String> {
    proptest::collection::vec(0x20_u8..0x7f, 1..40).prop_map(|bytes| bytes.into_iter().map(char::from).collect())
}

/// Returns whether RFC 9110 allows the value. Peers reject an HTTP/2 response with any other.
fn is_header_value(value: &HeaderValue) -> bool {
    let value = value.as_bytes();
    !value.is_empty() && value.trim_ascii() == value && value.iter().all(|byte| (0x20..0x7f).contains(byte))
}

fn is_number(value: &str) -> bool {
    value.len() <= 15 && value.bytes().all(|byte| byte.is_ascii_digit())
}

fn any_rule() -> impl Strategy<Value = Policy> {
    (
        any_name(),
        any_quota(),
        proptest::option::of(prop_oneof![Just("requests".to_owned()), Just("tokens".to_owned()), any_name()]),
    )
        .prop_map(|(name, quota, unit)| {
            let policy = policy(&name, quota);
            unit.map_or(policy.clone(), |unit| policy.in_unit(&unit).unwrap())
        })
}

fn any_quota() -> impl Strategy<Value = Quota> {
    (prop_oneof![0_u64..2_000_000, 0..=UNITS_MAX, Just(UNITS_MAX)], 1_u64..366 * 86_400 * 1_000_000, 1_u64..1_000, 0..3)
        .prop_map(|(limit, period_us, burst, kind)| {
            let period = Duration::from_micros(period_us);
            match kind {
                0 => Quota::new(limit, period),
                1 => Quota::fixed_window(limit, period),
                _ => Quota::new(limit, period).and_then(|quota| quota.burst(burst)),
            }
        })
        .prop_filter_map("in range", Result::ok)
}

fn any_decision() -> impl Strategy<Value = ChargeDecision> {
    let micros = || prop_oneof![0_u64..10_000_000, any::<u64>()].prop_map(Duration::from_micros);
    let number = || prop_oneof![0_u64..1_100, any::<u64>()];
    let reset = || prop_oneof![4 => micros().prop_map(Some), 1 => Just(None)];
    let wait = prop_oneof![2 => micros().prop_map(Wait::After), 1 => Just(Wait::Unknown), 1 => Just(Wait::Never)];
    prop_oneof![
        (number(), number(), micros(), reset()).prop_map(|(limit, remaining, window, reset)| {
            with_reset(ChargeDecision::allowed(limit, remaining).with_effective_window(window), reset)
        }),
        (number(), number(), wait, reset()).prop_map(|(limit, remaining, wait, reset)| with_reset(
            ChargeDecision::denied(limit, remaining, wait),
            reset
        )),
    ]
}

fn with_reset(decision: ChargeDecision, reset: Option<Duration>) -> ChargeDecision {
    match reset {
        Some(reset) => decision.with_reset_after(reset),
        None => decision,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn headers_parse_as_structured_fields(
        applies in (any_rule(), any_decision().prop_map(Some)),
        mut rules in proptest::collection::vec((any_rule(), proptest::option::of(any_decision())), 0..5),
        at in any::<proptest::sample::Index>(),
        seed in any::<u64>(),
        jitter in any::<u8>(),
        partition in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..40)),
    ) {
        rules.insert(at.index(rules.len() + 1), applies);
        let policies: Vec<Policy> = rules.iter().map(|(policy, _)| policy.clone()).collect();
        let statuses: Vec<(usize, ChargeDecision)> =
            rules.into_iter().enumerate().filter_map(|(index, (_, decision))| Some((index, decision?))).collect();
        let case = |format: Headers| {
            let partition = partition.clone();
            let format = format.jitter(Jitter::percent(jitter)).partition_keys(move |_, _| partition.clone());
            let names = format.names();
            let case = Case { format, policies: policies.clone(), statuses: statuses.clone(), seed, ..Case::default() };
            let headers = case.run();
            for (name, value) in &headers {
                assert!(names.contains(name) && is_header_value(value), "{name}: {value:?}");
            }
            headers
        };

        let headers = case(Headers::draft_11());
        let limits = parse(&headers["ratelimit"]);
        let listed = parse(&headers["ratelimit-policy"]);
        prop_assert_eq!(limits.len(), statuses.len());
        prop_assert_eq!(listed.len(), statuses.len());
        for (item, (index, _)) in items([headers["ratelimit-policy"].as_bytes()].into_iter(), "q").unwrap().iter().zip(&statuses) {
            let unit = Some(policies[*index].unit()).filter(|unit| *unit != "requests");
            prop_assert_eq!(item.2.as_deref(), unit);
        }
        for value in headers.get_all("ratelimit") {
            let list: sfv::List = Parser::parse_list(value.as_bytes()).unwrap();
            for entry in list {
                let ListEntry::Item(item) = entry else { panic!("{value:?}") };
                let pk = item.params.iter().find(|(key, _)| key.as_str() == "pk").map(|(_, value)| value.as_byte_seq().unwrap().as_slice());
                prop_assert_eq!(pk, partition.as_deref());
            }
        }
        let mut longest = None;
        for ((limit, listed), (index, decision)) in limits.iter().zip(&listed).zip(&statuses) {
            let name = policies[*index].name();
            prop_assert_eq!(&limit.0, name);
            prop_assert_eq!(&listed.0, name);
            let find = |(_, parameters): &(String, Vec<(String, i64)>), key: &str| {
                parameters.iter().find(|(known, _)| known == key).map(|(_, value)| *value)
            };
            let (r, t) = (find(limit, "r").unwrap(), find(limit, "t"));
            prop_assert!(r >= 0 && t.is_none_or(|t| t >= 0));
            prop_assert!(find(listed, "q").unwrap() >= 0 && find(listed, "w").unwrap() > 0);
            if !decision.is_allowed() {
                prop_assert_eq!(r, 0);
                prop_assert_eq!(t.is_none(), decision.known_wait_us().is_none());
                prop_assert!(t != Some(0));
                longest = longest.max(t);
            }
        }
        match headers.get("retry-after") {
            Some(value) => prop_assert_eq!(value.to_str().unwrap().parse::<i64>().ok(), longest),
            None => prop_assert!(longest.is_none() || statuses.iter().any(|(_, decision)| decision.wait() == Wait::Never)),
        }

        let headers = case(Headers::draft_07());
        let dictionary: sfv::Dictionary = Parser::parse_dictionary(headers["ratelimit"].as_bytes()).unwrap();
        let all_reset = statuses.iter().all(|(_, decision)| decision.reset_after().is_some());
        prop_assert!(dictionary.len() == 3 || !all_reset && dictionary.len() == 2);
        let list: sfv::List = Parser::parse_list(headers["ratelimit-policy"].as_bytes()).unwrap();
        prop_assert_eq!(list.len(), statuses.len());
        for (name, value) in &case(Headers::draft_06()) {
            if name != "ratelimit-policy" {
                let item: Result<Item, _> = Parser::parse_item(value.as_bytes());
                prop_assert!(item.unwrap().bare_item.as_int().is_some());
            }
        }
        for (name, value) in &case(Headers::x_rate_limit(ResetEncoding::ImfDate).and(Headers::github())) {
            let value = value.to_str().unwrap();
            match name.as_str() {
                "x-ratelimit-reset" => prop_assert!(httpdate::parse_http_date(value).is_ok(), "{}", value),
                "x-ratelimit-resource" => prop_assert!(policies.iter().any(|policy| policy.name().trim() == value)),
                _ => prop_assert!(is_number(value), "{}: {}", name, value),
            }
        }
        for (name, value) in &case(Headers::openai().and(Headers::anthropic())) {
            let value = value.to_str().unwrap();
            if name.as_str().contains("-reset") {
                let is_date = humantime::parse_rfc3339(value).is_ok();
                prop_assert_eq!(is_date, name.as_str().starts_with("anthropic-"), "{}: {}", name, value);
                prop_assert!(is_date || value.ends_with('s'), "{}: {}", name, value);
            } else {
                prop_assert!(is_number(value), "{}: {}", name, value);
            }
        }
        let own = LegacyHeaders::new().limit("l").remaining("r").used("u").policy_name("n");
        for (name, value) in &case(Headers::legacy(own).unwrap()) {
            prop_assert!(name == "n" || is_number(value.to_str().unwrap()), "{}: {:?}", name, value);
        }
    }

    /// For each policy, both headers are ours or both are theirs.
    #[test]
    fn merged_lists_parse_and_take_each_policy_from_one_source(
        policies in proptest::collection::vec(any_line(), 0..3),
        limits in proptest::collection::vec(any_line(), 0..3),
        remaining in 0_u64..100,
        unit in proptest::option::of(any_name()),
        partition in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..5)),
    ) {
        let lines = |name: &'static str, lines: &[Vec<u8>]| -> Vec<(&'static str, Vec<u8>)> {
            lines.iter().map(|line| (name, line.clone())).collect()
        };
        let existing = [lines("ratelimit-policy", &policies), lines("ratelimit", &limits)].concat();
        let known = |name, list| items(existing.iter().filter(|line| line.0 == name).map(|line| &line.1[..]), list);
        let theirs = (known("ratelimit-policy", "q"), known("ratelimit", "r"));

        let mut policy = policy("a", Quota::per_minute(100));
        if let Some(unit) = &unit {
            policy = policy.in_unit(unit).unwrap();
        }
        let mut format = Headers::draft_11();
        if let Some(partition) = partition.clone() {
            format = format.partition_keys(move |_, _| Some(partition.clone()));
        }
        let own = Case { format: format.clone(), policies: vec![policy.clone()], statuses: vec![(0, allowed(100, remaining, secs(30)))], ..Case::default() };
        let own = own.run();
        let ours = (items([own["ratelimit-policy"].as_bytes()].into_iter(), "q").unwrap(), items([own["ratelimit"].as_bytes()].into_iter(), "r").unwrap());
        let merged = merged(&format, &policy, &allowed(100, remaining, secs(30)), &existing);
        let values = |name| merged.get_all(name).iter().map(HeaderValue::as_bytes);
        let all = (items(values("ratelimit-policy"), "q"), items(values("ratelimit"), "r"));
        prop_assert!(all.0.is_some() && all.1.is_some(), "{:?}", merged);
        let all = (all.0.unwrap(), all.1.unwrap());
        let of = |items: &[NamedItem], name: &str| -> Vec<String> {
            items.iter().filter(|item| item.0 == name).map(|item| item.1.clone()).collect()
        };
        let theirs = (theirs.0.unwrap_or_default(), theirs.1.unwrap_or_default());
        let names = [&theirs.0, &theirs.1, &ours.0].into_iter().flatten().map(|item| &item.0);
        for name in names {
            let merged_items = (of(&all.0, name), of(&all.1, name));
            let from_theirs = merged_items == (of(&theirs.0, name), of(&theirs.1, name));
            let from_ours = merged_items == (of(&ours.0, name), of(&ours.1, name));
            prop_assert!(if name == "a" { from_theirs || from_ours } else { from_theirs }, "{}: {:?}", name, merged);
        }
    }

    /// Hostile or broken values never lead to a mix of theirs and ours.
    #[test]
    fn merged_single_values_have_one_source(
        existing in proptest::collection::vec((0_usize..12, any_value()), 0..8),
        remaining in 0_u64..100,
        format in any::<proptest::sample::Index>(),
        status in prop_oneof![Just(200_u16), Just(429)],
    ) {
        const NAMES: [&str; 12] = [
            "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-used-tokens", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "x-ratelimit-used", "x-ratelimit-resource",
            "ratelimit-limit", "ratelimit-remaining", "ratelimit-reset", "retry-after",
        ];
        let formats = [
            Headers::x_rate_limit(ResetEncoding::DeltaSeconds),
            Headers::github().and(Headers::draft_06()),
            Headers::x_rate_limit(ResetEncoding::ImfDate).and(Headers::github()),
            Headers::github().and(families::family("tokens")),
            Headers::legacy(LegacyHeaders::new().used("x-ratelimit-used")).unwrap().and(Headers::x_rate_limit(ResetEncoding::DeltaSeconds)),
            Headers::x_rate_limit(ResetEncoding::DeltaSeconds).and(Headers::github().send(When::OnRefusal)),
            Headers::draft_06().and(Headers::draft_11()),
        ];
        let format = format.get(&formats);
        let existing: Vec<(&'static str, Vec<u8>)> = existing.into_iter().map(|(at, value)| (NAMES[at], value)).collect();
        let decision = if status == 200 { allowed(100, remaining, secs(30)) } else { denied(100, secs(30)) };
        let ours = merged(format, &hundred(), &decision, &[]);
        let merged = merged(format, &hundred(), &decision, &existing);
        let theirs: HeaderMap = existing.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap())).collect();
        for (start, end) in [("x-ratelimit-", ""), ("x-ratelimit-", "-tokens"), ("ratelimit-", "")] {
            let of = |headers: &HeaderMap| -> Vec<(String, HeaderValue)> {
                let is_of = |name: &HeaderName| {
                    let is_of_tokens = name.as_str().ends_with("-tokens");
                    name.as_str().starts_with(start) && is_of_tokens != end.is_empty() && name != "ratelimit-policy"
                };
                let of = headers.iter().filter(|(name, _)| is_of(name));
                let mut of: Vec<_> = of.map(|(name, value)| (name.to_string(), value.clone())).collect();
                of.sort();
                of
            };
            let (merged, ours, theirs) = (of(&merged), of(&ours), of(&theirs));
            prop_assert!(merged == ours || merged == theirs, "{:?} is neither {:?} nor {:?}", merged, ours, theirs);
            if merged != ours {
                let limit = theirs.iter().find(|(name, _)| name.contains("-remaining")).and_then(|(_, value)| fields::whole_part(value.as_bytes()));
                prop_assert!(ours.is_empty() || limit.is_some_and(|limit| limit <= remaining), "{:?}", merged);
            }
        }
        if status == 429 {
            let waits: Vec<_> = merged.get_all("retry-after").iter().collect();
            prop_assert_eq!(waits.len(), 1);
            let wait = waits[0].to_str().unwrap().trim();
            prop_assert!(wait.parse::<u64>().is_ok_and(|wait| wait >= 30) || httpdate::parse_http_date(wait).is_ok(), "{}", wait);
        }
    }
}

/// A line of a list, which may be invalid.
fn any_line() -> impl Strategy<Value = Vec<u8>> {
    let item = "(\"[ab\\\\\"]{0,2}\"|\"a\"|[a-z*]{1,3}|[0-9]{1,3})(;[rqtwx](=(\"[a,;]{0,2}\"|(-?[1-9][0-9]{0,2}|0[0-9]{0,2})(\\.[0-9]{0,2})?|:[A-Za=]{0,4}:|\\?[012]|[a-z]{1,2}|@[0-9]{0,2}))?){0,3}";
    let good = "\"(a|b|c)\";r=[0-9]{1,3};q=[0-9]{1,3}(;t=[0-9]{1,2})?(;w=[1-9])?( ?, ?\"(a|c)\";r=1;q=1)?";
    let bytes = proptest::collection::vec(prop_oneof![Just(b'\t'), 0x20_u8..0x7f, 0x80_u8..=0xff], 0..9);
    prop_oneof![
        item.prop_map(String::into_bytes),
        good.prop_map(String::into_bytes),
        good.prop_map(String::into_bytes),
        bytes,
    ]
}

/// A value of a header with a single value, which may be invalid.
fn any_value() -> impl Strategy<Value = Vec<u8>> {
    let number = "[0-9]{1,2}(\\.[0-9])?|[0-9]{14,21}|-[0-9]|[0-9] , [0-9]|Tue, 16 Jan 2024 16:00:[0-9]{2} GMT|Tue, 16 Jan 9999 16:00:00 GMT";
    let bytes = proptest::collection::vec(prop_oneof![Just(b'\t'), 0x20_u8..0x7f, 0x80_u8..=0xff], 0..9);
    prop_oneof![number.prop_map(String::into_bytes), number.prop_map(String::into_bytes), bytes]
}

/// An item's name, its parameters as text, and its unit.
type NamedItem = (String, String, Option<String>);

/// Parses the items of a list. Returns `None` if a client would ignore it.
fn items<'a>(lines: impl Iterator<Item = &'a [u8]>, units: &str) -> Option<Vec<NamedItem>> {
    let mut items = Vec::new();
    for line in lines {
        let list: sfv::List = Parser::parse_list(&without_dates(line)).ok()?;
        for entry in list {
            let ListEntry::Item(Item { bare_item: BareItem::String(name), params }) = entry else { return None };
            let number =
                |key: &str| params.iter().find(|(known, _)| known.as_str() == key).map(|(_, value)| value.as_int());
            let valid = |key: &str, least: i64| number(key).is_none_or(|n| n.is_some_and(|n| n >= least));
            if number(units).is_none() || !valid(units, 0) {
                return None;
            }
            if units == "r" && !valid("t", 0) || units == "q" && !valid("w", 1) {
                return None;
            }
            let unit = params.iter().find(|(known, _)| known.as_str() == "qu");
            let unit = unit.and_then(|(_, value)| Some(value.as_str()?.to_owned()));
            items.push((name.to_string(), format!("{params:?}"), unit));
        }
    }
    Some(items)
}

/// Writes decimals for dates, which came with RFC 9651. The parser of these tests knows RFC 8941.
fn without_dates(line: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    let (mut rest, mut is_string) = (line, false);
    while let Some((byte, after)) = rest.split_first() {
        text.push(*byte);
        rest = after;
        match byte {
            b'"' => is_string = !is_string,
            b'\\' if is_string => {
                text.extend(after.first());
                rest = after.get(1..).unwrap_or_default();
            }
            b'=' if !is_string && after.first() == Some(&b'@') => {
                let digits = after[1..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                let (date, after_date) = after.split_at(digits + 1);
                if digits > 0 && after_date.first() != Some(&b'.') {
                    text.extend_from_slice(&date[1..]);
                    text.extend_from_slice(b".0");
                    rest = after_date;
                }
            }
            _ => {}
        }
    }
    text
}

#[test]
fn dates_are_decimals_for_the_parser_of_these_tests() {
    for (line, expected) in [
        ("\"a\";x=@12;y=@3", "\"a\";x=12.0;y=3.0"),
        ("\"=@1\";qu=\"\\\"=@0\";x=@2", "\"=@1\";qu=\"\\\"=@0\";x=2.0"),
        ("\"a\";x=@1.5;y=@", "\"a\";x=@1.5;y=@"),
    ] {
        assert_eq!(without_dates(line.as_bytes()), expected.as_bytes());
    }
}

/// Writes headers into a response that has some already.
fn merged(
    format: &Headers,
    policy: &Policy,
    decision: &ChargeDecision,
    existing: &[(&'static str, Vec<u8>)],
) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in existing {
        headers.append(*name, HeaderValue::from_bytes(value).unwrap());
    }
    let refuses = !decision.is_allowed();
    let views = [PolicyView { index: 0, policy, key: Some(&KEY), decision, refuses }];
    let status = if refuses { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    let prepared = prepared(format, std::slice::from_ref(policy));
    write(&prepared, &mut headers, &views, status, refuses.then_some(0));
    headers
}
