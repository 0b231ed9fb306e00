//! The transport over connections of the crate `fred`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fred::clients::Client;
use fred::error::{Error, ErrorKind};
use fred::interfaces::{ClientLike, EventInterface};
use fred::socket2::TcpKeepalive;
use fred::types::config::{Config, CredentialProvider, Options, Server, ServerConfig, TcpConfig};
use fred::types::{Builder, ClusterHash, CustomCommand, Value};
use tokio::task::{AbortHandle, JoinError, JoinHandle};

use super::address::{Address, TargetKind, sentinel_hint};
use super::current::Current;
use super::error_class;
use super::failure::{CallFailure, Cause, misconfigured};
use super::renewal::Renewal;
use super::settings::{ConnectionSettings, KEEPALIVE};
use super::transport::{Argument, Command, ConnectionObserver, DEPTH_MAX, RedisReply, SlotState, Transport};
use crate::base::sync::{Mutex, lock};
use crate::event::StoreErrorKind;
use crate::limiter::BoxFuture;
use crate::limiter::redis::credentials::ASK_TIMEOUT;
use crate::limiter::redis::error::RedisError;

/// A URL, as fred reads it.
pub(super) struct FredTarget(Config);

/// A connection to one server. Each connection has its own client, so that nothing of the former connection is
/// left.
pub(super) struct Fred {
    builder: Builder,
    address: Address,
    renewal: Option<Arc<Renewal>>,
    uses_tls: bool,
    sentinels: Option<Sentinels>,
    current: Current<(Client, Arc<AbortHandle>)>,
}

/// The sentinels that name the server.
struct Sentinels {
    /// The master's name.
    service: Box<str>,
    /// The addresses of the sentinels, for messages.
    hosts: String,
    /// The master's address at the last connection.
    master: Mutex<Option<Address>>,
}

/// Asks for credentials when fred makes a connection. If the application has none, fred returns an error that begins
/// with these words.
struct Provider(Arc<Renewal>);

const NO_CREDENTIALS: &str = "no credentials: ";

impl CredentialProvider for Provider {
    fn fetch<'a, 'b, 'c>(
        &'a self,
        _: Option<&'b Server>,
    ) -> BoxFuture<'c, Result<(Option<String>, Option<String>), Error>>
    where
        'a: 'c,
        'b: 'c,
        Self: 'c,
    {
        Box::pin(async {
            let asked = self.0.ask().await;
            let it = asked.map_err(|why| Error::new(ErrorKind::Auth, format!("{NO_CREDENTIALS}{why}")))?;
            Ok((Some(it.username().to_owned()), Some(it.password().to_owned())))
        })
    }
}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Provider")
    }
}

impl FredTarget {
    pub(super) fn parse(url: &str) -> Result<(Self, TargetKind), RedisError> {
        let wrong =
            |error| misconfigured(format!("the URL for Redis is not valid{}", sentinel_hint(url))).caused_by(error);
        let config = Config::from_url(url).map_err(wrong)?;
        let kind = match &config.server {
            ServerConfig::Centralized { server } => TargetKind::One(Address::new(&server.host, server.port)),
            ServerConfig::Clustered { hosts, .. } => {
                TargetKind::Cluster(hosts.iter().map(|host| Address::new(&host.host, host.port)).collect())
            }
            ServerConfig::Sentinel { hosts, service_name, .. } => match hosts.first() {
                Some(host) => TargetKind::sentinel(service_name, &host.host, host.port),
                None => return Err(misconfigured("the URL for Redis names no sentinel")),
            },
            #[allow(unreachable_patterns, reason = "another crate may enable features of fred that add variants")]
            _ => return Err(misconfigured("the URL for Redis names no host")),
        };
        Ok((Self(config), kind))
    }

    /// Uses TLS with these certificates.
    #[cfg(any(feature = "fred-rustls", feature = "fred-rustls-ring"))]
    pub(super) fn use_certificates(&mut self, config: rustls::ClientConfig) {
        self.0.tls = Some(fred::types::config::TlsConnector::from(config).into());
    }

    /// Returns whether the URL has a user or a password.
    pub(super) fn has_login(&self) -> bool {
        self.0.username.is_some() || self.0.password.is_some()
    }

