//! Helpers that every module may use and that use no other module: instants, waits, locks, random numbers,
//! headers, JSON.

pub(crate) mod calendar;
pub(crate) mod fields;
pub(crate) mod head;
pub(crate) mod header_names;
pub(crate) mod json;
#[cfg(any(feature = "_redis", feature = "store", feature = "status"))]
pub(crate) mod keyed_hash;
pub(crate) mod number_map;
pub(crate) mod order;
pub(crate) mod random;
#[cfg(test)]
pub(crate) mod sampling;
#[cfg(feature = "serde")]
pub(crate) mod serde;
pub(crate) mod sync;
pub(crate) mod time;
pub(crate) mod wait;
pub(crate) mod wait_list;
pub(crate) mod wakers;
pub(crate) mod zone;
