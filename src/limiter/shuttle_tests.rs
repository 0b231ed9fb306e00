//! Random schedules of many callers in a line. `tests/campaigns.sh` has the command that runs them.

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread;

use super::ask_lines::{AskLines, AskTurn};
use super::place_lines::LineStep;
use crate::base::sampling::explore;
use crate::clock::{StoppedTimer, Timer};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

/// The end of a caller's turn.
#[derive(Clone, Copy)]
enum Caller {
    IsAdmitted,
    Leaves,
    LeavesBeforeItsTurn,
}

/// A lost wake is a deadlock, which shuttle reports.
#[test]
fn line_of_many_threads_hands_each_turn_on() {
    explore(2_000, || {
        let (lines, order) = (Arc::new(AskLines::default()), Arc::new(Mutex::new(Vec::new())));
        let callers =
            [Caller::IsAdmitted, Caller::IsAdmitted, Caller::IsAdmitted, Caller::Leaves, Caller::LeavesBeforeItsTurn];
        let threads = callers.map(|caller| {
            let (lines, order) = (Arc::clone(&lines), Arc::clone(&order));
            thread::spawn(move || {
                let timer: Arc<dyn Timer> = Arc::new(StoppedTimer);
                let policy = Policy::new("jobs", Quota::per_second(1)).expect("it is a name");
                for _ in 0..2 {
                    let mut turn = AskTurn::join(&lines, &timer, (&policy, &Key::global(), 1), 1, None);
                    if matches!(caller, Caller::LeavesBeforeItsTurn) {
                        let polled = block_on(poll_fn(|cx| Poll::Ready(turn.poll(cx).is_ready())));
                        thread::yield_now();
                        drop((turn, polled));
                        continue;
                    }
                    assert_eq!(block_on(poll_fn(|cx| turn.poll(cx))), LineStep::Asks);
                    order.lock().expect("no thread panics").push(turn.number());
                    thread::yield_now();
                    match caller {
                        Caller::IsAdmitted => turn.leave_admitted(0, Duration::ZERO),
                        Caller::Leaves | Caller::LeavesBeforeItsTurn => drop(turn),
                    }
                }
            })
        });
        for thread in threads {
            thread.join().expect("the thread ends");
        }
        let order = order.lock().expect("no thread panics");
        assert!(order.is_sorted(), "in the order in which they joined: {order:?}");
        assert_eq!(order.len(), 8);
        assert!(lines.is_empty());
    });
}
