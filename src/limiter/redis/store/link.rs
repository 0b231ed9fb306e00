//! The calls to one server, and its state.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::address::Address;
use super::error_class::{self, Cause, Failure};
use super::transport::{Command, Connections, Reply, SlotState, Transport};
use crate::event::StoreErrorKind;
use crate::limiter::redis::credentials::RedisCredentials;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::script::{Call, Script};
use crate::limiter::remote::{Breaker, Due, Events};

/// The time that a client gets beyond a call's own to report that it is over. After it the call ends without the
/// client.
const CLIENT_GRACE: Duration = Duration::from_millis(20);

/// The least time for which a call is sent. For some clients, no time at all means no limit.
const MIN_CALL: Duration = Duration::from_millis(1);

/// The least time between two restarts of a connection.
const MIN_RESTART_GAP: Duration = Duration::from_secs(1);

/// The least time between two restarts if a reply was not understood.
const MIN_GARBLED_RESTART_GAP: Duration = Duration::from_millis(100);

/// A server's transport, and the state that calls and the reconnecting task share.
pub(super) struct Link {
    pub(super) address: Address,
    pub(super) transport: Box<dyn Transport>,
    failover: Failover,
    pub(super) breaker: Breaker,
    /// Notified when the breaker opens.
    pub(super) breaker_opened: Notify,
    /// Notified when there is a new connection to a server that is believed dead.
    pub(super) reconnected: Notify,
    /// There was a connection to the server.
    was_connected: AtomicBool,
    /// The server was reported as down, and not as up since.
    is_reported_down: AtomicBool,
    /// Nothing watches over the server any more.
    is_retired: AtomicBool,
    /// Why there is no connection, or why the breaker is open.
    down_because: Mutex<Option<RedisError>>,
    /// Notifies the task that keeps the connection: it is to begin a new one.
    pub(super) restart: Notify,
    restarted: Mutex<Option<Instant>>,
    is_closed: AtomicBool,
    events: Arc<Events>,
}

/// How another server is found when this one is gone or no master any more.
pub(super) enum Failover {
    /// It is not: the URL names one server.
    None,
    /// The sentinels are asked for each new connection.
    Sentinel,
    /// This notifies the task that fetches the cluster's map.
    Cluster(Arc<Notify>),
}

impl Link {
    pub(super) fn new(
        address: Address,
        transport: Box<dyn Transport>,
        failover: Failover,
        max_failures: u32,
        events: Arc<Events>,
    ) -> Self {
        Self {
            address,
            transport,
            failover,
            breaker: Breaker::new(max_failures),
            breaker_opened: Notify::new(),
            reconnected: Notify::new(),
            was_connected: AtomicBool::new(false),
            is_reported_down: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
            down_because: Mutex::new(None),
            restart: Notify::new(),
            restarted: Mutex::new(None),
            is_closed: AtomicBool::new(false),
            events,
        }
    }

    /// Lets all later calls fail.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Returns whether a call fails without being sent: the server is believed dead, or the link was closed.
    pub(super) fn fails_at_once(&self) -> bool {
        self.breaker.is_open() || self.is_closed.load(Ordering::Relaxed)
    }

    /// Returns why a call fails without being sent.
    pub(super) fn failure_at_once(&self) -> Failure {
        if self.is_closed.load(Ordering::Relaxed) {
            return Failure::unavailable("this store was closed");
        }
        match self.down_because() {
            Some(error) if error.kind() == StoreErrorKind::Misconfigured => Failure { cause: Cause::Answer, error },
            trouble => {
                let Failure { cause, error } = Failure::unavailable(format!("Redis at {} is away", self.address));
                match trouble {
                    Some(last) => Failure { cause, error: error.caused_by(last) },
                    None => Failure { cause, error },
                }
            }
        }
    }

    /// Runs a check's script by its name, and by its text if the server does not know it. `until` is when
    /// its time is over.
    pub(super) async fn run_script(&self, call: &Call, until: Instant, slot: SlotState) -> Result<Reply, Failure> {
        if self.fails_at_once() {
            return Err(self.failure_at_once());
        }
        match self.evaluate("EVALSHA", &call.script.sha, call, until, slot).await {
            Err(Failure { cause: Cause::NoScript, .. }) => {
                self.evaluate("EVAL", call.script.text, call, until, slot).await
            }
            answer => answer,
        }
    }

    /// Sends a check's script, and records how the call ends.
    async fn evaluate(
        &self,
        command: &'static str,
        script: &'static str,
        call: &Call,
        until: Instant,
        slot: SlotState,
    ) -> Result<Reply, Failure> {
        match self.send(Command::script(command, script, call), until, slot).await {
            Ok(value) => {
                self.breaker.record_answer();
                Ok(value)
            }
            Err(failure) => Err(self.record_failure(failure)),
        }
    }

