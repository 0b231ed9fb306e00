//! The contenders, a file each.

mod axum_gcra;
mod axum_governor;
mod governor;
mod leaky_bucket;
mod limitador;
mod ours;
mod pingora_limits;
mod ratelimit;
pub mod redis;
mod throttlecrab;
mod tower_governor;
mod tower_limit;
mod tower_resilience;
mod trypema;

use crate::contender::Contender;

/// All of them, in the order in which tables show them.
pub fn all() -> Vec<Box<dyn Contender>> {
    vec![
        Box::new(ours::Ours { sized: false }),
        Box::new(ours::Ours { sized: true }),
        Box::new(governor::Governor),
        Box::new(governor::WithFoldhash),
        Box::new(tower_governor::TowerGovernor),
        Box::new(axum_governor::AxumGovernor),
        Box::new(axum_gcra::AxumGcra),
        Box::new(throttlecrab::Throttlecrab),
        Box::new(trypema::Trypema),
        Box::new(limitador::Limitador),
        Box::new(tower_resilience::TowerResilience),
        Box::new(tower_limit::TowerLimit),
        Box::new(pingora_limits::PingoraLimits),
        Box::new(ratelimit::Ratelimit),
        Box::new(leaky_bucket::LeakyBucket),
    ]
}

/// Returns the one of this name.
pub fn named(name: &str) -> Box<dyn Contender> {
    let mut found = all().into_iter().filter(|contender| contender.name() == name);
    found.next().unwrap_or_else(|| panic!("no contender is named {name}"))
}

pub use ours::{ALIKE, NAME};
