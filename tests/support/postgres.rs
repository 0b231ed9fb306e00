//! PostgreSQL servers for tests, and a PgBouncer before one. Each has a free port and stops when it is dropped.
#![allow(dead_code, reason = "each test file uses its part")]

use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::limiter::store::postgres::tokio_postgres;
pub(crate) use tower_ratelimit::limiter::store::postgres::tokio_postgres::Client;

use super::redis_server::{answering, free_port, processor_time};

/// The time that a server may take to start or to stop.
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
    /// Starts a server with an empty database.
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// Starts a server with more settings, such as `["max_connections=5"]`.
    pub(crate) fn with(settings: &[&str]) -> Self {
        let directory = directory();
        copy(template(), &directory.join("data"));
        Self::start_in(directory, settings)
    }

    /// Starts a server with an empty database, and a variable that names a file.
    pub(crate) fn with_variable(name: &str, file: &Path) -> Self {
        let directory = directory();
        copy(template(), &directory.join("data"));
        let variable = Some((name.to_owned(), file.to_owned()));
        Self { child: None, port: 0, directory, options: Vec::new(), variable }.started()
    }

    /// Starts a standby of this server, which cannot be written.
    pub(crate) fn standby(&self) -> Self {
        let directory = directory();
        let data = directory.join("data");
        let copied = command("pg_basebackup")
            .args(["--pgdata", data.to_str().unwrap(), "--write-recovery-conf", "--checkpoint", "fast"])
            .args(["--host", "127.0.0.1", "--port", &self.port.to_string(), "--username", "postgres"])
            .status();
        assert!(copied.unwrap().success(), "pg_basebackup failed");
        Self::start_in(directory, &[])
    }

    fn start_in(directory: PathBuf, settings: &[&str]) -> Self {
        let options = settings.iter().map(ToString::to_string).collect();
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
        panic!("PostgreSQL did not start on any of five ports: {}", self.log());
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        url(self.port)
    }

    /// Runs statements, and returns the first column of the rows of all.
    pub(crate) async fn query(&self, sql: &str) -> Vec<String> {
        let client = self.client().await;
        let messages = client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        let column = |message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
            _ => None,
        };
        messages.into_iter().filter_map(column).collect()
    }

    /// Returns a connection of its own.
    pub(crate) async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.url(), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    /// Kills the server and its processes with SIGKILL, as a crash does.
    pub(crate) fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let all = processes(&child);
        for process in &all {
            let _ = signal("-KILL", *process);
        }
        let _ = child.wait();
    }

    /// Stops the server as an operator does who does not wait for clients.
    pub(crate) fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        assert!(signal("-INT", child.id()), "the server runs");
        let _ = child.wait();
    }

    /// Starts the server again, on the same port and with its data.
    pub(crate) fn restart(&mut self) {
        self.stop();
        let began = Instant::now();
        // After a crash the last processes of the server may still be there for a moment.
        while !self.try_launch() {
            assert!(began.elapsed() < START, "PostgreSQL did not start again: {}", self.log());
        }
    }

    /// Stops all processes of the server with SIGSTOP: they answer nothing, and their connections stay open.
    pub(crate) fn pause(&self) {
        let child = self.child.as_ref().expect("the server runs");
        assert!(processes(child).into_iter().filter(|process| signal("-STOP", *process)).count() > 0);
    }

    pub(crate) fn resume(&self) {
        let child = self.child.as_ref().expect("the server runs");
        assert!(processes(child).into_iter().filter(|process| signal("-CONT", *process)).count() > 0);
    }

    /// Gives a directory to the user of the server.
    pub(crate) fn own(&self, directory: &Path) {
        if let Some((user, group)) = user() {
            std::os::unix::fs::chown(directory, Some(user), Some(group)).unwrap();
        }
    }

    /// Returns the processor time that the processes of the server have used, to 10 ms for each.
    pub(crate) fn processor_time(&self) -> Duration {
        processes(self.child.as_ref().expect("the server runs")).into_iter().map(processor_time).sum()
    }

    /// Returns what the server has logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.join("log")).unwrap_or_default()
    }

    fn try_launch(&mut self) -> bool {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.directory.join("log")).unwrap();
        let mut postgres = command("postgres");
        postgres.arg("-D").arg(self.directory.join("data")).args(["-p", &self.port.to_string()]);
        // Shared memory is in files of the server's folder, which is removed after it was killed.
        let memory = ["shared_buffers=16MB", "dynamic_shared_memory_type=mmap"];
        let settings =
            ["listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"].into_iter().chain(memory);
        for setting in settings.chain(self.options.iter().map(String::as_str)) {
            postgres.args(["-c", setting]);
        }
        let child = postgres
            .envs(self.variable.clone())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the program was found");
        self.child = answering(child, || is_ready(self.port));
        self.child.is_some()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// A PgBouncer that pools transactions of two connections to a server.
pub(crate) struct PgBouncer {
    child: Child,
    port: u16,
    directory: PathBuf,
}

