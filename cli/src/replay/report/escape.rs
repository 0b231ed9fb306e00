//! Text of the log, made harmless: it never becomes markup or a command to a terminal, and shows no whole address
//! unless the user wants that.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::net::{IpAddr, SocketAddr};

use super::super::read::request::{hash, is_of_host};
use super::super::tally::{Hosts, Who, network};

/// The longest text of a log in a report, in characters.
const LONGEST: usize = 160;

/// Text without characters that control a terminal or the direction of writing. In HTML it still has to be escaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown(pub(crate) String);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Shown {
    /// Returns a text, cut if it is long.
    pub(crate) fn text(text: &str) -> Self {
        let mut shown = Self::whole(text.char_indices().nth(LONGEST).map_or(text, |(end, _)| text.split_at(end).0));
        if text.chars().count() > LONGEST {
            shown.0.push('…');
        }
        shown
    }

    /// Returns a text that is not cut, such as a file's name.
    pub(crate) fn whole(text: &str) -> Self {
        let mut shown = String::with_capacity(text.len());
        for c in text.chars() {
            if is_harmless(c) {
                shown.push(c);
            } else {
                let _ = write!(shown, "\\u{{{:x}}}", u32::from(c));
            }
        }
        Self(shown)
    }

    /// Returns the network of an address.
    fn network(address: IpAddr) -> Self {
        let (network, bits) = network(address);
        Self(format!("{network}/{bits}"))
    }

    /// A line of the log, in which addresses are replaced by their networks.
    pub(crate) fn sample(line: &[u8], show_addresses: bool) -> Self {
        let line = String::from_utf8_lossy(line);
        if show_addresses {
            return Self::text(&line);
        }
        let is_digit = |c: char| c.is_ascii_hexdigit();
        let is_part = |c: char| c.is_ascii_hexdigit() || matches!(c, '.' | ':');
        let mut masked = String::with_capacity(line.len());
        let mut rest = &*line;
        while !rest.is_empty() {
            let (word, after) = rest.split_at(rest.find(|c| !is_part(c)).unwrap_or(rest.len()));
            let socket = word.parse::<SocketAddr>().map(|address| address.ip());
            match word.parse::<IpAddr>().or(socket) {
                // A network's own address names no client. The version of a browser looks like one: `Chrome/130.0.0.0`.
                Ok(address) if network(address).0 == address => masked.push_str(word),
                Ok(address) => masked.push_str(&Self::network(address).0),
                // An address may stand in it, beside other letters.
                Err(_) if may_have_address(word) => masked.push_str(&word.replace(is_digit, "x")),
                Err(_) => masked.push_str(word),
            }
            let between = after.find(is_part).unwrap_or(after.len());
            let (between, after) = after.split_at(between);
            masked.push_str(between);
            rest = after;
        }
        Self::text(&masked)
    }

    /// Returns the text for HTML, also within quotes.
    pub(crate) fn html(&self) -> String {
        html(&self.0)
    }
}

/// How clients are shown: whole, or masked.
pub(crate) struct Names<'c> {
    hosts: &'c Hosts,
    show_addresses: bool,
    /// For each masked text the clients that it stands for, in the order in which the report has them.
    masked: HashMap<String, Vec<&'c Who>>,
}

impl<'c> Names<'c> {
    /// `shown` are the clients of the report. Those with the same masked text get numbers, the same in each policy.
    pub(crate) fn new(hosts: &'c Hosts, show_addresses: bool, shown: impl Iterator<Item = &'c Who>) -> Self {
        let mut names = Self { hosts, show_addresses, masked: HashMap::new() };
        for who in shown.filter(|_| !show_addresses) {
            let text = names.plain(who).0;
            let same = names.masked.entry(text).or_default();
            if !same.contains(&who) {
                same.push(who);
            }
        }
        names
    }

    pub(crate) fn who(&self, who: &Who) -> Shown {
        let Shown(text) = self.plain(who);
        let same = self.masked.get(&text).filter(|same| same.len() > 1);
        match same.and_then(|same| same.iter().position(|one| *one == who)) {
            Some(at) => Shown(format!("{text} #{}", at + 1)),
            None => Shown(text),
        }
    }

    /// Returns a text of the log, in which addresses are masked.
    pub(crate) fn sample(&self, text: &str) -> Shown {
        Shown::sample(text.as_bytes(), self.show_addresses)
    }

    /// Returns a path of the log, in which segments that may be secrets or name a person are `*`.
    pub(crate) fn path(&self, path: &str) -> Shown {
        if self.show_addresses {
            return Shown::text(path);
        }
        let segments: Vec<&str> =
            path.split('/').map(|segment| if may_be_secret(segment) { "*" } else { segment }).collect();
        self.sample(&segments.join("/"))
    }

    pub(crate) fn address(&self, address: IpAddr) -> Shown {
        self.who(&Who::Address(address))
    }

