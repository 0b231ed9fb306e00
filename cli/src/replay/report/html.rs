//! The report as one HTML file, which loads nothing.
//!
//! Every text goes through `html`. The only script moves the slider's line; it reads numbers and texts from an
//! attribute and never makes markup of them.

use std::fmt::Write as _;

use super::super::curve::Point;
use super::advice::Advice;
use super::chart;
use super::escape::html;
use super::numbers::{count, counted, duration, instant, share};
use super::text::NOTES;
use super::{CurveReport, PERCENTILES, PolicyReport, Report, WINDOW_NAMES};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("slider.js");

impl Report {
    /// Returns the HTML file.
    pub(crate) fn html(&self) -> String {
        let mut page = String::new();
        let _ = write!(
            page,
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta http-equiv=\"Content-Security-Policy\" \
             content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\
             <title>Replay of an access log</title><style>{STYLE}</style></head><body><main>\
             <h1>Replay of an access log</h1>"
        );
        page.push_str("<div class=\"verdict\">");
        for words in &self.verdict {
            let _ = write!(page, "<p>{}</p>", html(words));
        }
        page.push_str("</div>");
        self.read_html(&mut page);
        for policy in &self.policies {
            policy_html(&mut page, policy);
        }
        page.push_str("<section><h2>Notes</h2><ul>");
        for note in NOTES {
            let _ = write!(page, "<li>{}</li>", html(note));
        }
        let _ = writeln!(page, "</ul></section></main><script>{SCRIPT}</script></body></html>");
        page
    }

    fn read_html(&self, page: &mut String) {
        let read = &self.read;
        if read.requests > 0 {
            let _ = write!(
                page,
                "<p class=\"lead\">{} to {} UTC, {}</p>",
                instant(read.first_us),
                instant(read.last_us),
                duration(read.last_us.saturating_sub(read.first_us))
            );
        }
        let more = if read.has_more_addresses { "more than " } else { "" };
        tiles(
            page,
            &[
                ("requests", count(read.requests), String::new()),
                ("addresses", format!("{more}{}", count(read.addresses)), String::new()),
                ("lines", count(read.lines), format!("read as {}", read.format)),
                ("not read", count(read.unreadable), share(read.unreadable, read.lines)),
                ("no requests, or twice", count(read.other), share(read.other, read.lines)),
            ],
        );
        if !self.warnings.is_empty() {
            page.push_str("<ul class=\"warnings\">");
            for warning in &self.warnings {
                let _ = write!(page, "<li><strong>Warning:</strong> {}</li>", html(warning));
            }
            page.push_str("</ul>");
        }
        if read.files.len() > 1 {
            page.push_str("<details><summary>Files, in the order of their times</summary>");
            let head =
                ["file", "lines", "requests", "not read", "out of order", "dated ahead", "first (UTC)", "last (UTC)"];
            table(
                page,
                &head,
                read.files.iter().map(|file| {
                    let time =
                        |time: fn((u64, u64)) -> u64| file.span_us.map_or("-".to_owned(), |span| instant(time(span)));
                    vec![
                        file.name.0.clone(),
                        count(file.lines),
                        count(file.requests),
                        count(file.unreadable),
                        count(file.late),
                        count(file.ahead),
                        time(|(first, _)| first),
                        time(|(_, last)| last),
                    ]
                }),
            );
            page.push_str("</details>");
        }
        if !read.samples.is_empty() {
            page.push_str("<details><summary>Lines that could not be read</summary>");
            for sample in &read.samples {
                let _ = write!(page, "<pre>{}</pre>", sample.html());
            }
            page.push_str("</details>");
        }
        let outcomes: Vec<String> =
            read.outcomes.iter().map(|(kind, number)| format!("{kind} {}", count(*number))).collect();
        let _ = write!(page, "<p>Outcomes of the layer: {}.", html(&outcomes.join(", ")));
        if read.is_coarse {
            page.push_str(" The log writes whole seconds; the requests of a second are spread evenly over it.");
        }
        page.push_str("</p>");
    }
}

/// Numbers with a name and a remark.
fn tiles(page: &mut String, tiles: &[(&str, String, String)]) {
    page.push_str("<dl class=\"tiles\">");
    for (name, number, remark) in tiles {
        let _ = write!(
            page,
            "<div><dt>{}</dt><dd>{}</dd><dd class=\"remark\">{}</dd></div>",
            html(name),
            html(number),
            html(remark)
        );
    }
    page.push_str("</dl>");
}

