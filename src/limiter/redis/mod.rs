//! One limit across many processes: states in Redis, decided there by the Lua twins of the
//! [algorithms](crate::quota::Algorithm).
//!
//! # Private authorities and client certificates
//!
//! With `rediss://` and TLS by rustls, [`tls_authorities`](RedisLimiterBuilder::tls_authorities)
//! trusts the authorities whose certificates you hand in as PEM, instead of those of the system.
//! Without it the environment variable `SSL_CERT_FILE` may name a file with them.
//! [`tls_identity`](RedisLimiterBuilder::tls_identity) shows a certificate to servers with
//! `tls-auth-clients yes`, and needs `tls_authorities`. The name in the server's certificate is
//! always compared with the host of the URL; in a cluster with that of each server. PEM that cannot
//! be used is an error of `connect`.
//!
//! Certificates are read once. Before a certificate expires, replace the limiter by a new one.
//!
//! # Passwords that change
//!
//! Passwords that change while the process runs, such as tokens of a cloud's identity service, come
//! from a closure: [`RedisLimiterBuilder::credentials`](RedisLimiterBuilder::credentials). With
//! `redis-sentinel://` that is not possible, and is an error of `connect`. The closure is asked for
//! each connection, and again after the time that [`renew_after`](RedisCredentials::renew_after) of
//! its answer says. Choose it by the server:
//!
//! | server | what it does when a token expires | `renew_after` |
//! |---|---|---|
//! | Redis, Valkey with ACL users | an open connection stays as it is after a change of password | none |
//! | a service that closes connections when their token expires | the connection ends, and the next one gets a new token; checks may fail meanwhile | some minutes before the token expires |
//! | a service that closes each connection after some hours (ElastiCache with IAM: 12 h) | the same, unless the connection has sent a new token | an hour, or another part of that time |
//!
//! A server that gets a password serves open connections as before. New connections need the
//! password. Without it checks fail as `Misconfigured` until the server has the old setting again.
//! With a closure, checks succeed again as soon as it returns the password. If an open connection
//! is logged out, for example by a proxy that has connected to the server anew, checks fail as
//! `Misconfigured` (`NOAUTH`) until the limiter has made a new connection, which it does at once if
//! it has a password.
//!
//! If a server refuses the new credentials of an open connection, the crate `redis` keeps the old
//! ones, and fred makes a new connection. In both cases the closure is asked again.
//!
//! # How places are counted
//!
//! A request takes its place as part of its one call. No request waits for the call that returns
//! it, which is shared with the next checks, if there are any.
//!
//! Each process has a row in the key's value: how many units it holds, and when the row lapses. It
//! lapses after [`places_lapse_after`](RedisLimiterBuilder::places_lapse_after). This time is
//! called *L* from here on. The default is 30 s, the minimum 3 s. A process renews its rows three
//! times in *L*, each time with the number of units that it holds. So a place that runs for an hour
//! is kept, and:
//!
//! * A process that is killed loses its places within *L*, even without a check of the key. A
//!   process that ends normally calls [`close`](crate::RedisLimiter::close), which returns them at
//!   once.
//! * If the answer to a check is lost, its place may have been taken. The process corrects its row
//!   with its next call for the key, and at the latest after *L*/30. A return that is lost is
//!   corrected likewise.
//! * After a reconnect, a process says what it holds of a key before it takes more of it.
//! * A failover can bring places back that were returned after the last replication. If their
//!   process holds no other place of the key, these places count until the row lapses, within *L*.
//! * A denial is remembered for at most 10 ms, and a return by the same process ends that.
//! * A reset frees the places of all processes.
//!
//! A [store](crate::guide::writing_a_backend) has the same rows, and the same option.
//!
//! ## Waiting in line
//!
//! A request over the limit waits in line in its process. The line is first come, first served, as
//! in memory; only calls to Redis that are under way at the same time are decided in the order in
//! which they arrive.
//!
//! A request asks as soon as it is the first of its line. Then it asks again after 20 ms, later
//! after up to 500 ms, and at once when its own process returns a place. A request that waits for
//! less than four seconds asks at least six times, but with pauses of at least 5 ms. Each time it
//! says for how long it has waited. Redis keeps a freed place for the request that has waited for
//! longest in any process. So no process starves. The price:
//!
//! * A place that comes free waits for the first in line to ask: up to 500 ms if the place was of
//!   another process, and less if the wait is short.
//! * A process asks at most 200 times a second. With more than 100 keys in line, each of them asks
//!   more rarely.
//! * A process whose last request leaves the line tells Redis at once, by a call that no request
//!   waits for. A process that is killed holds up the others until Redis forgets its request: for 1
//!   s, or with more than 100 keys in line for twice the time between two calls.
//! * The order between processes is not exact: a request is known to Redis only once it is the
//!   first of its line.
//! * A call that fails does not end the wait. If six fail in a row, the request is decided as after
//!   every failed check.
//!
//! Four processes with six callers each, at one key with four places that are held for 20 ms: in a
//! minute they got 1,725, 1,738, 1,736 and 1,779 places, 58 % of what four places can be
//! (`tests/campaigns.sh`, two processors with a load of 15; at a load of 20 they got 811, 813, 796
//! and 801). Such short places are free for about as long as they are held, until the first in line
//! asks. With requests of a second or more that is a small part of the time.
//!
//! ## What places cost
//!
//! | processes that hold places of one key | bytes of its value | µs of the server to take a place | and to return it |
//! |---|---|---|---|
//! | 1 | 61 | 6 | 7 |
//! | 4 | 169 | 7 | 8 |
//! | 50 | 1,825 | 15 | 21 |
//! | 200 | 7,225 | 40 | 59 |
//! | 256 | 9,241 | 51 | 73 |
//!
//! This is the server's processor time with its input and output, for calls that come without a
//! pause, one request in each. Measured in the same way, a check of a token bucket takes 6 µs. A
//! server that waits for each single call needs more for it, and for checks that share calls less:
//! see [no Redis, but a database](crate::guide::no_redis_but_a_database). To renew a row costs as
//! much as to return a place: 10,000 keys with a place each take 1 % of a server's time by default,
//! and 10,000 places of one key 0.1 %.
//!
//! At most 256 processes can hold places of one key. A further process is denied. At most 128 can
//! be in line.
//!
//! # The client libraries
//!
//! Both are tested by the same tests.
//!
//! | | fred | the crate `redis`, also called redis-rs |
//! |---|---|---|
//! | feature | `fred` | `redis-rs` |
//! | features for `rediss://` | `fred-rustls`, `fred-rustls-ring`, `fred-native-tls` | `redis-rs-rustls`, `redis-rs-rustls-ring` |
//! | releases | the last is of February 2025 | several a year |
//! | protocol | RESP2 | RESP3. If a proxy before Redis refuses `HELLO`, it is RESP2, and the next check finds out that a connection was cut |
//! | a reply of many nested arrays, from an attacker in the connection | can end the process | is an error |
//! | checks a second with 1, 10, 50 and 200 in flight, as a ratio to fred (two processors with a load of 15 to 20) | 1 | 0.92, 1.15, 1.48, 1.09 |
//!
//! An application that has a connection of the crate `redis` hands it to
//! [`RedisLimiterBuilder::over`](RedisLimiterBuilder::over), and no other connection is opened.
//! Client certificates, credentials that expire and Unix sockets are then settings of that
//! connection. A `redis::Client` makes one: `get_connection_manager` (feature `connection-manager`
//! of the crate) or `get_multiplexed_async_connection`. A connection to a cluster is refused,
//! because the crate sends commands again after a lost connection: connect with `redis-cluster://`.
//!
//! # When more than the limit is held
//!
//! In memory never, except by forced charges, and by requests that pass although their check
//! failed. On Redis and over a store all processes together hold at most the limit, except in five
//! cases. *L* is the time after which [a row lapses](#how-places-are-counted), 30 s by default:
//!
//! | case | how much more | for how long |
//! |---|---|---|
//! | forced charges, and requests that pass because a check failed ([`OnError::Allow`](crate::OnError::Allow)) | each of them | until they end |
//! | Redis lost its data, or a failover lost the last writes | what was held | until each process has said what it holds: at most *L*/3, and *L*/30 after a reconnect |
//! | the server's clock stepped forward by more than half of *L* within *L*/3 | what was held | until each process has said what it holds: at most *L*/3 |
//! | a change to or from a [fallback](crate::limiter::FallbackLimiter), which counts with its share of the limit, at least 1 | what the other limiter still holds | until these requests end |
//! | a process was stopped for longer than *L*, or did not reach Redis | what it held | until these requests end |
//!
//! * A place is returned to the limiter that gave it.
//! * A process that was away for longer than *L* takes its places back by force when it goes on,
//!   even if others have taken them meanwhile. If Redis forgot places, because its data was lost or
//!   their process was away, the observer gets
//!   [`PlacesForgotten`](crate::observe::LimiterEvent::PlacesForgotten).
//! * A process over a store does not learn that it was away. It renews its rows within *L*/3, and
//!   from then on the store counts them again.
//!
//! # Stored keys
//!
//! A stored key is `ratelimit:2:{h…}:7:signups`: the prefix, the version of the format (2), the
//! caller, and the policy's name after its length in bytes (7). A `p` before the length marks a
//! concurrency limit. A cluster hashes only the part between the braces, so that all policies of a
//! caller are in one slot. The caller is an `h` with 32 hexadecimal digits, or a `k` with the key
//! in clear. With `slot_groups` a number stands between the braces, and the caller comes last.
//!
//! # In a cluster
//!
//! * Checks of one slot share calls, so with few callers per slot each check is a call of its own.
//!   [`slot_groups(16)`](crate::limiter::redis::RedisLimiterBuilder::slot_groups) lets callers share slots. With
//!   200 checks in flight on three masters, 16 groups were 1.5 times as fast as a slot for each caller.
//! * While a slot moves between servers, a caller's keys may be on both. The keys are then asked one by
//!   one, as if they were in different slots. No check fails because of that, with one exception: if a quota
//!   was changed to a log or to sub-windows, checks of a key that was last written under the old quota fail
//!   until the key has moved.

mod backend;
mod builder;
mod client;
mod connection;
mod credentials;
mod dispatch;
mod error;
mod keys;
pub(crate) mod limiter;
mod script;
mod shared_text;
#[cfg(test)]
mod tests;
mod wire;

#[cfg(test)]
use super::redis_server;

pub use builder::RedisLimiterBuilder;
pub use client::RedisClient;
pub use credentials::RedisCredentials;
pub use error::RedisError;
pub use limiter::RedisFuture;
