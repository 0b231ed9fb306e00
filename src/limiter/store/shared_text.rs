//! The text that all processes share, in a store that compares and swaps.
//!
//! The value of the key `prefix:1:fleet` begins with the format's number and the number of parts. A text of at most 15
//! kB follows directly. A longer text is in parts of that size, under the keys `prefix:1:fleet:0` and so on.
//! One swap replaces that value and all parts together. All values of a text have the text's version, so a
//! reader notices if the text is replaced during the reading.
//!
//! If a part of a text is gone, the text counts as missing, so that a process that knows the text writes it again.
//! Processes that know the text usually read only the value of `prefix:1:fleet`. To notice that a part is gone,
//! they look at all parts from time to time.
//!
//! The reports of processes are under the keys `prefix:1:fleet:process:0` and so on. The version of a report names
//! its process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::backend::Swaps;
use super::{Change, Store, Then, Value, Version};
use crate::error::BoxError;
use crate::limiter::remote::Checks;
use crate::limiter::{BoxFuture, REPORTS_MAX, SharedText, TextRead, VersionedText};

/// The largest part in bytes. A value may have 17 kB.
const PART: usize = 15 << 10;

/// The largest number of parts: a swap has at most 64 changes.
const PARTS_MAX: usize = 63;

/// The number of the format.
const FORMAT: u8 = 1;

/// The time to live of a text. Each change of the text begins this time anew.
const LIVES: Duration = Duration::from_secs(10 * 366 * 86_400);

/// The maximum number of times that the text is read if it is replaced during each reading.
const READS: usize = 5;

/// One in this number of loads of a known text checks that all parts exist, which is one load a minute.
const WHOLE_EVERY: u32 = 60;

/// The text of a limiter's store.
pub(super) struct StoreText<S: Store> {
    checks: Arc<Checks<Swaps<S>>>,
    head: Arc<str>,
    /// The number of loads.
    loads: AtomicU32,
}

impl<S: Store> StoreText<S> {
    pub(super) fn new(checks: Arc<Checks<Swaps<S>>>) -> Self {
        let head = format!("{}fleet", checks.backend().before()).into();
        Self { checks, head, loads: AtomicU32::new(0) }
    }

    fn store(&self) -> &S {
        self.checks.backend().store()
    }

    /// Returns the key of the text and the keys of its parts.
    fn keys(&self, parts: usize) -> Vec<Arc<str>> {
        let parts = (0..parts).map(|part| format!("{}:{part}", self.head).into());
        std::iter::once(Arc::clone(&self.head)).chain(parts).collect()
    }

    fn place(&self, place: usize) -> Arc<str> {
        format!("{}:process:{place}", self.head).into()
    }

    /// Returns the value of the text's key, and the number of the text's parts.
    async fn head(&self) -> Result<Option<(Value, usize)>, BoxError> {
        let loaded = self.store().load(&[Arc::clone(&self.head)]).await?;
        let Some(value) = loaded.values().first().cloned().flatten() else { return Ok(None) };
        match value.bytes.split_first_chunk() {
            Some(([FORMAT, parts], _)) => Ok(Some((value.clone(), usize::from(*parts)))),
            _ => Err("the stored text has a form that this version does not read".into()),
        }
    }

    /// Reads the text with the version of `head`. Returns `None` if the text was replaced
    /// meanwhile, or a part is gone.
    async fn text(&self, head: &Value, parts: usize) -> Result<Option<VersionedText>, BoxError> {
        let mut stored = head.version.to_bytes().to_vec();
        if parts == 0 {
            stored.extend(head.bytes.iter().skip(2));
        } else {
            let loaded = self.store().load(&self.keys(parts)).await?;
            for (at, value) in loaded.values().iter().enumerate() {
                match value {
                    Some(value) if value.version == head.version && at == 0 => {}
                    Some(value) if value.version == head.version => stored.extend_from_slice(&value.bytes),
                    _ => return Ok(None),
                }
            }
        }
        VersionedText::from_stored(&stored).map(Some)
    }
}

