//! Promises of waiting in line that hold for every limiter with lines. Each test file with such a limiter runs them by
//! the macro `promises_of_lines`.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Key, Policy, Quota, RateLimitLayer, Rule, Wait,
    clock::TokioTimer,
    key,
    limiter::{Charge, Limiter, PlaceLines},
    middleware::QuotaSwitch,
    observe::{LayerEvent, Observed, Observer, OutcomeKind},
    quota::Anchor,
};

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// The time in which something would have happened that must not: a return wakes the first of its process' line at
/// once.
const WHILE: Duration = Duration::from_millis(60);

/// The wait of requests that are to be refused after it.
const HASTY: Duration = Duration::from_millis(300);

/// Makes a test of each promise. `$limiter` is an async function that returns a limiter and what it needs as long as it
/// is asked. `$test` is the attribute of a test.
macro_rules! promises_of_lines {
    ($limiter:path, $($test:tt)*) => {
        $crate::lines::promises_of_lines!(@each $limiter, [$($test)*]
            requests_in_line_get_places_in_the_order_in_which_they_came
            request_that_has_waited_for_its_time_is_refused
            newcomer_passes_no_line
            request_that_leaves_the_line_lets_the_next_ones_pass
            no_more_requests_wait_than_the_layer_lets
            set_waits_in_the_line_that_denies_it_and_holds_nothing
            two_sets_that_block_each_others_lines_both_pass
            refusal_by_another_rule_ends_the_wait
            request_that_can_never_pass_does_not_wait
            wait_counts_no_refusal_and_a_refusal_after_it_counts_one
            quota_that_counts_denied_requests_counts_no_wait
            switch_that_raises_the_limit_wakes_the_line
            reset_wakes_the_line_and_late_releases_free_nothing
            handler_that_admits_waits_in_line_and_leaves_it
            panic_of_a_service_that_was_waited_for_returns_the_place
            own_larger_quota_takes_free_places_when_it_is_first
        );
    };
    (@each $limiter:path, $test:tt $($promise:ident)*) => {
        $($crate::lines::promises_of_lines!(@one $limiter, $test $promise);)*
    };
    (@one $limiter:path, [$($test:tt)*] $promise:ident) => {
        $($test)*
        async fn $promise() {
            let (limiter, _needed) = $limiter().await;
            $crate::lines::$promise($crate::lines::Office::new(limiter)).await;
        }
    };
}
pub(crate) use promises_of_lines;

fn quota(limit: u64) -> Quota {
    waiting_quota(limit, LONG)
}

fn waiting_quota(limit: u64, wait: Duration) -> Quota {
    Quota::concurrent(limit).max_wait(wait).unwrap()
}

fn rule(name: &str, limit: u64) -> Rule {
    Rule::new(name, quota(limit)).unwrap()
}

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).unwrap()
}

fn exports(limit: u64) -> Policy {
    policy("exports", quota(limit))
}

/// The number of a request, for its handler.
#[derive(Clone)]
pub(crate) struct Number(pub(crate) usize);

#[derive(Clone, Default)]
pub(crate) struct Log(pub(crate) Arc<Mutex<Vec<OutcomeKind>>>, pub(crate) Arc<Mutex<Vec<LayerEvent>>>);

impl Observer for Log {
    fn on_outcome(&self, observed: &Observed<'_>) {
        self.0.lock().unwrap().push(observed.outcome().kind());
    }

    fn on_layer_event(&self, event: &LayerEvent) {
        self.1.lock().unwrap().push(event.clone());
    }
}

enum Sent {
    Waits(JoinHandle<Response<Body>>),
    Runs(Response<Body>),
    Gone,
}

/// Requests that hold their places until they are finished.
pub(crate) struct Office<L: Limiter> {
    limiter: L,
    started: Arc<Mutex<Vec<usize>>>,
    sent: Vec<Sent>,
    log: Log,
}

impl<L: Limiter + Clone> Office<L> {
    pub(crate) fn new(limiter: L) -> Self {
        Self { limiter, started: Arc::default(), sent: Vec::new(), log: Log::default() }
    }

    fn layer(&self, rule: impl Into<Rule>) -> RateLimitLayer<L> {
        let layer = RateLimitLayer::new(self.limiter.clone(), rule.into(), key::global()).timer(TokioTimer::new());
        layer.observer(self.log.clone())
    }

