//! The rest of each quota after any mixture of settlements, aborted requests, panics, modes, nested refunds, delays
//! and quota switches, compared with a plain account of what each request should cost.
//!
//! Requests overlap: each is begun, answered and read in steps, between which others come. The limiter's clock stands
//! still, or moves so far that everything has drained. So each quota is a number, whatever its algorithm is.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use proptest::prelude::*;
use tower::{BoxError, Layer, Service, service_fn};
use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Mode, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, Sleep, Timer},
    key,
    middleware::{ModeSwitch, OnAborted, QuotaSwitch, Usage},
};

use crate::support::{config, memory};

type Body = UnsyncBoxBody<Bytes, BoxError>;
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

/// All quotas have this period, which each capacity divides into whole microseconds: no conversion rounds.
const PERIOD: Duration = Duration::from_secs(48 * 3_600);
const CAPACITIES: [u64; 3] = [12, 24, 48];

/// More than any debt here.
const DEBT: u64 = 2_000;

/// The capacity of the quota that shows how much of another one is used, debts too.
const PROBE: u64 = 48_000;

/// A limiter in memory keeps time for 13 years.
const DRAINS_MAX: u64 = 8;

/// The queue of the delay. Its requests do nothing but wait and pass.
const QUEUE: u64 = 6;

type Constructor = fn(u64, Duration) -> Result<Quota, ConfigError>;

/// Returns the quota of a rule. Only a rule that can cost more than it charged has a debt of its own: the quota of
/// another one has room for the largest quota that it was switched to, and no more.
fn quota(terms: &Terms, capacity: u64) -> Quota {
    let made: [Constructor; 7] = [
        Quota::token_bucket,
        Quota::step_bucket,
        Quota::leaky_bucket,
        Quota::fixed_window,
        Quota::sliding_window,
        Quota::sliding_log,
        |limit, period| Quota::gcra(limit, period)?.burst(limit),
    ];
    let quota = made[terms.algorithm](capacity, PERIOD).unwrap();
    if terms.is_reserved() { quota.max_debt(DEBT).unwrap() } else { quota }
}

// The random requests and their fates.

/// How a rule settles what it charged.
#[derive(Clone, Debug)]
struct Terms {
    algorithm: usize,
    capacity: usize,
    /// Keeps the charge only of a 401, or only of what is no 500.
    keeps: Option<bool>,
    by_response: bool,
    by_usage: bool,
    by_body: bool,
    refunds_aborted: bool,
}

/// The costs of a request, and the behaviour of its service.
#[derive(Clone, Debug)]
struct Script {
    costs: [u64; 4],
    status: u16,
    /// The cost that the handler states at once, in the response's head, and between the frames of the body.
    early: Option<u64>,
    in_head: Option<u64>,
    late: Option<u64>,
    frames: [u8; 2],
    fate: Fate,
    /// Whether the timer stands still, and the client disconnects if the request has to wait.
    leaves_queue: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Answers,
    PanicsInCall,
    Panics,
    Fails,
    BodyFails,
}

#[derive(Clone, Debug)]
enum Step {
    Begin(Script),
    /// One of the open requests goes on: its service answers, or its client reads the next frame.
    Go(usize),
    /// The client of an open request disconnects.
    Leave(usize),
    Mode(usize, Mode),
    Switch(usize, usize),
    Drain,
}

fn terms() -> impl Strategy<Value = Terms> {
    (0..7_usize, 0..3_usize, proptest::option::of(any::<bool>()), any::<[bool; 4]>(), any::<bool>()).prop_map(
        |(algorithm, capacity, keeps, [by_response, by_usage, by_body, refunds_aborted], is_plain)| Terms {
            algorithm,
            capacity,
            keeps: keeps.filter(|_| !is_plain),
            by_response: by_response && !is_plain,
            by_usage: by_usage && !is_plain,
            by_body: by_body && !is_plain,
            refunds_aborted: refunds_aborted && !is_plain,
        },
    )
}

