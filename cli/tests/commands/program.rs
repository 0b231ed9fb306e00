//! Running the program in a folder of its own.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// The result of a run of the program.
#[derive(Debug, PartialEq)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A folder that is removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tower-ratelimit-cli-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&path); // of an earlier run that was killed
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Makes a folder with one file, `rules.yaml`.
    pub(crate) fn with_rules(text: &str) -> Self {
        let folder = Self::new();
        folder.write("rules.yaml", text);
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.0.join(name), content).unwrap();
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit"));
        command.current_dir(&self.0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, arguments: &[impl AsRef<OsStr>]) -> Run {
        self.run_with(arguments, b"")
    }

    /// Runs the program with this input. Fails if it takes longer than a minute.
    pub(crate) fn run_with(&self, arguments: &[impl AsRef<OsStr>], input: &'static [u8]) -> Run {
        let mut child = self.command().args(arguments).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        std::thread::spawn(move || drop(stdin.write_all(input))); // it may not be read
        let id = child.id();
        let (done, ended) = mpsc::channel();
        std::thread::spawn(move || done.send(child.wait_with_output().unwrap()));
        let Ok(output) = ended.recv_timeout(Duration::from_secs(60)) else {
            let _ = Command::new("kill").arg(id.to_string()).status();
            panic!("the program did not end");
        };
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the program prints UTF-8");
        let run = Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) };
        assert!(!run.err.contains("panicked"), "{run:?}");
        run
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