impl<S: Store> SharedText for StoreText<S> {
    fn load(&self, known: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
        Box::pin(async move {
            let looks_at_parts = self.loads.fetch_add(1, Ordering::Relaxed) % WHOLE_EVERY == WHOLE_EVERY - 1;
            let (mut before, none) =
                (None, if known.is_none() { TextRead::Unchanged } else { TextRead::Changed(None) });
            for _ in 0..READS {
                let Some((head, parts)) = self.head().await? else { return Ok(none) };
                let is_known = Some(u128::from_be_bytes(head.version.to_bytes())) == known;
                if is_known && !(looks_at_parts && parts > 0) {
                    return Ok(TextRead::Unchanged);
                }
                match self.text(&head, parts).await? {
                    Some(_) if is_known => return Ok(TextRead::Unchanged),
                    Some(text) => return Ok(TextRead::Changed(Some(text))),
                    None if before == Some(head.version) => return Ok(none), // a part of it is gone
                    None => before = Some(head.version),
                }
            }
            Err("the text changed during each try to read it".into())
        })
    }

    fn swap<'a>(&'a self, expect: Option<u128>, next: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(async move {
            let expected = expect.map(|version| Version::from_bytes(version.to_be_bytes()));
            let parts_before = self.head().await?.map_or(0, |(_, parts)| parts);
            let bytes = next.text.as_bytes();
            let parts: Vec<&[u8]> = if bytes.len() <= PART { Vec::new() } else { bytes.chunks(PART).collect() };
            let Some(count) = u8::try_from(parts.len()).ok().filter(|count| usize::from(*count) <= PARTS_MAX) else {
                return Err("the text is longer than this store accepts".into());
            };
            let keys = self.keys(parts.len().max(parts_before));
            let loaded = self.store().load(&keys).await?;
            let there: Vec<_> = loaded.values().iter().map(|value| value.as_ref().map(|value| value.version)).collect();
            let found = there.first().copied().flatten();
            let is_whole = there.iter().take(parts_before + 1).all(|version| *version == found);
            if found != expected && (expected.is_some() || is_whole) {
                return Ok(false);
            }
            let mut head = vec![FORMAT, count];
            if parts.is_empty() {
                head.extend_from_slice(bytes);
            }
            let version = Version::from_bytes(next.version.to_be_bytes());
            let put = |bytes: &[u8]| Then::Put(Value::new(version, bytes), LIVES);
            let changes = keys.into_iter().zip(there).enumerate().map(|(at, (key, expect))| match at.checked_sub(1) {
                None => Change::new(key, expect, put(&head)),
                Some(part) => Change::new(key, expect, parts.get(part).map_or(Then::Delete, |part| put(part))),
            });
            Ok(self.store().swap(&changes.collect::<Vec<_>>()).await?.is_done())
        })
    }

    fn put_report<'a>(
        &'a self,
        place: usize,
        report: &'a VersionedText,
        lasting: Duration,
    ) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(async move {
            let process = Version::from_bytes(report.version.to_be_bytes());
            for expect in [Some(process), None] {
                let value = Value::new(process, report.text.as_bytes());
                let change = Change::new(self.place(place), expect, Then::Put(value, lasting));
                if self.store().swap(&[change]).await?.is_done() {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    fn reports(&self) -> BoxFuture<'_, Result<Vec<VersionedText>, BoxError>> {
        Box::pin(async move {
            let places: Vec<Arc<str>> = (0..REPORTS_MAX).map(|place| self.place(place)).collect();
            let loaded = self.store().load(&places).await?;
            let report =
                |value: &Value| VersionedText::from_stored(&[&value.version.to_bytes(), &*value.bytes].concat());
            Ok(loaded.values().iter().flatten().map(|value| report(value).unwrap_or_default()).collect())
        })
    }
}
