//! The program as a server, and proxies, each a process in a folder of its own.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The time in which a process has to start on a busy machine.
const START: Duration = Duration::from_secs(60);

/// A folder that is removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tower-ratelimit-serve-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&path); // of an earlier run that was killed
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Puts a finished file in the place of another one.
    pub(crate) fn write(&self, name: &str, content: &str) -> PathBuf {
        let (new, path) = (self.0.join(format!("{name}.new")), self.0.join(name));
        fs::write(&new, content).unwrap();
        fs::rename(new, &path).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns a file of `examples/serve`.
pub(crate) fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/serve").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the rules of the example by the hour, so that nothing comes back while a test runs.
pub(crate) fn rules() -> String {
    example("rules.yaml").replace("per minute", "per hour")
}

/// The program, which serves.
pub(crate) struct Server {
    child: Child,
    pub(crate) folder: Folder,
    pub(crate) asked: SocketAddr,
    pub(crate) admin: SocketAddr,
    log: Arc<Mutex<Vec<Value>>>,
    /// Reads the log, until the server has ended.
    reader: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the rules of a text.
    pub(crate) fn start(rules: &str, arguments: &[&str]) -> Self {
        Self::start_in(Folder::new(), rules, arguments)
    }

    pub(crate) fn start_in(folder: Folder, rules: &str, arguments: &[&str]) -> Self {
        folder.write("rules.yaml", rules);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit"));
        command.current_dir(folder.path()).args(["serve", "rules.yaml", "--log", "json"]);
        for (flag, address) in [("--listen", "127.0.0.1:0"), ("--admin", "127.0.0.1:0")] {
            if !arguments.contains(&flag) {
                command.args([flag, address]);
            }
        }
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&log);
        let reader = std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or(Value::String(line));
                lines.lock().unwrap().push(line);
            }
        });
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Self { child, folder, asked: any, admin: any, log, reader: Some(reader) };
        server.asked = server.address("listen");
        server.admin = server.address("admin");
        server
    }

    fn address(&mut self, event: &str) -> SocketAddr {
        let line = self.wait_for_line(|line| line["event"] == event);
        line["address"].as_str().unwrap().parse().unwrap()
    }

    /// Waits for a line of the log.
    pub(crate) fn wait_for_line(&mut self, is_it: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + START;
        loop {
            let ended = self.ended();
            if let Some(line) = self.log.lock().unwrap().iter().find(|line| is_it(line)) {
                return line.clone();
            }
            assert!(ended.is_none() && Instant::now() < deadline, "{ended:?}: {:?}", self.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the status of the process if it has ended. All lines of the log have been read then.
    fn ended(&mut self) -> Option<ExitStatus> {
        let ended = self.child.try_wait().unwrap()?;
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        Some(ended)
    }

    pub(crate) fn lines(&self) -> Vec<Value> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    /// Waits for the end. Returns the exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + START;
        loop {
            if let Some(status) = self.ended() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the server did not end: {:?}", self.lines());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A proxy in front of an application.
pub(crate) struct Proxy {
    child: Child,
    _folder: Folder,
    pub(crate) address: SocketAddr,
}

impl Proxy {
    /// Starts a program whose file of configuration was written into a folder, and waits until it accepts connections.
    pub(crate) fn start(mut command: Command, folder: Folder, port: u16, install: &str) -> Self {
        // On Debian only root's path has some of them.
        let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
        let output = folder.path().join("output.log");
        let log = fs::File::create(&output).unwrap();
        command.env("PATH", path).current_dir(folder.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}\n{install}"));
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut proxy = Self { child, _folder: folder, address };
        let deadline = Instant::now() + START;
        while TcpStream::connect(address).is_err() {
            let ended = proxy.child.try_wait().unwrap();
            let said = || fs::read_to_string(&output).unwrap_or_default();
            assert!(ended.is_none() && Instant::now() < deadline, "{command:?} did not start: {}", said());
            std::thread::sleep(Duration::from_millis(10));
        }
        proxy
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
