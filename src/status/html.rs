//! The page for people: one file without scripts.

use std::fmt::{self, Display, Write as _};
use std::time::Duration;

#[cfg(feature = "fleet")]
use super::processes::ProcessesView;
use super::request::{EXTENSION, ExplainForm};
#[cfg(feature = "fleet")]
use super::settings;
use super::sums::Sums;
use super::text::{About, Count, HtmlText, PerSecond, Percent, Roughly, bound, hash, millis};
use super::view::{PageView, PolicyRow};
use super::{chart, keys, states};
use crate::base::time::{Timestamp, Utc};
use crate::event::StoreErrorKind;
use crate::limiter::Occupancy;
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::rules_in_force::RulesInForce;
use crate::stats::{EventCounts, NEWEST, PolicySnapshot, StatsSnapshot};
use crate::store_load::StoreLoad;

const STYLE: &str = include_str!("style.css");

/// The content security policy of the page. The policy allows only the page's own style, which is
/// identified by its hash.
pub(super) const CONTENT_POLICY: &str = "default-src 'none'; style-src 'sha256-pWvUgrYvJUi6P4Rl4JvfGVW53HQtRHaQDxkNK9DKn8A='; \
                                         img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// The hatching of requests over a limit, which all charts use.
const HATCH: &str = "<svg width=\"0\" height=\"0\" class=\"defs\" aria-hidden=\"true\"><defs><pattern id=\"hatch\" \
                     width=\"4\" height=\"4\" patternUnits=\"userSpaceOnUse\"><rect width=\"4\" height=\"4\"/>\
                     <path d=\"M0 4L4 0\"/></pattern></defs></svg>";

/// The maximum number of layers that get their own tiles, and the maximum number of layers that a
/// policy's row names.
const LAYERS_MAX: usize = 4;

/// If there are at most this many policies, none is folded away, not even policies without
/// requests.
const ROWS_OPEN: usize = 10;

/// Returns how long the statistics have counted, at least one second and at most `most`.
fn span(stats: &StatsSnapshot, most: Duration) -> Duration {
    stats.taken_at().saturating_since(stats.started_at()).min(most).max(Duration::from_secs(1))
}

/// Writes the page. With `refresh` the page reloads itself.
pub(super) fn render(view: &PageView, refresh: bool) -> String {
    let mut html = String::with_capacity(32_768);
    let _ = write(&mut html, view, refresh); // writing into a String never fails
    html
}

fn write(html: &mut String, view: &PageView, refresh: bool) -> fmt::Result {
    html.push_str("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>Rate limits</title>");
    html.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">");
    html.push_str("<link rel=\"icon\" href=\"data:,\">");
    if refresh {
        html.push_str("<meta http-equiv=\"refresh\" content=\"5\">");
    }
    write!(html, "<style>{STYLE}</style></head><body>{HATCH}<main>")?;
    let counting = view.stats.taken_at().saturating_since(view.stats.started_at());
    write!(html, "<header><h1>Rate limits</h1><span class=\"soft\">counting for {}</span>", About(counting))?;
    if let Some(operator) = &view.operator {
        write!(html, "<span class=\"soft\">you act as {}</span>", HtmlText(operator))?;
    }
    html.push_str(if refresh {
        "<a href=\"?\">stop refreshing</a></header>"
    } else {
        "<a href=\"?refresh\">refresh every 5 s</a></header>"
    });
    if let Some(wrong) = &view.wrong {
        write!(html, "<pre class=\"bad\"><b>Not done.</b>\n{}</pre>", HtmlText(wrong))?;
    }
    if let Some(warning) = &view.warning {
        write!(html, "<pre class=\"bad\"><b>Done, with a warning.</b>\n{}</pre>", HtmlText(warning))?;
    }
    if let Some((form, explained)) = &view.explained {
        match (&form.fingerprint, &form.name) {
            (Some(key), Some(name)) => write!(html, "<h2>key {} ({})</h2>", HtmlText(key), HtmlText(name))?,
            (Some(key), None) => write!(html, "<h2>key {}</h2>", HtmlText(key))?,
            (None, _) => write!(html, "<h2>{} {}</h2>", HtmlText(form.method()), HtmlText(form.uri()))?,
        }
        match explained {
            Ok(explained) => states::explained(html, view, form, explained)?,
            Err(wrong) => write!(html, "<pre class=\"bad\"><b>Nothing was explained.</b>\n{}</pre>", HtmlText(wrong))?,
        }
    }
    states::done(html, view)?;
    problems(html, view)?;
    tiles(html, view)?;
    policies(html, view)?;
    keys_of_layers(html, view)?;
    #[cfg(feature = "fleet")]
    match &view.processes {
        Ok(processes) => processes.iter().try_for_each(|processes| processes.write_html(html))?,
        Err(error) => {
            let read_at = view.fleet.as_ref().and_then(|fleet| fleet.read_at);
            ProcessesView::write_unread(html, error, read_at)?;
        }
    }
    keys::most_limited(html, view)?;
    keys::most_used(html, view)?;
    keys::most_held(html, view)?;
    keys::recent(html, view)?;
    #[cfg(feature = "fleet")]
    if let Some(fleet) = &view.fleet {
        settings::write(html, fleet, view.setting.as_ref(), view.operator.is_some())?;
    }
    switches(html, view)?;
    explain(html, view)?;
    html.push_str("</main></body></html>");
    Ok(())
}

