//! The calls to one server, and its state.
//!
//! The link waits for an answer even after the caller has stopped waiting. The wait ends with the answer, with
//! the connection, or when the server has been silent for so long that it is believed dead. So a slow server is
//! not mistaken for a dead one.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, OnceCell};
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::error_class::{self, CallFailure, Cause};
use super::pause::Restarts;
use super::settings::ConnectionSettings;
use super::transport::{Command, ConnectionObserver, RedisReply, SlotState, Transport};
use crate::base::sync::{Mutex, lock};
use crate::event::StoreErrorKind;
use crate::limiter::redis::credentials::RedisCredentials;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::script::{Call, Script};
use crate::limiter::remote::{Breaker, Deadline, Events};

/// The least time that must be left for a call to be sent.
const MIN_CALL: Duration = Duration::from_millis(1);

/// The time that a process gets to read answers after it did not run for a while.
const CATCH_UP: Duration = Duration::from_millis(50);

/// The longest time for which the link waits for an answer, as a multiple of the allowed silence. Answers come in the
/// order of the calls. So if the server answers later calls meanwhile, this answer is lost.
pub(in crate::limiter::redis) const LONGEST_LISTENING: u32 = 8;

/// The time that is spent on measuring long round trips, and the longest round trip that is measured.
const MEASURING: Duration = Duration::from_millis(500);
const LONGEST_ROUND_TRIP: Duration = Duration::from_secs(5);

/// The least time between two restarts of a connection.
const MIN_RESTART_GAP: Duration = Duration::from_secs(1);

/// The least time between two restarts if a reply was not understood.
const MIN_GARBLED_RESTART_GAP: Duration = Duration::from_millis(100);

/// The time for which a late answer shows that answers come too late.
const LATE_LASTS: Duration = Duration::from_secs(10);

/// If a server forgets scripts again within this time, the server is not reported again.
const FORGETS: Duration = Duration::from_secs(10);

/// A server's transport, and the state that calls and the reconnecting task share.
pub(super) struct Link {
    pub(super) address: Address,
    pub(super) transport: Box<dyn Transport>,
    /// Notifies the task that fetches the cluster's map, if the server is of a cluster.
    cluster: Option<Arc<Notify>>,
    /// The script of checks, without a request.
    probe: Call,
    /// The time that a check may take.
    deadline: Duration,
    /// The time for which the server may be silent while calls wait.
    silence: Duration,
    connect_timeout: Duration,
    pub(super) breaker: Breaker,
    /// Notified when the breaker opens.
    pub(super) breaker_opened: Notify,
    /// Notified when there is a new connection to a server that is believed dead.
    pub(super) reconnected: Notify,
    /// Notified when a check learned too late that the server does not know a script, and had no time to send the
    /// text.
    lacks_script: Notify,
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
    /// The duration of the last call whose answer came too late, and the instant of the answer.
    late: Mutex<Option<(Duration, Instant)>>,
    /// True if the last report about the server was that it is down.
    is_reported_down: AtomicBool,
    /// True if the server's connection is no longer watched.
    is_retired: AtomicBool,
    /// The reason why there is no connection, or why the breaker is open.
    down_because: Mutex<Option<RedisError>>,
    /// Tells the task that keeps the connection to begin a new connection.
    pub(super) restart: Notify,
    restarted: Mutex<Option<Instant>>,
    demotions: Mutex<Restarts>,
    /// The [bits](Script::bit) of the scripts that the server has run since it last forgot one.
    has_run: AtomicU64,
    /// The bits of the scripts that have run over the present connection.
    has_run_here: AtomicU64,
    /// The server of the last connection, if sentinels named it.
    master: Mutex<Option<Address>>,
    forgot_at: Mutex<Option<Instant>>,
    /// The instant at which the last attempt to connect began.
    attempted_at: Mutex<Instant>,
    /// The time that it took to make the last connection.
    connecting: Mutex<Duration>,
    is_closed: AtomicBool,
    /// The shortest of a few round trips, or empty before the round trips have been measured.
    round_trip: OnceCell<Duration>,
    events: Arc<Events>,
}

