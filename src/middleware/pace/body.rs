//! Bodies that are sent, or read, at a pace.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::account::Unpaced;
use super::accounts::BodyAccount;
use crate::base::sync::contained;
use crate::clock::Timer;
use crate::error::BoxError;
use crate::event::LayerEvent;
use crate::outcome::Observer;
use crate::policy::Policy;

/// The paces of one body. The slowest of them decides.
#[derive(Default)]
pub(crate) struct BodyPaces(Vec<BodyPace>);

/// One pace of a body.
struct BodyPace {
    account: BodyAccount,
    /// The bytes that the body may still send without waiting.
    free: u64,
    report: Option<PaceReport>,
}

/// Reports the beginning of a body's pace to the observer and, when this value is dropped, its end.
pub(crate) struct PaceReport {
    observer: Arc<dyn Observer>,
    timer: Arc<dyn Timer>,
    policy: Policy,
    began: Duration,
    bytes: u64,
}

impl PaceReport {
    pub(crate) fn begin(observer: &Arc<dyn Observer>, timer: &Arc<dyn Timer>, policy: &Policy) -> Self {
        observer.on_layer_event(&LayerEvent::pace_began(policy.clone()));
        let (observer, timer) = (Arc::clone(observer), Arc::clone(timer));
        Self { began: timer.now(), observer, timer, policy: policy.clone(), bytes: 0 }
    }
}

impl Drop for PaceReport {
    fn drop(&mut self) {
        // The timer and the observer are the application's code and may panic.
        contained(|| {
            let lasted = self.timer.now().saturating_sub(self.began);
            self.observer.on_layer_event(&LayerEvent::pace_ended(self.policy.clone(), self.bytes, lasted));
        });
    }
}

impl BodyPaces {
    /// Adds a pace. The first `free` bytes do not wait for this pace.
    pub(crate) fn add(&mut self, account: BodyAccount, free: u64, report: Option<PaceReport>) {
        self.0.push(BodyPace { account, free, report });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the units of at most `want` bytes, and of at least one byte. All accounts are asked
    /// before the body waits, so that it waits for all of them at the same time.
    fn poll(&mut self, want: u64, cx: &mut Context<'_>) -> Poll<Result<u64, Unpaced>> {
        let mut units = Some(want);
        for pace in &mut self.0 {
            if pace.free > 0 {
                units = units.map(|units| units.min(pace.free));
                continue;
            }
            match pace.account.turnstile.poll(want, cx) {
                Poll::Ready(Ok(may)) => units = units.map(|units| units.min(may)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => units = None,
            }
        }
        let Some(units) = units else { return Poll::Pending };
        for pace in &mut self.0 {
            match pace.free {
                0 => pace.account.turnstile.spend(units),
                free => pace.free = free.saturating_sub(units),
            }
            if let Some(report) = &mut pace.report {
                report.bytes = report.bytes.saturating_add(units);
            }
        }
        Poll::Ready(Ok(units))
    }
}

pin_project! {
    /// A body at a pace. The frames of the body are cut to the bytes that may pass.
    ///
    /// The body takes a frame first, and then waits for the frame's units. So a body that has
    /// nothing to send holds no units, and a body whose reader stops holds one frame.
    pub(crate) struct PacedBody<B> {
        #[pin]
        body: B,
        paces: BodyPaces,
        // The bytes that wait, if there are any.
        held: Bytes,
        has_failed: bool,
    }
}

impl<B> PacedBody<B> {
    pub(crate) fn new(body: B, paces: BodyPaces) -> Self {
        Self { body, paces, held: Bytes::new(), has_failed: false }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>>> Body for PacedBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        if *this.has_failed {
            return Poll::Ready(None);
        }
        if this.held.is_empty() {
            let frame = match ready!(this.body.poll_frame(cx)) {
                Some(Ok(frame)) => frame.into_data(),
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => return Poll::Ready(None),
            };
            match frame {
                Ok(data) if data.is_empty() => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Ok(data) => *this.held = data,
                Err(frame) => return Poll::Ready(Some(Ok(frame))), // trailers pass
            }
        }
        let want = this.held.len() as u64; // no wider than 64 bits
        match ready!(this.paces.poll(want, cx)) {
            Ok(units) => {
                let bytes = usize::try_from(units).unwrap_or(usize::MAX).min(this.held.len());
                Poll::Ready(Some(Ok(Frame::data(this.held.split_to(bytes)))))
            }
            Err(error) => {
                *this.has_failed = true;
                Poll::Ready(Some(Err(error.into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.has_failed || self.held.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, held) = (self.body.size_hint(), self.held.len() as u64); // no wider than 64 bits
        let upper = hint.upper().and_then(|upper| upper.checked_add(held));
        let lower = hint.lower().saturating_add(held);
        hint = SizeHint::new();
        hint.set_lower(lower);
        if let Some(upper) = upper {
            hint.set_upper(upper.max(lower));
        }
        hint
    }
}
