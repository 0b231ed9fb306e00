//! Tests of the program `tower-ratelimit`, run as its users run it.

mod check;
mod convert;
mod explain;
mod hostile;
mod program;