impl Link {
    /// `cluster` notifies the task that fetches the cluster's map, if the server is of a cluster.
    pub(super) fn new(
        address: Address,
        transport: Box<dyn Transport>,
        cluster: Option<Arc<Notify>>,
        settings: &ConnectionSettings,
        events: Arc<Events>,
    ) -> Self {
        let now = Instant::now();
        Self {
            address,
            transport,
            cluster,
            probe: settings.probe.clone(),
            deadline: settings.deadline,
            silence: settings.silence(),
            connect_timeout: settings.connect_timeout(),
            breaker: Breaker::new(settings.failures),
            breaker_opened: Notify::new(),
            reconnected: Notify::new(),
            lacks_script: Notify::new(),
            connection: AtomicU64::new(0),
            changed: Notify::new(),
            changed_at: Mutex::new(now),
            began: now,
            heard_us: AtomicU64::new(0),
            late: Mutex::new(None),
            is_reported_down: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
            down_because: Mutex::new(None),
            restart: Notify::new(),
            restarted: Mutex::new(None),
            demotions: Mutex::new(Restarts::new()),
            has_run: AtomicU64::new(0),
            has_run_here: AtomicU64::new(0),
            master: Mutex::new(None),
            forgot_at: Mutex::new(None),
            attempted_at: Mutex::new(now),
            connecting: Mutex::new(Duration::ZERO),
            is_closed: AtomicBool::new(false),
            round_trip: OnceCell::new(),
            events,
        }
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
            return CallFailure::unavailable("this store was closed");
        }
        match self.down_because() {
            Some(error) if error.kind() == StoreErrorKind::Misconfigured => CallFailure { cause: Cause::Answer, error },
            Some(last) => CallFailure { cause: Cause::Answer, error: last.while_down() },
            None => CallFailure::unavailable(format!("Redis at {} does not answer", self.address)),
        }
    }

    /// Returns whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.connection_number().is_some()
    }

    /// Returns the number of the connection, if there is one.
    fn connection_number(&self) -> Option<u64> {
        Some(self.connection.load(Ordering::Acquire)).filter(|number| number % 2 == 1)
    }

    /// Returns whether a connection was ever made.
    fn was_connected(&self) -> bool {
        self.connection.load(Ordering::Acquire) > 0
    }

    /// Runs a check's script by the script's name, or by its text if the server does not know the name. `until` is
    /// the instant at which the last caller stops waiting. The answer may come later.
    pub(super) async fn run_script(
        &self,
        call: &Call,
        until: Instant,
        slot: SlotState,
    ) -> Result<RedisReply, CallFailure> {
        self.by_name_or_text(call.script, |command, script| self.evaluate(command, script, call, until, slot)).await
    }

    /// Runs a script by its name, and by its text if the server does not know it.
    async fn by_name_or_text<A: Future<Output = Result<RedisReply, CallFailure>>>(
        &self,
        script: &'static Script,
        run: impl Fn(&'static str, &'static str) -> A,
    ) -> Result<RedisReply, CallFailure> {
        // Reads `has_run` before the call. While this call is under way, another of the first calls may set the
        // script's bit. If `has_run` were read afterwards, it would look as if the server had forgotten the script.
        let has = |scripts: &AtomicU64| scripts.load(Ordering::Relaxed) & script.bit != 0;
        let had_run = has(&self.has_run);
        let before = self.connection_number().filter(|_| has(&self.has_run_here));
        let answer = match run("EVALSHA", &script.sha).await {
            Err(CallFailure { cause: Cause::NoScript, .. }) => {
                if had_run {
                    let is_same = before.is_some() && before == self.connection_number();
                    self.record_forgotten(script, !is_same);
                }
                let answer = run("EVAL", script.text).await;
                if answer.as_ref().is_err_and(|failure| failure.cause == Cause::NoTime) {
                    self.lacks_script.notify_one();
                }
                answer
            }
            answer => answer,
        };
        // All calls share this cache line, so this writes only if the value changes.
        if answer.is_ok() && !(has(&self.has_run) && has(&self.has_run_here)) {
            self.has_run.fetch_or(script.bit, Ordering::Relaxed);
            self.has_run_here.fetch_or(script.bit, Ordering::Relaxed);
        }
        answer
    }

    /// Records that the server no longer knows a script. If the connection was made anew since the script ran, the
    /// server was restarted, or another server has taken its place. In both cases the server may have no data. Calls
    /// that were under way at that time get the same answer.
    fn record_forgotten(&self, script: &Script, reconnected: bool) {
        let forget = |has_run: u64| (has_run & script.bit != 0).then_some(0);
        if self.has_run.fetch_update(Ordering::Relaxed, Ordering::Relaxed, forget).is_err() {
            return;
        }
        let now = Instant::now();
        let is_known = |at: Instant| now.duration_since(at) < FORGETS;
        if lock(&self.forgot_at).replace(now).is_none_or(|at| !is_known(at)) {
            self.events.report_scripts_forgotten(&self.address, reconnected);
        }
    }

    /// Sends a check's script, and records how the call ends. If the connection has ended, waits for the next
    /// connection.
    async fn evaluate(
        &self,
        command: &'static str,
        script: &'static str,
        call: &Call,
        until: Instant,
        slot: SlotState,
    ) -> Result<RedisReply, CallFailure> {
        if self.fails_at_once() {
            return Err(self.failure_at_once());
        }
        if !self.was_connected() {
            // A check does not wait for a server that was never connected.
            return Err(self.record_failure(self.not_connected()));
        }
        let mut ended = 0;
        loop {
            let number = self.wait_for_other_connection(ended, until).await?;
            let sent = Instant::now();
            if until.saturating_duration_since(sent) < MIN_CALL {
                return Err(self.record_failure(self.no_time()));
            }
            let mut answer = pin!(self.exchange(Command::script(command, script, call), slot, number));
            let answer = match timeout_at(until, answer.as_mut()).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.report_lateness(until);
                    self.listen(answer, sent).await
                }
            };
            match answer {
                Ok(value) => {
                    self.breaker.record_answer();
                    return Ok(value);
                }
                // The connection ended before the call was sent, so the call is sent over the next connection.
                Err(CallFailure { cause: Cause::NotConnected, .. }) => ended = number,
                Err(failure) => return Err(self.record_failure(failure)),
            }
        }
    }

    /// Waits for an answer whose caller no longer waits, until the server has been silent for too long.
    async fn listen(
        &self,
        mut answer: Pin<&mut impl Future<Output = Result<RedisReply, CallFailure>>>,
        sent: Instant,
    ) -> Result<RedisReply, CallFailure> {
        let longest = sent + LONGEST_LISTENING * self.silence;
        let mut due = sent + self.silence;
        loop {
            if let Ok(answer) = timeout_at(due, answer.as_mut()).await {
                *lock(&self.late) = Some((sent.elapsed(), Instant::now()));
                return answer;
            }
            let now = Instant::now();
            let silent_at = self.heard_at().max(sent) + self.silence;
            if Deadline::at(due).is_late() {
                due = now + CATCH_UP; // the process had no time, and answers may be there, unread
            } else if silent_at <= now {
                let message =
                    format!("Redis at {} is silent: nothing has come from it for {:?}", self.address, self.silence);
                return Err(CallFailure { cause: Cause::Silent, ..CallFailure::timeout(message) });
            } else if longest <= now {
                self.restart_garbled_connection();
                let message = format!("Redis at {} answered later calls, but not this call", self.address);
                return Err(CallFailure { cause: Cause::NoTime, ..CallFailure::timeout(message) });
            } else {
                due = silent_at.min(longest);
            }
        }
    }

    /// Sends a command over the connection with this number, and waits for its answer until the connection
    /// ends.
    async fn exchange(&self, command: Command<'_>, slot: SlotState, number: u64) -> Result<RedisReply, CallFailure> {
        let ended = async {
            loop {
                let changed = self.changed.notified();
                if self.connection.load(Ordering::Acquire) != number {
                    return;
                }
                changed.await;
            }
        };
        let answer = tokio::select! {
            biased;
            answer = self.transport.send(command, slot) => answer,
            () = ended => Err(self.lost()),
        };
        if answer.as_ref().err().is_none_or(|failure| !failure.cause.is_unanswered()) {
            self.record_hearing();
        }
        answer
    }

    /// Sends a command without keys, and waits for its answer until the deadline. The result is not recorded.
    pub(super) async fn send_keyless(
        &self,
        command: &'static str,
        args: &[&'static str],
        until: Instant,
    ) -> Result<RedisReply, CallFailure> {
        self.send(Command::keyless(command, args), until).await
    }

    async fn send(&self, command: Command<'_>, until: Instant) -> Result<RedisReply, CallFailure> {
        let left = until.saturating_duration_since(Instant::now());
        if left < MIN_CALL {
            return Err(self.no_time());
        }
        let Some(number) = self.connection_number() else { return Err(self.not_connected()) };
        match timeout_at(until, self.exchange(command, SlotState::Owned, number)).await {
            Ok(answer) => answer,
            Err(_) if Deadline::at(until).is_late() => {
                let error = RedisError::too_busy(&format!("no answer from Redis at {} was read in time", self.address));
                Err(CallFailure { cause: Cause::NoTime, error })
            }
            Err(_) => {
                let (address, waited) = (&self.address, rounded(left));
                let message = format!("no answer from Redis at {address} within {waited:?}: it is silent or slow");
                Err(CallFailure::timeout(message))
            }
        }
    }

    fn no_time(&self) -> CallFailure {
        let message = format!("no time was left for a call to Redis at {}", self.address);
        CallFailure { cause: Cause::NoTime, ..CallFailure::timeout(message) }
    }

    /// Returns the failure of a call that was not sent, with the reason why there is no connection.
    fn not_connected(&self) -> CallFailure {
        CallFailure { cause: Cause::NotConnected, ..self.lost() }
    }

    /// Returns the failure of a call whose connection has ended, with the reason.
    fn lost(&self) -> CallFailure {
        let none = || {
            let (address, waited, hint) = (&self.address, rounded(lock(&self.attempted_at).elapsed()), self.tls_hint());
            let message = format!(
                "there is no connection to Redis at {address} yet: it has not answered a new one for {waited:?}{hint}"
            );
            RedisError::new(StoreErrorKind::Unavailable, message)
        };
        CallFailure { cause: Cause::Lost, error: self.down_because().unwrap_or_else(none) }
    }

    /// Returns a hint for a server that does not answer although its URL asks for TLS. A server that does not speak
    /// TLS waits for more bytes.
    fn tls_hint(&self) -> &'static str {
        if self.transport.uses_tls() {
            "; if that port does not speak TLS, use a URL that begins with redis://"
        } else {
            ""
        }
    }

    /// Gives the connection newer credentials. The result is not recorded.
    pub(super) async fn log_in(&self, credentials: &RedisCredentials, until: Instant) -> Result<(), CallFailure> {
        self.send(Command::login(credentials), until).await.map(drop)
    }

    /// Reports why the connection did not get newer credentials. The old credentials may still work.
    pub(super) fn report_failed_renewal(&self, error: &RedisError) {
        error.report_to(&self.events);
    }

    /// Runs the script of checks without a request, because a server may answer other commands but run no scripts. The
    /// server knows the script from then on, so the first check takes one round trip.
    pub(super) async fn probe(&self, until: Instant) -> Result<(), CallFailure> {
        let run = |command, script| self.send(Command::script(command, script, &self.probe), until);
        self.by_name_or_text(self.probe.script, run).await.map(drop)
    }

    /// Waits until a check had no time to send the script's text to a server that does not know the script. Then
    /// sends the text with a probe.
    pub(super) async fn teach(&self) {
        self.lacks_script.notified().await;
        drop(self.probe(Instant::now() + LONGEST_ROUND_TRIP).await);
    }

    /// Returns the shortest of some round trips to the server, or `None` if there is no connection. The round trip
    /// is measured once. If the round trip takes more than half of a check's deadline, observers get an event.
    pub(super) async fn round_trip(&self) -> Option<Duration> {
        self.round_trip.get_or_try_init(|| self.measure_round_trip()).await.ok().copied()
    }

    async fn measure_round_trip(&self) -> Result<Duration, CallFailure> {
        let began = Instant::now();
        let mut shortest = Duration::MAX;
        for probe in 1.. {
            let sent = Instant::now();
            self.probe(sent + LONGEST_ROUND_TRIP).await?;
            shortest = shortest.min(sent.elapsed());
            // A process that has just started is slow, so it gets more time.
            let is_enough = began.elapsed() >= MEASURING || (shortest < self.deadline && probe >= 5);
            if shortest <= self.deadline / 2 || (is_enough && probe >= 3) {
                break;
            }
        }
        if shortest > self.deadline / 2 {
            self.events.report_far(&self.address, shortest, self.deadline);
        }
        Ok(shortest)
    }

    /// Finds out whether the server runs scripts, and reports a misconfiguration. A server of a cluster also gets the
    /// command `ASKING`, because otherwise the missing right to send `ASKING` would show only when a slot moves.
    pub(super) async fn verify(&self, until: Instant) -> Result<(), RedisError> {
        let mut answer = self.probe(until).await;
        if answer.is_ok() && self.cluster.is_some() {
            answer = self.send_keyless("ASKING", &[], until).await.map(drop);
        }
        answer.map_err(|failure| self.explain(failure))
    }

    /// Reports the failure of a call that belongs to no check, if the failure is a misconfiguration. Returns the reason
    /// why there is no connection, if that reason is known, and otherwise the failure's own error.
    pub(super) fn explain(&self, failure: CallFailure) -> RedisError {
        self.report_misconfiguration(&failure.error);
        self.down_because().unwrap_or(failure.error)
    }

    /// Waits for a connection that is being made, unless calls fail at once. If no connection is made, the
    /// reason is recorded.
    pub(super) async fn wait_for_connection(&self, until: Instant) -> Result<(), CallFailure> {
        self.wait_for_other_connection(0, until).await.map(drop)
    }

    /// Waits for the connection that follows the ended connection with this number. Returns the number of the
    /// new connection.
    async fn wait_for_other_connection(&self, ended: u64, until: Instant) -> Result<u64, CallFailure> {
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

    /// Records how a check failed: reports it, counts silence against the server, and makes a new connection if another
    /// server may be behind the address. Returns the failure with the most informative error.
    fn record_failure(&self, failure: CallFailure) -> CallFailure {
        // If the script is sent again, the check has not failed yet.
        if !failure.cause.is_sent_again() {
            failure.error.report_to(&self.events);
        }
        match failure.cause {
            Cause::NoTime => {}
            // Calls that are lost with a connection are not counted against the next connection.
            Cause::Lost if !self.transport.is_given() => {}
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
                self.restart_connection();
            }
            Cause::Demoted => {
                self.breaker.record_answer();
                self.leave_demoted_server();
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

    /// Reports a call whose caller stops waiting now, unless this process had no time to read an answer.
    fn report_lateness(&self, until: Instant) {
        if Deadline::at(until).is_late() {
            return;
        }
        let (address, deadline) = (&self.address, self.deadline);
        let message = match lock(&self.late).filter(|(_, at)| at.elapsed() < LATE_LASTS) {
            Some((took, _)) => format!(
                "answers of Redis at {address} come too late: the last late one took {took:.0?}, and the deadline is \
                 {deadline:?}"
            ),
            None => {
                let heard = rounded(self.heard_at().elapsed());
                format!("no answer from Redis at {address} within {deadline:?}: nothing has come from it for {heard:?}")
            }
        };
        RedisError::new(StoreErrorKind::Timeout, message).report_to(&self.events);
    }

    /// Returns the instant at which something was last heard from the server.
    pub(super) fn heard_at(&self) -> Instant {
        self.began + Duration::from_micros(self.heard_us.load(Ordering::Relaxed))
    }

    fn record_hearing(&self) {
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
        let (waited, connecting) = (rounded(waited), rounded(*lock(&self.connecting)));
        let message = format!(
            "Redis at {} is silent: it answers no script within {waited:?}, over a connection that was made in \
             {connecting:?}; the server is busy or suspended, or the network is slow",
            self.address
        );
        self.record_failed_probe(RedisError::new(StoreErrorKind::Unavailable, message));
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

    /// Requests a fetch of the cluster's map, if the server is part of a cluster.
    fn refresh_cluster(&self) {
        if let Some(refresh) = &self.cluster {
            refresh.notify_one();
        }
    }

    /// Connects anew, now or after a pause, because another server may be behind the address: a name or a proxy can
    /// lead to the new master.
    fn leave_demoted_server(&self) {
        self.refresh_cluster();
        if lock(&self.demotions).is_due(Instant::now()) {
            self.restart();
        }
    }

    /// Ends the connection, so that `reconnect.rs` begins a new one.
    pub(super) fn restart_connection(&self) {
        self.restart_connection_unless_within(MIN_RESTART_GAP);
    }

    /// Restarts the connection, because a reply was not understood: the next replies may be the answers to
    /// other calls.
    pub(super) fn restart_garbled_connection(&self) {
        self.restart_connection_unless_within(MIN_GARBLED_RESTART_GAP);
    }

    fn restart_connection_unless_within(&self, gap: Duration) {
        let mut restarted = lock(&self.restarted);
        let now = Instant::now();
        if restarted.is_some_and(|last| now.duration_since(last) < gap) {
            return;
        }
        *restarted = Some(now);
        drop(restarted);
        self.restart();
    }

    /// Begins a new connection, unless the connection is the application's.
    fn restart(&self) {
        if !self.transport.is_given() {
            self.restart.notify_waiters();
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
            let hint = self.tls_hint();
            let (address, time) = (&self.address, self.connect_timeout);
            let message = format!("Redis at {address} is silent: no answer to a new connection within {time:?}{hint}");
            failure = CallFailure::lost(StoreErrorKind::Unavailable, message);
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

impl ConnectionObserver for Link {
    /// Records that there is a connection. A server that is believed dead is then probed, because it may be
    /// unable to run scripts.
    fn record_connection(&self, master: Option<Address>) {
        debug_assert!(!self.is_connected(), "a connection is made only after the last connection has ended");
        self.record_hearing();
        *lock(&self.connecting) = lock(&self.attempted_at).elapsed();
        *lock(&self.changed_at) = Instant::now();
        self.breaker.record_answer();
        if !self.breaker.is_open() {
            *lock(&self.down_because) = None;
        }
        self.has_run_here.store(0, Ordering::Relaxed);
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
}

/// Returns a time in whole milliseconds.
fn rounded(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
