//! The exit codes of all commands.

/// The command did what it should, and found nothing wrong.
pub(crate) const FINE: u8 = 0;

/// A file has problems, or two files differ.
pub(crate) const PROBLEMS: u8 = 1;

/// The command could not do what it should: an option is wrong, or a file cannot be read.
pub(crate) const TROUBLE: u8 = 2;
