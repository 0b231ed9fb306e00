//! The shared text in a file, for a limiter in memory. The first line is the text's version.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::{fmt, fs};

use super::document::TEXT_MAX;
use super::error::{FleetError, FleetErrorKind};
use crate::base::sync::{Mutex, lock};
use crate::error::BoxError;
use crate::limiter::{BoxFuture, SharedText, TextRead, VersionedText};

/// The text of the operators' settings, in a file of one process.
#[derive(Clone)]
pub(super) struct FileText(Arc<Inner>);

struct Inner {
    path: PathBuf,
    /// The lock that is held while the file is read or replaced.
    file: Mutex<()>,
}

impl FileText {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(Arc::new(Inner { path, file: Mutex::default() }))
    }

    /// Runs a function under the lock, on one of the runtime's threads for blocking work.
    async fn run<T: Send + 'static>(
        &self,
        run: impl FnOnce(&Inner) -> Result<T, BoxError> + Send + 'static,
    ) -> Result<T, BoxError> {
        let shared = Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || {
            let _alone = lock(&shared.file);
            run(&shared)
        })
        .await?
    }
}

impl Inner {
    /// Adds the path to the text of an error.
    fn text_of(&self, error: impl fmt::Display) -> String {
        format!("{}: {error}", self.path.display())
    }

    /// Makes the error of a swap that failed before it replaced the file.
    fn unchanged(&self, error: impl fmt::Display) -> FleetError {
        FleetError::new(FleetErrorKind::Unavailable, self.text_of(error))
    }

    fn read(&self) -> Result<Option<VersionedText>, BoxError> {
        match fs::metadata(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
            Ok(about) if about.len() > 2 * TEXT_MAX as u64 => return Err("the file is too long".into()),
            Ok(_) => {}
        }
        let stored = fs::read_to_string(&self.path)?;
        let found = stored
            .split_once('\n')
            .and_then(|(version, text)| Some(VersionedText::new(u128::from_str_radix(version, 16).ok()?, text)));
        found.map(Some).ok_or_else(|| "this crate did not write the file".into())
    }

    /// Writes a text beside the file, and returns the path of the new file.
    fn prepare(&self, next: &VersionedText) -> io::Result<OsString> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let mut file = fs::File::create(&name)?;
        file.write_all(format!("{:032x}\n{}", next.version, next.text).as_bytes())?;
        file.sync_all()?;
        Ok(name)
    }

    /// Replaces the file in one step. If the process crashes before that step, the old file is still complete.
    fn write(&self, next: &VersionedText) -> Result<(), BoxError> {
        let name = self.prepare(next).map_err(|error| self.unchanged(error))?;
        fs::rename(&name, &self.path).map_err(|error| self.text_of(error).into())
    }
}

impl SharedText for FileText {
    fn load(&self, known: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
        let read = move |shared: &Inner| {
            let found = shared.read().map_err(|error| shared.text_of(error))?;
            let is_known = found.as_ref().map(|text| text.version) == known;
            Ok(if is_known { TextRead::Unchanged } else { TextRead::Changed(found) })
        };
        Box::pin(self.run(read))
    }

    fn swap<'a>(&'a self, expect: Option<u128>, next: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
        let next = next.clone();
        let swap = move |shared: &Inner| {
            let found = shared.read().map_err(|error| shared.unchanged(error))?;
            let is_expected = found.map(|text| text.version) == expect;
            if is_expected {
                shared.write(&next)?;
            }
            Ok(is_expected)
        };
        Box::pin(self.run(swap))
    }
}
