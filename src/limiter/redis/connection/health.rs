//! Whether a server can be used: its connection, whether the server is believed dead, and why.
//!
//! The calls to the server record here how they ended, and the task that keeps the connection records its attempts.
//! Observers, waiting calls and that task learn from here what has changed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::error_class;
use super::failure::{self, CallFailure, Cause};
use super::pause::Restarts;
use super::settings::ConnectionSettings;
use super::transport::Transport;
use crate::base::sync::{Mutex, lock};
use crate::event::StoreErrorKind;
use crate::limiter::redis::error::RedisError;
use crate::limiter::remote::{Breaker, Events};

/// The least time between two restarts of a connection.
const MIN_RESTART_GAP: Duration = Duration::from_secs(1);

/// The least time between two restarts if a reply was not understood.
const MIN_GARBLED_RESTART_GAP: Duration = Duration::from_millis(100);

/// A server as this process knows it, and its connection.
pub(super) struct Health {
    pub(super) address: Address,
    /// Notifies the task that fetches the cluster's map, if the server is of a cluster.
    cluster: Option<Arc<Notify>>,
    /// True if the application makes the connection.
    is_given: bool,
    uses_tls: bool,
    /// The time for which the server may be silent while calls wait.
    silence: Duration,
    connect_timeout: Duration,
    pub(super) breaker: Breaker,
    /// Notified when the breaker opens.
    pub(super) breaker_opened: Notify,
    /// Notified when there is a new connection to a server that is believed dead.
    pub(super) reconnected: Notify,
    /// The number of connections that were made, plus the number of those that have ended. So the sum is odd
    /// while there is a connection.
    connection: AtomicU64,
    /// Notified when a connection is made or ends, or when checks begin to fail at once.
    changed: Notify,
    /// The instant at which the connection was made, or at which the last connection ended.
    changed_at: Mutex<Instant>,
    began: Instant,
    /// The instant at which something was last heard from the server, in microseconds after `began`.
    heard_us: AtomicU64,
    /// True if the last report about the server was that it is down.
    is_reported_down: AtomicBool,
    /// True if the server's connection is no longer watched.
    is_retired: AtomicBool,
    /// The reason why there is no connection, or why the breaker is open.
    down_because: Mutex<Option<RedisError>>,
    /// Tells the task that keeps the connection to begin a new connection.
    pub(super) restart: Notify,
    restarted: Mutex<Option<Instant>>,
    /// The number of the last connection that this limiter ended by itself, and why.
    ended_here: Mutex<Option<(u64, RedisError)>>,
    demotions: Mutex<Restarts>,
    /// The server of the last connection, if sentinels named it.
    master: Mutex<Option<Address>>,
    /// The instant at which the last attempt to connect began.
    attempted_at: Mutex<Instant>,
    /// The time that it took to make the last connection.
    connecting: Mutex<Duration>,
    is_closed: AtomicBool,
    events: Arc<Events>,
}

impl Health {
    /// `cluster` notifies the task that fetches the cluster's map, if the server is of a cluster.
    pub(super) fn new(
        address: Address,
        transport: &dyn Transport,
        cluster: Option<Arc<Notify>>,
        settings: &ConnectionSettings,
        events: Arc<Events>,
    ) -> Self {
        let now = Instant::now();
        Self {
            address,
            cluster,
            is_given: transport.is_given(),
            uses_tls: transport.uses_tls(),
            silence: settings.silence(),
            connect_timeout: settings.connect_timeout(),
            breaker: Breaker::new(settings.failures),
            breaker_opened: Notify::new(),
            reconnected: Notify::new(),
            connection: AtomicU64::new(0),
            changed: Notify::new(),
            changed_at: Mutex::new(now),
            began: now,
            heard_us: AtomicU64::new(0),
            is_reported_down: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
            down_because: Mutex::new(None),
            restart: Notify::new(),
            restarted: Mutex::new(None),
            ended_here: Mutex::new(None),
            demotions: Mutex::new(Restarts::new()),
            master: Mutex::new(None),
            attempted_at: Mutex::new(now),
            connecting: Mutex::new(Duration::ZERO),
            is_closed: AtomicBool::new(false),
            events,
        }
    }

    /// Returns whether the server is part of a cluster.
    pub(super) fn is_of_cluster(&self) -> bool {
        self.cluster.is_some()
    }