/// Problems come first.
fn problems(html: &mut String, view: &PageView) -> fmt::Result {
    for layer in &view.layers {
        if let Some(warning) = &layer.warning {
            write!(
                html,
                "<pre class=\"bad\"><b>{}</b> {}</pre>",
                HtmlText(&layer.title),
                HtmlText(&warning.to_string())
            )?;
        }
    }
    if let Some(error) = view.rules.as_ref().and_then(|rules| rules.error.as_ref()) {
        write!(
            html,
            "<pre class=\"bad\"><b>Rules were refused, and others are in force.</b>\n{}</pre>",
            HtmlText(error)
        )?;
    }
    #[cfg(feature = "fleet")]
    if let Some(error) = view.fleet.as_ref().and_then(|fleet| fleet.error.as_ref()) {
        let said = match view.fleet.as_ref().and_then(|fleet| fleet.read_at) {
            Some(_) => "The operators' settings cannot be read. The last known settings stay in force.",
            None => "The operators' settings cannot be read. None is in force in this process yet.",
        };
        write!(html, "<pre class=\"bad\"><b>{said}</b>\n{}</pre>", HtmlText(error))?;
    }
    let events = view.stats.events();
    for (server, error) in events.servers_down() {
        write!(
            html,
            "<pre class=\"bad\"><b>{}</b> does not answer, or not steadily.\n{}</pre>",
            HtmlText(server),
            HtmlText(error)
        )?;
    }
    store_errors(html, view.stats.taken_at(), events)
}

/// Writes why checks of a store fail, the most frequent recent reason first. If checks failed recently with some of the
/// errors, the other errors are left out. While a server is down, checks fail at once, and no error is reported for
/// them. The page shows the error of the server instead.
fn store_errors(html: &mut String, now: Timestamp, events: &EventCounts) -> fmt::Result {
    let failed: u64 = events.newest_errors().map(|(_, count)| count).sum();
    let lately = |kind: StoreErrorKind| events.newest_errors().find(|(other, _)| *other == kind).map_or(0, |it| it.1);
    let is_shown = |kind| if failed == 0 { !events.has_recovered() } else { lately(kind) > 0 };
    let mut errors = events.last_store_errors().filter(|(kind, ..)| is_shown(*kind)).peekable();
    if failed == 0 && errors.peek().is_none() {
        return Ok(());
    }
    let (all, seconds) = (failed.saturating_add(events.newest_decided()), NEWEST.as_secs());
    match failed {
        0 => html.push_str("<pre class=\"bad\"><b>Checks of the store failed a moment ago.</b>"),
        _ => write!(
            html,
            "<pre class=\"bad\"><b>{} of {} checks of the store failed in the last {seconds} s.{}</b>",
            Count(failed),
            Count(all),
            if events.has_recovered() { " They succeed again." } else { "" }
        )?,
    }
    for (kind, error, at) in errors {
        let ago = About(now.saturating_since(at));
        write!(html, "\n<b>{} {kind}</b>, noted {ago} ago: {}", Count(lately(kind)), HtmlText(error))?;
    }
    let is_noted = |kind| events.last_store_errors().any(|(noted, ..)| noted == kind);
    for (kind, count) in events.newest_errors().filter(|(kind, count)| *count > 0 && !is_noted(*kind)) {
        write!(html, "\n<b>{} {kind}</b>", Count(count))?;
    }
    html.push_str("</pre>");
    Ok(())
}

