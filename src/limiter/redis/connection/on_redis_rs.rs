//! The transport over connections of the crate `redis`, which is also called redis-rs.
//!
//! A connection of the crate `redis` does not reconnect after it is lost. [`RedisRs::connect`] makes a connection and
//! keeps it until it is lost. The connection speaks RESP3, because only with RESP3 does the crate report the end of a
//! connection. Some proxies know only RESP2. With RESP2 the next call or probe notices that the connection has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ErrorKind, IntoConnectionInfo, Pipeline, ProtocolVersion,
    PushInfo, PushKind, RedisConnectionInfo, RedisError as ClientError, Value,
};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::address::{Address, TargetKind};
use super::current::Current;
use super::error_class;
use super::failure::{CallFailure, Cause, misconfigured};
use super::renewal::Renewal;
use super::settings::{ConnectionSettings, KEEPALIVE};
#[cfg(any(feature = "redis-rs-rustls", feature = "redis-rs-rustls-ring"))]
use super::tls::Pem;
use super::transport::{Argument, Command, ConnectionObserver, DEPTH_MAX, RedisReply, SlotState, Transport};
use super::url::{Login, Url, UrlKind};
use crate::base::sync::{Mutex, lock};
use crate::event::StoreErrorKind;
use crate::limiter::BoxFuture;
use crate::limiter::redis::error::RedisError;
use crate::limiter::remote::loss;

/// The maximum number of calls that the crate buffers before the calls are written. The limiter itself also bounds
/// the calls in flight.
const BUFFER: usize = 1_024;

/// A URL as this client reads it.
pub(super) struct RedisRsTarget(Dial);

/// Makes clients of servers.
#[derive(Clone)]
struct Dial {
    url: Url,
    /// An address with the certificates that the application handed in. The host and port of this address
    /// have no meaning.
    tls: Option<ConnectionAddr>,
}

/// A connection to one server. Each [`connect`](Transport::connect) makes the connection anew.
pub(super) struct RedisRs {
    address: Address,
    uses_tls: bool,
    way: Way,
    renewal: Option<Renewal>,
    /// Whether a connection begins with a password.
    logs_in: bool,
    /// The time that it may take to make a connection. The greeting on the connection may take the same time
    /// again.
    connect_timeout: Duration,
    current: Current<Connection>,
    /// Whether the server refused RESP3.
    speaks_resp2: AtomicBool,
}

/// How the server is found.
enum Way {
    Direct(Client),
    /// The application is asked for credentials for each connection.
    Renewed(Address, Dial),
    /// The sentinels are asked for the master with this name before each connection.
    Sentinels(Vec<Client>, Box<str>, Dial),
}

/// A connection that was made.
#[derive(Clone)]
struct Connection {
    redis: MultiplexedConnection,
    ended: Arc<Ended>,
    /// The server's address, if a sentinel named it.
    master: Option<Address>,
}

/// The end of a connection, and its reason.
#[derive(Default)]
struct Ended {
    has_ended: AtomicBool,
    reason: Mutex<Option<ClientError>>,
    notify: Notify,
}

impl RedisRsTarget {
    pub(super) fn parse(url: &str) -> Result<(Self, TargetKind), RedisError> {
        let url = Url::parse(url)?;
        let kind = match (&url.kind, &*url.hosts) {
            (UrlKind::Cluster, hosts) => TargetKind::Cluster(hosts.to_vec()),
            (UrlKind::One, [host, ..]) => TargetKind::One(host.clone()),
            (UrlKind::Sentinel { service, .. }, [host, ..]) => TargetKind::sentinel(service, &host.host, host.port),
            (_, []) => return Err(misconfigured("the URL for Redis names no host")),
        };
        Ok((Self(Dial { url, tls: None }), kind))
    }

    /// Uses these certificates, which the client is known to support.
    #[cfg(any(feature = "redis-rs-rustls", feature = "redis-rs-rustls-ring"))]
    pub(super) fn use_certificates(&mut self, pem: &Pem) -> Result<(), RedisError> {
        let identity = pem.identity.as_ref();
        let client_tls = identity
            .map(|it| redis::ClientTlsConfig { client_cert: it.certificates.clone(), client_key: it.key.clone() });
        let certificates = redis::TlsCertificates { client_tls, root_cert: pem.authorities.clone() };
        let client = Client::build_with_tls("rediss://localhost", certificates).map_err(refused)?;
        self.0.tls = Some(client.get_connection_info().addr().clone());
        Ok(())
    }

    /// Returns whether the URL has a user or a password.
    pub(super) fn has_login(&self) -> bool {
        self.0.url.login != Login::default()
    }

