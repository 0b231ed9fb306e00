//! The transport over a connection of the crate `redis` that the application has.

use redis::aio::ConnectionLike;
use tokio::time::{Instant, timeout_at};

use super::address::Address;
use super::error_class::Failure;
use super::on_redis_rs::{failure, packed, reply};
use super::transport::{BoxFuture, Command, Connections, Reply, SlotState, Transport};

/// A connection that the application made. Its clones are one connection.
pub(super) struct Given<C> {
    connection: C,
    address: Address,
}

impl<C> Given<C> {
    /// Errors have the `name`.
    pub(super) fn new(connection: C, name: &Address) -> Self {
        Self { connection, address: name.clone() }
    }
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Transport for Given<C> {
    /// The connection is the application's to make, to make anew and to end.
    fn connect<'a>(&'a self, heard: &'a dyn Connections) -> BoxFuture<'a, ()> {
        Box::pin(async {
            heard.record_connection();
            std::future::pending().await
        })
    }

    /// The server is of no cluster, so no slot is being moved.
    fn send<'a>(&'a self, command: Command<'a>, until: Instant, _: SlotState) -> BoxFuture<'a, Result<Reply, Failure>> {
        Box::pin(async move {
            let mut connection = self.connection.clone();
            let answer = timeout_at(until, connection.req_packed_command(&packed(command))).await;
            match answer {
                Ok(Ok(value)) => reply(value, &self.address),
                Ok(Err(error)) => Err(failure(&error, &self.address)),
                Err(_) => Err(Failure::timeout(format!("no answer from Redis over {} in time", self.address))),
            }
        })
    }

    fn is_connected(&self) -> bool {
        true
    }

    fn wait_for_connection(&self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }

    fn uses_tls(&self) -> bool {
        false // no handshake of such a connection is seen to fail
    }

    #[cfg(test)]
    fn quit(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}
