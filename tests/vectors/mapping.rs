//! Translates other projects' parameters into this crate's.

use std::time::Duration;

use serde_json::{Map, Value};
use tower_ratelimit::{
    ConfigError, Quota,
    quota::{Algorithm, Anchor, Oldest},
};

/// The parameters of a vector, with its key's override merged in.
pub(crate) type Params = Map<String, Value>;

/// Parameters that the replay reads itself, and those that only describe.
const NOT_OF_THE_QUOTA: [&str; 9] =
    ["initial", "created_at_ms", "max_wait_ms", "multi", "name", "peer_params", "note", "inherit", "block_ms"];

/// The quota that a vector's parameters describe, with room for `debt` forced units.
///
/// The algorithm's name decides, as the file has it: up to the first hyphen it is the family.
pub(crate) fn quota(algorithm: &str, params: &Params, debt: u64) -> Result<Quota, String> {
    let mut read = Reader { params, seen: NOT_OF_THE_QUOTA.to_vec() };
    let quota = match algorithm {
        "fixed_window-reserve" => refilled_per_cycle(&mut read)?,
        "fixed_window" | "fixed_window-block" | "fixed_window-refund" | "drain-on-deny" => fixed_window(&mut read)?,
        "config-replacement" | "multi-limit" if params.contains_key("window_ms") => fixed_window(&mut read)?,
        "config-replacement" | "multi-limit" => token_bucket(&mut read)?,
        "gcra" | "gcra-property" | "gcra-take-at-most" => gcra(&mut read)?,
        "leaky_bucket-meter" => leaky_bucket(&mut read)?,
        "leaky_bucket-queue" | "leaky_bucket-property" => leaky_queue(&mut read)?,
        "leaky_bucket-pacing" => paced(&mut read)?,
        "sliding_window_counter" | "sliding_window_counter-decision" => sliding_window(&mut read)?,
        "sliding_window_log" => sliding_log(&mut read)?,
        "sliding_window_segmented" => segmented(&mut read)?,
        bucket if bucket.starts_with("token_bucket") => token_bucket(&mut read)?,
        other => return Err(format!("nothing here is a {other}")),
    };
    let quota = if debt > 0 { quota.max_debt(quota.capacity() + debt).map_err(text)? } else { quota };
    match params.keys().find(|name| !read.seen.contains(&name.as_str())) {
        Some(name) => Err(format!("`{name}` of a {algorithm} has no meaning here")),
        None => Ok(quota),
    }
}

/// The block that a vector's parameters describe beside their quota: after one refusal.
pub(crate) fn block(params: &Params) -> Result<Option<Quota>, String> {
    let ms = |name: &str| params.get(name).and_then(Value::as_u64).map(Duration::from_millis);
    match (ms("window_ms"), ms("block_ms")) {
        (Some(window), Some(lasting)) => Quota::block(1, window, lasting).map(Some).map_err(text),
        _ => Ok(None),
    }
}

// Windows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// "first-hit" begins a window at the key's first request, as most do; "epoch-aligned" on the grid.
fn fixed_window(read: &mut Reader<'_>) -> Result<Quota, String> {
    let anchor = match read.word("anchor")? {
        None | Some("first-hit") => Anchor::FirstRequest,
        Some("epoch-aligned") => Anchor::Epoch,
        Some(other) => return Err(format!("an anchor of {other} is unknown")),
    };
    if let Some(behavior) = read.word("behavior")? {
        assert_eq!(behavior, "DRAIN_OVER_LIMIT", "of a choice that this crate does not offer, the rest is replayed");
    }
    Quota::fixed_window(read.units("limit")?, read.ms("window_ms")?)
        .and_then(|quota| quota.anchor(anchor))
        .map_err(text)
}

/// Permissions that come at each cycle of a grid and may be taken ahead: a bucket that is refilled
/// in steps.
fn refilled_per_cycle(read: &mut Reader<'_>) -> Result<Quota, String> {
    assert_eq!(read.word("anchor")?, Some("creation-aligned grid"), "the grid of the epoch, since vectors begin on it");
    Quota::step_bucket(read.units("limit")?, read.ms("window_ms")?).map_err(text)
}

/// The classic estimate from two counters, on the grid: vectors "anchored" at a first hit have that
/// hit at 0. Without a limit only the estimate is compared, and the limit is above everything.
fn sliding_window(read: &mut Reader<'_>) -> Result<Quota, String> {
    let anchor = read.word("anchor")?;
    assert!(matches!(anchor, None | Some("first-hit" | "first-hit grid")), "{anchor:?}");
    let limit = read.units_or("limit", 1_000)?;
    Quota::sliding_window(limit, read.ms("window_ms")?).map_err(text)
}

/// Segments of which the oldest comes back as a whole: sub-windows, the partly covered one dropped.
fn segmented(read: &mut Reader<'_>) -> Result<Quota, String> {
    let segments = u32::try_from(read.units("segments")?).map_err(|error| error.to_string())?;
    Quota::sliding_window(read.units("limit")?, read.ms("segment_ms")? * segments)
        .and_then(|quota| quota.buckets(segments)?.oldest(Oldest::Dropped))
        .map_err(text)
}

fn sliding_log(read: &mut Reader<'_>) -> Result<Quota, String> {
    Quota::sliding_log(read.units("limit")?, read.ms("window_ms")?).map_err(text)
}

// Buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// The capacity is the file's, also where the source writes it as a burst of one less. The rate is
/// one per interval, or so many per period.
fn gcra(read: &mut Reader<'_>) -> Result<Quota, String> {
    let (limit, period) = if read.has("rate") {
        (read.units("rate")?, read.ms("period_ms")?)
    } else {
        (1, read.ms("emission_interval_ms")?)
    };
    let capacity = read.units("capacity")?;
    Quota::gcra(limit, period).and_then(|quota| quota.burst(capacity)).map_err(text)
}

/// "greedy" (the default) flows in; "intervally" ticks from the key's first request,
/// "intervally-aligned" on the grid on which its first refill lies.
fn token_bucket(read: &mut Reader<'_>) -> Result<Quota, String> {
    let (refill, period, capacity) = (read.units("refill")?, read.ms("refill_period_ms")?, read.units("capacity")?);
    match read.word("refill_mode")? {
        None => Quota::token_bucket(refill, period),
        Some("intervally") => Quota::step_bucket(refill, period).and_then(|quota| quota.anchor(Anchor::FirstRequest)),
        Some("intervally-aligned") => {
            let first = read.ms("first_refill_ms")?;
            assert_eq!(first.as_micros() % period.as_micros(), 0, "the first refill lies on the grid");
            Quota::step_bucket(refill, period)
        }
        Some(other) => return Err(format!("a refill of {other} is unknown")),
    }
    .and_then(|quota| quota.burst(capacity))
    .map_err(text)
}

fn leaky_bucket(read: &mut Reader<'_>) -> Result<Quota, String> {
    let capacity = read.units("capacity")?;
    Quota::leaky_bucket(read.units("leak")?, read.ms("leak_period_ms")?)
        .and_then(|quota| quota.burst(capacity))
        .map_err(text)
}

/// nginx's model: its burst is what may wait besides the one that is due, which is the queue here;
/// "nodelay" lets all of them pass at once.
fn leaky_queue(read: &mut Reader<'_>) -> Result<Quota, String> {
    let length = read.units("burst")?;
    let at_once = if read.flag("nodelay") { length } else { read.units_or("delay_after", 0)? };
    rated(read)?.queue(length).and_then(|quota| quota.delay_after(at_once)).map_err(text)
}

/// A pacer: no request is denied, and `slack` places that were not used may be used at once later.
fn paced(read: &mut Reader<'_>) -> Result<Quota, String> {
    let slack = read.units("slack")?;
    rated(read)?.queue(1_000).and_then(|quota| quota.delay_after(slack)).map_err(text)
}

/// Returns a queue of the rate per second. A rate of 0.5 is one in two seconds.
fn rated(read: &mut Reader<'_>) -> Result<Quota, String> {
    match read.take("rate_per_s").and_then(Value::as_f64) {
        Some(rate) if rate.fract() == 0.0 => Quota::leaky_queue(rate as u64, Duration::from_secs(1)),
        Some(rate) => Quota::leaky_queue(1, Duration::from_secs_f64(rate.recip())),
        None => return Err("a rate is missing".into()),
    }
    .map_err(text)
}

// Answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// The meaning of "reset" in a family's sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reset {
    /// The time until the whole quota is back, as here: buckets until they are full, a fixed window
    /// until it ends.
    WholeQuota,
    /// The time until one unit is free: sliding windows and the log.
    NextUnit,
    /// A bucket's time until full, reckoned from the whole units that remain.
    FromRemaining,
}

pub(crate) fn reset(quota: &Quota, id: &str) -> Reset {
    match quota.algorithm() {
        Algorithm::SlidingWindow | Algorithm::SlidingLog => Reset::NextUnit,
        _ if id == "leaky-gubernator-main" => Reset::FromRemaining,
        _ => Reset::WholeQuota,
    }
}

/// The tokens of a bucket that is back after `reset`, rounded down, below zero when it is in debt.
///
/// A step bucket's reset determines its tokens only if each tick brings one.
pub(crate) fn tokens(quota: &Quota, reset: Duration) -> Result<i64, String> {
    let (limit, period) = (u128::from(quota.limit()), quota.period().as_micros());
    let missing = match quota.algorithm() {
        Algorithm::StepBucket if limit != 1 => return Err("tokens below zero cannot be told".into()),
        Algorithm::TokenBucket | Algorithm::StepBucket => (reset.as_micros() * limit).div_ceil(period),
        other => return Err(format!("a {other} has no tokens")),
    };
    let number = |units: u128| i64::try_from(units).map_err(|error| error.to_string());
    Ok(number(u128::from(quota.capacity()))? - number(missing)?)
}

// Reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// Reads parameters, and remembers which.
struct Reader<'a> {
    params: &'a Params,
    seen: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    fn take(&mut self, name: &'static str) -> Option<&'a Value> {
        self.seen.push(name);
        self.params.get(name)
    }

    fn has(&self, name: &str) -> bool {
        self.params.contains_key(name)
    }

    fn units(&mut self, name: &'static str) -> Result<u64, String> {
        self.take(name).and_then(Value::as_u64).ok_or_else(|| format!("`{name}` is missing"))
    }

    fn units_or(&mut self, name: &'static str, default: u64) -> Result<u64, String> {
        if self.has(name) { self.units(name) } else { Ok(default) }
    }

    fn ms(&mut self, name: &'static str) -> Result<Duration, String> {
        self.units(name).map(Duration::from_millis)
    }

    fn flag(&mut self, name: &'static str) -> bool {
        self.take(name) == Some(&Value::Bool(true))
    }

    fn word(&mut self, name: &'static str) -> Result<Option<&'a str>, String> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| format!("`{name}` is no word")),
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "as `map_err` passes it")]
fn text(error: ConfigError) -> String {
    error.to_string()
}
