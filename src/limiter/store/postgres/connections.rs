//! The connections to the server.
//!
//! [`OwnConnections`] opens the first connection for the first statement, and a further connection whenever all open
//! connections are busy. If no further connection may be opened, a statement is sent over a busy connection. The
//! server answers in order, so no answer can be mistaken for another. The store waits for a statement's answer even
//! if the caller has stopped waiting.
//!
//! A connection without an answer for [`LATE`] is used only if no other connection is open or can
//! be opened. A connection without an answer for [`SILENT`] is given up: its statement is
//! cancelled, and the connection is closed. So a server that hangs, or another transaction that has
//! locked the table, holds only a bounded number of connections.
//!
//! A connection that was idle for [`PING`] is probed. If the server does not answer the probe, the
//! connection is closed, and a new connection is opened if the closed one was the last. So no check fails
//! because a firewall has silently dropped a connection.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, Shared};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{CancelToken, Client, Config, Socket};

use super::failure::{SharedError, is_at_wrong_server};
use super::statement::{Rows, Statement};
use crate::base::sync::{Mutex, lock, polled_again};
use crate::error::BoxError;
use crate::limiter::remote::Deadline;

/// A connection without an answer for this time is avoided.
const LATE: Duration = Duration::from_millis(20);

/// A connection without an answer for this time is given up.
const SILENT: Duration = Duration::from_secs(5);

/// An idle connection is probed after this time. Firewalls forget connections that are idle for minutes.
pub(super) const PING: Duration = Duration::from_secs(30);

/// The longest time that a ping takes.
const PINGS: Duration = Duration::from_secs(2);

/// The longest time for opening a connection, and for a request to cancel a statement.
const OPEN: Duration = Duration::from_secs(5);

/// After a failed attempt to open a connection, the next attempt waits for this time if another connection is open.
const PAUSE: Duration = Duration::from_secs(1);

/// The connections over which a [`PostgresStore`](super::PostgresStore) sends its statements.
///
/// Implement this trait for your application's pool. For [`deadpool_postgres`](https://docs.rs/deadpool-postgres):
///
/// ```
/// # use std::sync::Arc;
/// use tower_ratelimit::limiter::store::postgres::{Connections, Rows, Statement};
/// # struct Object(tokio_postgres::Client);
/// # impl std::ops::Deref for Object {
/// #     type Target = tokio_postgres::Client;
/// #     fn deref(&self) -> &tokio_postgres::Client {
/// #         &self.0
/// #     }
/// # }
/// # struct Pool;
/// # impl Pool {
/// #     async fn get(&self) -> Result<Object, std::io::Error> {
/// #         Err(std::io::ErrorKind::NotConnected.into())
/// #     }
/// # }
/// # use tower_ratelimit::limiter::store::postgres::tokio_postgres;
///
/// struct MyPool(Pool); // of deadpool_postgres
///
/// impl Connections for MyPool {
///     async fn run(
///         &self,
///         statement: &Statement,
///     ) -> Result<Rows, Box<dyn std::error::Error + Send + Sync>> {
///         let client = self.0.get().await?;
///         Ok(statement.run(&client).await?)
///     }
/// }
/// ```
///
/// # Contract
///
/// * Run a statement at most once, and not within a transaction.
/// * A limiter drops the future if there is no answer in time. So a pool should not hand out a connection with a
///   statement still under way. Otherwise the next user of that connection waits for the statement.
/// * A future that waits for a free connection and is dropped must not run the statement later.
pub trait Connections: Send + Sync + 'static {
    /// Runs a statement with [`Statement::run`].
    ///
    /// # Errors
    /// Returns the error of the statement, or the reason why there is no connection. If the cause is an error of
    /// `tokio_postgres`, the returned error must be that error or have it as one of its
    /// [sources](std::error::Error::source), because the store reads the code of that error.
    fn run(
        &self,
        statement: &Statement,
    ) -> impl Future<Output = Result<Rows, Box<dyn std::error::Error + Send + Sync>>> + Send;
}

