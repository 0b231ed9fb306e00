//! A TCP proxy that misbehaves on command.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// A proxy between its own port and another port of this machine.
pub(crate) struct Proxy {
    port: u16,
    orders: Arc<Orders>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Orders {
    /// The port of the server to which new connections lead.
    to: AtomicU16,
    /// Bytes are held back, and connections stay open.
    hold: AtomicBool,
    /// The bytes of answers after which a connection is cut. 0: it is not cut.
    cut_after: AtomicUsize,
    cuts: AtomicUsize,
    /// The faults of the next answers, one after the other.
    faults: Mutex<VecDeque<Fault>>,
    /// The number of open connections, and of all that came.
    open: AtomicUsize,
    came: AtomicUsize,
    /// The number of the first connection that is not forgotten: nothing comes through one that is.
    remembered: AtomicUsize,
    /// Sent to when all connections are reset. Each connection looks at it before it passes an answer on: its task
    /// may run only after the next call was sent.
    reset: watch::Sender<()>,
    /// Commands with this word are refused, as by a proxy that does not know them.
    unknown: Mutex<Option<&'static str>>,
    /// A connection ends once a command with this word was passed on.
    ends_at: Mutex<Option<&'static str>>,
    /// The time that bytes of new connections take, one way.
    delay_us: AtomicU64,
    /// The bytes a second that delayed connections carry, one way. 0 if they have no limit.
    rate: AtomicU64,
}

/// A fault of an answer or of its connection.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// These bytes precede the answer.
    Before(Vec<u8>),
    /// These bytes follow the answer.
    After(Vec<u8>),
    /// The answer comes twice.
    Repeat,
    /// The byte at this index is changed, if there is one.
    Garble(usize, u8),
    /// The answer is dropped.
    Lose,
    /// The answer and its connection end at this byte.
    Cut(usize),
    /// The connection is reset.
    Reset,
    /// After the answer the proxy connects to the server anew, and the client does not notice.
    Replace,
    /// No more answers come, but the connection stays open in the other direction.
    HalfClose,
}

impl Proxy {
    /// Starts a proxy. Needs a Tokio runtime.
    pub(crate) fn start(to: u16) -> Self {
        Self::start_at((Ipv4Addr::LOCALHOST, 0), to)
    }

