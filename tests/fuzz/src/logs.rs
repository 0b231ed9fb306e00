//! Lines of access logs in each format, their dates, and formats that an operator writes: read or passed over, in any
//! order. The first line is the format, or its name.
#![no_main]

use libfuzzer_sys::fuzz_target;

use read::format::{Format, Reader};
use read::lines::{LINE_MAX, Line, Lines};
use read::request::{Keep, path};

/// The program's own reader. A program has no public items.
#[path = "../../../cli/src/replay/read"]
#[allow(dead_code, unreachable_pub, reason = "the program uses the rest")]
mod read {
    pub(crate) mod columns;
    pub(crate) mod date;
    pub(crate) mod envelope;
    pub(crate) mod field;
    pub(crate) mod format;
    pub(crate) mod json;
    pub(crate) mod lines;
    pub(crate) mod pairs;
    pub(crate) mod request;
    pub(crate) mod sources;
    pub(crate) mod text;
}

/// Microseconds of the year 2149, after which no date is read.
const LATEST_US: u64 = 5_700_000_000_000_000;

fuzz_target!(|bytes: &[u8]| {
    let (named, log) = match bytes.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (bytes, [].as_slice()),
    };
    let whole: Vec<&[u8]> = log.split(|byte| *byte == b'\n').collect();
    let detected = Format::detect(&whole.iter().copied());
    let named = std::str::from_utf8(named).ok().and_then(|text| Format::named(text, &[]).ok());
    for mut format in named.into_iter().chain(detected) {
        let (mut reader, mut lines) = (Reader::default(), Lines::new(log));
        while lines.advance().expect("bytes can be read").is_some() {
            let (Line::Whole(line) | Line::TooLong(line)) = lines.line();
            assert!(line.len() <= LINE_MAX);
            let Some(request) = reader.read(&mut format, line, Keep::All) else { continue };
            assert!(request.at_us <= request.stamp_us && request.stamp_us <= LATEST_US, "{request:?}");
            let texts = request.texts.expect("all texts are kept");
            let headers = (0..format.headers().len()).map(|at| texts.header(at));
            let each = [texts.method(), texts.target(), texts.host(), texts.user()];
            // Escapes only become shorter, and a variable may stand in several places.
            let length: usize = each.into_iter().chain(headers).map(<[u8]>::len).sum();
            assert!(length <= 4 * line.len() + 4, "{length} bytes of {}", line.len());
            assert!(path(texts.target()).len() <= texts.target().len().max(1));
        }
    }
});
