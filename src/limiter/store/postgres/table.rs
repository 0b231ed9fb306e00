//! The table, and the statements for it.
//!
//! Why they are as they are:
//!
//! * There is no index on `expires`. With one, each change of a row would write both indexes, and leave a row behind
//!   that only a vacuum removes. Without it, a change stays within its page, which has room for it by the fill factor.
//! * Keys are compared byte by byte (`COLLATE "C"`). So each server locks the rows of a set in the same order, and no
//!   two sets wait for each other.
//! * A set is one statement. Its rows are locked before they are compared, and everything is written or nothing. A row
//!   that came after the statement began is not seen, and inserting it fails as a unique violation, which undoes the
//!   whole statement.
//! * `lock_timeout` ends with the statement, since each statement is a transaction of its own. A setting of the
//!   connection would be one of other applications behind PgBouncer.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use crate::error::labelled;
use crate::event::StoreErrorKind;
use crate::limiter::store::StoreError;

/// The longest name of a table or a schema, in bytes.
const NAME_MAX: usize = 63;

/// The rows that a sweep looks at.
pub(super) const SWEPT: usize = 100;

labelled! {
    /// Whether limits survive a crash of the server.
    Durability,
    /// Returns the label.
    as_str {
        /// The table is written to the server's log, so limits survive a crash of the server and are copied to
        /// standbys. Each check waits until the log is on the disk, unless the role has `synchronous_commit` off.
        Logged = "logged",
        /// The table is not written to the log. Checks are faster. After a crash the server empties the table, so each
        /// key has its whole quota again. A standby that takes over also has an empty table. A clean restart keeps it.
        Unlogged = "unlogged",
    }
}

/// A table's name, and the statements for it.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// The name as it stands in SQL.
    name: String,
    /// Returns the values of keys.
    pub(super) load: Arc<str>,
    /// Replaces one value.
    pub(super) replace: Arc<str>,
    /// Inserts one value, or returns the one that was there when the statement began.
    pub(super) insert: Arc<str>,
    /// Makes any changes.
    pub(super) swap: Arc<str>,
    /// Removes values whose time is over.
    pub(super) sweep: Arc<str>,
}

