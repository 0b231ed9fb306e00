//! A limiter that keeps its states in this process's memory.
//!
//! [`MemoryLimiterBuilder`] sets up a [`MemoryLimiter`](crate::MemoryLimiter).
//!
//! # Floods of fresh keys
//!
//! With [`OnFull::Evict`] the limiter forgets a key that is out of allowance only if all keys that compete with
//! it for a slot are out of allowance too. An attacker therefore has to use up the allowance of each fresh key.
//! `tests/memory/floods.rs` measures how many keys a flood has to use up before a limiter of capacity `C`
//! forgets a key that is out of allowance:
//!
//! | flood of used-up | states it forgets | the first after | half after |
//! |---|---|---|---|
//! | buckets, windows, sub-windows, logs of any size | all but closed blocks and meters | 2.2·C | 2.6·C |
//! | closed blocks | all but meters, closed blocks last | 2.3·C | 2.7·C |
//! | meters | next to none: a new meter that finds no room is denied | never | never |
//!
//! "Never" was measured in a limiter that other keys fill to an eighth. When other keys used half of the limiter, a
//! flood of meters made the limiter forget one of 200,000 used-up keys.
//!
//! If logs and sub-windows need more entries than the limiter has, they lose precision but no units: see
//! [`MemoryLimiter`](crate::MemoryLimiter).
//!
//! # Millions of keys
//!
//! With a million active keys a check waits for memory: for the key's slot, and for the translation of the
//! slot's address. Large pages shorten the wait for the translation. On Linux, a program with the allocator
//! of glibc 2.35 or later gets large pages if it is started with the environment variable
//! `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, and if `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` or
//! `always`. In one run with the same resident memory, large pages shortened a check from 181 ns to 161 ns with a
//! million addresses, and from 224 ns to 181 ns with ten million.
//!
//! # Changed quotas
//!
//! Each state names the quota it was written under. When a policy's quota changes, the units that its keys have
//! used stay used, however many quotas the limiter has met. The limiter gives numbers to up to 16,382 quotas that
//! have live states. A state of any further quota is stored together with the parameters of its quota. Such a state
//! takes 128 bytes more, and snapshots leave it out. A check of such a state needs a lock, and takes a few times
//! longer than other checks. A meter with such a state can be evicted like any other key. The observers get
//! [`TooManyQuotas`](crate::event::LimiterEvent::TooManyQuotas).
//!
//! When three quarters of the numbers are in use, the limiter looks for quotas that no request used for ten seconds
//! and that have no live state. The search takes about ten milliseconds for a million keys, in the request that
//! starts the search.

mod builder;
mod charge;
mod entry_arena;
mod events;
mod growth;
pub(crate) mod limiter;
mod locked;
mod locked_key;
#[cfg(all(test, ratelimit_loom))]
mod loom_tests;
mod places;
mod room;
mod setup;
mod short_way;
#[cfg(all(test, ratelimit_shuttle))]
mod shuttle_tests;
mod slot_table;
mod snapshot;
mod states;
mod versions;
mod word;

pub use builder::MemoryLimiterBuilder;
pub use setup::OnFull;
