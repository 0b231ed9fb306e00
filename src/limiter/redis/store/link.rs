//! The calls to one server, and its state.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::config::Options;
use fred::types::{ClusterHash, CustomCommand, Value};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::address::Address;
use super::breaker::Breaker;
use super::error_class::{self, Cause, Failure};
use super::events::Events;
use super::settings::Settings;
use crate::limiter::redis::error::{RedisError, RedisErrorKind};
use crate::limiter::redis::lateness::{self, Due};
use crate::limiter::redis::script::{Call, Script};

/// The time after fred's own timeout at which a call ends if fred's does not come.
const GUARD: Duration = Duration::from_millis(20);

/// The shortest time for which a call is sent. For fred, no time at all means no limit.
const SHORTEST: Duration = Duration::from_millis(1);

/// The shortest time between two restarts of a connection: because of its server, or because a
/// reply was not understood.
const RESTART: Duration = Duration::from_secs(1);
const RESTART_OF_GARBLED: Duration = Duration::from_millis(100);

/// A server's client, and the state that calls and the reconnecting task share.
pub(super) struct Link {
    pub(super) address: Address,
    pub(super) client: Client,
    is_sentinel: bool,
    pub(super) breaker: Breaker,
    /// Notified when the breaker opens.
    pub(super) opened: Notify,
    /// Notified when there is a new connection to a server that is believed dead.
    pub(super) made: Notify,
    /// Notified when another server may have to be found.
    alarm: Option<Arc<Notify>>,
    /// There was a connection to the server.
    was_connected: AtomicBool,
    /// The server was reported as down, and not as up since.
    is_reported_down: AtomicBool,
    /// Why there is no connection, or why the breaker is open.
    trouble: Mutex<Option<RedisError>>,
    router: Mutex<Router>,
    closed: AtomicBool,
    events: Arc<Events>,
}

/// fred's task for a client's connection.
#[derive(Default)]
struct Router {
    task: Option<AbortHandle>,
    restarted: Option<Instant>,
}

