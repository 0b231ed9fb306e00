//! Requests over the limit are done later: they go into a queue and are answered with 202 and the
//! place of the result.
//!
//! ```sh
//! cargo run --example overflow_202
//! for i in $(seq 9); do curl -si http://127.0.0.1:3000/reports -d "report $i" | grep -iE '^(HTTP|location|ratelimit:|retry)'; done
//! curl -s http://127.0.0.1:3000/jobs/1
//! ```

use std::collections::HashMap;
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::routing::{get, post};
use tokio::sync::mpsc;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

/// The length of the queue. When it is full, clients are refused.
const QUEUE: usize = 3;

/// The number of reports kept for clients to fetch.
const KEPT: u64 = 1_000;

struct Job {
    number: u64,
    body: Bytes,
}

/// The jobs in the queue, and the reports of those that are done.
#[derive(Clone)]
struct Jobs {
    waiting: mpsc::Sender<Job>,
    done: Arc<Mutex<HashMap<u64, Option<String>>>>,
    last: Arc<AtomicU64>,
}

type Answer = (StatusCode, [(HeaderName, String); 1], String);

/// The overflow, which gets the whole request with its body unread.
async fn enqueue(State(jobs): State<Jobs>, body: Bytes) -> Answer {
    let number = jobs.last.fetch_add(1, Ordering::Relaxed) + 1;
    let location = format!("/jobs/{number}");
    {
        let mut done = jobs.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.insert(number, None);
        done.remove(&number.wrapping_sub(KEPT));
    }
    match jobs.waiting.try_send(Job { number, body }) {
        Ok(()) => (StatusCode::ACCEPTED, [(header::LOCATION, location)], "queued\n".to_owned()),
        Err(_) => {
            jobs.done.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
            let plain = [(header::CONTENT_TYPE, "text/plain".to_owned())];
            (StatusCode::TOO_MANY_REQUESTS, plain, "the queue is full\n".to_owned())
        }
    }
}

async fn status(State(jobs): State<Jobs>, Path(number): Path<u64>) -> (StatusCode, String) {
    match jobs.done.lock().unwrap_or_else(PoisonError::into_inner).get(&number) {
        Some(None) => (StatusCode::ACCEPTED, "waiting\n".to_owned()),
        Some(Some(report)) => (StatusCode::OK, report.clone()),
        None => (StatusCode::NOT_FOUND, "no such job\n".to_owned()),
    }
}

fn report(body: &[u8]) -> String {
    format!("a report on {} bytes\n", body.len())
}

/// Works on the queue, one job at a time.
async fn work(mut waiting: mpsc::Receiver<Job>, done: Arc<Mutex<HashMap<u64, Option<String>>>>) {
    while let Some(job) = waiting.recv().await {
        tokio::time::sleep(Duration::from_secs(2)).await;
        done.lock().unwrap_or_else(PoisonError::into_inner).insert(job.number, Some(report(&job.body)));
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (waiting, received) = mpsc::channel(QUEUE);
    let jobs = Jobs { waiting, done: Arc::default(), last: Arc::default() };
    tokio::spawn(work(received, Arc::clone(&jobs.done)));

    let overflow = Router::new().fallback(enqueue).with_state(jobs.clone());
    let reports = Rule::new("reports", Quota::per_minute(3))?;
    let limit = RateLimitLayer::new(MemoryLimiter::new(), reports, key::global()).overflow(overflow);

    let app = Router::new()
        .route("/reports", post(|body: Bytes| async move { report(&body) }).layer(limit))
        .route("/jobs/{number}", get(status))
        .with_state(jobs);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 9); do curl -si http://127.0.0.1:3000/reports -d \"report $i\" | head -4; done");
    println!("curl -s http://127.0.0.1:3000/jobs/1");
    axum::serve(listener, app).await?;
    Ok(())
}
