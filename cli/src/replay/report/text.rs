//! The report as text for a terminal. All text of the log went through `Shown`.

use std::fmt::{self, Write};

use super::numbers::{count, counted, duration, instant, share};
use super::{CurveReport, PERCENTILES, PolicyReport, Report, WINDOW_NAMES};

/// The notes that every report has.
pub(crate) const NOTES: [&str; 3] = [
    "An estimate: a refused client would have slowed down, tried again, or gone. A log does not say.",
    "Requests that a cache or a CDN answered never reached this log.",
    "Behind one address there may be many people (NAT): its number of user agents hints at that.",
];

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let read = &self.read;
        writeln!(f, "Verdict")?;
        for words in &self.verdict {
            writeln!(f, "  {words}")?;
        }
        writeln!(f, "\nWhat was read")?;
        writeln!(f, "  format     {}", read.format)?;
        writeln!(f, "  lines      {}, of which {} could not be read", count(read.lines), count(read.unreadable))?;
        if read.other > 0 {
            let lines = counted(read.other, "line");
            writeln!(f, "  left out   {lines} of other loggers, or of requests that two programs logged")?;
        }
        if read.files.len() > 1 {
            writeln!(f, "  files      {}, in the order of their times", count(read.files.len() as u64))?;
            for file in read.files.iter().filter(|file| file.left_out() > 0) {
                let reasons = [(file.unreadable, "not read"), (file.late, "out of order"), (file.ahead, "dated ahead")];
                let reasons = reasons.iter().filter(|(lines, _)| *lines > 0);
                let reasons: Vec<String> =
                    reasons.map(|(lines, reason)| format!("{} {reason}", count(*lines))).collect();
                writeln!(f, "    {}: {}, {}", file.name, counted(file.lines, "line"), reasons.join(", "))?;
            }
        }
        writeln!(f, "  requests   {}", count(read.requests))?;
        if read.requests > 0 {
            let span = duration(read.last_us.saturating_sub(read.first_us));
            writeln!(f, "  period     {} to {} UTC ({span})", instant(read.first_us), instant(read.last_us))?;
        }
        let more = if read.has_more_addresses { "more than " } else { "" };
        writeln!(f, "  addresses  {more}{}", count(read.addresses))?;
        let outcomes: Vec<String> =
            read.outcomes.iter().map(|(kind, number)| format!("{kind} {}", count(*number))).collect();
        writeln!(f, "  outcomes   {}", outcomes.join(", "))?;
        if read.is_coarse {
            writeln!(f, "  stamps     whole seconds; the requests of a second are spread evenly over it")?;
        }
        for sample in &read.samples {
            writeln!(f, "  not read   {sample}")?;
        }
        for warning in &self.warnings {
            writeln!(f, "\nWarning: {warning}")?;
        }
        for policy in &self.policies {
            write_policy(f, policy)?;
        }
        writeln!(f, "\nNotes")?;
        for note in NOTES {
            writeln!(f, "  {note}")?;
        }
        Ok(())
    }
}

