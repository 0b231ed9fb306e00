//! A chat over WebSockets: each user may send five messages a second, over all of their sockets, and
//! is mute for a minute after abuse.
//!
//! ```sh
//! cargo run --example websocket --features axum
//! websocat -H 'x-user: alice' ws://127.0.0.1:3000/chat
//! ```

use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::response::Response;
use axum::routing::any;
use http::request::Parts;
use tokio::sync::broadcast;
use tower_ratelimit::observe::OutcomeKind;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

#[derive(Clone)]
struct Chat {
    limit: RateLimitLayer<MemoryLimiter>,
    room: broadcast::Sender<Utf8Bytes>,
}

impl Chat {
    fn new(limiter: MemoryLimiter) -> Result<Self, Box<dyn Error>> {
        let minute = Duration::from_secs(60);
        // Twenty messages too many within a minute.
        let mute = Quota::block(20, minute, minute)?;
        let messages = Rule::new("messages", Quota::per_second(5))?.block("mute", mute)?;
        // In production, the user that a session belongs to.
        let limit = RateLimitLayer::new(limiter, messages, key::header("x-user"));
        Ok(Self { limit, room: broadcast::channel(100).0 })
    }

    fn app(self) -> Router {
        Router::new().route("/chat", any(join)).with_state(self)
    }

    /// Passes on what a user says, and what the others say.
    async fn talk(self, head: Parts, mut socket: WebSocket) {
        let mut messages = self.limit.messages(&head);
        let mut heard = self.room.subscribe();
        loop {
            let answer = tokio::select! {
                received = socket.recv() => match received {
                    Some(Ok(Message::Text(text))) => match messages.admit(1).await {
                        Ok(_) => {
                            let _ = self.room.send(text);
                            continue;
                        }
                        Err(refused) if refused.kind() == OutcomeKind::Limited => {
                            let wait = refused.outcome().wait().duration().unwrap_or_default();
                            Message::text(format!("not sent: wait for {} ms", wait.as_millis()))
                        }
                        Err(_) => {
                            let (code, reason) = (close_code::POLICY, Utf8Bytes::from_static("you are mute"));
                            Message::Close(Some(CloseFrame { code, reason }))
                        }
                    },
                    Some(Ok(_)) => continue,
                    Some(Err(_)) | None => return,
                },
                Ok(text) = heard.recv() => Message::Text(text),
            };
            let is_last = matches!(answer, Message::Close(_));
            if socket.send(answer).await.is_err() || is_last {
                return;
            }
        }
    }
}

async fn join(State(chat): State<Chat>, upgrade: WebSocketUpgrade, head: Parts) -> Response {
    upgrade.on_upgrade(move |socket| chat.talk(head, socket))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = Chat::new(MemoryLimiter::new())?.app();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("websocat -H 'x-user: alice' ws://127.0.0.1:3000/chat");
    axum::serve(listener, app).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tower_ratelimit::clock::ManualClock;

    /// A client that sends and reads short texts.
    struct Client(TcpStream);

    impl Client {
        async fn join(server: SocketAddr, user: &str) -> Self {
            let mut stream = TcpStream::connect(server).await.unwrap();
            let request = format!(
                "GET /chat HTTP/1.1\r\nhost: chat\r\nx-user: {user}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                 sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            );
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
            Self(stream)
        }

        async fn say(&mut self, text: &str) {
            let mut frame = vec![0x81, 0x80 | text.len() as u8, 0, 0, 0, 0]; // masked with zeros
            frame.extend(text.as_bytes());
            self.0.write_all(&frame).await.unwrap();
        }

        /// Returns the next text, or `None` if the socket is closed.
        async fn hear(&mut self) -> Option<String> {
            let (kind, length) = (self.0.read_u8().await.unwrap(), self.0.read_u8().await.unwrap());
            let mut text = vec![0; usize::from(length)];
            self.0.read_exact(&mut text).await.unwrap();
            (kind == 0x81).then(|| String::from_utf8(text).unwrap())
        }
    }

    #[tokio::test]
    async fn sockets_of_a_user_share_a_limit_and_abuse_mutes() {
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, Chat::new(limiter).unwrap().app()).await });
        let mut sockets = [Client::join(server, "alice").await, Client::join(server, "alice").await];
        // Each hears what the other one says: five messages at once, of both together.
        for number in 0..5 {
            sockets[number % 2].say("hello").await;
            for socket in &mut sockets {
                assert_eq!(socket.hear().await.as_deref(), Some("hello"));
            }
        }
        let [phone, laptop] = &mut sockets;
        phone.say("one more").await;
        assert_eq!(phone.hear().await.as_deref(), Some("not sent: wait for 200 ms"));
        let mut bob = Client::join(server, "bob").await;
        bob.say("hi").await;
        assert_eq!(laptop.hear().await.as_deref(), Some("hi"));
        assert_eq!(phone.hear().await.as_deref(), Some("hi"));
        // It goes on, and is shut out.
        let mut refusals = 1;
        loop {
            phone.say("spam").await;
            let Some(answer) = phone.hear().await else { break };
            assert!(answer.starts_with("not sent"), "{answer}");
            refusals += 1;
        }
        assert_eq!(refusals, 19, "the twentieth refusal closes the key, and the socket");
        laptop.say("me too").await;
        assert_eq!(laptop.hear().await, None, "the user is mute on all sockets");
    }
}
