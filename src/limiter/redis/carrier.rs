//! Carries checks to the store: encodes them, runs the script, reads the answers.

use std::sync::Arc;

use smallvec::SmallVec;

use super::error::{RedisError, RedisErrorKind};
use super::queue::Carrier;
use super::store::{Store, Until};
use super::wire::{self, Answer, Ask};
use crate::clock::Clock;

/// The store, and the clock that it is told, if it does not use its own.
pub(super) struct Courier {
    pub(super) store: Store,
    pub(super) clock: Option<Arc<dyn Clock>>,
}

impl Carrier for Courier {
    type Ask = Ask;
    type Answer = Answer;

    async fn carry(&self, lane: u16, asks: Vec<Ask>) -> Result<Vec<Answer>, RedisError> {
        let slot = asks.first().map_or(lane, Ask::slot);
        let until = self.store.until();
        let mut answers = self.run(&asks.iter().collect::<SmallVec<[&Ask; 8]>>(), slot, until, false).await?;
        // What was written under another quota is asked again, with the script that can convert it. Nothing was done.
        let again: SmallVec<[usize; 8]> =
            (0..answers.len()).filter(|index| matches!(answers[*index], Answer::Again)).collect();
        if !again.is_empty() {
            let asks: SmallVec<[&Ask; 8]> = again.iter().filter_map(|index| asks.get(*index)).collect();
            match self.run(&asks, slot, until, true).await {
                Ok(told) => again.into_iter().zip(told).for_each(|(index, answer)| answers[index] = answer),
                // The others have their answers, and what they were charged.
                Err(error) => again.into_iter().for_each(|index| answers[index] = Answer::Failed(error.clone())),
            }
        }
        Ok(answers)
    }
}

impl Courier {
    async fn run(&self, asks: &[&Ask], slot: u16, until: Until, full: bool) -> Result<Vec<Answer>, RedisError> {
        let call = wire::call(asks, self.clock.as_ref().map(|clock| clock.now()), full);
        let reply = self.store.run_until(&call, slot, until).await?;
        let answers = wire::answers(asks, reply.clone())?;
        for answer in &answers {
            match answer {
                Answer::Failed(error) if error.kind() == RedisErrorKind::Misconfigured => self.store.lacks_right(error),
                _ => {}
            }
        }
        #[cfg(test)]
        super::processes::log(&reply, asks, &answers);
        Ok(answers)
    }
}
