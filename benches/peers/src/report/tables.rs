//! The tables, by name.

use std::collections::BTreeMap;

use super::build::PROFILES;
use super::case::{Better, Case, Row, SPREAD, figure};
use super::cells::{NONE, lines, ratio};
use super::headline::{HEADLINE, peer_in_the_first_table};
use super::results::Everything;
use super::runs;
use crate::contenders::{ALIKE, NAME};

/// Returns a table in Markdown. Cells without a figure have a dash.
pub fn table(all: &Everything, name: &str) -> Option<String> {
    match name {
        "families" => Some(families(all)),
        "headline" => Some(headline(all, 0)),
        "headline, like for like" => Some(headline(all, 1)),
        "router" => Some(router(all)),
        "router runs" => Some(runs::table(&all.runs, "router")),
        "server runs" => Some(runs::table(&all.runs, "server")),
        "server" => Some(each_profile(
            all,
            "server",
            &with_size("10k addresses", &["allowed, no headers", "allowed, headers", "refused, headers"]),
            &server_cell,
        )),
        "check" => Some(check(all)),
        "check runs" => Some(runs::table(&all.runs, "check")),
        "profile" => Some(profile(all)),
        "keys" => Some(keys(all)),
        "layer" => Some(each_profile(all, "layer", &with_size("10k addresses", &SETUPS), &with_spread)),
        "losses" => Some(losses(all)),
        "aims" => Some(aims(all)),
        "features" => Some(features(all)),
        "tiers" => Some(cases(all, "tiers", "ns added")),
        "adopt" => Some(adopt(all)),
        _ => None,
    }
}

/// The families of cases, and a description of each.
const FAMILIES: [(&str, &str); 13] = [
    ("router", "a layer in an axum router"),
    ("server", "a whole axum server under `wrk`"),
    ("check", "a check of a limiter"),
    ("profile", "instructions and cache misses of a check, counted by valgrind"),
    ("keys", "a check and the memory in use, over the number of keys"),
    ("layer", "a layer around a service that does nothing"),
    ("algorithms", "this crate's algorithms"),
    ("features", "the cost of each feature of the layer"),
    ("tiers", "one layer of three policies, and three layers"),
    ("memory", "allocated bytes for each key"),
    ("stream", "ten million fresh keys"),
    ("redis", "checks through Redis; starts a `redis-server`"),
    ("adopt", "crates and seconds that a limiter adds to a build"),
];

fn families(all: &Everything) -> String {
    let head = ["family", "what", "last run, seconds: release", "thin"].map(str::to_owned);
    let seconds = |profile: &str, family: &str| {
        let seconds = all.family(profile, family).map(|results| results.seconds).filter(|seconds| *seconds > 0.0);
        seconds.map_or(NONE.to_owned(), figure)
    };
    let row = |(family, what): &(&str, &str)| {
        let seconds = PROFILES.map(|(profile, _)| seconds(profile, family));
        [format!("`{family}`"), (*what).to_owned()].into_iter().chain(seconds).collect()
    };
    lines(&head, FAMILIES.iter().map(row))
}

const SETUPS: [&str; 4] = ["allowed, no headers", "allowed, headers", "refused, headers", "refused, no headers"];

/// A column: its title, and the name of its case.
type Column = (String, String);

fn with_size(size: &str, setups: &[&str]) -> Vec<Column> {
    setups.iter().map(|setup| ((*setup).to_owned(), format!("{setup}, {size}"))).collect()
}

/// One row for each contender, one column for each case.
fn matrix(
    all: &Everything,
    profile: &str,
    family: &str,
    columns: &[Column],
    cell: &dyn Fn(&Case, &Row) -> String,
) -> String {
    let cases: Vec<Option<&Case>> = columns.iter().map(|(_, name)| all.case(profile, family, name)).collect();
    let mut names: Vec<&str> = Vec::new();
    for row in cases.iter().flatten().flat_map(|case| &case.rows) {
        if !names.contains(&row.contender.as_str()) {
            names.push(&row.contender);
        }
    }
    let head: Vec<String> =
        std::iter::once(String::new()).chain(columns.iter().map(|(title, _)| title.clone())).collect();
    let cell = |case: &Option<&Case>, name: &str| {
        case.and_then(|case| Some(cell(case, case.row(name)?))).unwrap_or_else(|| NONE.to_owned())
    };
    let row = |name: &str| std::iter::once(name.to_owned()).chain(cases.iter().map(|case| cell(case, name))).collect();
    lines(&head, names.into_iter().map(row))
}

