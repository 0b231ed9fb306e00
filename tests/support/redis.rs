//! Redis servers for tests. Each has a free port and stops when it is dropped.
#![allow(dead_code, reason = "each test file uses its part")]

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The time that a server may take to start.
const START: Duration = Duration::from_secs(60);

/// A server. Dropping it kills it, even a stopped one, and removes its directory.
pub(crate) struct Server {
    child: Option<Child>,
    port: u16,
    directory: PathBuf,
    options: Vec<String>,
    /// A variable of its environment.
    variable: Option<(String, PathBuf)>,
}

impl Server {
    /// Starts a server that stores nothing on disk.
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// Starts a server with more options, such as `["--requirepass", "secret"]`.
    pub(crate) fn with(options: &[&str]) -> Self {
        Self::start_in(directory(), options.iter().map(ToString::to_string).collect())
    }

    /// Starts a server with a variable that names a file.
    pub(crate) fn with_variable(name: &str, file: &Path) -> Self {
        let variable = Some((name.to_owned(), file.to_owned()));
        Self { child: None, port: 0, directory: directory(), options: Vec::new(), variable }.started()
    }

    /// Starts a sentinel with these lines in its configuration file, which it rewrites.
    pub(crate) fn sentinel(lines: &[String]) -> Self {
        let directory = directory();
        let file = directory.join("sentinel.conf");
        std::fs::write(&file, lines.join("\n") + "\n").unwrap();
        Self::start_in(directory, vec![file.to_str().unwrap().to_owned(), "--sentinel".to_owned()])
    }

    fn start_in(directory: PathBuf, options: Vec<String>) -> Self {
        Self { child: None, port: 0, directory, options, variable: None }.started()
    }

    fn started(mut self) -> Self {
        // Another process may take the port between its choice and the start.
        for _ in 0..5 {
            self.port = free_port();
            if self.try_launch() {
                return self;
            }
        }
        panic!("{} did not start on any of five ports", program());
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns a connection of another client library than the tested one.
    pub(crate) fn connection(&self) -> redis::Connection {
        redis::Client::open(self.url()).unwrap().get_connection_with_timeout(START).unwrap()
    }

    /// Returns the processor time that the server has used, to 10 ms.
    pub(crate) fn processor_time(&self) -> Duration {
        processor_time(self.child.as_ref().expect("the server runs").id())
    }

    /// Kills the server with SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts the server again on the same port, with what its options have kept: usually an empty database.
    pub(crate) fn restart(&mut self) {
        self.kill();
        assert!(self.try_launch(), "{} did not start again on port {}", program(), self.port);
    }

    /// Stops the process with SIGSTOP: it answers nothing, and its connections stay open.
    pub(crate) fn pause(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn resume(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let child = self.child.as_ref().expect("the server runs");
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
    }

    fn try_launch(&mut self) -> bool {
        // A configuration file precedes all options.
        let first = usize::from(self.options.first().is_some_and(|option| !option.starts_with("--")));
        let child = Command::new(program())
            .args(&self.options[..first])
            .args([
                "--port",
                &self.port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
            ])
            .arg(&self.directory)
            .args(&self.options[first..])
            .envs(self.variable.clone())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = match child {
            Ok(child) => child,
            Err(error) => panic!(
                "{} cannot be started ({error}). Install Redis, on Debian with: apt-get install redis-server; or name \
                 its program in REDIS_SERVER",
                program()
            ),
        };
        self.child = answering(child, || self.answers());
        self.child.is_some()
    }

    /// Returns whether the server answers. An error about a missing password is an answer, too.
    fn answers(&self) -> bool {
        use std::io::{Read, Write};
        let Ok(mut stream) = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)) else { return false };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
        let mut answer = [0; 64];
        let read = stream.write_all(b"PING\r\n").and_then(|()| stream.read(&mut answer));
        read.is_ok_and(|read| answer[..read].starts_with(b"+PONG") || answer[..read].starts_with(b"-NOAUTH"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Waits until a server that was just started answers. Returns `None` if it has ended, or does not answer in time.
pub(crate) fn answering(mut server: Child, answers: impl Fn() -> bool) -> Option<Child> {
    let began = Instant::now();
    while began.elapsed() < START {
        if server.try_wait().unwrap().is_some() {
            return None;
        }
        if answers() {
            return Some(server);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = server.kill();
    let _ = server.wait();
    None
}

/// Creates a directory for one server.
fn directory() -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    // Servers of a cluster wait for the disk when they vote, and answer nothing meanwhile.
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let directory = parent.join(format!("tower-ratelimit-redis-{}-{number}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory); // of an earlier process that was killed
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// Returns the server's program: the one in REDIS_SERVER, or `redis-server` on the path.
fn program() -> String {
    std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

/// Returns a port at which nothing listens, of those that this process has for itself.
///
/// It is below those that the system gives to connections. A client that tries again and again to reach a server that
/// is away would otherwise get that very port for its own end some day: then it is connected with itself, and the
/// server cannot have its port back.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    static BLOCK: OnceLock<(u16, TcpListener)> = OnceLock::new();
    // Servers of a cluster also use the port 10,000 above.
    const FIRST: u16 = 11_000;
    const EACH: u16 = 400;
    const BLOCKS: u16 = 25;
    // A server that was killed wants its port back, so no other process may take it meanwhile. The process that listens
    // at the first port of a block has the others.
    let (first, _) = BLOCK.get_or_init(|| {
        let begin = u16::try_from(std::process::id() % u32::from(BLOCKS)).expect("there are fewer");
        (0..BLOCKS)
            .map(|block| FIRST + (begin + block) % BLOCKS * EACH)
            .find_map(|first| Some((first, TcpListener::bind((Ipv4Addr::LOCALHOST, first)).ok()?)))
            .expect("fewer processes than blocks of ports")
    });
    loop {
        let next = NEXT.fetch_add(1, Ordering::Relaxed) % u32::from(EACH - 1);
        let port = first + 1 + u16::try_from(next).expect("there are fewer");
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

/// Returns the processor time that a process and its children that have ended have used, to 10 ms. It is zero for a
/// process that has ended.
pub(crate) fn processor_time(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name of the program is in parentheses, and may have blanks in it.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks = fields.skip(11).take(4).filter_map(|ticks| ticks.parse::<u64>().ok());
    Duration::from_millis(10 * ticks.sum::<u64>())
}
