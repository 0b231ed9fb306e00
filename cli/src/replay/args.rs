//! The options of `tower-ratelimit replay`.

use std::path::PathBuf;
use std::time::Duration;

use tower_ratelimit::Quota;
use tower_ratelimit::key::TrustedProxies;

/// The number of clients that are followed by default.
const CLIENTS: u64 = 500_000;

/// Replay access logs through rules or a quota, and report whom that would have refused
///
/// The real limiter decides about each request, at the log's time. The report says whom it refused, how 24 other limits
/// would have done, and which limit to take.
///
///   tower-ratelimit replay --rules rules.yaml access.log
///
///   tower-ratelimit replay --quota "100 per minute" --html report.html access.log*
///
/// Files are read in the order of their times, and gunzipped if need be. The files of several servers are merged.
///
/// Lines may have the prefixes of syslog, journald, Docker, compose, Kubernetes and Heroku.
///
/// The exit code is 0 if the log was replayed, whatever was refused. It is 2 if the log could not be replayed: then
/// there is no report. So it is if more than a tenth of its lines had to be left out, if more than a tenth of its
/// requests has no client, or if two programs logged the same requests. Nothing leaves this machine.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Log files in any order, also compressed by gzip; `-` is the standard input
    #[arg(required = true, value_name = "LOG")]
    pub(super) logs: Vec<PathBuf>,
    /// A file of rules
    #[arg(long, value_name = "FILE", conflicts_with_all = ["key", "quota"])]
    pub(super) rules: Option<PathBuf>,
    /// A quota, such as "100 per minute, burst 20"
    #[arg(long, required_unless_present = "rules", value_parser = quota)]
    pub(super) quota: Option<Box<Quota>>,
    /// The key that the quota counts by: client, user, path, host, method, global, or "header NAME"; client by default
    #[arg(long, value_parser = KeyWord::parse)]
    pub(super) key: Option<KeyWord>,
    /// The field that a name in a rule's `key` stands for, such as tenant=user; may be repeated
    #[arg(long = "name", value_name = "NAME=KEY", conflicts_with = "quota", value_parser = name)]
    pub(super) names: Vec<(String, KeyWord)>,
    /// Take the client from X-Forwarded-For, behind this many proxies
    #[arg(long, value_name = "N", value_parser = proxies)]
    pub(super) trusted_proxies: Option<TrustedProxies>,
    /// COMBINED, COMMON, VCOMBINED, COMBINEDPLUS, COMBINEDXFF, NGINXMAIN, NGINXJSON, INGRESSNGINX,
    /// NGINXPROXYMANAGER, UVICORN, CADDY, TRAEFIK, TRAEFIKCLF, ENVOY,
    /// ENVOYJSON, ISTIO, HAPROXY, KONG, HEROKU, CLOUDFLARE, FASTLY, GCP, AZURE, ALB, ELB, APIGATEWAY, CLOUDFRONT, W3C
    /// (also IIS), SQUID, JSON, or the text of an nginx log_format; by default the first lines decide
    #[arg(long)]
    pub(super) format: Option<String>,
    /// The path of a field in a JSON log, such as client=request.client_ip; may be repeated
    ///
    /// Fields are client, user, time (of the response), start (of the request), method, path, host, status, duration-s
    /// (or -ms, -us, -ns), request (such as `GET / HTTP/1.1`), or the name of a header.
    #[arg(long = "field", value_name = "FIELD=PATH", value_parser = pair)]
    pub(super) fields: Vec<(String, String)>,
    /// The time by which lines may be out of order, up to 1 day
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = window)]
    pub(super) window: Duration,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Also write the report as one HTML file, which loads nothing
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Print whole addresses, keys and paths; by default only networks of /24 and /48, hashes, and `*` for what may be
    /// a token
    #[arg(long)]
    pub(super) show_addresses: bool,
    /// The number of clients that are followed one by one, over all rules
    #[arg(long, value_name = "N", default_value_t = CLIENTS, value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    pub(super) max_clients: u64,
}

/// The limits that the log is replayed through.
#[derive(Debug)]
pub(super) enum Through<'o> {
    Rules { file: &'o PathBuf, names: &'o [(String, KeyWord)] },
    Quota { key: KeyWord, quota: Box<Quota> },
}

/// The part of a request that makes a key, as the options name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KeyWord {
    Client,
    User,
    Path,
    Host,
    Method,
    Global,
    Header(http::HeaderName),
}

