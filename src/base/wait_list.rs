//! Waiters in the order of their turns. Each waiter has the waker of its task, the instant of its
//! timer, and data of the line that uses the list.
//!
//! All lines of the crate use this list: the lines of requests in leaky queues, of callers that ask
//! a limiter again, of requests that wait for places, of paced bodies, and of a client's requests.
//! The lines differ in the event after which the first waiter may go.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};
use std::task::Waker;

use super::number_map::NumberMap;
use super::wakers::Wakers;

/// This many waiters at the front of a line are *foremost*: their timers are set to the instants at
/// which they may go. If the task of the first waiter does not run, the task of another foremost
/// waiter lets the line advance.
pub(crate) const FOREMOST: usize = 8;

/// A map of lines is shrunk when it holds few lines and its capacity is above this number.
pub(crate) const SPARE: usize = 64;

/// The waiters of one line, ordered by turn.
#[derive(Debug)]
pub(crate) struct WaitList<T>(NumberMap<Waiter<T>>);

#[derive(Debug)]
struct Waiter<T> {
    own: T,
    /// The instant to which the waiter's timer is set, in microseconds.
    armed_us: u64,
    waker: Option<Waker>,
}

impl<T> Default for WaitList<T> {
    fn default() -> Self {
        Self(NumberMap::default())
    }
}

impl<T> WaitList<T> {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a waiter at the position of its turn.
    pub(crate) fn add(&mut self, turn: u64, own: T) {
        self.0.insert(turn, Waiter { own, armed_us: u64::MAX, waker: None });
    }

    /// Returns whether this waiter is in the line.
    pub(crate) fn has(&self, turn: u64) -> bool {
        self.0.has(turn)
    }

    /// Returns the line's data about a waiter, for a change.
    pub(crate) fn get_mut(&mut self, turn: u64) -> Option<&mut T> {
        self.0.get_mut(turn).map(|waiter| &mut waiter.own)
    }

    /// Returns the turn of the first waiter, and the line's data about it.
    pub(crate) fn first(&self) -> Option<(u64, &T)> {
        self.0.first().map(|(turn, waiter)| (turn, &waiter.own))
    }

    /// Returns the line's data about the first waiter, for a change.
    pub(crate) fn first_mut(&mut self) -> Option<&mut T> {
        self.0.first_mut().map(|waiter| &mut waiter.own)
    }

    /// Returns the line's data about the foremost waiters, in their order.
    pub(crate) fn foremost(&self) -> impl Iterator<Item = &T> {
        self.0.foremost(FOREMOST).map(|waiter| &waiter.own)
    }

    /// Returns the number of waiters before this waiter, or `None` if it is not among the foremost.
    pub(crate) fn position(&self, turn: u64) -> Option<usize> {
        self.0.position(turn, FOREMOST)
    }

    /// Returns the instant to which a waiter's timer is set, in microseconds.
    pub(crate) fn armed_us(&self, turn: u64) -> Option<u64> {
        self.0.get(turn).map(|waiter| waiter.armed_us)
    }

    /// Records that a waiter sleeps until `until_us`, or until `waker` wakes it. The waiter's previous
    /// waker is added to `wakers`, to be dropped.
    pub(crate) fn sleep(&mut self, turn: u64, until_us: u64, waker: Waker, wakers: &mut Wakers) {
        match self.0.get_mut(turn) {
            Some(waiter) => {
                waiter.armed_us = until_us;
                wakers.to_drop.extend(waiter.waker.replace(waker));
            }
            None => wakers.to_drop.push(waker),
        }
    }

    /// Records the instant to which a waiter's timer is set.
    pub(crate) fn arm(&mut self, turn: u64, until_us: u64) {
        if let Some(waiter) = self.0.get_mut(turn) {
            waiter.armed_us = until_us;
        }
    }

    /// Removes the first waiter and wakes it.
    pub(crate) fn pop_first(&mut self, wakers: &mut Wakers) -> Option<(u64, T)> {
        let (turn, waiter) = self.0.pop_first()?;
        wakers.to_wake.extend(waiter.waker);
        Some((turn, waiter.own))
    }

    /// Removes a waiter. It is not woken.
    pub(crate) fn remove(&mut self, turn: u64, wakers: &mut Wakers) -> Option<T> {
        let waiter = self.0.remove(turn)?;
        wakers.to_drop.extend(waiter.waker);
        Some(waiter.own)
    }

    /// Wakes the first waiter. It stays in the line.
    pub(crate) fn wake_first(&mut self, wakers: &mut Wakers) {
        wakers.to_wake.extend(self.0.first_mut().and_then(|waiter| waiter.waker.take()));
    }

    /// Wakes the foremost waiters whose timers are set too late. `until_us` gets a waiter's position
    /// and returns the instant at which the waiter may go, or `None` if the waiter need not be woken.
    pub(crate) fn wake_foremost(&mut self, mut until_us: impl FnMut(usize, &T) -> Option<u64>, wakers: &mut Wakers) {
        let mut position = 0;
        self.0.change_foremost(FOREMOST, |waiter| {
            if until_us(position, &waiter.own).is_some_and(|until_us| waiter.armed_us > until_us) {
                wakers.to_wake.extend(waiter.waker.take());
            }
            position += 1;
        });
    }
}

/// Removes a line, and shrinks the map if it has few lines left.
pub(crate) fn remove_line<K: Eq + Hash, V, S: BuildHasher>(lines: &mut HashMap<K, V, S>, key: &K) -> Option<V> {
    let line = lines.remove(key);
    if lines.capacity() > SPARE && lines.len() < lines.capacity() / 8 {
        lines.shrink_to_fit();
    }
    line
}
