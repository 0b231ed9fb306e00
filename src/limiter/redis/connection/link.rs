//! The calls to one server.
//!
//! The link waits for an answer even after the caller has stopped waiting. The wait ends with the answer, with
//! the connection, or when the server has been silent for so long that it is believed dead. So a slow server is
//! not mistaken for a dead one.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, OnceCell};
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::failure::{self, CallFailure, Cause};
use super::health::Health;
use super::settings::ConnectionSettings;
use super::transport::{Command, ConnectionObserver, RedisReply, SlotState, Transport};
use crate::base::sync::{Mutex, lock};
use crate::limiter::redis::credentials::RedisCredentials;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::script::{Call, Script};
use crate::limiter::remote::{Deadline, Events};

/// The time that a process gets to read answers after it did not run for a while.
const CATCH_UP: Duration = Duration::from_millis(50);

/// The longest time for which the link waits for an answer, as a multiple of the allowed silence. Answers come in the
/// order of the calls. So if the server answers later calls meanwhile, this answer is lost.
pub(in crate::limiter::redis) const LONGEST_LISTENING: u32 = 8;

/// The time that is spent on measuring long round trips, and the longest round trip that is measured.
const MEASURING: Duration = Duration::from_millis(500);
const LONGEST_ROUND_TRIP: Duration = Duration::from_secs(5);

/// The time for which a late answer shows that answers come too late.
const LATE_LASTS: Duration = Duration::from_secs(10);

/// If a server forgets scripts again within this time, the server is not reported again.
const FORGETS: Duration = Duration::from_secs(10);

/// A server's transport, and the state that calls share.
pub(super) struct Link {
    pub(super) health: Health,
    pub(super) transport: Box<dyn Transport>,
    /// The script of checks, without a request.
    probe: Call,
    /// The time that a check may take.
    deadline: Duration,
    /// The least time that must be left for a call to be sent.
    least_time: Duration,
    /// The time for which the server may be silent while calls wait.
    silence: Duration,
    /// Notified when a check learned too late that the server does not know a script, and had no time to send the
    /// text.
    lacks_script: Notify,
    /// The [bits](Script::bit) of the scripts that the server has run since it last forgot one.
    has_run: AtomicU64,
    /// The bits of the scripts that have run over the present connection.
    has_run_here: AtomicU64,
    forgot_at: Mutex<Option<Instant>>,
    /// The duration of the last call whose answer came too late, and the instant of the answer.
    late: Mutex<Option<(Duration, Instant)>>,
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
        Self {
            health: Health::new(address, &*transport, cluster, settings, Arc::clone(&events)),
            transport,
            probe: settings.probe.clone(),
            deadline: settings.deadline,
            least_time: settings.least_time(),
            silence: settings.silence(),
            lacks_script: Notify::new(),
            has_run: AtomicU64::new(0),
            has_run_here: AtomicU64::new(0),
            forgot_at: Mutex::new(None),
            late: Mutex::new(None),
            round_trip: OnceCell::new(),
            events,
        }
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
        let before = self.health.connection_number().filter(|_| has(&self.has_run_here));
        let answer = match run("EVALSHA", &script.sha).await {
            Err(CallFailure { cause: Cause::NoScript, .. }) => {
                if had_run {
                    let is_same = before.is_some() && before == self.health.connection_number();
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
            self.events.report_scripts_forgotten(&self.health.address, reconnected);
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
        if self.health.fails_at_once() {
            return Err(self.health.failure_at_once());
        }
        if !self.health.was_connected() {
            // A check does not wait for a server that was never connected.
            return Err(self.health.record_failure(self.health.not_connected()));
        }
        let mut ended = 0;
        loop {
            let number = self.health.wait_for_other_connection(ended, until).await?;
            let sent = Instant::now();
            if until.saturating_duration_since(sent) < self.least_time {
                return Err(self.health.record_failure(CallFailure::no_time(&self.health.address)));
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
                    self.health.breaker.record_answer();
                    return Ok(value);
                }
                // The connection ended before the call was sent, so the call is sent over the next connection.
                Err(CallFailure { cause: Cause::NotConnected, .. }) => ended = number,
                Err(failure) => return Err(self.health.record_failure(failure)),
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
            let silent_at = self.health.heard_at().max(sent) + self.silence;
            if Deadline::at(due).is_late() {
                due = now + CATCH_UP; // the process had no time, and answers may be there, unread
            } else if silent_at <= now {
                return Err(CallFailure::silent(&self.health.address, self.silence));
            } else if longest <= now {
                let failure = CallFailure::passed_over(&self.health.address);
                self.health.restart_garbled_connection(&failure.error);
                return Err(failure);
            } else {
                due = silent_at.min(longest);
            }
        }
    }

    /// Reports a call whose caller stops waiting now, unless this process had no time to read an answer.
    fn report_lateness(&self, until: Instant) {
        if Deadline::at(until).is_late() {
            return;
        }
        let (address, deadline) = (&self.health.address, self.deadline);
        let error = match lock(&self.late).filter(|(_, at)| at.elapsed() < LATE_LASTS) {
            Some((took, _)) => failure::late_answers(address, took, deadline),
            None => failure::no_answer(address, deadline, self.health.heard_at().elapsed()),
        };
        error.report_to(&self.events);
    }

    /// Sends a command over the connection with this number, and waits for its answer until the connection
    /// ends.
    async fn exchange(&self, command: Command<'_>, slot: SlotState, number: u64) -> Result<RedisReply, CallFailure> {
        let answer = tokio::select! {
            biased;
            answer = self.transport.send(command, slot) => answer,
            () = self.health.until_ended(number) => Err(self.health.lost()),
        };
        let answer = match answer {
            Err(failure) if failure.cause == Cause::Lost => Err(self.health.ended_here(number).unwrap_or(failure)),
            answer => answer,
        };
        if answer.as_ref().err().is_none_or(|failure| !failure.cause.is_unanswered()) {
            self.health.record_hearing();
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
        if left < self.least_time {
            return Err(CallFailure::no_time(&self.health.address));
        }
        let Some(number) = self.health.connection_number() else { return Err(self.health.not_connected()) };
        match timeout_at(until, self.exchange(command, SlotState::Owned, number)).await {
            Ok(answer) => answer,
            Err(_) if Deadline::at(until).is_late() => Err(CallFailure::unread(&self.health.address)),
            Err(_) => Err(CallFailure::silent_or_slow(&self.health.address, left)),
        }
    }

    /// Gives the connection newer credentials. The result is not recorded.
    pub(super) async fn log_in(&self, credentials: &RedisCredentials, until: Instant) -> Result<(), CallFailure> {
        self.send(Command::login(credentials), until).await.map(drop)
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
            self.events.report_far(&self.health.address, shortest, self.deadline);
        }
        Ok(shortest)
    }

    /// Finds out whether the server runs scripts, and reports a misconfiguration. A server of a cluster also gets the
    /// command `ASKING`, because otherwise the missing right to send `ASKING` would show only when a slot moves.
    pub(super) async fn verify(&self, until: Instant) -> Result<(), RedisError> {
        let mut answer = self.probe(until).await;
        if answer.is_ok() && self.health.is_of_cluster() {
            answer = self.send_keyless("ASKING", &[], until).await.map(drop);
        }
        answer.map_err(|failure| self.health.explain(failure))
    }
}

impl ConnectionObserver for Link {
    fn record_connection(&self, master: Option<Address>) {
        self.has_run_here.store(0, Ordering::Relaxed);
        self.health.record_connection(master);
    }
}