    /// Makes a transport to the server that the URL names, or to a server of the same cluster. Errors of the
    /// transport contain `name`.
    pub(super) fn transport(
        &self,
        name: &Address,
        only: Option<&Address>,
        settings: &ConnectionSettings,
    ) -> Result<RedisRs, RedisError> {
        let (dial, renewal) = (&self.0, Renewal::new(settings));
        let url = &dial.url;
        let way = match (&url.kind, only.or(url.hosts.first())) {
            (UrlKind::Sentinel { service, login }, _) => {
                let sentinels = url.hosts.iter().map(|host| dial.client(host, login, 0));
                Way::Sentinels(sentinels.collect::<Result<_, _>>()?, service.clone(), dial.clone())
            }
            (_, Some(address)) if renewal.is_some() => Way::Renewed(address.clone(), dial.clone()),
            (_, Some(address)) => Way::Direct(dial.client(address, &url.login, url.database)?),
            (_, None) => return Err(misconfigured("the URL for Redis names no host")),
        };
        Ok(RedisRs {
            address: name.clone(),
            uses_tls: url.uses_tls,
            way,
            logs_in: renewal.is_some() || url.login.password.is_some(),
            renewal,
            connect_timeout: settings.connect_timeout(),
            current: Current::none(),
            speaks_resp2: AtomicBool::new(false),
        })
    }
}

impl Dial {
    /// Makes a client for one server.
    fn client(&self, address: &Address, login: &Login, database: u16) -> Result<Client, RedisError> {
        let (host, port) = (address.host.to_string(), address.port);
        let address = match &self.tls {
            // Uses the application's certificates.
            Some(ConnectionAddr::TcpTls { tls_params, .. }) => {
                ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: tls_params.clone() }
            }
            _ if self.url.uses_tls => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            _ => ConnectionAddr::Tcp(host, port),
        };
        let mut login_info = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_skip_set_lib_name()
            .set_db(i64::from(database));
        if let Some(username) = &login.username {
            login_info = login_info.set_username(username);
        }
        if let Some(password) = &login.password {
            login_info = login_info.set_password(password);
        }
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        let info = address.into_connection_info().map(|info| info.set_redis_settings(login_info).set_tcp_settings(tcp));
        info.and_then(Client::open).map_err(refused)
    }
}

fn refused(error: ClientError) -> RedisError {
    misconfigured("the crate redis does not accept these settings").caused_by(error)
}

impl RedisRs {
    async fn keep_connection(&self, heard: &dyn ConnectionObserver) -> CallFailure {
        let connection = match self.dial().await {
            Ok(connection) => connection,
            Err(failure) => return failure,
        };
        let (ended, master) = (Arc::clone(&connection.ended), connection.master.clone());
        let _in_use = self.current.set(connection);
        heard.record_connection(master);
        ended.wait().await;
        match ended.reason() {
            Some(error) => failure(&error, &self.address),
            None => CallFailure::lost(
                StoreErrorKind::Unavailable,
                format!("the connection to Redis at {} was cut: the server closed it", self.address),
            ),
        }
    }

    /// Makes a connection.
    async fn dial(&self) -> Result<Connection, CallFailure> {
        match &self.way {
            Way::Direct(client) => self.open(client, &self.address).await,
            Way::Renewed(address, dial) => {
                let login = self.ask().await?;
                let client = dial.client(address, &login, dial.url.database).map_err(CallFailure::refused)?;
                self.open(&client, &self.address).await
            }
            Way::Sentinels(sentinels, service, dial) => {
                let mut last = None;
                for (sentinel, address) in sentinels.iter().zip(&dial.url.hosts) {
                    match self.master_of(sentinel, address, service).await {
                        Ok(master) => return self.open_master(master, dial).await,
                        Err(failure) => last = Some(failure),
                    }
                }
                let none = || CallFailure::lost(StoreErrorKind::Unavailable, "the URL for Redis names no sentinel");
                Err(last.unwrap_or_else(none))
            }
        }
    }

    /// Asks the application for the credentials of a connection.
    async fn ask(&self) -> Result<Login, CallFailure> {
        let Some(renewal) = &self.renewal else { return Ok(Login::default()) };
        let asked = renewal.ask().await;
        let it = asked.map_err(|why| CallFailure::without_credentials(&self.address, &why))?;
        Ok(Login { username: Some(it.username().into()), password: Some(it.password().into()) })
    }

    /// Makes a connection to the master that a sentinel named.
    async fn open_master(&self, master: Address, dial: &Dial) -> Result<Connection, CallFailure> {
        let url = &dial.url;
        let client = dial.client(&master, &url.login, url.database).map_err(CallFailure::refused)?;
        let name = Address::in_words(&format!("{master} ({})", self.address));
        let connection = self.open(&client, &name).await?;
        Ok(Connection { master: Some(master), ..connection })
    }

