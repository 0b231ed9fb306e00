//! The accounts of a simulation: what the server decided, what each process was told, and whether both are lawful.
//!
//! The server's decisions are compared with the oracle, one by one. A process keeps for its callers, or
//! refunds, all that it got from the server, to the unit.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;

use crate::algorithm::TakeMode;
use crate::algorithm::oracle::{Oracle, Own};
use crate::algorithm::properties::key::Planned;
use crate::base::wait::Wait;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::event::StoreErrorKind;
use crate::limiter::Effect;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::wire::{RedisAnswer, WireOperation, WireRequest, answers};
use crate::limiter::remote::LONGEST;
use crate::quota::{Algorithm, Quota};

thread_local! {
    /// The requests of the calls so far, by their numbers, while a simulation runs in this thread.
    static NOTED: RefCell<Option<BTreeMap<u64, Vec<WireRequest>>>> = const { RefCell::new(None) };
}

/// Notes the requests of a call that is sent, if it is one of a simulation.
pub(super) fn note(number: u64, requests: &[&WireRequest]) {
    NOTED.with_borrow_mut(|noted| {
        if let Some(noted) = noted {
            noted.insert(number, requests.iter().map(|request| (*request).clone()).collect());
        }
    });
}

/// Notes requests until it is dropped.
pub(super) struct Noting(());

impl Noting {
    pub(super) fn begin() -> Self {
        NOTED.set(Some(BTreeMap::new()));
        Self(())
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        NOTED.set(None);
    }
}

/// Returns the words for a call in the trace.
pub(super) fn shown(command: &str, number: u64) -> String {
    NOTED.with_borrow(|noted| {
        let requests = noted.as_ref().and_then(|noted| noted.get(&number));
        let requests = requests.into_iter().flatten().map(|request| {
            let charges: Vec<String> = request
                .charges()
                .map(|(_, policy, cost, effect)| format!("{cost} of \"{}\" {effect:?}", policy.quota()))
                .collect();
            let refund = (request.operation() == WireOperation::Refund).then(|| request.refunded());
            format!("{:?} {} {refund:?}", request.operation(), charges.join(", "))
        });
        format!("{command} {number:x}: {}", requests.collect::<Vec<_>>().join("; "))
    })
}

/// The calls of a process have numbers from this times one more than its own.
pub(super) const CALLS: u64 = 1 << 32;

fn process_of(call: u64) -> usize {
    usize::try_from(call / CALLS - 1).expect("a simulation has few processes")
}

#[derive(Default)]
pub(super) struct Ledger {
    books: BTreeMap<Bytes, Book>,
    /// The oracles at the last copy to the replica.
    copied: BTreeMap<Bytes, Book>,
    takes: Vec<Take>,
    denials: Vec<Denial>,
    /// When keys were reset or refunded, as far as the process that did so knows.
    freed: Vec<(usize, Bytes, Duration)>,
    executed: BTreeSet<u64>,
    /// The calls of which each request gets calls of its own, because the keys are on two servers.
    split: BTreeSet<u64>,
    /// The calls and the places of requests that named a calendar's window in which the server's time was not.
    outside: BTreeSet<(u64, usize)>,
    delivered: BTreeSet<u64>,
    claims: Vec<Claim>,
    /// The units that callers refunded.
    refunded: Vec<Claim>,
    holds: Vec<Hold>,
    /// Processes that were killed or closed.
    dead: BTreeSet<usize>,
    /// When the server has forgotten what was held of a key.
    emptied: BTreeMap<Bytes, Duration>,
    failed_over: Option<Duration>,
    /// When a call of a process about a concurrency limit ran last.
    renewed: BTreeMap<(usize, Bytes), Duration>,
    /// The time after which places lapse.
    pub(super) lapse: Duration,
    pub(super) processes: u64,
    /// Units of checks and refunds whose outcome is not known to their callers, by the process and the key.
    unknown: BTreeMap<(usize, Bytes), u64>,
    /// Units that callers have of the fallback of a process, which decides while the server is away.
    of_fallback: BTreeMap<(usize, Bytes), u64>,
    /// Keys whose units the server has forgotten, by a reset or a failover.
    forgotten: BTreeSet<Bytes>,
    /// The server's decisions are known here.
    pub(super) is_server_known: bool,
    /// Processes lease units, so that what callers get has other receipts than what the server gave.
    pub(super) leases: bool,
    /// The keys of leaky queues.
    queues: BTreeSet<Bytes>,
    problems: Vec<String>,
}

