//! Text of the log, made harmless: it never becomes markup or a command to a terminal, and shows no whole address
//! unless the user wants that.

use std::fmt::{self, Write as _};
use std::net::{IpAddr, SocketAddr};

use super::super::tally::{Who, network};

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
    pub(crate) fn text(text: &str) -> Self {
        let mut shown = String::with_capacity(text.len());
        for (at, c) in text.chars().enumerate() {
            if at == LONGEST {
                shown.push('…');
                break;
            }
            if is_harmless(c) {
                shown.push(c);
            } else {
                let _ = write!(shown, "\\u{{{:x}}}", u32::from(c));
            }
        }
        Self(shown)
    }

    pub(crate) fn address(address: IpAddr, show_addresses: bool) -> Self {
        if show_addresses {
            return Self(address.to_string());
        }
        let (network, bits) = network(address);
        Self(format!("{network}/{bits}"))
    }

    pub(crate) fn who(who: &Who, show_addresses: bool) -> Self {
        match who {
            Who::Address(address) => Self::address(*address, show_addresses),
            Who::Text(text) => Self::text(text),
            Who::All => Self("all requests".to_owned()),
            Who::Other(_, text) if show_addresses => Self::text(text),
            Who::Other(hash, _) => Self(format!("key {hash:08x}")),
        }
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
                Ok(address) => masked.push_str(&Self::address(address, false).0),
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

#[cfg(test)]
mod tests {
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