    /// Makes a connection to a server. Errors have the `name`.
    async fn open(&self, client: &Client, name: &Address) -> Result<Connection, CallFailure> {
        self.open_by_any(client).await.map_err(|error| failure(&error, name))
    }

    /// Makes a connection to a server, with RESP2 if the server refuses RESP3.
    async fn open_by_any(&self, client: &Client) -> Result<Connection, ClientError> {
        if !self.speaks_resp2.load(Ordering::Relaxed) {
            match self.open_by(ProtocolVersion::RESP3, client).await {
                Err(error) if refuses_hello(&error) => {}
                opened => return opened,
            }
        }
        let opened = self.open_by(ProtocolVersion::RESP2, client).await;
        self.speaks_resp2.store(opened.is_ok(), Ordering::Relaxed);
        opened
    }

    async fn open_by(&self, protocol: ProtocolVersion, client: &Client) -> Result<Connection, ClientError> {
        let ended = Arc::new(Ended::default());
        let ends = Arc::clone(&ended);
        let hear = move |push: PushInfo| -> Result<(), ()> {
            if push.kind == PushKind::Disconnection {
                ends.end(None);
            }
            Ok(())
        };
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(2 * self.connect_timeout))
            .set_response_timeout(None)
            .set_pipeline_buffer_size(BUFFER);
        if protocol != ProtocolVersion::RESP2 {
            config = config.set_push_sender(hear);
        }
        let info = client.get_connection_info().clone();
        let login = info.redis_settings().clone().set_protocol(protocol);
        let client = Client::open(info.set_redis_settings(login))?;
        let redis = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Connection { redis, ended, master: None })
    }

    /// Asks the sentinel at this address for the master.
    async fn master_of(&self, sentinel: &Client, address: &Address, service: &str) -> Result<Address, CallFailure> {
        let name = Address::in_words(&format!("sentinel {address}"));
        let unreached = |error: ClientError| match failure(&error, &name) {
            CallFailure { cause: Cause::Lost, .. } if error.is_timeout() => silent_sentinel(service, &name),
            CallFailure { cause: Cause::Lost, .. } => {
                CallFailure::without_sentinel(service, &loss(&name, &error)).caused_by(error)
            }
            failure => failure,
        };
        let mut connection = self.open_by_any(sentinel).await.map_err(unreached)?.redis;
        let mut ask = redis::cmd("SENTINEL");
        ask.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
        let answer = timeout(self.connect_timeout, connection.send_packed_command(&ask)).await;
        let answer = answer.map_err(|_| silent_sentinel(service, &name))?.map_err(unreached)?;
        let reply = reply(answer, &name)?;
        let master = match &reply {
            RedisReply::Array(parts) => match &**parts {
                [RedisReply::Bytes(host), RedisReply::Bytes(port)] => {
                    let port = std::str::from_utf8(port).ok().and_then(|port| port.parse().ok());
                    std::str::from_utf8(host).ok().zip(port).map(|(host, port)| Address::new(host, port))
                }
                _ => None,
            },
            _ => None,
        };
        master.ok_or_else(|| CallFailure::unknown_master(service, &address.to_string()))
    }

    async fn call(&self, command: Command<'_>, slot: SlotState) -> Result<RedisReply, CallFailure> {
        let Some(Connection { mut redis, ended, .. }) = self.current.get().filter(|it| !it.ended.has_ended()) else {
            return Err(CallFailure::not_connected(&self.address));
        };
        let command = packed(command);
        let answer = match slot {
            SlotState::Owned => redis.send_packed_command(&command).await,
            SlotState::Importing => {
                // A pipeline writes its commands one after another, with no other command between them.
                let mut pipeline = Pipeline::with_capacity(2);
                pipeline.add_command(redis::cmd("ASKING")).add_command(command);
                let answers = redis.send_packed_commands(&pipeline, 0, 2).await;
                // Uses only the second answer: a server that refuses ASKING redirects the second command instead of
                // running it.
                answers.map(|answers| answers.into_iter().last().unwrap_or(Value::Nil))
            }
        };
        match answer {
            Ok(value) => {
                match &value {
                    // A proxy sent the call over a connection of its own, on which this client has not logged in.
                    Value::ServerError(error) if self.logs_in && error.code() == "NOAUTH" => {
                        ended.end(Some(error.clone().into()));
                    }
                    _ => {}
                }
                reply(value, &self.address)
            }
            Err(error) => {
                if error.is_unrecoverable_error() {
                    ended.end(Some(error.clone()));
                }
                Err(failure(&error, &self.address))
            }
        }
    }
}

impl Transport for RedisRs {
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
        self.renewal.as_ref()
    }

    #[cfg(test)]
    fn quit(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Some(connection) = self.current.get() {
                connection.ended.end(None);
            }
        })
    }
}

