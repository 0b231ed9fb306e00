//! The metrics of the limits, by OTLP over HTTP to an OpenTelemetry collector. `Stats::record_metrics` hands them to the
//! crate `metrics`, and `metrics-opentelemetry` hands them on to OpenTelemetry.
//!
//! ```sh
//! OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 cargo run --manifest-path examples/opentelemetry/Cargo.toml
//! for i in $(seq 20); do curl -s -o /dev/null http://127.0.0.1:3000/; done
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use metrics_opentelemetry::{OpenTelemetryMetrics, OpenTelemetryRecorder};
use opentelemetry::metrics::MeterProvider;
use opentelemetry_otlp::{MetricExporter, Protocol, WithExportConfig};
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider};
use tower_ratelimit::observe::Stats;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

/// The histograms of `Stats`. The default bounds of OpenTelemetry are made for milliseconds.
const HISTOGRAMS: [&str; 3] =
    ["ratelimit_wait_seconds", "ratelimit_place_held_seconds", "ratelimit_limiter_duration_seconds"];

/// Sends metrics to a collector, or to that of the environment variable `OTEL_EXPORTER_OTLP_ENDPOINT`. Returns what
/// stops it, and the recorder that feeds it.
fn export(endpoint: Option<&str>) -> Result<(SdkMeterProvider, OpenTelemetryRecorder), Box<dyn Error>> {
    let exporter = MetricExporter::builder().with_http().with_protocol(Protocol::HttpJson);
    let exporter = match endpoint {
        Some(endpoint) => exporter.with_endpoint(endpoint),
        None => exporter,
    };
    let reader = PeriodicReader::builder(exporter.build()?).with_interval(Duration::from_secs(10)).build();
    let provider = SdkMeterProvider::builder().with_reader(reader).build();
    let recorder = OpenTelemetryRecorder::new(OpenTelemetryMetrics::new(provider.meter("tower-ratelimit")));
    recorder.set_histogram_bounds(HISTOGRAMS.into_iter(), &Stats::BUCKET_SECONDS);
    Ok((provider, recorder))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The blocking client of the exporter is made outside of the runtime.
    let (provider, recorder) =
        tokio::task::spawn_blocking(|| export(None).map_err(|error| error.to_string())).await??;
    metrics::set_global_recorder(recorder).map_err(|error| error.to_string())?;

    let stats = Stats::new();
    let client = Rule::new("client", Quota::per_minute(60).burst(10)?)?;
    let limit = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip()).observer(stats.clone());
    // A little more often than the reader sends.
    let recorded = stats.clone();
    tokio::spawn(async move {
        loop {
            recorded.record_metrics();
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    });
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 3000)).await?;
    println!("for i in $(seq 20); do curl -s -o /dev/null http://127.0.0.1:3000/; done");
    let served = axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>());
    served.with_graceful_shutdown(async { drop(tokio::signal::ctrl_c().await) }).await?;
    // Sends what was counted last.
    stats.record_metrics();
    tokio::task::spawn_blocking(move || provider.shutdown()).await??;
    Ok(())
}

#[cfg(test)]
mod tests;
