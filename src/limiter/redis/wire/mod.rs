//! The format of calls, replies and stored values. Its version is 2.
//!
//! # The program
//!
//! One script handles all requests of a call, in order and at one instant. The script's `KEYS` are the keys
//! of the requests. `ARGV[1]` is the number of the call, in eight bytes, and a program. `ARGV[2]` is the
//! time, if the limiter has a clock of its own. All numbers are little-endian.
//!
//! A program is a list of runs. A run describes requests with the same operation and forms:
//!
//! | bytes | meaning |
//! |---|---|
//! | 1 | the operation: 1 take, 2 peek, 3 refund, 4 reset, 5 reset of units that are held |
//! | 2 | the number of requests |
//! | 2 | the number of keys of each |
//! | 4 | the length of the forms |
//! | | a form for each of these keys, which a reset does not use |
//!
//! A form describes the layout of a key's value, and the numbers that the algorithm needs:
//!
//! | bytes | meaning |
//! |---|---|
//! | 1 | the kind of state (see [`StateKind`](encode::StateKind)) |
//! | 1 + n | the layout of a value, or of a list's entry, for Lua's `struct.unpack` |
//! | 1 + n | the head of a value, or a list's first element |
//! | 1 | the size of a value, or of a list's entry |
//! | 1 | the mode: what a denial of this charge means |
//! | 80 | ten numbers, whose meaning is the algorithm's (see its `.lua` file) |
//! | 2 + n | 1 if a conversion keeps the share of the capacity; then the first and the last of the charge's partners, or what a refund's receipt holds |
//!
//! # The reply
//!
//! The reply is one string: the number of the call, the time as a double, and the answer to each request. The
//! number shows that the reply belongs to this call. Redis does not number replies. So after a lost reply, each
//! later call would take the reply to another call for its own. An answer is one byte for each key, and the data
//! that follows the byte (see [`decode`]). For most algorithms the script returns the state that it found, and the
//! algorithm in this process computes the report from that state. For a list, whose entries stay in Redis, the
//! script answers with the whole decision.
//!
//! # The value
//!
//! Each (policy, key) has one stored key. A value begins with a head. The first byte of the head has the
//! format's version in its upper half and the kind in its lower half. The head then has the numbers of the
//! quota that give the state its meaning, with seven bits in each byte. The state follows. A list has the head
//! in its first element, and an entry in each other element: the start of the entry, its units, and the sum of
//! the units of all entries when this entry was the newest. Every value has a time to live, after which the
//! state would no longer count.
//!
//! The value of a concurrency limit has another form: a head without numbers, and a row for each process that holds
//! units or has a request in line for units (see `places.lua`). This value does not depend on the quota, and its
//! stored key differs from the stored key of a rate with the same name. The script answers with the number of held
//! units instead of a state.
//!
//! The window of a calendar is stored as three numbers: the window's end, its count and its start. A script knows no
//! calendar. So the call names the window in which the process expects the server's time to be, and the end of the
//! next one. If the server's time is not in that window, the script reports this before it writes anything. The
//! process then asks again, with the window in which it expects the server's time to be by then. The head names the
//! calendar and its zone.
//!
//! A value with the head of the request's quota is used as it is. A value with another head of this version
//! was written under another quota, and `look.lua` reads it as a state under the request's quota. If a value has no
//! head of this version, the request fails as [`Foreign`](StoreErrorKind::Foreign), and the value stays as it is.
//!
//! # The version rule
//!
//! Processes of different versions share one Redis during a roll-out, so a new version may change its calls, but not
//! the values that processes of other versions find:
//!
//! * The program and the reply may change at will. A script's name is its hash, so each process
//!   runs the script that it was built with.
//! * A new kind of state gets a new number. Older processes report values of a new kind as foreign.
//! * If the stored value of a kind changes, or the stored key, the format gets a new version. The version is in the
//!   upper half of a value's first byte, and in the stored key (`prefix:2:`). The new version then shares no state
//!   with the old one, and each key has its whole quota once more. The CHANGELOG says so.
//!
//! # Bounds
//!
//! | what | bound | at the bound |
//! |---|---|---|
//! | charges of one request | [`CHARGES_MAX`](remote::CHARGES_MAX) | an error, `Misconfigured` |
//! | rows of a concurrency limit | 256 | a further process is denied |
//! | processes in line for its units | 128 | the others do not know of a further one |
//! | requests of one run | 65,535 | the next one begins another run |
//! | numbers of a state | 2^53 | a quota's own limits are lower; a larger stored number counts as no state |
//! | units of a list's entry in 32 bits | 2^32 − 1 | a quota that could reach it is stored as a wider kind |
//! | a refund's numbers | 2^53 | refunds that much; no receipt holds more |
//! | Redis' words for a failure | 1,000 bytes | the rest is cut off |

