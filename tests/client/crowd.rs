//! A crowd of clients against one of this crate's servers, on a manual clock: with the layer and
//! without.

use std::cell::RefCell;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::rc::Rc;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::client::ObeyLayer;
use tower_ratelimit::clock::Timer;
use tower_ratelimit::middleware::ResetEncoding;
use tower_ratelimit::{Headers, Quota, RateLimitLayer, key};

use crate::support::memory;
use crate::support::waiting::World;

/// The behaviour of the clients.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Manner {
    /// Each retries 100 ms after a refusal.
    Rude,
    /// Each has a layer of its own, as processes have.
    Alone,
    /// Each has a layer of its own, which adapts.
    AloneAdapting,
    /// All share a layer.
    Together,
    /// All share a layer, which adapts.
    TogetherAdapting,
    /// All share a layer, which paces.
    TogetherPacing,
}

#[derive(Debug)]
struct Report {
    sent: u64,
    refused: u64,
    /// Passed requests by client.
    passed: Vec<u64>,
    /// Passed requests by second.
    seconds: Vec<u64>,
    /// Refused requests by second.
    refusals: Vec<u64>,
    /// When each client began to want what it waits for.
    wanted_us: Vec<u64>,
    longest_wait_us: u64,
    /// The requests that the quota allows in that time, with its burst.
    allowed: u64,
}

impl Report {
    fn refused_share(&self) -> f64 {
        self.refused as f64 / self.sent as f64
    }

    fn note_wait(&mut self, client: usize, now_us: u64) {
        let waited_us = now_us - std::mem::replace(&mut self.wanted_us[client], now_us);
        self.longest_wait_us = self.longest_wait_us.max(waited_us);
    }

    fn throughput(&self) -> f64 {
        self.passed.iter().sum::<u64>() as f64 / self.allowed as f64
    }

    /// Jain's index of fairness: 1 if all clients got as much.
    fn fairness(&self) -> f64 {
        let sum: f64 = self.passed.iter().map(|n| *n as f64).sum();
        let squares: f64 = self.passed.iter().map(|n| (*n as f64).powi(2)).sum();
        sum * sum / (self.passed.len() as f64 * squares)
    }
}

const LATENCY: Duration = Duration::from_millis(20);

/// Lets `clients` send as fast as they may for `seconds`. They share a limit of a request per second
/// for each, with a burst of one second.
fn simulate(clients: u32, seconds: u64, manner: Manner, headers: Headers) -> Report {
    let mut world: World<()> = World::new();
    let limit =
        RateLimitLayer::new(memory(&world.clock), Quota::per_second(clients.into()), key::global()).headers(headers);
    let served = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
    let server = limit.layer(served);
    let timer = world.timer.clone();
    // The request and its response travel for half of the latency each.
    let remote = {
        let timer = timer.clone();
        service_fn(move |request: Request<Body>| {
            let (timer, server) = (timer.clone(), server.clone());
            async move {
                timer.sleep_until(timer.now() + LATENCY / 2).await;
                let response = server.oneshot(request).await?;
                timer.sleep_until(timer.now() + LATENCY / 2).await;
                Ok::<_, Infallible>(response)
            }
        })
    };
    let configure = |nth: u64| {
        let layer = ObeyLayer::new(timer.clone()).jitter_seed(nth << 32);
        match manner {
            Manner::AloneAdapting | Manner::TogetherAdapting => layer.adapt(true),
            Manner::TogetherPacing => layer.pace(true),
            _ => layer,
        }
    };
    let shared = configure(0);
    let slots = usize::try_from(seconds).unwrap();
    let report = Rc::new(RefCell::new(Report {
        sent: 0,
        refused: 0,
        passed: vec![0; clients as usize],
        seconds: vec![0; slots],
        refusals: vec![0; slots],
        wanted_us: vec![0; clients as usize],
        longest_wait_us: 0,
        allowed: u64::from(clients) * (seconds + 1),
    }));
    for client in 0..clients as usize {
        let (timer, remote, report) = (timer.clone(), remote.clone(), Rc::clone(&report));
        let layer = match manner {
            Manner::Together | Manner::TogetherAdapting | Manner::TogetherPacing => shared.clone(),
            _ => configure(client as u64 + 1),
        };
        world.spawn(async move {
            let mut polite = layer.layer(remote.clone());
            loop {
                let request = Request::get("http://example.org/").body(Body::empty()).unwrap();
                let status = if manner == Manner::Rude {
                    remote.clone().oneshot(request).await.unwrap().status()
                } else {
                    polite.ready().await.unwrap().call(request).await.unwrap().status()
                };
                let second = usize::try_from(timer.now_us() / 1_000_000).unwrap();
                let is_refused = status == 429;
                {
                    let mut report = report.borrow_mut();
                    report.sent += 1;
                    report.refused += u64::from(is_refused);
                    report.passed[client] += u64::from(!is_refused);
                    let slots = if is_refused { &mut report.refusals } else { &mut report.seconds };
                    if let Some(slot) = slots.get_mut(second) {
                        *slot += 1;
                    }
                    if !is_refused {
                        report.note_wait(client, timer.now_us());
                    }
                }
                if is_refused && manner == Manner::Rude {
                    timer.sleep_until(timer.now() + Duration::from_millis(100)).await;
                }
            }
        });
    }
    world.pass(seconds * 1_000_000);
    drop(world);
    let mut report = Rc::into_inner(report).unwrap().into_inner();
    (0..clients as usize).for_each(|client| report.note_wait(client, seconds * 1_000_000));
    report
}