impl KeyWord {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text.trim() {
            "client" | "client-ip" | "peer-ip" => Self::Client,
            "user" => Self::User,
            "path" => Self::Path,
            "host" => Self::Host,
            "method" => Self::Method,
            "global" => Self::Global,
            other => match other.strip_prefix("header ").map(|name| http::HeaderName::try_from(name.trim())) {
                Some(Ok(name)) => Self::Header(name),
                _ => return Err("take client, user, path, host, method, global, or \"header NAME\"".to_owned()),
            },
        })
    }
}

impl Options {
    pub(super) fn through(&self) -> Result<Through<'_>, String> {
        match (&self.rules, &self.quota) {
            (Some(file), _) => Ok(Through::Rules { file, names: &self.names }),
            (None, Some(quota)) => {
                Ok(Through::Quota { key: self.key.clone().unwrap_or(KeyWord::Client), quota: quota.clone() })
            }
            (None, None) => Err("error: give --rules or --quota".to_owned()),
        }
    }

    pub(super) fn max_clients(&self) -> usize {
        usize::try_from(self.max_clients).unwrap_or(usize::MAX)
    }
}

fn quota(text: &str) -> Result<Box<Quota>, String> {
    let quota: Quota = text.parse().map_err(|error: tower_ratelimit::ConfigError| error.to_string())?;
    if quota.counts_bytes() {
        let message = "it counts bytes, and each request would cost one: take --rules, with a rule that has `cost: content-length`";
        return Err(message.to_owned());
    }
    Ok(Box::new(quota))
}

fn name(text: &str) -> Result<(String, KeyWord), String> {
    let (name, key) = pair(text)?;
    Ok((name, KeyWord::parse(&key)?))
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}

fn proxies(text: &str) -> Result<TrustedProxies, String> {
    let count = text.parse().map_err(|_| "it is not a whole number".to_owned())?;
    TrustedProxies::count(count).map_err(|error| error.to_string())
}

fn window(text: &str) -> Result<Duration, String> {
    let window = humantime::parse_duration(text).ok().filter(|window| window.as_secs() <= 86_400);
    window.ok_or_else(|| "it is not a time up to 1 day, such as 60s".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        options: Options,
    }

    fn parse(line: &[&str]) -> Result<Options, String> {
        let program = Program::try_parse_from(["replay"].iter().chain(line));
        program.map(|program| program.options).map_err(|error| error.to_string())
    }

    #[test]
    fn options_say_what_to_replay_through() {
        let options =
            parse(&["--quota=5 per second", "--key", "header x-api-key", "--window", "2m", "a.log", "-"]).unwrap();
        assert_eq!(options.window, Duration::from_secs(120));
        assert!(
            matches!(options.through(), Ok(Through::Quota { key: KeyWord::Header(name), .. }) if name == "x-api-key")
        );
        let options = parse(&["--quota", "5 per second", "a.log"]).unwrap();
        assert!(matches!(options.through(), Ok(Through::Quota { key: KeyWord::Client, .. })));
        let options = parse(&["--rules", "r.yaml", "--name=tenant=user", "--", "--json"]).unwrap();
        assert_eq!(options.logs, [PathBuf::from("--json")]);
        let expected = [("tenant".to_owned(), KeyWord::User)];
        assert!(matches!(options.through(), Ok(Through::Rules { names, .. }) if *names == expected));
    }

    #[test]
    fn options_that_cannot_be_meant_are_reported() {
        for (line, expected) in [
            (&["a.log"][..], "--quota"),
            (&["--quota", "5 per second"], "<LOG>"),
            (&["--quota", "5", "a.log"], "is not a quota"),
            (&["--quota", "5 kB per second", "a.log"], "it counts bytes"),
            (&["--rules", "r", "--quota", "1/s", "a"], "--rules"),
            (&["--rules", "r", "--key", "path", "a"], "--key"),
            (&["--key", "ip", "--quota", "1/s", "a"], "take client"),
            (&["--quota", "1/s", "--field", "client", "a"], "NAME=VALUE"),
            (&["--quota", "1/s", "--window", "2 days", "a"], "1 day"),
            (&["--quota", "1/s", "--max-clients", "0", "a"], "1..="),
            (&["--quota", "1/s", "--trusted-proxies", "0", "a"], "trusted proxies"),
            (&["--quota", "1/s", "--name", "a=user", "a"], "--name"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line:?}: {error}");
        }
    }
}
