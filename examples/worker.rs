//! A worker without HTTP: it takes jobs from a queue, and sends at most five mails a second for each
//! tenant. Jobs of other tenants go first while a tenant has to wait.
//!
//! ```sh
//! cargo run --example worker --features tokio
//! ```

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tower_ratelimit::limiter::{Limiter, NotReady, Ready};
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};

#[derive(Clone, Debug, PartialEq)]
struct Job {
    tenant: u64,
    mails: u64,
}

/// Calls `send` with each job as soon as its tenant may. Returns the jobs that were not sent, and why: because they
/// have more mails than may go at once, for example.
async fn work<L: Limiter + Clone>(
    ready: Ready<L>,
    policy: Policy,
    mut jobs: mpsc::Receiver<Job>,
    send: impl Fn(&Job) + Clone + Send + 'static,
) -> Vec<(Job, NotReady)> {
    let mut tasks = JoinSet::new();
    while let Some(job) = jobs.recv().await {
        let (ready, policy, send) = (ready.clone(), policy.clone(), send.clone());
        tasks.spawn(async move {
            let key = Key::of(job.tenant).unwrap_or_else(Key::global);
            match ready.take_one(&policy, &key, job.mails).await {
                Ok(_) => {
                    send(&job);
                    None
                }
                Err(error) => Some((job, error)),
            }
        });
    }
    tasks.join_all().await.into_iter().flatten().collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // With `RedisLimiter` here, all workers share the quotas.
    let ready = Ready::new(MemoryLimiter::new());
    let policy = Policy::new("mails", Quota::per_second(5))?;
    let (queue, jobs) = mpsc::channel(100);
    for job in (0..12).map(|job| Job { tenant: job % 3 % 2, mails: 2 }).chain([Job { tenant: 0, mails: 6 }]) {
        queue.send(job).await?;
    }
    drop(queue); // no more jobs come
    let send = |job: &Job| println!("tenant {}: sent {} mails", job.tenant, job.mails);
    for (job, error) in work(ready, policy, jobs, send).await {
        println!("tenant {}: {} mails were not sent: {error}", job.tenant, job.mails);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use tower_ratelimit::clock::TokioClock;
    use tower_ratelimit::limiter::NotReadyKind;

    #[tokio::test(start_paused = true)]
    async fn worker_keeps_the_quota_of_each_tenant_and_loses_no_job() {
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(TokioClock::new()).build().unwrap();
        let policy = Policy::new("mails", Quota::per_second(5)).unwrap();
        let (queue, jobs) = mpsc::channel(100);
        let job = |tenant, mails| Job { tenant, mails };
        for job in [job(1, 3), job(1, 3), job(2, 5), job(1, 2), job(2, 1), job(3, 6)] {
            queue.send(job).await.unwrap();
        }
        drop(queue);
        let (sent, began) = (Arc::new(Mutex::new(Vec::new())), tokio::time::Instant::now());
        let log = Arc::clone(&sent);
        let send = move |job: &Job| log.lock().unwrap().push((began.elapsed().as_millis(), job.clone()));
        let unsent = work(Ready::new(limiter), policy, jobs, send).await;
        // The second job of tenant 1 waits, and its third stands behind it.
        let expected = [(0, job(1, 3)), (0, job(2, 5)), (200, job(1, 3)), (200, job(2, 1)), (600, job(1, 2))];
        let sent = sent.lock().unwrap();
        for ((at, job), (expected_at, expected)) in sent.iter().zip(&expected) {
            assert!(at.abs_diff(*expected_at) <= 2, "{sent:?}"); // the timer's grain
            assert_eq!(job.mails, expected.mails, "{sent:?}");
        }
        assert_eq!(sent.len(), expected.len());
        assert!(matches!(&unsent[..], [(own, error)] if *own == job(3, 6) && error.kind() == NotReadyKind::Never));
    }
}
