//! The text that all processes share, in Redis: a string that begins with its version.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;

use super::backend::RedisBackend;
use super::error::RedisError;
use super::script::{Call, Script};
use crate::error::BoxError;
use crate::event::StoreErrorKind;
use crate::limiter::remote::Checks;
use crate::limiter::{BoxFuture, SharedText, TextRead, VersionedText};

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("shared_text.lua")));

/// The time that a call may take. No request waits for it.
const CALL: Duration = Duration::from_secs(1);

/// The text of a limiter's Redis.
pub(super) struct RedisText {
    checks: Arc<Checks<RedisBackend>>,
    /// The keys of the version and of the text.
    keys: [Bytes; 2],
    slot: u16,
}

impl RedisText {
    pub(super) fn new(checks: Arc<Checks<RedisBackend>>) -> Self {
        let (keys, slot) = checks.backend().space.shared_text_keys();
        Self { checks, keys: keys.map(Bytes::from), slot }
    }

    /// Runs the script. Returns the first byte of its answer, and the rest.
    async fn run(&self, args: Vec<Bytes>) -> Result<(u8, Bytes), BoxError> {
        let call = Call { script: &SCRIPT, keys: self.keys.to_vec(), args };
        let store = &self.checks.backend().flights.store().store;
        let answer = store.run_within(&call, self.slot, CALL).await?;
        let Some(mut answer) = answer.filter(|answer| !answer.is_empty()) else {
            return Err(RedisError::new(StoreErrorKind::Unavailable, "the server has not run the script").into());
        };
        let rest = answer.split_off(1);
        Ok((answer.first().copied().unwrap_or_default(), rest))
    }
}

/// Returns a version as the script compares it. The empty version stands for no text.
fn version(version: Option<u128>) -> Bytes {
    version.map_or_else(Bytes::new, |version| Bytes::copy_from_slice(&version.to_be_bytes()))
}

impl SharedText for RedisText {
    fn load(&self, known: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
        Box::pin(async move {
            match self.run(vec![version(known)]).await? {
                (b'=', _) => Ok(TextRead::Unchanged),
                (_, stored) if stored.is_empty() => Ok(TextRead::Changed(None)),
                (_, stored) => Ok(TextRead::Changed(Some(VersionedText::from_stored(&stored)?))),
            }
        })
    }

    fn swap<'a>(&'a self, expect: Option<u128>, next: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(async move {
            let stored = [&next.version.to_be_bytes(), next.text.as_bytes()].concat();
            Ok(self.run(vec![version(expect), stored.into()]).await?.0 == b'=')
        })
    }
}
