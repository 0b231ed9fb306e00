//! A limiter's answer, now or later.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use crate::base::sync::polled_again;

/// A future whose type is erased.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A limiter's answer: known now, or later through a future.
///
/// `.await` returns the answer in both cases. A limiter may do its work only when the reply's
/// future is polled. So if a reply is dropped, the limiter has possibly done nothing. Only
/// [`refund`](crate::limiter::Limiter::refund) and [`settle`](crate::limiter::Limiter::settle) take
/// effect even if their reply is dropped without a poll.
///
/// ```
/// use tower_ratelimit::{limiter::Limiter, Key, MemoryLimiter, Policy, Quota};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = MemoryLimiter::new();
/// let policy = Policy::new("login", Quota::per_hour(5))?;
/// limiter.reset(&policy, &Key::of("alice").unwrap()).await?;
/// # Ok(()) }
/// ```
///
/// The compiler warns when the `.await` is forgotten:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use tower_ratelimit::{limiter::Limiter, Key, MemoryLimiter, Policy, Quota};
/// # fn forgotten(limiter: &MemoryLimiter, policy: &Policy, key: &Key) {
/// Limiter::reset(limiter, policy, key);
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a limiter may do nothing until its reply is awaited"]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Reply<T, E, F> {
    /// The answer is known.
    Now(Result<T, E>),
    /// This future returns the answer.
    Later(F),
}

impl<T, E, F: Future<Output = Result<T, E>>> IntoFuture for Reply<T, E, F> {
    type Output = Result<T, E>;
    type IntoFuture = ReplyFuture<T, E, F>;

    fn into_future(self) -> ReplyFuture<T, E, F> {
        match self {
            Self::Now(answer) => ReplyFuture { state: ReplyState::Now { answer: Some(answer) } },
            Self::Later(future) => ReplyFuture { state: ReplyState::Later { future } },
        }
    }
}

pin_project! {
    /// The future of a [`Reply`], which `.await` polls.
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub struct ReplyFuture<T, E, F> {
        #[pin]
        state: ReplyState<T, E, F>,
    }
}

pin_project! {
    #[project = StateProjection]
    #[derive(Debug)]
    enum ReplyState<T, E, F> {
        Now { answer: Option<Result<T, E>> },
        Later { #[pin] future: F },
    }
}

impl<T, E, F: Future<Output = Result<T, E>>> Future for ReplyFuture<T, E, F> {
    type Output = Result<T, E>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T, E>> {
        match self.project().state.project() {
            StateProjection::Now { answer } => answer.take().map_or_else(polled_again, Poll::Ready),
            StateProjection::Later { future } => future.poll(context),
        }
    }
}