/// A table. The first column is text, the others are numbers. On a narrow page, a table with words becomes a list.
fn table(page: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    page.push_str("<div class=\"wide\"><table class=\"words\"><thead><tr>");
    rows_of(page, head, rows);
}

/// A table of short numbers, which fits on a narrow page.
fn number_table(page: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    page.push_str("<div class=\"wide\"><table><thead><tr>");
    rows_of(page, head, rows);
}

/// A table with a row of lines below each row.
fn table_of_deeds(page: &mut String, head: &[&str], rows: impl Iterator<Item = (Vec<String>, Vec<String>)>) {
    page.push_str("<div class=\"wide\"><table class=\"words deeds\"><thead><tr>");
    all_rows(page, head, rows);
}

fn rows_of(page: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    all_rows(page, head, rows.map(|row| (row, Vec::new())));
}

fn all_rows(page: &mut String, head: &[&str], rows: impl Iterator<Item = (Vec<String>, Vec<String>)>) {
    for name in head {
        let _ = write!(page, "<th scope=\"col\">{}</th>", html(name));
    }
    page.push_str("</tr></thead><tbody>");
    for (row, lines) in rows {
        page.push_str("<tr>");
        for (at, (cell, name)) in row.iter().zip(head).enumerate() {
            let _ = match at {
                0 => write!(page, "<th scope=\"row\">{}</th>", html(cell)),
                _ => write!(page, "<td data-of=\"{}\">{}</td>", html(name), html(cell)),
            };
        }
        page.push_str("</tr>");
        if !lines.is_empty() {
            let lines: Vec<String> = lines.iter().map(|line| html(line)).collect();
            let _ = write!(page, "<tr class=\"did\"><td colspan=\"{}\">{}</td></tr>", head.len(), lines.join("<br>"));
        }
    }
    page.push_str("</tbody></table></div>");
}

fn policy_html(page: &mut String, policy: &PolicyReport) {
    let _ = write!(
        page,
        "<section><h2>{} <small>{} · {}</small></h2>",
        policy.name.html(),
        html(&policy.quota),
        policy.mode
    );
    if policy.requests == 0 {
        page.push_str("<p>It applied to no request.</p></section>");
        return;
    }
    let burst = policy.as_burst.map(|(refused, touched)| {
        (
            "as bursts",
            count(refused),
            format!("refused, {} touched, if a second's requests come at once", counted(touched, "client")),
        )
    });
    let likely = match policy.likely_false {
        Some((clients, refused)) => {
            ("likely wrong", count(refused), format!("refusals of {}", counted(clients, "client")))
        }
        None => ("likely wrong", "unknown".to_owned(), "the log has no status".to_owned()),
    };
    let mut numbers = vec![
        (
            "refused",
            count(policy.refused),
            format!("{} of {}", share(policy.refused, policy.requests), counted(policy.requests, "request")),
        ),
        (
            "clients touched",
            count(policy.touched),
            format!("{} of {}", share(policy.touched, policy.clients), count(policy.clients)),
        ),
        ("their requests", count(policy.of_touched), share(policy.of_touched, policy.requests)),
        ("longest run", count(policy.longest_run), "refusals in a row".to_owned()),
        likely,
    ];
    numbers.extend(burst);
    tiles(page, &numbers);
    page.push_str(
        "<p class=\"remark\">Likely wrong: at least 95% of the client's other answers were 2xx or 3xx, and it was refused in at \
         most 1% of the quota's periods.</p>",
    );
    if let Some(curve) = &policy.curve {
        curve_html(page, "Other limits", curve);
    }
    if let Some(curve) = &policy.curve_in_flight {
        curve_html(page, "Limits of requests in flight", curve);
    }
    let _ = write!(
        page,
        "<h3>Over time</h3><p class=\"remark\">In parts of {}, UTC. Each row has its own scale.</p><figure>{}</figure>",
        duration(policy.hours.length_us),
        chart::hours(&policy.hours)
    );
    page.push_str(
        "<h3>Peak use of a client</h3><p class=\"remark\">The most requests within a second, minute, hour or day, and the most \
         that were in flight at once, if the log has durations.</p>",
    );
    let head: Vec<&str> = ["within"].into_iter().chain(PERCENTILES.map(|(_, name)| name)).collect();
    let rows =
        WINDOW_NAMES.iter().copied().zip(&policy.peaks).chain(policy.in_flight.iter().map(|row| ("at once", row)));
    number_table(
        page,
        &head,
        rows.map(|(name, row)| {
            [name.to_owned()].into_iter().chain(row.iter().map(|peak| count((*peak).into()))).collect()
        }),
    );
    if !policy.worst.is_empty() {
        page.push_str(
            "<h3>Refused most</h3><p class=\"remark\">Below each client: the first paths at which it was refused and how often, the \
             user agent of the first refusal, and the time from the first to the last (UTC).</p>",
        );
        let head = ["client", "requests", "refused", "longest run", "2xx/3xx", "user agents", "addresses nearby"];
        let rows = policy.worst.iter().map(|worst| {
            let cells = vec![
                worst.who.0.clone(),
                count(worst.requests),
                count(worst.refused),
                count(worst.longest_run),
                share(worst.answered_well, worst.answered),
                worst.agents.to_string(),
                worst.neighbours.map_or("-".to_owned(), count),
            ];
            (cells, worst.deeds())
        });
        table_of_deeds(page, &head, rows);
    }
    page.push_str("</section>");
}

