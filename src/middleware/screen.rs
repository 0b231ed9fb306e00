//! What is looked at before the rules of a layer are, where anything is.

use std::sync::atomic::Ordering;

use http::request::Parts;
use http::{Method, header};

use super::access::{self, Access};
use super::charging::Shared;
use super::decided::Asking;
use super::settings::Settings;

impl<L> Shared<L> {
    /// What becomes of a request whatever the rules say, if anything does.
    #[inline(never)]
    pub(super) fn screen(&self, parts: &Parts) -> Option<Asking> {
        let (looks, looks_for_keys) = (self.watch.looks(), self.watch.looks_for_keys());
        if looks {
            self.look_at_request(parts);
        } else if !looks_for_keys {
            self.screen_less();
        }
        let looked_up = |at, has_key| {
            if looks_for_keys {
                self.look_at_list(at, has_key);
            }
        };
        match access::ask(&self.settings.access, parts, looked_up) {
            Some((Access::Allow, list)) => {
                if looks {
                    self.look_for_allowed_proxy(list, parts);
                }
                return Some(Asking::Exempt);
            }
            Some((Access::Deny, _)) => return Some(Asking::Denied),
            Some((Access::Limit, _)) | None => {}
        }
        (self.settings.exempt_preflight && is_preflight(parts)).then_some(Asking::Exempt)
    }

    /// Nothing is looked at any more for misuse.
    #[cold]
    pub(super) fn screen_less(&self) {
        if !is_screened(&self.settings) {
            self.is_screened.store(false, Ordering::Relaxed);
        }
    }
}

/// Whether requests are looked at, as the settings want it.
pub(super) fn is_screened(settings: &Settings) -> bool {
    settings.exempt_preflight || !settings.access.is_empty()
}

/// A CORS preflight request, as the Fetch standard (section 3.2.2) has browsers send it.
fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS
        && parts.headers.contains_key(header::ORIGIN)
        && parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::key;
    use crate::limiter::memory::MemoryLimiter;
    use crate::middleware::bound::BoundRule;
    use crate::middleware::rule::Rule;
    use crate::quota::Quota;

    fn after_many_requests(change: impl FnOnce(&mut Settings)) -> [bool; 2] {
        let mut settings = Settings::new(BoundRule::new(Rule::new(Quota::per_second(1)), key::peer_ip()));
        change(&mut settings);
        let shared = Shared::new(MemoryLimiter::new(), settings);
        let (parts, ()) = http::Request::new(()).into_parts();
        let before = shared.is_screened.load(Ordering::Relaxed);
        for _ in 0..1_000 {
            let _ = shared.ask(&parts);
        }
        [before, shared.is_screened.load(Ordering::Relaxed)]
    }

    #[test]
    fn only_the_first_requests_are_screened_unless_the_settings_want_it() {
        assert_eq!(after_many_requests(|_| {}), [true, false]);
        assert_eq!(after_many_requests(|settings| settings.exempt_preflight = true), [true, true]);
    }
}
