//! Tests of the program `tower-ratelimit`, run as its users run it.

mod check;
mod convert;
mod diff;
mod explain;
mod help;
mod hostile;
mod program;
