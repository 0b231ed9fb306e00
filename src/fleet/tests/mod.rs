//! The promises of a fleet, over a text in memory that fails as a test asks.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::base::sync::{Mutex, lock};
use crate::clock::ManualClock;
use crate::error::BoxError;
use crate::limiter::{BoxFuture, SharedText, TextRead, VersionedText};
use crate::mode::Mode;

mod changes;
mod file;
mod json;
mod reading;
#[cfg(feature = "rules")]
mod rules;
#[cfg(feature = "rules")]
mod slow_rules;

/// The outcome of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Fault {
    #[default]
    None,
    /// The call fails before it has an effect.
    Away,
    /// Swaps are made, and the answers are lost.
    LostAnswers,
    /// The call has no answer.
    Silent,
    /// A swap and all calls after it have no answer.
    SilentFromSwap,
}

#[derive(Default)]
struct Kept {
    text: Option<VersionedText>,
    fault: Fault,
    loads: usize,
    swaps: usize,
    reports: Vec<VersionedText>,
}

#[derive(Clone, Default)]
struct InMemory(Arc<Mutex<Kept>>);

impl InMemory {
    fn set_fault(&self, fault: Fault) {
        lock(&self.0).fault = fault;
    }

    /// Runs a call, and says what becomes of it.
    async fn run<T>(&self, run: impl FnOnce(&mut Kept) -> T) -> Result<T, BoxError> {
        tokio::task::yield_now().await;
        let fault = lock(&self.0).fault;
        match fault {
            Fault::Away => return Err("the store is away".into()),
            Fault::Silent => std::future::pending().await,
            Fault::SilentFromSwap => {
                self.set_fault(Fault::Silent);
                std::future::pending().await
            }
            Fault::None | Fault::LostAnswers => {}
        }
        let done = run(&mut lock(&self.0));
        if fault == Fault::LostAnswers { Err("the answer is lost".into()) } else { Ok(done) }
    }
}

impl SharedText for InMemory {
    fn load(&self, known: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
        let load = move |kept: &mut Kept| {
            kept.loads += 1;
            let is_known = kept.text.as_ref().map(|text| text.version) == known;
            if is_known { TextRead::Unchanged } else { TextRead::Changed(kept.text.clone()) }
        };
        // Reading is not lost, so that a lost answer to a swap is found out.
        Box::pin(async move {
            let fault = lock(&self.0).fault;
            let is_read = matches!(fault, Fault::LostAnswers | Fault::SilentFromSwap);
            if is_read { Ok(load(&mut lock(&self.0))) } else { self.run(load).await }
        })
    }

    fn swap<'a>(&'a self, expect: Option<u128>, next: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(self.run(move |kept| {
            let is_expected = kept.text.as_ref().map(|text| text.version) == expect;
            if is_expected {
                kept.swaps += 1;
                kept.text = Some(next.clone());
            }
            is_expected
        }))
    }

    fn put_report<'a>(
        &'a self,
        _: usize,
        report: &'a VersionedText,
        _: Duration,
    ) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(self.run(move |kept| {
            kept.reports.push(report.clone());
            true
        }))
    }
}

async fn fleet(text: &InMemory, clock: &ManualClock) -> Fleet {
    Fleet::over(Arc::new(text.clone()), Arc::new(clock.clone())).await.unwrap()
}

/// Makes two processes with one store.
async fn processes() -> (InMemory, ManualClock, [Fleet; 2]) {
    let (text, clock) = (InMemory::default(), ManualClock::new());
    let both = [fleet(&text, &clock).await, fleet(&text, &clock).await];
    (text, clock, both)
}

/// Lets the next reading happen.
async fn second() {
    tokio::time::sleep(Duration::from_millis(1_001)).await;
}

fn shadow() -> [FleetChange; 1] {
    [FleetChange::mode("client", Mode::Shadow)]
}