fn script() -> impl Strategy<Value = Script> {
    let units = || proptest::option::of(0..14_u64);
    let fate = prop_oneof![
        6 => Just(Fate::Answers),
        1 => Just(Fate::PanicsInCall),
        1 => Just(Fate::Panics),
        1 => Just(Fate::Fails),
        1 => Just(Fate::BodyFails),
    ];
    let status = prop_oneof![Just(200_u16), Just(401), Just(500)];
    let costs = proptest::array::uniform4(0..12_u64);
    (costs, status, (units(), units(), units()), any::<[bool; 2]>(), 0..8_u8, 0..8_u8, fate).prop_map(
        |(costs, status, (early, in_head, late), [leaves, also], first, second, fate)| Script {
            costs,
            status,
            early,
            in_head,
            late,
            frames: [first, second],
            fate,
            leaves_queue: leaves && also,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let mode = prop_oneof![Just(Mode::Enforce), Just(Mode::Degrade), Just(Mode::Shadow)];
    prop_oneof![
        16 => script().prop_map(Step::Begin),
        20 => (0..9_usize).prop_map(Step::Go),
        4 => (0..9_usize).prop_map(Step::Leave),
        3 => (0..4_usize, mode).prop_map(|(rule, mode)| Step::Mode(rule, mode)),
        6 => (0..4_usize, 0..3_usize).prop_map(|(rule, capacity)| Step::Switch(rule, capacity)),
        1 => Just(Step::Drain),
    ]
}

// The account: what each request should cost.

/// The charge of one rule to a request. Indexes: rules 0 and 1 are the outer layer's, 2 and 3 the inner one's.
#[derive(Clone, Debug)]
struct Charge {
    rule: usize,
    /// The charge's units, and the number of drains before it.
    reserved: u64,
    drains: u64,
    /// The units taken, or `None` if nothing was taken.
    taken: Option<u64>,
    /// The cost that the handler or the bytes have stated.
    stated: Option<u64>,
    is_open: bool,
}

struct Account {
    terms: Vec<Terms>,
    capacities: Vec<u64>,
    modes: Vec<Mode>,
    refunds_nested: bool,
    has_queue: bool,
    used: [u64; 4],
    queued: u64,
    drains: u64,
}

impl Account {
    /// Charges a request to the rules of a layer. Returns `None` if one refuses it.
    fn charge(&mut self, layer: usize, costs: [u64; 4]) -> Option<Vec<Charge>> {
        let rules = [2 * layer, 2 * layer + 1];
        let cost = |rule: usize| costs[rule].max(u64::from(self.terms[rule].is_reserved()));
        let fits = |rule: usize| cost(rule) == 0 || self.used[rule] + cost(rule) <= self.capacities[rule];
        let refuses = rules.iter().any(|rule| self.modes[*rule] == Mode::Enforce && !fits(*rule));
        if refuses || layer == 1 && self.has_queue && self.queued == QUEUE {
            return None;
        }
        let charge = |rule: usize| {
            let (reserved, taken) = (cost(rule), fits(rule).then(|| cost(rule)));
            Charge { rule, reserved, drains: self.drains, taken, stated: None, is_open: self.terms[rule].settles() }
        };
        let charges: Vec<Charge> = rules.into_iter().map(charge).collect();
        for charge in &charges {
            self.used[charge.rule] += charge.taken.unwrap_or(0);
        }
        Some(charges)
    }

    /// Corrects what a request cost.
    fn settle(&mut self, charge: &mut Charge, units: u64) {
        charge.is_open = false;
        let Some(taken) = charge.taken.take() else { return };
        if units > taken {
            self.used[charge.rule] += units - taken;
        } else if charge.drains == self.drains {
            self.used[charge.rule] -= taken - units;
        }
    }

    fn refund(&mut self, charges: &mut [Charge]) {
        charges.iter_mut().for_each(|charge| self.settle(charge, 0));
    }

    /// The head of a response has come.
    fn head(&mut self, charges: &mut [Charge], status: u16, in_head: Option<u64>) {
        for charge in charges.iter_mut().filter(|charge| charge.is_open) {
            let terms = self.terms[charge.rule].clone();
            let in_head = in_head.filter(|_| terms.by_response);
            if terms.keeps.is_some_and(|only_401| if only_401 { status != 401 } else { status == 500 }) {
                self.settle(charge, 0);
            } else if !terms.by_usage && !terms.by_body {
                charge.is_open = false;
                in_head.into_iter().for_each(|units| self.settle(charge, units));
            } else {
                charge.stated = in_head.or(charge.stated);
                if terms.by_body {
                    charge.stated = Some(charge.stated.unwrap_or(0));
                }
            }
        }
    }

    /// The response has ended.
    fn end(&mut self, charges: &mut [Charge], is_whole: bool) {
        for charge in charges.iter_mut().filter(|charge| charge.is_open) {
            let units = match charge.stated {
                stated if is_whole => stated,
                stated if self.terms[charge.rule].refunds_aborted => Some(stated.unwrap_or(0)),
                stated => stated.filter(|stated| *stated > charge.reserved),
            };
            charge.is_open = false;
            units.into_iter().for_each(|units| self.settle(charge, units));
        }
    }

    fn state(&self, charges: &mut [Charge], units: u64) {
        for charge in charges.iter_mut().filter(|charge| charge.is_open && self.terms[charge.rule].by_usage) {
            charge.stated = Some(units);
        }
    }

    fn count(&self, charges: &mut [Charge], bytes: u64) {
        for charge in charges.iter_mut().filter(|charge| charge.is_open && self.terms[charge.rule].by_body) {
            charge.stated = Some(charge.stated.unwrap_or(0) + bytes);
        }
    }
}

impl Terms {
    fn is_reserved(&self) -> bool {
        self.by_response || self.by_usage || self.by_body
    }

    fn settles(&self) -> bool {
        self.is_reserved() || self.keeps.is_some() || self.refunds_aborted
    }

    fn rule(&self, name: &str, at: usize, quota: &QuotaSwitch, mode: &ModeSwitch) -> Rule {
        let cost = move |request: &tower_ratelimit::Head<'_>| request.extensions.get::<Script>().unwrap().costs[at];
        let mut rule = Rule::switched(name, quota).unwrap().cost(cost).mode(mode.clone());
        if let Some(only_401) = self.keeps {
            rule = if only_401 {
                rule.charge_when(|response| response.status == 401)
            } else {
                rule.refund_when(|response| response.status == 500)
            };
        }
        if self.by_response {
            rule = rule.settle_by_response(|response| response.headers.get("x-units")?.to_str().ok()?.parse().ok());
        }
        if self.by_usage {
            rule = rule.settle_by_usage();
        }
        if self.by_body {
            rule = rule.settle_by_body();
        }
        rule.on_aborted(if self.refunds_aborted { OnAborted::Refund } else { OnAborted::Keep })
    }
}

// The world.

/// A timer that is always there already, or never.
#[derive(Clone, Debug, Default)]
struct Departures {
    now: Arc<std::sync::Mutex<Duration>>,
    stands: Arc<AtomicBool>,
}

impl Timer for Departures {
    fn now(&self) -> Duration {
        *self.now.lock().unwrap()
    }

    fn sleep_until(&self, at: Duration) -> Sleep {
        if self.stands.load(Ordering::Relaxed) {
            return Box::pin(std::future::pending());
        }
        *self.now.lock().unwrap() = at;
        Box::pin(std::future::ready(()))
    }
}

/// Lets a service answer.
#[derive(Clone, Default)]
struct Gate(Arc<AtomicBool>);

fn serve(mut request: Request<String>) -> Answer {
    let script: Script = request.extensions_mut().remove().unwrap();
    let (gate, usage): (Gate, Option<Usage>) =
        (request.extensions_mut().remove().unwrap(), request.extensions_mut().remove());
    if let (Some(usage), Some(units)) = (&usage, script.early) {
        usage.set(units);
    }
    if script.fate == Fate::PanicsInCall {
        resume_unwind(Box::new("the service panics"));
    }
    Box::pin(async move {
        poll_fn(|_| if gate.0.load(Ordering::Relaxed) { Poll::Ready(()) } else { Poll::Pending }).await;
        match script.fate {
            Fate::Panics => resume_unwind(Box::new("the service panics")),
            Fate::Fails => return Err("the service fails".into()),
            _ => {}
        }
        let frames = script.frames.into_iter().enumerate().map(move |(at, length)| {
            if let (1, Some(usage), Some(units)) = (at, &usage, script.late) {
                usage.set(units);
            }
            if at == 1 && script.fate == Fate::BodyFails {
                return Err("the body fails".into());
            }
            Ok::<_, BoxError>(Frame::data(Bytes::from(vec![b'x'; usize::from(length)])))
        });
        let mut response = Response::new(StreamBody::new(tokio_stream::iter(frames)).boxed_unsync());
        *response.status_mut() = StatusCode::from_u16(script.status).unwrap();
        if let Some(units) = script.in_head {
            response.headers_mut().insert("x-units", units.into());
        }
        Ok(response)
    })
}

/// A request that has begun and not ended.
struct Open {
    stage: Stage,
    gate: Gate,
    script: Script,
    /// The charges of each layer. The inner layer charges nothing if it refuses the request.
    charges: [Vec<Charge>; 2],
    /// The frames that were read.
    read: usize,
}

enum Stage {
    Called(Answer),
    Body(Body),
}

struct World {
    clock: ManualClock,
    limiter: MemoryLimiter,
    timer: Departures,
    quotas: Vec<QuotaSwitch>,
    modes: Vec<ModeSwitch>,
    service: RefCell<Box<dyn FnMut(Request<String>) -> Answer>>,
    account: Account,
    open: Vec<Open>,
}

const NAMES: [&str; 4] = ["outer-a", "outer-b", "inner-a", "inner-b"];

impl World {
    fn new(terms: Vec<Terms>, refunds_nested: bool, has_queue: bool) -> Self {
        let (clock, timer) = (ManualClock::new(), Departures::default());
        let limiter = memory(&clock);
        let capacities: Vec<u64> = terms.iter().map(|terms| CAPACITIES[terms.capacity]).collect();
        let quotas = terms.iter().zip(&capacities).map(|(terms, capacity)| quota(terms, *capacity));
        let quotas: Vec<QuotaSwitch> = quotas.map(QuotaSwitch::new).collect();
        let modes: Vec<ModeSwitch> = terms.iter().map(|_| ModeSwitch::new(Mode::Enforce)).collect();
        let rule = |at: usize| terms[at].rule(NAMES[at], at, &quotas[at], &modes[at]);
        let layer = |at| RateLimitLayer::new(limiter.clone(), rule(at), key::global()).and(rule(at + 1), key::global());
        let mut inner = layer(2);
        if has_queue {
            let queue = Quota::leaky_queue(QUEUE, PERIOD).unwrap().queue(QUEUE - 1).unwrap();
            inner = inner.and(Rule::new("queue", queue).unwrap(), key::global()).timer(timer.clone());
        }
        let mut service = layer(0).refund_nested(refunds_nested).layer(inner.layer(service_fn(serve)));
        let service = RefCell::new(Box::new(move |request| -> Answer { Box::pin(service.call(request)) })
            as Box<dyn FnMut(Request<String>) -> Answer>);
        let account = Account {
            capacities,
            modes: vec![Mode::Enforce; terms.len()],
            terms,
            refunds_nested,
            has_queue,
            used: [0; 4],
            queued: 0,
            drains: 0,
        };
        Self { clock, limiter, timer, quotas, modes, service, account, open: Vec::new() }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Begin(script) => self.begin(script),
            Step::Go(at) => {
                if !self.open.is_empty() {
                    let open = self.open.remove(at % self.open.len());
                    self.go(open);
                }
            }
            Step::Leave(at) => {
                if !self.open.is_empty() {
                    let open = self.open.remove(at % self.open.len());
                    self.leave(open);
                }
            }
            Step::Mode(rule, mode) => {
                self.modes[rule].set(mode);
                self.account.modes[rule] = mode;
            }
            Step::Switch(rule, capacity) => {
                let capacity = CAPACITIES[capacity];
                self.quotas[rule].set(quota(&self.account.terms[rule], capacity)).unwrap();
                self.account.capacities[rule] = capacity;
            }
            Step::Drain if self.account.drains == DRAINS_MAX => {}
            Step::Drain => {
                self.clock.advance(PERIOD * 200);
                (self.account.used, self.account.queued) = ([0; 4], 0);
                self.account.drains += 1;
            }
        }
    }

    fn begin(&mut self, script: Script) {
        let gate = Gate::default();
        let mut request = Request::new(String::new());
        request.extensions_mut().insert(script.clone());
        request.extensions_mut().insert(gate.clone());
        self.timer.stands.store(script.leaves_queue, Ordering::Relaxed);
        let called = catch_unwind(AssertUnwindSafe(|| {
            let mut answer = (self.service.borrow_mut())(request);
            let polled = answer.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            (answer, polled)
        }));

        let account = &mut self.account;
        let Some(mut outer) = account.charge(0, script.costs) else {
            let (_, polled) = called.expect("the service is not called");
            assert!(
                matches!(polled, Poll::Ready(Ok(response)) if response.status() == 429),
                "refused by the outer layer"
            );
            return;
        };
        let Some(mut inner) = account.charge(1, script.costs) else {
            if account.refunds_nested {
                account.refund(&mut outer);
            } else {
                account.head(&mut outer, 429, None);
            }
            let (_, polled) = called.expect("the service is not called");
            let Poll::Ready(Ok(response)) = polled else { panic!("refused by the inner layer") };
            assert_eq!(response.status(), 429, "refused by the inner layer");
            let stage = Stage::Body(response.into_body());
            self.open.push(Open { stage, gate, script, charges: [outer, Vec::new()], read: 0 });
            return;
        };
        if account.has_queue {
            account.queued += 1;
            if script.leaves_queue && account.queued > 1 {
                let (answer, polled) = called.expect("the service is not called");
                assert!(polled.is_pending(), "it waits");
                drop(answer);
                account.queued -= 1;
                account.refund(&mut inner);
                account.end(&mut outer, false);
                return;
            }
        }
        if let Some(units) = script.early {
            account.state(&mut outer, units);
            account.state(&mut inner, units);
        }
        let charges = [outer, inner];
        match called {
            Ok((answer, polled)) => {
                assert!(polled.is_pending(), "the service waits for the gate");
                self.open.push(Open { stage: Stage::Called(answer), gate, script, charges, read: 0 });
            }
            Err(_) => {
                assert_eq!(script.fate, Fate::PanicsInCall);
                charges.into_iter().for_each(|mut charges| account.end(&mut charges, false));
            }
        }
    }

    /// Polls what a client waits for.
    fn go(&mut self, open: Open) {
        let Open { stage, gate, script, mut charges, mut read } = open;
        let mut context = Context::from_waker(Waker::noop());
        let account = &mut self.account;
        match stage {
            Stage::Called(mut answer) => {
                gate.0.store(true, Ordering::Relaxed);
                let polled = catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(&mut context)));
                drop(answer);
                match polled {
                    Ok(Poll::Ready(Ok(response))) => {
                        charges.iter_mut().for_each(|charges| account.head(charges, script.status, script.in_head));
                        let stage = Stage::Body(response.into_body());
                        self.open.push(Open { stage, gate, script, charges, read });
                    }
                    failed => {
                        assert!(!matches!(failed, Ok(Poll::Pending)), "the gate is open");
                        assert!(matches!(script.fate, Fate::Panics | Fate::Fails), "{failed:?}");
                        charges.iter_mut().for_each(|charges| account.end(charges, false));
                    }
                }
            }
            Stage::Body(mut body) => {
                // The service states its late cost when the second frame is asked for.
                let is_own = !charges[1].is_empty();
                let late = script.late.filter(|_| is_own && read == 1);
                late.into_iter().for_each(|units| charges.iter_mut().for_each(|charges| account.state(charges, units)));
                let Poll::Ready(frame) = Pin::new(&mut body).poll_frame(&mut context) else { panic!("no body waits") };
                match frame {
                    Some(Ok(frame)) => {
                        let bytes = frame.into_data().unwrap().len() as u64;
                        charges.iter_mut().for_each(|charges| account.count(charges, bytes));
                        read += 1;
                        self.open.push(Open { stage: Stage::Body(body), gate, script, charges, read });
                    }
                    ended => charges.iter_mut().for_each(|charges| account.end(charges, ended.is_none())),
                }
            }
        }
    }

    /// Drops what a client waits for.
    fn leave(&mut self, mut open: Open) {
        drop(open.stage);
        // A refusal is one frame of known length, so it is whole then.
        let is_whole = open.charges[1].is_empty() && open.read == 1;
        open.charges.iter_mut().for_each(|charges| self.account.end(charges, is_whole));
    }

    /// Returns what is used of each quota, as the limiter knows it.
    fn used(&self) -> [u64; 4] {
        [0, 1, 2, 3].map(|at| {
            let probe = Rule::new(NAMES[at], quota(&self.account.terms[at], PROBE)).unwrap();
            PROBE - self.limiter.peek_one(&probe.policies()[0], &Key::global(), 0).remaining()
        })
    }
}