    /// Makes a transport to the server that the URL names, or to a server of the same cluster. Errors of the
    /// transport contain `name`.
    pub(super) fn transport(
        &self,
        name: &Address,
        only: Option<&Address>,
        settings: &ConnectionSettings,
    ) -> Result<Fred, RedisError> {
        let mut config = self.0.clone();
        // fred does not reconnect, because `reconnect.rs` reconnects with a new client, and gets the reason of the
        // failure.
        config.fail_fast = true;
        let uses_tls = config.uses_tls();
        if let Some(address) = only {
            config.server = ServerConfig::new_centralized(&*address.host, address.port);
        }
        let sentinels = match &config.server {
            ServerConfig::Sentinel { hosts, service_name, .. } => {
                let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
                Some(Sentinels {
                    service: service_name.as_str().into(),
                    hosts: hosts.join(", "),
                    master: Mutex::new(None),
                })
            }
            _ => None,
        };
        let renewal = Renewal::new(settings).map(Arc::new);
        config.credential_provider = renewal.clone().map(|it| Arc::new(Provider(it)) as Arc<dyn CredentialProvider>);
        // fred asks for credentials during the greeting, so the time for the greeting includes `ASK_TIMEOUT`.
        let greeting = settings.connect_timeout() + if renewal.is_some() { ASK_TIMEOUT } else { Duration::ZERO };
        let connect_timeout = settings.connect_timeout();
        let mut builder = Builder::from_config(config);
        // Sets no timeout, because the sender of a call bounds the call's time.
        builder.with_performance_config(|performance| performance.default_command_timeout = Duration::ZERO);
        builder.with_connection_config(|connection| {
            connection.connection_timeout = connect_timeout;
            connection.internal_command_timeout = greeting;
            // fred must not send a script a second time.
            connection.max_command_attempts = 1;
            connection.reconnect_on_auth_error = true;
            connection.disable_cluster_health_check = true;
            connection.tcp = TcpConfig { nodelay: Some(true), keepalive: Some(keepalive()), ..TcpConfig::default() };
            connection.max_command_buffer_len = 0;
        });
        let fred = Fred { builder, address: name.clone(), renewal, uses_tls, sentinels, current: Current::none() };
        fred.client().map_err(|failure| failure.error)?; // wrong settings are an error here
        Ok(fred)
    }
}

/// Returns the system's settings for probing a connection without traffic.
fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE)
}

/// Ends fred's task when this value is dropped.
struct FredTask(JoinHandle<Result<(), Error>>);

impl Drop for FredTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Fred {
    /// Makes a client for one connection.
    fn client(&self) -> Result<Client, CallFailure> {
        let refused = |error| misconfigured("fred does not accept these settings").caused_by(error);
        self.builder.build().map_err(|error| CallFailure { cause: Cause::Answer, error: refused(error) })
    }

    async fn keep_connection(&self, heard: &dyn ConnectionObserver) -> CallFailure {
        let client = match self.client() {
            Ok(client) => client,
            Err(failure) => return failure,
        };
        let mut up = client.reconnect_rx();
        let mut task = FredTask(client.connect());
        let made = async {
            let mut server = None;
            if !client.is_connected() {
                tokio::select! {
                    _ = client.wait_for_connect() => {}
                    connected = up.recv() => server = connected.ok(),
                }
            }
            // fred's events may arrive a moment before the client accepts calls.
            while !client.is_connected() {
                tokio::task::yield_now().await;
            }
            server.or_else(|| up.try_recv().ok())
        };
        let server = tokio::select! {
            biased;
            ended = &mut task.0 => return self.reason(ended),
            server = made => server,
        };
        let master = self.sentinels.as_ref().and_then(|sentinels| sentinels.record_master(server));
        let _in_use = self.current.set((client, Arc::new(task.0.abort_handle())));
        heard.record_connection(master);
        let ended = (&mut task.0).await;
        self.reason(ended)
    }

    /// Returns why a connection has ended, or was not made.
    fn reason(&self, ended: Result<Result<(), Error>, JoinError>) -> CallFailure {
        match ended {
            Ok(Err(error)) => {
                let of_sentinels =
                    self.sentinels.as_ref().and_then(|sentinels| sentinels.failure(&error, &self.address));
                of_sentinels.unwrap_or_else(|| failure(&error, &self.address))
            }
            Ok(Ok(())) | Err(_) => CallFailure::lost(
                StoreErrorKind::Unavailable,
                format!("the connection to Redis at {} was cut", self.address),
            ),
        }
    }

