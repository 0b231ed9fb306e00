//! A log: one file or several, in the order of their times, read as requests.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};

use super::super::report::Shown;
use super::format::{Format, Read, Reader, directive};
use super::input::{self, Bytes, Input};
use super::json::names_in_json;
use super::lines::{Line, Lines};
use super::request::{Keep, Request, hash};

/// The number of lines of a file that are looked at before it is read.
const LOOKED_AT: usize = 100;

/// The number of lines that are looked at, and of their bytes, if none of the first is of a known format: a container
/// may say much before its first request.
const LOOKED_AT_MAX: usize = 2_000;

const LOOKED_AT_BYTES: usize = 4 << 20;

const SAMPLES: usize = 3;

/// The most lines that are kept until it is known whether their sources log requests.
const UNKNOWN_MAX: usize = 30;

/// A line that is this much later than all before it is believed if [`ROW`] such lines come in a row.
pub(crate) const JUMP_US: u64 = 8 * 86_400_000_000;

pub(crate) const ROW: usize = 10;

/// The counts of lines that were read so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    /// All lines but empty ones and comments.
    pub(crate) lines: u64,
    pub(crate) unreadable: u64,
    /// Lines of programs that log no requests, and requests that two programs logged.
    pub(crate) other: u64,
    /// The unreadable lines that are longer than [`LINE_MAX`](super::lines::LINE_MAX).
    pub(crate) too_long: u64,
    /// The first unreadable lines, cut.
    pub(crate) samples: Vec<Vec<u8>>,
}

pub(crate) struct Log {
    pub(crate) format: Format,
    /// The files in the order of their first times.
    pub(crate) files: Vec<LogFile>,
}

/// A file of a log, or the standard input.
pub(crate) struct LogFile {
    pub(crate) name: Shown,
    /// The earliest time of the first lines, without absurd ones. `None` if none of them can be read.
    pub(crate) first_us: Option<u64>,
    pub(crate) reading: Reading,
    reader: Reader,
    input: Input,
    lines: Option<Lines<Bytes>>,
    /// The first lines of which it is not known whether their source logs requests.
    unknown: Vec<(u64, Vec<u8>)>,
    /// Lines of a pipe that were looked at, and whether they are whole.
    ahead: VecDeque<(Vec<u8>, bool)>,
}

impl Log {
    /// Opens a log, and detects its format unless one is given.
    pub(crate) fn open(paths: &[PathBuf], format: Option<Format>) -> Result<Self, String> {
        let mut files = paths.iter().map(|path| LogFile::open(path)).collect::<Result<Vec<_>, _>>()?;
        let mut format = match format {
            Some(format) => format,
            None => detect(&mut files)?,
        };
        let mut heads: HashMap<u64, usize> = HashMap::new();
        for at in 0..files.len() {
            let Some(file) = files.get_mut(at) else { break };
            let head = file.head(LOOKED_AT)?;
            file.first_us = first_us(&head, &mut format);
            let lines = head.iter().map(|(line, _)| line.as_slice());
            let lines: Vec<&[u8]> = lines.filter(|line| directive(line).is_none()).collect();
            if lines.is_empty() {
                continue;
            }
            if let Some(other) = heads.insert(hash(&lines.join(&b'\n')), at).and_then(|other| files.get(other)) {
                let name = files.get(at).map(|file| &file.name.0);
                return Err(format!(
                    "{} and {} begin with the same lines: name each log only once",
                    other.name,
                    name.map_or("", |name| name)
                ));
            }
        }
        if heads.is_empty() {
            return Err(if files.len() == 1 { "the log is empty" } else { "all logs are empty" }.to_owned());
        }
        // The sort is stable: files without a time are read first, in their order.
        files.sort_by_key(|file| file.first_us);
        Ok(Self { format, files })
    }

    /// Returns when the log begins.
    pub(crate) fn first_us(&self) -> u64 {
        self.files.iter().find_map(|file| file.first_us).unwrap_or(0)
    }

    /// Returns the next request of a file, or `None` at its end.
    pub(crate) fn next(&mut self, file: usize, keep: Keep) -> Result<Option<Request>, String> {
        match self.files.get_mut(file) {
            Some(file) => file.next(&mut self.format, keep),
            None => Ok(None),
        }
    }