/// Plays the steps, and compares the limiter with the account after each.
fn play(terms: Vec<Terms>, refunds_nested: bool, has_queue: bool, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut world = World::new(terms, refunds_nested, has_queue);
    for (at, step) in steps.into_iter().enumerate() {
        world.step(step);
        prop_assert_eq!(world.used(), world.account.used, "after step {}", at);
    }
    while let Some(open) = world.open.pop() {
        world.leave(open);
        prop_assert_eq!(world.used(), world.account.used, "after the end");
    }
    Ok(())
}

/// Returns the terms of a rule that keeps some charges, under its smallest quota. It has no debt, so once a larger
/// quota is used up, the smallest one has no room for what is used.
fn smallest() -> impl Strategy<Value = Terms> {
    (terms(), any::<bool>()).prop_map(|(terms, only_401)| Terms {
        capacity: 0,
        keeps: Some(only_401),
        by_response: false,
        by_usage: false,
        by_body: false,
        ..terms
    })
}

/// Returns steps in which requests begin under the smallest quotas, others begin under the largest ones, and all of
/// them go on or leave.
fn growth() -> impl Strategy<Value = Vec<Step>> {
    let begin = || script().prop_map(Step::Begin);
    let end = prop_oneof![9 => (0..9_usize).prop_map(Step::Go), 1 => (0..9_usize).prop_map(Step::Leave)];
    let collect = proptest::collection::vec::<BoxedStrategy<Step>>;
    (collect(begin().boxed(), 3..10), collect(begin().boxed(), 10..40), collect(end.boxed(), 1..90)).prop_map(
        |(mut steps, later, ends)| {
            steps.extend((0..4).map(|rule| Step::Switch(rule, CAPACITIES.len() - 1)));
            steps.extend(later.into_iter().chain(ends));
            steps
        },
    )
}

proptest! {
    #![proptest_config(config(250))]

    #[test]
    fn every_mixture_of_requests_costs_what_its_rules_say(
        terms in proptest::collection::vec(terms(), 4),
        refunds_nested in any::<bool>(),
        has_queue in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        play(terms, refunds_nested, has_queue, steps)?;
    }

    /// Their refunds go to the quota that is in force, because the one that charged them may have no room for what was
    /// used since.
    #[test]
    fn requests_of_a_quota_that_grew_cost_what_its_rules_say(
        terms in proptest::collection::vec(smallest(), 4),
        refunds_nested in any::<bool>(),
        steps in growth(),
    ) {
        play(terms, refunds_nested, false, steps)?;
    }
}
