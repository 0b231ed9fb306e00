//! Carries checks to the store: encodes them, runs the script, reads the answers.
//!
//! While a slot is moved, some of its keys are on one server and some on another, perhaps for minutes, and a call for both
//! runs on neither. Then each key is asked for by itself, and is found wherever it is: checks of different keys share no
//! call, and a check of several keys is decided as one of several slots is.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;

use super::error::{RedisError, RedisErrorKind};
use super::keys::Stored;
use super::queue::Carrier;
use super::store::{Ran, Store, Until};
use super::wire::{self, Answer, Ask, Pieces};
use crate::clock::Clock;

/// The store, and the clock that it is told, if it does not use its own.
pub(super) struct Courier {
    pub(super) store: Store,
    pub(super) clock: Option<Arc<dyn Clock>>,
    /// Whether checks of several keys are always decided key by key.
    #[cfg(test)]
    pub(super) in_pieces: std::sync::atomic::AtomicBool,
}

impl Carrier for Courier {
    type Ask = Ask;
    type Answer = Answer;

    async fn carry(&self, lane: u16, asks: Vec<Ask>) -> Result<Vec<Answer>, RedisError> {
        let until = self.store.until();
        let asks: SmallVec<[&Ask; 8]> = asks.iter().collect();
        let slot = asks.first().map_or(lane, |ask| ask.slot());
        #[cfg(test)]
        if self.in_pieces.load(std::sync::atomic::Ordering::Relaxed) {
            let (all, mut answers): (Vec<_>, Vec<_>) = (0..asks.len()).map(|index| (index, Answer::Elsewhere)).unzip();
            Box::pin(self.one_by_one(&asks, &all, slot, until, &mut answers)).await;
            return Ok(answers);
        }
        let mut answers = self.answers(&asks, slot, until).await?;
        let apart: Vec<usize> =
            (0..answers.len()).filter(|index| matches!(answers[*index], Answer::Elsewhere)).collect();
        if !apart.is_empty() {
            Box::pin(self.one_by_one(&asks, &apart, slot, until, &mut answers)).await;
        }
        Ok(answers)
    }
}

impl Courier {
    /// The answers. Those whose keys are not all on one server are that they are elsewhere.
    async fn answers(&self, asks: &[&Ask], slot: u16, until: Until) -> Result<Vec<Answer>, RedisError> {
        let mut answers = self.run(asks, slot, until, false).await?;
        // What was written under another quota is asked again, with the script that can convert it. Nothing was done.
        let again: SmallVec<[usize; 8]> =
            (0..answers.len()).filter(|index| matches!(answers[*index], Answer::Again)).collect();
        if !again.is_empty() {
            let asks: SmallVec<[&Ask; 8]> = again.iter().filter_map(|index| asks.get(*index).copied()).collect();
            match self.run(&asks, slot, until, true).await {
                Ok(told) => again.into_iter().zip(told).for_each(|(index, answer)| answers[index] = answer),
                // The others have their answers, and what they were charged.
                Err(error) => again.into_iter().for_each(|index| answers[index] = Answer::Failed(error.clone())),
            }
        }
        Ok(answers)
    }

    /// Finds out, within this time, whether the user has the rights that checks need.
    ///
    /// # Errors
    /// `Misconfigured` if it has not, with the names of those that are missing.
    pub(super) async fn check_rights(&self, key: &Stored, within: Duration) -> Result<(), RedisError> {
        let call = wire::rights(key, self.clock.is_none());
        let Ran::Replied(reply) = self.store.run_until(&call, key.slot, Until::after(within)).await? else {
            return Ok(()); // a script with one key is never apart
        };
        match wire::missing_rights(&reply)? {
            "" => Ok(()),
            rights => Err(self.store.lacks(key.slot, rights)),
        }
    }

    async fn run(&self, asks: &[&Ask], slot: u16, until: Until, full: bool) -> Result<Vec<Answer>, RedisError> {
        let call = wire::call(asks, self.clock.as_ref().map(|clock| clock.now()), full);
        let reply = match self.store.run_until(&call, slot, until).await? {
            Ran::Replied(reply) => reply,
            Ran::Apart => return Ok(asks.iter().map(|_| Answer::Elsewhere).collect()),
        };
        let mut answers = wire::answers(asks, reply.clone()).inspect_err(|error| {
            self.store.failed(error);
            self.store.garbled(slot);
        })?;
        for answer in &mut answers {
            match answer {
                Answer::Refused(words) => *answer = Answer::Failed(self.store.refused(slot, words)),
                Answer::Failed(error) => self.store.failed(error),
                _ => {}
            }
        }
        #[cfg(test)]
        super::processes::log(&reply, asks, &answers);
        Ok(answers)
    }

    /// Answers those `apart`: checks of one key together, and each check of several keys key by key.
    async fn one_by_one(&self, asks: &[&Ask], apart: &[usize], slot: u16, until: Until, answers: &mut [Answer]) {
        let mut groups: Vec<SmallVec<[usize; 4]>> = Vec::new();
        for index in apart {
            let key = asks[*index].only_key();
            let same = |group: &&mut SmallVec<[usize; 4]>| key.is_some() && asks[group[0]].only_key() == key;
            match groups.iter_mut().find(same) {
                Some(group) => group.push(*index),
                None => groups.push(smallvec::smallvec![*index]),
            }
        }
        let told = join_all(groups.iter().map(|group| async {
            match *group.as_slice() {
                [index] if asks[index].only_key().is_none() => vec![self.in_pieces(asks[index], slot, until).await],
                ref group => {
                    let asks: SmallVec<[&Ask; 8]> = group.iter().map(|index| asks[*index]).collect();
                    self.alone(&asks, slot, until).await
                }
            }
        }));
        for (group, told) in groups.iter().zip(told.await) {
            group.iter().zip(told).for_each(|(index, answer)| answers[*index] = answer);
        }
    }

    /// The answer to a check of several keys.
    async fn in_pieces(&self, ask: &Ask, slot: u16, until: Until) -> Answer {
        let mut pieces = Pieces::of(ask);
        let first = pieces.first();
        let told = join_all(first.iter().map(|(_, ask)| self.lone(ask, slot, until))).await;
        first.iter().zip(told).for_each(|((at, _), answer)| pieces.answer(*at, answer));
        while let Some((at, ask)) = pieces.next() {
            let answer = self.lone(&ask, slot, until).await;
            pieces.answer(at, answer);
        }
        pieces.together()
    }

    async fn lone(&self, ask: &Ask, slot: u16, until: Until) -> Answer {
        self.alone(&[ask], slot, until).await.pop().unwrap_or(Answer::Elsewhere)
    }

    /// The answers to checks of one key, which cannot be apart; it may have gone once more.
    async fn alone(&self, asks: &[&Ask], slot: u16, until: Until) -> Vec<Answer> {
        let mut answers = self
            .answers(asks, slot, until)
            .await
            .unwrap_or_else(|error| asks.iter().map(|_| Answer::Failed(error.clone())).collect());
        for answer in answers.iter_mut().filter(|answer| matches!(answer, Answer::Elsewhere)) {
            let message = "the key went to another server of the cluster while it was asked for";
            *answer = Answer::Failed(RedisError::new(RedisErrorKind::Unavailable, message));
        }
        answers
    }
}

#[cfg(test)]
mod tests;
