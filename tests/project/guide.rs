//! The guide's table of headers lists what is sent. Documents name only pages and paths that exist.

use std::collections::BTreeSet;
use std::path::Path;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::Request;
use tower::ServiceExt;
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::key::TrustedProxies;
use tower_ratelimit::quota::Algorithm;
use tower_ratelimit::rules::{Descriptor, Rules, RulesWarningKind, convert_envoy};
use tower_ratelimit::{Head, Headers, MemoryLimiter, Quota, RateLimitLayer, key, middleware::ResetEncoding};

const README: &str = include_str!("../../README.md");
const COMPARE: &str = include_str!("../../COMPARE.md");
const INDEX: &str = include_str!("../../src/guide/mod.rs");
const QUICKSTART: &str = include_str!("../../examples/quickstart/src/main.rs");
const PAGE: &str = include_str!("../../src/guide/what_clients_are_told.md");
const ALGORITHMS: &str = include_str!("../../src/guide/choosing_an_algorithm.md");

/// Returns the headers of the first of 100 requests per minute, as `name: value`.
async fn fields(headers: Headers) -> Vec<String> {
    let names = headers.names();
    let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::global()).headers(headers);
    let router = Router::new().route("/", get(|| async {})).layer(limit);
    let response = router.oneshot(Request::new(Body::empty())).await.expect("a router does not fail");
    let told = names.iter().filter_map(|name| Some((name, response.headers().get(name)?)));
    told.map(|(name, value)| format!("{name}: {}", value.to_str().expect("fields are text"))).collect()
}

/// Returns what the table's row of this format promises, with the names in lower case as they are
/// on the wire.
fn promised(format: &str) -> Vec<String> {
    let start = format!("| [`Headers::{format}");
    let row = PAGE.lines().find(|line| line.starts_with(&start)).expect("each format has a row");
    let cell = row.rsplit(" | ").next().expect("a row has cells");
    let told = cell.split('`').filter_map(|text| text.split_once(": "));
    told.map(|(name, value)| format!("{}: {value}", name.to_lowercase())).collect()
}

#[tokio::test]
async fn header_format_sends_what_the_table_says() {
    assert_eq!(promised("draft_11"), fields(Headers::draft_11()).await);
    assert_eq!(promised("draft_07"), fields(Headers::draft_07()).await);
    assert_eq!(promised("draft_06"), fields(Headers::draft_06()).await);
    let older = fields(Headers::x_rate_limit(ResetEncoding::DeltaSeconds)).await;
    assert_eq!(promised("x_rate_limit"), older.get(..2).unwrap_or_default());
    assert_eq!(older.len(), 3);
    let github = fields(Headers::github()).await;
    assert_eq!(github.len(), 5);
    assert!(PAGE.contains(
        " `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` in seconds since the epoch, `-resource` with the policy's name"
    ));
    assert_eq!(promised("openai"), fields(Headers::openai()).await);
    let anthropic = fields(Headers::anthropic()).await;
    assert_eq!(promised("anthropic"), anthropic.get(..2).unwrap_or_default());
    assert_eq!(anthropic.len(), 3);
    assert_eq!(fields(Headers::none()).await, Vec::<String>::new());
}

#[test]
fn guide_has_a_row_for_each_algorithm() {
    for algorithm in Algorithm::ALL {
        let words = algorithm.as_str();
        let constructor = match algorithm {
            Algorithm::Concurrency => "concurrent".to_owned(),
            _ => words.replace(' ', "_"),
        };
        let link = format!("| [{words}](quota::{constructor})");
        assert!(
            ALGORITHMS.to_lowercase().contains(&link),
            "the table of src/guide/choosing_an_algorithm.md has no `{link}`"
        );
    }
}

#[test]
fn readme_and_comparison_count_the_algorithms() {
    const NUMBERS: [&str; 13] =
        ["Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"];
    // Blocks and meters are no limits by themselves, and a concurrency limit is no rate.
    let count = Algorithm::ALL.len() - 3;
    for (name, text, words) in [
        ("README.md", README, format!("* {} algorithms, the same in memory", NUMBERS[count])),
        ("COMPARE.md", COMPARE, format!("| {count}, and blocks and meters |")),
    ] {
        assert!(text.contains(&words), "{name} does not say: {words}");
    }
}

#[test]
fn readme_links_to_pages_of_the_guide() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/guide");
    let links = README.lines().filter_map(|line| line.split_once("/tower_ratelimit/guide/"));
    let pages: Vec<&str> = links.map(|(_, page)| page.trim_end_matches('/')).filter(|page| !page.is_empty()).collect();
    assert!(pages.len() > 5, "the README has no links to the guide");
    for page in pages {
        assert!(guide.join(page).with_extension("md").exists() || guide.join(page).is_dir(), "there is no page {page}");
    }
}

#[test]
fn readme_shows_the_program_that_it_runs() {
    let program = QUICKSTART.split_once("\n\n").map(|(_, code)| code).expect("it begins with its description");
    assert!(README.contains(&format!("```rust,no_run\n{program}```\n")), "README.md shows another program");
    let manifest = include_str!("../../examples/quickstart/Cargo.toml");
    let needs = README.split("```toml\n[dependencies]\n").nth(1).and_then(|rest| rest.split("```").next());
    for line in needs.expect("the README says what a program depends on").lines() {
        let published = line.replace("version = \"0.1\"", "path = \"../..\"");
        assert!(manifest.contains(&published), "examples/quickstart/Cargo.toml has no `{published}`");
    }
}

