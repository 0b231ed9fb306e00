//! Connections: how many there may be, how long each may take, and how they end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::CONNECTION;
use http::{HeaderValue, Version};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::health::Phase;
use super::peers::Peers;
use super::route;
use super::server::{Role, Server};

/// The largest head of a request, in bytes. nginx and Caddy pass on heads of up to 32 KiB, and of 1 MiB if they are
/// told to.
const HEAD_MAX: usize = 64 << 10;

/// The most requests of one connection at a time: a proxy sends many, and an operator few.
const STREAMS_MAX: u32 = 1_000;
const STREAMS_OF_OPERATORS_MAX: u32 = 8;

/// The bytes of bodies that an HTTP/2 connection may send before they are read: of one request, and of all.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;

/// The bounds of the operators' address, which others may reach as well: the most connections, and how long each may be
/// idle, take for the head of a request, and be used.
const CONNECTIONS_OF_OPERATORS_MAX: usize = 256;
const IDLE_OF_OPERATORS_MAX: Duration = Duration::from_secs(5);
const AGE_OF_OPERATORS_MAX: Duration = Duration::from_secs(60);

/// How often an idle HTTP/2 connection is asked whether its client is still there, and how long that may take.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_TIME: Duration = Duration::from_secs(20);

/// The pause after a connection could not be accepted, for example because no file may be opened.
const PAUSE: Duration = Duration::from_millis(100);

/// How long connections may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) max_connections: usize,
    pub(crate) idle: Duration,
    pub(crate) max_age: Duration,
    pub(crate) drain_timeout: Duration,
}

impl Bounds {
    /// Returns the bounds of an address.
    fn of(self, role: Role) -> Self {
        match role {
            Role::Asked => self,
            Role::Admin => Self {
                max_connections: self.max_connections.min(CONNECTIONS_OF_OPERATORS_MAX),
                idle: self.idle.min(IDLE_OF_OPERATORS_MAX),
                max_age: self.max_age.min(AGE_OF_OPERATORS_MAX),
                ..self
            },
        }
    }
}

/// Accepts connections until the server ends, and then waits for them.
pub(crate) async fn serve(
    server: Arc<Server>,
    listener: TcpListener,
    role: Role,
    bounds: Bounds,
    mut phase: watch::Receiver<Phase>,
) {
    let bounds = bounds.of(role);
    let max = bounds.max_connections;
    // A trusted peer waits for a place. Strangers may reach the operators' address, so nobody waits for a place there.
    let places = Arc::new(Semaphore::new(match role {
        Role::Asked => max,
        Role::Admin => Semaphore::MAX_PERMITS,
    }));
    let peers = Peers::new(max);
    let mut connections = JoinSet::new();
    loop {
        if places.available_permits() == 0 {
            server.log_sometimes("listen-full", &format!("{max} connections are open, as many as may be: others wait"));
        }
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            accepted = accepted => accepted,
            Some(_) = connections.join_next() => continue,
            _ = phase.wait_for(|phase| *phase == Phase::Ending) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                server.log_sometimes("accept", &error.to_string());
                sleep(PAUSE).await;
                continue;
            }
        };
        if role == Role::Asked && !server.limits.is_trusted(peer.ip()) {
            let message = format!("{} may not ask: --trust does not name it", peer.ip());
            server.log_sometimes("untrusted", &message);
            continue;
        }
        let (peer_place, loser) = peers.enter(peer.ip());
        if let Some(loser) = loser {
            let message = format!("{max} connections are open: the oldest one of {loser}, which has the most, ends");
            server.log_sometimes("crowded", &message);
        }
        let connection = connection(Arc::clone(&server), stream, peer, role, bounds, phase.clone());
        connections.spawn(async move {
            tokio::select! {
                () = connection => {}
                () = peer_place.lost() => {}
            }
            drop(peer_place); // before the permit, which lets the next connection enter
            drop(place);
        });
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if timeout(bounds.drain_timeout, all).await.is_err() {
        server.log.warn("drain", "requests were still under way when the time of --drain-timeout was over");
    }
}

/// Serves a connection until it ends.
async fn connection(
    server: Arc<Server>,
    stream: TcpStream,
    peer: SocketAddr,
    role: Role,
    bounds: Bounds,
    mut phase: watch::Receiver<Phase>,
) {
    let _ = stream.set_nodelay(true); // answers are small, and somebody waits for each
    let [is_old, is_used, has_streams] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let service = {
        let (server, is_old, phase) = (Arc::clone(&server), Arc::clone(&is_old), phase.clone());
        let (is_used, has_streams) = (Arc::clone(&is_used), Arc::clone(&has_streams));
        service_fn(move |request: http::Request<hyper::body::Incoming>| {
            let (server, is_old, phase) = (Arc::clone(&server), Arc::clone(&is_old), phase.clone());
            let version = request.version();
            is_used.store(true, Ordering::Relaxed);
            has_streams.store(version == Version::HTTP_2, Ordering::Relaxed);
            async move {
                let mut response = route::answer(&server, role, peer.ip(), request).await;
                // A client that keeps connections open learns that this one ends, so that it sends nothing on it that
                // would be lost.
                let is_ending = is_old.load(Ordering::Relaxed) || *phase.borrow() != Phase::Serving;
                if is_ending && version < Version::HTTP_2 {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(response)
            }
        })
    };
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(bounds.idle).max_buf_size(HEAD_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(HEAD_MAX).unwrap_or(u32::MAX))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(match role {
            Role::Asked => STREAMS_MAX,
            Role::Admin => STREAMS_OF_OPERATORS_MAX,
        })
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIME);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));

    // Until the version is known no timer of hyper runs.
    let mut first = pin!(sleep(bounds.idle));
    let mut is_first = true;
    let mut age = pin!(sleep(bounds.max_age));
    loop {
        tokio::select! {
            biased; // a request that came in time is read, even if this task has not run since
            ended = connection.as_mut() => {
                // hyper answers 431 by itself. Any other reason is the client's business.
                if ended.is_err_and(|error| error.downcast_ref().is_some_and(hyper::Error::is_parse_too_large)) {
                    let message = format!("{} sent a head that is too large, and got the status 431", peer.ip());
                    server.log_sometimes("large-head", &message);
                }
                return;
            }
            _ = phase.wait_for(|phase| *phase == Phase::Ending) => break,
            () = first.as_mut(), if is_first => {
                if !is_used.load(Ordering::Relaxed) {
                    return;
                }
                is_first = false;
            }
            () = age.as_mut() => {
                // The next response ends a connection of HTTP/1. One without a request for the idle time ends anyway.
                if is_old.swap(true, Ordering::Relaxed) || has_streams.load(Ordering::Relaxed) {
                    break;
                }
                age.set(sleep(bounds.idle));
            }
        }
    }
    connection.as_mut().graceful_shutdown();
    let _ = timeout(bounds.drain_timeout, connection).await;
}
