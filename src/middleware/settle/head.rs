//! Settles charges according to a response's head. Charges are opened before the service is called, and the head
//! closes the charges that it decides.

use std::sync::Arc;

use http::response::Parts;
use http::{Extensions, Method, StatusCode, header};
use smallvec::SmallVec;

use super::pending::{Open, OpenTicket};
use super::usage::Usage;
use crate::limiter::Limiter;
use crate::middleware::compiled::Compiled;
use crate::middleware::plan::Needs;
use crate::middleware::rule::Settlement;

/// The effect of a response's head on the open charges of a rule.
enum ByHead {
    /// The charges stay open until the body has ended.
    StayOpen,
    /// The charges cost this many units. Without a number, the charges cost the stated units or, if no cost was
    /// stated, the reserved units.
    Settle(Option<u64>),
}

impl<L: Limiter> OpenTicket<L> {
    /// Opens the charges that are settled after the response. This method is called before the service, with the
    /// request's method and extensions.
    ///
    /// If the layer has a rule that is settled by usage, the request gets a [`Usage`] even if nothing was charged, so
    /// that handlers can rely on the `Usage`.
    pub(crate) fn open(&mut self, method: Method, extensions: &mut Extensions) {
        let layer = &*self.layer;
        self.response.method = method;
        if layer.needs < Needs::Settlement {
            return;
        }
        let mut open: SmallVec<[Open; 1]> = SmallVec::new();
        let mut last = None;
        // Settles only charges that were answered, because a request that passes although the limiter failed has
        // taken nothing.
        for (at, charged) in self.ticket.answered().iter().enumerate() {
            let Some(policy) = layer.policy(charged.policy) else { continue };
            if layer.settlement(charged.policy).is_none_or(Settlement::is_none) {
                continue;
            }
            let rule = layer.rule_of(charged.policy);
            // The charges of a rule are adjacent, and the charge of its meter is the last of them.
            match open.last_mut().filter(|_| last == Some(rule)) {
                Some(same) => {
                    same.charges.end = at + 1;
                    same.usage.charge(policy);
                }
                None => {
                    last = Some(rule);
                    let usage = Usage::new(policy, charged.cost);
                    open.push(Open { charges: at..at + 1, policy: charged.policy, usage });
                }
            }
        }
        let mut usage = Usage::none();
        for open in open.iter().filter(|open| layer.settlement(open.policy).is_some_and(|found| found.by_usage)) {
            usage.append(&open.usage);
        }
        if !usage.is_empty() || (layer.needs == Needs::Usage && extensions.get::<Usage>().is_none()) {
            // The handler has only one handle, which also states the cost for the outer layers.
            if let Some(outer) = extensions.get() {
                usage.append(outer);
            }
            extensions.insert(usage);
        }
        if let Some(unsettled) = &layer.unsettled {
            let strikes = self.ticket.answered().iter().filter(|charged| charged.decision.is_allowed());
            self.strikes = strikes.filter_map(|own| layer.strikes_to_settle(own.policy, &own.key)).collect();
            self.strikes.iter().for_each(|strikes| unsettled.add(strikes.clone()));
        }
        self.open = open;
    }

    /// Settles the charges that the response's head decides. Afterwards only the charges that depend on the end of
    /// the body are open.
    ///
    /// Open charges stay open while the application's closures run. If a closure panics, the drop
    /// of the ticket settles them.
    pub(crate) fn see_head(&mut self, response: &Parts) {
        if self.copies.take().is_some_and(|copies| copies.are_refused()) {
            self.refund_and_report();
            return;
        }
        let length = response.headers.get(header::CONTENT_LENGTH);
        self.response.length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let mut at = 0;
        while let Some(open) = self.open.get(at) {
            match read_head(&self.layer, open, &self.response.method, response) {
                ByHead::StayOpen => at += 1,
                ByHead::Settle(units) => {
                    let open = self.open.remove(at);
                    let stated = open.usage.close();
                    self.owe(open.charges, units.or(stated));
                    self.settle(true);
                }
            }
        }
        if self.open.is_empty() {
            self.end_strikes();
        }
        self.release_by_head(response.status);
        self.response.is_bodiless = is_bodiless(&self.response.method, response.status);
        self.response.is_whole = self.response.is_bodiless;
    }

    /// Refunds the units of concurrency limits that are held no longer than until the response's head.
    fn release_by_head(&mut self, status: StatusCode) {
        let Some(places) = &self.ticket.places else { return };
        // The request itself is one holder of `places`. Any other holder is a handler's.
        let is_shared = || Arc::strong_count(places) > 1;
        let until_head = |at: usize| {
            let policy = self.ticket.charges.get(at).map(|charged| charged.policy);
            policy.is_some_and(|policy| self.layer.is_held_until_head(policy))
        };
        let ends = switches_protocols(&self.response.method, status);
        if !ends && !(0..self.ticket.charges.len()).any(until_head) {
            return; // before the places are asked, which are shared with handlers and locked
        }
        let all = (0..self.ticket.charges.len()).filter(|at| places.units(*at) > 0).all(until_head);
        if ends && !all && !is_shared() {
            self.layer.diagnostics.look_for_released_upgrade();
        }
        if all || ends || !places.release(&until_head, &is_shared) {
            self.ticket.places = None;
        }
    }
}

fn read_head<L>(layer: &Compiled<L>, open: &Open, method: &Method, response: &Parts) -> ByHead {
    let Some(settlement) = layer.settlement(open.policy) else { return ByHead::Settle(None) };
    if settlement.keeps.as_ref().is_some_and(|keeps| !keeps(response)) {
        return ByHead::Settle(Some(0));
    }
    let units = settlement.by_response.as_ref().and_then(|actual| actual(response));
    if !settlement.waits_for_body() {
        return ByHead::Settle(units);
    }
    if let Some(units) = units {
        open.usage.set(units);
    }
    if settlement.by_body && !switches_protocols(method, response.status) {
        open.usage.add(0); // the bytes count from here on
    }
    ByHead::StayOpen
}

/// Returns whether the connection switches to another protocol after this response (RFC 9110, sections 9.3.6 and
/// 15.2.2).
fn switches_protocols(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && status.is_success())
}

/// Returns whether a server sends nothing after this response's head, whatever its body is (RFC 9110, section
/// 6.4.1).
fn is_bodiless(method: &Method, status: StatusCode) -> bool {
    method == Method::HEAD
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        || switches_protocols(method, status)
}