fn row(name: &str, report: &Report) -> String {
    format!(
        "{name}: {:.2} % refused, {:.2} % of the limit used, fairness {:.3}, longest wait {:.1} s",
        100.0 * report.refused_share(),
        100.0 * report.throughput(),
        report.fairness(),
        report.longest_wait_us as f64 / 1e6
    )
}

/// A server that says nothing but `Retry-After`.
fn silent() -> Headers {
    Headers::none().retry_after(true)
}

#[test]
fn crowd_with_one_layer_uses_the_limit_without_refusals() {
    for headers in [Headers::draft_11(), Headers::draft_07(), Headers::x_rate_limit(ResetEncoding::DeltaSeconds)] {
        let report = simulate(50, 20, Manner::Together, headers);
        let row = row("together", &report);
        assert_eq!(report.refused, 0, "{row}");
        assert!(report.throughput() >= 0.98 && report.fairness() >= 0.95, "{row}");
        assert!(report.longest_wait_us <= 3_000_000, "{row}");
    }
}

#[test]
fn crowd_that_paces_uses_the_whole_limit_of_a_second() {
    let report = simulate(50, 20, Manner::TogetherPacing, Headers::draft_11());
    let row = row("together, pacing", &report);
    assert_eq!(report.refused, 0, "{row}");
    assert!(report.throughput() >= 0.98 && report.fairness() >= 0.95, "{row}");
}

#[test]
fn crowd_without_a_layer_is_refused_and_starves() {
    let report = simulate(50, 20, Manner::Rude, Headers::draft_11());
    let row = row("rude", &report);
    assert!(report.refused_share() > 0.8 && report.fairness() < 0.5, "{row}");
}

#[test]
fn crowd_of_processes_uses_nearly_the_whole_limit() {
    let rude = simulate(50, 20, Manner::Rude, silent());
    for (manner, headers) in [(Manner::Alone, Headers::draft_11()), (Manner::AloneAdapting, silent())] {
        let report = simulate(50, 20, manner, headers);
        let row = row("alone", &report);
        assert!(report.throughput() >= 0.97, "{row}");
        assert!(report.refused_share() < rude.refused_share() * 0.6, "{row}");
    }
}

