//! The servers that a URL names, and the transports to them.

use super::address::{Address, TargetKind};
use super::failure::misconfigured;
#[cfg(feature = "fred")]
use super::on_fred::FredTarget;
#[cfg(feature = "redis-rs")]
use super::on_redis_rs::RedisRsTarget;
use super::settings::ConnectionSettings;
#[cfg(test)]
use super::tests::simulated::{self, Simulated};
use super::tls::{self, Pem};
use super::transport::Transport;
use crate::limiter::redis::client::RedisClient;
use crate::limiter::redis::error::RedisError;
#[cfg(test)]
use crate::limiter::redis::tests::simulation::Wire;

/// A parsed URL, for the client library that is used.
pub(super) struct UrlTarget {
    client: Library,
    pub(super) kind: TargetKind,
}

/// The URL, as a client library reads it.
enum Library {
    #[cfg(feature = "fred")]
    Fred(FredTarget),
    #[cfg(feature = "redis-rs")]
    RedisRs(RedisRsTarget),
    #[cfg(test)]
    Simulated(Wire),
}

const SCHEMES: [&str; 6] = ["redis", "rediss", "redis-cluster", "rediss-cluster", "redis-sentinel", "rediss-sentinel"];

/// Returns the features that give a client TLS, and whether the build has at least one of them. One feature
/// is enough.
fn tls_of(client: RedisClient) -> (&'static str, bool) {
    match client {
        #[cfg(feature = "fred")]
        RedisClient::Fred => (
            "fred-rustls, fred-rustls-ring, fred-native-tls",
            cfg!(any(feature = "fred-rustls", feature = "fred-rustls-ring", feature = "fred-native-tls")),
        ),
        #[cfg(feature = "redis-rs")]
        RedisClient::RedisRs => (
            "redis-rs-rustls, redis-rs-rustls-ring",
            cfg!(any(feature = "redis-rs-rustls", feature = "redis-rs-rustls-ring")),
        ),
    }
}

/// Returns an error if the scheme needs TLS and the build has no TLS.
fn check_tls(scheme: &str, (features, has_tls): (&str, bool)) -> Result<(), RedisError> {
    if has_tls || !scheme.starts_with("rediss") {
        return Ok(());
    }
    Err(misconfigured(format!("{scheme}:// needs TLS: enable one of the features {features}")))
}

/// Returns an error if the URL has a parameter that its scheme does not have, because clients would ignore it.
fn check_parameters(scheme: &str, url: &str) -> Result<(), RedisError> {
    let known: &[&str] = match scheme.split_once('-') {
        Some((_, "sentinel")) => &["sentinelServiceName", "node", "sentinelUsername", "sentinelPassword"],
        Some(_) => &["node"],
        None => &[],
    };
    let (_, query) = url.split_once('?').unwrap_or_default();
    let mut pairs = query.split('&').filter(|pair| !pair.is_empty());
    if pairs.all(|pair| known.contains(&pair.split_once('=').unwrap_or_default().0)) {
        return Ok(());
    }
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    Err(misconfigured(format!(
        "the URL for Redis has a parameter that {scheme}:// does not have; the parameters of {scheme}://: {known}"
    )))
}

/// Returns an error if certificates that were handed in would not be used.
fn check_rustls(scheme: &str, client: RedisClient) -> Result<(), RedisError> {
    if !scheme.starts_with("rediss") {
        return Err(misconfigured(format!("{scheme}:// does not use the certificates that are set; rediss:// does")));
    }
    let (features, has_rustls) = match client {
        #[cfg(feature = "fred")]
        RedisClient::Fred => {
            ("fred-rustls, fred-rustls-ring", cfg!(any(feature = "fred-rustls", feature = "fred-rustls-ring")))
        }
        #[cfg(feature = "redis-rs")]
        RedisClient::RedisRs => tls_of(client),
    };
    match has_rustls {
        true => Ok(()),
        false => Err(misconfigured(format!("certificates need rustls: enable one of the features {features}"))),
    }
}

impl UrlTarget {
    /// Parses a URL. Errors do not repeat the URL, because it may contain a password.
    pub(super) fn parse(url: &str, settings: &ConnectionSettings) -> Result<Self, RedisError> {
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        if !SCHEMES.contains(&scheme) {
            return Err(misconfigured(format!(
                "a URL for Redis begins with one of {}, each with ://",
                SCHEMES.join(", ")
            )));
        }
        check_parameters(scheme, url)?;
        check_tls(scheme, tls_of(settings.client))?;
        if scheme.starts_with("rediss") {
            tls::choose_provider();
        }
        let (client, kind) = match settings.client {
            #[cfg(feature = "fred")]
            RedisClient::Fred => {
                let (target, kind) = FredTarget::parse(url)?;
                (Library::Fred(target), kind)
            }
            #[cfg(feature = "redis-rs")]
            RedisClient::RedisRs => {
                let (target, kind) = RedisRsTarget::parse(url)?;
                (Library::RedisRs(target), kind)
            }
        };
        #[allow(unused_mut, reason = "certificates need a feature")]
        let mut target = Self { client, kind };
        if !settings.pem.is_empty() {
            check_rustls(scheme, settings.client)?;
            target.use_certificates(&settings.pem)?;
        }
        if settings.credentials.is_some() {
            target.check_credentials()?;
        }
        Ok(target)
    }

