//! Converts values into bytes, and back. The documentation of the [module](super) describes the
//! form.
//!
//! The reader does not trust the bytes: it checks each length, and refuses a state that its quota could not have
//! written.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::{Value, Version};
use crate::algorithm::carry::{Fit, NewState, OldState};
use crate::algorithm::entry_log::{EntryLog, Listed};
use crate::algorithm::{Decider, Pair};
use crate::base::sync::{Mutex, lock};
use crate::base::time::{CLOCK_US_MAX, DRAIN_US_MAX};
use crate::limiter::remote::{CurrentRow, HOLDERS_MAX, HeldRow, HolderInLine, KeyRows, LINE_MAX};
use crate::policy::Policy;
use crate::quota::Quota;

const FORMAT: u8 = 1;

/// A flag in the second byte: the value names all its versions since the key had no value.
const WHOLE: u8 = 128;

/// The maximum number of earlier versions that a value names. The current version is stored beside
/// the value.
const EARLIER: usize = 4;

/// The maximum number of bytes of a state.
pub(super) const STATE_MAX: usize = 16_384;

/// The maximum number of bytes of a quota's text.
const TEXT_MAX: usize = 512;

/// The latest instant in a state that any quota could have made.
const INSTANT_US_MAX: u64 = CLOCK_US_MAX + 2 * DRAIN_US_MAX;

/// The number of bytes of a row of a concurrency limit.
const ROW_BYTES: usize = 36;

/// The largest number that can name a holder, and the largest number of units. Some stores calculate exactly only
/// up to this value.
const EXACT_MAX: u64 = 1 << 53;

/// A flag in the number of a holder: the row belongs to a request in line.
const IN_LINE: u64 = 1 << 63;

/// The maximum number of quotas whose texts are remembered.
const QUOTAS_MAX: usize = 1_024;

/// A state that was read.
#[derive(Clone, Debug)]
pub(super) struct StoredState {
    pub(super) written: Arc<Written>,
    pub(super) form: StateForm,
}

/// A state without its quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StateForm {
    Pair(Pair),
    Entries(Vec<(u64, u64)>),
    /// The units that processes hold. These units do not depend on the quota.
    Rows(KeyRows),
}

/// A quota, reduced to the options that its states depend on, and its text.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) quota: Quota,
    text: Box<str>,
}

/// The reason why a value counts as not written by this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Foreign(pub(super) &'static str);

/// The earlier versions of a value, the latest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct History {
    versions: SmallVec<[Version; EARLIER]>,
    /// True if these are all versions since the key had no value.
    is_whole: bool,
}

impl History {
    /// Returns the history of a value that has no earlier version.
    pub(super) fn fresh() -> Self {
        Self { versions: SmallVec::new(), is_whole: true }
    }

    /// Returns the history of the value that follows a value with this history and this version.
    pub(super) fn after(&self, version: Version) -> Self {
        let is_whole = self.is_whole && self.versions.len() < EARLIER;
        let versions = std::iter::once(version).chain(self.versions.iter().copied()).take(EARLIER).collect();
        Self { versions, is_whole }
    }

    pub(super) fn has(&self, version: Version) -> bool {
        self.versions.contains(&version)
    }

    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }
}

impl StoredState {
    /// Returns the state under another quota, and how well the state fits that quota.
    pub(super) fn under(&self, to: &Arc<Written>, quota: &Quota, now: u64) -> (Option<StateForm>, Fit) {
        if Arc::ptr_eq(&self.written, to) || self.written.text == to.text {
            return (Some(self.form.clone()), Fit::Fits);
        }
        let from = &self.written.quota;
        if let (StateForm::Rows(_), Decider::Places(_)) = (&self.form, quota.decider()) {
            return (Some(self.form.clone()), Fit::Fits);
        }
        let share = quota.spec().proportional.then_some((from.capacity(), quota.capacity()));
        let (kept, fit) = match &self.form {
            StateForm::Pair(pair) => {
                quota.decider().take_over::<Listed<'_>>(from.decider(), &OldState::Pair(*pair), now, share)
            }
            StateForm::Entries(entries) => {
                quota.decider().take_over(from.decider(), &OldState::Entries(&Listed(entries)), now, share)
            }
            StateForm::Rows(_) => (NewState::Pair(None), Fit::Fits),
        };
        let form = match kept {
            NewState::Pair(pair) => pair.map(StateForm::Pair),
            NewState::Entries(entries) => (!entries.is_empty()).then_some(StateForm::Entries(entries)),
        };
        (form, fit)
    }

    /// Returns the time for which the store has to keep the state.
    pub(super) fn time_to_live(&self, now: u64) -> Duration {
        let until = match (&self.form, self.written.quota.decider()) {
            // The state counts until one microsecond after the pair's instant, because the units of the pair may
            // still count at that instant.
            (StateForm::Pair(pair), _) => pair.at.saturating_add(1),
            (StateForm::Entries(entries), Decider::EntryLog(log)) => {
                entries.last().map_or(0, |(start, _)| start.saturating_add(log.life_us()))
            }
            (StateForm::Entries(_), _) => 0,
            (StateForm::Rows(rows), _) => rows.lapse(),
        };
        // Adds one second, because the clocks of the process and of the store differ a little.
        Duration::from_micros(until.saturating_sub(now)) + Duration::from_secs(1)
    }