    /// Returns how many percent of the bytes of all files were read. `None` if the size of one is not known.
    pub(crate) fn part_read(&mut self) -> Option<u64> {
        let (mut read, mut size) = (0, 0);
        for file in &mut self.files {
            let (own, of) = file.input.progress()?;
            read += if file.lines.is_some() || file.reading.lines > 0 { own } else { 0 };
            size += of;
        }
        (read * 100).checked_div(size)
    }

    /// Returns the counts of all files.
    pub(crate) fn reading(&self) -> Reading {
        let mut all = Reading::default();
        for Reading { lines, unreadable, other, too_long, samples } in self.files.iter().map(|file| &file.reading) {
            all.lines += lines;
            all.unreadable += unreadable;
            all.other += other;
            all.too_long += too_long;
            all.samples.extend(samples.iter().take(SAMPLES - all.samples.len()).cloned());
        }
        all
    }
}

/// Finds the format by the first lines of the first files that have any of a known format.
fn detect(files: &mut [LogFile]) -> Result<Format, String> {
    let (mut is_empty, mut first) = (true, None);
    for most in [LOOKED_AT, LOOKED_AT_MAX] {
        let mut looked_at = Vec::new();
        let last = files.len().saturating_sub(1);
        for (at, file) in files.iter_mut().enumerate() {
            looked_at.extend(file.head(most - looked_at.len())?);
            is_empty &= looked_at.iter().all(|(line, _)| directive(line).is_some());
            if looked_at.len() < most && at < last {
                continue;
            }
            let whole = looked_at.iter().filter(|(_, is_whole)| *is_whole).map(|(line, _)| line.as_slice());
            if let Some(format) = Format::detect(&whole) {
                return Ok(format);
            }
            first = first.or_else(|| looked_at.first().map(|(line, _)| line.clone()));
            looked_at.clear();
        }
    }
    if is_empty {
        return Ok(Format::nothing()); // there is nothing to read
    }
    Err(unknown(first.as_deref().unwrap_or_default()))
}

/// Says that no format reads a log that begins with this line, and what to do.
fn unknown(line: &[u8]) -> String {
    let none = "no known format reads any of the first lines";
    let names = names_in_json(line);
    match line.trim_ascii() {
        [b'{', ..] if !names.is_empty() => format!(
            "{none}. They are JSON with the fields {names}: name those of a request, as in --format JSON --field time=PATH \
             --field client=PATH --field status=PATH --field method=PATH --field path=PATH"
        ),
        [b'{', ..] | [b'['] | [b'[', b'{' | b'[' | b' ' | b'\t', ..] => format!(
            "{none}. If the file is one JSON document, write each request on its own line, such as by `jq -c '.[]' FILE`, and \
             name the fields by --format JSON --field"
        ),
        _ => format!("{none}: name the format by --format, with nginx's log_format if it is your own"),
    }
}

/// Returns when a file begins, by its first lines. A few dates that are long before the others are absurd.
fn first_us(head: &[(Vec<u8>, bool)], format: &mut Format) -> Option<u64> {
    let whole = head.iter().filter(|(_, is_whole)| *is_whole).map(|(line, _)| line);
    let mut reader = Reader::default();
    let requests = whole.filter_map(|line| reader.read(format, line, Keep::Nothing));
    let mut times: Vec<u64> = requests.map(|request| request.stamp_us).collect();
    times.sort_unstable();
    let (before, after) = times.split_at(times.len() / 2);
    let mut first = *after.first()?;
    for (earlier, time) in before.iter().enumerate().rev() {
        if first - time > JUMP_US && earlier + 1 < ROW {
            break;
        }
        first = *time;
    }
    Some(first)
}

impl LogFile {
    fn open(path: &Path) -> Result<Self, String> {
        let name = input::name(path);
        let input = Input::open(path).map_err(|error| format!("{name}: {error}"))?;
        let (reading, reader) = (Reading::default(), Reader::default());
        Ok(Self {
            name,
            first_us: None,
            reading,
            reader,
            input,
            lines: None,
            unknown: Vec::new(),
            ahead: VecDeque::new(),
        })
    }

    /// Returns the file's first lines, and whether they are whole. They are read again later.
    fn head(&mut self, most: usize) -> Result<Vec<(Vec<u8>, bool)>, String> {
        let mut bytes = 0;
        while self.ahead.len() < most && (self.ahead.len() < LOOKED_AT || bytes < LOOKED_AT_BYTES) {
            let Some((line, is_whole)) = self.line()? else { break };
            bytes += line.len();
            let line = (line.to_vec(), is_whole);
            self.ahead.push_back(line);
        }
        if !self.input.is_repeatable {
            return Ok(self.ahead.iter().take(most).cloned().collect());
        }
        // The buffers of a thousand files are not kept.
        self.lines = None;
        Ok(std::mem::take(&mut self.ahead).into())
    }