/// A matrix for each profile, with a line that says where it was measured.
fn each_profile(all: &Everything, family: &str, columns: &[Column], cell: &dyn Fn(&Case, &Row) -> String) -> String {
    let of = |(profile, told): &(&str, &str)| {
        let taken = &all.family(profile, family)?.taken;
        Some(format!("With {told} ({taken}):\n\n{}\n", matrix(all, profile, family, columns, cell)))
    };
    PROFILES.iter().filter_map(of).collect()
}

/// The median, and the distance of the quartiles.
fn with_spread(_: &Case, row: &Row) -> String {
    let spread = row.notes.get(SPREAD).map_or(String::new(), |spread| format!(" ± {spread:.0} %"));
    figure(row.value) + &spread
}

fn router(all: &Everything) -> String {
    let usual = with_size("10k addresses", &SETUPS);
    let others = |setup: &str| {
        ["one address", "1M addresses"].map(|size| (format!("{setup}, {size}"), format!("{setup}, {size}")))
    };
    let others: Vec<Column> = SETUPS[..2].iter().flat_map(|setup| others(setup)).collect();
    let allocations =
        |_: &Case, row: &Row| row.notes.get("allocations added").map_or(NONE.to_owned(), |count| figure(*count));
    let (profile, _) = PROFILES[0];
    format!(
        "{}Other numbers of addresses, with Cargo's release profile:\n\n{}\nAllocations added:\n\n{}",
        each_profile(all, "router", &usual, &with_spread),
        matrix(all, profile, "router", &others, &with_spread),
        matrix(all, profile, "router", &usual, &allocations),
    )
}

/// The throughput relative to the server without a layer, and what a request takes more of the processor.
fn server_cell(case: &Case, row: &Row) -> String {
    let spread = row.notes.get(SPREAD).copied().unwrap_or(0.0);
    if row.contender == case.against {
        let took = row.notes.get("CPU µs").copied().unwrap_or(0.0);
        return format!("{:.0} ± {spread:.0} % requests/s; {took:.1} µs", row.value);
    }
    let over = row.notes.get("CPU µs over bare").copied().unwrap_or(0.0);
    format!("{:.2} ± {spread:.0} %; {over:+.1} µs", row.ratio.unwrap_or(0.0))
}

fn check(all: &Everything) -> String {
    let asked = ["allowed", "denied", "allowed, two threads"];
    let columns = |kinds: [&str; 3]| -> Vec<Column> {
        asked
            .iter()
            .flat_map(|asked| kinds.map(|kind| (format!("{asked}, {kind}"), format!("{asked}, {kind}"))))
            .collect()
    };
    let zipf = |kind: &str| (format!("Zipf, {kind}"), format!("allowed, Zipf, {kind}"));
    let mut addresses = columns(["10k addresses", "1M addresses", "one address"]);
    addresses.push(zipf("1M addresses"));
    let mut texts = columns(["10k texts", "1M texts", "one text"]);
    texts.push(zipf("1M texts"));
    each_profile(all, "check", &addresses, &with_spread) + &each_profile(all, "check", &texts, &with_spread)
}

fn profile(all: &Everything) -> String {
    let (profile, _) = PROFILES[0];
    let Some(results) = all.family(profile, "profile") else { return String::new() };
    let columns: Vec<Column> = results.cases.iter().map(|case| (case.name.clone(), case.name.clone())).collect();
    let cell = |_: &Case, row: &Row| {
        let misses = |cache: &str| row.notes.get(&format!("misses of the {cache} cache")).copied().unwrap_or(0.0);
        format!("{}; {:.1}; {:.1}", figure(row.value), misses("first"), misses("last"))
    };
    matrix(all, profile, "profile", &columns, &cell)
}

fn keys(all: &Everything) -> String {
    let sizes = ["100", "1k", "10k", "100k", "1M", "10M"];
    let columns: Vec<Column> = sizes.map(|size| (size.to_owned(), format!("{size} addresses"))).into();
    let cell = |_: &Case, row: &Row| {
        let resident = row.notes.get("resident kB").map_or(0.0, |kilobytes| kilobytes / 1e3);
        format!("{} ns; {resident:.1} MB", figure(row.value))
    };
    each_profile(all, "keys", &columns, &cell)
}

