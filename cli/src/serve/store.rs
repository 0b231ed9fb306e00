//! The store that processes share.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tower_ratelimit::RedisLimiter;
use tower_ratelimit::limiter::redis::RedisError;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore, PostgresStoreBuilder};
use tower_ratelimit::limiter::store::{StoreError, StoreLimiterBuilder};
use tower_ratelimit::limiter::{BoxLimiter, LimiterError, StoreErrorKind};
use tower_ratelimit::observe::Observer;

use super::failure::{Failure, with_causes};

/// The settings of the store.
#[derive(clap::Args, Debug)]
pub(crate) struct StoreOptions {
    /// The servers of Redis that all processes share, such as `redis://user:password@redis:6379`, or the sentinels that
    /// know the master: `redis-sentinel://sentinel:26379?sentinelServiceName=NAME`. Further sentinels are nodes:
    /// `redis-sentinel://a:26379?node=b:26379&node=c:26379&sentinelServiceName=NAME`
    #[arg(
        long,
        value_name = "URL",
        conflicts_with = "postgres",
        env = "TOWER_RATELIMIT_REDIS",
        hide_env_values = true
    )]
    redis: Option<String>,
    /// The database of PostgreSQL that all processes share. The table is created if it is missing
    #[arg(long, value_name = "URL", env = "TOWER_RATELIMIT_POSTGRES", hide_env_values = true)]
    postgres: Option<String>,
    /// The beginning of the names of all keys in Redis or PostgreSQL
    #[arg(long, default_value = "ratelimit", env = "TOWER_RATELIMIT_PREFIX")]
    prefix: String,
}

impl StoreOptions {
    /// Returns a limiter with the store, if there is one. A check may take the time `deadline`, and a connection some
    /// times of it.
    pub(crate) async fn connect<O: Observer + 'static>(
        &self,
        deadline: Duration,
        observer: &Arc<O>,
    ) -> Result<Option<BoxLimiter>, Failure> {
        if let Some(url) = &self.redis {
            let builder = RedisLimiter::builder().prefix(&self.prefix).deadline(deadline);
            let limiter = builder.observer(Arc::clone(observer)).connect(url).await.map_err(with_causes)?;
            return Ok(Some(BoxLimiter::new(limiter)));
        }
        if let Some(url) = &self.postgres {
            let store = match creating().connect(url).await {
                Err(error) if error.kind() == StoreErrorKind::Unavailable => {
                    tokio::spawn(create_table_later(url.clone()));
                    PostgresStore::connect(url).await
                }
                store => store,
            };
            let store = store.map_err(with_causes)?;
            let builder = StoreLimiterBuilder::new().prefix(&self.prefix).deadline(deadline);
            let limiter = builder.observer(Arc::clone(observer)).build(store).map_err(with_causes)?;
            return Ok(Some(BoxLimiter::new(limiter)));
        }
        Ok(None)
    }
}

/// Why the store does not decide.
pub(crate) struct StoreFailure {
    pub(crate) kind: StoreErrorKind,
    /// The text for the log, which may name the server.
    pub(crate) message: String,
}

/// Returns the kind of an error of a limiter with one of the stores.
pub(crate) fn kind_of(error: &LimiterError) -> StoreErrorKind {
    let of_redis = error.downcast_ref().map(RedisError::kind);
    of_redis.or_else(|| error.downcast_ref().map(StoreError::kind)).unwrap_or(StoreErrorKind::Unavailable)
}

/// Returns what connects and creates the table if it is missing.
fn creating() -> PostgresStoreBuilder {
    PostgresStore::builder().create_table(Durability::Unlogged)
}

/// Creates the table as soon as the server is there. Another error is that of each check.
async fn create_table_later(url: String) {
    while creating().connect(&url).await.is_err_and(|error| error.kind() == StoreErrorKind::Unavailable) {
        sleep(Duration::from_secs(1)).await;
    }
}
