//! The scripts on a server, against the algorithms themselves.

mod idle;
mod parity;
mod sets;
mod troubles;

use std::collections::HashSet;

use redis::{Connection, ConnectionLike};

use super::{Answer, Ask, answers, call, scripts};
use crate::limiter::redis::keys::{CallerKeys, KeySpace};
use crate::limiter::redis::redis_server::Server;
use crate::limiter::redis::value::{Call, Value};
use crate::time::Timestamp;

/// A server, and a connection to it, with the scripts that were loaded.
struct Bench {
    _server: Server,
    connection: Connection,
    space: KeySpace,
    loaded: HashSet<&'static str>,
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
        }
    }

    /// What one call after the other is answered.
    fn run(&mut self, calls: &[Call]) -> Vec<Value> {
        for script in calls.iter().map(|call| call.script) {
            if self.loaded.insert(&script.sha) {
                let load = redis::cmd("SCRIPT").arg("LOAD").arg(&*script.text).query(&mut self.connection);
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
                    redis::Value::BulkString(bytes) => replies.push(Value::Bytes(bytes.into())),
                    other => panic!("{other:?}"),
                }
            }
        }
        replies
    }

    /// The answers to asks that each go in a call of their own, at these instants. What is to be asked again is.
    fn ask(&mut self, asks: &[(Timestamp, &Ask, bool)]) -> Vec<Answer> {
        let calls: Vec<Call> = asks.iter().map(|(now, ask, full)| call(&[ask], Some(*now), *full)).collect();
        let mut all: Vec<Answer> = Vec::new();
        for ((_, ask, full), reply) in asks.iter().zip(self.run(&calls)) {
            let mut answers = answers(&[ask], reply).unwrap();
            assert!(!full || !matches!(answers[0], Answer::Again), "the full script converts");
            all.push(answers.remove(0));
        }
        let again: Vec<usize> = (0..all.len()).filter(|at| matches!(all[*at], Answer::Again)).collect();
        if !again.is_empty() {
            let asks: Vec<(Timestamp, &Ask, bool)> = again.iter().map(|at| (asks[*at].0, asks[*at].1, true)).collect();
            for (at, answer) in again.into_iter().zip(self.ask(&asks)) {
                all[at] = answer;
            }
        }
        all
    }

    /// Every key says when it ends.
    fn check_ttls(&mut self) -> usize {
        let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(&mut self.connection).unwrap();
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