    /// Writes the bytes of a value.
    pub(super) fn write(&self, history: &History) -> Arc<[u8]> {
        let mut bytes: SmallVec<[u8; 256]> = SmallVec::new();
        let count = history.versions.len() as u8; // at most `EARLIER`
        bytes.extend_from_slice(&[FORMAT, count | if history.is_whole { WHOLE } else { 0 }]);
        history.versions.iter().for_each(|version| bytes.extend_from_slice(&version.to_bytes()));
        bytes.extend_from_slice(&(self.written.text.len() as u16).to_le_bytes()); // at most `TEXT_MAX`
        bytes.extend_from_slice(self.written.text.as_bytes());
        match &self.form {
            StateForm::Pair(pair) => [pair.at, pair.n].iter().for_each(|number| {
                bytes.extend_from_slice(&number.to_le_bytes());
            }),
            StateForm::Entries(entries) => {
                let mut before = 0;
                for (start, units) in entries {
                    write_number(&mut bytes, start - before);
                    write_number(&mut bytes, *units);
                    before = *start;
                }
            }
            StateForm::Rows(KeyRows { held, line }) => {
                let mut write = |numbers: [u64; 4], number: u32| {
                    numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
                    bytes.extend_from_slice(&number.to_le_bytes());
                };
                held.iter().for_each(|own| write([own.holder, own.row.epoch, own.units, own.lapses], own.row.resets));
                line.iter().for_each(|one| write([one.holder | IN_LINE, one.since, one.cost, one.lapses], one.number));
            }
        }
        bytes.as_slice().into()
    }
}

/// Reads the history of a value.
pub(super) fn read_history(value: &Value) -> Result<History, Foreign> {
    Reader(&value.bytes).head()
}

/// The quotas of values. There are few quotas, but each value has a quota's text, so the texts are
/// remembered.
#[derive(Default)]
pub(super) struct Quotas {
    of_policies: Mutex<HashMap<u64, Arc<Written>>>,
    of_texts: Mutex<HashMap<Box<str>, Arc<Written>>>,
}

impl Quotas {
    /// Returns the quota of a policy in the form in which stored values contain a quota.
    pub(super) fn of(&self, policy: &Policy) -> Arc<Written> {
        let fingerprint = policy.fingerprint();
        if let Some(written) = lock(&self.of_policies).get(&fingerprint) {
            return Arc::clone(written);
        }
        let quota = policy.quota().of_states();
        let mut text = String::new();
        let written = write!(text, "{quota}");
        debug_assert!(written.is_ok() && text.len() <= TEXT_MAX, "a quota's text is short: {text}");
        let written = Arc::new(Written { quota, text: text.into() });
        let mut known = lock(&self.of_policies);
        if known.len() >= QUOTAS_MAX {
            known.clear();
        }
        known.insert(fingerprint, Arc::clone(&written));
        written
    }

    fn of_text(&self, text: &str) -> Option<Arc<Written>> {
        if let Some(written) = lock(&self.of_texts).get(text) {
            return Some(Arc::clone(written));
        }
        let quota: Quota = text.parse().ok()?;
        let written = Arc::new(Written { quota, text: text.into() });
        let mut known = lock(&self.of_texts);
        if known.len() >= QUOTAS_MAX {
            known.clear();
        }
        known.insert(text.into(), Arc::clone(&written));
        Some(written)
    }

    /// Reads a value. If the value was written under the quota `likely`, the quota's text is not
    /// parsed.
    pub(super) fn read(&self, value: &Value, likely: Option<&Arc<Written>>) -> Result<(History, StoredState), Foreign> {
        if value.bytes.len() > STATE_MAX + TEXT_MAX + 2 * 16 * EARLIER {
            return Err(Foreign("it is too long"));
        }
        let mut reader = Reader(&value.bytes);
        let history = reader.head()?;
        let text = reader.text()?;
        let written = match likely.filter(|likely| *likely.text == *text) {
            Some(likely) => Arc::clone(likely),
            None => self.of_text(text).ok_or(Foreign("its quota is not one"))?,
        };
        let form = match written.quota.decider() {
            Decider::Pair(decider, _) => {
                let pair = Pair { at: reader.fixed()?, n: reader.fixed()? };
                if !reader.0.is_empty() || pair.at > INSTANT_US_MAX || !decider.get().could_be(pair) {
                    return Err(Foreign("the value's quota cannot have written the value's state"));
                }
                StateForm::Pair(pair)
            }
            Decider::EntryLog(log) => StateForm::Entries(reader.entries(log)?),
            Decider::Places(_) => StateForm::Rows(reader.rows()?),
        };
        Ok((history, StoredState { written, form }))
    }
}

