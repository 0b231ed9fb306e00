//! Recommends a limit.

use super::super::curve::{LIMITS, Point};
use super::numbers::{counted, share};
use super::{CurveLimit, Paste};

/// A share of clients that a limit may touch, and its name.
const TARGETS: [(u64, &str); 3] =
    [(100, "at most 1% of the clients"), (1_000, "at most 0.1% of the clients"), (0, "no client")];

/// The smallest limit that touches at most a share of the clients of the log's first half.
#[derive(Clone, Debug)]
pub(crate) struct Advice {
    /// The target as text, such as `no client`.
    pub(crate) target: &'static str,
    /// The index of the limit, or `None` if each of them touches more.
    pub(crate) limit: Option<usize>,
    /// The whole suggestion.
    pub(crate) words: String,
}

/// Suggests a limit for each target.
pub(crate) fn advise(limits: &[CurveLimit]) -> Vec<Advice> {
    TARGETS.iter().map(|(of, target)| advice(limits, *of, target)).collect()
}

fn advice(limits: &[CurveLimit], one_of: u64, target: &'static str) -> Advice {
    let meets = |point: &Point| point.touched == 0 || (one_of > 0 && point.touched * one_of <= point.clients);
    // All larger limits have to meet the target, too: what a limit refuses is not quite monotone.
    let behind = limits.iter().rposition(|limit| !meets(&limit.first)).map_or(0, |at| at + 1);
    let Some(limit) = limits.get(behind) else {
        let most = limits.last().map_or("this".to_owned(), |limit| format!("`{}`", limit.quota));
        let words = format!("To touch {target}: no limit up to {most} does so in the first half of the log.");
        return Advice { target, limit: None, words };
    };
    let half =
        |point: &Point| format!("{} ({})", counted(point.touched, "client"), share(point.touched, point.clients));
    let refused: u64 = limit.worst.iter().sum();
    let most = match limit.worst.len() as u64 {
        0 => String::new(),
        clients => format!(", {} of them from {}", share(refused, limit.all.refused), counted(clients, "client")),
    };
    let words = format!(
        "To touch {target}: `{}`. In the first half of the log, which it is chosen by, it touches {}; in the second half {}. In \
         the whole log it refuses {} ({}){most}.",
        limit.quota,
        half(&limit.first),
        half(&limit.second),
        counted(limit.all.refused, "request"),
        share(limit.all.refused, limit.all.requests),
    );
    Advice { target, limit: Some(behind), words }
}

/// A rule to begin with.
pub(crate) struct Suggested {
    /// The target that its quota meets.
    pub(crate) target: &'static str,
    /// The index of its limit.
    pub(crate) limit: usize,
    pub(crate) text: String,
}

impl Suggested {
    /// Returns what the reader should know of it.
    pub(crate) fn words(&self) -> String {
        format!(
            "This is the quota that touches {}. At first it only observes. Multiply it by 1.5 to 2 if your traffic grows:",
            self.target
        )
    }
}

/// Returns the rule to begin with, in shadow mode: that of the second target, or if there is none, of the first.
pub(crate) fn rule(advice: &[Advice], limits: &[CurveLimit], name: &str, paste: &Paste) -> Option<Suggested> {
    let of = |at: usize| advice.get(at).and_then(|advice| Some((advice.target, advice.limit?)));
    let (target, limit) = of(1).or_else(|| of(0))?;
    let quota = &limits.get(limit)?.quota;
    let yaml = in_yaml(name);
    let text = match paste {
        Paste::Rule(key) => {
            format!("rules:\n  - name: {yaml}\n    quota: {quota}\n    key: {key}\n    mode: shadow\n")
        }
        Paste::Beside(other) => {
            format!(
                "# beside the rule of the policy {other}, with its `key` and `match`\n  - name: {yaml}\n    quota: {quota}\n    mode: shadow\n"
            )
        }
        // A candidate is observed beside the quota in force, which is what a shadow is to a new rule.
        Paste::Candidate => format!("# in the rule of the policy {name}\n    candidate: {quota}\n"),
    };
    Some(Suggested { target, limit, text })
}

/// Returns a policy's name as YAML, in quotes unless it is a plain word. It is printable ASCII.
fn in_yaml(name: &str) -> String {
    let is_word = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && !["true", "false", "null"].contains(&&*name.to_ascii_lowercase());
    if is_word { name.to_owned() } else { format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\"")) }
}

