//! Arrows that are wrong today. This list only ever gets shorter.

/// The file that uses a name, and the file that defines it.
pub(super) const EXCEPTIONS: &[(&str, &str)] = &[
    ("limiter/memory/builder.rs", "limiter/memory/mod.rs"),
    ("limiter/memory/builder.rs", "limiter/memory/snapshot.rs"),
    ("limiter/memory/builder.rs", "limiter/memory/store.rs"),
];