    fn plain(&self, who: &Who) -> Shown {
        match who {
            Who::Address(address) if is_of_host(*address) => self.host(*address),
            Who::Address(address) if self.show_addresses => Shown(address.to_string()),
            Who::Address(address) => Shown::network(*address),
            Who::Text(text) if text.starts_with('/') => self.path(text),
            Who::Text(text) => Shown::text(text),
            Who::All => Shown("all requests".to_owned()),
            Who::Other(_, text) if self.show_addresses => Shown::text(text),
            Who::Other(hash, _) => Shown(format!("key {hash:08x}")),
        }
    }

    /// Returns a host's name. Providers write addresses into names, so only the last two of more parts are shown.
    fn host(&self, address: IpAddr) -> Shown {
        let name = self.hosts.names.get(&address).map_or("a host", |name| name);
        if self.show_addresses {
            return Shown::text(name);
        }
        let mut parts = name.trim_end_matches('.').rsplitn(3, '.');
        match (parts.next(), parts.next(), parts.next()) {
            (Some(last), Some(domain), Some(_)) => Shown::text(&format!("*.{domain}.{last}")),
            _ => Shown(format!("host {:08x}", hash(name.as_bytes()) as u32)),
        }
    }
}

fn may_have_address(word: &str) -> bool {
    word.matches('.').count() >= 3 || word.matches(':').count() >= 5 || word.contains("::")
}

/// Returns a text for HTML, also within quotes.
pub(crate) fn html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Returns whether a character neither controls a terminal nor changes how other characters are shown.
fn is_harmless(c: char) -> bool {
    !c.is_control()
        && !matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Returns whether a segment of a path looks like a token, a number of a person or a name: it has a digit or an `@` and
/// more than three bytes, or more than 24 bytes. Versions such as `v12` are short.
fn may_be_secret(segment: &str) -> bool {
    segment.len() > 24 || segment.len() > 3 && segment.contains(|c: char| c.is_ascii_digit() || c == '@')
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    #[test]
    fn control_characters_are_written_out() {
        let shown = Shown::text("a\u{1b}[2J\u{7}\u{9b}\u{202e}b\nc\0{}%s");
        assert_eq!(shown.0, r"a\u{1b}[2J\u{7}\u{9b}\u{202e}b\u{a}c\u{0}{}%s");
        assert_eq!(Shown::text(&"a".repeat(1_000)).0.chars().count(), LONGEST + 1);
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(Shown::text("<b onclick='x'>\"&").html(), "&lt;b onclick=&#39;x&#39;&gt;&quot;&amp;");
    }

    #[test]
    fn clients_of_one_network_are_numbered() {
        let mut hosts = Hosts::default();
        let clients: Vec<Who> = (1..5_u128)
            .map(|n| {
                let address = Ipv6Addr::from_bits(1 << 120 | n << 64).into();
                hosts.count(
                    address,
                    ["a", "p-192-0-2-1.pool.isp.example", "b.isp.example", "x.e.org."][n as usize - 1],
                    9,
                );
                Who::Address(address)
            })
            .chain(["192.0.2.7", "192.0.2.8", "198.51.100.7"].map(|text| Who::Address(text.parse().unwrap())))
            .chain(["/a", "/b"].map(|path| Who::Text(path.into())))
            .collect();
        let shown = |show_addresses: bool| {
            let twice = clients.iter().chain(&clients);
            let names = Names::new(&hosts, show_addresses, twice);
            clients.iter().map(|who| names.who(who).0).collect::<Vec<_>>()
        };
        let masked = shown(false);
        assert!(masked[0].starts_with("host "), "{masked:?}");
        let expected = [
            "*.isp.example #1",
            "*.isp.example #2",
            "*.e.org",
            "192.0.2.0/24 #1",
            "192.0.2.0/24 #2",
            "198.51.100.0/24",
            "/a",
            "/b",
        ];
        assert_eq!(masked[1..], expected);
        let whole = ["a", "p-192-0-2-1.pool.isp.example", "b.isp.example", "x.e.org.", "192.0.2.7"];
        assert_eq!(shown(true)[..5], whole);
    }

    #[test]
    fn addresses_of_a_sample_are_masked() {
        let line =
            b"192.0.2.77 - [2001:db8:1:2::3]:80 2001:db8:1:2::3 192.0.2.77:80 m192.0.2.77 a192.0.2.77 <x> 2015:10:05:03 \xff";
        let shown = Shown::sample(line, false).0;
        assert_eq!(
            shown,
            "192.0.2.0/24 - [2001:db8:1::/48]:80 2001:db8:1::/48 192.0.2.0/24 m192.0.2.0/24 xxxx.x.x.xx <x> 2015:10:05:03 \u{fffd}"
        );
        assert!(Shown::sample(line, true).0.starts_with("192.0.2.77 "));
    }
}
