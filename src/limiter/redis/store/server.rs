//! One server, or what the user's own client makes of several.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::config::Options;
use fred::types::{ClusterHash, CustomCommand, Value as FredValue};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::address::Address;
use super::breaker::Breaker;
use super::failure::{self, Cause, Failure, Misconfigured};
use super::keeper;
use super::news::News;
use super::settings::Settings;
use super::value;
use crate::limiter::redis::error::{RedisError, RedisErrorKind};
use crate::limiter::redis::value::{Call, Script, Value};

/// Later than fred's own timeout, for when that does not come.
const GUARD: Duration = Duration::from_millis(20);

/// The shortest time for which a call is worth being sent. For fred no time at all means for ever.
const SHORTEST: Duration = Duration::from_millis(1);

/// A client whose connection is told to begin anew is not told again for so long: because of its server, or because what it
/// brought is not understood.
const RESTART: Duration = Duration::from_secs(1);
const RESTART_OF_GARBLED: Duration = Duration::from_millis(100);

/// Whose client it is, and what it talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Ours, to one server.
    Own,
    /// Ours, to whom the sentinels name.
    OwnSentinel,
    /// The user's, to one server.
    Theirs,
    /// The user's, to a cluster.
    TheirsClustered,
}

impl Role {
    pub(super) fn is_own(self) -> bool {
        matches!(self, Self::Own | Self::OwnSentinel)
    }
}

/// A server. Dropped, it is left alone.
pub(super) struct Server {
    pub(super) link: Arc<Link>,
    keeper: AbortHandle,
}

/// What calls, and what keeps the connection, have in common.
pub(super) struct Link {
    pub(super) address: Address,
    pub(super) clients: Box<[Client]>,
    next: AtomicUsize,
    pub(super) role: Role,
    pub(super) breaker: Breaker,
    /// Woken when the breaker opens.
    pub(super) opened: Notify,
    /// Woken when there is a new connection to a server that is believed dead.
    pub(super) made: Notify,
    /// Woken when a call was dropped before its end, which may be because it took too long.
    pub(super) doubted: Notify,
    /// Woken too: whoever has to look for another server then.
    alarm: Option<Arc<Notify>>,
    /// Why there is no connection, or why the breaker is open.
    trouble: Mutex<Option<RedisError>>,
    router: Mutex<Router>,
    closed: AtomicBool,
    news: Arc<News>,
}

/// The task that is a client's connection.
#[derive(Default)]
struct Router {
    task: Option<AbortHandle>,
    restarted: Option<Instant>,
}

/// How a script is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Sha,
    Text,
}