impl Ended {
    /// Ends the connection. The first reason stays.
    fn end(&self, reason: Option<ClientError>) {
        if let Some(reason) = reason {
            lock(&self.reason).get_or_insert(reason);
        }
        self.has_ended.store(true, Ordering::Release);
        self.notify.notify_waiters();
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    async fn wait(&self) {
        let notified = self.notify.notified();
        if !self.has_ended() {
            notified.await;
        }
    }

    fn reason(&self) -> Option<ClientError> {
        lock(&self.reason).clone()
    }
}

/// The initial size of a call's buffer, in bytes: enough for a call with one check.
const CALL: usize = 512;

pub(super) fn packed(command: Command<'_>) -> Cmd {
    let mut packed = Cmd::with_capacity(1 + command.count(), CALL);
    packed.arg(command.name);
    for argument in command.arguments() {
        match argument {
            Argument::Text(text) => packed.arg(text),
            Argument::Secret(text) => packed.arg(text),
            Argument::Number(number) => packed.arg(number),
            Argument::Bytes(bytes) => packed.arg(&**bytes),
        };
    }
    packed
}

/// Returns what the server replied, or why it refused the command.
pub(super) fn reply(value: Value, server: &Address) -> Result<RedisReply, CallFailure> {
    match value {
        Value::ServerError(error) => {
            let text = format!("{} {}", error.code(), error.details().unwrap_or_default());
            Err(error_class::answer(text.trim_end(), server))
        }
        value => Ok(contents(value, 0)),
    }
}

fn contents(value: Value, depth: usize) -> RedisReply {
    match value {
        Value::Int(number) => RedisReply::Integer(number),
        Value::BulkString(bytes) => RedisReply::Bytes(bytes.into()),
        Value::SimpleString(text) => RedisReply::Bytes(text.into()),
        Value::Okay => RedisReply::Bytes(Bytes::from_static(b"OK")),
        Value::Array(values) if depth < DEPTH_MAX => {
            RedisReply::Array(values.into_iter().map(|value| contents(value, depth + 1)).collect())
        }
        _ => RedisReply::Other,
    }
}

fn silent_sentinel(service: &str, name: &Address) -> CallFailure {
    CallFailure::without_sentinel(service, &format!("{name} is silent"))
}

/// Returns `true` if a server or a proxy does not know the command that begins RESP3.
fn refuses_hello(error: &ClientError) -> bool {
    let says = |words: &str| error.to_string().to_ascii_uppercase().contains(words);
    error.kind() == ErrorKind::RESP3NotSupported || says("HELLO") || says("NOPROTO")
}

/// Classifies an error of a call to `server`, or of a connection to it.
pub(super) fn failure(error: &ClientError, server: &Address) -> CallFailure {
    if error.is_timeout() {
        return CallFailure::unanswered(server);
    }
    if let Some(code) = error.code() {
        return error_class::answer(&format!("{code} {}", error.detail().unwrap_or_default()), server);
    }
    let text = error.to_string();
    match error.kind() {
        ErrorKind::InvalidClientConfig | ErrorKind::RESP3NotSupported => CallFailure::unusable(server, &text),
        _ => CallFailure::of_certificates(server, &text)
            .unwrap_or_else(|| CallFailure::disconnected(server, error.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of(error: &ClientError) -> (StoreErrorKind, Cause) {
        let failure = failure(error, &Address::new("here", 1));
        (failure.error.kind(), failure.cause)
    }

    #[test]
    fn lost_connection_is_held_against_the_server() {
        for kind in [std::io::ErrorKind::ConnectionRefused, std::io::ErrorKind::BrokenPipe] {
            let error = ClientError::from(std::io::Error::from(kind));
            assert_eq!(kind_of(&error), (StoreErrorKind::Unavailable, Cause::Lost), "{kind}");
        }
        let late = ClientError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
        assert_eq!(kind_of(&late), (StoreErrorKind::Timeout, Cause::Lost));
    }

    #[test]
    fn a_certificate_that_is_not_trusted_is_a_misconfiguration() {
        let error = std::io::Error::new(std::io::ErrorKind::InvalidData, "invalid peer certificate: UnknownIssuer");
        assert_eq!(kind_of(&error.into()), (StoreErrorKind::Misconfigured, Cause::Answer));
    }

    #[test]
    fn reply_is_read_to_a_bounded_depth() {
        let mut nested = Value::Int(1);
        for _ in 0..90 {
            nested = Value::Array(vec![nested]);
        }
        let mut reply = contents(nested, 0);
        let mut depth = 0;
        while let RedisReply::Array(mut values) = reply {
            reply = values.pop().unwrap();
            depth += 1;
        }
        assert_eq!((reply, depth), (RedisReply::Other, DEPTH_MAX));
    }
}
