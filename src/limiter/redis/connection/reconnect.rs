//! Keeps a server's connection: opens it again when it has ended, and detects that the server is back.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::failure::{CallFailure, Cause};
use super::link::Link;
use super::pause::{Pauses, jitter};
use super::renewal::RETRY;
use super::settings::ConnectionSettings;
use crate::event::StoreErrorKind;

/// The time without a call after which a connection is probed. Network devices forget connections without
/// traffic after some minutes, and notify neither end.
const IDLE: Duration = Duration::from_secs(5);

/// The interval at which a server that is believed dead is probed, unless the deadline is long.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// The least time between two probes that send the script's text to a server that answers too late.
const TEACH_EVERY: Duration = Duration::from_secs(1);

/// A server that has been believed dead for this time gets a new connection, in case only the old connection is
/// dead. The time is shorter if there is a connection, because the connection may have lost an answer. Each later
/// call would then get the answer to the call before it.
const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_IF_CONNECTED: Duration = Duration::from_millis(500);

/// If a server goes down again within `FLAPS` after its return, it is reported as up only after it has answered for
/// `STEADY`. So a server that comes and goes many times a second causes few events.
const FLAPS: Duration = Duration::from_secs(10);
const STEADY: Duration = Duration::from_secs(1);

/// Keeps a server's connection until the task is aborted.
pub(super) async fn keep(link: Arc<Link>, settings: ConnectionSettings) {
    tokio::join!(
        through_panics(|| connect(&link)),
        through_panics(|| probe(&link, &settings)),
        through_panics(|| probe_if_idle(&link, &settings)),
        through_panics(|| teach(&link)),
        through_panics(|| renew(&link, &settings))
    );
}

/// Runs a task, and runs it anew after a panic: the connection and the closure for credentials may be the
/// application's code, which can panic.
async fn through_panics<F: Future<Output = ()>>(run: impl Fn() -> F) {
    while AssertUnwindSafe(run()).catch_unwind().await.is_err() {
        sleep(Pauses::longest()).await;
    }
}

/// Connects, and connects again whenever the connection has ended.
async fn connect(link: &Link) {
    let mut pauses = Pauses::new();
    link.health.record_end(None); // after a panic
    loop {
        let began = Instant::now();
        link.health.record_attempt();
        let reason = tokio::select! {
            biased;
            reason = link.transport.connect(link) => Some(reason),
            () = link.health.restart.notified() => None,
        };
        let lasted = link.health.record_end(reason);
        sleep_until(pauses.next_attempt(began, lasted)).await;
    }
}

/// Probes a connection over which nothing arrives, so that no check has to find out that the connection is dead.
/// The probes also keep network devices from forgetting the connection. Measures a round trip first.
async fn probe_if_idle(link: &Link, settings: &ConnectionSettings) {
    let mut is_measured = false;
    loop {
        if !is_measured && link.health.is_connected() {
            is_measured = link.round_trip().await.is_some();
        }
        let is_given = link.transport.is_given();
        if is_given && is_measured {
            return; // it is the application's to keep
        }
        let idle_at = link.health.heard_at() + jitter(IDLE);
        if is_given || Instant::now() < idle_at {
            let next = if is_measured { idle_at } else { Instant::now() + PROBE_EVERY };
            sleep_until(next).await;
            continue;
        }
        // Skips a server that is believed dead, because `until_it_answers` probes such a server.
        if link.health.is_connected() && !link.health.breaker.is_open() {
            let answer = link.probe(Instant::now() + settings.silence()).await;
            if let Err(CallFailure { cause: Cause::Lost, error }) = answer {
                link.health.restart_connection(&error);
            }
        }
        sleep(PROBE_EVERY).await;
    }
}

/// Sends the script's text to a server that forgot the script and answers so late that no check has time left to
/// send the text. Sends the text rarely, because such a server, or the network to it, may be overloaded.
async fn teach(link: &Link) {
    loop {
        link.teach().await;
        sleep(jitter(TEACH_EVERY)).await;
    }
}

/// Probes a server that is believed dead, so that no check has to do so.
async fn probe(link: &Link, settings: &ConnectionSettings) {
    let mut back: Option<Instant> = None;
    loop {
        while !link.health.breaker.is_open() {
            link.health.breaker_opened.notified().await;
        }
        let went = Instant::now();
        until_it_answers(link, settings).await;
        link.health.record_recovery();
        let flaps = back.is_some_and(|back| went.duration_since(back) < FLAPS);
        back = Some(Instant::now());
        let reported = Instant::now() + if flaps { STEADY } else { Duration::ZERO };
        loop {
            match timeout_at(reported, link.health.breaker_opened.notified()).await {
                Err(_) => {
                    link.health.report_up();
                    break;
                }
                Ok(()) if link.health.breaker.is_open() => break,
                Ok(()) => {}
            }
        }
    }
}

async fn until_it_answers(link: &Link, settings: &ConnectionSettings) {
    let mut since = Instant::now();
    loop {
        // Waits for the answer until the next probe is due, because a server that wakes up meanwhile answers this
        // probe.
        let began = Instant::now();
        let next = began + jitter(PROBE_EVERY.max(settings.silence()));
        let mut patience = PATIENCE;
        let because = match link.probe(next).await {
            Err(failure) if failure.cause.is_unanswered() => {
                if Instant::now() >= next {
                    link.health.record_unanswered_probe(next - began);
                }
                if link.health.is_connected() {
                    patience = PATIENCE_IF_CONNECTED;
                }
                failure.error
            }
            // The server would refuse each check as well.
            Err(failure) if failure.error.kind() == StoreErrorKind::Misconfigured => {
                link.health.record_refused_probe(failure.error.clone());
                failure.error
            }
            _ => return,
        };
        tokio::select! {
            biased;
            () = sleep_until(next) => {}
            () = link.health.reconnected.notified() => continue,
        }
        if since.elapsed() >= patience {
            link.health.restart_connection(&because);
            since = Instant::now();
        }
    }
}

/// Gives the connection newer credentials when they are due. The connection keeps its present credentials until the
/// server has accepted the newer ones.
async fn renew(link: &Link, settings: &ConnectionSettings) {
    let Some(renewal) = link.transport.renewal() else { return };
    loop {
        renewal.wait_until_due().await;
        if !link.health.is_connected() {
            sleep(RETRY).await; // the next connection asks by itself
            continue;
        }
        let failure = match renewal.ask().await {
            Ok(credentials) => link.log_in(&credentials, Instant::now() + settings.connect_timeout()).await.err(),
            Err(why) => Some(CallFailure::without_credentials(&link.health.address, &why)),
        };
        if let Some(failure) = failure {
            renewal.retry();
            link.health.report_failed_renewal(&failure.error);
        }
    }
}
