//! The guide's table of headers lists what is sent. Documents name only pages and paths that exist.

use std::path::Path;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::Request;
use tower::ServiceExt;
use tower_ratelimit::{Headers, MemoryLimiter, Quota, RateLimitLayer, key, middleware::ResetEncoding};

const README: &str = include_str!("../../README.md");
const PAGE: &str = include_str!("../../src/guide/what_clients_are_told.md");

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
    assert_eq!(github.len(), 4);
    assert!(PAGE.contains(" `x-ratelimit-limit`, `-remaining`, `-used`, and `-reset` in seconds since the epoch"));
    assert_eq!(fields(Headers::none()).await, Vec::<String>::new());
}

#[test]
fn readme_links_to_pages_of_the_guide() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/guide");
    let pages: Vec<&str> =
        README.split("/tower_ratelimit/guide/").skip(1).filter_map(|rest| rest.split('/').next()).collect();
    assert!(pages.len() > 10, "the README has no links to the guide");
    for page in pages {
        assert!(guide.join(page).with_extension("md").exists() || guide.join(page).is_dir(), "there is no page {page}");
    }
}

#[test]
fn documents_for_contributors_name_paths_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for text in [include_str!("../../ARCHITECTURE.md"), include_str!("../../CONTRIBUTING.md")] {
        let words = text.split(|c: char| c.is_whitespace() || "`()|,:".contains(c));
        let paths: Vec<&str> = words
            .filter(|word| ["src/", "tests/", "benches/"].iter().any(|start| word.starts_with(start)))
            .filter(|word| !word.contains("NAME"))
            .collect();
        assert!(paths.len() > 10, "the document names no paths");
        for path in paths {
            assert!(root.join(path.trim_end_matches(['.', ';'])).exists(), "there is no {path}");
        }
    }
}