    /// Lets all later calls fail.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    /// Returns whether a call fails without being sent: the server is believed dead, or the link was closed.
    pub(super) fn fails_at_once(&self) -> bool {
        self.breaker.is_open() || self.is_closed.load(Ordering::Relaxed)
    }

    /// Returns why a call fails without being sent.
    pub(super) fn failure_at_once(&self) -> CallFailure {
        if self.is_closed.load(Ordering::Relaxed) {
            return CallFailure::closed();
        }
        match self.down_because() {
            Some(error) if error.kind() == StoreErrorKind::Misconfigured => CallFailure { cause: Cause::Answer, error },
            Some(last) => CallFailure { cause: Cause::Answer, error: last.while_down() },
            None => CallFailure::dead(&self.address),
        }
    }

    /// Returns whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.connection_number().is_some()
    }

    /// Returns the number of the connection, if there is one.
    pub(super) fn connection_number(&self) -> Option<u64> {
        Some(self.connection.load(Ordering::Acquire)).filter(|number| number % 2 == 1)
    }

    /// Returns whether a connection was ever made.
    pub(super) fn was_connected(&self) -> bool {
        self.connection.load(Ordering::Acquire) > 0
    }

    /// Waits for a connection that is being made, unless calls fail at once. If no connection is made, the
    /// reason is recorded.
    pub(super) async fn wait_for_connection(&self, until: Instant) -> Result<(), CallFailure> {
        self.wait_for_other_connection(0, until).await.map(drop)
    }

    /// Waits for the connection that follows the ended connection with this number. Returns the number of the
    /// new connection.
    pub(super) async fn wait_for_other_connection(&self, ended: u64, until: Instant) -> Result<u64, CallFailure> {
        loop {
            let changed = self.changed.notified();
            if self.fails_at_once() {
                return Err(self.failure_at_once());
            }
            if let Some(number) = self.connection_number().filter(|number| *number != ended) {
                return Ok(number);
            }
            if timeout_at(until, changed).await.is_err() {
                return Err(self.record_failure(self.not_connected()));
            }
        }
    }

    /// Waits for a connection until the deadline, even to a server that is believed dead.
    pub(super) async fn until_connected(&self, until: Instant) {
        loop {
            let changed = self.changed.notified();
            if self.is_connected() || timeout_at(until, changed).await.is_err() {
                return;
            }
        }
    }

    /// Waits until the connection with this number has ended.
    pub(super) async fn until_ended(&self, number: u64) {
        loop {
            let changed = self.changed.notified();
            if self.connection.load(Ordering::Acquire) != number {
                return;
            }
            changed.await;
        }
    }

    /// Returns the failure of a call that was not sent, with the reason why there is no connection.
    pub(super) fn not_connected(&self) -> CallFailure {
        CallFailure { cause: Cause::NotConnected, ..self.lost() }
    }

    /// Returns the failure of a call whose connection has ended, with the reason.
    pub(super) fn lost(&self) -> CallFailure {
        match self.down_because() {
            Some(error) => CallFailure { cause: Cause::Lost, error },
            None => CallFailure::connecting(&self.address, lock(&self.attempted_at).elapsed(), self.uses_tls),
        }
    }

    /// Records how a check failed: reports it, counts silence against the server, and makes a new connection if another
    /// server may be behind the address. Returns the failure with the most informative error.
    pub(super) fn record_failure(&self, failure: CallFailure) -> CallFailure {
        // If the script is sent again, the check has not failed yet.
        if !failure.cause.is_sent_again() {
            failure.error.report_to(&self.events);
        }
        match failure.cause {
            Cause::NoTime => {}
            // Calls that are lost with a connection are not counted against the next connection.
            Cause::Lost if !self.is_given => {}
            Cause::Lost => {
                if self.breaker.record_silence() {
                    self.report_dead(&failure.error);
                }
            }
            Cause::NotConnected => {
                // The process is still connecting to the server, so the server could not answer.
                if self.was_connected() && lock(&self.changed_at).elapsed() >= self.silence && self.breaker.open() {
                    self.report_dead(&failure.error);
                }
            }
            Cause::Silent => {
                if self.breaker.open() {
                    self.report_dead(&failure.error);
                }
                self.restart_connection(&failure.error);
            }
            Cause::Demoted => {
                self.breaker.record_answer();
                self.leave_demoted_server(&failure.error);
            }
            _ => self.breaker.record_answer(),
        }
        failure
    }

    /// Records that the server refused a script's command with these words. Returns the error.
    pub(super) fn record_refusal(&self, words: &str) -> RedisError {
        self.record_failure(error_class::answer(words, &self.address)).error
    }

    /// Records that the server answered a probe.
    pub(super) fn record_recovery(&self) {
        *lock(&self.down_because) = None;
        self.breaker.close();
    }

    /// Returns the instant at which something was last heard from the server.
    pub(super) fn heard_at(&self) -> Instant {
        self.began + Duration::from_micros(self.heard_us.load(Ordering::Relaxed))
    }

    pub(super) fn record_hearing(&self) {
        self.heard_us.store(micros(self.began.elapsed()), Ordering::Relaxed);
    }

    /// Reports the server as dead: to observers, and to the tasks that look for this server and for others.
    fn report_dead(&self, error: &RedisError) {
        lock(&self.down_because).get_or_insert_with(|| error.clone());
        // A server that is no longer watched is not reported as down. Calls that were under way still fail, but nothing
        // would report that the server is back.
        if !self.is_retired.load(Ordering::SeqCst) && !self.is_reported_down.swap(true, Ordering::SeqCst) {
            self.events.report_down(&self.address, error);
            if self.is_retired.load(Ordering::SeqCst) {
                self.events.report_left(&self.address); // it has left since the check above
            }
        }
        self.breaker_opened.notify_one();
        self.changed.notify_waiters();
        self.refresh_cluster();
    }

    /// Reports a new reason why the server is down, if the server was reported as down.
    fn report_still_down(&self, error: &RedisError) {
        if self.is_reported_down.load(Ordering::SeqCst) && !self.is_retired.load(Ordering::SeqCst) {
            self.events.report_down(&self.address, error);
            if !self.is_reported_down.load(Ordering::SeqCst) {
                self.events.report_up(&self.address); // it has answered or left since the check above
            }
        }
    }

    /// Records that the server answered no probe within this time, although there is a connection to it.
    pub(super) fn record_unanswered_probe(&self, waited: Duration) {
        if !self.is_connected() {
            return;
        }
        self.record_failed_probe(failure::unanswered_probe(&self.address, waited, *lock(&self.connecting)));
    }

    /// Records that the server answered a probe with this misconfiguration.
    pub(super) fn record_refused_probe(&self, error: RedisError) {
        self.report_misconfiguration(&error);
        self.record_failed_probe(error);
    }

    fn record_failed_probe(&self, error: RedisError) {
        self.report_still_down(&error);
        *lock(&self.down_because) = Some(error);
    }

    /// Records that an attempt to connect begins.
    pub(super) fn record_attempt(&self) {
        *lock(&self.attempted_at) = Instant::now();
    }

    /// Reports that the server answers, if the server was reported as down.
    pub(super) fn report_up(&self) {
        if self.is_reported_down.swap(false, Ordering::SeqCst) {
            self.events.report_up(&self.address);
        }
    }

    /// Stops watching the server, and reports this if the server was reported as down. Closes the breaker, because
    /// late calls still have to be sent, and no probe of the server will close the breaker.
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

    /// Reports the failure of a call that belongs to no check, if the failure is a misconfiguration. Returns the reason
    /// why there is no connection, if that reason is known, and otherwise the failure's own error.
    pub(super) fn explain(&self, failure: CallFailure) -> RedisError {
        self.report_misconfiguration(&failure.error);
        self.down_because().unwrap_or(failure.error)
    }

    /// Reports why the connection did not get newer credentials. The old credentials may still work.
    pub(super) fn report_failed_renewal(&self, error: &RedisError) {
        error.report_to(&self.events);
    }

    /// Requests a fetch of the cluster's map, if the server is part of a cluster.
    fn refresh_cluster(&self) {
        if let Some(refresh) = &self.cluster {
            refresh.notify_one();
        }
    }

    /// Connects anew, now or after a pause, because another server may be behind the address: a name or a proxy can
    /// lead to the new master.
    fn leave_demoted_server(&self, because: &RedisError) {
        self.refresh_cluster();
        if lock(&self.demotions).is_due(Instant::now()) {
            self.restart(because);
        }
    }

    /// Ends the connection for this reason, so that `reconnect.rs` begins a new one.
    pub(super) fn restart_connection(&self, because: &RedisError) {
        self.restart_connection_unless_within(MIN_RESTART_GAP, because);
    }

    /// Restarts the connection, because a reply was not understood: the next replies may be the answers to
    /// other calls.
    pub(super) fn restart_garbled_connection(&self, because: &RedisError) {
        self.restart_connection_unless_within(MIN_GARBLED_RESTART_GAP, because);
    }

    fn restart_connection_unless_within(&self, gap: Duration, because: &RedisError) {
        let mut restarted = lock(&self.restarted);
        let now = Instant::now();
        if restarted.is_some_and(|last| now.duration_since(last) < gap) {
            return;
        }
        *restarted = Some(now);
        drop(restarted);
        self.restart(because);
    }

    /// Begins a new connection, unless the connection is the application's.
    fn restart(&self, because: &RedisError) {
        if !self.is_given {
            if let Some(number) = self.connection_number() {
                *lock(&self.ended_here) = Some((number, because.after_restart()));
            }
            self.restart.notify_waiters();
        }
    }

    /// Returns the failure of a call over the connection with this number, if the limiter has ended that connection by
    /// itself. The client library only knows that the connection has ended, but not why.
    pub(super) fn ended_here(&self, number: u64) -> Option<CallFailure> {
        let ended = lock(&self.ended_here).clone();
        ended.filter(|(ended, _)| *ended == number).map(|(_, error)| CallFailure { cause: Cause::Lost, error })
    }

    /// Records that there is a connection. A server that is believed dead is then probed, because it may be
    /// unable to run scripts.
    pub(super) fn record_connection(&self, master: Option<Address>) {
        debug_assert!(!self.is_connected(), "a connection is made only after the last connection has ended");
        self.record_hearing();
        *lock(&self.connecting) = lock(&self.attempted_at).elapsed();
        *lock(&self.changed_at) = Instant::now();
        self.breaker.record_answer();
        if !self.breaker.is_open() {
            *lock(&self.down_because) = None;
        }
        self.connection.fetch_add(1, Ordering::AcqRel);
        self.events.record_connection();
        self.changed.notify_waiters();
        if self.breaker.is_open() {
            self.reconnected.notify_one();
        }
        let Some(master) = master else { return };
        let former = lock(&self.master).replace(master.clone());
        if former.is_some_and(|former| former != master) {
            self.events.report_master_changed(&self.address, &master);
        }
    }

    /// Records that an attempt to connect failed, or that the connection has ended, for this reason. The reason is
    /// `None` if the connection is made anew. Returns how long the connection lasted, if there was one.
    pub(super) fn record_end(&self, reason: Option<CallFailure>) -> Option<Duration> {
        let was_connected = self.is_connected();
        let lasted = was_connected.then(|| {
            let mut changed_at = lock(&self.changed_at);
            let lasted = changed_at.elapsed();
            *changed_at = Instant::now();
            lasted
        });
        if let Some(reason) = reason {
            self.record_reason(reason, was_connected);
        }
        if was_connected {
            self.events.record_end_of_connection();
            self.connection.fetch_add(1, Ordering::AcqRel);
            self.changed.notify_waiters();
        }
        lasted
    }

    /// Records why there is no connection. A failed attempt counts against the server.
    fn record_reason(&self, mut failure: CallFailure, had_ended: bool) {
        if failure.error.kind() == StoreErrorKind::Timeout {
            // No check waited for this connection attempt. From now on checks fail at once, with this error as the
            // reason.
            failure = CallFailure::unanswered_attempt(&self.address, self.connect_timeout, self.uses_tls);
        }
        self.report_misconfiguration(&failure.error);
        if failure.cause == Cause::Demoted {
            // When a server says that its cluster is down, a client library may drop the connection without giving
            // the caller this reason.
            self.refresh_cluster();
        }
        *lock(&self.down_because) = Some(failure.error.clone());
        if had_ended {
            return;
        }
        self.report_still_down(&failure.error);
        // Opens the breaker at once for a server that was never connected, because a check does not wait for such a
        // server.
        let is_dead = match failure.cause {
            Cause::Lost if !self.was_connected() => self.breaker.open(),
            _ => self.breaker.record_silence(),
        };
        if is_dead {
            self.report_dead(&failure.error);
        }
    }

    fn down_because(&self) -> Option<RedisError> {
        lock(&self.down_because).clone()
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
