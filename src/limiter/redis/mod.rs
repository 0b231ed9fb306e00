//! One limit across many processes: states in Redis, decided there by the Lua twins of the
//! [algorithms](crate::quota::Algorithm).
//!
//! # Private authorities and client certificates
//!
//! With `rediss://` and TLS by rustls, [`tls_authorities`](RedisLimiterBuilder::tls_authorities) trusts the
//! authorities whose certificates you hand in as PEM, instead of those of the system. Without this setting,
//! the environment variable `SSL_CERT_FILE` may name a file with such certificates.
//! [`tls_identity`](RedisLimiterBuilder::tls_identity) shows a certificate to servers with
//! `tls-auth-clients yes`, and needs `tls_authorities`. The name in the server's certificate is always
//! compared with the host of the URL; in a cluster, with the host of each server. `connect` returns an error
//! for PEM that cannot be used.
//!
//! Certificates are read once. Before a certificate expires, replace the limiter with a new one.
//!
//! # Passwords that change
//!
//! Passwords that change while the process runs, such as tokens of a cloud's identity service, come from a
//! closure: [`RedisLimiterBuilder::credentials`](RedisLimiterBuilder::credentials). With `redis-sentinel://`
//! a closure is not possible, and `connect` returns an error. The limiter calls the closure for each
//! connection, and again after the time that the closure's answer sets with
//! [`renew_after`](RedisCredentials::renew_after). The right time depends on the server:
//!
//! | server | what it does when a token expires | `renew_after` |
//! |---|---|---|
//! | Redis, Valkey with ACL users | an open connection stays as it is after a change of password | none |
//! | a service that closes connections when their token expires | the connection ends, and the next one gets a new token; checks may fail meanwhile | some minutes before the token expires |
//! | a service that closes each connection after some hours (ElastiCache with IAM: 12 h) | the same, unless the connection has sent a new token | an hour, or another part of that time |
//!
//! If a server gets a password while it runs, open connections work as before, and new connections need the
//! password. Without the password, checks fail as `Misconfigured` until the server has the old setting again.
//! With a closure, checks succeed again as soon as the closure returns the password. An open connection can
//! be logged out, for example by a proxy that has connected to the server anew. Checks then fail as
//! `Misconfigured` (`NOAUTH`) until the limiter has made a new connection. The limiter makes the new connection
//! at once if it has a password.
//!
//! If a server refuses the new credentials of an open connection, the crate `redis` keeps the old
//! credentials, and fred makes a new connection. In both cases the limiter calls the closure again.
//!
//! # How places are counted
//!
//! The one call that decides a request also takes the request's place. No request waits for the call that
//! returns a place. The call that returns a place is shared with the next checks, if there are any.
//!
//! Each process has a row in the key's value: how many units it holds, and when the row lapses. A row lapses
//! after [`places_lapse_after`](RedisLimiterBuilder::places_lapse_after). This page calls the time after which
//! a row lapses *L*. The default is 30 s, the minimum 3 s. A process renews its rows three times in *L*, each
//! time with the number of units that it holds. So a place that is held for an hour is kept, and:
//!
//! * A process that is killed loses its places within *L*, even without a check of the key. Before a process ends, call
//!   [`close`](crate::RedisLimiter::close), which returns its places at once.
//! * If the answer to a check is lost, the place may have been taken. The process corrects its row with its
//!   next call for the key, and at the latest after *L*/30. A lost return is corrected in the same way.
//! * After a reconnect, a process first reports how many units of a key it holds, and then takes more units of that
//!   key.
//! * After a failover, places that were returned after the last replication may count again until their process
//!   renews its row. A process that holds no other place of the key does not renew its row. Its places then count
//!   until the row lapses, within *L*.
//! * A denial is remembered for at most 10 ms, and a return of a place by the same process removes the denial.
//! * A reset frees the places of all processes.
//!
//! A [store](crate::guide::writing_a_backend) keeps the same rows, and has the same option.
//!
//! ## Waiting in line
//!
//! A request over the limit waits in line in its process. As in memory, the line is first come, first served, with one
//! exception: calls that are under way to Redis at the same time are decided in the order in which Redis gets them.
//!
//! A request asks as soon as it is the first of its line. The first request of a line asks again after 20 ms, later
//! after up to 500 ms, and at once when its own process returns a place. If the longest wait of a request is below
//! four seconds, the pauses are shorter: the request asks at least six times, unless the pauses would then be below
//! 5 ms. Each of these calls says how long the request has waited. Redis keeps a freed place for the request that
//! has waited longest in any process. So no process starves. The price:
//!
//! * A freed place stays unused until the first request in line asks. The place stays unused for up to 500 ms if
//!   another process held it, and for less time if the wait is short.
//! * A process asks at most 200 times a second. With lines for more than 100 keys, each line asks more
//!   rarely.
//! * A process whose last request leaves the line tells Redis at once, with a call for which no request waits. A
//!   killed process tells Redis nothing, so it delays the other processes until Redis forgets its request. This
//!   takes 1 s. With lines for more than 100 keys, it takes twice the time between two calls.
//! * The order between processes is not exact: Redis learns of a request only when the request is the first
//!   of its line.
//! * A failed call does not end the wait. If six calls fail in a row, the request is decided like a request whose
//!   check failed.
//!
//! In one measurement, four processes with six callers each shared one key with four places. A caller held its place
//! for 20 ms. In a minute the processes got 1,725, 1,738, 1,736 and 1,779 places, which is 58 % of the possible number
//! (`tests/campaigns.sh`, two processors with a load of 15). At a load of 20 they got 811, 813, 796 and 801. A place
//! that is held for 20 ms is then free for about the same time, until the first request in line asks. With requests of
//! a second or more, the places are free for only a small part of the time.
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
//! The table gives the server's processor time, including input and output, for calls with one request each and
//! without pauses between the calls. Measured in the same way, a check of a token bucket takes 6 µs. A server that is
//! idle before each call needs more time for a call. Checks that share calls take less time: see [no Redis, but a
//! database](crate::guide::no_redis_but_a_database). Renewing a row costs as much as returning a place. By default,
//! renewals take 1 % of a server's time for 10,000 keys with a place each, and 0.1 % for 10,000 places of one key.
//!
//! At most 256 processes can hold places of one key. A further process is denied. At most 128 processes can
//! be in line for one key.
//!
//! # The client libraries
//!
//! Both libraries pass the same tests. Stored values are the same, so an application can change the library at any
//! time. If your application already uses one of them, use that one. If not, `redis-rs` is the one with regular
//! releases.
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
//! [`RedisLimiterBuilder::over`](RedisLimiterBuilder::over), and no other connection is opened. Client
//! certificates, credentials that expire and Unix sockets are then settings of that connection. A
//! `redis::Client` makes such a connection: `get_connection_manager` (feature `connection-manager` of the
//! crate) or `get_multiplexed_async_connection`. A connection to a cluster is refused, because the crate
//! sends commands again after a lost connection: connect with `redis-cluster://`.
//!
//! # When more than the limit is held
//!
//! In memory, only forced charges, and requests that pass although their check failed, can exceed the limit. On Redis
//! and over a store, all processes together hold at most the limit, except in five cases. *L* is the time after which
//! [a row lapses](#how-places-are-counted), 30 s by default:
//!
//! | case | how much more | for how long |
//! |---|---|---|
//! | forced charges, and requests that pass because a check failed ([`OnError::Allow`](crate::OnError::Allow)) | each of them | until they end |
//! | Redis lost its data, or a failover lost the last writes | what was held | until each process has said what it holds: at most *L*/3, and *L*/30 after a reconnect |
//! | the server's clock stepped forward by more than half of *L* within *L*/3 | what was held | until each process has said what it holds: at most *L*/3 |
//! | a change to or from a [fallback](crate::limiter::FallbackLimiter), which counts with its share of the limit, at least 1 | what the other limiter still holds | until these requests end |
//! | a process was stopped for longer than *L*, or did not reach Redis | what it held | until these requests end |
//!
//! * A place is returned to the limiter that it was taken from.
//! * A process that was away for longer than *L* takes its places back by force when it runs again, even if other
//!   processes have taken them meanwhile. Redis forgets places if it loses its data, or if their process is away.
//!   The observer then gets [`PlacesForgotten`](crate::observe::LimiterEvent::PlacesForgotten).
//! * A process over a store does not learn that it was away. Such a process renews its rows within *L*/3, and
//!   from then on the store counts the rows again.
//!
//! # Stored keys
//!
//! A stored key is `ratelimit:2:{h…}:7:signups`: the prefix, the version of the format (2), the caller, and
//! the policy's name after its length in bytes (7). A `p` before the length marks a concurrency limit. A
//! cluster hashes only the part between the braces, so that all policies of a caller are in one slot. The
//! caller is an `h` with 32 hexadecimal digits, or a `k` with the key in clear. With `slot_groups`, a group's
//! number stands between the braces, and the caller comes last.
//!
//! # In a cluster
//!
//! * Checks of one slot share calls, so with few callers per slot each check needs its own call.
//!   [`slot_groups(16)`](crate::limiter::redis::RedisLimiterBuilder::slot_groups) lets callers share slots. With
//!   200 checks in flight on three masters, 16 groups were 1.5 times as fast as one slot for each caller.
//! * The limiter sends a server no more checks than it can answer within the deadline, over all of its slots. A slow
//!   server costs the checks of other servers nothing.
//! * While a slot moves between servers, a caller's keys may be on both servers. The keys are then decided
//!   one by one, as if they were in different slots. No check fails because of the move, with one exception:
//!   if a quota was changed to a log or to sub-windows, checks of a key that was last written under the old
//!   quota fail until the key has moved.

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