    /// Starts a proxy at an address of this machine.
    pub(crate) fn start_at(at: (Ipv4Addr, u16), to: u16) -> Self {
        let listener = std::net::TcpListener::bind(at).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let listener = TcpListener::from_std(listener).unwrap();
        let orders = Arc::new(Orders { to: AtomicU16::new(to), ..Orders::default() });
        let shared = Arc::clone(&orders);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let orders = Arc::clone(&shared);
                tokio::spawn(async move {
                    orders.open.fetch_add(1, Ordering::Relaxed);
                    let number = orders.came.fetch_add(1, Ordering::Relaxed);
                    let delay = Duration::from_micros(orders.delay_us.load(Ordering::Relaxed));
                    let mut cut = orders.reset.subscribe();
                    tokio::select! {
                        () = pass(client, delay, number, &orders, cut.clone()) => {}
                        _ = cut.changed() => {}
                    }
                    orders.open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Self { port, orders, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Leads new connections to another port of this machine. The others stay where they are.
    pub(crate) fn lead_to(&self, port: u16) {
        self.orders.to.store(port, Ordering::Relaxed);
    }

    /// Forgets all connections, as a firewall does: nothing comes through any more, and they are not closed.
    pub(crate) fn forget(&self) {
        self.orders.remembered.store(self.orders.came.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Cuts all connections. What is sent later gets no answer through them.
    pub(crate) fn reset(&self) {
        self.orders.reset.send_replace(());
    }

    /// Refuses commands with this word.
    pub(crate) fn does_not_know(&self, word: &'static str) {
        *self.orders.unknown.lock().unwrap() = Some(word);
    }

    /// Cuts a connection once it has passed a command with this word on.
    pub(crate) fn ends_at(&self, word: &'static str) {
        *self.orders.ends_at.lock().unwrap() = Some(word);
    }

    /// Delays the bytes of new connections: there and back takes this time.
    pub(crate) fn delay(&self, round_trip: Duration) {
        self.orders.delay_us.store(u64::try_from(round_trip.as_micros()).unwrap() / 2, Ordering::Relaxed);
    }

    /// Limits the bytes a second that delayed connections carry, one way.
    pub(crate) fn limit(&self, rate: u64) {
        self.orders.rate.store(rate, Ordering::Relaxed);
    }

    /// Returns how many connections came so far.
    pub(crate) fn came(&self) -> usize {
        self.orders.came.load(Ordering::Relaxed)
    }

    /// Holds all bytes back, or passes them on again.
    pub(crate) fn hold(&self, hold: bool) {
        self.orders.hold.store(hold, Ordering::Relaxed);
    }

    /// Cuts each connection after this many bytes of answers. 0 means never.
    pub(crate) fn cut_after(&self, bytes: usize) {
        self.orders.cut_after.store(bytes, Ordering::Relaxed);
    }

    /// Adds a fault for the next answer that has none.
    pub(crate) fn fault(&self, fault: Fault) {
        self.orders.faults.lock().unwrap().push_back(fault);
    }

    /// Returns the number of faults that wait for an answer.
    pub(crate) fn faults(&self) -> usize {
        self.orders.faults.lock().unwrap().len()
    }

    /// Removes all faults.
    pub(crate) fn behave(&self) {
        self.orders.faults.lock().unwrap().clear();
    }

    /// The number of open connections.
    pub(crate) fn open(&self) -> usize {
        self.orders.open.load(Ordering::Relaxed)
    }

    /// Returns the number of connections that were cut.
    pub(crate) fn cuts(&self) -> usize {
        self.orders.cuts.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(mut client: TcpStream, delay: Duration, number: usize, orders: &Orders, cut: watch::Receiver<()>) {
    let to = orders.to.load(Ordering::Relaxed);
    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).await else { return };
    // Without it small answers sometimes wait for 40 ms.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    if !delay.is_zero() {
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        tokio::select! {
            () = carry(from_client, to_server, delay, orders, &cut) => {}
            () = carry(from_server, to_client, delay, orders, &cut) => {}
        }
        return;
    }
    let (mut asked, mut answered) = ([0; 4_096], [0; 4_096]);
    let mut passed = 0;
    loop {
        while orders.hold.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::select! {
            read = client.read(&mut asked) => match read {
                Ok(read) if read > 0 => {
                    while orders.hold.load(Ordering::Relaxed) {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    if number < orders.remembered.load(Ordering::Relaxed) {
                        continue;
                    }
                    let has = |word: &&str| asked[..read].windows(word.len()).any(|bytes| bytes == word.as_bytes());
                    let given = |word: &Mutex<Option<&'static str>>| word.lock().unwrap().filter(has);
                    if let Some(word) = given(&orders.unknown) {
                        // A command begins with the number of its parts.
                        let commands = asked[..read].iter().filter(|byte| **byte == b'*').count();
                        let refusal = format!("-ERR unknown command '{word}'\r\n").repeat(commands);
                        if client.write_all(refusal.as_bytes()).await.is_err() {
                            return;
                        }
                        continue;
                    }
                    if server.write_all(&asked[..read]).await.is_err() || given(&orders.ends_at).is_some() {
                        return;
                    }
                }
                _ => return,
            },
            read = server.read(&mut answered) => match read {
                Ok(read) if read > 0 => {
                    while orders.hold.load(Ordering::Relaxed) {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    if is_cut(&cut) {
                        return;
                    }
                    if number < orders.remembered.load(Ordering::Relaxed) {
                        continue;
                    }
                    let most = orders.cut_after.load(Ordering::Relaxed);
                    if most > 0 && passed + read > most {
                        orders.cuts.fetch_add(1, Ordering::Relaxed);
                        let _ = client.write_all(&answered[..most.saturating_sub(passed).min(read)]).await;
                        return;
                    }
                    passed += read;
                    let fault = orders.faults.lock().unwrap().pop_front();
                    let mut answer = answered[..read].to_vec();
                    let is_replaced = matches!(fault, Some(Fault::Replace));
                    match fault {
                        None | Some(Fault::Replace) => {}
                        Some(Fault::Before(bytes)) => answer = [bytes, answer].concat(),
                        Some(Fault::After(bytes)) => answer.extend(bytes),
                        Some(Fault::Repeat) => answer.extend_from_within(..),
                        Some(Fault::Garble(at, by)) => answer[at % read] ^= by,
                        Some(Fault::Lose) => continue,
                        Some(Fault::Cut(at)) => {
                            let _ = client.write_all(&answer[..at % read]).await;
                            return;
                        }
                        Some(Fault::Reset) => {
                            let _ = client.set_zero_linger();
                            return;
                        }
                        Some(Fault::HalfClose) => {
                            let _ = client.shutdown().await;
                            while client.read(&mut asked).await.is_ok_and(|read| read > 0) {}
                            return;
                        }
                    }
                    if client.write_all(&answer).await.is_err() {
                        return;
                    }
                    if is_replaced {
                        let Ok(other) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).await else { return };
                        let _ = other.set_nodelay(true);
                        server = other;
                    }
                }
                _ => return,
            },
        }
    }
}

fn is_cut(cut: &watch::Receiver<()>) -> bool {
    cut.has_changed().unwrap_or(true)
}

/// Carries bytes one way, each with this delay, and as many as come.
async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    delay: Duration,
    orders: &Orders,
    cut: &watch::Receiver<()>,
) {
    let (sender, mut carried) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let take = async move {
        let mut bytes = [0; 65_536];
        while let Ok(read) = from.read(&mut bytes).await {
            if read == 0 || sender.send((Instant::now() + delay, bytes[..read].to_vec())).is_err() {
                break;
            }
        }
    };
    let give = async move {
        while let Some((at, bytes)) = carried.recv().await {
            sleep_until(at).await;
            if is_cut(cut) || to.write_all(&bytes).await.is_err() {
                break;
            }
            let rate = orders.rate.load(Ordering::Relaxed);
            let took = (bytes.len() as u64 * 1_000_000).checked_div(rate).unwrap_or(0);
            tokio::time::sleep(Duration::from_micros(took)).await;
        }
    };
    tokio::join!(take, give);
}