/// Returns the limit at which the curve of touched clients bends most: the one furthest below the line between the
/// curve's ends. Limits count by their logarithms. Returns `None` if the curve does not bend.
pub(crate) fn knee(limits: &[CurveLimit]) -> Option<usize> {
    let (first, last) = (limits.first()?, limits.last()?);
    let touched = |limit: &CurveLimit| limit.all.touched as f64;
    let (left, right) = ((first.limit as f64).ln(), (last.limit as f64).ln());
    let (top, bottom) = (touched(first), touched(last));
    if right <= left || top <= bottom {
        return None;
    }
    let below = |limit: &CurveLimit| {
        let line = 1.0 - ((limit.limit as f64).ln() - left) / (right - left);
        line - (touched(limit) - bottom) / (top - bottom)
    };
    let best = (0..limits.len().min(LIMITS)).max_by(|a, b| {
        let of = |at: &usize| limits.get(*at).map_or(0.0, below);
        of(a).total_cmp(&of(b))
    })?;
    limits.get(best).is_some_and(|limit| below(limit) > 0.05).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(touched: &[(u64, u64)]) -> Vec<CurveLimit> {
        let point = |touched| Point { requests: 10_000, refused: touched * 10, clients: 1_000, touched };
        let limit = |(at, (first, second)): (u32, &(u64, u64))| CurveLimit {
            limit: 10_u64.pow(at),
            quota: format!("{} per minute", 10_u64.pow(at)),
            all: point(first + second),
            first: point(*first),
            second: point(*second),
            worst: vec![5, 3],
        };
        (0..).zip(touched).map(limit).collect()
    }

    #[test]
    fn advice_is_the_least_limit_for_the_first_half() {
        let limits = limits(&[(500, 500), (10, 20), (11, 0), (10, 0), (1, 2), (0, 1)]);
        let advice = advise(&limits);
        assert_eq!(advice.iter().map(|advice| advice.limit).collect::<Vec<_>>(), [Some(3), Some(4), Some(5)]);
        let words = &advice[1].words;
        for part in ["`10000 per minute`", "1 client (0.10%)", "2 clients (0.20%)", "30 requests (0.30%)", "2 clients."]
        {
            assert!(words.contains(part), "{words}");
        }
        let none = advise(&self::limits(&[(500, 0), (400, 0)]));
        assert!(none.iter().all(|advice| advice.limit.is_none() && advice.words.contains("`10 per minute`")));
    }

    #[test]
    fn knee_is_where_the_curve_bends() {
        assert_eq!(knee(&limits(&[(500, 0), (40, 0), (30, 0), (20, 0), (10, 0), (0, 0)])), Some(1));
        assert_eq!(knee(&limits(&[(500, 0), (400, 0), (300, 0), (200, 0), (100, 0), (0, 0)])), None);
        assert_eq!(knee(&limits(&[(0, 0), (0, 0)])), None);
    }

    #[test]
    fn rule_can_be_pasted() {
        let limits = limits(&[(500, 500), (0, 0)]);
        let advice = advise(&limits);
        let rule = rule(&advice, &limits, "client", &Paste::Rule("peer-ip".to_owned())).unwrap();
        assert!(rule.words().contains("touches at most 0.1% of the clients."), "{}", rule.words());
        tower_ratelimit::rules::Rules::from_text(rule.text).unwrap();
        let candidate = super::rule(&advice, &limits, "client", &Paste::Candidate).unwrap().text;
        let (_, candidate) = candidate.split_once('\n').unwrap();
        let rule = format!("rules:\n  - name: client\n    quota: 5 per minute\n    key: peer-ip\n{candidate}");
        tower_ratelimit::rules::Rules::from_text(rule).unwrap();
    }

    #[test]
    fn rule_that_is_pasted_has_the_policys_name() {
        let limits = limits(&[(500, 500), (0, 0)]);
        let advice = advise(&limits);
        for name in ["client", "x-api-key", "edge:path=/a*,b", "api #2", "a: b", "null", "7", "*", "\"a\\\"", "- x"] {
            let text = rule(&advice, &limits, name, &Paste::Rule("peer-ip".to_owned())).unwrap().text;
            let layer = tower_ratelimit::rules::Rules::from_text(text.clone())
                .unwrap_or_else(|error| panic!("{text}\n{error}"))
                .layer(tower_ratelimit::MemoryLimiter::new())
                .unwrap();
            assert_eq!(layer.policies()[0].name(), name, "{text}");
            let beside = rule(&advice, &limits, name, &Paste::Beside("b".to_owned())).unwrap().text;
            assert_eq!(beside.lines().nth(1), text.lines().nth(1), "{beside}");
        }
    }
}
