//! Tests of whole limiters in several processes.

pub(super) mod processes;