/// Prints the figures of the guide, and draws its picture, if `CROWD=1` says so; without optimization that takes
/// minutes. Otherwise it is a small crowd, and nothing is written.
#[test]
fn crowds_with_and_without_the_layer_are_drawn() {
    let is_campaign = std::env::var_os("CROWD").is_some();
    let (clients, seconds) = if is_campaign { (1_000, 60) } else { (20, 5) };
    let run = |manner, headers| simulate(clients, seconds, manner, headers);
    let rude = run(Manner::Rude, Headers::draft_11());
    let together = run(Manner::Together, Headers::draft_11());
    let drawn = picture(&[("without the layer", &rude), ("with one layer for all", &together)]);
    assert_eq!(
        (drawn.matches("<path").count(), drawn.contains("\n\n")),
        (5, false),
        "Markdown ends HTML at an empty line"
    );
    if !is_campaign {
        return;
    }
    println!("{}", row("no layer", &rude));
    println!("{}", row("one layer for all", &together));
    for (name, manner, headers) in [
        ("a layer for each", Manner::Alone, Headers::draft_11()),
        ("only Retry-After, no layer", Manner::Rude, silent()),
        ("only Retry-After, one layer for all", Manner::Together, silent()),
        ("only Retry-After, one layer that adapts", Manner::TogetherAdapting, silent()),
        ("only Retry-After, a layer for each that adapts", Manner::AloneAdapting, silent()),
    ] {
        println!("{}", row(name, &run(manner, headers)));
    }
    std::fs::write("src/guide/crowd.svg", drawn).unwrap();
}

/// Draws the requests of each second, a panel for each report: those that passed below, those that were refused above,
/// hatched. The colour of its text is that of the page.
fn picture(panels: &[(&str, &Report)]) -> String {
    const WIDTH: usize = 300;
    const HEIGHT: u64 = 150;
    const TOP: u64 = 50;
    let most = panels.iter().flat_map(|(_, report)| report.seconds.iter().zip(&report.refusals)).map(|(a, b)| a + b);
    let most = most.max().unwrap_or(1).max(1);
    let width = panels.len() * (WIDTH + 30) + 30;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} 240\" width=\"{width}\" role=\"img\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"currentColor\">\n\
         <title>Requests per second, passed and refused, without the layer and with it</title>\n\
         <defs><pattern id=\"refused\" width=\"4\" height=\"4\" patternUnits=\"userSpaceOnUse\">\
         <path d=\"M0 4L4 0\" stroke=\"#c0392b\"/></pattern></defs>\n"
    );
    for (nth, (name, report)) in panels.iter().enumerate() {
        let left = 30 + nth * (WIDTH + 30);
        let bar = WIDTH / report.seconds.len();
        let (mut passed, mut refused) = (String::new(), String::new());
        for (second, (pass, refusal)) in report.seconds.iter().zip(&report.refusals).enumerate() {
            let (x, bottom) = (left + second * bar, TOP + HEIGHT);
            let (high, higher) = (pass * HEIGHT / most, refusal * HEIGHT / most);
            let _ = write!(passed, "M{x} {bottom}v-{high}h{bar}v{high}z");
            if higher > 0 {
                let _ = write!(refused, "M{x} {}v-{higher}h{bar}v{higher}z", bottom - high);
            }
        }
        let (share, per_second) =
            (100.0 * report.refused_share(), report.seconds.iter().sum::<u64>() / report.seconds.len() as u64);
        let _ = write!(
            svg,
            "<text x=\"{left}\" y=\"16\" font-weight=\"bold\">{name}</text>\n\
             <text x=\"{left}\" y=\"34\">{per_second} pass in a second, {share:.1} % of all are refused</text>\n\
             <path d=\"{passed}\" fill=\"#1f7a4d\"/><path d=\"{refused}\" fill=\"url(#refused)\"/>\n\
             <text x=\"{left}\" y=\"{}\">{} seconds</text>\n",
            TOP + HEIGHT + 16,
            report.seconds.len()
        );
    }
    let legend = "<rect x=\"30\" y=\"226\" width=\"12\" height=\"12\" fill=\"#1f7a4d\"/><text x=\"48\" y=\"236\">passed</text>\n\
                  <rect x=\"110\" y=\"226\" width=\"12\" height=\"12\" fill=\"url(#refused)\"/><text x=\"128\" y=\"236\">refused \
                  with 429</text>\n";
    svg + legend + "</svg>\n"
}
