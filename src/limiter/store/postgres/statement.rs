//! A statement with its parameters, and the rows that answer it.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};
use tokio_postgres::{Client, Row};

use crate::base::time::Timestamp;
use crate::limiter::store::{Value, Version};

/// A statement of a [`PostgresStore`](super::PostgresStore), with its parameters. Clones share the
/// parameters.
#[derive(Clone)]
pub struct Statement {
    sql: Arc<str>,
    parameters: Arc<[Parameter]>,
}

/// A parameter and its type.
pub(super) type Parameter = (Box<dyn ToSql + Send + Sync>, Type);

/// The rows that answer a [`Statement`].
pub struct Rows(pub(super) Vec<Row>);

impl Statement {
    pub(super) fn new(sql: &Arc<str>, parameters: impl Into<Arc<[Parameter]>>) -> Self {
        Self { sql: Arc::clone(sql), parameters: parameters.into() }
    }

    /// Runs the statement in one round trip. The statement is not prepared, so it works behind a PgBouncer
    /// that pools transactions.
    ///
    /// # Errors
    /// Returns the error of the server or of the connection.
    pub async fn run(&self, client: &Client) -> Result<Rows, tokio_postgres::Error> {
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> =
            self.parameters.iter().map(|(value, of)| (&**value as &(dyn ToSql + Sync), of.clone())).collect();
        client.query_typed(&self.sql, &parameters).await.map(Rows)
    }
}

impl fmt::Debug for Statement {
    /// Leaves the parameters out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Statement").field("sql", &self.sql).finish_non_exhaustive()
    }
}

impl fmt::Debug for Rows {
    /// Leaves the values out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Rows").field(&self.0.len()).finish()
    }
}

/// Makes a parameter of a type.
pub(super) fn parameter(value: impl ToSql + Send + Sync + 'static, of: Type) -> Parameter {
    (Box::new(value), of)
}

/// Returns the time in the first column.
pub(super) fn time_of(row: &Row) -> Result<Timestamp, tokio_postgres::Error> {
    let time: SystemTime = row.try_get(0)?;
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Ok(Timestamp::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX)))
}

/// Returns the value in the second and third column, if there is one.
pub(super) fn value_of(row: &Row) -> Result<Option<Value>, tokio_postgres::Error> {
    let (version, bytes): (Option<Uuid>, Option<&[u8]>) = (row.try_get(1)?, row.try_get(2)?);
    Ok(version.zip(bytes).map(|(version, bytes)| Value::new(Version::from_bytes(version.0), bytes)))
}

/// A version as a `uuid` of PostgreSQL.
#[derive(Clone, Copy, Debug)]
pub(super) struct Uuid(pub(super) [u8; 16]);

impl From<Version> for Uuid {
    fn from(version: Version) -> Self {
        Self(version.to_bytes())
    }
}

impl ToSql for Uuid {
    fn to_sql(&self, _of: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.0);
        Ok(IsNull::No)
    }

    accepts!(UUID);
    to_sql_checked!();
}

impl<'a> FromSql<'a> for Uuid {
    fn from_sql(_of: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw.try_into()?))
    }

    accepts!(UUID);
}