/// A call under way. Dropped before its end, it is not known whether the server would have answered.
struct Doubt<'a>(&'a Notify);

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl Server {
    /// Starts to connect, if the client is ours, and to watch.
    pub(super) fn start(
        runtime: &Handle,
        address: Address,
        clients: Vec<Client>,
        role: Role,
        settings: &Settings,
        news: Arc<News>,
        alarm: Option<Arc<Notify>>,
    ) -> Self {
        let link = Arc::new(Link {
            address,
            clients: clients.into_boxed_slice(),
            next: AtomicUsize::new(0),
            role,
            breaker: Breaker::new(settings.failures),
            opened: Notify::new(),
            made: Notify::new(),
            doubted: Notify::new(),
            alarm,
            trouble: Mutex::new(None),
            router: Mutex::default(),
            closed: AtomicBool::new(false),
            news,
        });
        let keeper = runtime.spawn(keeper::keep(Arc::clone(&link), settings.clone())).abort_handle();
        Self { link, keeper }
    }

    pub(super) fn close(&self) {
        self.link.closed.store(true, Ordering::Relaxed);
        self.keeper.abort();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Link {
    pub(super) fn is_open(&self) -> bool {
        self.breaker.is_open() || self.closed.load(Ordering::Relaxed)
    }

    /// Runs a script. `until` is when its time is over; `asking` is said before it if the slot is on its way to here.
    pub(super) async fn run(&self, call: &Call, slot: u16, until: Instant, asking: bool) -> Result<Value, Failure> {
        if self.is_open() {
            return Err(self.believed_dead());
        }
        match self.run_by(By::Sha, call, slot, until, asking).await {
            Err(Failure { cause: Cause::NoScript, .. }) => self.run_by(By::Text, call, slot, until, asking).await,
            answer => answer,
        }
    }

    async fn run_by(&self, by: By, call: &Call, slot: u16, until: Instant, asking: bool) -> Result<Value, Failure> {
        let (command, script) = match by {
            By::Sha => ("EVALSHA", &*call.script.sha),
            By::Text => ("EVAL", &*call.script.text),
        };
        let mut args = Vec::with_capacity(2 + call.keys.len() + call.args.len());
        args.push(FredValue::from_static_str(script));
        args.push(FredValue::Integer(i64::try_from(call.keys.len()).unwrap_or(i64::MAX)));
        args.extend(call.keys.iter().chain(&call.args).map(|bytes| FredValue::Bytes(bytes.clone())));
        self.ask(command, args, slot, until, asking).await
    }

    /// Any command without keys.
    pub(super) async fn command(
        &self,
        command: &'static str,
        args: &[&'static str],
        until: Instant,
    ) -> Result<Value, Failure> {
        let args = args.iter().map(|arg| FredValue::from_static_str(arg)).collect();
        self.send(command, args, 0, until, false).await
    }

    /// Runs a script that does nothing, as checks run theirs: a server may answer other commands and yet run no scripts.
    pub(super) async fn probe(&self, until: Instant) -> Result<Value, Failure> {
        static NOTHING: LazyLock<Script> = LazyLock::new(|| Script::new("return 1"));
        match self.command("EVALSHA", &[&NOTHING.sha, "0"], until).await {
            Err(Failure { cause: Cause::NoScript, .. }) => self.command("EVAL", &[&NOTHING.text, "0"], until).await,
            answer => answer,
        }
    }

    /// What is asked for a user: its end is counted.
    async fn ask(
        &self,
        command: &'static str,
        args: Vec<FredValue>,
        slot: u16,
        until: Instant,
        asking: bool,
    ) -> Result<Value, Failure> {
        let doubt = Doubt(&self.doubted);
        let answer = self.send(command, args, slot, until, asking).await;
        std::mem::forget(doubt);
        match &answer {
            Ok(_) => self.breaker.answered(),
            Err(failure) => return Err(self.count(failure.clone())),
        }
        answer
    }

    /// Waits for a connection that is being made, unless the server is believed dead.
    pub(super) async fn wait(&self, until: Instant) -> Result<(), Failure> {
        let client = self.client();
        if self.is_open() || client.is_connected() {
            return Ok(());
        }
        match tokio::time::timeout_at(until, client.wait_for_connect()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.count(Failure::of(&error, &self.address))),
            Err(_) => Err(self.count(Failure::timeout(format!("no connection to Redis at {} in time", self.address)))),
        }
    }

    pub(super) fn count(&self, failure: Failure) -> Failure {
        if matches!(failure.cause, Cause::Lost | Cause::Demoted | Cause::Told) {
            self.news.failed(&failure.error);
        }
        match failure.cause {
            Cause::Lost => {
                if self.breaker.failed() {
                    self.trouble().get_or_insert_with(|| failure.error.clone());
                    self.news.down(&self.address, &failure.error);
                    self.opened.notify_one();
                    self.raise();
                }
                // Without a connection the reason for that says more than that there is none.
                if failure.error.kind() == RedisErrorKind::Unavailable {
                    if let Some(error) = &*self.trouble() {
                        return Failure { cause: Cause::Lost, error: error.clone() };
                    }
                }
            }
            Cause::Misconfigured(kind) => {
                self.breaker.answered();
                self.news.misconfigured(kind, &failure.error);
            }
            Cause::Demoted => {
                self.breaker.answered();
                self.raise();
                if self.role == Role::OwnSentinel {
                    self.restart();
                }
            }
            _ => self.breaker.answered(),
        }
        failure
    }

    /// What it means that the server refused a command of a script in these words.
    pub(super) fn refused(&self, words: &str) -> RedisError {
        self.count(failure::answer(words, &self.address)).error
    }

    /// The user lacks these rights.
    pub(super) fn lacks(&self, rights: &str) -> RedisError {
        self.count(failure::lacks(rights, &self.address)).error
    }

    async fn send(
        &self,
        command: &'static str,
        args: Vec<FredValue>,
        slot: u16,
        until: Instant,
        asking: bool,
    ) -> Result<Value, Failure> {
        let left = until.saturating_duration_since(Instant::now());
        if left < SHORTEST {
            return Err(Failure {
                cause: Cause::Told,
                ..Failure::timeout(format!("no time was left for a call to Redis at {}", self.address))
            });
        }
        // fred ignores the slot unless it is told so, and ignores options for its own commands for scripts.
        let command = CustomCommand::new_static(command, ClusterHash::Custom(slot), false);
        let attempts = if self.role == Role::TheirsClustered { 3 } else { 1 };
        let options = Options {
            timeout: Some(left),
            fail_fast: true,
            max_attempts: Some(attempts),
            max_redirections: Some(2),
            ..Options::default()
        };
        let client = self.client();
        let answer = tokio::time::timeout(left + GUARD, async {
            if asking {
                // A pipeline's commands are written one after another, with nothing between them.
                let pipeline = client.pipeline();
                let with_options = pipeline.with_options(&options);
                let ask = CustomCommand::new_static("ASKING", ClusterHash::Custom(slot), false);
                let _: FredValue = with_options.custom(ask, Vec::<FredValue>::new()).await?;
                let _: FredValue = with_options.custom(command, args).await?;
                // Refused, the first is the reason for whatever the second is told.
                pipeline
                    .all::<Vec<FredValue>>()
                    .await
                    .map(|answers| answers.into_iter().last().unwrap_or(FredValue::Null))
            } else {
                client.with_options(&options).custom(command, args).await
            }
        });
        match answer.await {
            Ok(Ok(answer)) => Ok(value::of(answer)),
            Ok(Err(error)) => Err(Failure::of(&error, &self.address)),
            Err(_) => Err(Failure::timeout(format!("no answer from Redis at {} in time", self.address))),
        }
    }

    /// The next of the clients; of those that are connected, if any is.
    pub(super) fn client(&self) -> &Client {
        let count = self.clients.len();
        let first = if count == 1 { 0 } else { self.next.fetch_add(1, Ordering::Relaxed) % count };
        let connected = (0..count).map(|step| (first + step) % count).find(|at| self.clients[*at].is_connected());
        &self.clients[connected.unwrap_or(first)]
    }

    /// Says that somebody has to mend it.
    pub(super) fn complain(&self, kind: Misconfigured, error: &RedisError) {
        self.news.misconfigured(kind, error);
    }

    /// Remembers why there is no connection, and says so if somebody has to mend it.
    pub(super) fn note(&self, error: &fred::error::Error) {
        let mut failure = Failure::of(error, &self.address);
        if failure.error.kind() == RedisErrorKind::Timeout {
            // No check waited for this: those that come now fail at once, and this is why.
            let is_tls = self.client().client_config().uses_tls();
            let hint = if is_tls { "; if that port does not speak TLS, the URL begins with redis://" } else { "" };
            let message = format!("Redis at {} accepts connections and does not answer in time{hint}", self.address);
            failure = Failure::lost(RedisErrorKind::Unavailable, message);
        }
        if let Cause::Misconfigured(kind) = failure.cause {
            self.news.misconfigured(kind, &failure.error);
        }
        if failure.cause == Cause::Demoted {
            // fred gives the connection up when a server says that its cluster is down, and the caller does not hear why.
            self.raise();
        }
        *self.trouble() = Some(failure.error);
    }

    /// There is a connection. That does not say that scripts run: if the server is believed dead, it is probed.
    pub(super) fn connected(&self) {
        if self.breaker.is_open() {
            self.made.notify_one();
        } else {
            *self.trouble() = None;
        }
    }

    /// It is there.
    pub(super) fn recovered(&self) {
        *self.trouble() = None;
        if self.breaker.close() {
            self.news.up(&self.address);
        }
    }

    pub(super) fn believed_dead(&self) -> Failure {
        if self.closed.load(Ordering::Relaxed) {
            return Failure::unavailable("this store was closed");
        }
        match &*self.trouble() {
            Some(error) if error.kind() == RedisErrorKind::Misconfigured => {
                Failure { cause: Cause::Told, error: error.clone() }
            }
            Some(error) => Failure::unavailable(format!("Redis at {} is away; last: {error}", self.address)),
            None => Failure::unavailable(format!("Redis at {} is away", self.address)),
        }
    }

    pub(super) fn routed_by(&self, task: AbortHandle) {
        self.router().task = Some(task);
    }

    /// Ends the connection's task, which its keeper then begins anew.
    pub(super) fn restart(&self) {
        self.restart_unless(RESTART);
    }

    /// A reply was not understood. Those that follow on this connection may be the answers to other calls, so it begins anew.
    pub(super) fn garbled(&self) {
        self.restart_unless(RESTART_OF_GARBLED);
    }

    fn restart_unless(&self, restarted_within: Duration) {
        let mut router = self.router();
        let now = Instant::now();
        if router.restarted.is_some_and(|last| now.duration_since(last) < restarted_within) {
            return;
        }
        router.restarted = Some(now);
        if let Some(task) = router.task.take() {
            task.abort();
        } else if !self.role.is_own() {
            // A client of the user's that does not come back by itself is left alone.
            for client in self.clients.iter().filter(|client| client.has_reconnect_policy()) {
                let client = client.clone();
                tokio::spawn(async move { client.force_reconnection().await });
            }
        }
    }

    fn raise(&self) {
        if let Some(alarm) = &self.alarm {
            alarm.notify_one();
        }
    }

    /// Why there is no connection.
    pub(super) fn reason(&self) -> Option<RedisError> {
        self.trouble().clone()
    }

    fn trouble(&self) -> MutexGuard<'_, Option<RedisError>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn router(&self) -> MutexGuard<'_, Router> {
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a server runs scripts. One of a cluster is also told to serve the next call although its slot is on its way,
/// which needs a right that else would be missed only then.
pub(super) async fn answers(link: &Link, is_clustered: bool, settings: &Settings) -> Result<(), RedisError> {
    let until = Instant::now() + settings.deadline;
    let mut answer = link.probe(until).await;
    if is_clustered && answer.is_ok() {
        answer = link.command("ASKING", &[], until).await;
    }
    match answer {
        Ok(_) => Ok(()),
        Err(failure) => {
            if let Cause::Misconfigured(kind) = failure.cause {
                link.complain(kind, &failure.error);
            }
            Err(link.reason().unwrap_or(failure.error))
        }
    }
}
