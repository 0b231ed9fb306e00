//! A whole axum server under load, beside the same server without a layer: how much of its throughput is left, and how
//! much more of the processor's time a request takes.
//!
//! Each server is a process of its own with one thread, on the first processor. The load comes from `wrk` on the second
//! one, over the loopback interface. Every connection stays open.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::extract::{ConnectInfo, Request};
use axum::routing::get;
use axum::{Router, ServiceExt};
use tokio::net::TcpListener;
use tower::Layer;
use tower::util::MapRequestLayer;

use crate::contender::LayerSetup;
use crate::contenders;
use crate::race::{Plan, Raced};
use crate::report::{Better, Case};

/// Serves in a process of its own: `NAME KEYS DENIED HEADERS`.
pub const CHILD: &str = "serve";

const CONNECTIONS: &str = "-c32";
const AGAINST: &str = "no layer";
const HEADERS: [&str; 2] = ["User-Agent: example-client/1.4 (linux; x86_64)", "Accept: application/json"];

pub fn run(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    for (what, denied, headers) in
        [("allowed, no headers", false, false), ("allowed, headers", false, true), ("refused, headers", true, true)]
    {
        let name = format!("{what}, 10k addresses");
        if plan.is_wanted(&name) {
            cases.push(case(plan, name, &LayerSetup { keys: plan.scaled(10_000), denied, headers }));
        }
    }
    cases
}

fn case(plan: &Plan, name: String, setup: &LayerSetup) -> Case {
    let mut names = vec![AGAINST];
    // Some contenders can only be made in a runtime.
    let runtime = runtime();
    runtime.block_on(async {
        let takes_part = |name: &&str| app(name, setup).is_some();
        names.extend(contenders::all().iter().map(|contender| contender.name()).filter(takes_part));
    });
    let servers: Vec<Server> = names.iter().map(|name| Server::start(name, setup)).collect();
    let time = (4 * plan.round()).max(Duration::from_millis(150));
    // Every address is there, and the first request of each has passed.
    for server in &servers {
        let mut sent = 0;
        while sent < 2 * setup.keys as u64 {
            sent += server.load(time).requests;
        }
    }
    let mut spent = vec![Vec::new(); servers.len()];
    let raced = plan.take_turns(servers.len(), |at| {
        let before = servers[at].spent();
        let load = servers[at].load(time);
        let refused = if setup.denied && names[at] != AGAINST { load.requests } else { 0 };
        assert_eq!(load.refused, refused, "{} refused {} of {}", names[at], load.refused, load.requests);
        spent[at].push((servers[at].spent() - before) / load.requests as f64);
        load.per_second
    });
    let spent = Raced::of(spent);
    let mut case = Case::new(name, "requests/s", Better::Higher, AGAINST, names, &raced.medians());
    case.note("CPU µs", spent.medians().into_iter());
    let beyond = spent.beyond_first();
    case.note("CPU µs over bare", std::iter::once(0.0).chain(beyond.medians()));
    case.steadiness(&raced);
    case.told()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Returns the application with the layer of this contender, if it has one for this setup.
fn app(name: &str, setup: &LayerSetup) -> Option<Router> {
    let app = Router::new().route("/", get(|| async { "hello" }));
    if name == AGAINST { Some(app) } else { contenders::named(name).app(app, setup) }
}

/// A server, which is killed when this is dropped.
struct Server {
    process: Child,
    url: String,
}

/// The result of a load.
struct Load {
    requests: u64,
    refused: u64,
    per_second: f64,
}

impl Server {
    fn start(name: &str, setup: &LayerSetup) -> Self {
        let program = std::env::current_exe().expect("this program has a file");
        let mut command = on_processor(0, program.to_str().expect("its path is a text"));
        command.args(["--child", CHILD, name]);
        command.args([setup.keys.to_string(), setup.denied.to_string(), setup.headers.to_string()]);
        let mut process = command.stdout(Stdio::piped()).spawn().expect("taskset is installed (package util-linux)");
        let mut line = String::new();
        let output = process.stdout.take().expect("it is piped");
        BufReader::new(output).read_line(&mut line).expect("the server prints its address");
        Self { process, url: format!("http://{}/", line.trim()) }
    }

    /// Returns the processor's time that the server has taken, in microseconds.
    fn spent(&self) -> f64 {
        let told = std::fs::read_to_string(format!("/proc/{}/schedstat", self.process.id())).expect("Linux tells it");
        let nanoseconds: u64 = told.split(' ').next().and_then(|word| word.parse().ok()).expect("a number");
        nanoseconds as f64 / 1e3
    }

    /// Sends requests for this time.
    fn load(&self, time: Duration) -> Load {
        let mut command = on_processor(1, "timeout");
        // wrk itself takes whole seconds only.
        command.args(["-s", "INT", &time.as_secs_f64().to_string(), "wrk", "-t1", CONNECTIONS, "-d3600s"]);
        for header in HEADERS {
            command.args(["-H", header]);
        }
        let output = command.arg(&self.url).output().expect("taskset is installed (package util-linux)");
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(
            told.contains("Requests/sec"),
            "wrk is installed, and works: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let word = |line: &str| line.split_whitespace().next().and_then(|word| word.parse().ok());
        let requests = told.lines().find(|line| line.contains(" requests in ")).and_then(word).expect("it is told");
        let refused = told.lines().find_map(|line| line.trim().strip_prefix("Non-2xx or 3xx responses:"));
        let per_second = told.lines().find_map(|line| line.strip_prefix("Requests/sec:"));
        Load {
            requests,
            refused: refused.map_or(0, |told| told.trim().parse().expect("a number")),
            per_second: per_second.and_then(|told| told.trim().parse().ok()).expect("it is told"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn on_processor(number: u32, program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", &number.to_string(), program]);
    command
}

/// The process of a server.
pub fn child(arguments: &[String]) {
    let [name, keys, denied, headers] = arguments else { panic!("four arguments") };
    let keys: u32 = keys.parse().expect("a number");
    let [denied, headers] = [denied, headers].map(|word| word.parse().expect("true or false"));
    runtime().block_on(async {
        let setup = LayerSetup { keys: keys as usize, denied, headers };
        let app = app(name, &setup).expect("it has a layer");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        println!("{}", listener.local_addr().expect("it is bound"));
        // The state makes the routes' services once, as axum itself does for a router that nothing is around.
        let app = clients(keys).layer(app.with_state::<()>(()));
        axum::serve(listener, ServiceExt::<Request>::into_make_service(app)).await.expect("it serves for ever");
    });
}

/// All requests come from the loopback interface. This gives each one of `keys` addresses in turn, as if it came from a
/// client there.
fn clients(keys: u32) -> MapRequestLayer<impl Fn(Request) -> Request + Clone> {
    let sent = Arc::new(AtomicU32::new(0));
    MapRequestLayer::new(move |mut request: Request| {
        // Steps of a prime, so that the addresses do not come in their order.
        let number = sent.fetch_add(1, Ordering::Relaxed).wrapping_mul(7_919) % keys;
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number)), number as u16);
        request.extensions_mut().insert(ConnectInfo(address));
        request
    })
}
