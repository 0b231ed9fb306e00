//! A transport over the simulated network.

use crate::event::StoreErrorKind;
use crate::limiter::BoxFuture;
use crate::limiter::redis::connection::address::Address;
use crate::limiter::redis::connection::error_class;
use crate::limiter::redis::connection::failure::CallFailure;
use crate::limiter::redis::connection::transport::{
    Argument, Command, ConnectionObserver, RedisReply, SlotState, Transport,
};
use crate::limiter::redis::tests::simulation::cluster::port_of;
use crate::limiter::redis::tests::simulation::network::{Ended, Sent, Wire};

/// A transport over the simulated network.
pub(in crate::limiter::redis::connection) struct Simulated {
    wire: Wire,
    address: Address,
}

/// Returns the address of the server to which a way leads.
pub(in crate::limiter::redis::connection) fn address_of(wire: &Wire) -> Address {
    Address::new("simulated", port_of(wire.server))
}

impl Simulated {
    /// Returns a transport to the server at an address.
    pub(in crate::limiter::redis::connection) fn at(address: &Address, wire: &Wire) -> Self {
        let mut servers = (0..wire.servers()).map(|server| wire.to(server));
        let wire = servers.find(|wire| address_of(wire) == *address).expect("the network has this server");
        Self { wire, address: address.clone() }
    }
}

/// Ends the connection when it is dropped.
struct Connection<'a>(&'a Wire);

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        self.0.disconnect();
    }
}

/// Returns what goes over the wire for a command.
fn sent(command: Command<'_>, slot: SlotState) -> Sent {
    if command.name == "CLUSTER" {
        return Sent::Slots;
    }
    let mut arguments = command.arguments();
    let Some(Argument::Text(script)) = arguments.next() else { panic!("a call of a script begins with its name") };
    let Some(Argument::Number(keys)) = arguments.next() else { panic!("the number of keys follows") };
    let mut bytes: Vec<_> = arguments
        .map(|argument| match argument {
            Argument::Bytes(bytes) => bytes.clone(),
            _ => panic!("keys and arguments are bytes"),
        })
        .collect();
    let args = bytes.split_off(keys);
    let is_asking = slot == SlotState::Importing;
    Sent::Script { command: command.name, script, keys: bytes, args, is_asking }
}

/// Returns a row of the answer to `CLUSTER SLOTS`. The host is that of the connection.
fn row((first, last, server): (u16, u16, usize)) -> RedisReply {
    let [first, last, port] = [first, last, port_of(server)].map(|number| RedisReply::Integer(number.into()));
    RedisReply::Array(vec![first, last, RedisReply::Array(vec![RedisReply::Other, port])])
}

impl Transport for Simulated {
    fn connect<'a>(&'a self, heard: &'a dyn ConnectionObserver) -> BoxFuture<'a, CallFailure> {
        Box::pin(async {
            let ended = CallFailure::lost(StoreErrorKind::Unavailable, format!("no connection to {}", self.address));
            let _connection = Connection(&self.wire);
            if self.wire.connect().await {
                heard.record_connection(None);
                self.wire.until_cut().await;
            }
            ended
        })
    }

    fn send<'a>(&'a self, command: Command<'a>, slot: SlotState) -> BoxFuture<'a, Result<RedisReply, CallFailure>> {
        Box::pin(async move {
            match self.wire.send(sent(command, slot)).await {
                Ended::Answered(bytes) => Ok(RedisReply::Bytes(bytes)),
                Ended::Number(number) => Ok(RedisReply::Integer(number)),
                Ended::Slots(ranges) => Ok(RedisReply::Array(ranges.into_iter().map(row).collect())),
                Ended::Refused(words) => Err(error_class::answer(&words, &self.address)),
                #[cfg(feature = "store")]
                Ended::Loaded(_) | Ended::Swapped(_) => panic!("a script has no such answer"),
                Ended::NotConnected => Err(CallFailure::not_connected(&self.address)),
                Ended::Disconnected => {
                    let message = format!("there is no connection to Redis at {}", self.address);
                    Err(CallFailure::lost(StoreErrorKind::Unavailable, message))
                }
            }
        })
    }

    fn uses_tls(&self) -> bool {
        false
    }

    fn quit(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.wire.disconnect() })
    }
}
