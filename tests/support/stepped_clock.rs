//! A process whose calendar time steps, as after a suspension or a correction, while its monotonic time passes evenly.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

const FILE: &str = "STEPPED_CLOCK";

/// The calendar time of this process, and of the servers that it starts.
pub(crate) struct SteppedClock(File);

impl SteppedClock {
    /// Returns the clock in a process that was started for it. Otherwise it starts the test `name` again in such a
    /// process, expects it to pass, and returns `None`.
    pub(crate) fn of_test(name: &str) -> Option<Self> {
        if let Some(file) = std::env::var_os(FILE) {
            let file = File::options().read(true).write(true).open(file).expect("the parent made it");
            return Some(Self(file));
        }
        let directory =
            std::env::temp_dir().join(format!("stepped-clock-{}-{}", name.replace(':', "-"), std::process::id()));
        std::fs::create_dir_all(&directory).expect("the temporary directory is writable");
        let [library, file] = ["clock.so", "ahead"].map(|name| directory.join(name));
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/support/stepped_clock.c");
        let compiler = Command::new("cc").args(["-O1", "-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        assert!(compiler.expect("cc is there, to link Rust").success());
        std::fs::write(&file, 0_i64.to_ne_bytes()).expect("the directory is writable");
        let this = std::env::current_exe().expect("the test knows its own file");
        let mut child = Command::new(this);
        child.args(["--exact", name, "--nocapture"]).env("LD_PRELOAD", &library).env(FILE, &file);
        let passed = child.status().expect("the test starts itself").success();
        std::fs::remove_dir_all(&directory).expect("it is still there");
        assert!(passed, "{name} failed in its process");
        None
    }

    /// Sets the calendar to a number of seconds since 1970.
    #[expect(clippy::disallowed_methods, reason = "the calendar that is stepped is the system's")]
    pub(crate) fn set(&self, now_s: i64) {
        let now_before_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs().cast_signed());
        let before = self.ahead_s();
        self.write(before + now_s - now_before_s);
    }

    /// Moves the calendar forward, or back.
    pub(crate) fn step(&self, by_s: i64) {
        self.write(self.ahead_s() + by_s);
    }

    fn ahead_s(&self) -> i64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, 0).expect("the file has eight bytes");
        i64::from_ne_bytes(bytes)
    }

    fn write(&self, ahead_s: i64) {
        // The processes have mapped the file, so they see it at once.
        self.0.write_all_at(&ahead_s.to_ne_bytes(), 0).expect("the file has eight bytes");
    }
}
