//! The text that all processes share in Redis, and the reports of processes. The text is stored as a
//! list of its version and the text itself.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;

use super::backend::RedisBackend;
use super::error::RedisError;
use super::script::{Call, Script};
use crate::error::BoxError;
use crate::event::StoreErrorKind;
use crate::limiter::remote::Checks;
use crate::limiter::{BoxFuture, REPORTS_MAX, SharedText, TextRead, VersionedText};

static TEXT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("shared_text.lua")));
static REPORTS: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("reports.lua")));

/// The time that a call may take. No request waits for such a call.
const CALL: Duration = Duration::from_secs(1);

/// The text that processes share in a limiter's Redis.
pub(super) struct RedisText {
    checks: Arc<Checks<RedisBackend>>,
    key: Bytes,
    /// The keys of the reports.
    places: Vec<Bytes>,
    slot: u16,
}

impl RedisText {
    pub(super) fn new(checks: Arc<Checks<RedisBackend>>) -> Self {
        let (key, slot) = checks.backend().space.shared_text_key();
        let places = (0..REPORTS_MAX).map(|place| format!("{key}:{place}").into()).collect();
        Self { checks, key: key.into(), places, slot }
    }

    /// Runs a script. Returns the first byte of the script's answer, and the other bytes.
    async fn run(&self, script: &'static Script, keys: &[Bytes], args: Vec<Bytes>) -> Result<(u8, Bytes), BoxError> {
        let call = Call { script, keys: keys.to_vec(), args };
        let store = &self.checks.backend().flights.store().store;
        let answer = store.run_within(&call, self.slot, CALL).await?;
        let Some(mut answer) = answer.filter(|answer| !answer.is_empty()) else {
            return Err(RedisError::new(StoreErrorKind::Unavailable, "the server has not run the script").into());
        };
        let rest = answer.split_off(1);
        Ok((answer.first().copied().unwrap_or_default(), rest))
    }
}

/// Returns a version in the form that the script compares. The empty version stands for no text.
fn version(version: Option<u128>) -> Bytes {
    version.map_or_else(Bytes::new, |version| Bytes::copy_from_slice(&version.to_be_bytes()))
}

impl SharedText for RedisText {
    fn load(&self, known: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
        Box::pin(async move {
            match self.run(&TEXT, std::slice::from_ref(&self.key), vec![version(known)]).await? {
                (b'=', _) => Ok(TextRead::Unchanged),
                (_, stored) if stored.is_empty() => Ok(TextRead::Changed(None)),
                (_, stored) => Ok(TextRead::Changed(Some(VersionedText::from_stored(&stored)?))),
            }
        })
    }

    fn swap<'a>(&'a self, expect: Option<u128>, next: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(async move {
            let args = vec![version(expect), next.to_stored().into()];
            Ok(self.run(&TEXT, std::slice::from_ref(&self.key), args).await?.0 == b'=')
        })
    }

    fn put_report<'a>(
        &'a self,
        place: usize,
        report: &'a VersionedText,
        lasting: Duration,
    ) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(async move {
            let Some(key) = self.places.get(place) else { return Ok(false) };
            let args = vec![report.to_stored().into(), lasting.as_millis().to_string().into()];
            Ok(self.run(&REPORTS, std::slice::from_ref(key), args).await?.0 == b'=')
        })
    }

    fn reports(&self) -> BoxFuture<'_, Result<Vec<VersionedText>, BoxError>> {
        Box::pin(async move {
            let (_, mut rest) = self.run(&REPORTS, &self.places, Vec::new()).await?;
            let mut reports = Vec::new();
            while let Some(colon) = rest.iter().position(|byte| *byte == b':') {
                let length = std::str::from_utf8(&rest.split_to(colon)).ok().and_then(|length| length.parse().ok());
                let report = length.filter(|length: &usize| *length < rest.len());
                let Some(length) = report else { return Err("the server has cut the reports short".into()) };
                let report = rest.split_to(length + 1).slice(1..);
                reports.push(VersionedText::from_stored(&report).unwrap_or_default());
            }
            Ok(reports)
        })
    }
}
