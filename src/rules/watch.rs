//! A thread that looks for a new version of a rules file.
//!
//! The thread polls, because the operating system's watchers miss changes of files that Kubernetes mounts: such a file
//! is a link to another link, which Kubernetes replaces. The thread reads the whole file each time, because a rules
//! file is small, and its content may change while its time stamp stays the same.

use std::io;
use std::sync::Weak;
use std::thread;
use std::time::Duration;

use super::store::RuleStore;

/// After a change, a file is used only if its content stays the same for this time, because a writer that pauses may
/// not have finished.
const SETTLES: Duration = Duration::from_secs(1);

/// Starts the thread. The thread ends after the rules and all their layers and services were dropped.
pub(super) fn start(store: Weak<RuleStore>, every: Duration) -> io::Result<()> {
    let watch = move || {
        loop {
            thread::sleep(every);
            let Some(rules) = store.upgrade() else { return };
            let reading = rules.read();
            if rules.has_read(&reading) {
                continue;
            }
            drop(rules);
            thread::sleep(SETTLES);
            let Some(store) = store.upgrade() else { return };
            // A limiter is the application's code and may panic. After a panic, the file is read again at the next
            // check.
            let reload = || store.reload(|again| *again == reading);
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(reload)).is_err() {
                store.forget_reading();
            }
        }
    };
    thread::Builder::new().name("rate-limit-rules".to_owned()).spawn(watch).map(drop)
}