impl Link {
    pub(super) fn new(
        address: Address,
        client: Client,
        is_sentinel: bool,
        failures: u32,
        events: Arc<Events>,
        alarm: Option<Arc<Notify>>,
    ) -> Self {
        Self {
            address,
            client,
            is_sentinel,
            breaker: Breaker::new(failures),
            opened: Notify::new(),
            made: Notify::new(),
            alarm,
            was_connected: AtomicBool::new(false),
            is_reported_down: AtomicBool::new(false),
            trouble: Mutex::new(None),
            router: Mutex::default(),
            closed: AtomicBool::new(false),
            events,
        }
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_open(&self) -> bool {
        self.breaker.is_open() || self.closed.load(Ordering::Relaxed)
    }

    /// Runs a script by its name, and by its text if the server does not know it. `until` is when
    /// its time is over. With `asking` the server also serves a slot that it is being given.
    pub(super) async fn run(&self, call: &Call, until: Instant, asking: bool) -> Result<Value, Failure> {
        if self.is_open() {
            return Err(self.believed_dead());
        }
        match self.ask("EVALSHA", &call.script.sha, call, until, asking).await {
            Err(Failure { cause: Cause::NoScript, .. }) => {
                self.ask("EVAL", call.script.text, call, until, asking).await
            }
            answer => answer,
        }
    }

    /// Sends a command without keys.
    pub(super) async fn command(
        &self,
        command: &'static str,
        args: &[&'static str],
        until: Instant,
    ) -> Result<Value, Failure> {
        let args = args.iter().map(|arg| Value::from_static_str(arg)).collect();
        self.send(command, args, until, false).await
    }

    /// Runs a script that does nothing, as checks run theirs: a server may answer other commands
    /// and yet run no scripts.
    pub(super) async fn probe(&self, until: Instant) -> Result<Value, Failure> {
        static NOTHING: LazyLock<Script> = LazyLock::new(|| Script::new("return 1"));
        match self.command("EVALSHA", &[&NOTHING.sha, "0"], until).await {
            Err(Failure { cause: Cause::NoScript, .. }) => self.command("EVAL", &[NOTHING.text, "0"], until).await,
            answer => answer,
        }
    }

    /// Runs a script for a check, and counts how it ends.
    async fn ask(
        &self,
        command: &'static str,
        script: &'static str,
        call: &Call,
        until: Instant,
        asking: bool,
    ) -> Result<Value, Failure> {
        let mut args = Vec::with_capacity(2 + call.keys.len() + call.args.len());
        args.push(Value::from_static_str(script));
        args.push(Value::Integer(i64::try_from(call.keys.len()).unwrap_or(i64::MAX)));
        args.extend(call.keys.iter().chain(&call.args).map(|bytes| Value::Bytes(bytes.clone())));
        match self.send(command, args, until, asking).await {
            Ok(value) => {
                self.breaker.answered();
                Ok(value)
            }
            Err(failure) => Err(self.count(failure)),
        }
    }

    /// Waits for a connection that is being made, unless the server is believed dead.
    pub(super) async fn wait(&self, until: Instant) -> Result<(), Failure> {
        if self.is_open() || self.client.is_connected() {
            return Ok(());
        }
        match tokio::time::timeout_at(until, self.client.wait_for_connect()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.count(Failure::of(&error, &self.address))),
            Err(_) => Err(self.count(Failure::timeout(format!("no connection to Redis at {} in time", self.address)))),
        }
    }

    /// Counts a failure, reports it, and draws its consequences.
    pub(super) fn count(&self, failure: Failure) -> Failure {
        // The reason why there is no connection says more than that there is none.
        let says_little = failure.cause == Cause::Lost && failure.error.kind() == RedisErrorKind::Unavailable;
        let reason = if says_little { self.reason() } else { None };
        let failure = Failure { error: reason.unwrap_or(failure.error), ..failure };
        // The check has not failed yet if its script is sent again.
        if !failure.cause.is_sent_again() {
            self.events.failed(&failure.error);
        }
        match failure.cause {
            Cause::NoTime => {}
            Cause::Lost => {
                if self.breaker.failed() {
                    self.opened(&failure.error);
                }
            }
            _ => {
                self.breaker.answered();
                if failure.cause == Cause::Demoted {
                    self.raise();
                    if self.is_sentinel {
                        self.restart();
                    }
                }
            }
        }
        failure
    }

    /// Draws the consequences of an open breaker.
    fn opened(&self, error: &RedisError) {
        self.trouble().get_or_insert_with(|| error.clone());
        if !self.is_reported_down.swap(true, Ordering::Relaxed) {
            self.events.down(&self.address, error);
        }
        self.opened.notify_one();
        self.raise();
    }

    /// Returns the error for a command of a script that the server refused in these words.
    pub(super) fn refused(&self, words: &str) -> RedisError {
        self.count(error_class::answer(words, &self.address)).error
    }

    async fn send(
        &self,
        command: &'static str,
        args: Vec<Value>,
        until: Instant,
        asking: bool,
    ) -> Result<Value, Failure> {
        let left = until.saturating_duration_since(Instant::now());
        if left < SHORTEST {
            return Err(Failure {
                cause: Cause::NoTime,
                ..Failure::timeout(format!("no time was left for a call to Redis at {}", self.address))
            });
        }
        // fred ignores options for its own commands for scripts.
        let command = CustomCommand::new_static(command, ClusterHash::FirstKey, false);
        let options = Options { timeout: Some(left), fail_fast: true, max_attempts: Some(1), ..Options::default() };
        let answer = tokio::time::timeout(left + GUARD, async {
            if asking {
                // A pipeline's commands are written one after another, with nothing between them.
                let pipeline = self.client.pipeline();
                let with_options = pipeline.with_options(&options);
                let ask = CustomCommand::new_static("ASKING", ClusterHash::FirstKey, false);
                let _: Value = with_options.custom(ask, Vec::<Value>::new()).await?;
                let _: Value = with_options.custom(command, args).await?;
                // If the first is refused, that is the reason for the answer to the second.
                pipeline.all::<Vec<Value>>().await.map(|answers| answers.into_iter().last().unwrap_or(Value::Null))
            } else {
                self.client.with_options(&options).custom(command, args).await
            }
        });
        let (failure, due) = match answer.await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => (Failure::of(&error, &self.address), until),
            Err(_) => (Failure::timeout(format!("no answer from Redis at {} in time", self.address)), until + GUARD),
        };
        if failure.error.kind() == RedisErrorKind::Timeout && Due::at(due).is_late() {
            let error = lateness::error(&format!("no answer from Redis at {} was read in time", self.address));
            return Err(Failure { cause: Cause::NoTime, error });
        }
        Err(failure)
    }

