//! Several processes on one key: together they admit what one would, to the unit.

use std::process::{Command, Stdio};
use std::time::Duration;

use tower_ratelimit::limiter::{Charge, Limiter, StoreErrorKind};

use super::support::postgres::Server;
use super::{daily, key, left, limiter, patient, store};

const PROCESSES: u64 = 8;
const TASKS: u64 = 4;

/// The checks of each task of each process.
fn checks() -> u64 {
    u64::from(super::support::cases(200))
}

/// The variable with the URL of the server.
const URL: &str = "RATELIMIT_TEST_POSTGRES";

/// `POSTGRES_DEADLINE_MS=50` measures how many checks lose until that deadline, or have no answer by then.
fn deadline() -> Option<Duration> {
    let milliseconds = std::env::var("POSTGRES_DEADLINE_MS").ok()?;
    Some(Duration::from_millis(milliseconds.parse().expect("it is a number")))
}

/// Runs as each of the processes, and prints the numbers of admitted, refused, contended and unanswered checks. It does
/// nothing in the parent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_the_processes() {
    let Ok(url) = std::env::var(URL) else { return };
    let limiter = match deadline() {
        Some(deadline) => patient().deadline(deadline).build(store(&url).await).expect("there is a runtime"),
        None => limiter(&url).await,
    };
    let policy = daily(units());
    let tasks = (0..TASKS).map(|_| {
        let (limiter, policy) = (limiter.clone(), policy.clone());
        tokio::spawn(async move {
            let (mut admitted, mut refused, mut contended, mut unanswered) = (0, 0, 0, 0);
            for _ in 0..checks() {
                match limiter.take(&[Charge::new(&policy, &key("one"))]).await {
                    Ok(decision) if decision.is_allowed() => admitted += 1,
                    Ok(_) => refused += 1,
                    Err(error) if error.kind() == StoreErrorKind::Contended => contended += 1,
                    // It had no answer in time, or failed at once after several of these.
                    Err(_) if deadline().is_some() => unanswered += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            [admitted, refused, contended, unanswered]
        })
    });
    let mut all = [0_u64; 4];
    for task in tasks.collect::<Vec<_>>() {
        all.iter_mut().zip(task.await.unwrap()).for_each(|(sum, one)| *sum += one);
    }
    println!("\nadmitted {} refused {} contended {} unanswered {}", all[0], all[1], all[2], all[3]);
}

/// Three quarters of all checks.
fn units() -> u64 {
    PROCESSES * TASKS * checks() * 3 / 4
}

#[tokio::test]
async fn eight_processes_admit_what_one_would() {
    let server = Server::start();
    let reader = limiter(&server.url()).await;
    let program = std::env::current_exe().unwrap();
    let processes = (0..PROCESSES).map(|_| {
        let arguments = ["--exact", "processes::one_of_the_processes", "--nocapture"];
        Command::new(&program).args(arguments).env(URL, server.url()).stdout(Stdio::piped()).spawn().unwrap()
    });
    let (mut admitted, mut refused, mut contended, mut unanswered) = (0, 0, 0, 0);
    for process in processes.collect::<Vec<_>>() {
        let output = tokio::task::spawn_blocking(|| process.wait_with_output()).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        let line = text.lines().find_map(|line| line.strip_prefix("admitted ")).expect("it prints what it did");
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        (admitted, refused) = (admitted + numbers[0], refused + numbers[1]);
        (contended, unanswered) = (contended + numbers[2], unanswered + numbers[3]);
    }
    if let Some(deadline) = deadline() {
        let share = |number: u64| 100.0 * number as f64 / (PROCESSES * TASKS * checks()) as f64;
        println!("{deadline:?}: {:.2} % contended, {:.2} % without an answer", share(contended), share(unanswered));
        assert!(admitted <= units());
        return;
    }
    assert_eq!(contended, 0, "with this deadline no check is contended");
    assert_eq!((admitted, refused), (units(), PROCESSES * TASKS * checks() - units()));
    assert_eq!(left(&reader, &daily(units()), "one").await, 0);
}
