//! The keys on the page: the keys of recent refusals, and the keys that are refused most often, use
//! the most units, or hold the most units.

use std::fmt::{self, Write as _};

use super::text::{About, Count, HtmlText, Roughly};
use super::view::{ExplainedLayer, PageView};
use crate::base::time::Utc;
use crate::base::wait::Wait;
use crate::outcome::OutcomeKind;
use crate::stats::{RecentRefusal, TopKey};

/// The maximum number of keys in each list.
const KEYS_MAX: usize = 20;

/// In the list of the keys that use the most units, the maximum number of keys of one policy.
const USED_EACH_MAX: usize = 5;

/// The maximum number of refusals that are shown without unfolding the list.
const REFUSALS_OPEN: usize = 10;

/// The maximum number of refusals that are listed.
const REFUSALS_MAX: usize = 200;

/// Writes the name of a key, or its fingerprint. If the key is stored, it is written as a button that explains the key.
fn key_cell(html: &mut String, name: Option<&str>, fingerprint: &str, is_kept: bool) -> fmt::Result {
    let text = name.map_or_else(|| format!("key {fingerprint}"), str::to_owned);
    html.push_str("<tr><td class=\"name\">");
    if is_kept {
        write!(html, "<button name=\"fingerprint\" value=\"{fingerprint}\">{}</button></td>", HtmlText(&text))
    } else {
        write!(html, "{}</td>", HtmlText(&text))
    }
}

/// Begins a form around a table whose keys can be explained.
const EXPLAIN_KEY: &str =
    "<form class=\"keys\" method=\"post\"><input type=\"hidden\" name=\"action\" value=\"explain\">";

/// Lists the keys that are refused most often.
pub(super) fn most_limited(html: &mut String, view: &PageView) -> fmt::Result {
    top(html, "Refused most lately", ("refusals", "about "), view.stats.most_limited().iter().take(KEYS_MAX))
}

/// Lists the keys that use the most units of each policy.
pub(super) fn most_used(html: &mut String, view: &PageView) -> fmt::Result {
    let policies = view.rows.iter().filter_map(|row| row.stats.as_ref());
    let keys = policies.flat_map(|policy| policy.most_used().iter().take(USED_EACH_MAX));
    top(html, "Used most lately, before settlements", ("units", "about "), keys.take(KEYS_MAX))
}

/// Lists the keys that hold the most units of concurrency limits.
pub(super) fn most_held(html: &mut String, view: &PageView) -> fmt::Result {
    top(html, "Hold most, now", ("places", ""), view.stats.most_held().iter().take(KEYS_MAX))
}

/// Lists keys with their counts. The first of the two words is the title of the column of counts, and the second is
/// written before each number.
fn top<'a>(
    html: &mut String,
    title: &str,
    (counted, about): (&str, &str),
    keys: impl Iterator<Item = &'a TopKey>,
) -> fmt::Result {
    let mut keys = keys.peekable();
    if keys.peek().is_none() {
        return Ok(());
    }
    write!(
        html,
        "<h2>{title}</h2>{EXPLAIN_KEY}<table><thead><tr><th>key</th><th>policy</th><th class=\"num\">{counted}</th></tr></thead><tbody>"
    )?;
    for key in keys {
        let error = if key.error() > 0 { format!(" (at most {} too many)", Count(key.error())) } else { String::new() };
        key_cell(html, key.name(), &key.fingerprint(), key.kept().is_some())?;
        write!(
            html,
            "<td data-of=\"policy\">{}</td><td class=\"num\" data-of=\"{counted}\">{about}{}{error}</td></tr>",
            HtmlText(key.policy()),
            Count(key.count())
        )?;
    }
    html.push_str("</tbody></table></form>");
    Ok(())
}

/// Lists the recent refusals.
pub(super) fn recent(html: &mut String, view: &PageView) -> fmt::Result {
    if !view.stats.keeps_refusals() {
        return Ok(());
    }
    let refusals = view.stats.recent_refusals();
    html.push_str("<h2>Refused recently</h2>");
    if refusals.is_empty() {
        html.push_str("<p class=\"soft\">No request was refused.</p>");
        return Ok(());
    }
    let shown = refusals.get(..REFUSALS_MAX).unwrap_or(refusals);
    let (open, folded) = shown.split_at(REFUSALS_OPEN.min(shown.len()));
    table(html, view, open.iter())?;
    if !folded.is_empty() {
        write!(html, "<details><summary>{} earlier ones</summary>", folded.len())?;
        table(html, view, folded.iter())?;
        html.push_str("</details>");
    }
    if let more @ 1.. = refusals.len() - shown.len() {
        write!(html, "<p class=\"soft\">and {} more in the JSON of this page</p>", Count(more as u64))?;
    }
    Ok(())
}

