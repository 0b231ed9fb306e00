//! Quotas, which say how much is allowed: a limit per period, an algorithm and its options.
//!
//! # Guarantees
//!
//! Each algorithm is a pure function of quota, state, instant and cost, in integers. Property tests
//! check the following laws against an oracle that recomputes each decision from the full history.
//! They hold on every backend. A concurrency limit has no clock: laws 4, 5 and 6 hold for it, and
//! its wait is [unknown](crate::Wait::Unknown).
//!
//! 1. **Safety.** In no interval are more units admitted than the bound in the
//!    [table](crate::guide::choosing_an_algorithm). Refunded units count as if they had never been
//!    taken.
//! 2. **Liveness.** After a pause exactly the capacity passes at once. In the long run, the rate is
//!    exactly the rate of the quota, without drift from rounding. There are two exceptions: sliding
//!    windows follow their [`Oldest`] setting, and a client of a bucket with burst 1 that waits for each
//!    reported wait loses the part of a microsecond by which that wait is rounded up.
//! 3. **Honest waits.** If a request is refused with `Wait::After(d)`, the same cost is refused at
//!    every earlier instant and admitted at `now + d`, provided that nothing else was charged to
//!    the key and its quota did not change.
//! 4. **Refusals are free.** A refused request, a peek and a cost of 0 write nothing. There are two
//!    exceptions. Blocks, meters, and quotas that count denied requests write on a refusal. After
//!    the clock has stepped back, a state that lies further in the future than its quota allows is
//!    moved back.
//! 5. **Costs add up.** A cost of `n` is equal to `n` costs of 1 that are all taken at one instant,
//!    or not at all. A cost above the capacity is refused for good. Windows are half-open: a unit
//!    is free again exactly one period later.
//! 6. **All or nothing.** If a request makes several charges, all of them are taken, or none is.
//! 7. **Refunds are bounded.** A refund returns, at most once, what its receipt still holds.
//!    Afterwards the limit is never more permissive than if the charge had not been made, provided
//!    that the newest charges of a key are refunded first. In another order, a bucket can be more
//!    permissive, by fewer units than were refunded.
//!    * A refund to a leaky queue has no effect while a later request is in the queue, because the
//!      later request has already been promised its departure. The limiter keeps such a refund, and
//!      makes it when all later requests in the queue were refunded too, in any order.
//!    * A limiter keeps at most 4,096 such refunds to leaky queues. Neighbours in a queue count as
//!      one refund. Further refunds are lost. A refund is also lost if a request of another process
//!      is queued behind the refunded request.
//!    * A refund of strikes opens the key that the strikes closed, unless the remaining strikes are
//!      enough to close it.
//!    * A refund does not undo side effects of the request: a window that began with the request,
//!      entries that the request displaced in a log that counts denied requests, and debt that was
//!      forgotten because of the request.
//! 8. **Clocks may step back.** A step back causes no panic and no overflow, and admits no additional units. If the
//!    clock steps back while a request is decided, the time from before the step may still be used. After a step back a
//!    client may have to wait longer than needed, by at most the time in which its bucket refills, or by one window.
//!    Forgetting an expired state changes no decision.
//!
//! `remaining` is rounded down and every wait is rounded up.
//!
//! # When a quota changes
//!
//! A key keeps what it has used when its policy gets another quota, for example because the client
//! changed its plan. Until a request is admitted under the new quota, used units are freed as under
//! the old quota. The first admitted request, refund or forced charge under the new quota converts
//! the used units:
//!
//! | from | to | units in use, rounded up | when they are freed |
//! |---|---|---|---|
//! | any bucket | token bucket, GCRA, leaky bucket or queue | the same, to the fraction of a unit | at the new rate |
//! | any other | token bucket, GCRA, leaky bucket or queue | the same | at the new rate |
//! | step bucket | step bucket | the same | at ticks of the new length, counted from the old bucket's last tick |
//! | any other | step bucket | the same | at ticks of the epoch, or counted from the first request |
//! | window or meter | fixed window, meter or block | the same | at the later of the old expiry and one new period after counting began; windows of the epoch and of a calendar round up to an edge |
//! | any other | fixed window, meter or block | the same | at the later of the old expiry and one period after the change |
//! | log or sliding window | log or sliding window | each entry by its own instant | as if it had been taken under the new quota |
//! | bucket | log or sliding window | the same | as under the old quota, to a 32nd of the time until all are, but at most one period after the change |
//! | any other | log or sliding window | the same | as under the old quota, but at most one period after the change |
//! | block | block | the strikes | a closed key stays closed until then |
//! | concurrency limit | concurrency limit | the units that are held | when their requests end |
//! | concurrency limit | any other, and the reverse | none: the two count apart | - |
//!
//! * The used amount never shrinks while both quotas count it. A quota with
//!   [`Quota::in_proportion`](crate::Quota::in_proportion) keeps the used share instead of the
//!   amount, between any two algorithms. This is the share in use under the old quota, rounded up
//!   by less than a unit of the new quota.
//! * Until the state has been converted, a reported wait is computed at the new rate, but units are
//!   still freed as under the old quota. Therefore a reported wait can be too long or too short. A
//!   key that has used 900 of 1,000 per hour and gets a plan of 10 per hour reads a wait of 89
//!   hours, and its next request passes after 54 minutes.
//! * If there are more used units than the new quota and its debt can hold, the old state stays
//!   until enough units are freed under the old quota. While the old state stays, requests are
//!   refused, and a forced charge or a refund has no effect.
//! * A converted unit counts for at most as long as a unit that is taken at the change, apart from
//!   rounding to the edge of a window.
//! * A sliding window that weighs its oldest sub-window keeps units of a bucket as a larger entry,
//!   because only a part of the entry counts. If the key then gets a log, the whole entry counts,
//!   at most until one period after the change. Therefore the key may have to wait longer than
//!   under one quota, but it never gets more units.
//! * A refused request does not convert the used units, with one exception. It converts units that
//!   would stay used for longer than two periods of the new quota, or for longer than the new
//!   bucket takes to drain. Without the exception, a key that changes from a quota per day to a
//!   quota per minute would wait for a day.
//!
//! ## Keys that change back and forth
//!
//! A key may alternate between two plans, for example because two users with different plans share
//! it.
//!
//! * **One algorithm and period, two limits.** The key passes at most what the larger plan passes,
//!   and at least what the smaller plan passes, to within one unit. With a burst of 1, the key
//!   sometimes passes no more than under the smaller plan, because the last admitted request
//!   decides when the next request is admitted.
//! * **Blocks and meters.** The bounds for two limits hold for each round of a block or a meter.
//!   Between two blocks, the key takes at least the smaller plan's strikes and at most the larger
//!   plan's. A block begins with the first request that finds enough strikes for its own plan, and
//!   lasts as long as that plan says. No change of the plan shortens or prolongs the block.
//! * **Two algorithms, one limit and period.** In any interval the key passes at most the larger
//!   capacity plus the units of the larger rate in that time. Consider only the requests that are
//!   made under the smaller plan: this plan alone would admit some of their units, and the key
//!   passes at least a third of these units. Plans between which keys alternate should have one
//!   algorithm.
//! * **Two periods.** When a request is admitted under the shorter period, units that were taken
//!   before that period are forgotten. For example, a key that alternates between 10 per minute and
//!   1,200 per hour can take more than 1,200 units in an hour. If both limits have to hold, charge
//!   each request to both quotas: [`Rule::all_of`](crate::Rule::all_of).
//!
//! # Ranges
//!
//! | what | from | to |
//! |---|---|---|
//! | limits, bursts and other numbers of units | 0 | 999,999,999,999,999 |
//! | the limit of a sliding log | 0 | 1,000,000 |
//! | the limit of a concurrency limit | 0 | 999,999,999,999 |
//! | the strikes of a block | 1 | 4,095 |
//! | the buckets of a sliding window | 1 | 3,600 |
//! | periods, in whole microseconds | 1 µs | 366 days |
//! | the time in which a full bucket drains | | 2^48 µs (8.9 years) |
//!
//! A quota outside of these ranges is an error when the quota is made, not when a request comes.
//! [`Quota::per_second`](crate::Quota::per_second), `per_minute`, `per_hour`, `per_day` and
//! [`Quota::concurrent`](crate::Quota::concurrent) return no error: a limit above the largest
//! possible limit counts as the largest.

// `builder` is the first module, because rustdoc shows the methods of `Quota` in the order of the modules.
pub(crate) mod builder;

mod block;
mod calendar;
pub(crate) mod error;
pub(crate) mod parse;
#[cfg(feature = "serde")]
mod serde;
pub(crate) mod spec;
mod split;
#[cfg(all(test, not(ratelimit_loom)))]
mod tests;

pub use crate::base::calendar::Calendar;
pub(crate) use builder::Quota;
pub use calendar::Weekday;
pub(crate) use spec::UNITS_MAX;
pub use spec::{Algorithm, Anchor, Oldest};