    fn spawn(&mut self, response: impl Future<Output = Response<Body>> + Send + 'static) -> usize {
        self.sent.push(Sent::Waits(tokio::spawn(response)));
        self.sent.len() - 1
    }

    /// Sends a request, and returns its number.
    fn send(&mut self, layer: &RateLimitLayer<L>) -> usize {
        let (started, number) = (Arc::clone(&self.started), self.sent.len());
        let service = layer.clone().layer(service_fn(move |request: Request<Body>| {
            started.lock().unwrap().push(request.extensions().get::<Number>().unwrap().0);
            std::future::ready(Ok::<_, Infallible>(Response::new(Body::from("done"))))
        }));
        let request = Request::builder().extension(Number(number)).body(Body::empty()).unwrap();
        self.spawn(async move { service.oneshot(request).await.unwrap() })
    }

    /// Sends a request that gets its place.
    async fn run(&mut self, layer: &RateLimitLayer<L>) -> usize {
        let number = self.send(layer);
        assert_eq!(self.status(number).await, StatusCode::OK);
        number
    }

    /// Sends a request that is refused.
    async fn refuse(&mut self, layer: &RateLimitLayer<L>) {
        let number = self.send(layer);
        assert_eq!(self.status(number).await, StatusCode::TOO_MANY_REQUESTS);
    }

    /// Sends a request that has to wait in the line of a policy.
    async fn wait(&mut self, layer: &RateLimitLayer<L>, policy: &Policy) -> usize {
        let waiting = self.waiting(policy);
        let number = self.send(layer);
        eventually(async || self.waiting(policy) == waiting + 1).await;
        number
    }

    /// Waits for the response of a request, and returns its status.
    async fn status(&mut self, number: usize) -> StatusCode {
        if let Sent::Waits(task) = &mut self.sent[number] {
            let response = tokio::time::timeout(LONG, task).await.expect("it has a response").unwrap();
            self.sent[number] = Sent::Runs(response);
        }
        match &self.sent[number] {
            Sent::Runs(response) => response.status(),
            _ => panic!("it was finished"),
        }
    }

    async fn assert_passes(&mut self, numbers: impl IntoIterator<Item = usize>) {
        for number in numbers {
            assert_eq!(self.status(number).await, StatusCode::OK, "request {number}");
        }
    }

    /// Fails if one of these requests has its response after a while.
    async fn assert_waits(&self, numbers: impl IntoIterator<Item = usize>) {
        sleep(WHILE).await;
        for number in numbers {
            assert!(!self.has_ended(number), "request {number} waits");
        }
    }

    fn has_ended(&self, number: usize) -> bool {
        !matches!(&self.sent[number], Sent::Waits(task) if !task.is_finished())
    }

    /// Ends a request that has its response.
    fn finish(&mut self, number: usize) {
        assert!(matches!(std::mem::replace(&mut self.sent[number], Sent::Gone), Sent::Runs(_)));
    }

    /// The client of a request that waits goes away.
    async fn cancel(&mut self, number: usize) {
        let Sent::Waits(task) = std::mem::replace(&mut self.sent[number], Sent::Gone) else { panic!("it waits") };
        task.abort();
        assert!(task.await.is_err_and(|error| error.is_cancelled()));
    }

    fn started(&self) -> Vec<usize> {
        self.started.lock().unwrap().clone()
    }

    fn kinds(&self) -> Vec<OutcomeKind> {
        self.log.0.lock().unwrap().clone()
    }

    fn lines(&self) -> &PlaceLines {
        self.limiter.hooks().place_lines().unwrap()
    }

    fn waiting(&self, policy: &Policy) -> usize {
        self.lines().waiting(policy, &Key::global())
    }

    async fn left(&self, policy: &Policy) -> u64 {
        let answer = self.limiter.peek(&[Charge::new(policy, &Key::global()).cost(0)]).await;
        answer.unwrap().charges()[0].remaining()
    }

    async fn eventually_left(&self, policy: &Policy, units: u64) {
        eventually(async || self.left(policy).await == units).await;
    }
}