    async fn call(&self, command: Command<'_>, slot: SlotState) -> Result<RedisReply, CallFailure> {
        // A client whose task has ended accepts calls, but does nothing with them.
        let Some((client, _)) = self.current.get().filter(|(_, task)| !task.is_finished()) else {
            return Err(CallFailure::not_connected(&self.address));
        };
        let mut arguments = Vec::with_capacity(command.count());
        arguments.extend(command.arguments().map(|argument| match argument {
            Argument::Text(text) => Value::from_static_str(text),
            Argument::Secret(text) => Value::from(text),
            Argument::Number(number) => Value::Integer(i64::try_from(number).unwrap_or(i64::MAX)),
            Argument::Bytes(bytes) => Value::Bytes(bytes.clone()),
        }));
        // Uses a custom command, because fred's own commands for scripts ignore the options.
        let command = CustomCommand::new_static(command.name, ClusterHash::FirstKey, false);
        let options = Options { fail_fast: true, max_attempts: Some(1), ..Options::default() };
        let answer = async {
            match slot {
                SlotState::Owned => client.with_options(&options).custom(command, arguments).await,
                // In a box, because it is rare, and larger than the usual future.
                SlotState::Importing => {
                    Box::pin(async {
                        // A pipeline writes its commands one after another, with no other command between them.
                        let pipeline = client.pipeline();
                        let with_options = pipeline.with_options(&options);
                        let asking = CustomCommand::new_static("ASKING", ClusterHash::FirstKey, false);
                        let _: Value = with_options.custom(asking, Vec::<Value>::new()).await?;
                        let _: Value = with_options.custom(command, arguments).await?;
                        // If the server refuses ASKING, `all` returns that error. The server then redirects the second
                        // command instead of running it.
                        let answers: Vec<Value> = pipeline.all().await?;
                        Ok(answers.into_iter().last().unwrap_or(Value::Null))
                    })
                    .await
                }
            }
        };
        answer.await.map(|value| reply(value, 0)).map_err(|error| failure(&error, &self.address))
    }
}

impl Sentinels {
    /// Records the server of a connection. Returns its address.
    fn record_master(&self, server: Option<Server>) -> Option<Address> {
        let master = server.map(|server| Address::new(&server.host, server.port))?;
        lock(&self.master).replace(master.clone());
        Some(master)
    }

    /// Classifies an error of a connection to the master, which is called `name`, or to the sentinels. fred gives these
    /// errors a kind of their own. Returns `None` if the error has another kind.
    fn failure(&self, error: &Error, name: &Address) -> Option<CallFailure> {
        if *error.kind() != ErrorKind::Sentinel || is_answer(error) {
            return None;
        }
        let says = |words: &str| error.details().contains(words);
        let (service, hosts) = (&*self.service, &*self.hosts);
        if says("Missing primary address") {
            return Some(CallFailure::unknown_master(service, hosts));
        }
        if says("sentinel nodes") {
            let reason = format!("none of the sentinels ({hosts}) can be reached");
            return Some(CallFailure::without_sentinel(service, &reason));
        }
        if says("Invalid role") {
            let message = format!("the server that the sentinels ({hosts}) name as master `{service}` is not a master");
            return Some(CallFailure::lost(StoreErrorKind::Unavailable, message));
        }
        let name = match &*lock(&self.master) {
            Some(master) => Address::in_words(&format!("{name} (last at {master})")),
            None => name.clone(),
        };
        let untrusted = CallFailure::of_certificates(&name, error.details());
        Some(untrusted.unwrap_or_else(|| CallFailure::disconnected(&name, error.clone())))
    }
}

impl Transport for Fred {
    fn connect<'a>(&'a self, heard: &'a dyn ConnectionObserver) -> BoxFuture<'a, CallFailure> {
        Box::pin(self.keep_connection(heard))
    }

    fn send<'a>(&'a self, command: Command<'a>, slot: SlotState) -> BoxFuture<'a, Result<RedisReply, CallFailure>> {
        Box::pin(self.call(command, slot))
    }

    fn uses_tls(&self) -> bool {
        self.uses_tls
    }

    fn renewal(&self) -> Option<&Renewal> {
        self.renewal.as_deref()
    }