    /// Returns the servers of a simulated cluster. A process asks the first server for the others.
    #[cfg(test)]
    pub(super) fn simulated(wire: Wire) -> Self {
        let first = simulated::address_of(&wire);
        Self { client: Library::Simulated(wire), kind: TargetKind::Cluster(vec![first]) }
    }

    /// Uses certificates that were handed in and that the client supports.
    #[allow(unused_variables, clippy::needless_pass_by_ref_mut, reason = "certificates need a feature")]
    fn use_certificates(&mut self, pem: &Pem) -> Result<(), RedisError> {
        match &mut self.client {
            #[cfg(any(feature = "fred-rustls", feature = "fred-rustls-ring"))]
            Library::Fred(target) => target.use_certificates(tls::read(pem)?),
            #[cfg(any(feature = "redis-rs-rustls", feature = "redis-rs-rustls-ring"))]
            Library::RedisRs(target) => {
                tls::read(pem)?; // the crate finds some mistakes only when it connects
                target.use_certificates(pem)?;
            }
            #[allow(unreachable_patterns, reason = "certificates need a feature")]
            _ => {}
        }
        Ok(())
    }

    /// Returns an error if the application's closure cannot be used with the URL.
    fn check_credentials(&self) -> Result<(), RedisError> {
        let has_login = match &self.client {
            #[cfg(feature = "fred")]
            Library::Fred(target) => target.has_login(),
            #[cfg(feature = "redis-rs")]
            Library::RedisRs(target) => target.has_login(),
            #[cfg(test)]
            Library::Simulated(_) => false,
        };
        if has_login {
            return Err(misconfigured(
                "the URL for Redis has a user or a password, and credentials(…) is set as well: use one of them",
            ));
        }
        if matches!(self.kind, TargetKind::Sentinel(_)) {
            // fred would call the closure for connections to sentinels, too, without saying that they are sentinels.
            return Err(misconfigured("credentials(…) is not possible with sentinels: put the user into the URL"));
        }
        Ok(())
    }

    /// Returns a transport that is not connected yet, to the target that the URL names or to one server of
    /// that cluster. Errors of the transport contain `name`.
    pub(super) fn transport(
        &self,
        name: &Address,
        only: Option<&Address>,
        settings: &ConnectionSettings,
    ) -> Result<Box<dyn Transport>, RedisError> {
        Ok(match &self.client {
            #[cfg(feature = "fred")]
            Library::Fred(target) => Box::new(target.transport(name, only, settings)?),
            #[cfg(feature = "redis-rs")]
            Library::RedisRs(target) => Box::new(target.transport(name, only, settings)?),
            #[cfg(test)]
            Library::Simulated(wire) => Box::new(Simulated::at(name, wire)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_without_tls_refuses_schemes_that_need_it() {
        for scheme in SCHEMES {
            assert_eq!(check_tls(scheme, ("fred-rustls", true)), Ok(()));
            let refused = check_tls(scheme, ("fred-rustls", false)).err().map(|error| error.to_string());
            assert_eq!(refused.is_some(), scheme.starts_with("rediss"), "{scheme}");
            assert!(refused.is_none_or(|error| error.starts_with(scheme) && error.contains("fred-rustls")));
        }
    }

    #[test]
    fn parameters_that_clients_would_pass_over_are_refused() {
        let sentinel = "sentinelServiceName=a&node=b:1&sentinelUsername=c&sentinelPassword=d";
        for (scheme, query, is_known) in [
            ("redis", "", true),
            ("redis", "node=b:1", false),
            ("redis", "protocol=resp3", false),
            ("redis-cluster", "node=b:1&node=c:2", true),
            ("redis-cluster", "node=b:1&nodes=c:2", false),
            ("rediss-cluster", "sentinelServiceName=a", false),
            ("redis-sentinel", sentinel, true),
            ("rediss-sentinel", sentinel, true),
            ("redis-sentinel", "sentinelServiceName=a&sentinelpassword=hunter2", false),
            ("redis-sentinel", "hunter2", false),
        ] {
            let checked = check_parameters(scheme, &format!("{scheme}://host?{query}"));
            assert_eq!(checked.is_ok(), is_known, "{scheme} {query}");
        }
        assert_eq!(check_parameters("redis", "redis://host"), Ok(()));
        let error = check_parameters("redis", "redis://host?hunter2=1").unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "it may be a part of a password: {error}");
    }
}
