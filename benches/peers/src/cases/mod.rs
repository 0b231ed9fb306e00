//! The cases, a file for each family.

pub mod adopt;
pub mod algorithms;
pub mod check;
pub mod features;
pub mod keys;
pub mod layer;
pub mod memory;
pub mod profile;
pub mod redis;
pub mod server;
pub mod stream;
pub mod tiers;

use std::net::{IpAddr, Ipv4Addr};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::Zipf;

fn addresses(count: usize) -> Vec<IpAddr> {
    (0..count as u32).map(|number| IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number))).collect()
}

/// Texts of 24 bytes.
fn texts(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("customer-{number:015}")).collect()
}

/// The order in which keys come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Any, one as often as the other.
    Uniform,
    /// A few often, most seldom: the nth most frequent 1/n as often as the first.
    Zipf,
}

fn places(order: Order, keys: usize, seed: u64) -> Vec<u32> {
    let mut numbers = SmallRng::seed_from_u64(seed);
    let count = (4 * keys).clamp(1 << 12, keys.max(1 << 20));
    match order {
        Order::Uniform => (0..count).map(|_| numbers.random_range(0..keys as u32)).collect(),
        Order::Zipf => {
            let zipf = Zipf::new(keys as f64, 1.0).expect("there are keys");
            // The frequent ones are anywhere among the others.
            let place = |rank: f64| ((rank as u64 - 1).wrapping_mul(0x9e37_79b1) % keys as u64) as u32;
            (0..count).map(|_| place(numbers.sample(zipf))).collect()
        }
    }
}
