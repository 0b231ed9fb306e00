//! A request's visit to the line of its key.

use std::sync::Arc;
use std::task::Waker;

use http::Response;

use super::error::ObeyError;
use super::heard::Heard;
use super::line::{NoPlace, Polled};
use super::settings::Settings;
use super::table::{SharedLine, change};
use crate::client::Advice;
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::{Limiter, Refund};
use crate::sync::contained;
use crate::time::Timestamp;

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waits,
    /// It may go, with this number.
    MayGo(u64),
    /// The service was called.
    OnItsWay(u64),
    Over,
}

/// A request's visit to the line of its key, from its call to the head of its response. If it is
/// dropped, the request leaves the line, and what it took of the client's own quota is refunded
/// unless the service was called.
pub(super) struct Visit {
    settings: Arc<Settings>,
    line: SharedLine,
    key: Key,
    turn: u64,
    deadline_us: u64,
    stage: Stage,
    /// The charge to the client's own quota.
    receipt: Option<Receipt>,
    has_unit: bool,
}

impl Visit {
    /// Joins the line of the key.
    pub(super) fn begin(settings: &Arc<Settings>, key: Key, now_us: u64) -> Result<Self, ObeyError> {
        let Some(line) = settings.line(&key, now_us) else {
            return Err(ObeyError::too_many_keys(&key, settings.max_keys));
        };
        let (max_wait_us, max_waiting) = (settings.max_wait_us(), settings.max_waiting);
        let joined = change(&line, |line, wakers| line.join(now_us, max_wait_us, max_waiting, wakers));
        let (turn, number) = joined.map_err(|no_place| match no_place {
            NoPlace::TooLong(wait_us) => ObeyError::too_long(&key, wait_us, settings.max_wait),
            NoPlace::TooMany(wait_us) => ObeyError::too_many_waiting(&key, wait_us, settings.max_waiting),
        })?;
        let stage = number.map_or(Stage::Waits, Stage::MayGo);
        let (settings, deadline_us) = (Arc::clone(settings), now_us.saturating_add(max_wait_us));
        Ok(Self { settings, line, key, turn, deadline_us, stage, receipt: None, has_unit: false })
    }

    pub(super) fn settings(&self) -> &Arc<Settings> {
        &self.settings
    }

    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    /// Returns whether it waits in the line.
    pub(super) fn waits(&self) -> bool {
        self.stage == Stage::Waits
    }

    /// Returns whether it still has to take a unit of the client's own quota.
    pub(super) fn needs_unit(&self) -> bool {
        self.settings.own.is_some() && !self.has_unit
    }

    pub(super) fn put_unit(&mut self, receipt: Option<Receipt>) {
        (self.receipt, self.has_unit) = (receipt, true);
    }

    /// Polls a request that waits in the line. Returns the instant until which it sleeps, or `None`
    /// if it may go.
    pub(super) fn poll(&mut self, now_us: u64, waker: &Waker) -> Result<Option<u64>, ObeyError> {
        let waker = waker.clone();
        let turn = self.turn;
        let polled = change(&self.line, |line, wakers| line.poll(turn, now_us, waker, wakers));
        match polled {
            Polled::Sent(number) => {
                self.stage = Stage::MayGo(number);
                Ok(None)
            }
            Polled::Sleeps(until_us) => Ok(Some(until_us)),
            Polled::TooLong(wait_us) => {
                self.stage = Stage::Over;
                Err(ObeyError::too_long(&self.key, wait_us, self.settings.max_wait))
            }
        }
    }

    /// Returns to the line, because the client's own quota has no unit until `until_us`.
    pub(super) fn wait_until(&mut self, until_us: u64) {
        let Stage::MayGo(number) = self.stage else { return };
        let (turn, deadline_us) = (self.turn, self.deadline_us);
        self.stage = Stage::Waits;
        change(&self.line, |line, wakers| line.put_back(turn, number, until_us, deadline_us, wakers));
    }

    /// Notes that the request goes. Returns `false`, and puts the request back into the line, if a
    /// pause has begun since it was allowed to go, even if that pause is over: otherwise all
    /// that wait for the service would go at once after the pause.
    pub(super) fn go(&mut self, now_us: u64) -> bool {
        let Stage::MayGo(number) = self.stage else { return self.stage != Stage::Waits };
        let (turn, deadline_us) = (self.turn, self.deadline_us);
        let goes = change(&self.line, |line, wakers| {
            let goes = line.is_news(number);
            if goes {
                line.has_asked(turn, now_us, wakers);
            } else {
                line.put_back(turn, number, 0, deadline_us, wakers);
            }
            goes
        });
        self.stage = if goes { Stage::OnItsWay(number) } else { Stage::Waits };
        if goes {
            self.receipt = None; // used up
        }
        goes
    }

    /// Notes the head of the response.
    pub(super) fn hear<R>(mut self, response: &Response<R>) {
        let Stage::OnItsWay(number) = self.stage else { return };
        let settings = Arc::clone(&self.settings);
        let (now_us, wall) = (settings.now_us(), system_time(settings.clock.now()));
        let advice = Advice::read(response.headers(), wall);
        let mut heard = Heard::new(response.status(), response.headers(), &advice);
        heard.spacing_us = if settings.paces { heard.spacing_us.min(settings.max_wait_us()) } else { 0 };
        self.stage = Stage::Over;
        let lengthen = |wait_us| settings.jitter.lengthen(wait_us);
        change(&self.line, |line, wakers| line.hear(number, now_us, &heard, lengthen, wakers));
    }
}

pub(in crate::client) fn system_time(now: Timestamp) -> std::time::SystemTime {
    let since = std::time::Duration::from_micros(now.as_micros());
    std::time::UNIX_EPOCH.checked_add(since).unwrap_or(std::time::UNIX_EPOCH)
}

impl Drop for Visit {
    fn drop(&mut self) {
        let turn = self.turn;
        match self.stage {
            Stage::Waits => change(&self.line, |line, wakers| line.leave(turn, wakers)),
            Stage::MayGo(number) => change(&self.line, |line, wakers| line.withdraw(turn, number, wakers)),
            Stage::OnItsWay(number) => change(&self.line, |line, wakers| line.lose(number, wakers)),
            Stage::Over => {}
        }
        let (Some(own), Some(receipt)) = (&self.settings.own, self.receipt.take()) else { return };
        // A limiter sends a refund before it returns, so its reply can be dropped.
        let refund = vec![Refund::new(own.policy.clone(), self.key.clone(), receipt)];
        contained(|| drop(own.limiter.refund(refund)));
    }
}