/// The connections that a [`PostgresStore`](super::PostgresStore) opens, and opens again when they are cut.
pub struct OwnConnections(Arc<Inner>);

struct Inner {
    opener: Box<dyn Opener>,
    most: usize,
    ping_after: Duration,
    state: Mutex<PoolState>,
    runtime: Handle,
}

#[derive(Default)]
struct PoolState {
    open: Vec<OpenConnection>,
    /// The number of the next connection.
    next: u64,
    /// The attempt under way to open a connection.
    attempt: Option<Attempt>,
    /// While a connection is open, the next attempt to open another one waits until this instant.
    pause: Option<Deadline>,
}

type Attempt = Shared<oneshot::Receiver<Result<(), SharedError>>>;

/// An open connection.
struct OpenConnection {
    number: u64,
    client: Arc<Client>,
    driver: JoinHandle<()>,
    /// The number of statements without an answer.
    calls: usize,
    /// The instants from which the connection counts as late and as silent. The time begins with the last answer,
    /// or with the first of these statements if that is later.
    quiet: Option<Quiet>,
    /// The instant of the connection's next probe.
    ping: Deadline,
}

struct Quiet {
    late: Deadline,
    silent: Deadline,
}

impl Quiet {
    fn now() -> Self {
        Self { late: Deadline::after(LATE), silent: Deadline::after(SILENT) }
    }
}

/// The next step of a statement.
enum Choice {
    Send(u64, Arc<Client>),
    Wait(Attempt),
}

impl OwnConnections {
    pub(super) fn new<T>(config: Config, tls: T, most: usize, ping_after: Duration, runtime: Handle) -> Self
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::Stream: Send,
        T::TlsConnect: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let opener = Box::new(WithTls { config, tls });
        let inner = Arc::new(Inner { opener, most, ping_after, state: Mutex::default(), runtime });
        inner.runtime.spawn(ping_idle(Arc::downgrade(&inner), ping_after));
        Self(inner)
    }
}

impl Connections for OwnConnections {
    async fn run(&self, statement: &Statement) -> Result<Rows, BoxError> {
        let inner = &self.0;
        loop {
            match inner.choose() {
                Choice::Send(number, client) => {
                    let (inner, statement) = (Arc::clone(inner), statement.clone());
                    let answer = async move {
                        let answer = statement.run(&client).await;
                        inner.note_answer(number, answer.as_ref().err());
                        answer
                    };
                    return Ok(UnderWay { answer: Some(answer.boxed()), runtime: self.0.runtime.clone() }.await?);
                }
                Choice::Wait(attempt) => attempt.await??,
            }
        }
    }
}

/// A statement under way. The first poll sends it. If the caller stops waiting, a task waits for
/// the answer, and the connection counts as busy until the answer comes.
struct UnderWay {
    answer: Option<BoxFuture<'static, Result<Rows, tokio_postgres::Error>>>,
    runtime: Handle,
}

impl Future for UnderWay {
    type Output = Result<Rows, tokio_postgres::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(answer) = &mut self.answer else { return polled_again() };
        let answer = answer.as_mut().poll(cx);
        if answer.is_ready() {
            self.answer = None;
        }
        answer
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            self.runtime.spawn(answer);
        }
    }
}

impl fmt::Debug for OwnConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnConnections").field("open", &lock(&self.0.state).open.len()).finish_non_exhaustive()
    }
}

