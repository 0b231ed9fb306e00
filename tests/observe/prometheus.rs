//! A Prometheus server for tests. It has a free port, and stops when it is dropped.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tokio::time::Instant;

use super::{LONG, fetch};

/// A server. Dropping it kills it and removes its directory.
pub(crate) struct Prometheus {
    child: Child,
    port: u16,
    directory: PathBuf,
    targets: usize,
    /// The time at which queries are evaluated, in seconds. `None` is now.
    at: Cell<Option<f64>>,
}

/// A sample of an answer: its labels, without the name of the metric, and its value.
pub(crate) type Sample = (BTreeMap<String, String>, f64);

/// A rule as Prometheus has read it.
pub(crate) struct Rule {
    pub(crate) name: String,
    pub(crate) query: String,
}

impl Prometheus {
    /// Starts a server with the rules of the alerts. It scrapes targets: for each job the port and the path. A job
    /// with several instances is several targets, `job/instance`.
    pub(crate) fn start(targets: &[(String, u16, String)]) -> Self {
        let directory = std::env::temp_dir().join(format!(
            "tower-ratelimit-prometheus-{}-{}",
            std::process::id(),
            targets.first().map_or("", |(job, ..)| job)
        ));
        let _ = std::fs::remove_dir_all(&directory); // of an earlier process that was killed
        std::fs::create_dir_all(&directory).unwrap();
        let alerts = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/observe/alerts.yaml");
        let mut config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1h}}\n\
             rule_files: [{alerts:?}]\nscrape_configs:\n"
        );
        for (job, port, path) in targets {
            let labels = job
                .split_once('/')
                .map_or_else(String::new, |(job, instance)| format!(", labels: {{job: {job}, instance: {instance}}}"));
            config += &format!(
                "  - {{job_name: {job}, metrics_path: {path}, static_configs: [{{targets: [\"127.0.0.1:{port}\"]{labels}}}]}}\n"
            );
        }
        std::fs::write(directory.join("prometheus.yaml"), config).unwrap();
        let log = directory.join("log");
        let child = Command::new(program())
            .arg(format!("--config.file={}", directory.join("prometheus.yaml").display()))
            .arg(format!("--storage.tsdb.path={}", directory.join("data").display()))
            .arg("--web.listen-address=127.0.0.1:0")
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn();
        let child = child.unwrap_or_else(|error| panic!("{}", missing(&program(), &error)));
        let mut server = Self { child, port: 0, directory, targets: targets.len(), at: Cell::new(None) };
        eventually("Prometheus says its port", || {
            assert!(server.child.try_wait().unwrap().is_none(), "{}", std::fs::read_to_string(&log).unwrap());
            let log = std::fs::read_to_string(&log).unwrap();
            let line = log.lines().find(|line| line.contains("msg=\"Listening on\""));
            let address = line.and_then(|line| line.split_once("address=127.0.0.1:"));
            let port = address.map(|(_, port)| port.split(' ').next().unwrap_or_default().parse().unwrap());
            server.port = port.unwrap_or(0);
            port.is_some()
        });
        eventually("Prometheus is ready", || {
            matches!(fetch(server.port, "/-/ready", ""), Ok((200, _))) && {
                // A target that was never scraped has no sample.
                server.query("up == 1").len() == server.targets
            }
        });
        server
    }

    /// Waits until each target was scraped after now. Queries are evaluated at such a time from then on. So a later
    /// scrape that fails, and ends all series of its target, changes no result.
    pub(crate) fn scrape(&self) {
        self.at.set(None);
        let now = || self.value("vector(time())");
        let scraped =
            |samples: &[Sample], after: f64| samples.iter().filter(|(_, at)| *at > after).count() == self.targets;
        let began = now();
        let mut at = began;
        eventually("every target is scraped", || {
            // A sample has the time at which its scrape began, and a target is scraped by one scrape after the other.
            // So nothing is added any more to what a target had at a time before its last sample.
            if !scraped(&self.query("timestamp(up)"), at) {
                return false;
            }
            let is_scraped = scraped(&self.query_at("timestamp(up) and up == 1", Some(at)), began);
            if !is_scraped {
                at = now();
            }
            is_scraped
        });
        self.at.set(Some(at));
    }

    /// Evaluates a query at the time of the last [`scrape`](Self::scrape), or now if there was none.
    pub(crate) fn query(&self, query: &str) -> Vec<Sample> {
        self.query_at(query, self.at.get())
    }

    fn query_at(&self, query: &str, at: Option<f64>) -> Vec<Sample> {
        let escaped: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let time = at.map_or_else(String::new, |at| format!("&time={at}"));
        let answer = self.get(&format!("/api/v1/query?query={escaped}{time}"));
        let result = answer["data"]["result"].as_array().unwrap_or_else(|| panic!("{query}: {answer}"));
        let sample = |sample: &Value| {
            let labels = sample["metric"].as_object().unwrap().iter();
            let labels = labels.filter(|(name, _)| *name != "__name__");
            let labels = labels.map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned())).collect();
            (labels, sample["value"][1].as_str().unwrap().parse().unwrap())
        };
        result.iter().map(sample).collect()
    }

    /// Returns the only value of a query.
    pub(crate) fn value(&self, query: &str) -> f64 {
        let samples = self.query(query);
        let [(_, value)] = &samples[..] else { panic!("{query}: {samples:?}") };
        *value
    }

    /// Returns the rules.
    pub(crate) fn rules(&self) -> Vec<Rule> {
        let answer = self.get("/api/v1/rules");
        let groups = answer["data"]["groups"].as_array().unwrap();
        let rules = groups.iter().flat_map(|group| group["rules"].as_array().unwrap());
        let text = |rule: &Value, name: &str| rule[name].as_str().unwrap().to_owned();
        rules.map(|rule| Rule { name: text(rule, "name"), query: text(rule, "query") }).collect()
    }

    fn get(&self, path: &str) -> Value {
        let (_, body) = fetch(self.port, path, "").unwrap();
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Returns the query with totals in place of rates and increases: these are exact to the unit.
pub(crate) fn of_totals(query: &str) -> String {
    let (mut totals, mut rest) = (String::new(), query);
    while let Some((at, function)) = ["rate(", "increase("].iter().filter_map(|f| Some((rest.find(f)?, f))).min() {
        let (before, call) = rest.split_at(at);
        let (selector, after) = call[function.len()..].split_once('[').expect("a range is selected");
        let (_, after) = after.split_once("])").expect("the range ends, and the call");
        totals += before;
        totals += selector;
        rest = after;
    }
    totals + rest
}

/// Waits until something is so, and fails if that takes too long.
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < LONG, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Returns what to do if a program of Prometheus cannot be started.
pub(crate) fn missing(program: &str, error: &std::io::Error) -> String {
    format!(
        "{program} cannot be started ({error}). Install Prometheus, on Debian with: apt-get install prometheus; or name \
         its programs in PROMETHEUS and PROMTOOL"
    )
}

/// Returns the server's program: the one in PROMETHEUS, or `prometheus` on the path.
fn program() -> String {
    std::env::var("PROMETHEUS").unwrap_or_else(|_| "prometheus".to_owned())
}

#[test]
fn totals_take_the_place_of_rates() {
    let query = "sum by (a) (rate(x{b=~\"c|d\"}[5m])) / sum(increase(y[$__rate_interval])) > 0.2";
    assert_eq!(of_totals(query), "sum by (a) (x{b=~\"c|d\"}) / sum(y) > 0.2");
}
