//! The bytes of a log: a file or the standard input, gunzipped if need be.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

use super::super::report::Shown;

/// A log's bytes. Their errors do not name the log.
pub(crate) type Bytes = Box<dyn BufRead>;

const BUFFER: usize = 1 << 16;

/// The bytes that say what a file is.
const MAGIC: usize = 6;

/// EMFILE, whose [`ErrorKind`] has no name.
const TOO_MANY_OPEN_FILES: i32 = 24;

/// A log that can be read.
#[derive(Debug)]
pub(crate) struct Input {
    /// The file, or `None` for the standard input. It stays open, so that it is the same file if a rotation renames it.
    file: Option<File>,
    /// Whether it can be read again. A pipe cannot.
    pub(crate) is_repeatable: bool,
}

impl Input {
    /// Opens a log. `-` is the standard input.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        if path.as_os_str() == "-" {
            return Ok(Self { file: None, is_repeatable: false });
        }
        let file = File::open(path).map_err(|error| match error.raw_os_error() {
            Some(TOO_MANY_OPEN_FILES) => format!("{error}: raise the limit, such as by `ulimit -n 4096`"),
            _ => error.to_string(),
        })?;
        let data = file.metadata().map_err(|error| error.to_string())?;
        if data.is_dir() {
            return Err("it is a folder; name the log files in it".to_owned());
        }
        Ok(Self { file: Some(file), is_repeatable: data.is_file() })
    }

    /// Returns how many of a file's bytes were read, and how many there are. Compressed ones count as they are.
    pub(crate) fn progress(&mut self) -> Option<(u64, u64)> {
        let file = self.file.as_mut().filter(|_| self.is_repeatable)?;
        let size = file.metadata().ok()?.len();
        Some((file.stream_position().ok()?.min(size), size))
    }

    /// Returns the log's bytes: a file's from its beginning, and those of a pipe that were not read yet.
    pub(crate) fn read(&mut self) -> io::Result<Bytes> {
        let Some(file) = &mut self.file else { return plain(io::stdin()) };
        if self.is_repeatable {
            file.seek(SeekFrom::Start(0))?;
        }
        plain(file.try_clone()?)
    }
}

/// Returns the name of a log for messages and reports.
pub(crate) fn name(path: &Path) -> Shown {
    if path.as_os_str() == "-" { Shown::whole("<stdin>") } else { Shown::whole(&path.to_string_lossy()) }
}

/// Returns the bytes of a log, whose content says whether it is compressed. Its name does not matter.
fn plain(from: impl Read + 'static) -> io::Result<Bytes> {
    let (magic, from) = begin(BufReader::with_capacity(BUFFER, from))?;
    if !is_gzip(&magic) {
        refuse(&magic)?;
        return Ok(Box::new(from));
    }
    let (magic, from) = begin(Gunzipped::new(from))?;
    if is_gzip(&magic) {
        return Err(io::Error::other("it was compressed by gzip twice: gunzip it once"));
    }
    refuse(&magic)?;
    Ok(Box::new(from))
}

/// Reads the first bytes, which stay part of the result. A pipe may have only one of them at first.
fn begin<R: BufRead>(mut from: R) -> io::Result<(Vec<u8>, impl BufRead + use<R>)> {
    let mut magic = Vec::with_capacity(MAGIC);
    from.by_ref().take(MAGIC as u64).read_to_end(&mut magic)?;
    Ok((magic.clone(), Cursor::new(magic).chain(from)))
}

fn is_gzip(magic: &[u8]) -> bool {
    magic.starts_with(b"\x1f\x8b")
}

fn refuse(magic: &[u8]) -> io::Result<()> {
    let (what, program) = match magic {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("compressed by zstd", "zstdcat"),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => ("compressed by xz", "xzcat"),
        [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', ..] => ("compressed by bzip2", "bzcat"),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
        _ => return Ok(()),
    };
    Err(io::Error::other(format!("it is {what}: in its place write <({program} FILE), which bash replaces")))
}

/// The content of gzip data, which may have several members. Its errors name the place.
struct Gunzipped<R: BufRead> {
    from: BufReader<MultiGzDecoder<Counted<R>>>,
}

impl<R: BufRead> Gunzipped<R> {
    fn new(from: R) -> Self {
        let decoder = MultiGzDecoder::new(Counted { from, consumed: 0 });
        Self { from: BufReader::with_capacity(BUFFER, decoder) }
    }

    fn explained(&self, error: io::Error) -> io::Error {
        if error.kind() == ErrorKind::Interrupted || error.raw_os_error().is_some() {
            return error;
        }
        let at = self.from.get_ref().get_ref().consumed;
        let what = match error.kind() {
            ErrorKind::UnexpectedEof => "ends too early".to_owned(),
            _ => format!("is damaged ({error})"),
        };
        io::Error::new(
            error.kind(),
            format!("its gzip data {what}, at byte {at} of the file: copy it again, or leave it out"),
        )
    }
}

impl<R: BufRead> Read for Gunzipped<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.from.read(buffer).map_err(|error| self.explained(error))
    }
}

impl<R: BufRead> BufRead for Gunzipped<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match self.from.fill_buf().map(drop) {
            Ok(()) => Ok(self.from.buffer()),
            Err(error) => Err(self.explained(error)),
        }
    }

    fn consume(&mut self, length: usize) {
        self.from.consume(length);
    }
}

/// Counts the bytes that were read.
struct Counted<R> {
    from: R,
    consumed: u64,
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.from.read(buffer)?;
        self.consumed += length as u64;
        Ok(length)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.from.fill_buf()
    }

    fn consume(&mut self, length: usize) {
        self.consumed += length as u64;
        self.from.consume(length);
    }
}