fn write_policy(f: &mut impl Write, policy: &PolicyReport) -> fmt::Result {
    writeln!(f, "\nPolicy {}: {} ({})", policy.name, policy.quota, policy.mode)?;
    if policy.requests == 0 {
        return writeln!(f, "  It applied to no request.");
    }
    writeln!(f, "  requests        {}", count(policy.requests))?;
    writeln!(f, "  refused         {} ({})", count(policy.refused), share(policy.refused, policy.requests))?;
    let touched = counted(policy.touched, "client");
    writeln!(
        f,
        "  touched         {touched} of {} ({})",
        count(policy.clients),
        share(policy.touched, policy.clients)
    )?;
    writeln!(f, "  their requests  {} ({})", count(policy.of_touched), share(policy.of_touched, policy.requests))?;
    if let Some((refused, touched)) = policy.as_burst {
        writeln!(
            f,
            "  as bursts       {} refused ({}), {} touched, if the requests of each second come at once",
            count(refused),
            share(refused, policy.requests),
            counted(touched, "client")
        )?;
    }
    writeln!(f, "  longest run     {}", counted(policy.longest_run, "refusal"))?;
    match policy.likely_false {
        Some((clients, refused)) => writeln!(
            f,
            "  likely wrong    {} of {} (95% of their other answers 2xx or 3xx, refused in at most 1% of the periods)",
            counted(refused, "refusal"),
            counted(clients, "client")
        )?,
        None => writeln!(f, "  likely wrong    unknown, because the log has no status")?,
    }

    writeln!(f, "\n  Peak use of a client, in requests")?;
    write!(f, "    {:<8}", "within")?;
    PERCENTILES.iter().try_for_each(|(_, name)| write!(f, "{name:>10}"))?;
    writeln!(f)?;
    for (name, row) in WINDOW_NAMES.iter().zip(&policy.peaks) {
        write!(f, "    {name:<8}")?;
        row.iter().try_for_each(|peak| write!(f, "{:>10}", count((*peak).into())))?;
        writeln!(f)?;
    }
    if let Some(row) = &policy.in_flight {
        write!(f, "    {:<8}", "at once")?;
        row.iter().try_for_each(|peak| write!(f, "{:>10}", count((*peak).into())))?;
        writeln!(f)?;
    }

    if !policy.worst.is_empty() {
        writeln!(f, "\n  Refused most")?;
        writeln!(
            f,
            "    {:<28}{:>10}{:>10}{:>8}{:>10}{:>8}{:>12}",
            "client", "requests", "refused", "run", "2xx/3xx", "agents", "neighbours"
        )?;
        for worst in &policy.worst {
            let neighbours = worst.neighbours.map_or("-".to_owned(), count);
            writeln!(
                f,
                "    {:<28}{:>10}{:>10}{:>8}{:>10}{:>8}{neighbours:>12}",
                worst.who,
                count(worst.requests),
                count(worst.refused),
                count(worst.longest_run),
                share(worst.answered_well, worst.answered),
                worst.agents,
            )?;
            for deed in worst.deeds() {
                writeln!(f, "      {deed}")?;
            }
        }
    }

    writeln!(f, "\n  Over time, in parts of {} (UTC)", duration(policy.hours.length_us))?;
    // Parts without refusals say little, and a long log has many.
    let mut with_refusals = policy.hours.parts.iter().filter(|(_, _, refused)| *refused > 0).collect::<Vec<_>>();
    with_refusals.sort_by_key(|(start, _, refused)| (std::cmp::Reverse(*refused), *start));
    for (start, requests, refused) in with_refusals.iter().take(8) {
        let start = instant(*start);
        writeln!(f, "    {start}  {:>9} requests  {:>9} refused", count(*requests), count(*refused))?;
    }
    let others = with_refusals.len().saturating_sub(8) as u64;
    let without = (policy.hours.parts.len() - with_refusals.len()) as u64;
    if others > 0 {
        writeln!(f, "    {} more with refusals", counted(others, "part"))?;
    }
    writeln!(f, "    {} with requests and without refusals", counted(without, "part"))?;

    if let Some(curve) = &policy.curve {
        write_curve(f, "Other limits", curve)?;
    }
    if let Some(curve) = &policy.curve_in_flight {
        write_curve(f, "Limits of requests in flight", curve)?;
    }
    Ok(())
}

fn write_curve(f: &mut impl Write, title: &str, curve: &CurveReport) -> fmt::Result {
    writeln!(f, "\n  {title}")?;
    writeln!(f, "    {:>10}{:>12}{:>12}{:>12}{:>12}", "limit", "touched", "", "refused", "")?;
    for (at, limit) in curve.limits.iter().enumerate() {
        let all = &limit.all;
        let own = if limit.limit == curve.own_limit { "  this quota" } else { "" };
        let knee = if curve.knee == Some(at) { "  knee" } else { "" };
        writeln!(
            f,
            "    {:>10}{:>12}{:>12}{:>12}{:>12}{own}{knee}",
            count(limit.limit),
            count(all.touched),
            share(all.touched, all.clients),
            count(all.refused),
            share(all.refused, all.requests),
        )?;
        // Larger limits would say the same.
        if all.refused == 0 {
            break;
        }
    }
    writeln!(f, "\n  Suggestions")?;
    for advice in &curve.advice {
        writeln!(f, "    {}", advice.words)?;
    }
    if let Some(rule) = &curve.rule {
        writeln!(f, "    {}\n", rule.words())?;
        for line in rule.text.lines() {
            writeln!(f, "      {line}")?;
        }
    }
    Ok(())
}
