//! A client of HTTP/1.1, and a plain application that answers it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: HashMap<String, String>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// A connection that stays open.
pub(crate) struct Connection(BufReader<TcpStream>);

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(30))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.set_nodelay(true)?;
        Ok(Self(BufReader::new(stream)))
    }

    pub(crate) fn send(
        &mut self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> std::io::Result<Answer> {
        let mut head = format!("{method} {target} HTTP/1.1\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.push_str("Host: 127.0.0.1\r\n");
        }
        for (name, value) in headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        let is_chunked = headers.iter().any(|(name, _)| *name == "Transfer-Encoding");
        let body = if is_chunked { "0\r\n\r\n" } else { body };
        if !body.is_empty() && !is_chunked {
            let _ = write!(head, "Content-Length: {}\r\n", body.len());
        }
        self.0.get_mut().write_all(format!("{head}\r\n{body}").as_bytes())?;
        self.read()
    }

    pub(crate) fn read(&mut self) -> std::io::Result<Answer> {
        let (line, headers) = head(&mut self.0)?;
        let wrong = || std::io::Error::new(ErrorKind::InvalidData, line.clone());
        let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(wrong)?;
        let mut body = Vec::new();
        if headers.get("transfer-encoding").is_some_and(|coding| coding == "chunked") {
            loop {
                let mut size = String::new();
                self.0.read_line(&mut size)?;
                let size = usize::from_str_radix(size.trim(), 16).map_err(|_| wrong())?;
                let mut chunk = vec![0; size + 2];
                self.0.read_exact(&mut chunk)?;
                body.extend_from_slice(&chunk[..size]);
                if size == 0 {
                    break;
                }
            }
        } else if let Some(length) = headers.get("content-length") {
            body.resize(length.parse().map_err(|_| wrong())?, 0);
            self.0.read_exact(&mut body)?;
        }
        Ok(Answer { status, headers, body: String::from_utf8_lossy(&body).into_owned() })
    }
}

/// Reads the head of a message: its first line, and its headers in lower case. ` and ` is between the values of lines
/// with one name.
fn head(reader: &mut impl BufRead) -> std::io::Result<(String, HashMap<String, String>)> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end() {
            "" if lines.is_empty() => {}
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let first = lines.remove(0);
    let mut headers = HashMap::<String, String>::new();
    for (name, value) in lines.iter().filter_map(|line| line.split_once(':')) {
        let (name, value) = (name.to_ascii_lowercase(), value.trim());
        headers.entry(name).and_modify(|all| *all += &format!(" and {value}")).or_insert_with(|| value.to_owned());
    }
    Ok((first, headers))
}

/// Sends one request.
pub(crate) fn send(address: SocketAddr, method: &str, target: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let sent = Connection::open(address).and_then(|mut connection| connection.send(method, target, headers, body));
    sent.unwrap_or_else(|error| panic!("{method} {target} at {address}: {error}"))
}

pub(crate) fn get(address: SocketAddr, target: &str, headers: &[(&str, &str)]) -> Answer {
    send(address, "GET", target, headers, "")
}

/// Sends an object of JSON.
pub(crate) fn post_json(address: SocketAddr, target: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    send(address, "POST", target, &[&[("Content-Type", "application/json")], headers].concat(), body)
}

/// An application that answers each request with its first line and its headers.
pub(crate) struct Application {
    pub(crate) address: SocketAddr,
    ended: Arc<AtomicBool>,
}

impl Application {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let is_ended = Arc::clone(&ended);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if is_ended.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::spawn(move || drop(Self::answer(stream)));
            }
        });
        Self { address, ended }
    }

    fn answer(stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        loop {
            let (line, headers) = head(&mut reader)?;
            if let Some(length) = headers.get("content-length") {
                let mut body = vec![0; length.parse().unwrap_or(0)];
                reader.read_exact(&mut body)?;
            }
            let key = headers.get("x-api-key").map_or_else(String::new, |key| format!("x-api-key: {key}\n"));
            let body = format!("{line}\n{key}");
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            reader.get_mut().write_all(answer.as_bytes())?;
        }
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address); // it accepts once more
    }
}
