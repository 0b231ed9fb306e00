//! A log: files or the standard input, read as requests.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;

use super::format::Format;
use super::lines::{Line, Lines};
use super::request::Request;

/// The number of lines that the detection reads.
const LOOKED_AT: usize = 100;

const SAMPLES: usize = 3;

/// The counts of lines that were read so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    /// All lines but empty ones and comments.
    pub(crate) lines: u64,
    pub(crate) unreadable: u64,
    /// The unreadable lines that are longer than [`LINE_MAX`](super::lines::LINE_MAX).
    pub(crate) too_long: u64,
    /// The first unreadable lines, cut.
    pub(crate) samples: Vec<Vec<u8>>,
}

pub(crate) struct Log {
    /// The files that are not read yet, with the first on top.
    rest: Vec<PathBuf>,
    open: Option<(PathBuf, Lines<Box<dyn BufRead>>)>,
    /// Lines that were looked at, and whether they are whole.
    ahead: VecDeque<(Vec<u8>, bool)>,
    pub(crate) format: Format,
    /// The time in the middle of the lines that were looked at.
    pub(crate) around_us: u64,
    pub(crate) reading: Reading,
}

impl Log {
    /// Opens a log, and detects its format unless one is given.
    pub(crate) fn open(files: &[PathBuf], format: Option<Format>) -> Result<Self, String> {
        for file in files.iter().filter(|file| file.as_os_str() != "-") {
            let data = file.metadata().map_err(|error| format!("{}: {error}", file.display()))?;
            if data.is_dir() {
                return Err(format!("{}: it is a folder; name the log files in it", file.display()));
            }
        }
        let mut log = Self {
            rest: files.iter().rev().cloned().collect(),
            open: None,
            ahead: VecDeque::new(),
            format: Format::nothing(),
            around_us: 0,
            reading: Reading::default(),
        };
        let mut ahead = VecDeque::new();
        while ahead.len() < LOOKED_AT {
            let Some((line, is_whole)) = log.line()? else { break };
            ahead.push_back((line.to_vec(), is_whole));
        }
        let whole = || ahead.iter().filter(|(_, is_whole)| *is_whole).map(|(line, _)| line.as_slice());
        if ahead.is_empty() {
            return Err("the log is empty".to_owned());
        }
        log.format = match format {
            Some(format) => format,
            None => Format::detect(&whole()).ok_or_else(|| {
                "no known format reads any of the first lines: name the format by --format, with nginx's log_format if it is \
                 your own"
                    .to_owned()
            })?,
        };
        let mut times: Vec<u64> =
            whole().filter_map(|line| log.format.read(line, false)).map(|request| request.stamp_us).collect();
        times.sort_unstable();
        log.around_us = times.get(times.len() / 2).copied().unwrap_or(0);
        log.ahead = ahead;
        Ok(log)
    }

    /// Returns the next request, or `None` at the end.
    pub(crate) fn next(&mut self, with_texts: bool) -> Result<Option<Request>, String> {
        loop {
            let kept;
            let (line, is_whole) = match self.ahead.pop_front() {
                Some((line, is_whole)) => {
                    kept = line;
                    (kept.as_slice(), is_whole)
                }
                None => match next_line(&mut self.rest, &mut self.open)? {
                    Some(line) => line,
                    None => return Ok(None),
                },
            };
            self.reading.lines += 1;
            if let Some(request) = self.format.read(line, with_texts).filter(|_| is_whole) {
                return Ok(Some(request));
            }
            self.reading.unreadable += 1;
            self.reading.too_long += u64::from(!is_whole);
            if self.reading.samples.len() < SAMPLES {
                self.reading.samples.push(line.get(..300).unwrap_or(line).to_vec());
            }
        }
    }

    fn line(&mut self) -> Result<Option<(&[u8], bool)>, String> {
        next_line(&mut self.rest, &mut self.open)
    }
}

type Open = Option<(PathBuf, Lines<Box<dyn BufRead>>)>;

/// Returns the next line that is neither empty nor a comment, and whether it is whole.
fn next_line<'o>(rest: &mut Vec<PathBuf>, open: &'o mut Open) -> Result<Option<(&'o [u8], bool)>, String> {
    loop {
        let (file, lines) = match open {
            Some(open) => open,
            None => {
                let Some(file) = rest.pop() else { return Ok(None) };
                let input = input(&file).map_err(|error| format!("{}: {error}", file.display()))?;
                open.insert((file, Lines::new(input)))
            }
        };
        if lines.advance().map_err(|error| format!("{}: {error}", file.display()))?.is_none() {
            *open = None;
            continue;
        }
        let is_wanted = match lines.line() {
            Line::Whole(line) => !line.is_empty() && !line.starts_with(b"#"),
            Line::TooLong(_) => true,
        };
        if is_wanted {
            break;
        }
    }
    Ok(open.as_ref().map(|(_, lines)| match lines.line() {
        Line::Whole(line) => (line, true),
        Line::TooLong(line) => (line, false),
    }))
}

fn input(file: &PathBuf) -> io::Result<Box<dyn BufRead>> {
    let mut input: Box<dyn BufRead> = if file.as_os_str() == "-" {
        Box::new(BufReader::with_capacity(1 << 16, io::stdin()))
    } else {
        Box::new(BufReader::with_capacity(1 << 16, File::open(file)?))
    };
    let (what, program) = match input.fill_buf()? {
        [0x1f, 0x8b, ..] => ("compressed", "zcat"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("compressed", "zstdcat"),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => ("compressed", "xzcat"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
        _ => return Ok(input),
    };
    Err(io::Error::other(format!("it is {what}: run {program} FILE | tower-ratelimit replay ... -")))
}
