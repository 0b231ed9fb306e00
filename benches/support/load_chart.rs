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

/// The colour of a client: ours stand out.
fn colour(client: &str) -> &'static str {
    match client {
        "tower-ratelimit, redis-rs" => "#2e9e6b",
        client if client.starts_with("tower-ratelimit") => "#1f77b4",
        "by hand" => "#c0392b",
        client if client.ends_with(", 16 connections") || client == "by hand, 20" => "#999999",
        _ => "#c0392b",
    }
}

/// Returns the charts as an SVG.
pub(crate) fn draw(points: &[Point]) -> String {
    let mut cases: Vec<&str> = Vec::new();
    for point in points {
        if !cases.contains(&&*point.case) {
            cases.push(&point.case);
        }
    }
    let rows = cases.len().div_ceil(COLUMNS);
    let (width, height) = (WIDTH * COLUMNS as f64, HEIGHT * rows as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" role=\"img\" \
         font-family=\"sans-serif\" font-size=\"11\" fill=\"currentColor\">\n<title>Checks decided within the deadline, \
         over checks offered, in thousands a second</title>\n"
    );
    for (at, case) in cases.into_iter().enumerate() {
        let (x, y) = (WIDTH * (at % COLUMNS) as f64, HEIGHT * (at / COLUMNS) as f64);
        let points: Vec<&Point> = points.iter().filter(|point| point.case == case).collect();
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">\n{}</g>", chart(case, &points));
    }
    svg + "</svg>\n"
}

fn chart(case: &str, points: &[&Point]) -> String {
    let (wide, high) = PLOT;
    let most_offered = points.iter().map(|point| point.offered).fold(1.0, f64::max);
    let most_decided = points.iter().map(|point| point.decided.max(point.capacity)).fold(1.0, f64::max);
    let place = |offered: f64, decided: f64| {
        (LEFT + wide * offered / most_offered, TOP + high * (1.0 - decided / most_decided))
    };
    let ((left, bottom), (right, _)) = (place(0.0, 0.0), place(most_offered, 0.0));
    let mut svg = format!("<text x=\"{left}\" y=\"16\" font-weight=\"bold\">{case}</text>\n");
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
        let colour = colour(client);
        let _ = writeln!(svg, "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>", path.join("L"));
        let (x, y) = (left + 150.0 * (at % 2) as f64, bottom + 32.0 + 14.0 * (at / 2) as f64);
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"{}\" width=\"12\" height=\"3\" fill=\"{colour}\"/>", y - 5.0);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"{y}\">{client}</text>", x + 16.0);
    }
    svg
}
