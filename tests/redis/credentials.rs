//! Credentials that change while the limiter runs.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tower_ratelimit::{
    Policy, Quota, RedisLimiter,
    limiter::{
        StoreErrorKind,
        redis::{RedisCredentials, RedisLimiterBuilder},
    },
    observe::{LimiterEvent, Observer},
};

use super::{builders, connected, eventually, passes, patient, policy, take};
use crate::support::proxy::{Fault, Proxy};
use crate::support::redis_cluster::Cluster;
use crate::support::redis_server::Server;

/// The user that the tests' limiters have. Its password changes.
const RIGHTS: &str = "~ratelimit:* +eval +evalsha +time +get +set +psetex +del +lrange +lindex +llen +lset +ltrim +rpush \
                      +rpop +pexpire +ping +cluster|slots +asking";

/// An identity service: the token of now, and how often it was asked for.
#[derive(Clone, Default)]
struct Tokens(Arc<Mutex<(String, u32)>>);

impl Tokens {
    /// Makes a new token, which the servers accept instead of the old one.
    fn rotate(&self, servers: &[&Server], token: &str) {
        for server in servers {
            set_password(server, token);
        }
        self.issue(token);
    }

    fn issue(&self, token: &str) {
        self.0.lock().unwrap().0 = token.to_owned();
    }

    fn asked(&self) -> u32 {
        self.0.lock().unwrap().1
    }

    /// Returns a builder that asks for the token of the user `app`.
    fn builder(&self, renew_after: Option<Duration>) -> RedisLimiterBuilder {
        self.builder_for("app", renew_after)
    }

    fn builder_for(&self, user: &'static str, renew_after: Option<Duration>) -> RedisLimiterBuilder {
        let tokens = self.clone();
        patient().credentials(move || {
            let mut state = tokens.0.lock().unwrap();
            state.1 += 1;
            let token = state.0.clone();
            async move {
                if token.is_empty() {
                    return Err(io::Error::other("the role may not have a token"));
                }
                let credentials = RedisCredentials::new(user, token);
                Ok(renew_after.map_or(credentials.clone(), |time| credentials.renew_after(time)))
            }
        })
    }
}

#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<String>>>);

impl Observer for Heard {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

impl Heard {
    fn has(&self, words: &str) -> bool {
        self.0.lock().unwrap().iter().any(|event| event.contains(words))
    }
}

fn set_password(server: &Server, password: &str) {
    let mut command = redis::cmd("ACL");
    command.arg("SETUSER").arg("app").arg("reset").arg("on").arg(format!(">{password}"));
    let () = command.arg(RIGHTS.split_whitespace().collect::<Vec<_>>()).query(&mut server.connection()).unwrap();
}

/// Ends the connections of the user, as a server does when their time is over.
fn kill_connections(server: &Server) -> u32 {
    redis::cmd("CLIENT").arg(&["KILL", "USER", "app"]).query(&mut server.connection()).unwrap()
}

/// Waits until a check succeeds.
async fn serves(limiter: &RedisLimiter, policy: &Policy) {
    eventually("a check succeeds", async || take(limiter, policy, "a", 1).await.is_ok()).await;
}

/// Returns a limiter whose credentials are renewed each second, with its server, its tokens, and what it reports.
async fn renewed_each_second() -> (Server, Tokens, Heard, RedisLimiter) {
    let (server, tokens, heard) = (Server::start(), Tokens::default(), Heard::default());
    tokens.rotate(&[&server], "first");
    let builder = tokens.builder(Some(Duration::from_secs(1))).observer(heard.clone());
    let limiter = builder.connect(&server.url()).await.unwrap();
    serves(&limiter, &hourly()).await;
    (server, tokens, heard, limiter)
}

fn hourly() -> Policy {
    policy("test", Quota::per_hour(1_000))
}

#[tokio::test]
async fn credentials_are_asked_for_with_each_connection() {
    let (server, tokens) = (Server::start(), Tokens::default());
    tokens.rotate(&[&server], "first");
    let limiter = tokens.builder(None).connect(&server.url()).await.unwrap();
    let policy = hourly();
    serves(&limiter, &policy).await;
    for token in ["second", "third"] {
        let asked = tokens.asked();
        tokens.rotate(&[&server], token);
        // A connection that was made with the old one is still served.
        assert!(passes(&limiter, &policy, "a").await);
        assert_eq!(tokens.asked(), asked);
        assert_eq!(kill_connections(&server), 1);
        serves(&limiter, &policy).await;
        assert!(tokens.asked() > asked);
    }
}

#[tokio::test]
async fn credentials_are_renewed_on_the_open_connection() {
    let (server, tokens, heard, limiter) = renewed_each_second().await;
    let policy = hourly();
    let connections = || -> Vec<String> {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
        let of_app = list.lines().filter(|line| line.contains("user=app"));
        of_app.map(|line| line.split_whitespace().find(|word| word.starts_with("id=")).unwrap().to_owned()).collect()
    };
    let (before, asked) = (connections(), tokens.asked());
    let calls = || -> u64 {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
        let line = info.lines().find(|line| line.starts_with("cmdstat_auth:"));
        line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse().unwrap())
    };
    let logins = calls();
    // Both passwords are right for a while, as with tokens.
    let () = redis::cmd("ACL").arg(&["SETUSER", "app", ">second"]).query(&mut server.connection()).unwrap();
    tokens.issue("second");
    eventually("it is renewed twice", async || tokens.asked() >= asked + 2 && calls() >= logins + 2).await;
    assert!(passes(&limiter, &policy, "a").await);
    assert_eq!(connections(), before, "the connection is the same");
    // Without a token the connection goes on, and the observer hears of it.
    tokens.issue("");
    eventually("it is reported", async || heard.has("the role may not have a token")).await;
    assert!(heard.has("StoreFailed") && !heard.has("StoreDown"));
    assert!(passes(&limiter, &policy, "a").await);
}