fn tile(html: &mut String, value: impl Display, label: impl Display, is_bad: bool) -> fmt::Result {
    let class = if is_bad { "tile bad" } else { "tile" };
    write!(html, "<div class=\"{class}\"><b>{value}</b><span>{label}</span></div>")
}

fn tiles(html: &mut String, view: &PageView) -> fmt::Result {
    let (stats, events) = (&view.stats, view.stats.events());
    let requests: u64 = OutcomeKind::ALL.iter().map(|kind| stats.requests(*kind)).sum();
    let refused: u64 = OutcomeKind::ALL.iter().filter(|kind| !kind.passed()).map(|kind| stats.requests(*kind)).sum();
    html.push_str("<div class=\"tiles\">");
    tile(html, Count(requests), "requests", false)?;
    tile(html, Count(refused), "refused", false)?;
    let occupied = occupied(view);
    let (shown, of_all) = match occupied.len() {
        ..=LAYERS_MAX => (occupied.as_slice(), String::new()),
        // The other layers are in a table below the policies.
        layers => {
            let fullest = occupied.iter().max_by_key(|(_, occupancy)| per_mille_full(*occupancy));
            (fullest.map_or(&[][..], std::slice::from_ref), format!("; the fullest of {layers} layers"))
        }
    };
    for (title, occupancy) in shown {
        let most = Count(occupancy.capacity() as u64);
        let label =
            format!("keys of {} in memory, in {most} places, about 2.5 for each of max_keys{of_all}", HtmlText(title));
        tile(html, Count(occupancy.keys() as u64), label, occupancy.keys() >= occupancy.capacity())?;
    }
    if events.evicted() + events.full() > 0 {
        let label =
            format!("keys forgotten, {} with no allowance left; {} denied", events.evicted_throttled(), events.full());
        tile(html, Count(events.evicted()), label, true)?;
    }
    let errors: u64 = events.errors().map(|(_, count)| count).sum();
    if events.checks().count() + errors > 0 {
        let checks = events.checks();
        let label = format!(
            "half of {} checks of the store since the start took this time; 99 % took {}",
            Count(checks.count()),
            bound(checks, 99)
        );
        tile(html, bound(checks, 50), label, false)?;
        let kinds: Vec<String> =
            events.errors().filter(|(_, count)| *count > 0).map(|(kind, count)| format!("{count} {kind}")).collect();
        tile(html, Count(errors), format!("checks failed {}", kinds.join(", ")), errors > 0)?;
        tile(html, Count(events.local_answers()), "answered without the store", false)?;
    }
    if let Some(load) = stats.store_load() {
        store_load(html, load)?;
    }
    if events.scripts_forgotten() > 0 {
        let ago = About(stats.taken_at().saturating_since(events.scripts_forgotten_at()));
        let label = format!(
            "times a server of Redis was restarted, replaced, or had its scripts flushed, the last time {ago} ago: counts \
             may be lost"
        );
        tile(html, Count(events.scripts_forgotten()), label, true)?;
    }
    let lost: u64 = events.corrections_lost().map(|(_, count)| count).sum();
    if lost > 0 {
        tile(html, Count(lost), "corrections lost: refunds and settlements that did not reach the store", true)?;
    }
    if events.fallbacks() > 0 {
        tile(html, Count(events.fallbacks()), "answered by the fallback", true)?;
    }
    for kind in [OutcomeKind::FailedOpen, OutcomeKind::FailedClosed] {
        if stats.requests(kind) > 0 {
            let what = if kind.passed() { "passed" } else { "refused" };
            let (lately, seconds) = (stats.newest_requests(kind), NEWEST.as_secs());
            let label = format!("{what} because the limiter failed, {} of them in the last {seconds} s", Count(lately));
            tile(html, Count(stats.requests(kind)), label, lately > 0)?;
        }
    }
    if events.waiting() > 0 {
        tile(html, Count(events.waiting()), "waiting for their departure, or in line", false)?;
    }
    let held = stats.policies().iter().map(PolicySnapshot::held).fold(0, u64::saturating_add);
    if held > 0 {
        tile(html, Count(held), "places held by requests in flight", false)?;
    }
    if let Some(rules) = &view.rules {
        let RulesInForce { version, loaded_at, .. } = rules.in_force;
        let refused = if rules.error.is_some() { "; other rules were refused" } else { "" };
        let label = format!("rules in force since {}, version {version}{refused}", Utc(loaded_at));
        tile(html, hash(rules.in_force.hash), label, rules.error.is_some())?;
    }
    #[cfg(feature = "fleet")]
    if let Some(fleet) = &view.fleet {
        let label = match fleet.revision {
            0 => "nothing is set for all processes yet".to_owned(),
            revision => format!("set for all processes, revision {revision} since {}", Utc(fleet.since)),
        };
        tile(html, hash(fleet.hash), label, fleet.error.is_some())?;
    }
    #[cfg(feature = "fleet")]
    if let Some(at) = view.settings_restored_at() {
        let label = format!(
            "the store had lost the settings for all processes, and a process wrote them back at {}. If the store was \
             emptied, it has also lost the counts of requests",
            Utc(at)
        );
        tile(html, "restored", label, true)?;
    }
    html.push_str("</div>");
    Ok(())
}

