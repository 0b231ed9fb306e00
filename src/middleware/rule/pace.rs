//! Builders for the pace of bodies.

use super::definition::Rule;
use super::paced_bodies::PacedBodies;

impl Rule {
    /// Paces the bodies of responses: the quota counts bytes, and each byte waits for its unit. A
    /// download at `Quota::per_second(1_000_000)` takes a second for each megabyte.
    ///
    /// The rule charges no request, and refuses only requests without a [key](Self::missing_key).
    /// All downloads of a key share its pace, in all processes that share the limiter's store.
    ///
    /// * The pace is steady for every algorithm, because units are taken in batches. A batch lasts
    ///   for 50 milliseconds or, if it would then be smaller than 32 KiB, for up to 150
    ///   milliseconds. The burst matters only if processes share the quota: each process sends at
    ///   the pace until the burst is used up, and then the processes share the pace. A
    ///   [leaky queue](crate::Quota::leaky_queue) has no burst. If the quota that sets the pace is a
    ///   window, bytes that are late in one window have no room in the next, and downloads are
    ///   slower by a few percent. [`pace_after`](Self::pace_after) makes the beginning of a body
    ///   fast.
    /// * Over ten seconds a download gets its pace within one percent. At 100 kB/s over TCP, 1 and
    ///   100 downloads got 1.006 times their pace, and 1,000 downloads got 1.005 times. Each
    ///   gigabyte took one second of processor time, and 0.7 to 0.95 seconds without a pace. All
    ///   1,000 downloads took 26 MB of memory. (`cargo bench --bench pace` also measures nginx.)
    /// * If the rule has [several quotas](Self::all_of), the fastest quota is the pace. A body also
    ///   waits while another quota of the rule is used up.
    /// * Downloads of a key take turns, in the order in which they wait, with equal pieces of a batch.
    /// * A process takes the units of one batch in advance, with one call of the limiter, and
    ///   refunds the unused units when the last download of the key ends or is dropped. There are at
    ///   most 20 calls a second for each key. A batch that is late is larger, so the round trip to a
    ///   store does not slow the pace.
    /// * Processes that share a pace divide it as TCP connections do: a process whose batch is
    ///   denied asks for less, and then for a little more after each success.
    /// * A body holds one frame of its inner body, and takes units only for bytes that it has.
    /// * If the limiter fails, [`OnError`](crate::OnError) decides. Either each process keeps the pace
    ///   by itself, or the download waits for about three seconds and ends with an error, which clients
    ///   see as a broken transfer.
    /// * Without [`Mode::Enforce`](crate::mode::Mode) nothing is paced. A changed mode or quota also
    ///   applies to downloads under way, from the next batch on. Downloads under way and new
    ///   downloads share one pace. If a download waits because another quota or process has used up
    ///   the units, it goes on when a quota is raised, or the layer
    ///   [resets](crate::RateLimitLayer::reset) the key. In any case, the download asks again after
    ///   ten seconds at the latest. If requests [bring their quotas](Self::quota_from), downloads
    ///   under way keep their quotas.
    /// * A quota of 0 admits no byte: bodies end with an error.
    ///   [`Quota::unlimited`](crate::Quota::unlimited) paces nothing.
    /// * A pace needs a timer: the feature `tokio`, or a call of
    ///   [`timer`](crate::RateLimitLayer::timer).
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let export = Rule::new("export", Quota::per_second(1_000_000))?
    ///     .when(|request| request.uri.path().starts_with("/export"))
    ///     .pace_responses();
    /// let requests = Quota::per_minute(60);
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), requests, key::peer_ip())
    ///     .and(export, key::header("x-user"));
    /// # Ok(()) }
    /// ```
    pub fn pace_responses(self) -> Self {
        self.pacing(PacedBodies::Responses)
    }

    /// Paces the bodies of requests, as [`pace_responses`](Self::pace_responses) paces the bodies
    /// of responses: the bodies are read no faster than the pace. With both methods, a key's
    /// uploads and downloads share one pace.
    ///
    /// The client notices the pace through the flow control of TCP or HTTP/2. The request's body
    /// has to be the body of axum or tonic (with these features), or an
    /// [`UnsyncBoxBody`](http_body_util::combinators::UnsyncBoxBody) whose error is a
    /// `Box<dyn Error + Send + Sync>`. Other bodies are not paced, and the layer
    /// [warns](crate::observe::SetupWarningKind::NoEffect).
    pub fn pace_requests(self) -> Self {
        self.pacing(PacedBodies::Requests)
    }

    /// Sets how many bytes of each body pass before its pace begins. By default none.
    ///
    /// A client that asks for many small ranges of a file, or for many small files, gets this many
    /// bytes of each range or file at once, and no unit is taken for these bytes.
    pub fn pace_after(mut self, bytes: u64) -> Self {
        self.pace_after = bytes;
        self
    }

    /// Adds bodies to those that the rule paces.
    pub(crate) fn pacing(mut self, bodies: PacedBodies) -> Self {
        self.pace = Some(self.pace.map_or(bodies, |own| own.and(bodies)));
        self.in_content_bytes()
    }
}
