//! Limits in PostgreSQL: a table, and one statement for each check.
//!
//! [`PostgresStore`] makes its own connections. [`PostgresStoreBuilder::build`] uses the application's pool instead
//! of connections of its own. The guide's page [No Redis, but a database](crate::guide::no_redis_but_a_database) says
//! what such limits cost, and what happens if the server fails.
//!
//! # How much it carries
//!
//! A check changes its key with a statement, and each statement is a transaction. In a logged table
//! a transaction waits until the server has flushed its log. A commit that comes during a flush
//! waits for the next flush, so a statement takes the time of one to two flushes. Checks that come
//! while all connections are busy share the next statement:
//!
//! ```text
//! checks a second  ≤  connections × keys in a statement / time of a statement
//!                  =  10 × 64 / 16 ms = 40,000              if a flush takes 8 ms
//! ```
//!
//! * A statement has up to 64 keys, and any number of checks of each key. In addition to the flush,
//!   a statement costs the server 0.02 ms for each key. So the processor reaches its limit before the disk, and
//!   a few connections are enough. More connections only shorten the wait.
//! * The statements of one key run one after the other, and each statement has all checks of the
//!   key that wait. So one process decides any number of checks of a hot key, each of them within
//!   two statements.
//! * Several processes share the server's flushes. But only one process changes a key in each
//!   flush, and the other processes decide again. With flushes of 8 ms, all processes together
//!   change a key about 100 times a second, each time with any number of checks.
//! * A check of a key that this process has not seen before needs a load first, or a second statement. A load
//!   writes nothing, so it waits for no flush.
//! * A check waits for up to two statements: the statement under way, and its own. So the deadline
//!   should be longer than four flushes.
//!
//! The table shows how many checks a second were decided within 50 ms, for 10,000 keys on two
//! otherwise idle processors. The table compares `StoreLimiter` with an upsert that is written by
//! hand (`benches/load.rs`):
//!
//! | a flush takes | offered | the upsert, as many connections | the upsert, 20 connections | `StoreLimiter` |
//! |---|---|---|---|---|
//! | 3 ms | 2,716 | 2,716 | 2,716 | 2,716, with 9 connections |
//! | 3 ms | 5,197 | 140 | 5,197 | 5,197 |
//! | 3 ms | 7,886 | 100 | 652 | 7,886 |
//! | 8 ms | 885 | 885 | 885 | 885, with 10 connections |
//! | 8 ms | 1,808 | 69 | 1,808 | 1,806 |
//! | 8 ms | 2,661 | 48 | 362 | 2,661 |
//!
//! A check took 1.9 transactions if nearly every key was new to the process, and 0.5 to 0.9 if many
//! checks shared a transaction. Checks that the server cannot carry fail at once, as
//! [`Overloaded`](crate::limiter::StoreErrorKind::Overloaded), and cost the server nothing.
//!
//! A statement of an unlogged table waits for no flush. So the processor limits the checks of an
//! unlogged table.
//!
//! # Long transactions
//!
//! While a transaction is open anywhere in the server, such as a long report or a dump, PostgreSQL keeps the old
//! versions of all rows that the transaction could still see. Meanwhile old versions of a row pile up if its key is
//! charged often, and each check has to skip these versions. After a transaction had been open for 100 s, and 22,000
//! checks of one key had been made, a check took five times the usual processor time of the server. After the
//! transaction's end, a check took 1.2 times the usual time, and the server used the space of old versions again. If
//! reports run for hours, use a standby for them.
//!
//! # Many processes and one key
//!
//! Checks of one key within a process share a statement, so one process can decide many of them in a second, even
//! if the server is slow. Processes compete for a key. A process that loses a key to another process decides again
//! at once, on the current value. A process that has changed a key lets the other processes go first now and then: for
//! the time of one statement after one of eight statements, for up to this time after it lost the key once, if a
//! statement takes longer than 2 ms, and for up to 8 ms after it lost the key several times. It never waits for longer
//! than an eighth of the deadline. A check that cannot win the key by its deadline fails as
//! [`Contended`](crate::limiter::StoreErrorKind::Contended). In a measurement on two busy processors, eight
//! processes with four tasks each charged one key without a pause. Of 128,000 checks, 0.2 % missed the deadline of
//! 50 ms, and 0.2 % lost the key to other processes. No check missed a deadline of 200 ms.
//!
//! A statement changes the key for one process, and takes a whole round trip. So if the server is far and processes
//! share a hot key, give them a long deadline. Two processes with four tasks each, and round trips of 16 ms: 30 % of
//! the checks failed with a deadline of 100 ms, 14 % with 200 ms, 7 % with 400 ms, and 0.8 % with 800 ms. Of four
//! processes, 3 % failed with 800 ms.
//!
//! # Connections
//!
//! Statements are not prepared, and no setting of a connection is changed. So a PgBouncer that
//! pools transactions may be between the store and the server. A PgBouncer that pools statements works too,
//! because each statement is a transaction of its own.
//!
//! After 30 s without traffic, both TCP and the store probe a connection; the store does so with an
//! empty statement. If a check fails because of its deadline, its statement keeps the connection
//! until the server answers. After 20 ms without an answer, other statements use another
//! connection, if there is one. After 5 s the statement is cancelled and the connection closed. So
//! statements that hang use up `max_connections` for 5 s at most.

mod builder;
mod connections;
mod failure;
mod statement;
#[allow(clippy::module_inception, reason = "the file of the type")]
mod store;
mod table;
#[cfg(test)]
mod tests;

pub use tokio_postgres;

pub use builder::PostgresStoreBuilder;
pub use connections::{Connections, OwnConnections};
pub use statement::{Rows, Statement};
pub use store::PostgresStore;
pub use table::Durability;
