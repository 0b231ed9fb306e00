//! Faults of one server under load.

use super::*;
use crate::limiter::tcp_proxy::Proxy;

/// A fault of a server.
struct Fault<'a> {
    name: &'a str,
    per_ms: usize,
    lasts: Duration,
    settings: ConnectionSettings,
    /// True if the server refuses scripts, and answers other commands at once.
    refuses: bool,
}

impl<'a> Fault<'a> {
    fn new(name: &'a str, per_ms: usize, lasts: Duration) -> Self {
        Self { name, per_ms, lasts, settings: ConnectionSettings::default(), refuses: false }
    }

    /// Calls before, while and after `begin` and `end`. The script has run at most once for each.
    async fn strike(
        self,
        server: &mut Server,
        begin: impl FnOnce(&mut Server),
        end: impl FnOnce(&mut Server),
    ) -> Report {
        let store = connected(&server.url(), self.settings).await;
        let mut load = Load::start(&store, self.per_ms, &["key"]);
        if self.refuses {
            load.lost.measure_server(server);
        }
        sleep(200 * MS).await;
        tokio::task::block_in_place(|| begin(server));
        sleep(self.lasts).await;
        tokio::task::block_in_place(|| end(server));
        load.fixed();
        sleep(1_000 * MS).await;
        let report = load.end().await.check(self.name);
        assert!(counted(server, "key") <= report.calls, "{}: a script ran twice", self.name);
        succeeds(&store, "key").await;
        report
    }
}

fn tell(server: &Server, command: &[&str]) {
    let () = redis::cmd(command[0]).arg(&command[1..]).query(&mut server.connection()).unwrap();
}

