//! A process whose calendar time steps, as after a suspension or a correction, while its monotonic time passes evenly.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::{Charge, Limiter};
use tower_ratelimit::quota::Calendar;
use tower_ratelimit::{Key, Policy, Quota};

/// The variable by which a process that is started finds its clock.
pub(crate) const FILE: &str = "STEPPED_CLOCK";

/// 2031-01-31 23:59:00 UTC. February follows.
pub(crate) const BEFORE_FEBRUARY_S: i64 = 1_927_670_340;

pub(crate) const DAY_S: u64 = 86_400;

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// The calendar time of this process and of the servers that it starts, or of a server alone.
pub(crate) struct SteppedClock {
    /// The seconds by which it is ahead of the system's.
    file: File,
    path: PathBuf,
}

impl SteppedClock {
    /// Returns the clock in a process that was started for it. Otherwise it starts the test `name` again in such a
    /// process, expects it to pass, and returns `None`.
    pub(crate) fn of_test(name: &str) -> Option<Self> {
        if std::env::var_os(FILE).is_some() {
            return Some(Self::of_process());
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

    fn of_process() -> Self {
        let path = PathBuf::from(std::env::var_os(FILE).expect("the parent sets it"));
        Self { file: File::options().read(true).write(true).open(&path).expect("the parent made it"), path }
    }

    /// Makes a clock for a server that is started with its file in the variable [`FILE`].
    pub(crate) fn of_server(name: &str) -> Self {
        let path = Self::of_process().path.with_file_name(name);
        std::fs::write(&path, 0_i64.to_ne_bytes()).expect("the directory is writable");
        Self { file: File::options().read(true).write(true).open(&path).expect("it was just written"), path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Sets the calendar to a number of seconds since 1970. The part of a second stays.
    pub(crate) fn set(&self, now_s: i64) {
        self.write(now_s - system_us().div_euclid(1_000_000));
    }

    /// Returns the microseconds since 1970.
    pub(crate) fn now_us(&self) -> i64 {
        system_us() + self.ahead_s() * 1_000_000
    }

    /// Moves the calendar forward, or back.
    pub(crate) fn step(&self, by_s: i64) {
        self.write(self.ahead_s() + by_s);
    }

    fn ahead_s(&self) -> i64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, 0).expect("the file has eight bytes");
        i64::from_ne_bytes(bytes)
    }

    fn write(&self, ahead_s: i64) {
        // The processes have mapped the file, so they see it at once.
        self.file.write_all_at(&ahead_s.to_ne_bytes(), 0).expect("the file has eight bytes");
    }
}

/// Returns the calendar time of the system, which is not that of this process.
#[expect(clippy::disallowed_methods, reason = "the calendar that is stepped is the system's")]
fn system_us() -> i64 {
    let own = SteppedClock::of_process();
    loop {
        let ahead_s = own.ahead_s();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
        // Another thread may step the process's clock between the two readings.
        if own.ahead_s() == ahead_s {
            return i64::try_from(now.as_micros()).expect("it is before the end of 64 bits") - ahead_s * 1_000_000;
        }
    }
}

/// Steps the clock of a limiter's store, which shows [`BEFORE_FEBRUARY_S`], and of this process.
pub(crate) async fn step_beside<L: Limiter>(clock: &SteppedClock, limiter: &L) {
    let monthly = Plan::new(limiter, "monthly", Calendar::month());
    assert_eq!(monthly.drain().await, 5);
    assert!(monthly.take().await.1 <= 60, "it is the last minute of January");

    clock.step(120);
    monthly.expect("February", |(is_taken, reset_s)| is_taken && reset_s > 27 * DAY_S).await;
    assert_eq!(monthly.drain().await, 4, "one of five was taken");

    // Back to January: what was used in February stays used, and January is not given again.
    clock.step(-120);
    for _ in 0..8 {
        let (is_taken, reset_s) = monthly.take().await;
        assert!(!is_taken && reset_s <= 29 * DAY_S, "{reset_s}");
    }

    // The machine is suspended at 20:00, and wakes at 4:00 on the next day.
    clock.set(BEFORE_FEBRUARY_S + 60 + 20 * 3_600);
    let daily = Plan::new(limiter, "daily", Calendar::day());
    assert_eq!(daily.drain().await, 5);
    assert!(daily.take().await.1 <= 4 * 3_600, "it is the evening");
    clock.step(8 * 3_600);
    daily.expect("the next day", |(is_taken, reset_s)| is_taken && reset_s > 19 * 3_600).await;
    assert_eq!(daily.drain().await, 4, "one of five was taken");

    // A process that begins while the store's calendar is wrong by years, and is then corrected.
    clock.set(5);
    let late = Plan::new(limiter, "late", Calendar::month());
    assert_eq!(late.drain().await, 5);
    assert!(late.take().await.1 > 30 * DAY_S, "it is January 1970");
    clock.set(BEFORE_FEBRUARY_S);
    late.expect("the correction", |(is_taken, reset_s)| is_taken && reset_s <= 60).await;
    assert_eq!(late.drain().await, 4, "one of five was taken");
}

struct Plan<'a, L> {
    limiter: &'a L,
    policy: Policy,
    key: Key,
}

impl<'a, L: Limiter> Plan<'a, L> {
    fn new(limiter: &'a L, name: &str, calendar: Calendar) -> Self {
        let quota = Quota::calendar(5, calendar).expect("it is possible");
        let policy = Policy::new(name, quota).expect("it is a name");
        Self { limiter, policy, key: Key::global() }
    }

    /// Takes a unit if it can. Returns whether it did, and the seconds until the window ends.
    async fn take(&self) -> (bool, u64) {
        let decision = self
            .limiter
            .take(&[Charge::new(&self.policy, &self.key)])
            .await
            .unwrap_or_else(|_| panic!("the store is there"));
        let reset = decision.charges()[0].reset_after();
        (decision.is_allowed(), reset.map_or(0, |reset| reset.as_secs()))
    }

    /// Takes what is left, and returns it.
    async fn drain(&self) -> usize {
        let mut taken = 0;
        for _ in 0..8 {
            taken += usize::from(self.take().await.0);
        }
        taken
    }

    /// Waits until the store has another window. A denial is remembered for a second at most.
    async fn expect(&self, what: &str, is_it: impl Fn((bool, u64)) -> bool) {
        let began = Instant::now();
        loop {
            let found = self.take().await;
            if is_it(found) {
                return;
            }
            assert!(began.elapsed() < LONG, "{what} is not there: {found:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}