impl Inner {
    /// Chooses the connection for a statement, and counts the statement there.
    fn choose(self: &Arc<Self>) -> Choice {
        let mut state = lock(&self.state);
        state.open.retain(|open| !open.client.is_closed());
        let is_silent = |open: &OpenConnection| open.quiet.as_ref().is_some_and(|quiet| quiet.silent.is_over());
        let (silent, open): (Vec<OpenConnection>, Vec<OpenConnection>) =
            std::mem::take(&mut state.open).into_iter().partition(is_silent);
        state.open = open;
        let is_late = |open: &OpenConnection| open.quiet.as_ref().is_some_and(|quiet| quiet.late.is_over());
        let may_open =
            state.open.is_empty() || (state.open.len() < self.most && state.pause.is_none_or(Deadline::is_over));
        let best = state.open.iter_mut().min_by_key(|open| (is_late(open), open.calls));
        let is_busy = best.as_ref().is_none_or(|open| open.calls > 0);
        // If every connection is late, all connections may be dead, so the statement waits for a new connection if
        // one can be opened.
        let chosen = best.filter(|open| !is_late(open) || !may_open).map(|open| {
            open.calls += 1;
            open.quiet.get_or_insert_with(Quiet::now);
            (open.number, Arc::clone(&open.client))
        });
        let mut done = None;
        if is_busy && may_open && state.attempt.is_none() {
            let (sender, attempt) = oneshot::channel();
            state.attempt = Some(attempt.shared());
            done = Some(sender);
        }
        let attempt = state.attempt.clone();
        drop(state);
        for open in silent {
            self.give_up(open);
        }
        if let Some(done) = done {
            self.runtime.spawn(open_one(Arc::downgrade(self), done));
        }
        match (chosen, attempt) {
            (Some((number, client)), _) => Choice::Send(number, client),
            (None, Some(attempt)) => Choice::Wait(attempt),
            // This never happens, because there is always a connection or an attempt.
            (None, None) => Choice::Wait(oneshot::channel().1.shared()),
        }
    }

    fn note_answer(&self, number: u64, error: Option<&tokio_postgres::Error>) {
        let mut state = lock(&self.state);
        if error.is_some_and(|error| is_at_wrong_server(error)) {
            state.open.retain(|open| open.number != number); // the next connection may be to the right server
            return;
        }
        if let Some(open) = state.open.iter_mut().find(|open| open.number == number) {
            open.calls = open.calls.saturating_sub(1);
            open.quiet = (open.calls > 0).then(Quiet::now);
            open.ping = Deadline::after(self.ping_after);
        }
    }

    /// Returns the connections that were idle for too long, and counts a call on each of them.
    fn idle(&self) -> Vec<(u64, Arc<Client>)> {
        let mut state = lock(&self.state);
        state.open.retain(|open| !open.client.is_closed());
        let idle = state.open.iter_mut().filter(|open| open.calls == 0 && open.ping.is_over());
        idle.map(|open| {
            open.calls += 1;
            open.quiet = Some(Quiet::now());
            (open.number, Arc::clone(&open.client))
        })
        .collect()
    }

    /// Closes a connection over which no answer came.
    fn close(&self, number: u64) {
        let mut state = lock(&self.state);
        let Some(place) = state.open.iter().position(|open| open.number == number) else { return };
        let gone = state.open.swap_remove(place);
        drop(state);
        self.give_up(gone);
    }

    /// Opens a connection if a connection was open before, and no connection is open or being opened now.
    fn open_again(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if state.next == 0 || !state.open.is_empty() || state.attempt.is_some() {
            return;
        }
        let (sender, attempt) = oneshot::channel();
        state.attempt = Some(attempt.shared());
        drop(state);
        self.runtime.spawn(open_one(Arc::downgrade(self), sender));
    }

    /// Cancels the statement of a connection, and closes the connection.
    fn give_up(&self, open: OpenConnection) {
        let cancel = self.opener.cancel(open.client.cancel_token());
        self.runtime.spawn(async move {
            Deadline::after(OPEN).timeout(cancel).await;
            open.driver.abort();
        });
    }
}

