//! Places of requests over TCP that end in every way, counted in Redis by two processes' limiters.

use std::time::Duration;

use crate::in_flight_over_tcp::{Campaign, requests};
use crate::support::proxy::Proxy;
use crate::support::redis_server::Server;

use super::{connected, keys, patient};

/// Returns how many units are taken of all keys, and for how many requests in line some are kept, as the stored values
/// say.
fn stored(server: &Server) -> u64 {
    let mut connection = server.connection();
    let (seconds, micros): (f64, f64) = redis::cmd("TIME").query(&mut connection).unwrap();
    let mut taken = 0.0;
    for key in keys(server).into_iter().filter(|key| key.ends_with(b":places")) {
        let value: Vec<u8> = redis::cmd("GET").arg(key).query(&mut connection).unwrap();
        let Some((_, rows)) = value.split_at_checked(25) else { continue }; // it has lapsed
        for row in rows.chunks_exact(36) {
            let [holder, units, lapses] = [0, 16, 24].map(|at| f64::from_le_bytes(row[at..at + 8].try_into().unwrap()));
            if lapses > seconds * 1e6 + micros {
                taken += if holder < 0.0 { 1.0 } else { units };
            }
        }
    }
    taken as u64
}

/// `IN_FLIGHT_REQUESTS` says how many requests are sent.
#[test]
fn requests_that_end_in_every_way_leave_no_place_on_redis() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let server = Server::start();
        let proxy = Proxy::start(server.port());
        let limiters = [connected(patient(), &server.url()).await, connected(patient(), &proxy.url()).await];
        // Now and then the answers of one of them take a while, and clients go away meanwhile.
        let slows = tokio::spawn(async move {
            loop {
                proxy.hold(true);
                tokio::time::sleep(Duration::from_millis(3)).await;
                proxy.hold(false);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let campaign = Campaign {
            limiters,
            requests: requests(1_600),
            wait: Duration::from_millis(250),
            takes: Duration::from_millis(15),
            soon: Duration::from_millis(3),
        };
        campaign.run(async || stored(&server)).await;
        slows.abort();
    });
}