    fn next(&mut self, format: &mut Format, keep: Keep) -> Result<Option<Request>, String> {
        loop {
            let kept;
            let (line, is_whole) = match self.ahead.pop_front() {
                Some((line, is_whole)) => {
                    kept = line;
                    (kept.as_slice(), is_whole)
                }
                None => match next_line(&mut self.lines, &mut self.input, &self.name)? {
                    Some(line) => line,
                    None => {
                        self.lines = None;
                        self.end();
                        return Ok(None);
                    }
                },
            };
            let found = if is_whole { self.reader.look(format, line, keep) } else { Read::Unreadable };
            if directive(line).is_some() {
                continue;
            }
            self.reading.lines += 1;
            let sample = || line.get(..300).unwrap_or(line).to_vec();
            match found {
                Read::Request(request) => return Ok(Some(request)),
                Read::Other => self.reading.other += 1,
                Read::Unknown(source) => {
                    if self.unknown.iter().filter(|(of, _)| *of == source).count() < SAMPLES
                        && self.unknown.len() < UNKNOWN_MAX
                    {
                        self.unknown.push((source, sample()));
                    }
                }
                Read::Unreadable => {
                    self.reading.unreadable += 1;
                    self.reading.too_long += u64::from(!is_whole);
                    if self.reading.samples.len() < SAMPLES {
                        self.reading.samples.push(sample());
                    }
                }
            }
        }
    }

    /// Decides at the end of a file about the lines of sources that may log requests.
    fn end(&mut self) {
        let (other, unreadable) = self.reader.sources.others();
        self.reading.other += other;
        self.reading.unreadable += unreadable;
        let unknown = std::mem::take(&mut self.unknown);
        let samples = unknown.into_iter().filter(|(source, _)| !self.reader.sources.has_no_request(*source));
        self.reading.samples.extend(samples.map(|(_, line)| line));
        self.reading.samples.truncate(SAMPLES);
    }

    /// Returns how a source begins that logs the requests of another source again.
    pub(crate) fn logged_twice(&self) -> Option<&[u8]> {
        self.reader.sources.logged_twice()
    }

    fn line(&mut self) -> Result<Option<(&[u8], bool)>, String> {
        next_line(&mut self.lines, &mut self.input, &self.name)
    }
}

/// Returns the next line that is neither empty nor a comment, and whether it is whole. A directive is not a comment.
fn next_line<'l>(
    lines: &'l mut Option<Lines<Bytes>>,
    input: &mut Input,
    name: &Shown,
) -> Result<Option<(&'l [u8], bool)>, String> {
    let named = |error| format!("{name}: {error}");
    let lines = match lines {
        Some(lines) => lines,
        None => lines.insert(Lines::new(input.read().map_err(named)?)),
    };
    loop {
        if lines.advance().map_err(named)?.is_none() {
            return Ok(None);
        }
        let is_wanted = match lines.line() {
            Line::Whole(line) => !line.is_empty() && (!line.starts_with(b"#") || directive(line).is_some()),
            Line::TooLong(_) => true,
        };
        if is_wanted {
            break;
        }
    }
    Ok(Some(match lines.line() {
        Line::Whole(line) => (line, true),
        Line::TooLong(line) => (line, false),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absurd_dates_are_not_when_a_log_begins() {
        let mut format = Format::named("$msec $status", &[]).unwrap();
        let mut first = |days: &[u64]| {
            let line = |day: &u64| (format!("{} 200", day * 86_400).into_bytes(), true);
            Some(first_us(&days.iter().map(line).collect::<Vec<_>>(), &mut format)? / (86_400 * 1_000_000))
        };
        let usual: Vec<u64> = (100..150).collect();
        assert_eq!(first(&[&[0, 1, 60_000], &usual[..], &[3]].concat()), Some(100));
        // A log with few lines a month, and one with gaps between its years.
        assert_eq!(first(&(100..150).map(|n| n * 7).collect::<Vec<_>>()), Some(700));
        assert_eq!(first(&(0..60).map(|n| 1_000 + n / 20 * 365).collect::<Vec<_>>()), Some(1_000));
        assert_eq!((first(&[]), first(&[7])), (None, Some(7)));
    }
}
