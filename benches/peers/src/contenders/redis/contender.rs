//! A contender that keeps its states in Redis.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// One that checks through Redis.
pub trait RedisContender {
    fn name(&self) -> &'static str;

    /// A limiter on the server at this URL; nothing if it cannot work with this server.
    fn connect<'a>(&'a self, url: &'a str, denied: bool) -> Connecting<'a>;
}

/// A limiter that is being connected.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = Option<Arc<dyn Remote>>> + 'a>>;

/// Checks a key, from any task.
pub trait Remote: Send + Sync {
    fn check(&self, key: u64) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;
}

/// A closure that checks is a limiter.
impl<F, R> Remote for F
where
    F: Fn(u64) -> R + Send + Sync,
    R: Future<Output = bool> + Send + 'static,
{
    fn check(&self, key: u64) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(self(key))
    }
}

pub fn remote<R>(check: impl Fn(u64) -> R + Send + Sync + 'static) -> Option<Arc<dyn Remote>>
where
    R: Future<Output = bool> + Send + 'static,
{
    Some(Arc::new(check))
}
