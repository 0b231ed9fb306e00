//! The scripts on a server, against the algorithms themselves.

mod bounds;
mod calendar;
mod idle;
mod kinds;
mod parity;
mod places;
mod sets;
#[cfg(feature = "store")]
mod store_rows;
mod troubles;

use std::collections::HashSet;

use redis::{Connection, ConnectionLike};

use super::{CallTime, RedisAnswer, WireOperation, WireRequest, answers, call, script};
use crate::base::time::Timestamp;
use crate::event::StoreErrorKind;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::keys::{CallerKeys, KeySpace};
use crate::limiter::redis::redis_server::Server;
use crate::limiter::redis::script::Call;
use crate::limiter::redis::tests::simulation::server;

/// The number of every call.
const NUMBER: u64 = 0x0102_0304_0506_0708;

/// The time of calls whose quotas have no window of the calendar.
const NO_WINDOW: CallTime = CallTime::OfServer(Timestamp::from_micros(0));

type Answered = Result<RedisAnswer, RedisError>;

/// The answers in a reply.
fn decoded(requests: &[&WireRequest], reply: &[u8]) -> Vec<Answered> {
    answers(requests, NUMBER, reply, &refused).unwrap()
}

fn refused(words: &str) -> RedisError {
    RedisError::new(StoreErrorKind::Unavailable, words)
}

/// A server, and a connection to it, with the scripts that were loaded.
struct Bench {
    _server: Server,
    connection: Connection,
    space: KeySpace,
    loaded: HashSet<&'static str>,
    /// The server of the simulation, and how many calls are still played to it as well.
    simulated: (server::Server, usize),
}

impl Bench {
    fn start() -> Self {
        let server = Server::start();
        let connection = server.connection();
        Self {
            _server: server,
            connection,
            space: KeySpace::new("test", CallerKeys::Hashed([0; 16]), None).unwrap(),
            loaded: HashSet::new(),
            simulated: (server::Server::default(), 0),
        }
    }

    /// Starts a server beside which the one of the simulation gets the same calls, at first. All replies must be equal.
    fn start_beside_simulation() -> Self {
        Self { simulated: (server::Server::default(), 5_000), ..Self::start() }
    }

    /// Returns the replies to these calls, one after the other.
    fn run(&mut self, calls: &[Call]) -> Vec<Vec<u8>> {
        for script in calls.iter().map(|call| call.script) {
            if self.loaded.insert(&script.sha) {
                let load = redis::cmd("SCRIPT").arg("LOAD").arg(script.text).query(&mut self.connection);
                assert_eq!(load, Ok(script.sha.to_string()));
            }
        }
        let mut replies = Vec::new();
        for calls in calls.chunks(500) {
            let mut pipe = redis::pipe();
            for call in calls {
                let command = pipe.cmd("EVALSHA").arg(&*call.script.sha).arg(call.keys.len());
                call.keys.iter().chain(&call.args).for_each(|part| {
                    command.arg(part.as_ref());
                });
            }
            let packed = pipe.get_packed_pipeline();
            for reply in self.connection.req_packed_commands(&packed, 0, calls.len()).unwrap() {
                match reply {
                    redis::Value::BulkString(bytes) => replies.push(bytes),
                    other => panic!("{other:?}"),
                }
            }
        }
        let (simulated, left) = &mut self.simulated;
        for (call, reply) in calls.iter().zip(&replies).take(*left) {
            let mut eval = |command, script| simulated.eval(command, script, &call.keys, &call.args, 0);
            let simulated = match eval("EVALSHA", &call.script.sha) {
                server::Reply::Error(words) if words.starts_with("NOSCRIPT") => eval("EVAL", call.script.text),
                reply => reply,
            };
            assert_eq!(simulated, server::Reply::Text(reply.clone().into()), "the simulated server replies otherwise");
        }
        *left = left.saturating_sub(calls.len());
        replies
    }

    /// Returns the answers to requests that each go in a call of their own, at these instants.
    fn ask(&mut self, requests: &[(Timestamp, &WireRequest)]) -> Vec<Answered> {
        let calls: Vec<Call> =
            requests.iter().map(|(now, request)| call(&[request], NUMBER, CallTime::Given(*now))).collect();
        let replies = self.run(&calls);
        requests.iter().zip(replies).map(|((_, request), reply)| decoded(&[request], &reply).remove(0)).collect()
    }

    /// Every key says when it ends.
    fn check_ttls(&mut self) -> usize {
        let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(&mut self.connection).unwrap();
        if keys.is_empty() {
            return 0;
        }
        let mut pipe = redis::pipe();
        keys.iter().for_each(|key| {
            pipe.cmd("PTTL").arg(key);
        });
        let ttls: Vec<i64> = pipe.query(&mut self.connection).unwrap();
        for (key, ttl) in keys.iter().zip(ttls) {
            assert!(ttl > 0, "{} is kept for ever", key.escape_ascii());
        }
        keys.len()
    }
}
