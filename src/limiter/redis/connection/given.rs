//! The transport over a connection of the crate `redis` that the application has.

use redis::Value;
use redis::aio::ConnectionLike;
use tokio::sync::OnceCell;

use super::address::Address;
use super::failure::CallFailure;
use super::on_redis_rs::{failure, packed, reply};
use super::transport::{Command, ConnectionObserver, RedisReply, SlotState, Transport};
use crate::limiter::BoxFuture;

/// A connection that the application made. Clones of this value share the connection.
pub(super) struct Given<C> {
    connection: C,
    address: Address,
    /// Whether the connection leads to a cluster. The first call determines this value.
    is_cluster: OnceCell<bool>,
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Given<C> {
    /// Errors have the `name`.
    pub(super) fn new(connection: C, name: &Address) -> Self {
        Self { connection, address: name.clone(), is_cluster: OnceCell::new() }
    }

    async fn call(&self, command: Command<'_>) -> Result<RedisReply, CallFailure> {
        if *self.is_cluster.get_or_try_init(|| self.find_mode()).await? {
            let words = "the server belongs to a cluster: connect with a URL that begins with redis-cluster:// or \
                         rediss-cluster://";
            return Err(CallFailure::unusable(&self.address, words));
        }
        let answer = self.connection.clone().req_packed_command(&packed(command)).await;
        answer.map_err(|error| failure(&error, &self.address)).and_then(|value| reply(value, &self.address))
    }

    /// Returns whether the server is part of a cluster, which is refused for two reasons. A cluster connection of
    /// the crate sends a command again after its connection was lost, so a check could be charged twice. A
    /// connection to one server of a cluster reaches only a part of the slots.
    async fn find_mode(&self) -> Result<bool, CallFailure> {
        // Each user may send it.
        match self.connection.clone().req_packed_command(&redis::cmd("HELLO")).await {
            Ok(value) => Ok(has_cluster_mode(&value)),
            Err(error) if error.code().is_some() => Ok(false), // the server is a proxy that does not know it
            Err(error) => Err(failure(&error, &self.address)),
        }
    }
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Transport for Given<C> {
    /// The application makes, renews and ends the connection.
    fn connect<'a>(&'a self, heard: &'a dyn ConnectionObserver) -> BoxFuture<'a, CallFailure> {
        Box::pin(async {
            heard.record_connection(None);
            std::future::pending().await
        })
    }

    /// The server is not part of a cluster, so no slot is being moved.
    fn send<'a>(&'a self, command: Command<'a>, _: SlotState) -> BoxFuture<'a, Result<RedisReply, CallFailure>> {
        Box::pin(self.call(command))
    }

    fn is_given(&self) -> bool {
        true
    }

    fn uses_tls(&self) -> bool {
        false // no handshake of such a connection is seen to fail
    }

    #[cfg(test)]
    fn quit(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// Returns whether a reply to `HELLO` says that the server is part of a cluster.
fn has_cluster_mode(hello: &Value) -> bool {
    let is = |value: &Value, text: &str| match value {
        Value::BulkString(bytes) => bytes == text.as_bytes(),
        Value::SimpleString(it) => it == text,
        _ => false,
    };
    let mut fields = hello.as_map_iter().into_iter().flatten();
    fields.any(|(name, value)| is(name, "mode") && is(value, "cluster"))
}