/// The four ratios to a peer: as it comes and like for like, with both profiles.
fn ratios(all: &Everything, family: &str, case: &str, peer: &str) -> [Option<f64>; 4] {
    [(0, NAME), (0, ALIKE), (1, NAME), (1, ALIKE)]
        .map(|(profile, own)| all.case(PROFILES[profile].0, family, case)?.cost(own, peer))
}

fn head(first: &[&str]) -> Vec<String> {
    let last = ["as it comes", "like for like", "as it comes, thin LTO", "like for like, thin LTO"];
    first.iter().chain(&last).map(|title| (*title).to_owned()).collect()
}

/// Medians of the newest runs that were repeated on each machine, with each profile: as it comes, or like for like.
fn headline(all: &Everything, own: usize) -> String {
    let row = |(told, family, case, peer): &(&str, &str, &str, &str)| {
        let cell = |machine: &str, profile: &str| {
            ratio(runs::newest(&all.runs, machine, family, profile, case).map(|both| both[own]), 1.0)
        };
        [(*told).to_owned(), (*peer).to_owned()].into_iter().chain(on_each_machine(all, &cell)).collect()
    };
    lines(&with_machines(all, &["case", "peer"]), HEADLINE.iter().map(row))
}

/// The first table as a chart, with the first profile.
pub fn summary(all: &Everything) -> Vec<Case> {
    let percent = |contender: String, ratio: f64| Row {
        contender,
        value: (100.0 * ratio).round(),
        ratio: None,
        notes: BTreeMap::new(),
    };
    let case = |(told, family, case, peer): &(&str, &str, &str, &str)| {
        let own = |machine: &String| {
            let [as_it_comes, _] = runs::newest(&all.runs, machine, family, PROFILES[0].0, case)?;
            Some(percent(format!("{NAME}, {machine}"), as_it_comes))
        };
        let rows = runs::machines(&all.runs).iter().filter_map(own).collect::<Vec<_>>();
        Case {
            name: (*told).to_owned(),
            unit: "% of the peer's time".to_owned(),
            better: Better::Lower,
            against: (*peer).to_owned(),
            rows: rows.into_iter().chain([percent((*peer).to_owned(), 1.0)]).collect(),
            remarks: Vec::new(),
        }
    };
    HEADLINE.iter().map(case).collect()
}

/// One cell for each machine and profile.
fn on_each_machine(all: &Everything, cell: &dyn Fn(&str, &str) -> String) -> Vec<String> {
    let of = |machine: &String| PROFILES.map(|(profile, _)| cell(machine, profile));
    runs::machines(&all.runs).iter().flat_map(of).collect()
}

/// The titles of columns, the last of them for [`on_each_machine`].
fn with_machines(all: &Everything, first: &[&str]) -> Vec<String> {
    let title = |machine: &str, profile: &str| match profile {
        profile if profile == PROFILES[0].0 => machine.to_owned(),
        _ => format!("{machine}, thin LTO"),
    };
    first.iter().map(|title| (*title).to_owned()).chain(on_each_machine(all, &title)).collect()
}

/// The families in which peers take part, and what the table calls their cases.
const COMPARED: [(&str, &str); 8] = [
    ("router", "axum router"),
    ("server", "whole server"),
    ("check", "check"),
    ("keys", "check"),
    ("layer", "bare service"),
    ("memory", "memory"),
    ("stream", "stream"),
    ("redis", "Redis"),
];

/// Every case in which a peer is better, in any column.
fn losses(all: &Everything) -> String {
    let mut rows = Vec::new();
    for (family, told) in COMPARED {
        let Some(results) = all.family(PROFILES[0].0, family) else { continue };
        for case in &results.cases {
            let is_peer = |row: &&Row| !row.contender.starts_with(NAME) && row.contender != "no layer";
            for peer in case.rows.iter().filter(is_peer) {
                let found = ratios(all, family, &case.name, &peer.contender);
                // A peer whose cost is lost in noise is better as well.
                if found.iter().flatten().any(|ratio| (ratio * 100.0).round() > 100.0 || *ratio < 0.0) {
                    let cells = found.map(|found| ratio(found, 1.0));
                    let first = [format!("{told}, {}", case.name), peer.contender.clone()];
                    rows.push(first.into_iter().chain(cells).collect());
                }
            }
        }
    }
    lines(&head(&["case", "peer"]), rows.into_iter())
}