async fn eventually(is_so: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < LONG, "it does not happen");
        sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) async fn requests_in_line_get_places_in_the_order_in_which_they_came<L: Limiter + Clone>(
    mut office: Office<L>,
) {
    let (layer, exports) = (office.layer(exports(2)), exports(2));
    let mut running = vec![office.run(&layer).await, office.run(&layer).await];
    let mut waiting = Vec::new();
    for _ in 0..6 {
        waiting.push(office.wait(&layer, &exports).await);
    }
    assert_eq!(layer.waiting(), 6);
    for number in waiting {
        office.finish(running.remove(0));
        office.assert_passes([number]).await;
        running.push(number);
    }
    assert_eq!(office.started(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((office.waiting(&exports), layer.waiting(), office.left(&exports).await), (0, 0, 0));
    assert_eq!(office.kinds()[1..], [[OutcomeKind::Allowed; 1].as_slice(), &[OutcomeKind::Delayed; 6]].concat());
    let events = office.log.1.lock().unwrap().clone();
    let begun = events.iter().filter(|event| matches!(event, LayerEvent::WaitBegan { .. }));
    let ended = events.iter().filter(|event| matches!(event, LayerEvent::WaitEnded { .. }));
    assert_eq!((begun.count(), ended.count()), (6, 6));
    running.into_iter().for_each(|number| office.finish(number));
    office.eventually_left(&exports, 2).await;
}

pub(crate) async fn request_that_has_waited_for_its_time_is_refused<L: Limiter + Clone>(mut office: Office<L>) {
    let wait = Duration::from_secs(3);
    let exports = policy("exports", waiting_quota(1, wait));
    let (layer, patient) = (office.layer(exports.clone()), office.layer(policy("exports", quota(1))));
    let held = office.run(&layer).await;
    let start = Instant::now();
    let (began, before, first, second) = loop {
        let (began, before) = (Instant::now(), office.kinds().len());
        let first = office.send(&layer);
        eventually(async || office.has_ended(first) || office.waiting(&exports) == 1).await;
        let second = office.send(&patient);
        eventually(async || office.has_ended(first) || office.waiting(&exports) == 2).await;
        if !office.has_ended(first) {
            break (began, before, first, second);
        }
        // A busy machine took longer than the wait of the first.
        assert!(began.elapsed() >= wait && start.elapsed() < LONG, "the second waits beside the first");
        office.cancel(second).await;
    };
    assert_eq!(office.status(first).await, StatusCode::TOO_MANY_REQUESTS);
    assert!(began.elapsed() >= wait);
    let Sent::Runs(refusal) = &office.sent[first] else { panic!("it was refused") };
    assert_eq!(refusal.headers().get("retry-after"), None, "nobody knows when a place comes free");
    office.assert_waits([second]).await;
    office.finish(held);
    office.assert_passes([second]).await;
    assert_eq!(office.started(), [held, second]);
    assert_eq!(office.kinds()[before..], [OutcomeKind::Limited, OutcomeKind::Delayed]);
}

pub(crate) async fn newcomer_passes_no_line<L: Limiter + Clone>(mut office: Office<L>) {
    let (layer, exports) = (office.layer(exports(2)), exports(2));
    let dear = office.layer(Rule::from(exports.clone()).cost(|_| 2));
    let impatient = office.layer(policy("exports", Quota::concurrent(2)));
    let held = office.run(&layer).await;
    let waiting = office.wait(&dear, &exports).await;
    assert_eq!(office.left(&exports).await, 0, "one is free, but not for others");
    office.refuse(&impatient).await; // it would not wait, and does not pass the line either
    let key = Key::global();
    let denied = office.limiter.take(&[Charge::new(&exports, &key)]).await.unwrap();
    assert_eq!((denied.charges()[0].wait(), denied.charges()[0].remaining()), (Wait::Unknown, 0));
    let behind = office.wait(&layer, &exports).await; // first come, first served, whatever the cost is
    let bob = Key::of("bob").unwrap();
    assert!(office.limiter.peek(&[Charge::new(&exports, &bob).cost(2)]).await.unwrap().is_allowed(), "it has no line");
    office.finish(held);
    office.assert_passes([waiting]).await;
    office.finish(waiting);
    office.assert_passes([behind]).await;
    assert_eq!(office.started(), [held, waiting, behind]);
}

pub(crate) async fn request_that_leaves_the_line_lets_the_next_ones_pass<L: Limiter + Clone>(mut office: Office<L>) {
    let (layer, exports) = (office.layer(exports(2)), exports(2));
    let dear = office.layer(Rule::from(exports.clone()).cost(|_| 2));
    let held = office.run(&layer).await;
    let [first, second] = [office.wait(&dear, &exports).await, office.wait(&dear, &exports).await];
    let behind = office.wait(&layer, &exports).await;
    office.cancel(second).await;
    assert_eq!((office.waiting(&exports), layer.waiting() + dear.waiting()), (2, 2), "it leaves at once");
    office.cancel(first).await;
    office.assert_passes([behind]).await; // the other was the first of the line, and one place is free
    assert_eq!(office.started(), [held, behind]);
    let [allowed, abandoned, delayed] = [OutcomeKind::Allowed, OutcomeKind::Abandoned, OutcomeKind::Delayed];
    assert_eq!(office.kinds(), [allowed, abandoned, abandoned, delayed]);
    [held, behind].into_iter().for_each(|number| office.finish(number));
    office.eventually_left(&exports, 2).await;
}

pub(crate) async fn no_more_requests_wait_than_the_layer_lets<L: Limiter + Clone>(mut office: Office<L>) {
    let (layer, none) = (office.layer(exports(1)).max_waiting(1), office.layer(exports(1)).max_waiting(0));
    let held = office.run(&layer).await;
    let waiting = office.wait(&layer, &exports(1)).await;
    office.refuse(&layer).await;
    office.finish(held);
    office.assert_passes([waiting]).await;
    office.refuse(&none).await;
}

pub(crate) async fn set_waits_in_the_line_that_denies_it_and_holds_nothing<L: Limiter + Clone>(mut office: Office<L>) {
    let (user, tenant) = (policy("user", quota(1)), policy("tenant", quota(1)));
    let rate = policy("rate", Quota::per_hour(9));
    let (users, tenants) = (office.layer(user.clone()), office.layer(tenant.clone()));
    let both = office.layer(rate.clone()).and(Rule::from(user.clone()), key::global());
    let both = both.and(Rule::from(tenant.clone()), key::global());

    let [one_user, one_tenant] = [office.run(&users).await, office.run(&tenants).await];
    let set = office.wait(&both, &user).await;
    assert_eq!((office.waiting(&tenant), office.left(&rate).await), (0, 9), "the first that denied");
    let later = office.wait(&tenants, &tenant).await;
    office.finish(one_tenant);
    office.assert_passes([later]).await; // who waits in one line holds nothing back in another
    let last = office.wait(&tenants, &tenant).await;
    office.finish(one_user);
    eventually(async || office.waiting(&tenant) == 2).await; // the other denies at its turn
    assert_eq!((office.waiting(&user), office.left(&rate).await), (0, 9));
    office.eventually_left(&user, 1).await;
    office.finish(later);
    office.assert_passes([set]).await; // it came before the last, and keeps its number
    office.assert_waits([last]).await;
    assert_eq!((office.waiting(&tenant), office.left(&user).await, office.left(&rate).await), (1, 0, 8));
    office.finish(set);
    office.assert_passes([last]).await;
    assert_eq!(office.started(), [one_user, one_tenant, later, set, last]);
}

pub(crate) async fn two_sets_that_block_each_others_lines_both_pass<L: Limiter + Clone>(mut office: Office<L>) {
    let (a, b) = (office.layer(rule("a", 1)), office.layer(rule("b", 1)));
    let ab = office.layer(rule("a", 1)).and(rule("b", 1), key::global());
    let ba = office.layer(rule("b", 1)).and(rule("a", 1), key::global());
    let held = [office.run(&a).await, office.run(&b).await];
    let mut sets = Vec::new();
    for (layer, line) in [(&ab, "a"), (&ba, "b"), (&ab, "a"), (&ba, "b")] {
        sets.push(office.wait(layer, &policy(line, quota(1))).await);
    }
    held.into_iter().for_each(|held| office.finish(held));
    for set in sets {
        office.assert_passes([set]).await;
        assert_eq!(office.started().last(), Some(&set));
        office.finish(set);
    }
}

pub(crate) async fn refusal_by_another_rule_ends_the_wait<L: Limiter + Clone>(mut office: Office<L>) {
    let rate = policy("rate", Quota::per_hour(2));
    let layer = office.layer(exports(1)).and(Rule::from(rate.clone()), key::global());
    let held = office.run(&layer).await;
    let waiting = office.wait(&layer, &exports(1)).await;
    let key = Key::global();
    assert!(office.limiter.take(&[Charge::new(&rate, &key)]).await.unwrap().is_allowed(), "others use the rate up");
    office.finish(held); // a limiter that is polled may have refused it before
    assert_eq!(office.status(waiting).await, StatusCode::TOO_MANY_REQUESTS);
    office.eventually_left(&exports(1), 1).await;
    assert_eq!(office.waiting(&exports(1)), 0);
    office.refuse(&layer).await; // a request over a rate does not wait
}

pub(crate) async fn request_that_can_never_pass_does_not_wait<L: Limiter + Clone>(mut office: Office<L>) {
    let layer = office.layer(Rule::from(exports(2)).cost(|_| 3));
    office.refuse(&layer).await;
}

pub(crate) async fn wait_counts_no_refusal_and_a_refusal_after_it_counts_one<L: Limiter + Clone>(
    mut office: Office<L>,
) {
    let hour = Duration::from_secs(3_600);
    let block = Quota::block(3, hour, hour).unwrap();
    for counts_denied in [false, true] {
        let name = |name: &str| format!("{name}-{counts_denied}");
        let [exports, hasty] = [LONG, HASTY].map(|wait| policy(&name("exports"), waiting_quota(1, wait)));
        let denials = policy(&name("denials"), Quota::sliding_log(2, hour).and_then(Quota::count_denied).unwrap());
        let strikes = policy(&name("strikes"), block);
        let [layer, hasty] = [&exports, &hasty].map(|exports| {
            let layer = office.layer(Rule::from(exports.clone()).block(strikes.name(), block).unwrap());
            let denials = Rule::from(denials.clone()).cost(|_| 0);
            if counts_denied { layer.and(denials, key::global()) } else { layer }
        });
        let mut held = office.run(&layer).await;
        for _ in 0..3 {
            let waiting = office.wait(&layer, &exports).await;
            // Several tries that are denied.
            for _ in 0..3 {
                office.lines().wake_first(&exports, &Key::global());
                sleep(Duration::from_millis(10)).await;
            }
            assert_eq!(office.left(&strikes).await, 3);
            office.finish(held);
            office.assert_passes([waiting]).await;
            held = waiting;
        }
        let before = office.kinds().len();
        for strikes_left in [2, 1, 0] {
            office.refuse(&hasty).await;
            assert_eq!(office.left(&strikes).await, strikes_left);
        }
        office.finish(held);
        office.refuse(&layer).await; // the key is closed
        let [limited, blocked] = [OutcomeKind::Limited, OutcomeKind::Blocked];
        assert_eq!(office.kinds()[before..], [limited, limited, blocked, blocked]);
    }
}

pub(crate) async fn quota_that_counts_denied_requests_counts_no_wait<L: Limiter + Clone>(mut office: Office<L>) {
    let hour = Duration::from_secs(3_600);
    // It begins with the first request, so that it does not end while the test runs.
    let window = Quota::fixed_window(3, hour).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap();
    let rate = policy("rate", window.count_denied().unwrap());
    let layer = office.layer(exports(1)).and(Rule::from(rate.clone()), key::global());
    let held = office.run(&layer).await;
    let waiting = office.wait(&layer, &exports(1)).await;
    assert_eq!(office.left(&rate).await, 2, "it was not denied by the rate");
    office.finish(held);
    office.assert_passes([waiting]).await;
    assert_eq!(office.left(&rate).await, 1);
}

pub(crate) async fn switch_that_raises_the_limit_wakes_the_line<L: Limiter + Clone>(mut office: Office<L>) {
    let switch = QuotaSwitch::new(quota(1));
    let (layer, exports) = (office.layer(Rule::switched("exports", &switch).unwrap()), exports(1));
    let held = office.run(&layer).await;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(office.wait(&layer, &exports).await);
    }
    let [second, third, fourth] = waiting[..] else { panic!("three wait") };
    switch.set(quota(3)).unwrap();
    office.assert_passes([second, third]).await;
    switch.set(quota(1)).unwrap();
    for over in [held, second] {
        office.finish(over);
        office.assert_waits([fourth]).await; // more are held than the lower limit allows
    }
    office.finish(third);
    office.assert_passes([fourth]).await;
    let fifth = office.wait(&layer, &exports).await;
    switch.set(quota(0)).unwrap();
    assert_eq!(office.status(fifth).await, StatusCode::TOO_MANY_REQUESTS, "a limit of 0 refuses at once");
}

pub(crate) async fn reset_wakes_the_line_and_late_releases_free_nothing<L: Limiter + Clone>(mut office: Office<L>) {
    let (layer, exports) = (office.layer(exports(1)), exports(1));
    let held = office.run(&layer).await;
    let [waiting, last] = [office.wait(&layer, &exports).await, office.wait(&layer, &exports).await];
    office.limiter.reset(&exports, &Key::global()).await.unwrap();
    office.assert_passes([waiting]).await;
    office.finish(held);
    office.assert_waits([last]).await; // nothing was returned of the request after it
    office.finish(waiting);
    office.assert_passes([last]).await;
}

pub(crate) async fn handler_that_admits_waits_in_line_and_leaves_it<L: Limiter + Clone>(mut office: Office<L>) {
    let exports = exports(1);
    let (patient, hasty) = (office.layer(exports.clone()), office.layer(policy("exports", waiting_quota(1, HASTY))));
    let admit = |layer: &RateLimitLayer<L>| {
        let layer = layer.clone();
        async move {
            let (head, ()) = Request::new(()).into_parts();
            match layer.admit(&head).await {
                Ok(admission) => admission.finish(Response::new(Body::from("done"))),
                Err(refused) => refused.into_http().map(Body::new),
            }
        }
    };
    let held = office.run(&patient).await;
    let [first, second] = [office.spawn(admit(&patient)), office.spawn(admit(&patient))];
    eventually(async || office.waiting(&exports) == 2).await;
    office.cancel(first).await;
    office.finish(held);
    office.assert_passes([second]).await;
    assert_eq!(office.left(&exports).await, 0);
    let third = office.spawn(admit(&hasty));
    assert_eq!(office.status(third).await, StatusCode::TOO_MANY_REQUESTS);
    office.finish(second);
    office.eventually_left(&exports, 1).await;
}

pub(crate) async fn panic_of_a_service_that_was_waited_for_returns_the_place<L: Limiter + Clone>(
    mut office: Office<L>,
) {
    let (layer, exports) = (office.layer(exports(1)), exports(1));
    let held = office.run(&layer).await;
    let service =
        layer.clone().layer(service_fn(|_: Request<Body>| -> std::future::Ready<Result<Response<Body>, Infallible>> {
            std::panic::resume_unwind(Box::new("the service panics"))
        }));
    let waiting = tokio::spawn(service.oneshot(Request::new(Body::empty())));
    eventually(async || office.waiting(&exports) == 1).await;
    office.finish(held);
    assert!(waiting.await.is_err_and(|error| error.is_panic()));
    office.eventually_left(&exports, 1).await;
    assert_eq!(office.waiting(&exports), 0);
}

pub(crate) async fn own_larger_quota_takes_free_places_when_it_is_first<L: Limiter + Clone>(mut office: Office<L>) {
    let limit = Arc::new(Mutex::new(1));
    let own = {
        let limit = Arc::clone(&limit);
        Rule::quota_from("exports", move |_| Some(quota(*limit.lock().unwrap()))).unwrap()
    };
    let (layer, exports) = (office.layer(own), exports(3));
    let held = office.run(&layer).await;
    let small = office.wait(&layer, &exports).await;
    *limit.lock().unwrap() = 3;
    let mut waiting = vec![small];
    for _ in 0..3 {
        waiting.push(office.wait(&layer, &exports).await);
    }
    let [small, second, third, fourth] = waiting[..] else { panic!("four wait") };
    office.assert_waits([small, second, third, fourth]).await; // two places are free, and nobody overtakes
    // One place comes free. The first is admitted by its quota of one, and two more by theirs of three.
    office.finish(held);
    office.assert_passes([small, second, third]).await;
    office.assert_waits([fourth]).await;
    office.finish(second);
    office.assert_passes([fourth]).await;
    assert_eq!(office.left(&exports).await, 0);
}
