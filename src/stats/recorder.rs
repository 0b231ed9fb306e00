//! The recorder of the crate `metrics`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, SharedString, Unit};

use super::histogram::HistogramSnapshot;
use super::series::{MetricKind, Sink, write_all};
use super::snapshot::StatsSnapshot;

/// The values that the recorder has received so far.
///
/// A series is registered only once, and its handle is kept. Some recorders store the last value behind the handle, and
/// count from zero with a new handle.
#[derive(Default)]
pub(super) struct Recorded {
    /// The address of the recorder to which the handles belong. If the recorder changes, new handles are made, because
    /// an application may install its recorder after the first call.
    recorder: Option<usize>,
    handles: BTreeMap<Series, Handle>,
    /// The durations that the recorder has received. A recorder takes each duration separately, not
    /// as totals.
    durations: BTreeMap<Series, HistogramSnapshot>,
}

/// The name of a metric, and the values of its labels.
type Series = (&'static str, Vec<Box<str>>);

enum Handle {
    Counter(Counter),
    Gauge(Gauge),
    Histogram(Histogram),
}

/// Passes all metrics to the recorder.
pub(super) fn record(stats: &StatsSnapshot, recorded: &mut Recorded) {
    metrics::with_recorder(|recorder| {
        let address = Some(std::ptr::from_ref(recorder).cast::<()>().addr());
        let is_new = recorded.recorder != address;
        if is_new {
            recorded.handles.clear();
            recorded.recorder = address;
        }
        write_all(&mut Recorder { recorder, is_new, name: "", kind: MetricKind::Counter, recorded }, stats);
    });
}

struct Recorder<'a> {
    recorder: &'a dyn metrics::Recorder,
    /// True if no metric was passed to the recorder yet.
    is_new: bool,
    name: &'static str,
    kind: MetricKind,
    recorded: &'a mut Recorded,
}

impl Recorder<'_> {
    /// Returns the handle of a series. A new series is registered first.
    fn handle(&mut self, labels: &[(&'static str, &str)]) -> &Handle {
        let series = series(self.name, labels);
        self.recorded.handles.entry(series).or_insert_with(|| {
            let labels: Vec<Label> =
                labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
            let (key, of) = (Key::from_parts(self.name, labels), Metadata::new("tower_ratelimit", Level::INFO, None));
            match self.kind {
                MetricKind::Counter => Handle::Counter(self.recorder.register_counter(&key, &of)),
                MetricKind::Gauge => Handle::Gauge(self.recorder.register_gauge(&key, &of)),
                MetricKind::Histogram => Handle::Histogram(self.recorder.register_histogram(&key, &of)),
            }
        })
    }
}

impl Sink for Recorder<'_> {
    fn begin(&mut self, name: &'static str, kind: MetricKind, help: &'static str) {
        (self.name, self.kind) = (name, kind);
        if !self.is_new {
            return;
        }
        let unit = Some(if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count });
        let (name, help) = (KeyName::from_const_str(name), SharedString::const_str(help));
        match kind {
            MetricKind::Counter => self.recorder.describe_counter(name, unit, help),
            MetricKind::Gauge => self.recorder.describe_gauge(name, unit, help),
            MetricKind::Histogram => self.recorder.describe_histogram(name, unit, help),
        }
    }

    fn sample(&mut self, labels: &[(&'static str, &str)], value: u64) {
        match self.handle(labels) {
            Handle::Counter(counter) => counter.absolute(value),
            Handle::Gauge(gauge) => gauge.set(value as f64), // exact up to 2^53
            Handle::Histogram(_) => debug_assert!(false, "a histogram has no samples"),
        }
    }

    fn seconds(&mut self, time: Duration) {
        if let Handle::Gauge(gauge) = self.handle(&[]) {
            gauge.set(time.as_secs_f64());
        }
    }

    fn histogram(&mut self, policy: Option<&str>, now: &HistogramSnapshot) {
        let label = policy.map(|policy| ("policy", policy));
        let before = self.recorded.durations.insert(series(self.name, label.as_slice()), now.clone());
        if let Handle::Histogram(histogram) = self.handle(label.as_slice()) {
            for (duration, count) in now.since(&before.unwrap_or_default()) {
                histogram.record_many(duration, usize::try_from(count).unwrap_or(usize::MAX));
            }
        }
    }
}

fn series(name: &'static str, labels: &[(&'static str, &str)]) -> Series {
    (name, labels.iter().map(|(_, value)| (*value).into()).collect())
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorded").field("handles", &self.handles.len()).finish_non_exhaustive()
    }
}