/// A key as its definition has it.
#[derive(Clone)]
struct Book {
    /// The state by the algorithm itself, which also knows how a quota takes over from another.
    planned: Planned,
    /// The state by the oracle, while the key has one quota.
    oracle: Option<Oracle>,
}

impl Book {
    fn new(quota: &Quota) -> Self {
        Self { planned: Planned::new(quota), oracle: Some(Oracle::new(quota.spec())) }
    }

    /// Returns the cost of a charge that is taken so, and whether it is forced. A closed block counts a strike only if
    /// it counts denied requests.
    fn plainly(&self, quota: &Quota, now: u64, cost: u64, how: TakeMode) -> (u64, bool) {
        let TakeMode::OnRefusal { refused } = how else { return (cost, how == TakeMode::Force) };
        let is_block = quota.algorithm() == Algorithm::Block;
        let is_closed = is_block && !self.planned.clone().decide(quota, now, 0, false).0.is_allowed();
        let counts = if is_closed { quota.counts_denied() } else { refused };
        (if counts { cost } else { 0 }, counts && is_block)
    }
}

/// Units of a concurrency limit that a caller holds.
struct Hold {
    number: u64,
    process: usize,
    key: Bytes,
    units: u64,
    since: Duration,
    /// A fallback gave them, and not the server.
    is_of_fallback: bool,
    /// Why the limit does not count it any more, if so: its row has lapsed, or the server has forgotten it.
    is_void: bool,
}

/// A charge that the server took.
struct Take {
    process: usize,
    call: u64,
    key: Bytes,
    at: Duration,
    units: u64,
    receipt: (u64, u64),
    own: Option<Own>,
    /// It is charged on refusal. If its set is split and refused, it stays, and nobody has its receipt.
    is_strike: bool,
}

/// A charge that the server denied.
struct Denial {
    process: usize,
    key: Bytes,
    at: Duration,
    cost: u64,
    wait: Option<Duration>,
    is_told: bool,
}

/// A charge that a caller was told to have.
pub(super) struct Claim {
    pub(super) process: usize,
    pub(super) key: Bytes,
    pub(super) units: u64,
    pub(super) receipt: (u64, u64),
}

/// A check, as its caller saw it.
pub(super) struct Seen<'a> {
    pub(super) process: usize,
    pub(super) sent: Duration,
    pub(super) ended: Duration,
    /// The stored key and the cost of each charge.
    pub(super) charges: &'a [(Bytes, u64)],
    pub(super) decision: &'a Decision,
}

impl Ledger {
    pub(super) fn problem(&mut self, words: String) {
        self.problems.push(words);
    }

    pub(super) fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Records that the server ran a call, with this reply.
    pub(super) fn record_execution(&mut self, process: usize, number: u64, at: Duration, now_us: u64, reply: &[u8]) {
        if !self.executed.insert(number) {
            self.problem(format!("call {number:x} ran twice"));
            return;
        }
        let requests = NOTED.with_borrow(|noted| noted.as_ref().and_then(|noted| noted.get(&number).cloned()));
        let Some(requests) = requests else {
            self.problem(format!("call {number:x} was not noted"));
            return;
        };
        let refused = |words: &str| RedisError::new(StoreErrorKind::Unavailable, words);
        let borrowed: Vec<&WireRequest> = requests.iter().collect();
        let Ok(answers) = answers(&borrowed, number, reply, &refused) else {
            self.problem(format!("call {number:x} has a reply that is not understood"));
            return;
        };
        let now = f64::from_le_bytes(reply[8..16].try_into().expect("a reply has a time")) as u64;
        if now != now_us {
            self.problem(format!("call {number:x} was decided at {now}, and the server's time was {now_us}"));
        }
        for (place, (request, answer)) in requests.iter().zip(answers).enumerate() {
            match answer {
                Ok(RedisAnswer::Outside(_)) => {
                    self.outside.insert((number, place));
                }
                Ok(RedisAnswer::Decided(decision)) => self.record_decision(process, number, at, now, request, decision),
                Ok(RedisAnswer::Done | RedisAnswer::Behind | RedisAnswer::Missing) => {
                    self.record_correction(request, process, at, now)
                }
                Ok(_) => {}
                Err(error) => self.problem(format!("call {number:x}: {error}")),
            }
        }
    }

