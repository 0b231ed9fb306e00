//! `tower-ratelimit serve`: a server that limits the requests of any proxy.
//!
//! * `options` are its settings, and `limits` what it makes of them: the rules, the limiter and the layers.
//! * `listen` has the connections, of which `peers` counts those of each peer, and `server` what all of them share.
//!   `route` sends each request to one of these:
//!   * `forward` answers proxies,
//!   * `api` answers applications, with `held` for the requests whose end they report,
//!   * `envoy` answers Envoy's rate limit service, over `grpc`,
//!   * `health` answers balancers,
//!   * `admin` answers operators, whom `operators` knows, and `fleet` what they set for all processes. `audit` is
//!     what the log says about their requests.
//! * `store` is the store that processes share. `push` puts rules into it.
//! * `described` and `uri` make the head of a request that somebody describes.
//!
//! Everything is decided by `RateLimitLayer::admit`, as in a handler of an application.

mod admin;
mod api;
mod audit;
mod described;
mod envoy;
mod failure;
mod fleet;
mod forward;
mod grpc;
mod health;
mod held;
mod limits;
mod listen;
mod log;
mod operators;
mod options;
mod peers;
mod push;
mod rates;
mod respond;
mod route;
mod server;
mod store;
mod time;
mod uri;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, interval, sleep};
use tower_ratelimit::observe::{Stats, StatusPage};

use crate::exit;
use crate::output::Output;
use failure::Failure;
use health::{Health, Phase, Store};
use held::Held;
use limits::Limits;
use listen::Bounds;
use log::{Log, Watcher};
use operators::{Operator, Operators};
use server::{Role, Server};
use store::StoreFailure;

pub(crate) use options::{Options, with_settings};
pub(crate) use push::{PushOptions, RollbackOptions, push, rollback};

pub(crate) fn run(options: &Options, output: &mut Output) -> Result<u8, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("error: no thread could be started: {error}"))?;
    match runtime.block_on(serve(options)) {
        Ok(()) => Ok(exit::FINE),
        Err(Failure::Rules(file, error)) => {
            output.problems(&file, &error);
            Ok(exit::PROBLEMS)
        }
        Err(Failure::Setup(message)) => Err(message),
    }
}

async fn serve(options: &Options) -> Result<(), Failure> {
    let log = Log(options.log);
    let operators = options.operators.as_deref().map(|file| Operators::read(file, log).map(Arc::new));
    let operators = operators.transpose().map_err(Failure::setup)?;
    if operators.is_none() && !options.admin.ip().is_loopback() {
        return Err(Failure::setup(format_args!(
            "--admin {} is no loopback address, so anybody on the network could read the status page: name who may, by \
             --operators FILE",
            options.admin
        )));
    }
    let reveal = options.reveal;
    let stats = Stats::builder().count_use(true).max_recent_refusals(1_000).reveal(move |key| reveal.name_of(key));
    let stats = stats.print_warnings(false).build(); // the log has them
    let watcher = Arc::new(Watcher { stats: stats.clone(), log });
    let limits = Limits::new(options, &watcher).await?;
    let (phases, phase) = watch::channel(Phase::Serving);
    let (probes, store) = watch::channel(health::first(&limits, log).await);
    let server = Arc::new(Server {
        page: page(&stats, &limits, log, options),
        limits,
        paths: options.paths,
        held: Held::default(),
        log,
        stats,
        operators,
        admin_hosts: options.admin_hosts.clone(),
        health: Health::new(store, phase.clone(), options.on_error),
        unauthorized: AtomicU64::new(0),
        noted: Mutex::default(),
    });
    for (_, layer) in server.limits.layers() {
        let _ = layer.check(); // the log gets the warnings
    }
    for network in options.wide_networks() {
        let can =
            "a client in this network may ask past the proxy, use up the allowances of others, and state any address";
        log.warn("trust", format_args!("--trust has {network}: {can}"));
    }
    let signals = Signals::new().map_err(Failure::setup)?;
    if let Some(operators) = &server.operators {
        operators.follow(options.reload_every).map_err(Failure::setup)?;
    }
    let bounds = Bounds {
        max_connections: options.max_connections.max(1),
        idle: options.idle,
        max_age: options.max_age,
        drain_timeout: options.drain_timeout,
    };
    let mut listeners = Vec::new();
    for (role, name, address) in [(Role::Asked, "listen", options.listen), (Role::Admin, "admin", options.admin)] {
        let failed = |error| Failure::setup(format_args!("--{name} {address}: {error}"));
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?.to_string();
        log.write(log::Level::Info, name, format_args!("listening on {address}"), &[("address", &address)]);
        listeners.push(listen::serve(Arc::clone(&server), listener, role, bounds, phase.clone()));
    }
    tokio::spawn(follow(Arc::clone(&server), signals, phases, options.drain_delay));
    tokio::spawn(sweep(Arc::clone(&server)));
    tokio::spawn(watch_store(Arc::clone(&server), probes));
    let mut serving = tokio::task::JoinSet::new();
    listeners.into_iter().for_each(|listener| drop(serving.spawn(listener)));
    while serving.join_next().await.is_some() {}
    log.info("end", "all requests are answered");
    Ok(())
}