/// Writes how busy the store is. The load is shown as a problem if a call, or the wait for a call, takes more than half
/// of the deadline.
fn store_load(html: &mut String, load: &StoreLoad) -> fmt::Result {
    let is_slow = load.per_mille_of_deadline() > Some(500);
    if let Some(time) = load.call_time {
        let of = load.deadline.map(|deadline| format!(", of {} until the deadline", millis(deadline)));
        let quickest = load.quickest_call.map(|quickest| format!("; the quickest lately took {}", millis(quickest)));
        let label = format!(
            "for a call to the store, on average{}{}",
            of.unwrap_or_default(),
            quickest.unwrap_or_else(|| "; none was decided lately".to_owned())
        );
        tile(html, millis(time), label, is_slow)?;
    }
    let label = format!("checks wait for the store, the oldest unsent one for {}", millis(load.oldest_wait));
    tile(html, Count(load.waiting as u64), label, is_slow)?;
    tile(html, Count(load.calls_in_flight as u64), "calls to the store in flight", false)?;
    match load.connections {
        0 => Ok(()),
        connections => tile(html, Count(connections), "connections made to servers of Redis so far", false),
    }
}

/// Returns the layers whose limiters are in memory.
fn occupied(view: &PageView) -> Vec<(&str, Occupancy)> {
    view.layers.iter().filter_map(|layer| Some((layer.title.as_str(), layer.occupancy?))).collect()
}

fn per_mille_full(occupancy: Occupancy) -> u128 {
    occupancy.keys() as u128 * 1_000 / occupancy.capacity().max(1) as u128
}

/// Lists the numbers of keys if there are too many layers for tiles.
fn keys_of_layers(html: &mut String, view: &PageView) -> fmt::Result {
    let occupied = occupied(view);
    if occupied.len() <= LAYERS_MAX {
        return Ok(());
    }
    write!(
        html,
        "<details><summary>Keys in memory, of {} layers</summary><table><thead><tr><th>layer</th><th class=\"num\">keys</th>\
         <th class=\"num\">places</th></tr></thead><tbody>",
        occupied.len()
    )?;
    for (title, occupancy) in occupied {
        write!(
            html,
            "<tr><td class=\"name\">{}</td><td class=\"num\" data-of=\"keys\">{}</td><td class=\"num\" data-of=\"places\">{}</td></tr>",
            HtmlText(title),
            Count(occupancy.keys() as u64),
            Count(occupancy.capacity() as u64)
        )?;
    }
    html.push_str("</tbody></table></details>");
    Ok(())
}