/// Opens a connection, and sends the result to the statements that wait for it.
async fn open_one(inner: Weak<Inner>, done: oneshot::Sender<Result<(), SharedError>>) {
    let Some(opening) = inner.upgrade().map(|inner| inner.opener.open()) else { return };
    // Catches a panic, because no other attempt would be made if this attempt ended without a result.
    let opened = match Deadline::after(OPEN).timeout(AssertUnwindSafe(opening).catch_unwind()).await {
        Some(Ok(opened)) => opened.map_err(Into::into),
        Some(Err(_)) => Err("the application's code for TLS panicked".into()),
        None => Err("the server did not answer within 5 s".into()),
    };
    let Some(inner) = inner.upgrade() else { return };
    let result = {
        let mut state = lock(&inner.state);
        state.attempt = None;
        state.pause = opened.is_err().then(|| Deadline::after(PAUSE));
        opened.map(|(client, driver)| {
            let number = state.next;
            state.next += 1;
            let driver = inner.runtime.spawn(driver);
            let ping = Deadline::after(inner.ping_after);
            state.open.push(OpenConnection { number, client: Arc::new(client), driver, calls: 0, quiet: None, ping });
        })
    };
    let _ = done.send(result.map_err(|error: BoxError| error.into())); // the callers may have gone
}

/// Probes idle connections, until the store is dropped.
async fn ping_idle(inner: Weak<Inner>, after: Duration) {
    loop {
        Deadline::after(after / 2).wait().await;
        let Some(inner) = inner.upgrade() else { return };
        for (number, client) in inner.idle() {
            let pinging = Arc::clone(&inner);
            inner.runtime.spawn(async move {
                match Deadline::after(PINGS).timeout(client.simple_query("")).await {
                    Some(answer) => pinging.note_answer(number, answer.as_ref().err()),
                    None => {
                        pinging.close(number);
                        pinging.open_again();
                    }
                }
            });
        }
        inner.open_again();
    }
}

/// Opens connections with an implementation of TLS.
trait Opener: Send + Sync {
    fn open(&self) -> BoxFuture<'static, Result<(Client, BoxFuture<'static, ()>), tokio_postgres::Error>>;

    fn cancel(&self, token: CancelToken) -> BoxFuture<'static, ()>;
}

struct WithTls<T> {
    config: Config,
    tls: T,
}

impl<T> Opener for WithTls<T>
where
    T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
    T::Stream: Send,
    T::TlsConnect: Send,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn open(&self) -> BoxFuture<'static, Result<(Client, BoxFuture<'static, ()>), tokio_postgres::Error>> {
        let (config, tls) = (self.config.clone(), self.tls.clone());
        Box::pin(async move {
            let (client, connection) = config.connect(tls).await?;
            let driver: BoxFuture<'static, ()> = Box::pin(connection.map(drop));
            Ok((client, driver))
        })
    }

    fn cancel(&self, token: CancelToken) -> BoxFuture<'static, ()> {
        let tls = self.tls.clone();
        Box::pin(async move { drop(token.cancel_query(tls).await) })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::net::TcpListener;
    use tokio_postgres::NoTls;

    use super::*;

    /// An implementation of TLS with a defect, which counts how often it is used.
    #[derive(Clone, Default)]
    struct Broken(Arc<AtomicU32>);

    impl MakeTlsConnect<Socket> for Broken {
        type Stream = <NoTls as MakeTlsConnect<Socket>>::Stream;
        type TlsConnect = <NoTls as MakeTlsConnect<Socket>>::TlsConnect;
        type Error = <NoTls as MakeTlsConnect<Socket>>::Error;

        fn make_tls_connect(&mut self, _domain: &str) -> Result<Self::TlsConnect, Self::Error> {
            panic!("use {} of TLS has a defect", self.0.fetch_add(1, Ordering::Relaxed));
        }
    }

    #[tokio::test]
    async fn connection_is_opened_again_after_tls_panicked() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut config = Config::new();
        config.host("127.0.0.1").port(listener.local_addr().unwrap().port());
        let tls = Broken::default();
        let connections = OwnConnections::new(config, tls.clone(), 1, PING, Handle::current());
        let statement = Statement::new(&"SELECT".into(), Vec::new());
        for tries in 1..=3 {
            let error = connections.run(&statement).await.map(drop).unwrap_err();
            assert_eq!(tls.0.load(Ordering::Relaxed), tries, "{error}");
        }
    }
}