impl PgBouncer {
    pub(crate) fn before(server: &Server) -> Self {
        let directory = directory();
        for _ in 0..5 {
            let port = free_port();
            let settings = format!(
                "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
                 listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
                 default_pool_size = 2\nlogfile = {}\n",
                server.port,
                directory.join("log").display()
            );
            let file = directory.join("pgbouncer.ini");
            std::fs::write(&file, settings).unwrap();
            let program = std::env::var("PGBOUNCER").unwrap_or_else(|_| {
                // Debian keeps it where only root's shell looks by itself.
                let debian = "/usr/sbin/pgbouncer";
                if Path::new(debian).exists() { debian.to_owned() } else { "pgbouncer".to_owned() }
            });
            let mut bouncer = Command::new(&program);
            as_user(&mut bouncer);
            let child = bouncer.arg("-q").arg(&file).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
            let child = child.unwrap_or_else(|error| {
                panic!(
                    "{program} cannot be started ({error}). Install it, on Debian with: apt-get install pgbouncer; or \
                     name the program in PGBOUNCER"
                )
            });
            if let Some(child) = answering(child, || is_ready(port)) {
                return Self { child, port, directory };
            }
        }
        panic!("PgBouncer did not start on any of five ports");
    }

    pub(crate) fn url(&self) -> String {
        url(self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn url(port: u16) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/postgres")
}

/// Returns whether a server takes connections: it answers a startup message, and with no error.
fn is_ready(port: u16) -> bool {
    use std::io::{Read, Write};
    let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { return false };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let body = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0";
    let length = u32::try_from(body.len() + 4).expect("it is short").to_be_bytes();
    let mut answer = [0];
    stream.write_all(&[&length[..], body].concat()).and_then(|()| stream.read_exact(&mut answer)).is_ok()
        && answer[0] == b'R'
}

/// Returns the process and its children.
fn processes(child: &Child) -> Vec<u32> {
    let id = child.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    std::iter::once(id).chain(children.split_whitespace().filter_map(|child| child.parse().ok())).collect()
}

fn signal(signal: &str, process: u32) -> bool {
    let kill = Command::new("kill").args([signal, &process.to_string()]).stderr(Stdio::null()).status();
    kill.is_ok_and(|status| status.success())
}

/// Returns a command of PostgreSQL, which does not run as root.
pub(crate) fn command(program: &str) -> Command {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        if let Ok(folder) = std::env::var("POSTGRES_BIN") {
            return PathBuf::from(folder);
        }
        // Debian keeps the programs of each version in a folder of its own.
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let mut debian: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
        debian.sort();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&path).chain(debian.into_iter().rev());
        // A link to one of them leads to the others.
        let found = folders.filter_map(|folder| folder.join("initdb").canonicalize().ok());
        let all = found.filter_map(|initdb| Some(initdb.parent()?.to_owned()));
        all.into_iter().find(|folder| folder.join("postgres").exists() && folder.join("pg_basebackup").exists()).expect(
            "PostgreSQL's initdb, postgres and pg_basebackup are not there. Install them, on Debian with: apt-get install \
             postgresql; or name their folder in POSTGRES_BIN",
        )
    });
    let mut command = Command::new(folder.join(program));
    as_user(&mut command);
    command
}

/// Lets a command run as another user than root.
fn as_user(command: &mut Command) {
    if let Some((user, group)) = user() {
        command.uid(user).gid(group);
    }
    command.current_dir("/");
}

/// Returns the user and the group of the servers if this process runs as root.
fn user() -> Option<(u32, u32)> {
    static USER: OnceLock<Option<(u32, u32)>> = OnceLock::new();
    let id = |arguments: &[&str]| {
        let output = Command::new("id").args(arguments).output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()?.trim().parse::<u32>().ok()
    };
    *USER.get_or_init(|| {
        if id(&["-u"]) != Some(0) {
            return None;
        }
        let of = |name: &str| Some((id(&["-u", name])?, id(&["-g", name])?));
        of("postgres").or_else(|| of("nobody"))
    })
}

/// Returns a folder with the data of a server that was never started. Tests start copies, because to make it takes
/// longer.
fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let version = command("postgres").arg("--version").output().expect("the program was found").stdout;
        let version = String::from_utf8_lossy(&version);
        let version = version.split_whitespace().nth(2).unwrap_or("unknown");
        // Tests of the library itself have no folder of their own, and those of the program have another manifest.
        let target = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
        let folder = option_env!("CARGO_TARGET_TMPDIR").map_or_else(target, PathBuf::from).join("servers");
        std::fs::create_dir_all(&folder).unwrap();
        let ready = folder.join(format!("postgres-{version}-{:?}", user().map(|user| user.0)));
        if !ready.exists() {
            let directory = directory();
            let data = directory.join("data");
            let initdb = command("initdb")
                .args(["--pgdata", data.to_str().unwrap(), "--no-sync", "--auth", "trust", "--username", "postgres"])
                .args(["--encoding", "UTF8", "--locale", "C", "--no-instructions"])
                .output()
                .unwrap();
            assert!(initdb.status.success(), "{}", String::from_utf8_lossy(&initdb.stderr));
            let copied = folder.join(format!("postgres-{}", std::process::id()));
            copy(&data, &copied);
            // Another process may have made it meanwhile.
            if std::fs::rename(&copied, &ready).is_err() {
                let _ = std::fs::remove_dir_all(&copied);
            }
            let _ = std::fs::remove_dir_all(&directory);
        }
        ready
    })
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success(), "{} is copied", from.display());
}

/// Creates a directory for one server.
fn directory() -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let directory = parent.join(format!("tower-ratelimit-postgres-{}-{number}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory); // of an earlier process that was killed
    std::fs::create_dir_all(&directory).unwrap();
    if let Some((user, group)) = user() {
        std::os::unix::fs::chown(&directory, Some(user), Some(group)).unwrap();
    }
    directory
}