fn policies(html: &mut String, view: &PageView) -> fmt::Result {
    html.push_str("<h2>Policies</h2>");
    if view.rows.is_empty() {
        html.push_str("<p class=\"soft\">No request has been decided yet.</p>");
        return Ok(());
    }
    html.push_str(
        "<p class=\"soft key\">Requests <span><i class=\"a\"></i>within the limit</span> \
         <span><i class=\"b\"></i>near it</span> \
         <span><i class=\"c\"></i>over it</span></p>",
    );
    let is_idle = |row: &&PolicyRow| Sums::of(row.hour()).all() == 0;
    let (idle, busy): (Vec<&PolicyRow>, Vec<&PolicyRow>) = view.rows.iter().partition(is_idle);
    if view.rows.len() <= ROWS_OPEN || busy.is_empty() {
        rows(html, &view.rows.iter().collect::<Vec<_>>(), view)?;
    } else {
        rows(html, &busy, view)?;
        if !idle.is_empty() {
            let policies = if idle.len() == 1 { "policy" } else { "policies" };
            write!(html, "<details><summary>{} {policies} without a request in the last hour</summary>", idle.len())?;
            rows(html, &idle, view)?;
            html.push_str("</details>");
        }
    }
    if view.more > 0 {
        write!(
            html,
            "<p class=\"soft\">and {} policies more, with fewer requests over their limits</p>",
            Count(view.more as u64)
        )?;
    }
    Ok(())
}

fn rows(html: &mut String, rows: &[&PolicyRow], view: &PageView) -> fmt::Result {
    html.push_str(
        "<table><thead><tr><th>policy</th><th class=\"chart\">five minutes</th><th class=\"chart\">an hour</th>\
         <th class=\"num\">requests/s</th><th class=\"num\">near</th><th class=\"num\">over</th><th class=\"num\">refused</th>\
         <th class=\"num\">last refused</th></tr></thead><tbody>",
    );
    rows.iter().try_for_each(|row| policy(html, row, view))?;
    html.push_str("</tbody></table>");
    Ok(())
}

fn policy(html: &mut String, row: &PolicyRow, view: &PageView) -> fmt::Result {
    write!(html, "<tr><td><span class=\"name\">{}</span>", HtmlText(&row.name))?;
    if let Some(mode) = row.mode.filter(|mode| *mode != Mode::Enforce) {
        write!(html, "<span class=\"mode\">{}</span>", mode.as_str())?;
    }
    let quotas: Vec<String> = row.quotas.iter().map(|quota| HtmlText(quota).to_string()).collect();
    let several = if row.quotas.len() > 1 && row.layers.len() == 1 { "plans: " } else { "" };
    let mut layers = row.layers.get(..LAYERS_MAX).unwrap_or(&row.layers).join(", ");
    if let more @ 1.. = row.layers.len().saturating_sub(LAYERS_MAX) {
        layers += &format!(" and {more} more");
    }
    let of = (view.layers.len() > 1 && !layers.is_empty()).then(|| format!(" · {}", HtmlText(&layers)));
    write!(html, "<div class=\"quota\">{several}{}{}</div>", quotas.join(" · "), of.unwrap_or_default())?;
    if let Some(stats) = row.stats.as_ref().filter(|stats| stats.has_places()) {
        places(html, stats)?;
    }
    html.push_str("</td>");
    let (recent, hour) = (Sums::of(row.five_minutes()), Sums::of(row.hour()));
    for (buckets, sums, span) in [(row.five_minutes(), recent, "five minutes"), (row.hour(), hour, "hour")] {
        write!(html, "<td class=\"chart\" data-of=\"{span}\">")?;
        let what = format!(
            "in the last {span} {} within the limit, {} of them near it, {} over",
            sums.allowed, sums.near, sums.over
        );
        chart::write(html, buckets, &what);
        html.push_str("</td>");
    }
    let five_minutes = span(&view.stats, Duration::from_secs(300));
    write!(html, "<td class=\"num\" data-of=\"requests/s\">{}</td>", PerSecond(recent.all(), five_minutes))?;
    write!(html, "<td class=\"num\" data-of=\"near\">{}</td>", Percent(recent.per_mille(recent.near)))?;
    write!(html, "<td class=\"num\" data-of=\"over\">{}</td>", Percent(recent.per_mille(recent.over)))?;
    write!(html, "<td class=\"num\" data-of=\"refused\">{}</td>", Percent(recent.per_mille(recent.refused)))?;
    match row.refused_ago(&view.stats) {
        Some(ago) => write!(html, "<td class=\"num\" data-of=\"last refused\">{} ago</td></tr>", About(ago)),
        None => write!(html, "<td class=\"num\" data-of=\"last refused\">never</td></tr>"),
    }
}

