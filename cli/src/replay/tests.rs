//! No line makes the program panic, whatever was done to it.

use std::net::IpAddr;

use super::limits::Head;
use super::order::Order;
use super::read::format::{FACTS, Format, Reader, passed_on};
use super::read::request::Keep;
use super::report::Shown;

struct Random(u64);

impl Random {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below.max(1)
    }
}

/// Changes a line in a few places: bytes that mean something to a reader, other bytes, parts of other lines.
fn mutated(line: &[u8], random: &mut Random) -> Vec<u8> {
    const ODD: &[&[u8]] = &[
        b"\"",
        b"\\",
        b"\\x",
        b"\\u00",
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b" ",
        b"-",
        b"\0",
        b"\xff",
        b"\xe2\x80",
        b"\x1b[",
        b"$",
        b"99999999999999999999",
        b"-1",
        b"1e308",
        b"0x7f",
        b"T",
        b"Z",
        b"+0000",
        b"%",
        b"..",
        b"::",
        b"#",
        b"HTTP/",
        b"null",
    ];
    let mut line = line.to_vec();
    for _ in 0..1 + random.below(4) {
        let (at, to) = (random.below(line.len() + 1), random.below(line.len() + 1));
        let (at, to) = (at.min(to), at.max(to));
        match random.below(5) {
            0 => drop(line.splice(at..at, ODD[random.below(ODD.len())].iter().copied())),
            1 => drop(line.drain(at..to.min(at + 8))),
            2 => line.truncate(at),
            3 => {
                let part = line[at..to].to_vec();
                drop(line.splice(at..at, part));
            }
            _ => {
                if let Some(byte) = line.get_mut(at) {
                    *byte = random.below(256) as u8;
                }
            }
        }
    }
    line
}

/// Names of columns, as a directive has them.
const NAMES: &str = " date time c-ip cs(User-Agent) cs-uri-stem cs-uri-query sc-status time-taken x-edge-location";

#[test]
fn mutated_lines_are_read_or_refused() {
    let mut formats: Vec<Format> = FACTS.iter().map(|facts| Format::named(facts.format, &[]).unwrap()).collect();
    let mut random = Random(42);
    let (mut read, mut refused) = (0, 0);
    for facts in FACTS {
        let mut own = Format::named(facts.format, &[]).unwrap();
        let mut head = Head::new(Keep::All, None);
        head.note_headers(own.headers());
        let mut order = Order::new(60_000_000, [facts.at_us]);
        let passed_on = passed_on(facts.line);
        for n in 0..3_000 {
            // Every second line is one that another program passed on.
            let whole =
                passed_on.get(n / 2 % passed_on.len()).filter(|_| n % 2 == 1).map_or(facts.line, |(_, line)| line);
            let line = mutated(whole.as_bytes(), &mut random);
            let shown = Shown::sample(&line, false).0;
            assert!(!shown.chars().any(char::is_control), "{shown}");
            if n % 50 == 0 {
                let directive = [b"#Fields:", &*mutated(NAMES.as_bytes(), &mut random)].concat();
                for format in &mut formats {
                    let mut reader = Reader::default();
                    let _ = reader.read(format, &line, Keep::Samples);
                    let _ = reader.read(format, &directive, Keep::All);
                    let _ = reader.read(format, &line, Keep::All);
                }
            }
            let Some(request) = Reader::default().read(&mut own, &line, Keep::All) else {
                refused += 1;
                continue;
            };
            read += 1;
            assert!(request.at_us <= request.stamp_us);
            head.set(&request);
            assert_eq!(head.client(), request.client.map(|client: IpAddr| client.to_canonical()));
            order.take(0, request, &mut |timed| assert!(timed.burst_us <= timed.spread_us));
        }
        order.finish(&mut |timed| assert!(timed.burst_us <= timed.spread_us));
    }
    assert!(read > 5_000 && refused > 5_000, "{read} were read, and {refused} refused");
}