    /// Remembers why there is no connection, and reports it if it is a misconfiguration.
    pub(super) fn note(&self, error: &fred::error::Error) {
        let mut failure = Failure::of(error, &self.address);
        if failure.error.kind() == RedisErrorKind::Timeout {
            // No check waited for this. The checks that come now fail at once, and this is why.
            let is_tls = self.client.client_config().uses_tls();
            let hint = if is_tls { "; if that port does not speak TLS, the URL begins with redis://" } else { "" };
            let message = format!("Redis at {} accepts connections and does not answer in time{hint}", self.address);
            failure = Failure::lost(RedisErrorKind::Unavailable, message);
        }
        self.report(&failure.error);
        if failure.cause == Cause::Demoted {
            // fred gives the connection up when a server says that its cluster is down, and the
            // caller does not hear why.
            self.raise();
        }
        let never_there = failure.cause == Cause::Lost && !self.was_connected.load(Ordering::Relaxed);
        *self.trouble() = Some(failure.error.clone());
        // A server that was never there is not waited for by checks.
        if never_there && self.breaker.open() {
            self.opened(&failure.error);
        }
    }

    /// Reports a misconfiguration.
    pub(super) fn report(&self, error: &RedisError) {
        if error.kind() == RedisErrorKind::Misconfigured {
            self.events.failed(error);
        }
    }

    /// Notes that there is a connection. A server that is believed dead is then probed, since it
    /// may still run no scripts.
    pub(super) fn connected(&self) {
        self.was_connected.store(true, Ordering::Relaxed);
        if self.breaker.is_open() {
            self.made.notify_one();
        } else {
            *self.trouble() = None;
        }
    }

    /// Notes that the server answers.
    pub(super) fn recovered(&self) {
        *self.trouble() = None;
        self.breaker.close();
    }

    /// Reports that the server answers, if it was reported as down.
    pub(super) fn report_up(&self) {
        if self.is_reported_down.swap(false, Ordering::Relaxed) {
            self.events.up(&self.address);
        }
    }

    /// Notes that nothing probes the server any more.
    pub(super) fn leave(&self) {
        self.breaker.close();
        if self.is_reported_down.swap(false, Ordering::Relaxed) {
            self.events.left(&self.address);
        }
    }

    /// Returns why calls to this server fail at once.
    pub(super) fn believed_dead(&self) -> Failure {
        if self.closed.load(Ordering::Relaxed) {
            return Failure::unavailable("this store was closed");
        }
        match &*self.trouble() {
            Some(error) if error.kind() == RedisErrorKind::Misconfigured => {
                Failure { cause: Cause::Answer, error: error.clone() }
            }
            Some(error) => Failure::unavailable(format!("Redis at {} is away; last: {error}", self.address)),
            None => Failure::unavailable(format!("Redis at {} is away", self.address)),
        }
    }

    pub(super) fn routed_by(&self, task: AbortHandle) {
        self.router().task = Some(task);
    }

    /// Ends the connection's task. reconnect.rs begins a new one.
    pub(super) fn restart(&self) {
        self.restart_unless(RESTART);
    }

    /// Restarts the connection, because a reply was not understood: the next ones may be the
    /// answers to other calls.
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
        }
    }

    fn raise(&self) {
        if let Some(alarm) = &self.alarm {
            alarm.notify_one();
        }
    }

    /// Returns why there is no connection.
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

/// Finds out whether a server runs scripts. A server of a cluster also gets the command `ASKING`,
/// because the lack of that right would otherwise show only when a slot moves.
pub(super) async fn answers(link: &Link, is_clustered: bool, settings: &Settings) -> Result<(), RedisError> {
    let until = Instant::now() + settings.deadline;
    let mut answer = link.probe(until).await;
    if is_clustered && answer.is_ok() {
        answer = link.command("ASKING", &[], until).await;
    }
    answer.map(drop).map_err(|failure| {
        link.report(&failure.error);
        link.reason().unwrap_or(failure.error)
    })
}