    fn record_decision(
        &mut self,
        process: usize,
        call: u64,
        at: Duration,
        now: u64,
        request: &WireRequest,
        mut decision: Decision,
    ) {
        let (is_allowed, is_peek) = (decision.is_allowed(), request.operation() == WireOperation::Peek);
        let mut met = Vec::new();
        for (place, ((key, policy, cost, _), told)) in request.charges().zip(decision.charges()).enumerate() {
            if policy.limits_in_flight() {
                if !is_peek {
                    self.record_renewal(process, key, at);
                }
                met.push(None);
                continue;
            }
            let quota = policy.quota();
            if quota.algorithm() == Algorithm::LeakyQueue {
                self.queues.insert(key.clone());
            }
            let mut book = self.books.entry(key.clone()).or_insert_with(|| Book::new(quota)).clone();
            if book.planned.written != *quota {
                book.oracle = None;
            }
            let how = request.how(place, |before| !decision.charges()[before].is_allowed());
            let (counted, force) = book.plainly(quota, now, cost, how);
            let expected = book.planned.decide_how(quota, now, cost, how).0;
            let by_oracle = book.oracle.as_mut().map(|oracle| oracle.decide(now, counted, force));
            // It is reported with nothing taken.
            let stands = told.is_allowed() && !is_allowed && !request.outlives_refusal(place, false);
            let is_same = |allowed: bool, remaining: u64, wait: Option<u64>| {
                let is_told = told.is_allowed() == allowed && (stands || told.remaining() == remaining);
                is_told && (allowed || told.known_wait_us() == wait)
            };
            let is_lawful = by_oracle.as_ref().is_none_or(|(one, _)| is_same(one.allowed, one.remaining, one.retry_us));
            if !is_lawful || !is_same(expected.is_allowed(), expected.remaining(), expected.known_wait_us()) {
                self.problems.push(format!(
                    "call {call:x} about {cost} units of \"{quota}\" at {now} got {told:?}, and not {expected:?}; {:?}",
                    by_oracle.as_ref().map(|(one, _)| one)
                ));
            }
            let is_written =
                counted > 0 && !is_peek && (is_allowed || request.outlives_refusal(place, !told.is_allowed()));
            met.push(Some((is_written.then_some(book), by_oracle.map(|(_, own)| own))));
        }
        let denies = |(place, told): (usize, &ChargeDecision)| request.binds(place) && !told.is_allowed();
        if decision.charges().iter().enumerate().any(denies) == is_allowed {
            self.problem(format!("call {call:x}: the set is not decided as its charges are"));
        }
        for (place, met) in met.into_iter().enumerate() {
            let Some((book, own)) = met else { continue };
            let Some((key, _, cost, effect)) = request.charges().nth(place) else { continue };
            let is_strike = matches!(effect, Effect::OnRefusal { .. });
            let Some(told) = decision.charge_mut(place) else { continue };
            let (was_allowed, wait) = (told.is_allowed(), told.wait());
            let receipt = told.take_receipt();
            if is_peek || cost == 0 {
                continue;
            }
            if let Some(book) = book {
                self.books.insert(key.clone(), book);
            }
            if let Some(receipt) = receipt {
                let (units, receipt) = (receipt.units(), (receipt.at_us(), receipt.part()));
                self.takes.push(Take { process, call, key: key.clone(), at, units, receipt, own, is_strike });
            }
            if !was_allowed {
                let wait = if let Wait::After(wait) = wait { Some(wait) } else { None };
                self.denials.push(Denial { process, key: key.clone(), at, cost, wait, is_told: false });
            }
        }
    }

