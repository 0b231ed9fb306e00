//! The trait of a client library: it sends commands over a connection to one server, and keeps that connection.

use bytes::Bytes;

use super::address::Address;
use super::failure::CallFailure;
use super::renewal::Renewal;
use crate::limiter::BoxFuture;
use crate::limiter::redis::credentials::RedisCredentials;
use crate::limiter::redis::script::Call;

/// The maximum depth of nested arrays in a reply that is read. Replies to this crate's commands are less deep.
pub(super) const DEPTH_MAX: usize = 8;

/// A connection to one server, made with a client library. Each library has its own file.
pub(super) trait Transport: Send + Sync + 'static {
    /// Connects, reports this to `heard`, and keeps the connection. Returns why the connection has ended, or was not
    /// made. A host's name is resolved anew each time. If the future is dropped, the connection ends as well.
    fn connect<'a>(&'a self, heard: &'a dyn ConnectionObserver) -> BoxFuture<'a, CallFailure>;

    /// Sends a command to a server that has the keys' slot in this state, and waits for the answer. The command
    /// runs at most once. The caller has to bound the time, because the future may wait for ever, even after the
    /// connection has ended.
    fn send<'a>(&'a self, command: Command<'a>, slot: SlotState) -> BoxFuture<'a, Result<RedisReply, CallFailure>>;

    fn uses_tls(&self) -> bool;

    /// Returns whether the application makes the connection. The limiter does not learn when such a
    /// connection ends.
    fn is_given(&self) -> bool {
        false
    }

    /// Returns where each connection's credentials come from, unless the URL has them.
    fn renewal(&self) -> Option<&Renewal> {
        None
    }

    /// Returns how many calls wait within the client.
    #[cfg(test)]
    fn queued(&self) -> usize {
        0
    }

    /// Ends the connection as the client library would end it.
    #[cfg(test)]
    fn quit(&self) -> BoxFuture<'_, ()>;
}

/// Hears of a transport's connections.
pub(super) trait ConnectionObserver: Send + Sync {
    /// A connection was made: the server has answered its greeting. `master` is the server's address if sentinels
    /// named it.
    fn record_connection(&self, master: Option<Address>);
}

/// The state of a call's slot at a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    /// The server has the slot, or is not part of a cluster.
    Owned,
    /// The cluster is moving the slot to the server, which meanwhile serves only calls after `ASKING`.
    Importing,
}

/// A command.
#[derive(Clone, Copy)]
pub(super) struct Command<'a> {
    pub(super) name: &'static str,
    arguments: Arguments<'a>,
}

#[derive(Clone, Copy)]
enum Arguments<'a> {
    Keyless(&'a [&'static str]),
    Login(&'a RedisCredentials),
    /// A script's name or text, and its call.
    Script(&'static str, &'a Call),
}

/// An argument of a command.
pub(super) enum Argument<'a> {
    Text(&'static str),
    Secret(&'a str),
    Number(usize),
    Bytes(&'a Bytes),
}

impl<'a> Command<'a> {
    /// A command without keys.
    pub(super) fn keyless(name: &'static str, arguments: &'a [&'static str]) -> Self {
        Self { name, arguments: Arguments::Keyless(arguments) }
    }

    /// A call of a script, by its name or its text.
    pub(super) fn script(name: &'static str, script: &'static str, call: &'a Call) -> Self {
        Self { name, arguments: Arguments::Script(script, call) }
    }

    /// The command that gives a connection newer credentials.
    pub(super) fn login(credentials: &'a RedisCredentials) -> Self {
        Self { name: "AUTH", arguments: Arguments::Login(credentials) }
    }

    /// Returns the number of arguments.
    pub(super) fn count(self) -> usize {
        match self.arguments {
            Arguments::Keyless(texts) => texts.len(),
            Arguments::Login(_) => 2,
            Arguments::Script(_, call) => 2 + call.keys.len() + call.args.len(),
        }
    }

    pub(super) fn arguments(self) -> impl Iterator<Item = Argument<'a>> {
        let (texts, login, script) = match self.arguments {
            Arguments::Keyless(texts) => (texts, None, None),
            Arguments::Login(credentials) => (&[][..], Some(credentials), None),
            Arguments::Script(script, call) => (&[][..], None, Some((script, call))),
        };
        let login = login.into_iter().flat_map(|it| [it.username(), it.password()].map(Argument::Secret));
        let script = script.into_iter().flat_map(|(script, call)| {
            let bytes = call.keys.iter().chain(&call.args).map(Argument::Bytes);
            [Argument::Text(script), Argument::Number(call.keys.len())].into_iter().chain(bytes)
        });
        texts.iter().map(|text| Argument::Text(text)).chain(login).chain(script)
    }
}

/// The reply to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RedisReply {
    /// No value, or a value of a type that no reply to this crate's commands has.
    Other,
    Integer(i64),
    Bytes(Bytes),
    Array(Vec<Self>),
}
