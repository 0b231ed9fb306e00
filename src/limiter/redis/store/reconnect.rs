//! Keeps a server's connection: opens it again when it has ended, and detects that the server is back.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::error_class::{Cause, Failure};
use super::link::Link;
use super::renewal::RETRY;
use super::settings::{CONNECT_TIMEOUT, Settings};
use crate::random;

/// The first and the longest pause between attempts to connect. Each is twice the one before.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));

/// A connection that ended sooner counts as a failed attempt.
const LASTED: Duration = Duration::from_secs(1);

/// The time for which a server may be believed dead before it gets a new connection, in case only the old one
/// is dead. The time is shorter if it is connected: once an answer was lost, each call is given the
/// answer to the call before it.
const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_IF_CONNECTED: Duration = Duration::from_millis(500);

/// A server that went away again within this time after it was back is reported as up only once it
/// has answered for a while. So a server that comes and goes many times a second makes few events.
const FLAPS: Duration = Duration::from_secs(10);
const STEADY: Duration = Duration::from_secs(1);

/// Keeps a server's connection until the task is aborted.
pub(super) async fn keep(link: Arc<Link>, settings: Settings) {
    tokio::join!(
        through_panics(|| connect(&link)),
        through_panics(|| probe(&link, &settings)),
        through_panics(|| renew(&link))
    );
}

/// Begins anew after a panic. The connection and the closure for credentials may be the application's code.
async fn through_panics<F: Future<Output = ()>>(run: impl Fn() -> F) {
    while AssertUnwindSafe(run()).catch_unwind().await.is_err() {
        sleep(jitter(PAUSES.1)).await;
    }
}

/// Connects, and connects again whenever the connection has ended.
async fn connect(link: &Link) {
    let mut pause = PAUSES.0;
    loop {
        let began = Instant::now();
        tokio::select! {
            biased;
            () = link.transport.connect(link) => {}
            () = link.restart.notified() => {}
        }
        if began.elapsed() >= LASTED {
            pause = PAUSES.0;
        }
        sleep(jitter(pause)).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Probes a server that is believed dead, so that no check has to.
async fn probe(link: &Link, settings: &Settings) {
    let mut back: Option<Instant> = None;
    loop {
        while !link.breaker.is_open() {
            link.breaker_opened.notified().await;
        }
        let went = Instant::now();
        until_it_answers(link, settings).await;
        link.record_recovery();
        let flaps = back.is_some_and(|back| went.duration_since(back) < FLAPS);
        back = Some(Instant::now());
        let reported = Instant::now() + if flaps { STEADY } else { Duration::ZERO };
        loop {
            match timeout_at(reported, link.breaker_opened.notified()).await {
                Err(_) => {
                    link.report_up();
                    break;
                }
                Ok(()) if link.breaker.is_open() => break,
                Ok(()) => {}
            }
        }
    }
}

async fn until_it_answers(link: &Link, settings: &Settings) {
    let mut since = Instant::now();
    loop {
        // The answer is waited for until the next probe, because it comes when the server wakes.
        let next = Instant::now() + jitter(settings.probe_every());
        if !matches!(link.probe(next).await, Err(Failure { cause: Cause::Lost | Cause::NoTime, .. })) {
            return;
        }
        tokio::select! {
            biased;
            () = sleep_until(next) => {}
            () = link.reconnected.notified() => continue,
        }
        let patience = if link.transport.is_connected() { PATIENCE_IF_CONNECTED } else { PATIENCE };
        if since.elapsed() >= patience {
            link.restart_connection();
            since = Instant::now();
        }
    }
}

/// Gives the connection newer credentials when they are due. Until the server has accepted them, the connection keeps
/// those that it has.
async fn renew(link: &Link) {
    let Some(renewal) = link.transport.renewal() else { return };
    loop {
        renewal.wait_until_due().await;
        if !link.transport.is_connected() {
            sleep(RETRY).await; // the next connection asks by itself
            continue;
        }
        let failure = match renewal.ask().await {
            Ok(credentials) => link.log_in(&credentials, Instant::now() + CONNECT_TIMEOUT).await.err(),
            Err(why) => Some(Failure::without_credentials(&link.address, &why)),
        };
        if let Some(failure) = failure {
            renewal.retry();
            link.report_failed_renewal(&failure.error);
        }
    }
}

/// Returns a time that is up to a tenth longer, so that many processes do not come at once.
pub(super) fn jitter(time: Duration) -> Duration {
    let part = random::secret() % 100;
    time + time * u32::try_from(part).unwrap_or(0) / 1_000
}