/// Makes the status page.
fn page(stats: &Stats, limits: &Limits, log: Log, options: &Options) -> StatusPage {
    let mut page = StatusPage::new(stats.clone());
    for (title, layer) in limits.layers() {
        page = page.layer(title, layer);
    }
    if let Some(rules) = limits.rules().first() {
        page = page.rules(rules);
    }
    if let Some(fleet) = &limits.fleet {
        page = page.fleet(fleet);
    }
    if let Some(name) = &options.name {
        page = page.process_name(name);
    }
    if !options.admin_hosts.is_empty() {
        page = page.hosts(options.admin_hosts.iter().cloned());
    }
    page.operators(
        |head| head.extensions.get::<Operator>().map(|operator| operator.0.clone()),
        move |action| log.info("operator", action),
    )
}

/// How often the store is asked whether it decides: usually, and while it fails.
const PROBE_EVERY: Duration = Duration::from_secs(1);
const PROBE_EVERY_FAILING: Duration = Duration::from_millis(200);

/// The time without an answer after which the store fails.
const FAILS_AFTER: Duration = Duration::from_secs(2);

/// Asks the store again and again, until the process ends. One slow answer does not make the server unready: all
/// servers ask the same store, and a proxy would then have none.
async fn watch_store(server: Arc<Server>, store: watch::Sender<Store>) {
    let mut failing_since = None;
    loop {
        sleep(if failing_since.is_some() { PROBE_EVERY_FAILING } else { PROBE_EVERY }).await;
        let before = *store.borrow();
        match health::probe(&server.limits).await {
            Ok(()) => {
                failing_since = None;
                if before != Store::Decides {
                    server.log.info("store-back", "the store decides again, within the deadline");
                    store.send_replace(Store::Decides);
                }
            }
            Err(StoreFailure { kind, message }) => {
                let since = *failing_since.get_or_insert_with(Instant::now);
                if before == Store::Decides && since.elapsed() >= FAILS_AFTER {
                    server.log.warn("store-away", format_args!("the store does not decide: {message}"));
                }
                if before != Store::Decides || since.elapsed() >= FAILS_AFTER {
                    let fails = Store::Fails(kind);
                    store.send_if_modified(|store| std::mem::replace(store, fails) != fails);
                }
            }
        }
    }
}

/// Keeps what held requests took whose time is over.
async fn sweep(server: Arc<Server>) {
    let mut second = interval(Duration::from_secs(1));
    loop {
        second.tick().await;
        server.held.sweep();
    }
}

/// Reads the rules and the operators again, or ends the server, as signals say. A second signal to end is followed at once.
async fn follow(server: Arc<Server>, mut signals: Signals, phases: watch::Sender<Phase>, drain_delay: Duration) {
    while let Signal::Reload = signals.next().await {
        for rules in server.limits.rules() {
            let _ = rules.reload(); // the log gets what was wrong
        }
        if let Some(operators) = &server.operators {
            operators.reload();
        }
    }
    let _ = phases.send(Phase::Draining);
    // The line says what is so already: who reads it may ask at once.
    server.log.info("drain", "the server is not ready any more, and ends when all requests are answered");
    tokio::select! {
        () = sleep(drain_delay) => {}
        () = signals.end() => {}
    }
    let _ = phases.send(Phase::Ending);
    // The sender stays until the end, because those who wait for the phase would take its end for one.
    signals.end().await;
    std::process::exit(i32::from(exit::TROUBLE));
}

enum Signal {
    Reload,
    End,
}

/// The signals of the operating system.
#[cfg(unix)]
struct Signals {
    hangup: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.hangup.recv() => Signal::Reload,
            _ = self.terminate.recv() => Signal::End,
            _ = self.interrupt.recv() => Signal::End,
        }
    }
}

/// Without signals of Unix there is only the interrupt of a terminal.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    #[allow(clippy::unnecessary_wraps, reason = "on Unix it can fail")]
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) -> Signal {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        Signal::End
    }
}

impl Signals {
    /// Waits for a signal to end.
    async fn end(&mut self) {
        while !matches!(self.next().await, Signal::End) {}
    }
}