/// For what is not answered, or not soon.
fn tell_in_the_background(server: &Server, command: &'static [&'static str]) -> std::thread::JoinHandle<()> {
    let mut connection = server.connection();
    std::thread::spawn(move || {
        let _: Result<redis::Value, _> = redis::cmd(command[0]).arg(&command[1..]).query(&mut connection);
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_started_again() {
    let fault = Fault::new("kill -9, 1 s later started", 5, 1_000 * MS);
    let report = fault.strike(&mut Server::start(), Server::kill, Server::restart).await;
    assert!(report.waited < 1_000, "{} calls waited for a server that was gone", report.waited);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_and_continued() {
    let fault = Fault::new("SIGSTOP, 1 s later SIGCONT", 5, 1_000 * MS);
    let report = fault.strike(&mut Server::start(), |server| server.pause(), |server| server.resume()).await;
    assert!(report.waited < 2_000, "{} calls waited after the breaker should have opened", report.waited);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asleep() {
    let fault = Fault::new("DEBUG SLEEP 1", 1, 1_000 * MS);
    let mut server = Server::with(&["--enable-debug-command", "yes"]);
    fault.strike(&mut server, |server| drop(tell_in_the_background(server, &["DEBUG", "SLEEP", "1"])), |_| ()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_for_writes_is_one_outage() {
    let server = Server::start();
    let heard = Heard::default();
    let store = connected(&server.url(), heard.settings()).await;
    let mut load = Load::start(&store, 2, &["key"]);
    load.lost.measure_server(&server);
    sleep(200 * MS).await;
    tell(&server, &["CLIENT", "PAUSE", "2000", "WRITE"]);
    sleep(2_000 * MS).await;
    load.fixed();
    sleep(1_000 * MS).await;
    let samples = load.end().await;
    let report = samples.check("CLIENT PAUSE 2000 WRITE");
    assert!(report.waited < 700, "{} calls waited after the breaker should have opened", report.waited);
    eventually("it is up again", || heard.is_up()).await;
    // A machine that stops for longer than the deadline is an outage of its own.
    let is_one = if samples.lost < samples.deadline { heard.downs() == 1 } else { heard.downs() > 0 };
    assert!(is_one, "{} outages: it answers PING all the time, and runs no script", heard.downs());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_with_the_script_of_another() {
    let fault = Fault::new("BUSY for 1 s", 1, 1_000 * MS);
    let mut server = Server::with(&["--busy-reply-threshold", "100"]);
    let begin = |server: &mut Server| drop(tell_in_the_background(server, &["EVAL", "while true do end", "0"]));
    fault.strike(&mut server, begin, |server| tell(server, &["SCRIPT", "KILL"])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_forgotten() {
    let fault = Fault { settings: patient(), ..Fault::new("SCRIPT FLUSH", 2, 100 * MS) };
    let flush = |server: &mut Server| tell(server, &["SCRIPT", "FLUSH"]);
    let report = fault.strike(&mut Server::start(), flush, flush).await;
    assert_eq!(report.failed, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_forgotten() {
    let fault = Fault { settings: patient(), ..Fault::new("FLUSHALL", 2, 100 * MS) };
    let flush = |server: &mut Server| tell(server, &["FLUSHALL"]);
    let report = fault.strike(&mut Server::start(), flush, flush).await;
    assert_eq!(report.failed, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only() {
    let fault = Fault { refuses: true, ..Fault::new("READONLY for 0.5 s", 1, 500 * MS) };
    let begin = |server: &mut Server| tell(server, &["REPLICAOF", "127.0.0.1", "1"]);
    let report = fault.strike(&mut Server::start(), begin, |server| tell(server, &["REPLICAOF", "NO", "ONE"])).await;
    assert!(report.failed > 100 && report.waited < 20, "the server says no at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn out_of_memory() {
    let fault = Fault { refuses: true, ..Fault::new("OOM for 0.5 s", 1, 500 * MS) };
    let begin = |server: &mut Server| tell(server, &["CONFIG", "SET", "maxmemory", "1"]);
    let end = |server: &mut Server| tell(server, &["CONFIG", "SET", "maxmemory", "0"]);
    let report = fault.strike(&mut Server::start(), begin, end).await;
    assert!(report.failed > 100 && report.waited < 20, "the server says no at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_killed() {
    let fault = Fault::new("40 times CLIENT KILL", 5, 100 * MS);
    let begin = |server: &mut Server| {
        let mut connection = server.connection();
        for _ in 0..40 {
            let () =
                redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).query(&mut connection).unwrap();
            std::thread::sleep(25 * MS);
        }
    };
    fault.strike(&mut Server::start(), begin, |_| ()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_password() {
    let fault = Fault::new("password changed, then back", 1, 500 * MS);
    let begin = |server: &mut Server| {
        tell(server, &["CONFIG", "SET", "requirepass", "secret"]);
        // A connection stays authenticated.
        tell_with("secret", server, &["CLIENT", "KILL", "TYPE", "normal"]);
    };
    let end = |server: &mut Server| tell_with("secret", server, &["CONFIG", "SET", "requirepass", ""]);
    let report = fault.strike(&mut Server::start(), begin, end).await;
    assert!(report.failed > 100);
}

fn tell_with(password: &str, server: &Server, command: &[&str]) {
    let client = redis::Client::open(format!("redis://:{password}@127.0.0.1:{}", server.port())).unwrap();
    let () = redis::cmd(command[0]).arg(&command[1..]).query(&mut client.get_connection().unwrap()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_in_the_middle_of_answers() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let store = connected(&proxy.url(), ConnectionSettings::default()).await;
    let mut load = Load::start(&store, 10, &["key"]);
    sleep(200 * MS).await;
    // The greeting of a connection alone is thousands of bytes long.
    proxy.cut_after(9_001);
    sleep(1_000 * MS).await;
    eventually("the fault is there", || proxy.cuts() > 0).await;
    proxy.cut_after(0);
    load.fixed();
    sleep(1_000 * MS).await;
    let report = load.end().await.check("cut in the middle of answers");
    assert!(counted(&server, "key") <= report.calls, "a script ran twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let store = connected(&proxy.url(), ConnectionSettings::default()).await;
    let mut load = Load::start(&store, 2, &["key"]);
    sleep(200 * MS).await;
    proxy.hold(true);
    sleep(1_000 * MS).await;
    proxy.hold(false);
    load.fixed();
    sleep(1_000 * MS).await;
    let report = load.end().await.check("bytes vanish for 1 s");
    assert!(counted(&server, "key") <= report.calls, "a script ran twice");
    assert!(report.waited < 1_000, "{} calls waited after the breaker should have opened", report.waited);
}