fn curve_html(page: &mut String, title: &str, curve: &CurveReport) {
    let (svg, places) = chart::curve(curve, curve.own_limit);
    let points = curve.limits.iter().zip(places).map(|(limit, x)| {
        let all = &limit.all;
        let words = format!(
            "{}: touches {} ({}), refuses {} ({})",
            limit.quota,
            counted(all.touched, "client"),
            share(all.touched, all.clients),
            counted(all.refused, "request"),
            share(all.refused, all.requests)
        );
        serde_json::json!([x, words])
    });
    let points: serde_json::Value = points.collect();
    let begin = curve.limits.iter().position(|limit| limit.limit == curve.own_limit).unwrap_or(0);
    let _ = write!(
        page,
        "<h3>{title}</h3><p class=\"remark\">Both shares by their logarithms: each line up is ten times more.</p>\
         <figure class=\"curve\" data-points=\"{}\">{svg}<label>limit <input type=\"range\" min=\"0\" max=\"{}\" value=\"{begin}\" autocomplete=\"off\">\
         </label><output aria-live=\"polite\"></output></figure>",
        html(&points.to_string()),
        curve.limits.len().saturating_sub(1),
    );
    page.push_str("<details><summary>All limits as a table</summary>");
    table(
        page,
        &[
            "quota",
            "clients touched",
            "of all",
            "requests refused",
            "of all",
            "first half touched",
            "second half touched",
        ],
        curve.limits.iter().enumerate().map(|(at, limit)| {
            let own = if limit.limit == curve.own_limit { " (this quota)" } else { "" };
            let knee = if curve.knee == Some(at) { " (knee)" } else { "" };
            vec![
                format!("{}{own}{knee}", limit.quota),
                count(limit.all.touched),
                share(limit.all.touched, limit.all.clients),
                count(limit.all.refused),
                share(limit.all.refused, limit.all.requests),
                share(limit.first.touched, limit.first.clients),
                share(limit.second.touched, limit.second.clients),
            ]
        }),
    );
    page.push_str(
        "</details><h3>Suggestions</h3><p class=\"remark\">The smallest limits that meet a target in the first half of the log, and \
         how they do in the second half.</p>",
    );
    let touched = |point: &Point| format!("{} ({})", count(point.touched), share(point.touched, point.clients));
    let of_rule = |advice: &Advice| curve.rule.as_ref().is_some_and(|rule| rule.target == advice.target);
    let rows = curve.advice.iter().map(|advice| match advice.limit.and_then(|at| curve.limits.get(at)) {
        Some(limit) => {
            let all = &limit.all;
            let worst = counted(limit.worst.len() as u64, "client");
            let from = format!("{} from {worst}", share(limit.worst.iter().sum(), all.refused));
            let mark = if of_rule(advice) { " (the rule below)" } else { "" };
            vec![
                format!("{}{mark}", advice.target),
                limit.quota.clone(),
                touched(&limit.first),
                touched(&limit.second),
                format!("{} ({})", count(all.refused), share(all.refused, all.requests)),
                if all.refused > 0 { from } else { "-".to_owned() },
            ]
        }
        None => {
            vec![advice.target.to_owned(), "none of these".to_owned(), "-".into(), "-".into(), "-".into(), "-".into()]
        }
    });
    let head = ["touch", "quota", "first half touched", "second half touched", "requests refused", "most of them"];
    table(page, &head, rows);
    if let Some(rule) = &curve.rule {
        let _ = write!(page, "<p>{}</p><pre>{}</pre>", html(&rule.words()), html(&rule.text));
    }
}
