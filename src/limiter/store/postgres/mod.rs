//! Limits in PostgreSQL: a table, and one statement for each check.
//!
//! [`PostgresStore`] makes its own connections. [`PostgresStoreBuilder::build`] takes the pool that the application
//! has. The guide's page [No Redis, but a database](crate::guide::no_redis_but_a_database) says what it costs and what
//! happens if the server fails.

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
