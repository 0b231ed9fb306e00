//! Contenders that keep their states in Redis, a file each.
//!
//! limitador is not among them: 0.14.0 does not compile with its Redis storage unless RocksDB is built as well.

mod contender;
mod ours;
mod textbook;
mod trypema;

pub use contender::{RedisContender, Remote};

/// All of them, in the order in which tables show them.
pub fn all() -> Vec<Box<dyn RedisContender>> {
    vec![
        Box::new(ours::Ours { leases: false }),
        Box::new(ours::Ours { leases: true }),
        Box::new(textbook::Textbook),
        Box::new(trypema::Trypema),
    ]
}