mod charge;
mod decode;
mod encode;
mod request;
mod script;
mod split;
#[cfg(test)]
mod tests;

use bytes::Bytes;

use super::error::RedisError;
use super::keys::StoredKey;
use super::script::Call;
use crate::base::time::{CLOCK_US_MAX, Timestamp};
use crate::event::StoreErrorKind;
use crate::limiter::remote;

pub(super) use decode::{answers, time_of};
pub(super) use request::{WireOperation, WireRequest};
pub(super) use split::SplitAnswers;

/// The answer to a request.
pub(super) type RedisAnswer = remote::Answer<RedisError>;

/// The time of a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum CallTime {
    /// The time of the limiter's own clock, at which the script decides.
    Given(Timestamp),
    /// The server's time as this process knows it. The script decides at the server's own time.
    OfServer(Timestamp),
}

/// Returns one script call for all requests. No two calls of a connection have the same number.
pub(super) fn call(requests: &[&WireRequest], number: u64, time: CallTime) -> Call {
    let keys = requests.iter().flat_map(|request| &request.charges).map(|charge| charge.key.clone()).collect();
    let (CallTime::Given(now) | CallTime::OfServer(now)) = time;
    let now = now.as_micros().min(CLOCK_US_MAX);
    let clock = matches!(time, CallTime::Given(_)).then(|| Bytes::from(now.to_string()));
    let program = program(requests, number, now);
    Call { script: script::requests(), keys, args: std::iter::once(program).chain(clock).collect() }
}

/// Returns a call without a request, which reads and writes nothing. A server that has run it knows the script. The
/// call names a time, so the script does not ask Redis for it, and the user needs only the rights to run scripts.
///
/// The call is ASCII text, because Redis repeats the arguments of a command that it does not know. fred drops an error
/// that is not UTF-8, and the server would then seem to be silent.
pub(super) fn probe() -> Call {
    call(&[], u64::from_le_bytes(*b"no check"), CallTime::Given(Timestamp::from_micros(0)))
}

/// Returns the number of the call, and the program, with the windows at an instant.
fn program(requests: &[&WireRequest], number: u64, now: u64) -> Bytes {
    // Reserves room for the first run only. The requests of a call are usually alike, and then share that run.
    let run = requests.first().map_or(0, |request| request.run.len());
    let mut program = Vec::with_capacity(size_of::<u64>() + run);
    program.extend_from_slice(&number.to_le_bytes());
    let mut last: Option<(usize, u16, &Bytes)> = None;
    for request in requests {
        match &mut last {
            Some((start, count, run)) if **run == request.run && *count < u16::MAX => {
                *count += 1;
                if let Some(place) = program.get_mut(*start + 1..*start + 3) {
                    place.copy_from_slice(&count.to_le_bytes());
                }
            }
            last => {
                let start = program.len();
                *last = Some((start, 1, &request.run));
                program.extend_from_slice(&request.run);
                request.windows.iter().for_each(|window| window.fill(&mut program, start, now));
            }
        }
    }
    program.into()
}

/// Returns the call that finds out which rights the user lacks. The key has no state. `time` is true if
/// scripts use the server's time. The reply names the missing rights in the syntax of `ACL SETUSER`.
pub(super) fn rights(stored: &StoredKey, time: bool) -> Call {
    let time = Bytes::from_static(if time { b"1" } else { b"" });
    Call { script: script::rights(), keys: vec![stored.bytes.clone()], args: vec![time] }
}

/// Returns the error for a reply that no script of this crate gives.
pub(super) fn nonsense() -> RedisError {
    RedisError::new(
        StoreErrorKind::Foreign,
        "the script's reply is not understood: is there something between this process and Redis that changes replies?",
    )
}
