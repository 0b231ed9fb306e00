//! The recorder of the crate `metrics`.

use std::collections::BTreeMap;
use std::time::Duration;

use metrics::{Label, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use super::histogram::HistogramSnapshot;
use super::series::{Kind, Sink, write_all};
use super::snapshot::StatsSnapshot;

/// The histograms as the recorder got them before. It takes durations, not totals.
pub(super) type Recorded = BTreeMap<(&'static str, Option<Box<str>>), HistogramSnapshot>;

/// Hands all metrics to the recorder.
pub(super) fn record(stats: &StatsSnapshot, recorded: &mut Recorded) {
    write_all(&mut Recorder { name: "", kind: Kind::Counter, recorded }, stats);
}

struct Recorder<'a> {
    name: &'static str,
    kind: Kind,
    recorded: &'a mut Recorded,
}

impl Sink for Recorder<'_> {
    fn begin(&mut self, name: &'static str, kind: Kind, help: &'static str) {
        (self.name, self.kind) = (name, kind);
        match kind {
            Kind::Counter => describe_counter!(name, help),
            Kind::Gauge => describe_gauge!(name, help),
            Kind::Histogram => describe_histogram!(name, help),
        }
    }

    fn sample(&mut self, labels: &[(&'static str, &str)], value: u64) {
        let labels: Vec<Label> = labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
        match self.kind {
            Kind::Gauge => gauge!(self.name, labels).set(value as f64), // exact up to 2^53
            _ => counter!(self.name, labels).absolute(value),
        }
    }

    fn seconds(&mut self, time: Duration) {
        gauge!(self.name).set(time.as_secs_f64());
    }

    fn histogram(&mut self, policy: Option<&str>, now: &HistogramSnapshot) {
        let labels: Vec<Label> = policy.iter().map(|policy| Label::new("policy", (*policy).to_owned())).collect();
        let recorder = histogram!(self.name, labels);
        let before = self.recorded.entry((self.name, policy.map(Into::into))).or_default();
        for (duration, count) in now.since(before) {
            recorder.record_many(duration, usize::try_from(count).unwrap_or(usize::MAX));
        }
        *before = now.clone();
    }
}
