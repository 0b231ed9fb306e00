//! What goes over the wire: requests in one script call, and the answers out of its reply.
//!
//! Where a state is a few numbers, the script decides and writes, and answers with the time and the state that it found; what is told of
//! it is computed here, by the same rules from the same state. Of a trail, whose entries stay in Redis, it answers everything.

mod ask;
mod form;
mod pieces;
mod reply;
mod scripts;
mod shape;
#[cfg(test)]
mod tests;

use bytes::Bytes;

use super::error::{RedisError, RedisErrorKind};
use super::keys::Stored;
use super::value::{Call, Value};
use crate::decision::Decision;
use crate::time::Timestamp;

use ask::{Lean, Verb};

pub(super) use ask::Ask;
pub(super) use form::packed;
pub(super) use pieces::Pieces;
pub(super) use reply::answers;

/// What came of a request.
#[derive(Debug)]
pub(super) enum Answer {
    Decided(Decision),
    /// Decided key by key: a refused one has the receipts of what was taken, and so has one of which some keys failed.
    Pieced(Decision, Option<RedisError>),
    Done,
    /// The key has just gone to another server: nothing was done.
    Elsewhere,
    /// A value was written under another quota: nothing was done. Asked again with `full` it is converted.
    Again,
    /// Redis refused what the script asked for, in these words. The store knows what they mean.
    Refused(Box<str>),
    Failed(RedisError),
}

/// How far back a form is looked for among those of the call.
const FORMS_SEARCHED: usize = 8;

/// Where forms begin in the arguments, counted from 1.
const FORMS_FROM: usize = 3;

/// In place of a form: the keys of this run are to be forgotten.
const RESET: u16 = u16::MAX;

/// One script call for all requests, in their order, at one instant: the server's time, unless told another.
///
/// Of its arguments the first lists the requests: pairs of 16-bit numbers. `(form, n)`: n requests, all of that form, which
/// in a lean script is of all their keys and else of one key each. `(0, n)`: a request of n keys, whose forms follow, 16
/// bits each. A lone request needs no list if it has one form: that is the first argument.
pub(super) fn call(asks: &[&Ask], clock: Option<Timestamp>, full: bool) -> Call {
    let lean = asks.first().and_then(|ask| ask.lean.as_ref()).filter(|_| !full);
    let lean = lean.filter(|lean| asks.iter().all(|ask| ask.lean.as_ref() == Some(*lean)));
    let script = lean.map_or_else(scripts::full, scripts::lean);
    // A script with a shape takes the keys of a request as one.
    let whole = matches!(lean, Some(Lean::Shape(_))) && !std::ptr::eq(script, scripts::full());
    let keys = asks.iter().flat_map(|ask| &ask.units).map(|unit| unit.key.clone()).collect();
    let clock = clock.map(|now| Bytes::from(now.as_micros().to_string()));
    if let [ask @ Ask { verb: Verb::Take | Verb::Peek, units, .. }] = asks {
        if whole || units.len() == 1 {
            let args = std::iter::once(ask.form()).chain(clock).collect();
            return Call { script, keys, args };
        }
    }
    let mut args = vec![Bytes::new(), clock.unwrap_or_default()];
    let mut list = List::default();
    for ask in asks {
        let mut number = |form: Bytes| {
            let known = (FORMS_FROM - 1..args.len()).rev().take(FORMS_SEARCHED).find(|at| args[*at] == form);
            let at = known.unwrap_or_else(|| {
                args.push(form);
                args.len() - 1
            });
            u16::try_from(at + 1).unwrap_or(u16::MAX - 1) // a call holds far fewer
        };
        match (ask.verb, ask.units.as_slice()) {
            (Verb::Take | Verb::Peek, _) if whole => list.run(number(ask.form())),
            (Verb::Take | Verb::Peek, [_, _, ..] | []) => {
                list.set(ask.units.iter().map(|unit| number(unit.form.clone())));
            }
            (_, units) => units.iter().for_each(|unit| match unit.form.is_empty() {
                true => list.run(RESET),
                false => list.run(number(unit.form.clone())),
            }),
        }
    }
    if args.len() < FORMS_FROM {
        args.push(Bytes::new()); // so that the first is known to be a list
    }
    args[0] = list.bytes.into();
    Call { script, keys, args }
}

/// Asks which rights the user lacks on this key, which has no state; `time` if scripts ask the server for it. The answer is
/// [`missing_rights`].
pub(super) fn rights(stored: &Stored, time: bool) -> Call {
    let time = Bytes::from_static(if time { b"1" } else { b"" });
    Call { script: scripts::rights(), keys: vec![stored.bytes.clone()], args: vec![time] }
}

/// The rights that are missing, as `ACL SETUSER` names them.
pub(super) fn missing_rights(reply: &Value) -> Result<&str, RedisError> {
    let Value::Bytes(rights) = reply else { return Err(nonsense()) };
    std::str::from_utf8(rights).map_err(|_| nonsense())
}

/// The list of a call's requests.
#[derive(Default)]
struct List {
    bytes: Vec<u8>,
    /// Where the last run begins, which more requests may join.
    last: Option<usize>,
}

impl List {
    fn run(&mut self, form: u16) {
        if let Some([one, two, three, four]) = self.last.and_then(|last| self.bytes.get_mut(last..last + 4)) {
            let count = u16::from_le_bytes([*three, *four]);
            if u16::from_le_bytes([*one, *two]) == form && count < u16::MAX {
                [*three, *four] = (count + 1).to_le_bytes();
                return;
            }
        }
        self.last = Some(self.bytes.len());
        self.bytes.extend([form, 1].map(u16::to_le_bytes).as_flattened());
    }

    fn set(&mut self, forms: impl ExactSizeIterator<Item = u16>) {
        self.last = None;
        let count = u16::try_from(forms.len()).unwrap_or(u16::MAX);
        self.bytes.extend([0, count].map(u16::to_le_bytes).as_flattened());
        forms.for_each(|form| self.bytes.extend(form.to_le_bytes()));
    }
}

/// A reply that no script of ours gives.
pub(super) fn nonsense() -> RedisError {
    RedisError::new(
        RedisErrorKind::Foreign,
        "the script's reply is not understood: is there something between this process and Redis that changes replies?",
    )
}
