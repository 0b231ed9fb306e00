//! Messages within a connection. A layer decides about each message.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use futures_core::stream::FusedStream;
use http::request::Parts;
use pin_project_lite::pin_project;

use super::admit::{Admission, Refused};
use super::layer::RateLimitLayer;
use crate::base::head::Head;
use crate::limiter::{BoxFuture, Limiter};

/// The maximum number of messages that one poll drops. Then other tasks run.
const DROPPED_MAX: u32 = 64;

/// # For messages
impl<L: Limiter> RateLimitLayer<L> {
    /// Decides about the messages of a connection, according to the rules and the settings of this
    /// layer. The connection can be a WebSocket, a stream of gRPC, or a stream of server-sent
    /// events. The layer need not wrap a service; the application keeps the layer in its state.
    ///
    /// `request` is the request that began the connection. For each message the rules see the head
    /// of that request. So all connections of a user share one allowance, if the key is the user's.
    /// A rule counts messages, or the units that
    /// [`message_units`](crate::middleware::message_units) returns for each message.
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_ratelimit::middleware::message_units;
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    ///
    /// type Chat = RateLimitLayer<MemoryLimiter>;
    ///
    /// async fn talk(chat: &Chat, head: &Parts, mut received: impl Iterator<Item = String>) {
    ///     let mut messages = chat.messages(head);
    ///     while let Some(text) = received.next() {
    ///         match messages.admit(text.len() as u64).await {
    ///             Ok(_) => println!("{text}"),
    ///             Err(refused) => println!("too fast: wait for {:?}", refused.outcome().wait()),
    ///         }
    ///     }
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let count = Rule::new("messages", Quota::per_second(5))?;
    /// let bytes = Rule::new("bytes", Quota::per_second(10_000))?.cost(message_units);
    /// let user = key::header("x-user");
    /// let chat = Chat::new(MemoryLimiter::new(), count, user.clone()).and(bytes, user);
    /// # let (head, ()) = http::Request::get("/").header("x-user", "a").body(())?.into_parts();
    /// # talk(&chat, &head, ["hello".to_owned()].into_iter()).await;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn messages<'a>(&self, request: impl Into<Head<'a>>) -> Messages<L> {
        let (head, ()) = request.into().to_request().into_parts();
        Messages { layer: self.clone(), head }
    }

    /// Decides about the messages of a call of tonic, as [`messages`](Self::messages) does. The
    /// rules see the same head as in [`admit_call`](Self::admit_call). A [`Refused`] becomes the
    /// status that ends the call.
    ///
    /// ```
    /// use tonic::{Request, Status, Streaming};
    /// use tower_ratelimit::{MemoryLimiter, RateLimitLayer};
    ///
    /// async fn upload(
    ///     limit: &RateLimitLayer<MemoryLimiter>,
    ///     call: Request<Streaming<Vec<u8>>>,
    /// ) -> Result<usize, Status> {
    ///     let mut messages = limit.messages_of_call(&call);
    ///     let (mut received, mut bytes) = (call.into_inner(), 0);
    ///     while let Some(message) = received.message().await? {
    ///         messages.admit(message.len() as u64).await?;
    ///         bytes += message.len();
    ///     }
    ///     Ok(bytes)
    /// }
    /// ```
    #[cfg(feature = "tonic")]
    #[must_use]
    pub fn messages_of_call<T>(&self, call: &tonic::Request<T>) -> Messages<L> {
        Messages { layer: self.clone(), head: super::admit::head_of_call(call) }
    }
}

/// Returns the units of the message that a layer decides about, for
/// [`Rule::cost`](crate::Rule::cost). Returns 1 if the layer decides about a request.
#[must_use]
pub fn message_units(head: &Head<'_>) -> u64 {
    head.extensions.get().map_or(1, |MessageUnits(units)| *units)
}

#[derive(Clone, Copy)]
struct MessageUnits(u64);

/// Decides about the messages of one connection, according to a layer's
/// [rules](RateLimitLayer::messages).
#[derive(Clone)]
pub struct Messages<L: Limiter> {
    layer: RateLimitLayer<L>,
    /// The head of the request that began the connection.
    head: Parts,
}

impl<L: Limiter> Messages<L> {
    /// Decides about a message of this many units, at once or [after a wait](RateLimitLayer::max_message_wait).
    /// The message stays charged, unless the [`Admission`] is used to refund it.
    ///
    /// Units of a [concurrency limit](crate::Quota::concurrent) are held until the admission is
    /// dropped.
    ///
    /// # Errors
    /// Returns an error if the message is refused. In a WebSocket, close the connection, or report
    /// the refusal in a message of your own. In a gRPC call, the error becomes the call's status.
    pub async fn admit(&mut self, units: u64) -> Result<Admission, Refused> {
        self.head.extensions.insert(MessageUnits(units));
        self.layer.admit_message(&Head::from(&self.head)).await
    }