    /// Sends a command without keys. How it ends is not recorded.
    pub(super) async fn send_keyless(
        &self,
        command: &'static str,
        args: &[&'static str],
        until: Instant,
    ) -> Result<Reply, Failure> {
        self.send(Command::keyless(command, args), until, SlotState::Owned).await
    }

    /// Gives the connection newer credentials. How it ends is not recorded.
    pub(super) async fn log_in(&self, credentials: &RedisCredentials, until: Instant) -> Result<(), Failure> {
        self.send(Command::login(credentials), until, SlotState::Owned).await.map(drop)
    }

    /// Reports why the connection did not get newer credentials. It may still serve with those that it has.
    pub(super) fn report_failed_renewal(&self, error: &RedisError) {
        error.report_to(&self.events);
    }

    /// Runs a script that does nothing, as checks run theirs: a server may answer other commands
    /// and yet run no scripts.
    pub(super) async fn probe(&self, until: Instant) -> Result<(), Failure> {
        static NOTHING: LazyLock<Script> = LazyLock::new(|| Script::new("return 1"));
        let answer = match self.send_keyless("EVALSHA", &[&NOTHING.sha, "0"], until).await {
            Err(Failure { cause: Cause::NoScript, .. }) => self.send_keyless("EVAL", &[NOTHING.text, "0"], until).await,
            answer => answer,
        };
        answer.map(drop)
    }

    /// Finds out whether the server runs scripts, and reports a misconfiguration. A server of a cluster also gets
    /// the command `ASKING`, because the lack of that right would otherwise show only when a slot moves.
    pub(super) async fn verify(&self, until: Instant) -> Result<(), RedisError> {
        let mut answer = self.probe(until).await;
        if answer.is_ok() && matches!(self.failover, Failover::Cluster(_)) {
            answer = self.send_keyless("ASKING", &[], until).await.map(drop);
        }
        answer.map_err(|failure| self.explain(failure))
    }

    /// Reports the failure of a call that is no check's, if it is a misconfiguration. Returns its error, or why there
    /// is no connection, which says more.
    pub(super) fn explain(&self, failure: Failure) -> RedisError {
        self.report_misconfiguration(&failure.error);
        self.down_because().unwrap_or(failure.error)
    }

    async fn send(&self, command: Command<'_>, until: Instant, slot: SlotState) -> Result<Reply, Failure> {
        let left = until.saturating_duration_since(Instant::now());
        if left < MIN_CALL {
            return Err(Failure {
                cause: Cause::NoTime,
                ..Failure::timeout(format!("no time was left for a call to Redis at {}", self.address))
            });
        }
        let answer = tokio::time::timeout(left + CLIENT_GRACE, self.transport.send(command, until, slot));
        let (failure, due) = match answer.await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(failure)) => (failure, until),
            Err(_) => {
                let failure = Failure::timeout(format!("no answer from Redis at {} in time", self.address));
                (failure, until + CLIENT_GRACE)
            }
        };
        if failure.error.kind() == StoreErrorKind::Timeout && Due::at(due).is_late() {
            let error = RedisError::too_busy(&format!("no answer from Redis at {} was read in time", self.address));
            return Err(Failure { cause: Cause::NoTime, error });
        }
        Err(failure)
    }

    /// Waits for a connection that is being made, unless calls fail at once.
    pub(super) async fn wait_for_connection(&self, until: Instant) -> Result<(), Failure> {
        if self.fails_at_once() || self.transport.is_connected() {
            return Ok(());
        }
        let failure = match tokio::time::timeout_at(until, self.transport.wait_for_connection()).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(failure)) => failure,
            Err(_) => Failure::timeout(format!("no connection to Redis at {} in time", self.address)),
        };
        Err(self.record_failure(failure))
    }

    /// Records how a check failed: reports it, counts a lost answer against the server, and has another server found
    /// if this one is no master any more. Returns the failure with the error that says most.
    fn record_failure(&self, mut failure: Failure) -> Failure {
        if failure.cause == Cause::Lost && failure.error.kind() == StoreErrorKind::Unavailable {
            // The reason why there is no connection says more than that there is none.
            failure.error = self.down_because().unwrap_or(failure.error);
        }
        // The check has not failed yet if its script is sent again.
        if !failure.cause.is_sent_again() {
            failure.error.report_to(&self.events);
        }
        match failure.cause {
            Cause::NoTime => {}
            Cause::Lost => {
                if self.breaker.record_silence() {
                    self.report_dead(&failure.error);
                }
            }
            Cause::Demoted => {
                self.breaker.record_answer();
                self.refresh_cluster();
                if matches!(self.failover, Failover::Sentinel) {
                    self.restart_connection();
                }
            }
            _ => self.breaker.record_answer(),
        }
        failure
    }

    /// Records that the server refused a command of a script in these words. Returns the error.
    pub(super) fn record_refusal(&self, words: &str) -> RedisError {
        self.record_failure(error_class::answer(words, &self.address)).error
    }

    /// Records that the server answered a probe.
    pub(super) fn record_recovery(&self) {
        *self.lock_down_because() = None;
        self.breaker.close();
    }

    /// Reports that the server is believed dead, to observers and to the tasks that look for it and for others.
    fn report_dead(&self, error: &RedisError) {
        self.lock_down_because().get_or_insert_with(|| error.clone());
        // Calls that were under way when the server left still fail. Nothing would report the end of that.
        if !self.is_retired.load(Ordering::SeqCst) && !self.is_reported_down.swap(true, Ordering::SeqCst) {
            self.events.report_down(&self.address, error);
            if self.is_retired.load(Ordering::SeqCst) {
                self.events.report_left(&self.address); // it left meanwhile
            }
        }
        self.breaker_opened.notify_one();
        self.refresh_cluster();
    }

    /// Reports that the server answers, if it was reported as down.
    pub(super) fn report_up(&self) {
        if self.is_reported_down.swap(false, Ordering::SeqCst) {
            self.events.report_up(&self.address);
        }
    }

    /// Ends the watch over the server, and reports that if it was reported as down. Nothing probes it any more, so
    /// calls that still come are sent.
    pub(super) fn retire(&self) {
        self.is_retired.store(true, Ordering::SeqCst);
        self.breaker.close();
        if self.is_reported_down.swap(false, Ordering::SeqCst) {
            self.events.report_left(&self.address);
        }
    }

    /// Reports an error if it is a misconfiguration.
    pub(super) fn report_misconfiguration(&self, error: &RedisError) {
        if error.kind() == StoreErrorKind::Misconfigured {
            error.report_to(&self.events);
        }
    }

    /// Has the cluster's map fetched, if the server is of a cluster.
    fn refresh_cluster(&self) {
        if let Failover::Cluster(refresh) = &self.failover {
            refresh.notify_one();
        }
    }

    /// Ends the connection. reconnect.rs begins a new one.
    pub(super) fn restart_connection(&self) {
        self.restart_connection_unless_within(MIN_RESTART_GAP);
    }

    /// Restarts the connection, because a reply was not understood: the next ones may be the
    /// answers to other calls.
    pub(super) fn restart_garbled_connection(&self) {
        self.restart_connection_unless_within(MIN_GARBLED_RESTART_GAP);
    }

    fn restart_connection_unless_within(&self, gap: Duration) {
        let mut restarted = self.restarted.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if restarted.is_some_and(|last| now.duration_since(last) < gap) {
            return;
        }
        *restarted = Some(now);
        drop(restarted);
        self.restart.notify_waiters();
    }

    fn down_because(&self) -> Option<RedisError> {
        self.lock_down_because().clone()
    }

    fn lock_down_because(&self) -> MutexGuard<'_, Option<RedisError>> {
        self.down_because.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connections for Link {
    /// Records why there is no connection, and reports it if it is a misconfiguration.
    fn record_connection_failure(&self, mut failure: Failure) {
        if failure.error.kind() == StoreErrorKind::Timeout {
            // No check waited for this. The checks that come now fail at once, and this is why.
            let is_tls = self.transport.uses_tls();
            let hint = if is_tls { "; if that port does not speak TLS, the URL begins with redis://" } else { "" };
            let message = format!("Redis at {} accepts connections and does not answer in time{hint}", self.address);
            failure = Failure::lost(StoreErrorKind::Unavailable, message);
        }
        self.report_misconfiguration(&failure.error);
        if failure.cause == Cause::Demoted {
            // A client may give the connection up when a server says that its cluster is down, and the
            // caller does not hear why.
            self.refresh_cluster();
        }
        *self.lock_down_because() = Some(failure.error.clone());
        // Checks do not wait for a server that was never there.
        let was_never_there = failure.cause == Cause::Lost && !self.was_connected.load(Ordering::Relaxed);
        if was_never_there && self.breaker.open() {
            self.report_dead(&failure.error);
        }
    }

    /// Records that there is a connection. A server that is believed dead is then probed, since it
    /// may still run no scripts.
    fn record_connection(&self) {
        self.was_connected.store(true, Ordering::Relaxed);
        self.events.record_connection();
        if self.breaker.is_open() {
            self.reconnected.notify_one();
        } else {
            *self.lock_down_because() = None;
        }
    }
}
