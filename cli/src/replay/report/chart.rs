//! Charts as SVG, readable without colour: lines differ by their dashes and marks, and have their names beside them.

use std::fmt::Write as _;

use super::escape::html;
use super::numbers::{count, counted, instant, share};
use super::{CurveReport, Hours};

const WIDTH: f64 = 720.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 36.0;

const CURVE_TOP: f64 = 82.0;
const CURVE_BOTTOM: f64 = 330.0;

/// The shares with a line across the curve. Below the least one there is only 0.
const SHARES: [(f64, &str); 5] = [(1.0, "100%"), (0.1, "10%"), (0.01, "1%"), (0.001, "0.1%"), (0.000_1, "0.01%")];

/// Draws limits against the shares of clients touched and of requests refused, both by their logarithms. Returns the
/// chart, and where each limit is on it.
pub(crate) fn curve(report: &CurveReport, own_limit: u64) -> (String, Vec<f64>) {
    let logarithm = |limit: u64| (limit.max(1) as f64).ln();
    let ends = report.limits.first().zip(report.limits.last());
    let (low, high) = ends.map_or((0.0, 1.0), |(first, last)| (logarithm(first.limit), logarithm(last.limit)));
    let x = |limit: u64| {
        let at = if high > low { (logarithm(limit) - low) / (high - low) } else { 0.5 };
        LEFT + 12.0 + at * (WIDTH - LEFT - RIGHT - 24.0)
    };
    let zero = CURVE_BOTTOM - 14.0;
    let y = |part: u64, of: u64| {
        let share = if of == 0 { 0.0 } else { part as f64 / of as f64 };
        if share == 0.0 { zero } else { height_of(share) }
    };
    let mut svg = String::new();
    let _ = write!(
        svg,
        r#"<svg viewBox="0 0 {WIDTH} 376" role="img" aria-label="Share of clients touched and of requests refused, for each limit">"#
    );
    for (share, name) in SHARES.iter().map(|(share, name)| (height_of(*share), *name)).chain([(zero, "0%")]) {
        let _ = write!(
            svg,
            r#"<line class="grid" x1="{LEFT}" x2="{}" y1="{share:.1}" y2="{share:.1}"/><text class="end" x="{}" y="{:.1}">{name}</text>"#,
            WIDTH - RIGHT,
            LEFT - 8.0,
            share + 4.0
        );
    }
    for limit in &report.limits {
        // The powers of ten are enough.
        let is_power = limit.limit.to_string().trim_end_matches('0') == "1";
        if is_power {
            let _ = write!(
                svg,
                r#"<text class="mid" x="{:.1}" y="{}">{}</text>"#,
                x(limit.limit),
                CURVE_BOTTOM + 18.0,
                count(limit.limit)
            );
        }
    }
    let _ = write!(svg, r#"<text class="end" x="{}" y="{}">limit</text>"#, WIDTH - RIGHT, CURVE_BOTTOM + 40.0);
    let inside = report.limits.iter().any(|limit| limit.limit <= own_limit) && logarithm(own_limit) <= high;
    let marks = [
        inside.then(|| (x(own_limit), "this quota")),
        report.knee.and_then(|at| report.limits.get(at)).map(|limit| (x(limit.limit), "knee")),
    ];
    for (row, (at, name)) in marks.into_iter().flatten().enumerate() {
        let top = 36.0 + 20.0 * row as f64;
        let _ = write!(
            svg,
            r#"<line class="mark" x1="{at:.1}" x2="{at:.1}" y1="{top}" y2="{CURVE_BOTTOM}"/><text x="{:.1}" y="{:.1}">{name}</text>"#,
            at + 5.0,
            top + 11.0
        );
    }
    let mut line = |class: &str, values: &[(f64, f64)]| {
        let points: Vec<String> = values.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(svg, r#"<polyline class="{class}" points="{}"/>"#, points.join(" "));
        for (x, y) in values {
            mark(&mut svg, class, *x, *y);
        }
    };
    let touched = |limit: &super::CurveLimit| (x(limit.limit), y(limit.all.touched, limit.all.clients));
    let refused = |limit: &super::CurveLimit| (x(limit.limit), y(limit.all.refused, limit.all.requests));
    line("b", &report.limits.iter().map(refused).collect::<Vec<_>>());
    line("a", &report.limits.iter().map(touched).collect::<Vec<_>>());
    let _ = write!(svg, r#"<line class="cursor" x1="-9" x2="-9" y1="{CURVE_TOP}" y2="{CURVE_BOTTOM}"/>"#);
    for (class, name, left) in [("a", "clients touched", LEFT), ("b", "requests refused", LEFT + 260.0)] {
        let right = left + 30.0;
        let _ = write!(svg, r#"<polyline class="{class}" points="{left},14 {right},14"/>"#);
        mark(&mut svg, class, left + 15.0, 14.0);
        let _ = write!(svg, r#"<text x="{}" y="19">{name}</text>"#, right + 8.0);
    }
    svg.push_str("</svg>");
    (svg, report.limits.iter().map(|limit| x(limit.limit)).collect())
}

/// Marks a point. The lines' marks differ, so the chart is readable without colours.
fn mark(svg: &mut String, class: &str, x: f64, y: f64) {
    let _ = match class {
        "a" => write!(svg, r#"<circle class="a" cx="{x:.1}" cy="{y:.1}" r="3.5"/>"#),
        _ => write!(svg, r#"<rect class="b" x="{:.1}" y="{:.1}" width="6" height="6"/>"#, x - 3.0, y - 3.0),
    };
}

/// Returns where a share above 0 is.
fn height_of(share: f64) -> f64 {
    let at = (share.max(0.000_1).log10() + 4.0) / 4.0; // 0 for 0.01 %, 1 for 100 %
    let bottom = CURVE_BOTTOM - 48.0;
    bottom - at * (bottom - CURVE_TOP)
}

const HOURS_TOP: [f64; 2] = [28.0, 138.0];
const HOURS_HEIGHT: f64 = 72.0;

/// Draws requests and refusals over time, each with a scale of its own.
pub(crate) fn hours(hours: &Hours) -> String {
    let (Some((start, ..)), Some((last, ..))) = (hours.parts.first(), hours.parts.last()) else { return String::new() };
    let end = last + hours.length_us;
    let room = WIDTH - LEFT - RIGHT;
    let x = |us: u64| LEFT + us.saturating_sub(*start) as f64 / (end - start) as f64 * room;
    let width = (hours.length_us as f64 / (end - start) as f64 * room).max(1.0);
    let mut svg = format!(r#"<svg viewBox="0 0 {WIDTH} 246" role="img" aria-label="Requests and refusals over time">"#);
    let values: [(&str, &str, Vec<u64>); 2] = [
        ("requests", "a", hours.parts.iter().map(|(_, requests, _)| *requests).collect()),
        ("refused", "b", hours.parts.iter().map(|(_, _, refused)| *refused).collect()),
    ];
    for (top, (name, class, values)) in HOURS_TOP.into_iter().zip(values) {
        let most = values.iter().copied().max().unwrap_or(0);
        let base = top + HOURS_HEIGHT;
        let _ = write!(
            svg,
            r#"<text x="{LEFT}" y="{:.1}">{name}</text><text class="end" x="{:.1}" y="{:.1}">{}</text><line class="grid" x1="{LEFT}" x2="{}" y1="{top}" y2="{top}"/><line class="axis" x1="{LEFT}" x2="{}" y1="{base}" y2="{base}"/>"#,
            top - 8.0,
            LEFT - 8.0,
            top + 4.0,
            count(most),
            WIDTH - RIGHT,
            WIDTH - RIGHT,
        );
        for ((at, requests, refused), value) in hours.parts.iter().zip(values).filter(|(_, value)| *value > 0) {
            // A bar is seen, however small its number is.
            let height = (value as f64 / most as f64 * HOURS_HEIGHT).max(1.5);
            let _ = write!(
                svg,
                r#"<rect class="{class} bar" x="{:.1}" y="{:.1}" width="{:.1}" height="{height:.1}"><title>{}: {}, {} refused ({})</title></rect>"#,
                x(*at),
                base - height,
                (width - 0.6).max(0.8),
                html(&instant(*at)),
                counted(*requests, "request"),
                count(*refused),
                share(*refused, *requests),
            );
        }
    }
    let day = |us: u64| instant(us).get(..16).unwrap_or_default().to_owned();
    let bottom = HOURS_TOP[1] + HOURS_HEIGHT + 20.0;
    let _ = write!(
        svg,
        r#"<text x="{LEFT}" y="{bottom}">{}</text><text class="end" x="{}" y="{bottom}">{}</text></svg>"#,
        day(*start),
        WIDTH - RIGHT,
        day(end)
    );
    svg
}
