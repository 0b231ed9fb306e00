//! `rediss://` with the certificate of a private authority, and with certificates of clients.
//!
//! Needs a `redis-server` that was built with TLS, and `openssl`.
#![cfg(any(
    feature = "fred-rustls",
    feature = "fred-rustls-ring",
    feature = "redis-rs-rustls",
    feature = "redis-rs-rustls-ring"
))]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::limiter::redis::{RedisClient, RedisError, RedisLimiterBuilder};
use tower_ratelimit::{
    Key, Policy, Quota, RedisLimiter,
    limiter::{Charge, Limiter, StoreErrorKind},
};

use super::{LONG, connected, passes, patient, policy, refusal};
use crate::support::redis_server::{Server, free_port};

/// The variables by which a process gets the server, and beside it, by the convention of rustls, the authorities
/// that it is to trust.
const URL: &str = "RATELIMIT_TEST_TLS_URL";
const TRUSTED: &str = "SSL_CERT_FILE";

/// A directory that is removed when it is dropped.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Directory {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("tower-ratelimit-tls-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn openssl(&self, arguments: &str) {
        let output =
            Command::new("openssl").args(arguments.split(' ')).current_dir(&self.0).output().unwrap_or_else(|error| {
                panic!("openssl cannot be started ({error}); on Debian: apt-get install openssl")
            });
        assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn authority(&self, name: &str) {
        self.openssl(&format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name} -keyout {name}.key \
             -out {name}.crt -addext basicConstraints=critical,CA:TRUE"
        ));
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.join(name)).unwrap()
    }

    /// Makes a certificate of that authority, and its key.
    fn certificate(&self, authority: &str, name: &str, extensions: &str) {
        self.openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr",
        ));
        std::fs::write(self.0.join("extensions"), format!("{extensions}\nbasicConstraints=CA:FALSE\n")).unwrap();
        self.openssl(&format!(
            "x509 -req -in {name}.csr -days 2 -CA {authority}.crt -CAkey {authority}.key -CAcreateserial \
             -extfile extensions -out {name}.crt"
        ));
    }

    /// Starts a server with a certificate of that authority for this name.
    fn server(&self, authority: &str, name: &str) -> (Server, String) {
        self.server_with(authority, name, &["--tls-auth-clients", "no"])
    }

    fn server_with(&self, authority: &str, name: &str, more: &[&str]) -> (Server, String) {
        self.certificate(authority, "server", &format!("subjectAltName={name}"));
        let port = free_port().to_string();
        let (certificate, key) = (self.file("server.crt"), self.file("server.key"));
        let options = ["--tls-port", &port, "--tls-cert-file", &certificate, "--tls-key-file", &key];
        let server = Server::with(&[&options[..], more].concat());
        (server, format!("rediss://127.0.0.1:{port}"))
    }
}

/// Returns the answer in a process of its own that trusts this authority. Variables of this process are not
/// changed.
fn told(url: &str, trusted: &Path) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tls::child_process_connects", "--nocapture"])
        .env(URL, url)
        .env(TRUSTED, trusted)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.split_once("told: "));
    line.unwrap_or_else(|| panic!("nothing told in {text}")).1.to_owned()
}