#[tokio::test]
async fn refused_renewal_is_reported_and_tried_again() {
    let (server, tokens, heard, limiter) = renewed_each_second().await;
    let policy = hourly();
    tokens.issue("expired");
    eventually("it is reported", async || heard.has("WRONGPASS")).await;
    assert!(heard.has("Misconfigured") && !heard.has("expired"));
    tokens.rotate(&[&server], "second");
    serves(&limiter, &policy).await;
    let asked = tokens.asked();
    eventually("it is asked again", async || tokens.asked() > asked).await;
    assert!(passes(&limiter, &policy, "a").await);
}

/// An open connection stays as it is. The next one needs the password.
#[tokio::test]
async fn password_that_a_server_gets_is_wanted_by_new_connections() {
    let policy = hourly();
    for tokens in [None, Some(Tokens::default())] {
        let unknown = if tokens.is_some() { "WRONGPASS" } else { "NOAUTH" };
        let builder = || tokens.as_ref().map_or_else(patient, |tokens| tokens.builder_for("default", None));
        for builder in builders(builder) {
            let server = Server::start();
            let mut admin = server.connection();
            let mut command = |words: &[&str]| redis::cmd(words[0]).arg(&words[1..]).exec(&mut admin).unwrap();
            tokens.iter().for_each(|tokens| tokens.issue("any"));
            let limiter = connected(builder, &server.url()).await;
            command(&["CONFIG", "SET", "requirepass", "secret"]);
            assert!(passes(&limiter, &policy, "a").await);
            command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            eventually("it is a misconfiguration", async || {
                let error = take(&limiter, &policy, "a", 1).await.err();
                error.is_some_and(|it| it.kind() == StoreErrorKind::Misconfigured && it.to_string().contains(unknown))
            })
            .await;
            match &tokens {
                Some(tokens) => tokens.issue("secret"),
                None => command(&["CONFIG", "SET", "requirepass", ""]),
            }
            serves(&limiter, &policy).await;
        }
    }
}

/// A proxy may send the calls of an open connection over another one, where the limiter has not logged in.
#[tokio::test]
async fn connection_that_is_logged_out_is_made_anew() {
    let policy = hourly();
    for builder in builders(patient) {
        let server = Server::with(&["--requirepass", "right"]);
        let proxy = Proxy::start(server.port());
        let limiter = connected(builder, &proxy.url().replace("redis://", "redis://:right@")).await;
        proxy.fault(Fault::Replace);
        assert!(passes(&limiter, &policy, "a").await);
        let error = take(&limiter, &policy, "a", 1).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("NOAUTH"), "{error}");
        serves(&limiter, &policy).await;
    }
}

#[tokio::test]
async fn missing_credentials_are_a_missing_connection() {
    let (server, tokens, heard) = (Server::start(), Tokens::default(), Heard::default());
    let limiter = tokens.builder(None).observer(heard.clone()).connect(&server.url()).await.unwrap();
    let policy = hourly();
    let error = take(&limiter, &policy, "a", 1).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    eventually("it is reported", async || heard.has("StoreDown")).await;
    assert!(heard.has("no credentials for Redis at 127.0.0.1") && heard.has("the role may not have a token"));
    tokens.rotate(&[&server], "first");
    serves(&limiter, &policy).await;
}

#[tokio::test]
async fn each_server_of_a_cluster_gets_credentials() {
    let (cluster, tokens) = (Cluster::start(), Tokens::default());
    let servers: Vec<&Server> = cluster.servers.iter().collect();
    tokens.rotate(&servers, "first");
    let limiter = tokens.builder(None).connect(&cluster.url()).await.unwrap();
    let policy = hourly();
    for key in 0..30 {
        eventually("a check succeeds", async || take(&limiter, &policy, &key.to_string(), 1).await.is_ok()).await;
    }
    tokens.rotate(&servers, "second");
    for server in &servers {
        kill_connections(server);
    }
    for key in 0..30 {
        eventually("a check succeeds", async || take(&limiter, &policy, &key.to_string(), 1).await.is_ok()).await;
    }
}

#[tokio::test]
async fn credentials_that_would_be_ignored_are_refused() {
    let tokens = Tokens::default();
    for (url, words) in [
        ("redis://app:secret@127.0.0.1", "the URL for Redis has a user or a password"),
        ("redis-cluster://:secret@127.0.0.1", "the URL for Redis has a user or a password"),
        ("redis-sentinel://127.0.0.1?sentinelServiceName=main", "not possible with sentinels"),
    ] {
        let error = tokens.builder(None).connect(url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
        assert!(error.to_string().contains(words) && !error.to_string().contains("secret@"), "{error}");
    }
    assert_eq!(tokens.asked(), 0);
}

#[cfg(feature = "redis-rs")]
#[tokio::test]
async fn connection_of_the_application_has_its_own_credentials() {
    let (server, tokens) = (Server::start(), Tokens::default());
    let connection = super::clients::open(&server.url()).await;
    let error = tokens.builder(None).over(connection).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
}