impl Table {
    /// Makes the statements for a table: its name, or its schema and name with a dot between.
    pub(super) fn new(name: &str, max_lock_wait: Duration) -> Result<Self, StoreError> {
        let parts: Vec<&str> = name.split('.').collect();
        let is_name = |part: &&str| {
            (1..=NAME_MAX).contains(&part.len())
                && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
                && !part.as_bytes()[0].is_ascii_digit()
        };
        if parts.len() > 2 || !parts.iter().all(is_name) {
            return Err(StoreError::new(
                StoreErrorKind::Misconfigured,
                format!(
                    "{name:?} cannot be the name of a table: use at most {NAME_MAX} lowercase letters, digits and \
                     underscores, with a schema and a dot before it if need be"
                ),
            ));
        }
        // In quotes, since a name may be a word of SQL.
        let name = parts.iter().map(|part| format!("\"{part}\"")).collect::<Vec<_>>().join(".");
        let wait = format!("set_config('lock_timeout', '{}', true) IS NOT NULL", max_lock_wait.as_millis());
        Ok(Self {
            load: format!(
                "SELECT clock_timestamp(), stored.version, stored.value \
                 FROM unnest($1) WITH ORDINALITY AS wanted(key, place) LEFT JOIN {name} AS stored USING (key) \
                 ORDER BY place"
            )
            .into(),
            replace: format!(
                "UPDATE {name} SET version = $3, value = $4, expires = clock_timestamp() + $5 * interval '1 second' \
                 WHERE key = $1 AND version = $2 AND {wait} RETURNING clock_timestamp()"
            )
            .into(),
            insert: format!(
                "WITH inserted AS (\
                 INSERT INTO {name} (key, version, value, expires) \
                 SELECT $1, $2, $3, clock_timestamp() + $4 * interval '1 second' WHERE {wait} \
                 ON CONFLICT DO NOTHING RETURNING key) \
                 SELECT clock_timestamp(), stored.version, stored.value, EXISTS (SELECT FROM inserted) \
                 FROM (SELECT) AS one LEFT JOIN {name} AS stored ON stored.key = $1"
            )
            .into(),
            swap: format!(
                "WITH wanted AS MATERIALIZED (\
                 SELECT * FROM unnest($1, $2, $3, $4, $5, $6) WITH ORDINALITY \
                 AS wanted(key, expected, is_put, version, value, lives, place)), \
                 present AS MATERIALIZED (\
                 SELECT key, version, value FROM {name} WHERE key = ANY($1) AND {wait} ORDER BY key FOR UPDATE), \
                 verdict AS MATERIALIZED (\
                 SELECT bool_and(present.version IS NOT DISTINCT FROM expected) AS holds, clock_timestamp() AS now \
                 FROM wanted LEFT JOIN present USING (key)), \
                 updated AS (\
                 UPDATE {name} AS stored SET version = wanted.version, value = wanted.value, \
                 expires = now + lives * interval '1 second' FROM wanted, verdict \
                 WHERE holds AND is_put AND expected IS NOT NULL AND stored.key = wanted.key), \
                 inserted AS (\
                 INSERT INTO {name} (key, version, value, expires) \
                 SELECT key, wanted.version, wanted.value, now + lives * interval '1 second' FROM wanted, verdict \
                 WHERE holds AND is_put AND expected IS NULL ORDER BY key), \
                 deleted AS (\
                 DELETE FROM {name} AS stored USING wanted, verdict \
                 WHERE holds AND NOT is_put AND stored.key = wanted.key) \
                 SELECT now, present.version, present.value, holds \
                 FROM verdict CROSS JOIN wanted LEFT JOIN present USING (key) ORDER BY place"
            )
            .into(),
            sweep: format!(
                "WITH looked AS MATERIALIZED (\
                 SELECT key FROM {name} WHERE key > $1 ORDER BY key LIMIT {SWEPT}), \
                 over AS MATERIALIZED (\
                 SELECT stored.key FROM {name} AS stored JOIN looked USING (key) WHERE stored.expires < clock_timestamp() \
                 FOR UPDATE OF stored SKIP LOCKED), \
                 gone AS (DELETE FROM {name} AS stored USING over WHERE stored.key = over.key) \
                 SELECT max(key) FROM looked HAVING count(*) = {SWEPT}"
            )
            .into(),
            name,
        })
    }

    /// Returns the statement that creates the table.
    pub(super) fn create(&self, durability: Durability) -> String {
        let mut sql = "CREATE ".to_owned();
        if durability == Durability::Unlogged {
            sql.push_str("UNLOGGED ");
        }
        let _ = write!(
            sql,
            "TABLE IF NOT EXISTS {} (key text COLLATE \"C\" PRIMARY KEY, version uuid NOT NULL, \
             expires timestamptz NOT NULL, value bytea NOT NULL) WITH (fillfactor = 50)",
            self.name
        );
        sql
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tables_are_checked_and_quoted() {
        let table = |name: &str| Table::new(name, Duration::from_millis(25));
        for name in ["ratelimit", "app.limits", "user", "_1", &"a".repeat(63)] {
            assert!(table(name).is_ok(), "{name}");
        }
        for name in ["", "a.b.c", ".", "a.", "1a", "A", "a b", "a\"b", "a;b", "ä", &"a".repeat(64)] {
            let error = table(name).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{name}");
        }
        let sql = table("app.user").unwrap().create(Durability::Unlogged);
        assert!(sql.starts_with("CREATE UNLOGGED TABLE IF NOT EXISTS \"app\".\"user\" (key "), "{sql}");
    }
}