/// A reader who has to choose reads a page. The index and the rest are in the guide.
#[test]
fn readme_is_short() {
    let text = README.split("\n[docs]: ").next().unwrap_or(README);
    let words = text.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count();
    assert!(words <= 900, "README.md has {words} words, and 900 are meant");
    let is_api = |name: &&str| !name.is_empty() && (name.contains("::") || name.starts_with(char::is_uppercase));
    let names: BTreeSet<&str> =
        text.split(|c: char| !c.is_alphanumeric() && !"_:".contains(c)).filter(is_api).collect();
    let items = include_str!("public_items.txt");
    let is_ours = |name: &&&str| items.lines().any(|item| item.split(" (").next() == Some(name));
    let names: Vec<_> = names.iter().filter(is_ours).collect();
    assert!((10..=25).contains(&names.len()), "README.md names {} items of the API: {names:?}", names.len());
}

#[test]
fn index_of_the_guide_names_each_page() {
    let pages: Vec<&str> = INDEX.lines().filter_map(|line| line.strip_prefix("pub mod ")).collect();
    assert!(pages.len() > 15, "the guide has no pages");
    for page in pages.iter().filter_map(|page| page.split(' ').next()) {
        assert!(
            INDEX.contains(&format!("]({page})"))
                || INDEX.contains(&format!("]: {page}\n"))
                || INDEX.contains(&format!("[{page}] |")),
            "no link to {page}"
        );
    }
}

/// The guide's code for other frameworks is text of programs that are compiled and tested.
#[test]
fn ignored_blocks_are_parts_of_the_programs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let programs = std::fs::read_dir(root.join("examples/frameworks/src/bin")).expect("the folder exists");
    let programs: Vec<String> = programs
        .map(|program| std::fs::read_to_string(program.expect("it can be listed").path()).expect("programs are text"))
        .collect();
    for page in ["without_tower.md", "coming_from/axum_07.md"] {
        let text = std::fs::read_to_string(root.join("src/guide").join(page)).expect("the page is text");
        let blocks: Vec<&str> = text.split("```ignore\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert!(!blocks.is_empty(), "{page} shows no program");
        for block in blocks {
            assert!(programs.iter().any(|program| program.contains(block)), "{page} shows other code:\n{block}");
        }
    }
}

/// They are read as they stand there.
#[test]
fn files_on_the_page_about_rules_have_no_problems() {
    let page = include_str!("../../src/guide/rules_in_a_file.md");
    let builder = Rules::builder().trusted_proxies(TrustedProxies::count(1).expect("one is possible"));
    let builder = builder.key("tenant", key::global()).action("create_account", |_| false);
    let files: Vec<&str> = page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(files.len() > 7, "the page shows files");
    for file in files {
        let report = builder.check(file).unwrap_or_else(|error| panic!("{file}\n{error}"));
        // One of them refuses all requests of a client, and says so.
        let warnings =
            report.warnings().iter().filter(|warning| warning.kind() != RulesWarningKind::RefusesAll).count();
        assert_eq!((report.unregistered(), warnings), (&[][..], 0), "{file}");
    }
}

/// Reads the file on the page about Envoy as it is, and converts it. Both limit the same requests.
#[tokio::test]
async fn envoy_file_of_the_page_limits_as_its_conversion() {
    let page = include_str!("../../src/guide/coming_from/envoy.md");
    let file = page.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("the page shows a file");
    let proxy = || Rules::builder().trusted_proxies(TrustedProxies::count(1).expect("one is possible"));
    let describe = |request: &Head<'_>| {
        let client = request.headers.get("x-client").and_then(|client| client.to_str().ok()).unwrap_or_default();
        [Descriptor::new([("path", request.uri.path()), ("remote_address", client)])]
    };
    let as_it_is = proxy().descriptors(describe).read_text(file).expect("the file can be read");
    let converted = proxy().read_text(convert_envoy(file).expect("it can be converted")).expect("so can this one");
    for rules in [as_it_is, converted] {
        let limiter = MemoryLimiter::builder().clock(ManualClock::new()).build().expect("the setup is possible");
        let limit = rules.layer(limiter).expect("the rules fit");
        let passes = async |path: &str, client: &str| {
            let request = Request::get(path).header("x-client", client).header("x-forwarded-for", client);
            limit.admit(&request.body(()).expect("the request is possible")).await.is_ok()
        };
        for _ in 0..100 {
            assert!(passes("/search", "192.0.2.1").await);
        }
        assert!(!passes("/search", "192.0.2.1").await);
        assert!(passes("/search", "192.0.2.2").await && passes("/", "192.0.2.1").await);
    }
}

#[test]
fn documents_for_contributors_name_paths_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let documents = [
        (include_str!("../../ARCHITECTURE.md"), 10),
        (include_str!("../../CONTRIBUTING.md"), 10),
        (include_str!("../../DESIGN.md"), 2),
    ];
    for (text, least) in documents {
        let words = text.split(|c: char| c.is_whitespace() || "`()|,:".contains(c));
        let paths: Vec<&str> = words
            .filter(|word| ["src/", "cli/", "tests/", "benches/"].iter().any(|start| word.starts_with(start)))
            .filter(|word| !word.contains("NAME"))
            .collect();
        assert!(paths.len() > least, "the document names no paths");
        for path in paths {
            assert!(root.join(path.trim_end_matches(['.', ';'])).exists(), "there is no {path}");
        }
    }
}
