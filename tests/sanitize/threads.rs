//! The tests of `MemoryLimiter` that use it from several threads.

#[path = "../memory/growth.rs"]
mod growth;
#[path = "../memory/linearizable.rs"]
mod linearizable;
#[path = "../memory/places.rs"]
mod places;
#[path = "../memory/random_clocks.rs"]
mod random_clocks;
#[path = "../memory/stress.rs"]
mod stress;

#[path = "../support/histories.rs"]
mod histories;
mod support;
