//! Keeps a server's connection: begins it again when its task has ended, and finds out when the
//! server is back.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use fred::error::Error;
use fred::interfaces::{ClientLike, EventInterface};
use fred::types::config::Server;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::error_class::{Cause, Failure};
use super::link::Link;
use super::settings::Settings;

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
    tokio::join!(connect(&link), listen(&link), probe(&link, &settings));
}

/// Aborts fred's task when this one is aborted.
struct Task(JoinHandle<Result<(), Error>>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Connects, and connects again whenever fred's task has ended.
async fn connect(link: &Link) {
    let mut pause = PAUSES.0;
    loop {
        let began = Instant::now();
        let mut task = Task(link.client.connect());
        link.set_connection_task(task.0.abort_handle());
        if let Ok(Err(error)) = (&mut task.0).await {
            link.record_connection_error(&error);
        }
        if began.elapsed() >= LASTED {
            pause = PAUSES.0;
        }
        sleep(jitter(pause)).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Listens for connections that are made, and for the reasons why others are not.
async fn listen(link: &Link) {
    let client = &link.client;
    let (mut up, mut errors) = (client.reconnect_rx(), client.error_rx());
    loop {
        // A connection that was made before shows in the client's state.
        if client.is_connected() {
            link.record_connection();
        }
        while hear(link, &mut up, &mut errors).await {}
        // fred makes new channels when a client is connected anew.
        sleep(PAUSES.0).await;
        (up, errors) = (client.reconnect_rx(), client.error_rx());
    }
}

/// Waits for one event. Returns whether there may be more.
async fn hear(link: &Link, up: &mut Receiver<Server>, errors: &mut Receiver<(Error, Option<Server>)>) -> bool {
    tokio::select! {
        // An error comes before the connection that was made because of it, so it must be heard
        // first.
        biased;
        error = errors.recv() => match error {
            Ok((error, _)) => {
                link.record_connection_error(&error);
                true
            }
            Err(RecvError::Lagged(_)) => true,
            Err(RecvError::Closed) => false,
        },
        made = up.recv() => match made {
            Ok(_) | Err(RecvError::Lagged(_)) => {
                link.record_connection();
                true
            }
            Err(RecvError::Closed) => false,
        },
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
            () = sleep_until(next) => {}
            () = link.reconnected.notified() => continue,
        }
        let patience = if link.client.is_connected() { PATIENCE_IF_CONNECTED } else { PATIENCE };
        if since.elapsed() >= patience {
            link.restart_connection();
            since = Instant::now();
        }
    }
}

/// Returns a time that is up to a tenth longer, so that many processes do not come at once.
pub(super) fn jitter(time: Duration) -> Duration {
    let part = foldhash::quality::RandomState::default().hash_one(time) % 100;
    time + time * u32::try_from(part).unwrap_or(0) / 1_000
}
