//! A TCP proxy that misbehaves on command.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A proxy between its own port and another port of this machine.
pub(crate) struct Proxy {
    port: u16,
    orders: Arc<Orders>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Orders {
    /// Bytes are held back, and connections stay open.
    hold: AtomicBool,
    /// The bytes of answers after which a connection is cut. 0: it is not cut.
    cut_after: AtomicUsize,
    cuts: AtomicUsize,
    /// The faults of the next answers, one after the other.
    faults: Mutex<VecDeque<Fault>>,
    /// The number of open connections.
    open: AtomicUsize,
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
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let listener = TcpListener::from_std(listener).unwrap();
        let orders = Arc::new(Orders::default());
        let shared = Arc::clone(&orders);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let orders = Arc::clone(&shared);
                tokio::spawn(async move {
                    orders.open.fetch_add(1, Ordering::Relaxed);
                    pass(client, to, Arc::clone(&orders)).await;
                    orders.open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Self { port, orders, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
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

async fn pass(mut client: TcpStream, to: u16, orders: Arc<Orders>) {
    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).await else { return };
    // Without it small answers sometimes wait for 40 ms.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
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
                    if server.write_all(&asked[..read]).await.is_err() {
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
