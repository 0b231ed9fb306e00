//! Blocks that several processes of the operating system charge for each login, and refund for each right one.

use std::convert::Infallible;
use std::future::ready;
use std::process::{Command, Stdio};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Quota, RateLimitLayer, Rule, key,
    limiter::{Blocks, Charge, Limiter},
};

use super::{LONG, connected, eventually, patient, policy};
use crate::support::redis_server::Server;

const DAY: Duration = Duration::from_secs(86_400);
const PROCESSES: usize = 4;
const TASKS: u64 = 8;
/// The right logins of each task.
const LOGINS: usize = 15;
/// Fewer strikes than logins are under way at a time, so right logins close the key again and again until they are
/// refunded. The wrong logins alone, one of each process, do not close it.
const STRIKES: u64 = 6;

/// The server, and the quota of the block. They make this a process of the test.
const URL: &str = "RATELIMIT_BLOCKS_URL";
const QUOTA: &str = "RATELIMIT_BLOCKS_QUOTA";

/// Runs as each of the processes. It does nothing in the parent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_the_processes() {
    let (Ok(url), Ok(quota)) = (std::env::var(URL), std::env::var(QUOTA)) else { return };
    let limiter = connected(patient().max_denials(0), &url).await;
    let rule = policy("login", quota.parse().unwrap());
    let rule = Rule::from(rule).charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    let layer = RateLimitLayer::new(limiter.clone(), rule, key::global());
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let service = layer.layer(service_fn(|request: Request<Body>| {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = *request.extensions().get().expect("the login's result");
                ready(Ok::<_, Infallible>(response))
            }));
            tokio::spawn(async move {
                let wrong = (task == 0).then_some(StatusCode::UNAUTHORIZED);
                for result in std::iter::repeat_n(StatusCode::OK, LOGINS).chain(wrong) {
                    // A login that finds the key closed is sent again.
                    let began = Instant::now();
                    loop {
                        let mut request = Request::new(Body::empty());
                        request.extensions_mut().insert(result);
                        if service.clone().oneshot(request).await.unwrap().status() == result {
                            break;
                        }
                        assert!(began.elapsed() < LONG, "the key stays closed");
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    eventually("all is refunded", async || limiter.waiting() == 0).await;
    println!("all logins are answered");
}

#[tokio::test]
async fn right_logins_of_four_processes_leave_only_the_wrong_ones() {
    let plain = Quota::block(STRIKES, DAY, DAY).unwrap();
    for quota in [plain, plain.growing(2, 7 * DAY, 30 * DAY).unwrap()] {
        let server = Server::start();
        let running: Vec<_> = (0..PROCESSES)
            .map(|_| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["blocks::one_of_the_processes", "--exact", "--nocapture", "--test-threads=1"])
                    .envs([(URL, server.url()), (QUOTA, quota.to_string())])
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for process in running {
            let output = process.wait_with_output().unwrap();
            let printed = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success() && printed.contains("all logins are answered"), "{quota}: {printed}");
        }
        // A process that comes later finds exactly the wrong logins.
        let (limiter, login) = (connected(patient(), &server.url()).await, policy("login", quota));
        let key = tower_ratelimit::Key::global();
        let peeked = limiter.peek(&[Charge::new(&login, &key).cost(0)]).await.unwrap();
        assert_eq!(peeked.charges()[0].remaining(), STRIKES - PROCESSES as u64, "{quota}");
        let blocks = Blocks::new(limiter, login).unwrap();
        assert_eq!(blocks.blocked_for(&key).await.unwrap(), None);
        assert_eq!(
            blocks.strike(&key, STRIKES - PROCESSES as u64).await.unwrap(),
            Some(DAY),
            "{quota}: the first block"
        );
    }
}
