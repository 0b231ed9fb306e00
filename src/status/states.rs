//! The units that keys have left, the actions that operators can take on these keys, and the
//! actions that they have taken.

use std::collections::HashSet;
use std::fmt::{self, Write as _};
use std::net::IpAddr;

use super::action::{OWN, OperatorAction};
use super::keys::recent_of_explained;
use super::request::ExplainForm;
use super::target::{KeyState, can_reset, is_block, is_meter};
use super::text::{About, Count, HtmlText, Roughly};
use super::view::{ExplainedLayer, PageView};
use crate::base::time::Utc;
use crate::base::wait::Wait;

/// The maximum number of actions that are not folded away. `DONE_SHOWN` is the maximum number of
/// all listed actions.
const DONE_OPEN: usize = 3;
const DONE_SHOWN: usize = 20;

/// If there are at most this many layers, no explanation is folded away, not even those of layers that let
/// the request pass.
const LAYERS_OPEN: usize = 4;

/// Writes the explanation of each layer. If there are more than `LAYERS_OPEN` layers, the layers
/// that refuse come first.
pub(super) fn explained(
    html: &mut String,
    view: &PageView,
    form: &ExplainForm,
    layers: &[ExplainedLayer],
) -> fmt::Result {
    if layers.len() <= LAYERS_OPEN {
        return layers.iter().try_for_each(|of_layer| layer(html, view, form, of_layer));
    }
    let (refuse, pass): (Vec<&ExplainedLayer>, Vec<&ExplainedLayer>) =
        layers.iter().partition(|of_layer| of_layer.refuses());
    refuse.iter().try_for_each(|of_layer| layer(html, view, form, of_layer))?;
    if !pass.is_empty() {
        write!(html, "<details><summary>{} layers that do not refuse it</summary>", pass.len())?;
        pass.iter().try_for_each(|of_layer| layer(html, view, form, of_layer))?;
        html.push_str("</details>");
    }
    Ok(())
}

fn layer(html: &mut String, view: &PageView, form: &ExplainForm, layer: &ExplainedLayer) -> fmt::Result {
    match &layer.explanation {
        Some(explanation) => {
            write!(html, "<pre><b>{}</b> {}</pre>", HtmlText(&layer.title), HtmlText(&explanation.to_string()))?;
        }
        None => write!(html, "<h3>{}</h3>", HtmlText(&layer.title))?,
    }
    states(html, view, form, layer)?;
    recent_of_explained(html, view, layer)
}

/// Lists the remaining units of the keys of a layer. An operator can act on the keys.
fn states(html: &mut String, view: &PageView, form: &ExplainForm, layer: &ExplainedLayer) -> fmt::Result {
    if let Some(failure) = &layer.states.failure {
        write!(
            html,
            "<pre class=\"bad\"><b>{}</b> The limiter did not answer: {}</pre>",
            HtmlText(&layer.title),
            HtmlText(failure)
        )?;
    }
    let states = &layer.states.states;
    if states.is_empty() {
        return Ok(());
    }
    if let Some(token) = &layer.token {
        html.push_str("<form method=\"post\">");
        offered(html, form, token)?;
    }
    html.push_str(
        "<table><thead><tr><th>policy</th><th>key</th><th>left now</th><th>lets a request pass</th></tr></thead><tbody>",
    );
    let mut seen = HashSet::new();
    for state in states {
        // The plans of a rule share one name and, for each key, one state.
        let is_chosen = layer.token.is_some() && can_reset(&state.policy) && seen.insert(state.policy.name());
        row(html, state, is_chosen)?;
    }
    html.push_str("</tbody></table>");
    if layer.token.is_some() {
        html.push_str("<p class=\"acts\"><button name=\"action\" value=\"reset\">Reset</button> forgets what the chosen policies have counted for these keys");
        if states.iter().any(|state| is_block(&state.policy)) {
            html.push_str(", and opens blocks.</p><p class=\"acts\"><button name=\"action\" value=\"unblock\">Unblock</button> opens the chosen blocks, and keeps what is used");
        }
        html.push_str(".</p>");
        for (name, policy) in &layer.own {
            let (name, policy) = (HtmlText(name), HtmlText(policy));
            write!(
                html,
                "<p class=\"acts\"><button name=\"action\" value=\"{OWN}{name}\">{name}</button> for {policy}, if it is chosen.</p>"
            )?;
        }
        html.push_str("</form>");
    }
    own_quota(html, view, form, layer)
}

/// Writes the folded form that gives the keys of a layer quotas of their own in all processes, or denies the keys.
fn own_quota(html: &mut String, view: &PageView, form: &ExplainForm, layer: &ExplainedLayer) -> fmt::Result {
    let Some(token) = layer.token.as_deref().filter(|_| !layer.overridable.is_empty()) else { return Ok(()) };
    html.push_str(
        "<details><summary>Deny the key, or change its quota</summary><form class=\"explain\" method=\"post\">",
    );
    offered(html, form, token)?;
    if view.can_deny_networks() {
        html.push_str(
            "<p class=\"wide\">To deny a client under all rules, set its address to <b>deny</b> as a <b>network</b> in the \
             <a href=\"#settings\">settings for all processes</a>. This form acts under one rule.",
        );
        let is_address = |name: &str| name.parse::<IpAddr>().is_ok();
        let shows_address = layer.states.states.iter().any(|state| state.shown.name.as_deref().is_some_and(is_address));
        if form.fingerprint.is_some() && !shows_address {
            html.push_str(
                " This page hides the address: take it from the log of your proxy, or let the page show addresses \
                 (<code>serve --reveal addresses</code>, or <code>StatsBuilder::reveal</code> in a program).",
            );
        }
        html.push_str("</p>");
    }
    html.push_str("<label class=\"wide\">under<select name=\"policy\">");
    for name in &layer.overridable {
        write!(html, "<option value=\"{0}\">{0}</option>", HtmlText(name))?;
    }
    html.push_str(
        "</select></label>\
         <label class=\"wide\">quota; 0 per minute denies under this rule only<input name=\"value\" required value=\"0 per minute\"></label>\
         <label class=\"wide\">for how long<input name=\"lasting\" placeholder=\"until it is ended\" value=\"1 hour\"></label>\
         <label class=\"wide\">why<input name=\"why\" required></label>\
         <div class=\"wide\"><button name=\"action\" value=\"set\">Set for all processes</button></div></form></details>",
    );
    Ok(())
}