    /// Limits a stream of received or sent messages. `units` returns the cost of each message. A
    /// message of 0 units, such as a ping or an error of the connection, passes without a check.
    ///
    /// The stream yields the messages that pass. A refused message ends the stream with an error,
    /// unless refused messages are [dropped](MessageStream::drop_refused). Units of a [concurrency
    /// limit](crate::Quota::concurrent) are returned when a message is yielded.
    ///
    /// ```
    /// use axum::extract::ws::{Message, WebSocket};
    /// use http::request::Parts;
    /// use tokio_stream::StreamExt;
    /// use tower_ratelimit::{MemoryLimiter, RateLimitLayer};
    ///
    /// async fn talk(chat: RateLimitLayer<MemoryLimiter>, head: Parts, socket: WebSocket) {
    ///     let units = |message: &Result<Message, axum::Error>| match message {
    ///         Ok(Message::Text(_) | Message::Binary(_)) => 1,
    ///         _ => 0,
    ///     };
    ///     let mut messages = chat.messages(&head).limit(socket, units);
    ///     while let Some(Ok(Ok(message))) = messages.next().await {
    ///         println!("{message:?}");
    ///     }
    /// }
    /// ```
    pub fn limit<S: Stream, U: FnMut(&S::Item) -> u64>(self, stream: S, units: U) -> MessageStream<S, L, U> {
        let (messages, deciding) = (Some(self), None);
        MessageStream { stream, units, messages, deciding, drops_refused: false, dropped: 0, is_over: false }
    }
}

impl<L: Limiter> fmt::Debug for Messages<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages").field("head", &Head::from(&self.head)).finish_non_exhaustive()
    }
}

/// The decision about a message, together with the connection's `Messages`.
type DecidedMessage<L> = (Messages<L>, Result<Admission, Refused>);

pin_project! {
    /// A stream of messages that a layer has [limited](Messages::limit).
    #[must_use = "streams do nothing unless polled"]
    pub struct MessageStream<S: Stream, L: Limiter, U> {
        #[pin]
        stream: S,
        units: U,
        // `None` while the decision about a message is pending.
        messages: Option<Messages<L>>,
        deciding: Option<(S::Item, BoxFuture<'static, DecidedMessage<L>>)>,
        drops_refused: bool,
        dropped: u64,
        is_over: bool,
    }
}

impl<S: Stream, L: Limiter, U> MessageStream<S, L, U> {
    /// Sets whether a refused message is dropped, so that the stream goes on. By default, a refused
    /// message ends the stream.
    pub fn drop_refused(self, drops: bool) -> Self {
        Self { drops_refused: drops, ..self }
    }

    /// Returns the number of messages that were dropped.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Returns a mutable reference to the stream of all messages. Use this reference to send to a
    /// socket that is also a sink.
    pub fn stream_mut(self: Pin<&mut Self>) -> Pin<&mut S> {
        self.project().stream
    }
}

impl<S, L, U> Stream for MessageStream<S, L, U>
where
    S: Stream,
    L: Limiter,
    U: FnMut(&S::Item) -> u64,
{
    type Item = Result<S::Item, Refused>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut this = self.project();
        let mut dropped = 0;
        loop {
            if let Some((_, decided)) = this.deciding {
                let (messages, decided) = ready!(decided.as_mut().poll(cx));
                *this.messages = Some(messages);
                let message = this.deciding.take().map(|(message, _)| message);
                match decided {
                    Ok(admission) => {
                        admission.keep();
                        return Poll::Ready(message.map(Ok));
                    }
                    Err(refused) if !*this.drops_refused => {
                        *this.is_over = true;
                        return Poll::Ready(Some(Err(refused)));
                    }
                    Err(_) => {
                        *this.dropped = this.dropped.saturating_add(1);
                        dropped += 1;
                    }
                }
            }
            if *this.is_over {
                return Poll::Ready(None);
            }
            if dropped >= DROPPED_MAX {
                // Yields, so that a client that sends a flood of messages does not keep other tasks from running.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let Some(message) = ready!(this.stream.as_mut().poll_next(cx)) else {
                *this.is_over = true;
                return Poll::Ready(None);
            };
            let units = (this.units)(&message);
            if units == 0 {
                return Poll::Ready(Some(Ok(message)));
            }
            let Some(mut messages) = this.messages.take() else {
                debug_assert!(false, "no decision about a message is pending now");
                *this.is_over = true;
                return Poll::Ready(None);
            };
            let decided = Box::pin(async move {
                let decided = messages.admit(units).await;
                (messages, decided)
            });
            *this.deciding = Some((message, decided));
        }
    }
}

impl<S, L, U> FusedStream for MessageStream<S, L, U>
where
    S: Stream,
    L: Limiter,
    U: FnMut(&S::Item) -> u64,
{
    fn is_terminated(&self) -> bool {
        self.is_over
    }
}

impl<S: Stream, L: Limiter, U> fmt::Debug for MessageStream<S, L, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageStream")
            .field("dropped", &self.dropped)
            .field("is_over", &self.is_over)
            .finish_non_exhaustive()
    }
}
