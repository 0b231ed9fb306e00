//! The settings of the server: flags, variables of the environment, and a file of settings.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Command, ValueEnum};
use tower_ratelimit::{Key, OnError};

use super::log::{EVENTS, LogFormat};
use super::store::StoreOptions;
use super::time::time;
use super::uri::Paths;

/// Limit the requests of any proxy by a file of rules
///
/// nginx, Caddy, Traefik, HAProxy and Envoy ask this server about each request, and applications ask it over HTTP and
/// gRPC. The guide has a configuration for each:
/// https://docs.rs/tower-ratelimit/latest/tower_ratelimit/guide/a_process_of_its_own/
///
/// A flag overrides its environment variable, which overrides the settings file.
///
/// Only peers in --trust are answered, because whoever can ask can use up the allowance of others. TLS is left to the
/// proxy, or to the network.
///
/// The exit code is 0 after SIGTERM or SIGINT, 1 if the file has a problem, and 2 if the server could not begin.
#[derive(clap::Args, Debug)]
#[command(
    after_help = format!("SIGHUP reads the files of rules and operators again. SIGTERM ends the server without losing a request: it \
                        first reports that it is not ready, then accepts no more connections, and ends when all \
                        requests are answered.\n\n{EVENTS}")
)]
pub(crate) struct Options {
    /// The file of rules. A file in Envoy's form answers Envoy; there may be several of these, with different domains
    #[arg(required = true, value_name = "RULES", env = "TOWER_RATELIMIT_RULES", value_delimiter = ',')]
    pub(crate) rules: Vec<PathBuf>,
    /// A file with a setting in each line, such as `listen = 127.0.0.1:8080`
    #[arg(long, value_name = "FILE", env = SETTINGS)]
    pub(crate) settings: Option<PathBuf>,

    /// The address that proxies and applications ask, over HTTP/1, HTTP/2 and gRPC
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080", env = "TOWER_RATELIMIT_LISTEN")]
    pub(crate) listen: SocketAddr,
    /// The address for operators: health, metrics, the status page
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8081", env = "TOWER_RATELIMIT_ADMIN")]
    pub(crate) admin: SocketAddr,
    /// The addresses and networks of proxies and applications that may ask, and whose `X-Forwarded-For` is believed
    #[arg(
        long,
        value_name = "NETWORK",
        default_value = "127.0.0.1,::1",
        value_delimiter = ',',
        env = "TOWER_RATELIMIT_TRUST"
    )]
    pub(crate) trust: Vec<String>,
    /// A file with an operator in each line: a name and a token of at least 16 characters. Without it the status page
    /// changes nothing, and --admin has to be a loopback address
    #[arg(long, value_name = "FILE", env = "TOWER_RATELIMIT_OPERATORS")]
    pub(crate) operators: Option<PathBuf>,
    /// The names under which browsers, and without --operators also Prometheus, reach --admin; an address and
    /// `localhost` need not be named
    #[arg(long, value_name = "NAME", value_delimiter = ',', env = "TOWER_RATELIMIT_ADMIN_HOSTS")]
    pub(crate) admin_hosts: Vec<String>,

    #[command(flatten)]
    pub(crate) store: StoreOptions,
    /// How long a check of Redis or PostgreSQL may take
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = time, env = "TOWER_RATELIMIT_DEADLINE")]
    pub(crate) deadline: Duration,
    /// The file in which a limiter in memory keeps the operators' settings. With --redis or --postgres they are kept
    /// there
    #[arg(long, value_name = "FILE", env = "TOWER_RATELIMIT_FLEET")]
    pub(crate) fleet: Option<PathBuf>,
    /// The name of this server among those with the same store, on their status pages. By default that of the host, as
    /// the variable `HOSTNAME` says, and the number of the process
    #[arg(long, value_name = "NAME", env = "TOWER_RATELIMIT_NAME")]
    pub(crate) name: Option<String>,
    /// The answer to requests while Redis or PostgreSQL does not decide: `deny` (503), `allow` (unless this process has
    /// more requests than it can ask about, which clients can cause), or `allow-always`
    #[arg(long, value_name = "ANSWER", default_value = "deny", env = "TOWER_RATELIMIT_ON_ERROR")]
    pub(crate) on_error: OnError,
    /// How many keys a limiter in memory is sure to hold. It has about 2.5 places for each, which the status page shows
    #[arg(long, value_name = "NUMBER", default_value_t = 1_000_000, env = "TOWER_RATELIMIT_MAX_KEYS")]
    pub(crate) max_keys: usize,

    /// How often the files of rules and operators are read again
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time, env = "TOWER_RATELIMIT_RELOAD_EVERY")]
    pub(crate) reload_every: Duration,
    /// The form of paths that rules see
    #[arg(long, value_enum, default_value_t = Paths::Normalized, env = "TOWER_RATELIMIT_PATHS")]
    pub(crate) paths: Paths,
    /// The headers that report limits to clients
    #[arg(long, value_enum, default_value_t = HeaderFormat::Draft11, env = "TOWER_RATELIMIT_HEADERS")]
    pub(crate) headers: HeaderFormat,

    /// The part of a refused client's address that the status page shows: an operator needs it to block the client.
    /// Keys other than addresses have a fingerprint
    #[arg(long, value_enum, default_value_t = Reveal::Networks, env = "TOWER_RATELIMIT_REVEAL")]
    pub(crate) reveal: Reveal,

    /// How many connections may be open on --listen, and as many on --admin, but there at most 256. One more on --admin
    /// ends the oldest one of the address that has the most
    #[arg(long, value_name = "NUMBER", default_value_t = 4_096, env = "TOWER_RATELIMIT_MAX_CONNECTIONS")]
    pub(crate) max_connections: usize,
    /// How long a connection may be idle, or take for the head of a request; on --admin at most 5 seconds
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = time, env = "TOWER_RATELIMIT_IDLE")]
    pub(crate) idle: Duration,
    /// How long a connection is used before its client is asked to open another one, which may reach another server; on
    /// --admin at most a minute
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time, env = "TOWER_RATELIMIT_MAX_AGE")]
    pub(crate) max_age: Duration,
    /// How long the server still answers after SIGTERM, so that balancers notice that it is not ready
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time, env = "TOWER_RATELIMIT_DRAIN_DELAY")]
    pub(crate) drain_delay: Duration,
    /// How long it then waits for requests that are under way
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = time, env = "TOWER_RATELIMIT_DRAIN_TIMEOUT")]
    pub(crate) drain_timeout: Duration,

    /// The form of the log, which is written to the standard error
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "TOWER_RATELIMIT_LOG")]
    pub(crate) log: LogFormat,
}

