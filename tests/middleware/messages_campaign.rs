//! WebSockets over TCP whose users share what they may send, and which end in every way.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use axum::routing::any;
use http::request::Parts;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Barrier;
use tokio::time::Instant;
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::{Key, MemoryLimiter, Quota, RateLimitLayer, Rule, key};

/// The messages that a user may send in a second.
const RATE: u64 = 20;

/// The messages that a user may send at once. So a timer that wakes late does not slow the user.
const BURST: u64 = 2;

#[derive(Clone)]
struct Chat {
    limit: RateLimitLayer<MemoryLimiter>,
    /// The instants at which messages were admitted, by user.
    admitted: Arc<Mutex<HashMap<String, Vec<Instant>>>>,
}

impl Chat {
    async fn talk(self, head: Parts, mut socket: WebSocket) {
        let user = head.headers["x-user"].to_str().unwrap().to_owned();
        let mut messages = self.limit.messages(&head);
        while let Some(Ok(message)) = socket.recv().await {
            let Message::Text(text) = message else { continue };
            if messages.admit(1).await.is_err() {
                return;
            }
            self.admitted.lock().unwrap().entry(user.clone()).or_default().push(Instant::now());
            assert_ne!(text.as_str(), "panic", "the handler fails as the client wants");
            if socket.send(Message::Text(text)).await.is_err() {
                return;
            }
        }
    }
}

async fn join(State(chat): State<Chat>, upgrade: WebSocketUpgrade, head: Parts) -> Response {
    upgrade.on_upgrade(move |socket| chat.talk(head, socket))
}

/// Opens a socket of a user.
async fn open(server: SocketAddr, user: usize) -> TcpStream {
    let mut stream = TcpStream::connect(server).await.unwrap();
    let request = format!(
        "GET / HTTP/1.1\r\nhost: chat\r\nx-user: {user}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    stream
}

/// Returns a text as a client's frame, masked with zeros.
fn frame(text: &str) -> Vec<u8> {
    let mut frame = vec![0x81, 0x80 | text.len() as u8, 0, 0, 0, 0];
    frame.extend(text.as_bytes());
    frame
}

/// Sends a message as soon as the last one came back, until the end. Then the socket ends in one of these ways.
async fn talk(mut stream: TcpStream, end: usize, until: Instant) {
    while Instant::now() < until {
        stream.write_all(&frame("hello")).await.unwrap();
        let mut echo = [0; 7];
        stream.read_exact(&mut echo).await.unwrap();
    }
    match end % 6 {
        // While a message waits.
        0 => stream.write_all(&frame("hello")).await.unwrap(),
        // In the middle of a message.
        1 => stream.write_all(&[0x81, 0x85, 0, 0]).await.unwrap(),
        2 => stream.write_all(&[0x88, 0x80, 0, 0, 0, 0]).await.unwrap(),
        3 => stream.write_all(&frame("panic")).await.unwrap(),
        // With many messages that nobody has read. The reset takes them away.
        4 => {
            let _ = stream.write_all(&frame("hello").repeat(50)).await;
            stream.set_zero_linger().unwrap();
        }
        _ => {}
    }
}

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(usual)
}

/// `MESSAGES_SOCKETS` and `MESSAGES_SECONDS` say how many sockets send for how long. Ten are of one user.
#[test]
fn sockets_get_their_users_rate_and_leave_nothing_behind() {
    let (sockets, seconds) = (setting("MESSAGES_SOCKETS", 60) as usize, setting("MESSAGES_SECONDS", 1));
    let is_campaign = std::env::var_os("MESSAGES_SECONDS").is_some();
    let users = sockets.div_ceil(10);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let limiter = MemoryLimiter::builder().max_keys(10_000).build().unwrap();
        let quota = Quota::per_second(RATE).burst(BURST).unwrap();
        let limit = RateLimitLayer::new(limiter.clone(), Rule::new("messages", quota).unwrap(), key::header("x-user"))
            .timer(TokioTimer::new())
            .max_message_wait(Duration::from_secs(20))
            .max_waiting(2 * sockets);
        let chat = Chat { limit, admitted: Arc::default() };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = listener.local_addr().unwrap();
        let app = Router::new().route("/", any(join)).with_state(chat.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        let length = Duration::from_secs(seconds);
        // The longest time for which the machine did not run this process.
        let longest_ms = Arc::new(AtomicU64::new(0));
        let of_machine = Arc::clone(&longest_ms);
        let measuring = tokio::spawn(async move {
            loop {
                let began = Instant::now();
                tokio::time::sleep(Duration::from_millis(10)).await;
                let late = began.elapsed().saturating_sub(Duration::from_millis(20));
                of_machine.fetch_max(late.as_millis() as u64, Ordering::Relaxed);
            }
        });
        let (ready, mut talking) = (Arc::new(Barrier::new(sockets)), tokio::task::JoinSet::new());
        for socket in 0..sockets {
            let ready = Arc::clone(&ready);
            talking.spawn(async move {
                let stream = open(server, socket % users).await;
                ready.wait().await;
                talk(stream, socket / users + socket, Instant::now() + length).await;
            });
        }
        talking.join_all().await;
        measuring.abort();
        // The server notices by and by that sockets are closed.
        let began = Instant::now();
        while chat.limit.waiting() > 0 || Arc::strong_count(&chat.admitted) > 2 {
            assert!(began.elapsed() < Duration::from_secs(60), "{} messages wait", chat.limit.waiting());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let admitted = std::mem::take(&mut *chat.admitted.lock().unwrap());
        assert_eq!(admitted.len(), users);
        let mut shares = Vec::new();
        for (user, instants) in &admitted {
            // Above in no time that begins and ends with a message.
            for (at, first) in instants.iter().enumerate() {
                for (later, last) in instants.iter().enumerate().skip(at) {
                    let most = BURST as f64 + RATE as f64 * (*last - *first).as_secs_f64();
                    // An instant is noted later than the limiter decided: the first one by a millisecond or two.
                    let noted = RATE as f64 * if is_campaign { 0.05 } else { 1.0 };
                    assert!((later - at + 1) as f64 <= most + noted, "user {user}: messages {at} to {later}");
                }
            }
            let sent = instants.iter().filter(|instant| **instant - instants[0] <= length).count();
            shares.push(sent as f64 / (RATE * seconds) as f64);
        }
        let (sum, least) = (shares.iter().sum::<f64>(), shares.iter().copied().fold(f64::MAX, f64::min));
        println!(
            "{sockets} sockets of {users} users, {seconds} s: the mean is {:.4} of {RATE} messages a second, the least \
             {least:.4}, the most {:.4}",
            sum / shares.len() as f64,
            shares.iter().copied().fold(0.0, f64::max)
        );
        // A busy machine is slower, and one that stops for most of a second sends nothing meanwhile.
        let has_stopped = longest_ms.load(Ordering::Relaxed) > 300 && !is_campaign;
        assert!(has_stopped || least >= if is_campaign { 0.99 } else { 0.3 }, "{least}, late by {longest_ms:?} ms");
        // Each user has the whole burst again, and no more.
        tokio::time::sleep(Duration::from_millis(1_000 * BURST / RATE)).await;
        for user in 0..users {
            let policy = tower_ratelimit::Policy::new("messages", quota).unwrap();
            let left = limiter.peek_one(&policy, &Key::of(user.to_string()).unwrap(), 0).remaining();
            assert_eq!(left, BURST, "user {user}");
        }
    });
}
