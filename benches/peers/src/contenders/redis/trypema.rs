//! trypema on Redis: sliding windows of sub-windows. It asks for Redis 7.2.

use std::sync::Arc;

use trypema::redis::{RedisKey, RedisRateLimiterProvider};
use trypema::{RateLimit, RateLimitDecision, RateLimiterBuilder, WindowSize};

use super::contender::{Connecting, RedisContender, remote};

pub struct Trypema;

impl RedisContender for Trypema {
    fn name(&self) -> &'static str {
        "trypema"
    }

    fn connect<'a>(&'a self, url: &'a str, denied: bool) -> Connecting<'a> {
        Box::pin(async move {
            let client = redis::Client::open(url).expect("a good URL");
            let connection = client.get_connection_manager().await.expect("the server is there");
            let (window, rate) = if denied {
                (WindowSize::hours_or_panic(1), RateLimit::per_hour_or_panic(1.0))
            } else {
                (WindowSize::seconds_or_panic(1), RateLimit::per_second_or_panic(1_000_000.0))
            };
            let builder = RedisRateLimiterProvider::builder(connection).window_size(window).disable_cleanup();
            let provider = builder.build().expect("the setup is possible");
            let key = RedisKey::try_from("probe".to_owned()).expect("a good key");
            if let Err(error) = provider.absolute().inc(&key, &rate, 1).await {
                println!("(trypema cannot use this server: {error})");
                return None;
            }
            let provider = Arc::new(provider);
            remote(move |key| {
                let provider = Arc::clone(&provider);
                let key = RedisKey::try_from(key.to_string()).expect("a good key");
                async move {
                    let decision = provider.absolute().inc(&key, &rate, 1).await.expect("the server answers");
                    matches!(decision, RateLimitDecision::Allowed)
                }
            })
        })
    }
}
