//! A log of known structure, the same in every run.

use std::fmt::Write as _;

/// 2015-05-17 10:00:00 UTC.
const START: u64 = 1_431_856_800;

/// Numbers of lines of the log beside its 8,000 ordinary requests.
pub(crate) const LATE: u64 = 5;
pub(crate) const UNREADABLE: u64 = 3;
pub(crate) const LIMITED: u64 = 7;
pub(crate) const REQUESTS: u64 = 8_000 + 60 + 5_400;

struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

fn line(second: u64, client: &str, path: &str, status: u16) -> String {
    let (day, second) = ((10 + second / 3_600) / 24, second + 36_000);
    let (hour, minute, of_minute) = (second / 3_600 % 24, second / 60 % 60, second % 60);
    let (day, month) = if day < 15 { (17 + day, "May") } else { (day - 14, "Jun") };
    format!(
        "{client} - - [{day:02}/{month}/2015:{hour:02}:{minute:02}:{of_minute:02} +0000] \"GET {path} HTTP/1.1\" {status} 512 \"-\" \"agent {client}\""
    )
}

/// Three hours of a shop: 400 people, some behind one IPv6 network; a crawler that comes every two seconds; a client
/// that sends 60 requests within 3 seconds. Lines are up to 20 s out of order.
pub(crate) fn shop() -> String {
    let mut random = Random(7);
    let mut lines: Vec<(u64, String)> = Vec::new();
    for _ in 0..8_000 {
        // Few people come often.
        let person = random.below(20) * random.below(20);
        let client = match person % 10 {
            0 => format!("2001:db8:{:x}::{:x}", person / 40, 1 + random.below(3)),
            _ => format!("192.0.{}.{}", 2 + person / 250, person % 250),
        };
        let status = if random.below(20) == 0 { 404 } else { 200 };
        let second = random.below(10_800);
        lines.push((second, line(second, &client, "/article", status)));
    }
    lines.extend(
        (0..5_400).map(|n| (n * 2, line(n * 2, "198.51.100.9", "/sitemap", if n < LIMITED { 429 } else { 200 }))),
    );
    lines.extend((0..60).map(|n| (5_000 + n / 20, line(5_000 + n / 20, "203.0.113.5", "/login", 401))));
    lines.sort_by_key(|(second, line)| (*second, line.len()));
    let mut order: Vec<(u64, String)> =
        lines.into_iter().map(|(second, line)| (second + random.below(20), line)).collect();
    order.sort_by_key(|(written, _)| *written);
    let mut log = String::new();
    for (at, (_, line)) in order.iter().enumerate() {
        let _ = writeln!(log, "{line}");
        if at == 4_000 {
            log.push_str("\n# a comment\nno line of a log\n\u{1b}[31m192.0.2.77 <b>\n\0\n");
        }
    }
    for second in 0..LATE {
        let _ = writeln!(log, "{}", line(second, "192.0.2.1", "/late", 200));
    }
    log
}

/// The days of [`rotated`], and its files.
pub(crate) const DAYS: u64 = 37;
pub(crate) const FILES: usize = 9;

/// The log of 37 days, with a busy client each week, as one text and as 9 files from the oldest to the newest. Lines
/// are up to 20 s out of order, also from file to file.
pub(crate) fn rotated() -> (String, Vec<String>) {
    let mut random = Random(9);
    let mut lines: Vec<(u64, String)> = Vec::new();
    for _ in 0..6_000 {
        let second = random.below(DAYS * 86_400);
        let client = format!("192.0.2.{}", random.below(20) * random.below(12));
        lines.push((second, line(second, &client, "/article", 200)));
    }
    for week in 0..5 {
        let from = week * 7 * 86_400 + 40_000;
        lines.extend((0..120).map(|n| (from + n / 2, line(from + n / 2, "203.0.113.5", "/login", 401))));
    }
    lines.sort_by_cached_key(|(second, _)| second + random.below(20));
    let lines: Vec<String> = lines.into_iter().map(|(_, line)| line + "\n").collect();
    let files = lines.chunks(lines.len().div_ceil(FILES)).map(<[String]>::concat).collect();
    (lines.concat(), files)
}

/// Returns the date of a line that is this many seconds after the log's start, as seconds since the epoch.
pub(crate) fn epoch(second: u64) -> u64 {
    START + second
}