    /// Records that the server has forgotten a key whose time to live is over. Its state must not count any more.
    pub(super) fn record_expiry(&mut self, key: &Bytes, now: u64) {
        let Some(book) = self.books.remove(key) else { return };
        let used = book.planned.state.used(now);
        if used.parts > 0 {
            self.problem(format!("key {} has expired, and {used:?} is in use", key.escape_ascii()));
        }
    }

    /// Records that the server made a refund or a reset.
    fn record_correction(&mut self, request: &WireRequest, process: usize, at: Duration, now: u64) {
        let Some((key, policy, ..)) = request.charges().next() else { return };
        match request.operation() {
            WireOperation::Reset => {
                self.books.remove(key);
                return;
            }
            WireOperation::ResetPlaces => {
                self.empty(key.clone(), at);
                return;
            }
            _ if policy.limits_in_flight() => return self.record_renewal(process, key, at),
            _ => {}
        }
        let (Some(receipt), quota) = (request.refunded(), policy.quota()) else { return };
        let units = request.refunded_units(quota);
        let is_own = |take: &&Take| take.process == process && take.key == *key && take.receipt == receipt;
        let Some(take) = self.takes.iter().find(is_own) else {
            return self.problem(format!("process {process} refunds what it never took: {receipt:?}"));
        };
        // A key without a state stays without one.
        let Some(book) = self.books.get_mut(key) else { return };
        if book.planned.written != *quota {
            book.oracle = None;
        }
        book.planned.refund(quota, now, &Receipt::new(units, receipt.0, receipt.1), units);
        match (&mut book.oracle, &take.own) {
            (Some(oracle), Some(own)) => oracle.refund(now, units, own, receipt.0),
            (oracle, _) => *oracle = None,
        }
    }

    // Places ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Records that the server has forgotten what is held of a key.
    fn empty(&mut self, key: Bytes, at: Duration) {
        self.holds_of_server().filter(|hold| hold.key == key).for_each(|hold| hold.is_void = true);
        self.emptied.insert(key, at);
    }

    fn record_renewal(&mut self, process: usize, key: &Bytes, at: Duration) {
        self.void_lapsed(at);
        self.renewed.insert((process, key.clone()), at);
    }

    /// Finds the units whose rows have lapsed by now.
    fn void_lapsed(&mut self, now: Duration) {
        let (lapse, renewed) = (self.lapse, &self.renewed);
        for hold in self.holds.iter_mut().filter(|hold| !hold.is_of_fallback) {
            let last = renewed.get(&(hold.process, hold.key.clone())).copied().unwrap_or(hold.since);
            hold.is_void |= now >= last + lapse;
        }
    }

    fn holds_of_server(&mut self) -> impl Iterator<Item = &mut Hold> {
        self.holds.iter_mut().filter(|hold| !hold.is_of_fallback)
    }

    /// Records that a caller holds units from now on, until they are released by this number.
    /// The number comes with the process and the units. The units were asked for in this time.
    ///
    /// While the server is away, more than the limit may be held: each fallback gives its share of the limit, on top of
    /// what the server gave before.
    pub(super) fn record_hold(
        &mut self,
        (number, process, units): (u64, usize, u64),
        key: &Bytes,
        limit: u64,
        asked: RangeInclusive<Duration>,
        is_of_fallback: bool,
    ) {
        let now = *asked.end();
        self.void_lapsed(now);
        let is_emptied = |at: &Duration| !is_of_fallback && asked.contains(at);
        let is_void = self.emptied.get(key).is_some_and(is_emptied)
            || self.failed_over.is_some_and(|at| is_emptied(&at))
            || !is_of_fallback && self.dead.contains(&process); // a check that was under way when it returned everything
        self.holds.push(Hold {
            number,
            process,
            key: key.clone(),
            units,
            since: *asked.start(),
            is_of_fallback,
            is_void,
        });
        let (held, most) = match is_of_fallback {
            true => (self.held_of_fallback(process, key), self.share(limit)),
            false => (self.held(key, |hold| !hold.is_of_fallback), limit),
        };
        // When exactly another store forgot a key that was reset is not known here.
        let is_known = self.is_server_known || !self.forgotten.contains(key);
        if held > most && is_known {
            self.problem(format!("process {process}: {held} places are taken of {most}"));
        }
    }

