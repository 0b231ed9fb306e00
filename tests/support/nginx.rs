//! An nginx in front of an application. It runs as the test's own user, in a directory of its own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

const INSTALL: &str = "nginx is missing. Install it, on Debian with: apt-get install nginx-light";

/// An nginx whose servers listen on sockets in its directory. Dropping it kills it.
pub(crate) struct Nginx {
    child: Child,
    directory: PathBuf,
}

impl Nginx {
    /// Starts an nginx with these servers, which a test names, and waits until it accepts connections on each of these
    /// sockets.
    pub(crate) async fn start(name: &str, sockets: &[&str], servers: impl FnOnce(&Path) -> String) -> Self {
        let directory = std::env::temp_dir().join(format!("tower-ratelimit-nginx-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory); // of an earlier run that was killed
        std::fs::create_dir_all(&directory).expect("the temporary directory can be written to");
        std::fs::write(directory.join("nginx.conf"), config(&servers(&directory))).expect("it was just made");
        let program = std::env::var("NGINX").unwrap_or_else(|_| "nginx".to_owned());
        // On Debian only root's path has it.
        let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
        let child = Command::new(program)
            .env("PATH", path)
            .arg("-p")
            .arg(&directory)
            .args(["-c", "nginx.conf", "-e", "error.log"])
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(directory.join("stderr.log")).expect("it was just made"))
            .spawn()
            .unwrap_or_else(|error| panic!("{error}\n{INSTALL}"));
        let mut nginx = Self { child, directory };
        let deadline = Instant::now() + Duration::from_secs(30);
        for socket in sockets {
            while UnixStream::connect(nginx.socket(socket)).await.is_err() {
                let ended = nginx.child.try_wait().expect("it is a child");
                assert!(ended.is_none() && Instant::now() < deadline, "nginx did not start: {}", nginx.errors());
                sleep(Duration::from_millis(10)).await;
            }
        }
        nginx
    }

    /// Returns the number of its process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn errors(&self) -> String {
        ["stderr.log", "error.log"]
            .map(|log| std::fs::read_to_string(self.directory.join(log)).unwrap_or_default())
            .concat()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn config(servers: &str) -> String {
    let temporary =
        ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|of| format!("{of}_temp_path temp;\n")).concat();
    format!(
        "daemon off; master_process off; pid pid; error_log error.log;
         events {{ worker_connections 4096; }}
         http {{ access_log off; {temporary} {servers} }}\n"
    )
}
