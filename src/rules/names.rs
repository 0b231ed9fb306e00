//! The names that a program registers for its files of rules, in addition to the built-in names.

use std::collections::HashMap;
use std::sync::Arc;

use super::read;
use super::tree::Describe;
use crate::base::head::Head;
use crate::clock::{CalendarClock, Clock};
use crate::key::{IntoKey, Key, TrustedProxies};
use crate::middleware::rule::Read;

/// The extractors and classifiers that a program registered.
#[derive(Clone, Default)]
pub(super) struct Names {
    pub(super) keys: HashMap<String, Read<Option<Key>>>,
    pub(super) actions: HashMap<String, Read<bool>>,
    /// The descriptors of a request.
    pub(super) describe: Option<Describe>,
    /// The clock of `time`. `None` means the operating system's calendar.
    pub(super) clock: Option<Arc<dyn Clock>>,
    /// The trusted proxies, whose reports of the client's address are used.
    pub(super) proxies: Option<TrustedProxies>,
    /// True if the program sees only the heads of requests and no bodies.
    pub(super) heads_only: bool,
    /// True if the program folds the paths of requests before the rules see them.
    pub(super) folded_paths: bool,
}

impl Names {
    /// Returns the clock of `time`.
    pub(super) fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone().unwrap_or_else(|| Arc::new(CalendarClock))
    }

    pub(super) fn key<E, K>(&mut self, name: String, extract: E)
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        self.keys.insert(name, Arc::new(move |head| extract(head).into_key()));
    }

    /// Calls `read` with the registered names. `are_all` is true if the program registers no other
    /// names.
    pub(super) fn known<T>(&self, are_all: bool, read: impl FnOnce(read::KnownNames<'_>) -> T) -> T {
        let keys: Vec<&str> = self.keys.keys().map(String::as_str).collect();
        let actions: Vec<&str> = self.actions.keys().map(String::as_str).collect();
        read(read::KnownNames { keys: &keys, actions: &actions, are_all })
    }

    pub(super) fn action(&mut self, name: String, is_it: impl Fn(&Head<'_>) -> bool + Send + Sync + 'static) {
        self.actions.insert(name, Arc::new(is_it));
    }
}
