//! The pace of bodies: bytes that wait for the units of a quota.

pub(super) mod account;
pub(super) mod accounts;
pub(super) mod body;
pub(super) mod request;
pub(super) mod source;