/// Writes the hidden fields of a form that acts on explained keys.
fn offered(html: &mut String, form: &ExplainForm, token: &str) -> fmt::Result {
    write!(html, "<input type=\"hidden\" name=\"token\" value=\"{token}\">")?;
    // Another process may get the form, and then needs these fields to explain the request again.
    for (name, value) in form.fields() {
        let (name, value) = (HtmlText(&name), HtmlText(value));
        write!(html, "<input type=\"hidden\" name=\"{name}\" value=\"{value}\">")?;
    }
    Ok(())
}

fn row(html: &mut String, state: &KeyState, is_chosen: bool) -> fmt::Result {
    let (policy, decision) = (&state.policy, &state.decision);
    let name = HtmlText(policy.name());
    html.push_str("<tr><td>");
    if is_chosen {
        write!(
            html,
            "<label><input type=\"checkbox\" name=\"policy\" value=\"{name}\" checked> <span class=\"name\">{name}</span></label>"
        )?;
    } else {
        write!(html, "<span class=\"name\">{name}</span>")?;
    }
    html.push_str("<div class=\"quota\">");
    if let Some(plan) = policy.plan() {
        write!(html, "{}: ", HtmlText(plan))?;
    }
    write!(html, "{}</div></td>", HtmlText(&policy.quota_words()))?;
    let fingerprint = &state.shown.fingerprint;
    match &state.shown.name {
        Some(name) => {
            write!(html, "<td data-of=\"key\">{}<div class=\"quota\">key {fingerprint}</div></td>", HtmlText(name))?;
        }
        None => write!(html, "<td data-of=\"key\">key {fingerprint}</td>")?,
    }
    let (left, limit) = (Count(decision.remaining()), Count(decision.limit()));
    html.push_str("<td data-of=\"left now\">");
    match policy {
        policy if is_block(policy) && !decision.is_allowed() => html.push_str("<b class=\"bad\">blocked</b>"),
        policy if is_block(policy) => write!(html, "open, {left} of {limit} strikes left")?,
        policy if policy.has_quota_of_request() => {
            write!(html, "{} used", Count(decision.limit().saturating_sub(decision.remaining())))?;
        }
        policy if is_meter(policy) => {
            write!(html, "{} counted", Count(decision.limit().saturating_sub(decision.remaining())))?;
        }
        policy if policy.quota().is_unlimited() => {
            write!(html, "{} used in this minute", Count(decision.limit().saturating_sub(decision.remaining())))?;
        }
        _ => write!(html, "{left} of {limit}")?,
    }
    let wait = match decision.wait() {
        _ if policy.has_quota_of_request() => "explain a request".to_owned(),
        _ if is_meter(policy) => "now".to_owned(),
        Wait::After(wait) => format!("in {}", Roughly(wait)),
        Wait::None => "now".to_owned(),
        wait => wait.as_str().to_owned(),
    };
    write!(html, "</td><td data-of=\"lets a request pass\">{wait}</td></tr>")
}

/// Lists the last actions of operators.
pub(super) fn done(html: &mut String, view: &PageView) -> fmt::Result {
    let Some(actions) = view.done.as_ref().filter(|actions| !actions.is_empty()) else { return Ok(()) };
    html.push_str("<h2>Done by operators</h2>");
    let shown = actions.get(..DONE_SHOWN).unwrap_or(actions);
    let (open, folded) = shown.split_at(DONE_OPEN.min(shown.len()));
    table_of_done(html, view, open)?;
    if !folded.is_empty() {
        write!(html, "<details><summary>{} earlier ones</summary>", folded.len())?;
        table_of_done(html, view, folded)?;
        html.push_str("</details>");
    }
    if let more @ 1.. = actions.len() - shown.len() {
        write!(html, "<p class=\"soft\">and {more} more in the JSON of this page</p>")?;
    }
    Ok(())
}

fn table_of_done(html: &mut String, view: &PageView, actions: &[OperatorAction]) -> fmt::Result {
    html.push_str("<table><thead><tr><th>what</th><th>when</th><th>who</th><th>result</th></tr></thead><tbody>");
    for action in actions {
        let ago = view.stats.taken_at().saturating_since(action.at());
        write!(
            html,
            "<tr><td>{}</td><td data-of=\"when\">{} ago<div class=\"quota\">{}</div></td><td data-of=\"who\">{}</td>",
            HtmlText(&action.done.to_string()),
            About(ago),
            Utc(action.at()),
            HtmlText(action.operator())
        )?;
        match action.error() {
            Some(error) => write!(html, "<td data-of=\"result\" class=\"bad\">failed: {}</td></tr>", HtmlText(error))?,
            None => match action.warning() {
                Some(warning) => {
                    write!(
                        html,
                        "<td data-of=\"result\">done<div class=\"bad\">{}</div></td></tr>",
                        HtmlText(warning)
                    )?;
                }
                None => html.push_str("<td data-of=\"result\">done</td></tr>"),
            },
        }
    }
    html.push_str("</tbody></table>");
    Ok(())
}
