//! A worker without HTTP and without a runtime: it takes jobs from a queue, and sends at most five mails a second for
//! each tenant. Jobs of other tenants go first while a tenant has to wait.
//!
//! ```sh
//! cargo run --example worker
//! ```

use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};

#[derive(Clone, Debug, PartialEq)]
struct Job {
    tenant: u64,
    mails: u64,
}

/// Calls `send` with each job as soon as its tenant may. Returns the jobs that no wait helps, because they have more
/// mails than may go at once.
fn work(
    limiter: &MemoryLimiter,
    policy: &Policy,
    mut jobs: VecDeque<Job>,
    mut send: impl FnMut(&Job),
    mut sleep: impl FnMut(Duration),
) -> Vec<Job> {
    let mut too_large = Vec::new();
    let (mut waiting, mut shortest) = (0, Duration::MAX);
    while let Some(job) = jobs.pop_front() {
        let Some(key) = Key::of(job.tenant) else { continue };
        // With `RedisLimiter`, which all workers share: `limiter.take(&[Charge::new(policy,
        // &key).cost(job.mails)]).await?`
        let decision = limiter.take_one(policy, &key, job.mails);
        if decision.is_allowed() {
            send(&job);
            (waiting, shortest) = (0, Duration::MAX);
        } else if let Some(wait) = decision.wait().duration() {
            (waiting, shortest) = (waiting + 1, shortest.min(wait));
            jobs.push_back(job);
            if waiting == jobs.len() {
                sleep(shortest);
                (waiting, shortest) = (0, Duration::MAX);
            }
        } else {
            too_large.push(job);
        }
    }
    too_large
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = MemoryLimiter::new();
    let policy = Policy::new("mails", Quota::per_second(5))?;
    let jobs = (0..12).map(|job| Job { tenant: job % 3 % 2, mails: 2 }).chain([Job { tenant: 0, mails: 6 }]);
    let send = |job: &Job| println!("tenant {}: sent {} mails", job.tenant, job.mails);
    let sleep = |wait| {
        println!("all tenants have to wait for {wait:?}");
        thread::sleep(wait);
    };
    for job in work(&limiter, &policy, jobs.collect(), send, sleep) {
        println!("tenant {}: {} mails are more than its quota ever allows", job.tenant, job.mails);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower_ratelimit::clock::ManualClock;

    #[test]
    fn worker_keeps_the_quota_of_each_tenant_and_loses_no_job() {
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let policy = Policy::new("mails", Quota::per_second(5)).unwrap();
        let job = |tenant, mails| Job { tenant, mails };
        let jobs = [job(1, 3), job(1, 3), job(1, 6), job(2, 5), job(1, 2), job(2, 1)];
        let (mut sent, mut slept) = (Vec::new(), Vec::new());
        let too_large = work(
            &limiter,
            &policy,
            jobs.into(),
            |job| sent.push(job.clone()),
            |wait| {
                slept.push(wait);
                clock.advance(wait);
            },
        );
        assert_eq!(sent, [job(1, 3), job(2, 5), job(1, 2), job(2, 1), job(1, 3)]);
        assert_eq!(too_large, [job(1, 6)]);
        assert_eq!(slept, [200, 400].map(Duration::from_millis));
    }
}
