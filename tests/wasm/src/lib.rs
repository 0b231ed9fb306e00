//! Requests through a layer with a clock of its own, and what their clients were told.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::future::{Ready, ready};
use std::pin::pin;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use tower_layer::Layer;
use tower_ratelimit::clock::{ManualClock, Timestamp};
use tower_ratelimit::quota::Calendar;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
use tower_service::Service;

const QUOTAS: [&str; 10] = [
    "5 per minute, burst 2",
    "5 per minute, gcra",
    "5 per minute, fixed window",
    "5 per minute, sliding window",
    "5 per minute, sliding log",
    "5 per minute, step bucket",
    "5 per minute, leaky bucket",
    // Its numbers need more than 32 bits.
    "6000000000 per 7 d",
    "5 per calendar month from day 31",
    "5 per calendar day in Europe/Berlin",
];

/// The windows whose edges are followed.
const CALENDARS: [fn() -> Calendar; 5] =
    [Calendar::day, Calendar::week, Calendar::month, Calendar::quarter, Calendar::year];

#[derive(Clone)]
struct Hello;

impl Service<Request<String>> for Hello {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<String>) -> Self::Future {
        ready(Ok(Response::new(Empty::new())))
    }
}

/// Sends requests of three clients through a layer for each quota. Returns the statuses and headers as text.
///
/// # Panics
///
/// If a quota is wrong, or a request is not answered at once.
#[must_use]
pub fn report() -> String {
    let mut text = String::new();
    for quota in QUOTAS {
        let clock = ManualClock::new();
        let limiter =
            MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().expect("it fits into memory");
        let quota: Quota = quota.parse().expect("the quota is right");
        writeln!(text, "{quota}").expect("a text grows");
        let mut service = RateLimitLayer::new(limiter, quota, key::header("x-client")).wrap_body().layer(Hello);
        for step in 0..60_u64 {
            let client = ["a", "b", "c"][(step * step % 7 % 3) as usize];
            let request =
                Request::builder().header("x-client", client).body(String::new()).expect("the request is right");
            let Poll::Ready(response) = pin!(service.call(request)).poll(&mut Context::from_waker(Waker::noop()))
            else {
                panic!("the limiter in memory answers at once");
            };
            let response = response.expect("the service does not fail");
            write!(text, "{client} {}", response.status().as_u16()).expect("a text grows");
            for name in ["ratelimit", "retry-after"] {
                let value = response.headers().get(name).map_or("-", |value| value.to_str().expect("headers are text"));
                write!(text, " {value}").expect("a text grows");
            }
            text.push('\n');
            clock.advance(Duration::from_millis(step * 700 % 5_000));
        }
    }
    text.push_str(&edges());
    text
}

/// Returns the edges of the windows, as a number and a hash of each calendar: to the year 2150, and in zones from 2000 to
/// 2020, because the system's database and the one that is built in may have different rules for later years.
fn edges() -> String {
    let mut text = String::new();
    let all = (0, 5_680_281_600_000_000);
    let known = (946_684_800_000_000, 1_577_836_800_000_000);
    for (zone, (from, to)) in
        [("UTC", all), ("Europe/Berlin", known), ("Pacific/Apia", known), ("Australia/Lord_Howe", known)]
    {
        for calendar in CALENDARS {
            let calendar = calendar().zone(zone).expect("the zone is built in");
            let (mut at, mut count, mut hash) = (Timestamp::from_micros(from), 0_u32, 0_u64);
            while at < Timestamp::from_micros(to) {
                at = calendar.window_at(at).end;
                (count, hash) = (count + 1, hash.rotate_left(7).wrapping_add(at.as_micros()));
            }
            writeln!(text, "{calendar:?}: {count} {hash:016x}").expect("a text grows");
        }
    }
    text
}

fn shared() -> &'static str {
    static REPORT: OnceLock<String> = OnceLock::new();
    REPORT.get_or_init(report)
}

/// Returns where the report is in memory.
#[unsafe(no_mangle)]
pub extern "C" fn report_start() -> *const u8 {
    shared().as_ptr()
}

/// Returns the number of bytes of the report.
#[unsafe(no_mangle)]
pub extern "C" fn report_length() -> usize {
    shared().len()
}
