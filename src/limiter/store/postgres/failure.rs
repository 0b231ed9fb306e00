//! Classifies errors, for the limiter and for the connection.

use std::error::Error;
use std::sync::Arc;

use tokio_postgres::error::SqlState;

use crate::error::BoxError;
use crate::event::StoreErrorKind;
use crate::limiter::remote::loss;
use crate::limiter::store::StoreError;

/// An error that several callers get.
pub(super) type SharedError = Arc<dyn Error + Send + Sync>;

/// Returns the server's code for an error, if the error or one of its sources is from the server.
pub(super) fn code_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a SqlState> {
    levels_of(error).find_map(|error| error.downcast_ref::<tokio_postgres::Error>()?.code())
}

/// Returns an error and its sources.
fn levels_of<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    let error = error.downcast_ref::<SharedError>().map_or(error, |shared| &**shared);
    std::iter::successors(Some(error), |error| (*error).source())
}

/// Returns whether the server rolled a statement back because another statement had inserted one of its keys.
pub(super) fn is_conflict(error: &BoxError) -> bool {
    code_of(&**error) == Some(&SqlState::UNIQUE_VIOLATION)
}

/// Returns whether the server rolled a statement back because of other statements that ran at the same time. Such a
/// statement has changed nothing.
pub(super) fn is_undone(error: &BoxError) -> bool {
    let undone = [&SqlState::T_R_SERIALIZATION_FAILURE, &SqlState::T_R_DEADLOCK_DETECTED];
    code_of(&**error).is_some_and(|code| undone.contains(&code))
}

/// Returns whether a statement of several swaps changed nothing because another statement had inserted one of its
/// keys.
pub(super) fn is_of_an_insert(error: &BoxError) -> bool {
    let by_insert = [&SqlState::DIVISION_BY_ZERO, &SqlState::LOCK_NOT_AVAILABLE];
    code_of(&**error).is_some_and(|code| by_insert.contains(&code))
}

/// Returns whether the connection is open but useless, because its server is read-only.
pub(super) fn is_at_wrong_server(error: &(dyn Error + 'static)) -> bool {
    code_of(error) == Some(&SqlState::READ_ONLY_SQL_TRANSACTION)
}

/// Returns whether creating the table failed because it already exists.
pub(super) fn is_there(error: &BoxError) -> bool {
    let there = [&SqlState::DUPLICATE_TABLE, &SqlState::DUPLICATE_OBJECT, &SqlState::UNIQUE_VIOLATION];
    code_of(&**error).is_some_and(|code| there.contains(&code))
}

/// When an error happened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// When the store was made.
    Setup,
    /// After the store was made. An error that looks like a wrong setting may then be temporary. During a
    /// failover, all servers are read-only for a while, and a server that is stopping ends a TLS handshake.
    Service,
}

/// Converts an error of a statement or a connection into the error that the limiter reports.
pub(super) fn store_error(error: BoxError, name: &str, create: &str, phase: Phase) -> StoreError {
    let (kind, message) = match code_of(&*error) {
        Some(code) => of_code(code, name, create, phase),
        None if is_read_only(&*error) => read_only(name, phase),
        None if is_of(&*error, &SETUP) || (phase == Phase::Setup && is_of(&*error, &[HANDSHAKE])) => {
            let message = format!(
                "the connection to {name} is not configured correctly: check the address, and use connect_with for TLS"
            );
            (StoreErrorKind::Misconfigured, message)
        }
        None => (StoreErrorKind::Unavailable, loss(&format_args!("PostgreSQL at {name}"), &*error)),
    };
    StoreError::new(kind, message).caused_by(SharedError::from(error))
}

fn of_code(code: &SqlState, name: &str, create: &str, phase: Phase) -> (StoreErrorKind, String) {
    use StoreErrorKind::{Contended, Misconfigured, Timeout, Unavailable};
    let is_of = |class: &str| code.code().starts_with(class);
    if *code == SqlState::UNDEFINED_TABLE || *code == SqlState::INVALID_SCHEMA_NAME {
        let how = "create the table with this statement, or with PostgresStoreBuilder::create_table";
        (Misconfigured, format!("{name} has no table for the limits: {how}: {create};"))
    } else if *code == SqlState::READ_ONLY_SQL_TRANSACTION {
        read_only(name, phase)
    } else if *code == SqlState::INSUFFICIENT_PRIVILEGE {
        (Misconfigured, format!("a right is missing at {name}: grant SELECT, INSERT, UPDATE and DELETE on the table"))
    } else if is_of("28") || is_of("3D") {
        (Misconfigured, format!("{name} refuses the connection: check user, password and database"))
    } else if is_of("42") || is_of("22") || is_of("23") || is_of("0A") {
        let how = "compare the table with the statement of PostgresStoreBuilder::create_sql";
        (Misconfigured, format!("{name} rejects the statement, so the table has another form: {how}"))
    } else if *code == SqlState::LOCK_NOT_AVAILABLE {
        (Contended, format!("another transaction at {name} holds the row for longer than max_lock_wait"))
    } else if *code == SqlState::T_R_SERIALIZATION_FAILURE || *code == SqlState::T_R_DEADLOCK_DETECTED {
        (
            Contended,
            format!("{name} rolled the statement back each time, because other transactions changed the same rows"),
        )
    } else if *code == SqlState::QUERY_CANCELED {
        (Timeout, format!("{name} took too long, and the statement was cancelled"))
    } else {
        (Unavailable, format!("{name} cannot serve now"))
    }
}

fn read_only(name: &str, phase: Phase) -> (StoreErrorKind, String) {
    match phase {
        Phase::Setup => {
            let message = format!("{name} is read-only: connect to the primary server, not to a standby");
            (StoreErrorKind::Misconfigured, message)
        }
        Phase::Service => {
            let message =
                format!("{name} is read-only: a failover is under way, or the server was made a standby or read-only");
            (StoreErrorKind::Unavailable, message)
        }
    }
}

/// Returns whether the client library closed the connection because the server accepts no writes.
fn is_read_only(error: &(dyn Error + 'static)) -> bool {
    // Compares the error's text, because the client library has no other way to recognize this error.
    levels_of(error).any(|error| error.is::<std::io::Error>() && error.to_string() == "database does not allow writes")
}

/// The errors of a connection whose settings are wrong, independently of the server's state.
const SETUP: [&str; 2] = ["invalid configuration", "invalid connection string"];

const HANDSHAKE: &str = "error performing TLS handshake";

/// Returns whether an error of the client library has one of these texts. The library offers no
/// other way to recognise these errors.
fn is_of(error: &(dyn Error + 'static), texts: &[&str]) -> bool {
    let is_of_them = |error: &tokio_postgres::Error| texts.contains(&error.to_string().as_str());
    levels_of(error).any(|error| error.downcast_ref::<tokio_postgres::Error>().is_some_and(is_of_them))
}
