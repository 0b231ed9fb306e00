//! Each algorithm on a real server, beside the limiter in memory. Other tests with servers are in `tests/postgres/`.

#[path = "../../../../../tests/support/postgres.rs"]
mod postgres;

use postgres::Server;

use super::{Durability, PostgresStore};
use crate::algorithm::properties::for_each_algorithm;
use crate::limiter::redis_server;
use crate::limiter::store::tests::parity::play;
use crate::quota::{Algorithm, Anchor};

/// Steps of each algorithm. They are few, since a step takes a millisecond. `POSTGRES_PARITY_STEPS` asks for more.
const STEPS: u32 = 500;

macro_rules! parity {
    ($($name:ident: $algorithm:ident, $anchor:ident;)*) => {$(
        #[tokio::test]
        async fn $name() {
            let steps = match std::env::var("POSTGRES_PARITY_STEPS") {
                Ok(steps) => steps.parse().unwrap(),
                Err(_) => crate::sampling::cases(STEPS),
            };
            let server = Server::start();
            let builder = PostgresStore::builder().create_table(Durability::Unlogged);
            let store = builder.connect(&server.url()).await.unwrap();
            play(Algorithm::$algorithm, Anchor::$anchor, steps, || store.clone()).await;
        }
    )*};
}

for_each_algorithm!(parity);