/// Returns the maximum number of bytes of a state of this quota.
pub(super) fn state_bytes_max(quota: &Quota) -> u64 {
    match quota.decider() {
        Decider::EntryLog(log) => {
            // A log may need `most` entries, because each unit, even a unit in debt, may be an entry of its own.
            let entries = if log.is_log() { log.most() } else { log.entries_max() };
            let bytes = number_bytes(2 * log.life_us()) + number_bytes(log.most());
            entries.saturating_mul(bytes).saturating_add(8)
        }
        Decider::Pair(..) => 16,
        Decider::Places(_) => ((HOLDERS_MAX + LINE_MAX) * ROW_BYTES) as u64, // 13,824
    }
}

fn number_bytes(number: u64) -> u64 {
    u64::from((64 - (number | 1).leading_zeros()).div_ceil(7))
}

fn write_number(bytes: &mut SmallVec<[u8; 256]>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80); // the lowest seven bits
        number >>= 7;
    }
    bytes.push(number as u8); // below 128
}

/// Reads numbers from the front of the remaining bytes.
struct Reader<'a>(&'a [u8]);

const SHORT: Foreign = Foreign("it ends too early");

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Foreign> {
        let (taken, left) = self.0.split_at_checked(count).ok_or(SHORT)?;
        self.0 = left;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Foreign> {
        let (taken, left) = self.0.split_first_chunk().ok_or(SHORT)?;
        self.0 = left;
        Ok(*taken)
    }

    fn fixed(&mut self) -> Result<u64, Foreign> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn head(&mut self) -> Result<History, Foreign> {
        let [format, counted] = self.array()?;
        if format != FORMAT {
            return Err(Foreign("the value's first byte is not the format's version"));
        }
        let count = usize::from(counted & !WHOLE);
        if count > EARLIER {
            return Err(Foreign("it has too many versions"));
        }
        let versions = (0..count).map(|_| Ok(Version::from_bytes(self.array()?))).collect::<Result<_, _>>()?;
        Ok(History { versions, is_whole: counted & WHOLE != 0 })
    }

    fn text(&mut self) -> Result<&'a str, Foreign> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        if length > TEXT_MAX {
            return Err(Foreign("the text of the value's quota is too long"));
        }
        std::str::from_utf8(self.take(length)?).map_err(|_| Foreign("the text of the value's quota is not UTF-8"))
    }

    /// Reads a number that has seven bits in each byte.
    fn number(&mut self) -> Result<u64, Foreign> {
        let mut number = 0;
        for shift in (0..63).step_by(7) {
            let [byte] = self.array()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(Foreign("a number is too large"))
    }

    /// Reads the rows of held units, and then the rows of requests in line.
    fn rows(&mut self) -> Result<KeyRows, Foreign> {
        let mut rows = KeyRows::default();
        while !self.0.is_empty() {
            let [holder, a, b, lapses] = [self.fixed()?, self.fixed()?, self.fixed()?, self.fixed()?];
            let number = u32::from_le_bytes(self.array()?);
            let (is_in_line, holder) = (holder & IN_LINE != 0, holder & !IN_LINE);
            // Each process has at most one row of a kind, and the rows of waiting requests come last.
            let is_next = match is_in_line {
                true => rows.line.len() < LINE_MAX && rows.line.iter().all(|one| one.holder != holder),
                false => {
                    let is_new = rows.held.iter().all(|own| own.holder != holder);
                    rows.held.len() < HOLDERS_MAX && is_new && rows.line.is_empty()
                }
            };
            let is_possible = holder <= EXACT_MAX && b <= EXACT_MAX && lapses <= INSTANT_US_MAX;
            if !is_next || !is_possible {
                return Err(Foreign("no limit of requests in flight could have written the value's rows"));
            }
            match is_in_line {
                true => rows.line.push(HolderInLine { holder, number, since: a, cost: b, lapses }),
                false => {
                    rows.held.push(HeldRow { holder, row: CurrentRow { resets: number, epoch: a }, units: b, lapses })
                }
            }
        }
        if rows.is_empty() { Err(SHORT) } else { Ok(rows) }
    }

    fn entries(&mut self, log: &EntryLog) -> Result<Vec<(u64, u64)>, Foreign> {
        let (mut entries, mut before, mut total) = (Vec::new(), 0_u64, 0_u64);
        while !self.0.is_empty() {
            let (passed, units) = (self.number()?, self.number()?);
            let start = before.saturating_add(passed);
            let is_newer = entries.is_empty() || passed > 0;
            total = total.saturating_add(units);
            let is_bounded = units <= log.most() && total <= log.most_kept();
            if !is_newer || units == 0 || !is_bounded || start > INSTANT_US_MAX || start % log.grain_us() != 0 {
                return Err(Foreign("the value's quota cannot have written the value's entries"));
            }
            entries.push((start, units));
            before = start;
        }
        if entries.is_empty() { Err(SHORT) } else { Ok(entries) }
    }
}