/// The headers that report limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HeaderFormat {
    /// `RateLimit` and `RateLimit-Policy` of draft-ietf-httpapi-ratelimit-headers-11, and `Retry-After`
    #[value(name = "draft-11")]
    Draft11,
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset` in seconds from now, and `Retry-After`
    XRatelimit,
    /// `Retry-After` only
    RetryAfter,
}

/// The part of a client's address that is shown. Addresses are personal data in many countries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Reveal {
    /// The network of an address, such as 203.0.113.0/24 or 2001:db8:1::/48
    Networks,
    /// The whole address, or the network that counts as one client in IPv6
    Addresses,
    /// A fingerprint only
    Nothing,
}

impl Reveal {
    /// Returns the name of a key, as operators see it.
    pub(crate) fn name_of(self, key: &Key) -> Option<String> {
        let address = key.address()?;
        match (self, address) {
            (Self::Nothing, _) => None,
            (Self::Addresses, _) => Some(key.display().to_string()),
            (Self::Networks, IpAddr::V4(address)) => {
                Some(format!("{}/24", Ipv4Addr::from(u32::from(address) & (u32::MAX << 8))))
            }
            (Self::Networks, IpAddr::V6(address)) => {
                Some(format!("{}/48", Ipv6Addr::from(u128::from(address) & (u128::MAX << 80))))
            }
        }
    }
}

impl Options {
    /// Returns the trusted networks that are larger than every network of private addresses, which are 10.0.0.0/8 and
    /// fc00::/7: probably not only proxies are in them.
    pub(crate) fn wide_networks(&self) -> impl Iterator<Item = &str> {
        self.trust.iter().map(String::as_str).filter(|network| {
            let Some((address, length)) = network.split_once('/') else { return false };
            let (Ok(address), Ok(length)) = (address.parse::<IpAddr>(), length.parse::<u8>()) else { return false };
            match address {
                IpAddr::V6(mapped) if mapped.to_ipv4_mapped().is_some() => length < 96 + 8,
                IpAddr::V6(_) => length < 7,
                IpAddr::V4(_) => length < 8,
            }
        })
    }
}

/// The variable that names the file of settings.
const SETTINGS: &str = "TOWER_RATELIMIT_SETTINGS";

/// The largest file of settings, in bytes.
const SETTINGS_MAX: u64 = 64 << 10;

/// Returns the command with the settings of a file as the defaults of its flags, if the arguments or the environment
/// name one. So a flag or a variable still counts before the file.
pub(crate) fn with_settings(command: Command, arguments: &[String]) -> Result<Command, String> {
    let mut of_flag = None;
    for (at, argument) in arguments.iter().enumerate() {
        match argument.strip_prefix("--settings") {
            Some("") => of_flag = arguments.get(at + 1).cloned(),
            Some(rest) => of_flag = rest.strip_prefix('=').map(str::to_owned).or(of_flag),
            None => {}
        }
    }
    match of_flag.or_else(|| std::env::var(SETTINGS).ok()) {
        None => Ok(command),
        Some(file) => {
            let wrong = |error: String| format!("error: the settings in {file}: {error}");
            let length = fs::metadata(&file).map_err(|error| wrong(error.to_string()))?.len();
            if length > SETTINGS_MAX {
                return Err(wrong(format!("they have {length} bytes, and at most {SETTINGS_MAX} are read")));
            }
            let text = fs::read_to_string(&file).map_err(|error| wrong(error.to_string()))?;
            with_defaults(command, &text).map_err(wrong)
        }
    }
}

/// Sets the defaults of flags by lines such as `listen = 127.0.0.1:8080`.
fn with_defaults(mut command: Command, text: &str) -> Result<Command, String> {
    let names: Vec<String> = command.get_arguments().map(name_of).collect();
    let mut seen: Vec<&str> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = number + 1;
        let (name, value) = line.split_once('=').ok_or_else(|| format!("line {number} has no `=`"))?;
        let (name, value) = (name.trim(), value.trim().to_owned());
        if name == "settings" || !names.iter().any(|known| known == name) {
            return Err(format!("line {number}: there is no setting `{name}`; --help lists them"));
        }
        if seen.contains(&name) {
            return Err(format!("line {number}: `{name}` is set twice"));
        }
        seen.push(name);
        let id = name.replace('-', "_");
        command = command.mut_arg(id, |argument| argument.required(false).default_value(value));
    }
    Ok(command)
}

/// Returns the name of an argument in a file of settings: that of its flag.
fn name_of(argument: &clap::Arg) -> String {
    argument.get_long().map_or_else(|| argument.get_id().to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn options(text: &str, arguments: &[&str]) -> Result<Options, String> {
        let command = with_defaults(Options::augment_args(Command::new("serve")), text)?;
        let matches = command.try_get_matches_from([&["serve"], arguments].concat()).map_err(|e| e.to_string())?;
        Options::from_arg_matches(&matches).map_err(|error| error.to_string())
    }

    #[test]
    fn flag_counts_before_the_file_of_settings() {
        let text =
            "# a comment\nrules = a.yaml, b.yaml\n\nlisten=127.0.0.1:1\n on-error = allow \ntrust = 10.0.0.0/8,::1\n";
        let options = options(text, &["--listen", "127.0.0.1:2"]).unwrap();
        assert_eq!((options.listen.port(), options.on_error), (2, OnError::Allow));
        assert_eq!((options.trust.len(), options.admin.port()), (2, 8081));
        assert_eq!(options.idle, Duration::from_secs(75));
    }

    #[test]
    fn trusted_network_that_is_wider_than_private_ones_is_found() {
        let trust = "192.0.2.1,10.0.0.0/8,128.0.0.0/1,fc00::/7,::/0,0.0.0.0/0,2001:db8::/32,::ffff:0.0.0.0/96";
        let options = options("rules = a.yaml\n", &["--trust", trust]).unwrap();
        assert_eq!(
            options.wide_networks().collect::<Vec<_>>(),
            ["128.0.0.0/1", "::/0", "0.0.0.0/0", "::ffff:0.0.0.0/96"]
        );
    }

    #[test]
    fn client_is_shown_as_far_as_operators_may_see_it() {
        let key = |text: &str| Key::of(text.parse::<IpAddr>().unwrap()).unwrap();
        for (address, network) in [
            ("203.0.113.9", "203.0.113.0/24"),
            ("2001:db8:1:2::", "2001:db8:1::/48"),
            ("255.255.255.255", "255.255.255.0/24"),
        ] {
            assert_eq!(Reveal::Networks.name_of(&key(address)).as_deref(), Some(network));
            assert_eq!(Reveal::Addresses.name_of(&key(address)).as_deref(), Some(address));
            assert_eq!(Reveal::Nothing.name_of(&key(address)), None);
        }
        for reveal in [Reveal::Networks, Reveal::Addresses, Reveal::Nothing] {
            assert_eq!(reveal.name_of(&Key::of("a secret").unwrap()), None);
        }
    }

    #[test]
    fn wrong_line_of_settings_is_named() {
        for (text, said) in [
            ("listen", "line 1 has no `=`"),
            ("\nlissten = 1", "line 2: there is no setting `lissten`"),
            ("settings = x", "there is no setting `settings`"),
            ("log = json\nlog = text", "line 2: `log` is set twice"),
            ("rules = a\nlisten = here", "invalid value 'here' for '--listen <ADDRESS>'"),
            ("rules = a\nidle = 5", "write it like `500ms`, `5s`, `1h` or `1d`"),
        ] {
            let error = options(text, &[]).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