    /// Checks that the fallback of a process had to deny these units.
    pub(super) fn check_fallback_denial(
        &mut self,
        (number, process, units): (u64, usize, u64),
        key: &Bytes,
        limit: u64,
    ) {
        let (own, share) = (self.held_of_fallback(process, key), self.share(limit));
        if own + units <= share {
            let words = format!("caller {number} of process {process} was denied {units} places by its fallback");
            self.problem(format!("{words}, and {own} of {share} are taken"));
        }
    }

    /// Returns the share of a limit that the fallback of each process has.
    fn share(&self, limit: u64) -> u64 {
        (limit / self.processes).max(1)
    }

    fn held_of_fallback(&self, process: usize, key: &Bytes) -> u64 {
        self.held(key, |hold| hold.is_of_fallback && hold.process == process)
    }

    /// Returns the units that limits count of a key.
    fn held(&self, key: &Bytes, counts: impl Fn(&Hold) -> bool) -> u64 {
        let counted = self.holds.iter().filter(|hold| hold.key == *key && !hold.is_void && counts(hold));
        counted.map(|hold| hold.units).sum()
    }

    pub(super) fn record_release(&mut self, number: u64) {
        self.holds.retain(|hold| hold.number != number);
    }

    /// Records that a process has died, or is closed. Callers of a closed process keep what they have of its fallback.
    pub(super) fn record_death(&mut self, process: usize) {
        self.dead.insert(process);
        self.holds.retain(|hold| hold.process != process || hold.is_of_fallback);
    }

    // The rest ────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Records that the process read the answer to a call.
    pub(super) fn record_delivery(&mut self, number: u64) {
        self.delivered.insert(number);
    }

    /// Records that a call is told that its keys are on two servers.
    pub(super) fn record_split(&mut self, number: u64) {
        self.split.insert(number);
    }

    pub(super) fn replicate(&mut self) {
        self.copied = self.books.clone();
    }

    /// Forgets the writes since the last copy, as the server does.
    pub(super) fn fail_over(&mut self, now: Duration) {
        self.forgotten.extend(self.books.keys().cloned());
        self.books = self.copied.clone();
        self.holds_of_server().for_each(|hold| hold.is_void = true);
        self.failed_over = Some(now);
    }

    pub(super) fn has_failed_over(&self) -> bool {
        self.failed_over.is_some()
    }

    /// Records that units of a key may be forgotten.
    pub(super) fn record_forgotten(&mut self, key: &Bytes) {
        self.forgotten.insert(key.clone());
    }

    /// Records that a caller refunds what it has.
    pub(super) fn record_refund(&mut self, claim: Claim) {
        self.refunded.push(claim);
    }

    /// Records that a process has reset a key, or refunds units of it, so that it must forget denials.
    pub(super) fn record_freed(&mut self, process: usize, key: &Bytes, at: Duration) {
        self.freed.push((process, key.clone(), at));
    }

