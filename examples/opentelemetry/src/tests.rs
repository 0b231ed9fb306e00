//! A small sink receives what is exported, and its numbers are those that were counted.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc;

use axum::body::Body;
use axum::http::Request;
use serde_json::Value;
use tower::ServiceExt;
use tower_ratelimit::Key;
use tower_ratelimit::Policy;
use tower_ratelimit::clock::Timestamp;
use tower_ratelimit::observe::Observer;

use super::*;

/// Receives OTLP over HTTP in JSON, and hands on each body.
fn sink() -> (String, mpsc::Receiver<Value>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let endpoint = format!("http://{}/v1/metrics", listener.local_addr().unwrap());
    let (sender, bodies) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut bytes = Vec::new();
            let body = loop {
                let mut part = [0; 4_096];
                let count = stream.read(&mut part).unwrap();
                assert!(count > 0, "the request is whole");
                bytes.extend_from_slice(&part[..count]);
                let text = String::from_utf8_lossy(&bytes);
                let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(':')?;
                    name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
                });
                if body.len() >= length.expect("the exporter says the length") {
                    break body.to_owned();
                }
            };
            let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
            stream.write_all(answer).unwrap();
            if sender.send(serde_json::from_str(&body).unwrap()).is_err() {
                return;
            }
        }
    });
    (endpoint, bodies)
}

/// Returns the metric of this name.
fn metric<'v>(exported: &'v Value, name: &str) -> &'v Value {
    let metrics = &exported["resourceMetrics"][0]["scopeMetrics"][0]["metrics"];
    let found = metrics.as_array().unwrap().iter().find(|metric| metric["name"] == name);
    found.unwrap_or_else(|| panic!("there is no {name} in {exported}"))
}

/// Returns a number of JSON, which may be a text.
fn number(value: &Value) -> f64 {
    value.as_f64().or_else(|| value.as_str()?.parse().ok()).unwrap_or_else(|| panic!("{value} is a number"))
}

/// Returns the point of a metric with this attribute.
fn point<'v>(metric: &'v Value, kind: &str, attribute: (&str, &str)) -> &'v Value {
    let is_it = |own: &Value| own["key"] == attribute.0 && own["value"]["stringValue"] == attribute.1;
    let mut points = metric[kind]["dataPoints"].as_array().unwrap().iter();
    let found = points.find(|point| point["attributes"].as_array().unwrap().iter().any(is_it));
    found.unwrap_or_else(|| panic!("there is no point with {attribute:?} in {metric}"))
}

fn sum(point: &Value) -> f64 {
    number(point.get("asInt").or(point.get("asDouble")).expect("a sum has a value"))
}

#[test]
fn collector_gets_the_counts_units_and_buckets() {
    let (endpoint, bodies) = sink();
    let (provider, recorder) = export(Some(&endpoint)).unwrap();
    let stats = Stats::new();
    let client = Rule::new("client", Quota::per_hour(5)).unwrap();
    let limit = RateLimitLayer::new(MemoryLimiter::new(), client, key::global()).observer(stats.clone());
    let app: Router = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let exports = Policy::new("exports", Quota::concurrent(3)).unwrap();
    let mut allowed = 0.0;
    for round in 1..=3_u32 {
        for _ in 0..4 {
            let response = runtime.block_on(app.clone().oneshot(Request::new(Body::empty()))).unwrap();
            allowed += f64::from(u8::from(response.status() == 200));
        }
        let taken_at = stats.on_place_taken(&exports, &Key::global(), 1);
        let taken_at = Timestamp::from_micros(taken_at.as_micros() - 20_000_000);
        stats.on_place_returned(&exports, &Key::global(), 1, taken_at);
        metrics::with_local_recorder(&recorder, || (0..2).for_each(|_| stats.record_metrics()));
        provider.force_flush().unwrap();
        let exported = bodies.recv_timeout(Duration::from_secs(60)).unwrap();

        let requests = metric(&exported, "ratelimit_requests_total");
        let outcome = |kind| sum(point(requests, "sum", ("outcome", kind)));
        let all = f64::from(round * 4);
        assert_eq!([outcome("allowed"), outcome("limited")], [allowed, all - allowed], "round {round}");
        assert_eq!(requests["sum"]["isMonotonic"], true);
        let held = metric(&exported, "ratelimit_place_held_seconds");
        assert_eq!(held["unit"], "s");
        let held = point(held, "histogram", ("policy", "exports"));
        assert_eq!(number(&held["count"]), f64::from(round));
        let bounds: Vec<f64> = held["explicitBounds"].as_array().unwrap().iter().map(number).collect();
        assert_eq!(bounds, Stats::BUCKET_SECONDS);
        // 20 seconds are in the bucket up to 30.
        let buckets: Vec<f64> = held["bucketCounts"].as_array().unwrap().iter().map(number).collect();
        assert_eq!((buckets[11], buckets.iter().sum::<f64>()), (f64::from(round), f64::from(round)));
    }
    assert_eq!(allowed, 5.0);
    provider.shutdown().unwrap();
}
