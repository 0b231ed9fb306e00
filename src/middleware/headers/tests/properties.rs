//! All that is sent parses.

use proptest::prelude::*;
use sfv::{BareItem, Item, ListEntry, Parser};

use super::*;

/// What a client reads, as the draft's rules have it: of each item the name and its parameters.
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

fn any_quota() -> impl Strategy<Value = Quota> {
    (0_u64..2_000_000, 1_u64..366 * 86_400 * 1_000_000, 1_u64..1_000, 0..3)
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
    prop_oneof![
        (number(), number(), micros(), micros()).prop_map(|(limit, remaining, window, reset)| ChargeDecision::allowed(
            limit, remaining
        )
        .with_effective_window(window)
        .with_reset_after(reset)),
        (number(), number(), proptest::option::of(micros()), micros()).prop_map(|(limit, remaining, wait, reset)| {
            ChargeDecision::denied(limit, remaining, wait).with_reset_after(reset)
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_that_is_sent_parses_as_structured_fields(
        rules in proptest::collection::vec((any_name(), any_quota(), proptest::option::of(any_decision())), 1..6),
        seed in any::<u64>(),
        jitter in any::<u8>(),
    ) {
        let policies: Vec<Policy> = rules.iter().map(|(name, quota, _)| policy(name, *quota)).collect();
        let standings: Vec<(usize, ChargeDecision)> = rules
            .into_iter()
            .enumerate()
            .filter_map(|(index, (_, _, decision))| Some((index, decision?)))
            .collect();
        prop_assume!(!standings.is_empty());
        let case = |format: Headers| {
            let format = format.jitter(Jitter::percent(jitter));
            Case { format, policies: policies.clone(), standings: standings.clone(), seed, ..Case::default() }.run()
        };

        let headers = case(Headers::draft_11());
        let limits = parse(&headers["ratelimit"]);
        let told = parse(&headers["ratelimit-policy"]);
        prop_assert_eq!(limits.len(), standings.len());
        prop_assert_eq!(told.len(), standings.len());
        let mut longest = None;
        for ((limit, told), (index, decision)) in limits.iter().zip(&told).zip(&standings) {
            let name = policies[*index].name();
            prop_assert_eq!(&limit.0, name);
            prop_assert_eq!(&told.0, name);
            let find = |(_, parameters): &(String, Vec<(String, i64)>), key: &str| {
                parameters.iter().find(|(known, _)| known == key).map(|(_, value)| *value)
            };
            let (r, t) = (find(limit, "r").unwrap(), find(limit, "t"));
            prop_assert!(r >= 0 && t.is_none_or(|t| t >= 0));
            prop_assert!(find(told, "q").unwrap() >= 0 && find(told, "w").unwrap() > 0);
            if !decision.is_allowed() {
                prop_assert_eq!(r, 0);
                prop_assert_eq!(t.is_none(), decision.is_never());
                prop_assert!(t != Some(0));
                longest = longest.max(t);
            }
        }
        match headers.get("retry-after") {
            Some(value) => prop_assert_eq!(value.to_str().unwrap().parse::<i64>().ok(), longest),
            None => prop_assert!(standings.iter().all(|(_, decision)| decision.is_allowed())
                || standings.iter().any(|(_, decision)| decision.is_never())),
        }

        let headers = case(Headers::draft_07());
        let dictionary: sfv::Dictionary = Parser::parse_dictionary(headers["ratelimit"].as_bytes()).unwrap();
        prop_assert_eq!(dictionary.len(), 3);
        let list: sfv::List = Parser::parse_list(headers["ratelimit-policy"].as_bytes()).unwrap();
        prop_assert_eq!(list.len(), standings.len());
        for (name, value) in &case(Headers::draft_06()) {
            if name != "ratelimit-policy" {
                let item: Result<Item, _> = Parser::parse_item(value.as_bytes());
                prop_assert!(item.unwrap().bare_item.as_int().is_some());
            }
        }
        case(Headers::x_rate_limit(ResetEncoding::ImfDate).and(Headers::github()));
    }

    #[test]
    fn what_is_merged_parses_and_holds_all_that_was_there(
        existing in proptest::collection::vec("(\"[ab\\\\\"]{0,3}\"|[a-z*]{1,3}|[0-9]{1,3})(;[rqtwx](=(\"[a,;]{0,2}\"|-?[0-9]{1,3}(\\.[0-9]{0,2})?|:[A-Za=]{0,4}:|\\?[012]|[a-z]{1,2}))?){0,3}( ?, ?\"c\";r=1;q=1)?", 1..3),
        remaining in 0_u64..100,
    ) {
        let lines: Vec<(&'static str, &str)> = existing.iter().map(|line| ("ratelimit", line.as_str())).collect();
        let standings = vec![(0, allowed(100, remaining, secs(30)))];
        let headers = Case { standings, existing: &lines, ..Case::default() }.run();
        let values: Vec<&HeaderValue> = headers.get_all("ratelimit").iter().collect();
        let ours = format!("\"default\";r={remaining};t=30");
        if values.len() == existing.len() + 1 {
            // Left alone.
            prop_assert_eq!(values.last().unwrap().to_str().unwrap(), ours);
            for (value, line) in values.iter().zip(&existing) {
                prop_assert_eq!(value.to_str().unwrap(), line);
            }
        } else {
            prop_assert_eq!(values.len(), 1);
            let items = parse(values[0]);
            prop_assert!(items.iter().all(|(_, parameters)| parameters.iter().any(|(key, value)| key == "r" && *value >= 0)));
            let mut before = 0;
            for line in &existing {
                let list: Result<sfv::List, _> = Parser::parse_list(line.as_bytes());
                before += list.unwrap().len();
            }
            prop_assert_eq!(items.len(), before + 1);
        }
    }
}
