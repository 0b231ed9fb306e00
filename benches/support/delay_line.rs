//! A TCP proxy that puts a server far away: it holds the bytes of each direction for a time, and passes on as many as
//! come. It can also make a server of Redis slow, which then does one key after the other, or let only some bytes a second
//! pass.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

/// A proxy at a port of its own. Its threads end with the connections.
pub(crate) struct DelayLine {
    port: u16,
    has_ended: Arc<AtomicBool>,
}

impl DelayLine {
    /// Starts a proxy that holds all bytes for this time, each way.
    pub(crate) fn start(to: u16, each_way: Duration) -> Self {
        Self::listen(to, each_way, [None, None])
    }

    /// Starts a proxy that lets each key of a script call hold the server for this time. All connections stand in one
    /// line, as before a server that does one call after the other.
    pub(crate) fn start_slow(to: u16, each_key: Duration) -> Self {
        Self::listen(to, Duration::ZERO, [Some(Turnstile::new(Unit::Key, each_key)), None])
    }

    /// Starts a proxy that lets this number of bytes a second pass, each way. All connections share them.
    pub(crate) fn start_thin(to: u16, bytes_a_second: u32) -> Self {
        let line = || Some(Turnstile::new(Unit::Byte, Duration::from_secs(1) / bytes_a_second));
        Self::listen(to, Duration::ZERO, [line(), line()])
    }

    /// `lines` are those of the bytes to the server, and of those from it.
    fn listen(to: u16, each_way: Duration, lines: [Option<Turnstile>; 2]) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a port");
        let port = listener.local_addr().expect("it listens").port();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        let [there, back] = lines.map(|line| line.map(Arc::new));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if ended.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)) else { continue };
                // Without it small answers sometimes wait for 40 ms.
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let (Ok(from_client), Ok(to_server)) = (client.try_clone(), server.try_clone()) else { continue };
                carry(from_client, to_server, each_way, there.clone());
                carry(server, client, each_way, back.clone());
            }
        });
        Self { port, has_ended }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for DelayLine {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)); // wakes the thread that listens
    }
}

/// Carries the bytes of one direction: one thread notes when they come, and another one passes them on when they are
/// due. So the time between two reads does not matter.
fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration, turnstile: Option<Arc<Turnstile>>) {
    let (send, due) = mpsc::channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        let mut begun = Vec::new();
        while let Ok(read) = from.read(&mut buffer)
            && read > 0
        {
            let at = Instant::now() + delay;
            let is_sent = match &turnstile {
                None => send.send((at, buffer[..read].to_vec())).is_ok(),
                Some(turnstile) => {
                    begun.extend_from_slice(&buffer[..read]);
                    turnstile.take(&mut begun).into_iter().all(|part| send.send(part).is_ok())
                }
            };
            if !is_sent {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        let mut next = None;
        while let Some((at, mut bytes)) = next.take().or_else(|| due.recv().ok()) {
            if let Some(pause) = at.checked_duration_since(Instant::now()) {
                std::thread::sleep(pause);
            }
            // Bytes that are due as well go along.
            while let Ok((at, more)) = due.try_recv() {
                if at > Instant::now() {
                    next = Some((at, more));
                    break;
                }
                bytes.extend(more);
            }
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}

/// The one line before a slow server, or in a proxy that lets only some bytes a second pass.
struct Turnstile {
    unit: Unit,
    /// The time that a unit takes.
    each: Duration,
    free_at: Mutex<Instant>,
}

#[derive(Clone, Copy)]
enum Unit {
    Key,
    Byte,
}

/// The most bytes that pass together, if bytes are counted.
const PART: usize = 128;

impl Turnstile {
    fn new(unit: Unit, each: Duration) -> Self {
        Self { unit, each, free_at: Mutex::new(Instant::now()) }
    }

    /// Takes whole parts off the front, each with the instant at which it has passed.
    fn take(&self, bytes: &mut Vec<u8>) -> Vec<(Instant, Vec<u8>)> {
        let mut parts = Vec::new();
        while let Some((length, units)) = self.first_part(bytes) {
            let rest = bytes.split_off(length);
            let mut free_at = self.free_at.lock().expect("no thread panics");
            *free_at = (*free_at).max(Instant::now()) + self.each * units;
            parts.push((*free_at, std::mem::replace(bytes, rest)));
        }
        parts
    }

    /// Returns the length of the first part and its units, once it is whole.
    fn first_part(&self, bytes: &[u8]) -> Option<(usize, u32)> {
        match self.unit {
            Unit::Key => first_command(bytes),
            Unit::Byte => {
                let length = bytes.len().min(PART);
                (length > 0).then_some((length, length as u32))
            }
        }
    }
}

/// Returns the length of the first command, and the number of its keys if it is a script call, once it is whole.
fn first_command(bytes: &[u8]) -> Option<(usize, u32)> {
    let (mut at, words) = number_at(bytes, 0)?;
    let mut first: &[u8] = b"";
    let mut keys = 0;
    for word in 0..words {
        let (begin, length) = number_at(bytes, at)?;
        let text = bytes.get(begin..begin + length)?;
        match word {
            0 => first = text,
            2 if first.eq_ignore_ascii_case(b"EVALSHA") || first.eq_ignore_ascii_case(b"EVAL") => {
                keys = std::str::from_utf8(text).ok()?.parse().ok()?;
            }
            _ => {}
        }
        at = begin + length + 2;
    }
    (at <= bytes.len()).then_some((at, keys))
}

/// Reads `*3\r\n` or `$3\r\n`: returns where the next byte is, and the number.
fn number_at(bytes: &[u8], at: usize) -> Option<(usize, usize)> {
    let line = bytes.get(at + 1..)?;
    let end = line.windows(2).position(|pair| pair == b"\r\n")?;
    Some((at + 1 + end + 2, std::str::from_utf8(&line[..end]).ok()?.parse().ok()?))
}