/// Lists the recent refusals of the keys of an explanation, under the policies of the explanation.
pub(super) fn recent_of_explained(html: &mut String, view: &PageView, layer: &ExplainedLayer) -> fmt::Result {
    if layer.recent.is_empty() {
        return Ok(());
    }
    write!(html, "<details open><summary>{} recent refusals under these keys</summary>", layer.recent.len())?;
    let refusals = view.stats.recent_refusals();
    table(html, view, layer.recent.iter().take(REFUSALS_OPEN).filter_map(|at| refusals.get(*at)))?;
    html.push_str("</details>");
    Ok(())
}

fn table<'a>(
    html: &mut String,
    view: &PageView,
    refusals: impl Iterator<Item = &'a RecentRefusal> + Clone,
) -> fmt::Result {
    // Requests and their ids are stored only if the application asks for them.
    let has_requests = refusals.clone().any(|refusal| refusal.request().or(refusal.request_id()).is_some());
    html.push_str(EXPLAIN_KEY);
    html.push_str("<table><thead><tr><th>key</th><th>when</th><th>refused by</th><th>left</th><th>wait</th>");
    html.push_str(if has_requests { "<th>request</th></tr></thead><tbody>" } else { "</tr></thead><tbody>" });
    for refusal in refusals {
        row(html, view, refusal)?;
        if has_requests {
            request_cell(html, refusal)?;
        }
        html.push_str("</tr>");
    }
    html.push_str("</tbody></table></form>");
    Ok(())
}

fn row(html: &mut String, view: &PageView, refusal: &RecentRefusal) -> fmt::Result {
    match refusal.fingerprint() {
        Some(fingerprint) => key_cell(html, refusal.name(), &fingerprint, refusal.kept().is_some())?,
        None => html.push_str("<tr><td class=\"name\">–</td>"),
    }
    let ago = view.stats.taken_at().saturating_since(refusal.at());
    write!(html, "<td data-of=\"when\">{} ago<div class=\"quota\">{}</div></td>", About(ago), Utc(refusal.at()))?;
    let outcome = refusal.outcome();
    html.push_str("<td data-of=\"refused by\">");
    match refusal.status() {
        Some(status) => {
            write!(html, "{}", HtmlText(status.policy().name()))?;
            if outcome != OutcomeKind::Limited {
                write!(html, "<span class=\"mode\">{outcome}</span>")?;
            }
            write!(html, "<div class=\"quota\">{}</div></td>", HtmlText(&status.policy().quota().to_string()))?;
            let (decision, cost) = (status.decision(), status.cost());
            let (left, limit) = (Count(decision.remaining()), Count(decision.limit()));
            write!(html, "<td data-of=\"left\">{left} of {limit}<div class=\"quota\">cost {}</div></td>", Count(cost))?;
            match decision.wait() {
                Wait::After(wait) => write!(html, "<td data-of=\"wait\">{}</td>", Roughly(wait))?,
                wait => write!(html, "<td data-of=\"wait\">{}</td>", wait.as_str())?,
            }
        }
        None => {
            match refusal.network() {
                Some(network) => write!(html, "network {network}")?,
                None if outcome == OutcomeKind::Denied => html.push_str("access list"),
                None => html.push_str("no rule"),
            }
            write!(html, "<span class=\"mode\">{outcome}</span></td><td></td><td></td>")?;
        }
    }
    Ok(())
}

fn request_cell(html: &mut String, refusal: &RecentRefusal) -> fmt::Result {
    let id = refusal.request_id().map(|id| format!("<div class=\"quota\">{}</div>", HtmlText(id)));
    let request = HtmlText(refusal.request().unwrap_or_default());
    write!(html, "<td class=\"request\">{request}{}</td>", id.unwrap_or_default())
}
