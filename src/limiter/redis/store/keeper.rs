//! What keeps a server's connection: begins it again when its task has ended, and finds out when the server is back.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use fred::clients::Client;
use fred::error::Error;
use fred::interfaces::{ClientLike, EventInterface};
use fred::types::config::Server;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::failure::{Cause, Failure};
use super::server::Link;
use super::settings::Settings;

/// Between attempts to connect: from the first to the last of these, doubled each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));

/// A connection that lasted so long was one.
const LASTED: Duration = Duration::from_secs(1);

/// A server that is believed dead for so long gets a new connection, in case that it is the old one which is dead. Sooner if
/// it is connected: once an answer was lost, each call is given the answer to the one before it, and none its own.
const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_IF_CONNECTED: Duration = Duration::from_millis(500);

/// Runs until it is aborted.
pub(super) async fn keep(link: Arc<Link>, settings: Settings) {
    let connected = async {
        match &*link.clients {
            [client] if link.role.is_own() => connect(&link, client).await,
            _ => std::future::pending().await,
        }
    };
    let heard = async {
        match &*link.clients {
            [client] => listen(&link, client).await,
            // Of several, one that is back does not say that the others are; probes do.
            _ => std::future::pending().await,
        }
    };
    tokio::join!(connected, heard, probe(&link, &settings));
}

/// Aborts the task when the keeper is aborted.
struct Task(JoinHandle<Result<(), Error>>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The task that is the connection never ends for long.
async fn connect(link: &Link, client: &Client) {
    let mut pause = PAUSES.0;
    loop {
        let began = Instant::now();
        let mut task = Task(client.connect());
        link.routed_by(task.0.abort_handle());
        if let Ok(Err(error)) = (&mut task.0).await {
            link.note(&error);
        }
        if began.elapsed() >= LASTED {
            pause = PAUSES.0;
        }
        sleep(jitter(pause)).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Hears of connections that are made, and why others are not.
async fn listen(link: &Link, client: &Client) {
    let (mut up, mut errors) = (client.reconnect_rx(), client.error_rx());
    loop {
        // What happened before anybody listened shows in the state.
        if client.is_connected() {
            link.connected();
        }
        while hear(link, &mut up, &mut errors).await {}
        // fred makes new channels when a client is connected anew.
        sleep(PAUSES.0).await;
        (up, errors) = (client.reconnect_rx(), client.error_rx());
    }
}

/// Whether there may be more to hear.
async fn hear(link: &Link, up: &mut Receiver<Server>, errors: &mut Receiver<(Error, Option<Server>)>) -> bool {
    tokio::select! {
        // An error is the reason for a connection that was made after it, so it must not be heard after that.
        biased;
        error = errors.recv() => match error {
            Ok((error, _)) => {
                link.note(&error);
                true
            }
            Err(RecvError::Lagged(_)) => true,
            Err(RecvError::Closed) => false,
        },
        made = up.recv() => match made {
            Ok(_) | Err(RecvError::Lagged(_)) => {
                link.connected();
                true
            }
            Err(RecvError::Closed) => false,
        },
    }
}

/// Asks a server that is believed dead whether it is, so that no user's call has to.
async fn probe(link: &Link, settings: &Settings) {
    loop {
        while !link.breaker.is_open() {
            tokio::select! {
                () = link.opened.notified() => {}
                () = link.doubted.notified() => resolve(link, settings).await,
            }
        }
        let mut since = Instant::now();
        while link.breaker.is_open() {
            // An answer is waited for until the next probe: it comes when the server wakes.
            let next = Instant::now() + jitter(settings.probe_every());
            if !matches!(link.probe(next).await, Err(Failure { cause: Cause::Lost, .. })) {
                link.recovered();
                break;
            }
            tokio::select! {
                () = sleep_until(next) => {}
                () = link.made.notified() => continue,
            }
            let patience = if link.client().is_connected() { PATIENCE_IF_CONNECTED } else { PATIENCE };
            if since.elapsed() >= patience && link.role.is_own() {
                link.restart();
                since = Instant::now();
            }
        }
    }
}

/// Finds out whether a server answers whose callers do not wait for the deadline: else no failure of its would be counted.
async fn resolve(link: &Link, settings: &Settings) {
    while !link.is_open() {
        match link.probe(Instant::now() + settings.deadline).await {
            Err(failure) if failure.cause == Cause::Lost => drop(link.count(failure)),
            Ok(_) | Err(_) => {
                link.breaker.answered();
                return;
            }
        }
        sleep(PAUSES.0).await;
    }
}

/// Up to a tenth longer, so that many processes do not come at once.
pub(super) fn jitter(time: Duration) -> Duration {
    let part = foldhash::quality::RandomState::default().hash_one(time) % 100;
    time + time * u32::try_from(part).unwrap_or(0) / 1_000
}