/// Writes how many units of a concurrency limit are held now, and for how long requests held units.
fn places(html: &mut String, stats: &PolicySnapshot) -> fmt::Result {
    write!(html, "<div class=\"quota\">{} held now, by all keys", Count(stats.held()))?;
    let held_for = stats.held_for();
    match (held_for.percentile(50), held_for.percentile(99)) {
        (Some(half), Some(most)) if half == most => write!(html, " · 99 % for up to {}", Roughly(most))?,
        (Some(half), Some(most)) => {
            write!(html, " · half for up to {}, 99 % for up to {}", Roughly(half), Roughly(most))?;
        }
        (Some(half), None) => write!(html, " · half for up to {}", Roughly(half))?,
        _ => {}
    }
    html.push_str("</div>");
    Ok(())
}

fn switches(html: &mut String, view: &PageView) -> fmt::Result {
    if view.switches.is_empty() {
        return Ok(());
    }
    html.push_str("<h2>Modes</h2>");
    for (name, now) in &view.switches {
        write!(
            html,
            "<form class=\"switch\" method=\"post\"><input type=\"hidden\" name=\"action\" value=\"switch\">\
             <input type=\"hidden\" name=\"name\" value=\"{0}\"><span class=\"name\">{0}</span>",
            HtmlText(name)
        )?;
        if view.operator.is_none() {
            write!(html, "<span>{}</span>", now.as_str())?;
        }
        for mode in Mode::ALL.iter().filter(|_| view.operator.is_some()) {
            let (name, state) = (mode.as_str(), if mode == now { " disabled" } else { "" });
            write!(html, "<button name=\"mode\" value=\"{name}\"{state}>{name}</button>")?;
        }
        html.push_str("</form>");
    }
    Ok(())
}

fn explain(html: &mut String, view: &PageView) -> fmt::Result {
    if view.layers.is_empty() {
        return Ok(());
    }
    let empty = ExplainForm::default();
    let form = view.explained.as_ref().map_or(&empty, |(form, _)| form);
    write!(
        html,
        "<h2>Explain a request</h2><p class=\"soft\">What the layers would do with a request now. It takes nothing.</p>\
         <form class=\"explain\" method=\"post\"><input type=\"hidden\" name=\"action\" value=\"explain\">\
         <label>method<input name=\"method\" value=\"{}\"></label>\
         <label>path<input name=\"uri\" value=\"{}\"></label>\
         <label>client<input name=\"client\" placeholder=\"192.0.2.1\" value=\"{}\"></label>",
        HtmlText(form.method()),
        HtmlText(form.uri()),
        HtmlText(&form.client)
    )?;
    if !view.extensions.is_empty() {
        html.push_str("<div class=\"wide fields\">");
        for name in &view.extensions {
            let stated = form.extensions.iter().find(|(own, _)| own == name).map_or("", |(_, text)| text);
            write!(
                html,
                "<label>{0}<input name=\"{EXTENSION}{0}\" value=\"{1}\"></label>",
                HtmlText(name),
                HtmlText(stated)
            )?;
        }
        html.push_str("</div>");
    }
    write!(
        html,
        "<label class=\"wide\">headers, one in a line<textarea name=\"headers\" placeholder=\"x-api-key: abc\">\n{}</textarea></label>\
         <div class=\"wide\"><button>Explain</button></div></form>",
        HtmlText(&form.headers)
    )
}

#[cfg(all(test, feature = "_redis"))] // which brings the hash
mod tests {
    use super::*;

    #[test]
    fn content_policy_has_the_hash_of_the_style() {
        use base64::Engine as _;
        use sha2::Digest as _;
        let hash = base64::engine::general_purpose::STANDARD.encode(sha2::Sha256::digest(STYLE));
        assert!(CONTENT_POLICY.contains(&format!("'sha256-{hash}'")), "put {hash} into CONTENT_POLICY");
        // An attribute would need a hash of its own.
        assert!(!include_str!("html.rs").contains(concat!("sty", "le=")));
    }
}