    #[cfg(test)]
    fn queued(&self) -> usize {
        self.current.get().map_or(0, |(client, _)| fred::interfaces::MetricsInterface::command_queue_len(&client))
    }

    #[cfg(test)]
    fn quit(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Some((client, _)) = self.current.get() {
                drop(client.quit().await); // a busy machine answers too late
            }
        })
    }
}

fn reply(value: Value, depth: usize) -> RedisReply {
    match value {
        Value::Integer(number) => RedisReply::Integer(number),
        Value::Bytes(bytes) => RedisReply::Bytes(bytes),
        Value::String(text) => RedisReply::Bytes(text.into_inner()),
        Value::Array(values) if depth < DEPTH_MAX => {
            RedisReply::Array(values.into_iter().map(|value| reply(value, depth + 1)).collect())
        }
        _ => RedisReply::Other,
    }
}

/// Classifies an error of a call to `server`. fred gives nearly all of the server's errors one kind, so they are
/// classified by their text.
fn failure(error: &Error, server: &Address) -> CallFailure {
    if let Some(why) = error.details().strip_prefix(NO_CREDENTIALS) {
        return CallFailure::without_credentials(server, why);
    }
    match error.kind() {
        ErrorKind::Timeout => CallFailure::unanswered(server),
        _ if is_answer(error) => error_class::answer(error.details(), server),
        // The call was not written, because fred reports another error for a call that was written.
        ErrorKind::Canceled => CallFailure::not_connected(server),
        ErrorKind::Config | ErrorKind::Url | ErrorKind::InvalidArgument | ErrorKind::InvalidCommand => {
            CallFailure::unusable(server, error.details())
        }
        _ => CallFailure::of_certificates(server, error.details())
            .unwrap_or_else(|| CallFailure::disconnected(server, error.clone())),
    }
}

/// Returns whether the error comes from the server and not from fred. The server's errors begin with a word in
/// capitals.
fn is_answer(error: &Error) -> bool {
    let told = matches!(
        error.kind(),
        ErrorKind::Unknown
            | ErrorKind::Auth
            | ErrorKind::Cluster
            | ErrorKind::Config
            | ErrorKind::InvalidArgument
            | ErrorKind::InvalidCommand
            | ErrorKind::Sentinel
    );
    let word = error.details().split_whitespace().next().unwrap_or("");
    told && word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::redis::connection::failure::Cause;

    fn kind_of(kind: ErrorKind, text: &'static str) -> (StoreErrorKind, Cause) {
        let failure = failure(&Error::new(kind, text), &Address::new("here", 1));
        (failure.error.kind(), failure.cause)
    }

    #[test]
    fn client_error_is_held_against_the_server() {
        for (kind, text) in [
            (ErrorKind::IO, "ConnectionReset"),
            (ErrorKind::Unknown, "channel closed"),
            (ErrorKind::Unknown, "Failed to route command."),
            (ErrorKind::Unknown, "Client is not initialized."),
            (ErrorKind::Routing, "Failed to route command."),
            (ErrorKind::Protocol, "Unexpected frame"),
        ] {
            assert_eq!(kind_of(kind, text), (StoreErrorKind::Unavailable, Cause::Lost), "{text}");
        }
        let unsent = kind_of(ErrorKind::Canceled, "Canceled.");
        assert_eq!(unsent, (StoreErrorKind::Unavailable, Cause::NotConnected));
        assert_eq!(kind_of(ErrorKind::Timeout, "Request timed out."), (StoreErrorKind::Timeout, Cause::Lost));
    }

    #[test]
    fn servers_words_are_classified_as_an_answer() {
        let oom = kind_of(ErrorKind::Unknown, "OOM command not allowed when used memory > 'maxmemory'.");
        assert_eq!(oom, (StoreErrorKind::Unavailable, Cause::Answer));
        let moved = kind_of(ErrorKind::Cluster, "MOVED 3999 10.0.0.1:6381").1;
        assert_eq!(moved, Cause::Moved(Address::new("10.0.0.1", 6381)));
    }

    #[test]
    fn a_certificate_that_is_not_trusted_is_a_misconfiguration() {
        let text = "Custom { kind: InvalidData, error: InvalidCertificate(UnknownIssuer) }";
        let (kind, cause) = kind_of(ErrorKind::IO, text);
        assert_eq!((kind, cause), (StoreErrorKind::Misconfigured, Cause::Answer));
    }
}
