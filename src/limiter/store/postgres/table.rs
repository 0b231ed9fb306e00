//! The table, and the statements for it.
//!
//! The reasons for the form of the table and the statements:
//!
//! * There is no index on `expires`. With such an index, each change of a row would write both indexes, and leave a
//!   row behind that only a vacuum removes. Without the index, a change stays within the row's page, where the fill
//!   factor leaves room.
//! * Keys are compared byte by byte (`COLLATE "C"`). So each server locks the rows of a set in the same order, and no
//!   two sets wait for each other.
//! * A set is one statement. The statement locks the rows before it compares them, and writes all changes or none.
//!   The statement does not see a row that another transaction inserts after the statement began. Inserting that row
//!   again fails as a unique violation, which rolls the whole statement back.
//! * Several swaps share one statement, which is one transaction and waits once for the disk. The statement skips rows
//!   that another transaction has locked, so other keys do not wait for such a row, and two processes never wait for
//!   each other's rows. A skipped row looks like a missing row, so the statement looks for missing rows once more
//!   without a lock. A swap with a skipped row is sent alone. If another transaction inserts a key after the statement
//!   began, the statement does not insert the key, and the key's swap is sent alone too. If a swap of several new keys
//!   could insert only some of them, a deliberate division by zero rolls the whole statement back, and the swaps that
//!   insert are sent alone.
//! * `lock_timeout` applies only to its own statement, because each statement is a transaction of its own. Behind
//!   PgBouncer, a setting of the connection would also apply to other applications.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use crate::error::labelled;
use crate::event::StoreErrorKind;
use crate::limiter::store::StoreError;

/// The longest name of a table or a schema, in bytes.
const NAME_MAX: usize = 63;

/// The number of rows that a sweep looks at.
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
        /// key has its whole quota again. A standby that takes over also has an empty table. A clean restart keeps the
        /// table's rows.
        Unlogged = "unlogged",
    }
}

/// A table's name, and the statements for it.
#[derive(Clone, Debug)]
pub(super) struct PostgresTable {
    /// The name as it is written in SQL.
    name: String,
    /// Returns the values of keys.
    pub(super) load: Arc<str>,
    /// Replaces one value.
    pub(super) replace: Arc<str>,
    /// Inserts one value, or returns the value that existed when the statement began.
    pub(super) insert: Arc<str>,
    /// Makes any changes.
    pub(super) swap: Arc<str>,
    /// Replaces each of several values that has the expected version, and returns the indices of
    /// the replaced values.
    pub(super) replace_each: Arc<str>,
    /// Makes any changes of several swaps. The statement returns for each change whether its swap was made, or null
    /// if that swap has to be sent alone.
    pub(super) swap_each: Arc<str>,
    /// Removes expired values.
    pub(super) sweep: Arc<str>,
}

impl PostgresTable {
    /// Makes the statements for a table. `name` is the table's name, or its schema and its name
    /// with a dot between them.
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
                     underscores, optionally after a schema and a dot"
                ),
            ));
        }
        // The name is quoted, because it may be a keyword of SQL.
        let name = parts.iter().map(|part| format!("\"{part}\"")).collect::<Vec<_>>().join(".");
        // PostgreSQL evaluates this subquery exactly once, even if there is no row yet.
        let wait = format!("(SELECT set_config('lock_timeout', '{}', true)) IS NOT NULL", max_lock_wait.as_millis());
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
                 AS wanted(key, expected, is_put, version, value, lives, place) WHERE {wait}), \
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
            replace_each: format!(
                "WITH wanted AS MATERIALIZED (\
                 SELECT stored.key, wanted.version, wanted.value, lives, place \
                 FROM unnest($1, $2, $3, $4, $5) WITH ORDINALITY AS wanted(key, expected, version, value, lives, place) \
                 JOIN {name} AS stored ON stored.key = wanted.key AND stored.version = expected \
                 WHERE {wait} FOR UPDATE OF stored SKIP LOCKED) \
                 UPDATE {name} AS stored SET version = wanted.version, value = wanted.value, \
                 expires = clock_timestamp() + lives * interval '1 second' FROM wanted WHERE stored.key = wanted.key \
                 RETURNING clock_timestamp(), place"
            )
            .into(),
            swap_each: format!(
                "WITH wanted AS MATERIALIZED (\
                 SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7) WITH ORDINALITY \
                 AS wanted(key, swap, expected, is_put, version, value, lives, place) WHERE {wait}), \
                 present AS MATERIALIZED (\
                 SELECT key, version, value FROM {name} WHERE key = ANY($1) FOR UPDATE SKIP LOCKED), \
                 compared AS MATERIALIZED (\
                 SELECT wanted.*, present.version AS current, present.value AS stored, present.key IS NULL \
                 AND EXISTS (SELECT FROM {name} AS hidden WHERE hidden.key = wanted.key) AS is_hidden \
                 FROM wanted LEFT JOIN present USING (key)), \
                 verdict AS MATERIALIZED (\
                 SELECT swap, CASE WHEN NOT bool_or(is_hidden) \
                 THEN bool_and(current IS NOT DISTINCT FROM expected) END AS holds, \
                 count(*) FILTER (WHERE is_put AND expected IS NULL) AS inserts FROM compared GROUP BY swap), \
                 inserted AS (\
                 INSERT INTO {name} (key, version, value, expires) \
                 SELECT key, version, value, clock_timestamp() + lives * interval '1 second' \
                 FROM compared JOIN verdict USING (swap) WHERE holds AND is_put AND expected IS NULL ORDER BY key \
                 ON CONFLICT DO NOTHING RETURNING key), \
                 made AS MATERIALIZED (\
                 SELECT swap, CASE WHEN count(inserted.key) = inserts THEN true \
                 WHEN count(inserted.key) > 0 THEN 1 / (inserts - inserts) = 1 END AS is_made \
                 FROM compared JOIN verdict USING (swap) LEFT JOIN inserted USING (key) \
                 WHERE holds GROUP BY swap, inserts), \
                 updated AS (\
                 UPDATE {name} AS stored SET version = compared.version, value = compared.value, \
                 expires = clock_timestamp() + lives * interval '1 second' FROM compared JOIN made USING (swap) \
                 WHERE is_made AND is_put AND expected IS NOT NULL AND stored.key = compared.key), \
                 deleted AS (\
                 DELETE FROM {name} AS stored USING compared JOIN made USING (swap) \
                 WHERE is_made AND NOT is_put AND stored.key = compared.key) \
                 SELECT clock_timestamp(), CASE WHEN NOT holds THEN current END, CASE WHEN NOT holds THEN stored END, \
                 CASE WHEN holds THEN is_made ELSE holds END \
                 FROM compared JOIN verdict USING (swap) LEFT JOIN made USING (swap) ORDER BY place"
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
        let table = |name: &str| PostgresTable::new(name, Duration::from_millis(25));
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
