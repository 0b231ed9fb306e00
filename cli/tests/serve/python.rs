//! Virtual environments of Python below `target`, with packages of PyPI.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};

use crate::wait::LONG;

/// Runs a command that has to succeed. Returns its standard output.
pub(crate) fn run(command: &mut Command, install: &str) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}\n{install}"));
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{command:?}: {out}\n{err}\n{install}");
    out
}

/// Returns the folder of an environment with the packages of a file, which is made once.
pub(crate) fn environment(name: &str, requirements: &Path, options: &[&str], install: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !environment.join("complete").is_file() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment), install);
        let mut pip = Command::new(environment.join("bin/python"));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--quiet"]).args(options);
        run(pip.arg("--requirement").arg(requirements), install);
        std::fs::write(environment.join("complete"), "").unwrap();
    }
    environment
}

/// A program that runs beside the test, and says something now and then.
pub(crate) struct Client {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Client {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, lines }
    }

    /// Returns the next line that it writes.
    pub(crate) fn line(&self) -> String {
        self.lines.recv_timeout(LONG).unwrap_or_else(|error| panic!("the client says nothing: {error}"))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
