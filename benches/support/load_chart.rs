//! Draws what was decided over what was offered, a chart for each case.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::Point;

const WIDTH: f64 = 345.0;
const HEIGHT: f64 = 230.0;
/// The room that the lines have, within a chart.
const PLOT: (f64, f64) = (250.0, 130.0);
const LEFT: f64 = 50.0;
const TOP: f64 = 40.0;
const COLUMNS: usize = 2;

/// The cases that are drawn, in this order, and their titles.
const TITLES: [(&str, &str); 6] = [
    ("redis-5ms", "Redis, 5 ms away"),
    ("redis-40ms", "Redis, 40 ms away, with a deadline of 100 ms"),
    ("redis-neighbours", "Redis, busy with scripts of other clients"),
    ("redis-slow", "Redis, which works 0.3 ms for each key"),
    ("postgres-3ms", "PostgreSQL, a flush takes 3 ms"),
    ("postgres-8ms", "PostgreSQL, a flush takes 8 ms"),
];

/// How a client's line is drawn, and its name in the legend. Lines that lie upon each other can all be seen.
fn style(client: &str) -> (&'static str, &'static str) {
    match client {
        "tower-ratelimit, redis-rs" => {
            ("stroke=\"#2e9e6b\" stroke-width=\"2\" stroke-dasharray=\"5 4\"", "this crate, redis-rs")
        }
        "tower-ratelimit, fred" => ("stroke=\"#1f77b4\" stroke-width=\"2\"", "this crate, fred"),
        "tower-ratelimit" => ("stroke=\"#1f77b4\" stroke-width=\"2\"", "this crate"),
        "by hand" => ("stroke=\"#e8a79f\" stroke-width=\"6\"", "by hand, one connection"),
        "by hand, 16 connections" => ("stroke=\"#bbbbbb\" stroke-width=\"6\"", "by hand, 16 connections"),
        "by hand, 20" => ("stroke=\"#bbbbbb\" stroke-width=\"6\"", "by hand, 20 connections"),
        _ => ("stroke=\"#e8a79f\" stroke-width=\"6\"", "by hand, as many"),
    }
}

/// Returns the charts as an SVG.
pub(crate) fn draw(points: &[Point]) -> String {
    let is_measured = |(case, _): &(&str, &str)| points.iter().any(|point| point.case == *case);
    let cases: Vec<(&str, &str)> = TITLES.into_iter().filter(is_measured).collect();
    let rows = cases.len().div_ceil(COLUMNS);
    let (width, height) = (WIDTH * COLUMNS as f64, HEIGHT * rows as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" role=\"img\" \
         font-family=\"sans-serif\" font-size=\"11\" fill=\"currentColor\">\n<title>Checks decided within the deadline, \
         over checks offered, in thousands a second</title>\n"
    );
    for (at, (case, title)) in cases.into_iter().enumerate() {
        let (x, y) = (WIDTH * (at % COLUMNS) as f64, HEIGHT * (at / COLUMNS) as f64);
        let points: Vec<&Point> = points.iter().filter(|point| point.case == case).collect();
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">\n{}</g>", chart(title, &points));
    }
    svg + "</svg>\n"
}

fn chart(title: &str, points: &[&Point]) -> String {
    let (wide, high) = PLOT;
    let most_offered = points.iter().map(|point| point.offered).fold(1.0, f64::max);
    let most_decided = points.iter().map(|point| point.decided.max(point.capacity)).fold(1.0, f64::max);
    let place = |offered: f64, decided: f64| {
        (LEFT + wide * offered / most_offered, TOP + high * (1.0 - decided / most_decided))
    };
    let ((left, bottom), (right, _)) = (place(0.0, 0.0), place(most_offered, 0.0));
    let mut svg = format!("<text x=\"{left}\" y=\"16\" font-weight=\"bold\">{title}</text>\n");
    let _ = writeln!(svg, "<path d=\"M{left} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"currentColor\"/>");
    // The best that is possible: all, up to the capacity of the hand-written client.
    let capacity = points.first().map_or(0.0, |point| point.capacity);
    let ((x, y), (end, _)) = (place(capacity, capacity), place(most_offered, 0.0));
    let _ = writeln!(
        svg,
        "<path d=\"M{left} {bottom}L{x:.1} {y:.1}H{end}\" fill=\"none\" stroke=\"currentColor\" stroke-opacity=\".35\" stroke-dasharray=\"3 3\"/>"
    );
    let label = |number: f64| if number < 1_000.0 { format!("{number:.0}") } else { format!("{:.1}k", number / 1e3) };
    for (x, y, anchor, text) in [
        (left - 4.0, TOP + 8.0, "end", label(most_decided)),
        (left - 4.0, bottom, "end", "0".to_owned()),
        (right, bottom + 14.0, "end", format!("{} offered a second", label(most_offered))),
    ] {
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{text}</text>");
    }
    let mut lines = BTreeMap::<&str, Vec<(f64, f64)>>::new();
    for point in points {
        lines.entry(&point.client).or_default().push((point.offered, point.decided));
    }
    for (at, (client, mut line)) in lines.into_iter().enumerate() {
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        let path: Vec<String> = line
            .into_iter()
            .map(|(offered, decided)| place(offered, decided))
            .map(|(x, y)| format!("{x:.1} {y:.1}"))
            .collect();
        let (style, name) = style(client);
        let _ = writeln!(svg, "<path d=\"M{}\" fill=\"none\" {style}/>", path.join("L"));
        let (x, y) = (left + 160.0 * (at % 2) as f64 - 30.0, bottom + 32.0 + 14.0 * (at / 2) as f64);
        let _ = writeln!(svg, "<path d=\"M{x} {}h16\" {style}/>", y - 4.0);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{y}\">{name}</text>", x + 20.0);
    }
    svg
}