    /// Checks what a caller was told. Returns how many of its charges the server decided.
    pub(super) fn check(&mut self, seen: &mut Seen<'_>, receipts: &[Option<(u64, u64, u64)>]) {
        let Seen { process, sent, ended, charges, decision } = *seen;
        for (((key, cost), told), receipt) in charges.iter().zip(decision.charges()).zip(receipts) {
            if *cost == 0 {
                continue;
            }
            if let Some((units, at, part)) = *receipt {
                if units > *cost {
                    self.problem(format!("process {process} was told to have {units} units for {cost}"));
                }
                let receipt = (at, part);
                let is_it = |take: &Take| {
                    let is_own = take.process == process && take.key == *key && take.receipt == receipt;
                    is_own && take.units == units && (sent..=ended).contains(&take.at)
                };
                if self.is_server_known && !self.leases && !self.takes.iter().any(is_it) {
                    self.problem(format!(
                        "process {process} was told to have {cost} units that the server did not take"
                    ));
                }
                self.claims.push(Claim { process, key: key.clone(), units, receipt });
            } else if self.is_server_known && !told.is_allowed() && told.is_known() {
                self.check_denial(process, sent, ended, key, *cost);
            }
        }
    }

    /// Records that a caller of a process does not know what became of its units.
    pub(super) fn record_unknown(&mut self, process: usize, key: &Bytes, units: u64) {
        *self.unknown.entry((process, key.clone())).or_default() += units;
    }

    /// Records that a caller got units of the fallback of its process, which has this share of the limit. The units do
    /// not come back with time.
    pub(super) fn record_fallback(&mut self, process: usize, key: &Bytes, units: u64, (share, limit): (u64, u64)) {
        let own = self.of_fallback.entry((process, key.clone())).or_default();
        *own += units;
        let own = *own;
        let all: u64 = self.of_fallback.iter().filter(|((_, of), _)| of == key).map(|(_, units)| units).sum();
        if own > share || all > limit {
            self.problem(format!(
                "the fallbacks admitted {all} units of {limit}, that of process {process} {own} of {share}"
            ));
        }
    }

    /// Records that a caller refunds units of the fallback of its process. Without a number the key is reset.
    pub(super) fn record_fallback_refund(&mut self, process: usize, key: &Bytes, units: Option<u64>) {
        if let Some(own) = self.of_fallback.get_mut(&(process, key.clone())) {
            *own = units.map_or(0, |units| own.saturating_sub(units)); // a receipt may be older than a reset
        }
        if units.is_none() {
            let own = |hold: &&mut Hold| hold.is_of_fallback && hold.process == process && hold.key == *key;
            self.holds.iter_mut().filter(own).for_each(|hold| hold.is_void = true);
        }
    }

    /// Checks what the server says is in use of a key of which nothing has come back with time.
    pub(super) fn check_in_use(&mut self, key: &Bytes, in_use: u64) {
        let sum = |claims: &[Claim]| -> u64 {
            claims.iter().filter(|claim| claim.key == *key).map(|claim| claim.units).sum()
        };
        let unknown = self.unknown.iter().filter(|((_, of), _)| of == key).map(|(_, units)| units).sum::<u64>();
        let refunded = sum(&self.refunded);
        let kept = sum(&self.claims) - refunded;
        if in_use < kept && !self.forgotten.contains(key) {
            self.problem(format!("{in_use} units are in use, and callers have {kept}"));
        }
        // A failover may forget refunds.
        let brought_back = if self.has_failed_over() { refunded } else { 0 };
        if in_use > kept + unknown + brought_back {
            self.problem(format!("{in_use} units are in use, callers have {kept}, and may have {unknown} more"));
        }
    }

    /// Checks that a denial is the server's, or a repetition while it holds.
    fn check_denial(&mut self, process: usize, sent: Duration, ended: Duration, key: &Bytes, cost: u64) {
        let is_own = |denial: &Denial| denial.process == process && denial.key == *key;
        let mut own = self.denials.iter_mut().filter(|denial| is_own(denial));
        if let Some(denial) =
            own.find(|denial| !denial.is_told && denial.cost == cost && (sent..=ended).contains(&denial.at))
        {
            denial.is_told = true;
            return;
        }
        let forgotten = |at: Duration| {
            self.freed.iter().any(|(by, freed, when)| *by == process && freed == key && *when > at && *when < sent)
        };
        let holds = |denial: &Denial| {
            let until = denial.at + denial.wait.map_or(LONGEST, |wait| wait.min(LONGEST));
            is_own(denial) && denial.cost <= cost && sent < until && denial.at <= ended && !forgotten(denial.at)
        };
        if !self.denials.iter().any(holds) {
            self.problem(format!("process {process} denied {cost} units by itself, and no denial of the server holds"));
        }
    }

