//! Credentials that change while the limiter runs.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use crate::error::{BoxError, WithSources};

/// The least time after which credentials are renewed.
const RENEW_MIN: Duration = Duration::from_secs(1);

/// The time that the application's closure may take.
pub(super) const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// A user of Redis and its password, which may be a token that expires. See
/// [`RedisLimiterBuilder::credentials`](super::RedisLimiterBuilder::credentials).
#[derive(Clone)]
pub struct RedisCredentials {
    username: Arc<str>,
    password: Arc<str>,
    renew_after: Option<Duration>,
}

impl RedisCredentials {
    /// Makes credentials. A server without users has the user `default`.
    #[must_use]
    pub fn new(username: impl Into<String>, password: impl Into<String>) -> Self {
        Self { username: username.into().into(), password: password.into().into(), renew_after: None }
    }

    /// Sets the time after which a connection with these credentials asks for newer ones, and sends them with the
    /// command `AUTH`. A time of less than 1 s counts as 1 s. By default a connection never asks for newer
    /// credentials, which suits servers that check credentials only when a connection is made.
    #[must_use]
    pub fn renew_after(mut self, time: Duration) -> Self {
        self.renew_after = Some(time.max(RENEW_MIN));
        self
    }

    pub(super) fn username(&self) -> &str {
        &self.username
    }

    pub(super) fn password(&self) -> &str {
        &self.password
    }

    pub(super) fn time_to_renew(&self) -> Option<Duration> {
        self.renew_after
    }
}

impl fmt::Debug for RedisCredentials {
    /// Leaves the password out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisCredentials")
            .field("username", &self.username)
            .field("renew_after", &self.renew_after)
            .finish_non_exhaustive()
    }
}

/// A future of the application's closure.
type CredentialsFuture = Pin<Box<dyn Future<Output = Result<RedisCredentials, BoxError>> + Send>>;

/// The application's closure that returns credentials.
#[derive(Clone)]
pub(super) struct CredentialSource(Arc<dyn Fn() -> CredentialsFuture + Send + Sync>);

impl CredentialSource {
    pub(super) fn new<F, A, E>(ask: F) -> Self
    where
        F: Fn() -> A + Send + Sync + 'static,
        A: Future<Output = Result<RedisCredentials, E>> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        Self(Arc::new(move || {
            let asked = ask();
            Box::pin(async { asked.await.map_err(Into::into) })
        }))
    }

    /// Asks for credentials. A panic of the closure is contained, because the task that asks also keeps the
    /// connection.
    ///
    /// # Errors
    /// Returns the reason why there are no credentials, as text.
    pub(super) async fn ask(&self) -> Result<RedisCredentials, String> {
        let asked = async {
            match tokio::time::timeout(ASK_TIMEOUT, (self.0)()).await {
                Ok(Ok(credentials)) => Ok(credentials),
                Ok(Err(error)) => Err(WithSources(&*error).to_string()), // its words are the application's code, too
                Err(_) => Err(format!("the closure for credentials took longer than {ASK_TIMEOUT:?}")),
            }
        };
        let answer = AssertUnwindSafe(asked).catch_unwind().await;
        answer.unwrap_or_else(|_| Err("the closure for credentials panicked".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_leaves_the_password_out() {
        let text = format!("{:?}", RedisCredentials::new("app", "hunter2").renew_after(Duration::ZERO));
        assert!(text.contains("app") && text.contains("1s") && !text.contains("hunter2"), "{text}");
    }

    /// An error that cannot say what it is.
    #[derive(Debug)]
    struct Wordless;

    impl fmt::Display for Wordless {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            Err(fmt::Error)
        }
    }

    impl Error for Wordless {}

    #[tokio::test(start_paused = true)]
    async fn closure_that_fails_in_any_way_is_an_error() {
        let refused = CredentialSource::new(|| async { Err::<RedisCredentials, _>("the role is gone") });
        assert_eq!(refused.ask().await.unwrap_err(), "the role is gone");
        let none = || -> std::future::Pending<Result<RedisCredentials, BoxError>> { std::future::pending() };
        assert!(CredentialSource::new(none).ask().await.unwrap_err().contains("longer than 5s"));
        let panics = || -> std::future::Ready<Result<RedisCredentials, BoxError>> { panic!("as asked") };
        assert!(CredentialSource::new(panics).ask().await.unwrap_err().contains("panicked"));
        let wordless = || async { Err::<RedisCredentials, _>(Wordless) };
        assert!(CredentialSource::new(wordless).ask().await.unwrap_err().contains("panicked"));
    }
}
