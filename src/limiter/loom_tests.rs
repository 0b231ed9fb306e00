//! Models of the lines in which callers wait: two threads, one promise each.
//!
//! `tests/all.sh` has the command that runs them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use loom::thread;

use super::ask_lines::{AskLines, AskTurn};
use super::place_lines::LineStep;
use crate::clock::{StoppedTimer, Timer};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

#[derive(Default)]
struct WasWoken(AtomicBool);

impl Wake for WasWoken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn join(lines: &Arc<AskLines>) -> AskTurn {
    let timer: Arc<dyn Timer> = Arc::new(StoppedTimer);
    let policy = Policy::new("jobs", Quota::per_second(1)).expect("it is a name");
    AskTurn::join(lines, &timer, (&policy, &Key::global(), 1), 1, None)
}

fn asks(turn: &mut AskTurn, waker: &Waker) -> bool {
    turn.poll(&mut Context::from_waker(waker)) == Poll::Ready(LineStep::Asks)
}

/// The ways in which the first caller leaves its line.
const ENDS: [fn(AskTurn); 4] = [
    |turn| turn.leave_admitted(0, Duration::ZERO),
    |turn| turn.leave_admitted(1, Duration::ZERO),
    AskTurn::leave_failed,
    drop,
];

#[test]
fn caller_that_joins_a_line_misses_no_turn() {
    for has_asked in [true, false] {
        for end in ENDS {
            let mut model = loom::model::Builder::new();
            model.preemption_bound = Some(3);
            model.check(move || {
                let lines = Arc::new(AskLines::default());
                let mut first = join(&lines);
                assert!(!has_asked || asks(&mut first, Waker::noop()), "it is alone");
                let other = Arc::clone(&lines);
                let second = thread::spawn(move || {
                    let mut turn = join(&other);
                    let woken = Arc::new(WasWoken::default());
                    let asks = asks(&mut turn, &Waker::from(Arc::clone(&woken)));
                    (turn, woken, asks)
                });
                end(first);
                let (mut turn, woken, has_turn) = second.join().expect("the thread ends");
                assert!(has_turn || woken.0.load(Ordering::Relaxed), "it has its turn, or is woken for it");
                assert!(has_turn || asks(&mut turn, Waker::noop()));
                drop(turn);
                assert!(lines.is_empty());
            });
        }
    }
}