const FOLDHASH: &str = "governor with foldhash";

/// An aim: what it says, family, case, ours, the contender that ours is compared with, and the ratio that is aimed at.
type Aim = (&'static str, &'static str, &'static str, &'static str, &'static str, f64);

#[rustfmt::skip]
const AIMS: [Aim; 27] = [
    ("axum router, allowed, no headers", "router", "allowed, no headers, 10k addresses", NAME, "tower_governor", 1.0),
    ("axum router, allowed, headers", "router", "allowed, headers, 10k addresses", NAME, "tower_governor", 0.85),
    ("axum router, allowed, no headers, like for like", "router", "allowed, no headers, 10k addresses", ALIKE, "tower_governor", 0.97),
    ("axum router, allowed, headers, like for like", "router", "allowed, headers, 10k addresses", ALIKE, "tower_governor", 0.80),
    ("whole server, allowed, headers", "server", "allowed, headers, 10k addresses", NAME, "no layer", 1.06),
    ("whole server, refused, headers", "server", "refused, headers, 10k addresses", NAME, "no layer", 1.06),
    ("bare service, allowed, no headers, like for like", "layer", "allowed, no headers, 10k addresses", ALIKE, "tower_governor", 0.85),
    ("bare service, allowed, headers, like for like", "layer", "allowed, headers, 10k addresses", ALIKE, "tower_governor", 0.65),
    ("check, 10k addresses, as it comes", "check", "allowed, 10k addresses", NAME, "governor", 0.75),
    ("check, 1M addresses, as it comes", "check", "allowed, 1M addresses", NAME, "governor", 0.45),
    ("check, 1M texts, as it comes", "check", "allowed, 1M texts", NAME, "governor", 0.35),
    ("check, 10k addresses, like for like", "check", "allowed, 10k addresses", ALIKE, "governor", 0.50),
    ("check, 1M addresses, like for like", "check", "allowed, 1M addresses", ALIKE, "governor", 0.35),
    ("check, 1M texts, like for like", "check", "allowed, 1M texts", ALIKE, "governor", 0.28),
    ("check, one text, like for like", "check", "allowed, one text", ALIKE, FOLDHASH, 0.95),
    ("denied, 10k addresses, like for like", "check", "denied, 10k addresses", ALIKE, "governor", 0.50),
    ("denied, 10k texts, like for like", "check", "denied, 10k texts", ALIKE, "governor", 0.50),
    ("two threads, one address, like for like", "check", "allowed, two threads, one address", ALIKE, "governor", 0.55),
    ("two threads, 10k addresses, like for like", "check", "allowed, two threads, 10k addresses", ALIKE, "governor", 0.40),
    ("axum router, three policies of one key, headers", "tiers", "axum router, three policies of one key, 10k addresses, headers", "one layer", "three layers", 0.60),
    ("axum router, three policies of one key, no headers", "tiers", "axum router, three policies of one key, 10k addresses, no headers", "one layer", "three layers", 0.50),
    ("axum router, three policies of three keys, headers", "tiers", "axum router, three policies of three keys, 10k addresses, headers", "one layer", "three layers", 0.60),
    ("axum router, three policies of three keys, no headers", "tiers", "axum router, three policies of three keys, 10k addresses, no headers", "one layer", "three layers", 0.50),
    ("bare service, three policies of one key, headers", "tiers", "bare service, three policies of one key, 10k addresses, headers", "one layer", "three layers", 0.60),
    ("bare service, three policies of one key, no headers", "tiers", "bare service, three policies of one key, 10k addresses, no headers", "one layer", "three layers", 0.35),
    ("bare service, three policies of three keys, headers", "tiers", "bare service, three policies of three keys, 10k addresses, headers", "one layer", "three layers", 0.60),
    ("bare service, three policies of three keys, no headers", "tiers", "bare service, three policies of three keys, 10k addresses, no headers", "one layer", "three layers", 0.35),
];

/// By the newest runs that were repeated on each machine, or by the newest run of the family if it is of that machine.
fn aims(all: &Everything) -> String {
    let taken_on = |machine: &str, profile: &str, family: &str| {
        all.family(profile, family).is_some_and(|results| runs::machine(&results.taken) == machine)
    };
    let row = |(told, family, case, own, peer, most): &Aim| {
        let repeated = |machine: &str, profile: &str| {
            let own = [NAME, ALIKE].iter().position(|name| name == own)?;
            peer_in_the_first_table(family, case).filter(|recorded| recorded == peer)?;
            Some(runs::newest(&all.runs, machine, family, profile, case)?[own])
        };
        let once = |machine: &str, profile: &str| {
            all.case(profile, family, case).filter(|_| taken_on(machine, profile, family))?.cost(own, peer)
        };
        let cell =
            |machine: &str, profile: &str| ratio(repeated(machine, profile).or_else(|| once(machine, profile)), *most);
        let first = [(*told).to_owned(), (*peer).to_owned(), format!("{most:.2}")];
        first.into_iter().chain(on_each_machine(all, &cell)).collect()
    };
    let refused = |family: &str, told: &str| {
        let value = |profile: &str, what: &str| {
            all.case(profile, family, &format!("{what}, headers, 10k addresses"))?.row(NAME).map(|row| row.value)
        };
        let cell = |machine: &str, profile: &str| {
            let refused = value(profile, "refused").filter(|_| taken_on(machine, profile, family));
            ratio(refused.and_then(|refused| Some(refused / value(profile, "allowed")?)), 0.8)
        };
        let first = [format!("{told}, refused, headers"), "our allowed request".to_owned(), "0.80".to_owned()];
        first.into_iter().chain(on_each_machine(all, &cell)).collect()
    };
    let refused = [refused("router", "axum router"), refused("layer", "bare service")];
    lines(&with_machines(all, &["case", "compared with", "aim: at most"]), AIMS.iter().map(row).chain(refused))
}

fn features(all: &Everything) -> String {
    let (profile, _) = PROFILES[0];
    let Some(case) = all.family(profile, "features").and_then(|results| results.cases.first()) else {
        return String::new();
    };
    let head = ["feature", "ns added", "of the plain request"].map(str::to_owned);
    let row = |row: &Row| {
        let ratio = row.ratio.unwrap_or(0.0);
        let ratio = if ratio > 1.5 { format!("**{ratio:.2}**") } else { format!("{ratio:.2}") };
        vec![row.contender.clone(), with_spread(case, row), ratio]
    };
    lines(&head, case.rows.iter().map(row))
}

/// One row for each case, one column for each contender.
fn cases(all: &Everything, family: &str, unit: &str) -> String {
    let (profile, _) = PROFILES[0];
    let Some(results) = all.family(profile, family) else { return String::new() };
    let names = results.cases.iter().flat_map(|case| &case.rows).map(|row| row.contender.clone());
    let mut head = vec![unit.to_owned()];
    for name in names {
        if !head.contains(&name) {
            head.push(name);
        }
    }
    let cell = |case: &Case, name: &String| case.row(name).map_or(NONE.to_owned(), |row| with_spread(case, row));
    let row =
        |case: &Case| std::iter::once(case.name.clone()).chain(head[1..].iter().map(|name| cell(case, name))).collect();
    lines(&head, results.cases.iter().map(row))
}

fn adopt(all: &Everything) -> String {
    let (profile, _) = PROFILES[0];
    let Some(results) = all.family(profile, "adopt") else { return String::new() };
    let Some(first) = results.cases.first() else { return String::new() };
    let told = |case: &Case| format!("{} build, seconds added", case.name);
    let head: Vec<String> =
        ["".to_owned(), "crates added".to_owned()].into_iter().chain(results.cases.iter().map(told)).collect();
    let row = |row: &Row| {
        let crates = row.notes.get("crates added").map_or(NONE.to_owned(), |count| figure(*count));
        let seconds = |case: &Case| {
            let row = case.row(&row.contender)?;
            Some(format!("{:.1} (of {:.1})", row.value, row.notes.get("seconds in all")?))
        };
        let seconds = results.cases.iter().map(|case| seconds(case).unwrap_or_else(|| NONE.to_owned()));
        [row.contender.clone(), crates].into_iter().chain(seconds).collect()
    };
    format!("Measured {}:\n\n{}", results.taken, lines(&head, first.rows.iter().map(row)))
}