    /// Checks that the server took nothing twice: what it took by calls whose answer no process read was asked for by
    /// callers that had no answer. Units of leases were asked for by no caller.
    fn check_unread(&mut self, is_whole: impl Fn(usize) -> bool) {
        let mut unread: BTreeMap<(usize, Bytes), u64> = BTreeMap::new();
        let takes = self.takes.iter().filter(|take| !self.leases && !self.delivered.contains(&take.call));
        for take in takes.filter(|take| is_whole(take.process)) {
            *unread.entry((take.process, take.key.clone())).or_default() += take.units;
        }
        for (account, units) in unread {
            let unknown = self.unknown.get(&account).copied().unwrap_or(0);
            if units > unknown {
                let (process, key) = account;
                self.problems.push(format!(
                    "process {process}: {units} units of {} were taken without an answer, and its callers lack {unknown}",
                    key.escape_ascii()
                ));
            }
        }
    }

    /// Checks that each process refunded what it got and its callers do not keep, to the unit.
    pub(super) fn settle(&mut self, is_whole: impl Fn(usize) -> bool) {
        self.check_unread(&is_whole);
        type Account = (usize, Bytes, (u64, u64));
        let leases = self.leases;
        let account = |process: usize, key: &Bytes, receipt: (u64, u64)| -> Account {
            (process, key.clone(), if leases { (0, 0) } else { receipt })
        };
        let mut balance: BTreeMap<Account, i128> = BTreeMap::new();
        let mut add = |account: Account, units: i128| *balance.entry(account).or_default() += units;
        for take in self.takes.iter().filter(|take| self.delivered.contains(&take.call)) {
            add(account(take.process, &take.key, take.receipt), take.units.into());
        }
        for claim in &self.claims {
            add(account(claim.process, &claim.key, claim.receipt), -i128::from(claim.units));
        }
        for claim in &self.refunded {
            add(account(claim.process, &claim.key, claim.receipt), claim.units.into());
        }
        NOTED.with_borrow(|noted| {
            let sent = noted.iter().flatten().filter(|(number, _)| !self.split.contains(number));
            let requests = sent.flat_map(|(number, all)| all.iter().enumerate().map(move |one| (number, one)));
            for (number, (place, request)) in requests {
                if self.outside.contains(&(*number, place)) && self.delivered.contains(number) {
                    continue; // it is sent again, with another window
                }
                let refunded = (request.operation() == WireOperation::Refund).then(|| request.refunded()).flatten();
                let (Some(receipt), Some((key, policy, ..))) = (refunded, request.charges().next()) else { continue };
                if policy.limits_in_flight() {
                    continue;
                }
                let units = request.refunded_units(policy.quota());
                add(account(process_of(*number), key, receipt), -i128::from(units));
            }
        });
        for ((process, key, receipt), units) in balance {
            // Refunds to a queue wait for those behind them, and are sent together. A reset forgets leases.
            let is_it = |take: &Take| take.process == process && take.key == key && take.receipt == receipt;
            let is_strike = || self.takes.iter().any(|take| take.is_strike && is_it(take));
            let is_excused = self.queues.contains(&key)
                || self.leases && self.forgotten.contains(&key)
                || units > 0 && !self.split.is_empty() && is_strike();
            if units != 0 && is_whole(process) && !is_excused {
                let what = if units > 0 { "lost" } else { "refunded too often" };
                self.problems.push(format!(
                    "process {process}: {} units of {} with the receipt {receipt:?} are {what}",
                    units.unsigned_abs(),
                    key.escape_ascii(),
                ));
            }
        }
    }
}