/// The kind of an error, and what it and its causes say.
fn described(error: &RedisError) -> String {
    let (mut text, mut cause) = (format!("{:?} {error}", error.kind()), error.source());
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// The child process. It does nothing in the parent.
#[test]
fn child_process_connects() {
    let Ok(url) = std::env::var(URL) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let told = runtime.block_on(async {
        let builder = RedisLimiter::builder().deadline(Duration::from_secs(20));
        let limiter = match builder.connect(&url).await {
            Ok(limiter) => limiter,
            Err(error) => return described(&error),
        };
        let (policy, key) = (Policy::from(Quota::per_day(5)), Key::of("alice").unwrap());
        let began = Instant::now();
        loop {
            match limiter.take(&[Charge::new(&policy, &key)]).await {
                Ok(decision) => return format!("{} left", decision.charges()[0].remaining()),
                // The reason for the missing connection may not be known yet.
                Err(error)
                    if error.kind() == StoreErrorKind::Unavailable
                        && !described(&error).contains("does not speak TLS")
                        && began.elapsed() < LONG =>
                {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => return described(&error),
            }
        }
    });
    println!("told: {told}");
}

#[test]
fn private_authority_is_trusted_only_if_it_is_named() {
    let directory = Directory::new();
    directory.authority("ours");
    directory.authority("other");
    let (ours, other) = (directory.0.join("ours.crt"), directory.0.join("other.crt"));
    {
        let (_server, url) = directory.server("ours", "IP:127.0.0.1");
        assert_eq!(told(&url, &ours), "4 left");
        assert_eq!(told(&url, &ours), "3 left", "another process shares the limit");
        let refused = told(&url, &other);
        assert!(refused.starts_with("Misconfigured the certificate of Redis at 127.0.0.1"), "{refused}");
        assert!(refused.contains("SSL_CERT_FILE"), "{refused}");
    }
    let (_server, url) = directory.server("ours", "DNS:elsewhere.example");
    let refused = told(&url, &ours);
    assert!(refused.starts_with("Misconfigured the certificate"), "a certificate for another name: {refused}");
}

#[test]
fn port_without_tls_is_reported_as_such() {
    let server = Server::start();
    let url = format!("rediss://127.0.0.1:{}", server.port());
    let told = told(&url, Path::new("/dev/null"));
    assert!(told.starts_with("Unavailable") && told.contains("does not speak TLS"), "{told}");
}

/// Returns a builder for each client library that has rustls.
fn builders() -> Vec<RedisLimiterBuilder> {
    let clients = [
        #[cfg(any(feature = "fred-rustls", feature = "fred-rustls-ring"))]
        RedisClient::Fred,
        #[cfg(any(feature = "redis-rs-rustls", feature = "redis-rs-rustls-ring"))]
        RedisClient::RedisRs,
    ];
    clients.map(|client| patient().client(client)).into()
}

#[tokio::test]
async fn certificates_that_were_handed_in_are_used() {
    let directory = Directory::new();
    directory.authority("ours");
    directory.authority("other");
    directory.certificate("ours", "client", "");
    directory.certificate("other", "stranger", "");
    let [ours, other] = ["ours.crt", "other.crt"].map(|name| directory.read(name));
    let (client, key) = (directory.read("client.crt"), directory.read("client.key"));
    let (stranger, strange_key) = (directory.read("stranger.crt"), directory.read("stranger.key"));
    let asks = ["--tls-auth-clients", "yes", "--tls-ca-cert-file", &directory.file("ours.crt")];
    {
        let (_server, url) = directory.server_with("ours", "IP:127.0.0.1", &asks);
        let policy = policy("test", Quota::per_day(10));
        for number in 0..builders().len() {
            let builder = || builders().swap_remove(number);
            let trusting = || builder().tls_authorities(ours.clone());
            let limiter = connected(trusting().tls_identity(client.clone(), key.clone()), &url).await;
            assert!(passes(&limiter, &policy, "a").await);
            let nameless = described(&refusal(trusting, &url).await);
            assert!(nameless.starts_with("Misconfigured") && nameless.contains("tls_identity"), "{nameless}");
            let unknown = refusal(|| trusting().tls_identity(stranger.clone(), strange_key.clone()), &url).await;
            let unknown = described(&unknown);
            assert!(unknown.starts_with("Misconfigured") && unknown.contains("tls_identity"), "{unknown}");
            let untrusted = || builder().tls_authorities(other.clone()).tls_identity(client.clone(), key.clone());
            let untrusted = described(&refusal(untrusted, &url).await);
            assert!(untrusted.starts_with("Misconfigured the certificate of Redis"), "{untrusted}");
        }
    }
    let (_server, url) = directory.server_with("ours", "DNS:elsewhere.example", &asks);
    for number in 0..builders().len() {
        let builder = || builders().swap_remove(number).tls_authorities(ours.clone());
        let elsewhere = described(&refusal(|| builder().tls_identity(client.clone(), key.clone()), &url).await);
        assert!(elsewhere.starts_with("Misconfigured the certificate of Redis"), "another name: {elsewhere}");
    }
}

#[tokio::test]
async fn certificates_that_cannot_be_used_are_refused_at_once() {
    let directory = Directory::new();
    directory.authority("ours");
    directory.certificate("ours", "client", "");
    directory.certificate("ours", "another", "");
    let [ours, client, key, another] =
        ["ours.crt", "client.crt", "client.key", "another.key"].map(|name| directory.read(name));
    let secret = String::from_utf8(key.clone()).unwrap().lines().nth(1).unwrap().to_owned();
    let broken = String::from_utf8(key.clone()).unwrap().replace("-----END", "END");
    type Wrong<'a> = (Box<dyn Fn(RedisLimiterBuilder) -> RedisLimiterBuilder + 'a>, &'a str);
    let wrong: [Wrong<'_>; 8] = [
        (Box::new(|it| it.tls_authorities("nonsense")), "tls_authorities: there is no certificate"),
        (Box::new(|it| it.tls_authorities(key.clone())), "tls_authorities: there is no certificate"),
        (
            Box::new(|it| it.tls_authorities(&ours[..ours.len() / 2])),
            "tls_authorities: the certificates cannot be read",
        ),
        (Box::new(|it| it.tls_identity(client.clone(), key.clone())), "tls_identity(…) needs tls_authorities(…)"),
        (
            Box::new(|it| it.tls_authorities(ours.clone()).tls_identity("", key.clone())),
            "tls_identity: there is no cert",
        ),
        (Box::new(|it| it.tls_authorities(ours.clone()).tls_identity(client.clone(), "")), "there is no private key"),
        (
            Box::new(|it| it.tls_authorities(ours.clone()).tls_identity(client.clone(), broken.clone())),
            "there is no private key",
        ),
        (
            Box::new(|it| it.tls_authorities(ours.clone()).tls_identity(client.clone(), another.clone())),
            "the key cannot be used with the certificate",
        ),
    ];
    for (set, words) in wrong {
        for builder in builders() {
            let error = set(builder).connect("rediss://127.0.0.1:1").await.unwrap_err();
            let text = described(&error);
            assert!(text.starts_with("Misconfigured") && text.contains(words), "{words}: {text}");
            assert!(!text.contains(&secret), "{text}");
        }
    }
    for builder in builders() {
        let error = builder.tls_authorities(ours.clone()).connect("redis://127.0.0.1:1").await.unwrap_err();
        assert!(error.to_string().contains("redis:// does not use the certificates"), "{error}");
    }
}
