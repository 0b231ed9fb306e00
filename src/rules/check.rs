//! Checks a text without putting its rules in force.

use std::sync::Arc;

use super::bind::{RulesHistory, bind};
use super::error::{Problems, RulesError};
use super::names::Names;
use super::read::read_and_look;
use super::report::{NameKind, RulesReport};
use super::spec::FileSpec;
use super::warn::warnings;

/// Checks a text as a store would read it, except that unregistered names are not problems. Returns the unregistered
/// names, and warnings.
pub(super) fn check(names: &Names, content: &[u8]) -> Result<RulesReport, RulesError> {
    let (mut unregistered, mut warned) = (Vec::new(), Vec::new());
    let checked = names.known(false, |known| {
        let look = |file: &FileSpec, problems: &Problems<'_>| warned = problems.located(warnings(file));
        read_and_look(content, known, look, |file, problems| {
            unregistered = problems.take_names();
            let mut names = names.clone();
            for name in &unregistered {
                match name.kind() {
                    NameKind::Key => names.key(name.name().to_owned(), crate::key::global()),
                    NameKind::Action => names.action(name.name().to_owned(), |_| false),
                }
            }
            bind(&file, &Arc::new(names), RulesHistory::default(), problems);
        })
    });
    match checked {
        Ok(()) => Ok(RulesReport { unregistered: unregistered.into(), warnings: warned.into() }),
        Err(error) => Err(error.with_unregistered(unregistered).with_warnings(warned)),
    }
}
