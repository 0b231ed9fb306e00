//! The settings of operators for all processes, as the page shows them, and the forms that change them.

use std::collections::BTreeSet;
use std::fmt::{self, Write};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use ipnet::IpNet;

use super::action::{ActionKind, Done, OperatorAction};
use super::operators::{Operators, number_of};
#[cfg(feature = "rules")]
use super::pushed_rules::PushedChanges;
use super::request::{SettingForm, Wrong, wrong};
use super::source::ErasedLayer;
use super::target::{KeyState, LayerKeys, ListedKey};
use super::text::HtmlText;
use crate::base::keyed_hash::KeyedHash;
use crate::base::time::{Timestamp, Utc};
use crate::error::WithSources;
use crate::fleet::{Fleet, FleetAction, FleetChange, FleetEntry, FleetError, FleetErrorKind, FleetKind, FleetTarget};
use crate::key::Key;
use crate::quota::Quota;
use crate::quota::parse::read_length;
use crate::stats::{Stats, cut};

/// The maximum number of entries that the page shows.
const ROWS_MAX: usize = 200;

/// The maximum number of bytes of a text of rules that the page shows. Other values are short.
const RULES_MAX: usize = 100;

/// The maximum number of settings that the form offers.
const OFFERED_MAX: usize = 500;

/// The settings that operators made for all processes.
pub(super) struct FleetView {
    pub(super) revision: u64,
    pub(super) hash: u64,
    pub(super) since: Timestamp,
    pub(super) read_at: Option<Timestamp>,
    /// When this process last wrote back settings that the store had lost.
    pub(super) restored_at: Option<Timestamp>,
    pub(super) error: Option<Arc<str>>,
    pub(super) entries: Vec<FleetRow>,
    /// The last actions of all processes, the latest first.
    pub(super) actions: Vec<FleetRow>,
    /// The settings that operators can make here.
    settable: BTreeSet<(FleetKind, Box<str>)>,
}

/// The fields of a form, read.
pub(super) struct SettingRequest<'a> {
    form: &'a SettingForm,
    why: &'a str,
    lasting: Option<Duration>,
    seen: Option<u64>,
    /// The quota of an explained key, if the form names one.
    quota: Option<Quota>,
}

/// An entry or an action. A key is shown by its fingerprint and name, as elsewhere on the page,
/// because it may be a secret.
pub(super) struct FleetRow {
    /// The name of the entry in forms.
    pub(super) entry: String,
    pub(super) kind: FleetKind,
    pub(super) name: String,
    pub(super) subject: String,
    /// The key, if the operator who looks at the page typed it here, and it may be mistyped.
    typed: Option<Box<str>>,
    /// The value, or `None` if the entry was ended.
    pub(super) value: Option<String>,
    pub(super) until: Option<Timestamp>,
    pub(super) at: Timestamp,
    pub(super) by: String,
    pub(super) why: String,
    /// Whether the entry has no effect in this process, because no rule has its name. `None` for an action.
    pub(super) names_no_rule: Option<bool>,
    /// The changes by pushed rules.
    #[cfg(feature = "rules")]
    pub(super) changes: Option<PushedChanges>,
}

impl FleetView {
    pub(super) fn new(fleet: &Fleet, stats: &Stats) -> Self {
        let ((in_force, entries, actions), secret) = (fleet.all_in_force(), fleet.secret());
        let row = |target: &FleetTarget, value: Option<&str>, until, at, by: &str, why: &str| FleetRow {
            entry: entry_id(secret, target),
            kind: target.kind(),
            name: target.name().to_owned(),
            subject: shown_subject(target, stats),
            typed: None,
            value: value.map(|value| shown_value(target, value)),
            until,
            at,
            by: by.to_owned(),
            why: why.to_owned(),
            names_no_rule: None,
            #[cfg(feature = "rules")]
            changes: None,
        };
        let of_entry = |FleetEntry { target, value, until, at, by, why, .. }: &FleetEntry| {
            row(target, Some(value), *until, *at, by, why)
        };
        #[cfg(feature = "rules")]
        let of_entry = |entry: &FleetEntry| {
            let changes = PushedChanges::of(entry, &entries, fleet);
            FleetRow { changes, names_no_rule: Some(fleet.names_no_rule(&entry.target)), ..of_entry(entry) }
        };
        let of_action = |FleetAction { target, value, until, at, by, why, .. }: &FleetAction| {
            row(target, value.as_deref(), *until, *at, by, why)
        };
        Self {
            revision: in_force.revision,
            hash: in_force.hash,
            since: in_force.since,
            read_at: in_force.read_at,
            restored_at: in_force.restored_at,
            error: in_force.error,
            entries: entries.iter().map(of_entry).collect(),
            actions: actions.iter().map(of_action).collect(),
            settable: fleet.settable(),
        }
    }

    /// Shows to an operator the keys that the operator typed and that may be mistyped.
    pub(super) fn show_typed(&mut self, operators: &Operators, operator: &str) {
        for row in &mut self.entries {
            row.typed = operators.typed_by(operator, &row.entry);
        }
    }

    /// Returns whether operators can deny a network.
    pub(super) fn can_deny_networks(&self) -> bool {
        self.settable.iter().any(|(kind, _)| *kind == FleetKind::Network)
    }

    /// Returns the names of the policies under which operators can give these keys quotas of their own.
    pub(super) fn overridable(&self, target: &LayerKeys) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in target.held.iter().map(|held| held.policy.name()) {
            let can = self.settable.iter().any(|(kind, own)| *kind == FleetKind::Override && **own == *name);
            if can && !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
        names
    }
}

fn shown_value(target: &FleetTarget, value: &str) -> String {
    if target.kind().is_text_of_rules() { cut(value, RULES_MAX) } else { value }.to_owned()
}

fn shown_subject(target: &FleetTarget, stats: &Stats) -> String {
    target.key().map_or_else(|| target.subject().unwrap_or_default(), |key| stats.shown_key(&key))
}

/// Returns the name of an entry in forms. The name reveals nothing about a key, and is the same in all processes that
/// share the secret.
fn entry_id(secret: Option<u128>, target: &FleetTarget) -> String {
    let secret = secret.unwrap_or_default(); // the first entry comes with a secret
    let parts = [target.kind().as_str().as_bytes(), target.name().as_bytes(), target.subject_bytes()];
    format!("{:016x}", number_of(KeyedHash::new(secret.to_be_bytes()).hash_parts(parts)))
}

impl<'a> SettingRequest<'a> {
    /// Reads the fields of a form, except those that name the setting.
    pub(super) fn read(form: &'a SettingForm) -> Result<Self, Wrong> {
        let why = form.why.trim();
        if why.is_empty() {
            return Err(wrong("say why: `why` is kept with the setting, for those who ask later"));
        }
        let lasting = match form.lasting.trim() {
            "" => None,
            lasting => {
                let message = "`lasting` is a time of up to 366 days: write it like `1 hour` or `30 min`";
                Some(read_length(lasting).ok_or_else(|| wrong(message))?)
            }
        };
        let seen = match form.seen.trim() {
            "" => None,
            seen => Some(seen.parse().map_err(|_| wrong("`seen` is a revision"))?),
        };
        let quota = match (&form.key, form.action) {
            (None, _) => None,
            (Some(_), ActionKind::Set) => {
                let quota = form.value.trim().parse::<Quota>();
                Some(quota.map_err(|error| wrong(&format!("the quota cannot be read: {}", WithSources(&error))))?)
            }
            (Some(_), _) => return Err(wrong("a `token` is for `set`: name the entry that should end by `entry`")),
        };
        Ok(Self { form, why, lasting, seen, quota })
    }

    /// Returns the change that gives an explained key a quota of its own.
    pub(super) fn change_of_key(&self, target: &LayerKeys) -> Result<FleetChange, Wrong> {
        let (Some(held), Some(quota)) = (target.held.first(), self.quota) else {
            return Err(wrong("no key was explained"));
        };
        let change = FleetChange::override_quota(held.policy.name(), Key::clone(&held.key), quota);
        change.map(|change| self.timed(change)).map_err(|error| wrong(&WithSources(&error).to_string()))
    }

    /// Returns the change of the setting or the entry that the form names.
    pub(super) fn change_of_form(&self, fleet: &Fleet) -> Result<FleetChange, Wrong> {
        change(fleet, self.form).map(|change| self.timed(change))
    }

    fn timed(&self, change: FleetChange) -> FleetChange {
        let change = self.lasting.map_or(change.clone(), |lasting| change.lasting(lasting));
        self.seen.map_or(change.clone(), |revision| change.seen(revision))
    }

    /// Makes the change. Returns the action, and the status for the answer if the action failed.
    pub(super) async fn make(
        &self,
        change: FleetChange,
        fleet: &Fleet,
        operators: &Operators,
        stats: &Stats,
        sources: &[(String, Arc<dyn ErasedLayer>)],
        operator: &str,
    ) -> (OperatorAction, Option<StatusCode>) {
        let Self { form, why, seen, .. } = *self;
        let target = change.target();
        let (kind, name) = (target.kind(), target.name().to_owned());
        let subject = shown_subject(target, stats);
        let setting = [kind.as_str(), &name, &subject].join(" ").trim_end().into();
        let value = (form.action == ActionKind::Set).then(|| form.value.trim().into());
        let mut underway = operators.begin(stats, operator, Done::ForAll { kind: form.action, setting, value });
        let is_checked = kind == FleetKind::Network || form.key.is_none() && form.entry.trim().is_empty();
        let done = match form.action {
            ActionKind::Rollback if kind == FleetKind::Rules => {
                fleet.rollback(operator, why, &name, seen).await.map(|done| done.revision)
            }
            ActionKind::Rollback => Err(FleetError::new(FleetErrorKind::Invalid, "only rules are rolled back")),
            _ if is_checked => match check_key(fleet, stats, sources, &change).await {
                Ok(warning) => {
                    let typed = change.target().clone();
                    // A key in an access list may be a real one that has leaked.
                    let may_be_mistyped = warning.is_some() && matches!(kind, FleetKind::Override | FleetKind::Plan);
                    underway.warn(warning);
                    let done = fleet.change(operator, why, [change]).await;
                    if may_be_mistyped && done.is_ok() {
                        operators.note_typed(operator, entry_id(fleet.secret(), &typed), form.subject.trim());
                    }
                    done
                }
                Err(error) => Err(error),
            },
            _ => fleet.change(operator, why, [change]).await,
        };
        let failed = done.as_ref().err().map(|error| match error.kind() {
            FleetErrorKind::Invalid => StatusCode::BAD_REQUEST,
            FleetErrorKind::Conflict => StatusCode::CONFLICT,
            FleetErrorKind::Full => StatusCode::INSUFFICIENT_STORAGE,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        });
        (underway.end(done.map(drop).map_err(|error| WithSources(&error).to_string())), failed)
    }
}

/// Returns a warning if a denied network is an IPv4 `/8`, an IPv6 `/16`, or larger.
fn denies_many(network: IpNet) -> Option<String> {
    let (family, large) = match network {
        IpNet::V4(_) => ("IPv4", 8),
        IpNet::V6(_) => ("IPv6", 16),
    };
    let length = network.prefix_len();
    (length <= large).then(|| {
        let share = 1_u32 << length;
        format!(
            "the denied network is a /{length}, which has one of {share} of all {family} addresses. If a smaller one is \
             meant, end this setting and set that one"
        )
    })
}

/// Looks whether the key or the network of a change is mistyped; see
/// [`StatusPage::check_key`](super::StatusPage::check_key).
pub(super) async fn check_key(
    fleet: &Fleet,
    stats: &Stats,
    sources: &[(String, Arc<dyn ErasedLayer>)],
    change: &FleetChange,
) -> Result<Option<String>, FleetError> {
    if let Some(warning) = change.denied_network().and_then(denies_many) {
        return Ok(Some(warning));
    }
    let target = change.target();
    let Some(key) = target.key().filter(|_| change.sets_value()) else { return Ok(None) };
    let snapshot = stats.snapshot();
    if ListedKey::is_listed(&snapshot, &stats.shown(&key).0) {
        return Ok(None);
    }
    // The page writes `key` before a fingerprint.
    let text = key.display().to_string();
    let text = text.trim_matches('"').trim_start_matches("key ");
    if ListedKey::is_listed(&snapshot, text) {
        let message = format!(
            "`{text}` is the fingerprint of a key, and not the key: click the key on the page to set its quota, or send \
             the key itself"
        );
        return Err(FleetError::new(FleetErrorKind::Invalid, message));
    }
    let policy = Some(target.name()).filter(|_| target.kind() != FleetKind::Key);
    let mut looked = false;
    for (_, source) in sources {
        let states = LayerKeys::of_typed(source, &key, policy, stats).look().await;
        let is_used = |state: &KeyState| state.decision.remaining() < state.decision.limit();
        if states.failure.is_some() || states.states.iter().any(is_used) {
            return Ok(None);
        }
        looked |= !states.states.is_empty();
    }
    if !looked || fleet.entries().iter().any(|entry| entry.target == *target) {
        return Ok(None);
    }
    let under = policy.map_or_else(String::new, |policy| format!(" under `{policy}`"));
    let mut warning = format!(
        "nothing is counted for this key{under} now, and this page does not list the key. If the key is mistyped, this \
         setting has no effect"
    );
    if text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        warning += ". A fingerprint is not a key: use the page of the process that lists it";
    }
    // No text of a warning has the key, because logs have the warning.
    let is_of_one = |address: IpAddr| matches!(address, IpAddr::V6(address) if address.to_bits() as u64 != 0);
    if policy.is_some() && key.address().is_some_and(is_of_one) {
        warning += ". The clients of a /64 usually share one key: the address with 64 zero bits at its end";
    }
    Ok(Some(warning))
}

/// Returns the change that a form describes.
fn change(fleet: &Fleet, form: &SettingForm) -> Result<FleetChange, Wrong> {
    let value = (form.action == ActionKind::Set).then(|| form.value.trim());
    let entry = form.entry.trim();
    if !entry.is_empty() {
        let secret = fleet.secret();
        let found = fleet.entries().into_iter().map(|found| found.target);
        let Some(target) = found.into_iter().find(|target| entry_id(secret, target) == entry) else {
            let message = "this entry has ended, or an operator ended it: load the page again";
            return Err((StatusCode::CONFLICT, message.into()));
        };
        return Ok(FleetChange::of_target(target, value));
    }
    let Some((kind, name)) = form.setting.trim().split_once(' ') else {
        return Err(wrong("`setting` is a kind and a name, such as `mode login`"));
    };
    let kind = kind.parse().map_err(|error| wrong(&format!("`setting`: {error}")))?;
    let subject = Some(form.subject.trim()).filter(|subject| !subject.is_empty());
    FleetChange::of_text(kind, name.trim(), subject, value).map_err(|error| wrong(&WithSources(&error).to_string()))
}

/// Writes the operators' settings for all processes, and the forms of an operator.
pub(super) fn write(
    html: &mut String,
    fleet: &FleetView,
    form: Option<&SettingForm>,
    is_operator: bool,
) -> fmt::Result {
    let has_form = is_operator && !fleet.settable.is_empty();
    if fleet.entries.is_empty() && fleet.actions.is_empty() && !has_form {
        return Ok(());
    }
    html.push_str("<h2 id=\"settings\">Set for all processes</h2>");
    if fleet.entries.is_empty() {
        html.push_str("<p class=\"soft\">Nothing is set.</p>");
    } else {
        entries(html, fleet, is_operator)?;
    }
    if has_form {
        set(html, fleet, form)?;
    }
    actions(html, fleet)
}

fn entries(html: &mut String, fleet: &FleetView, is_operator: bool) -> fmt::Result {
    html.push_str("<table><thead><tr><th>setting</th><th>value</th><th>until</th><th>by</th><th>why</th>");
    html.push_str(if is_operator { "<th></th></tr></thead><tbody>" } else { "</tr></thead><tbody>" });
    for row in fleet.entries.iter().take(ROWS_MAX) {
        let value = HtmlText(row.value.as_deref().unwrap_or_default());
        write!(html, "<tr><td>{}</td><td data-of=\"value\">{value}", ShownSetting(row))?;
        #[cfg(feature = "rules")]
        if let Some(changes) = &row.changes {
            changes.write_html(html)?;
        }
        write!(
            html,
            "</td><td data-of=\"until\">{}</td><td data-of=\"by\">{}</td><td data-of=\"why\">{}</td>",
            Until(row.until),
            HtmlText(&row.by),
            HtmlText(&row.why)
        )?;
        if is_operator {
            let is_undone = |other: &FleetRow| other.kind == FleetKind::UndoneRules && other.name == row.name;
            change_of(html, fleet.revision, row, !fleet.entries.iter().any(is_undone))?;
        }
        html.push_str("</tr>");
    }
    html.push_str("</tbody></table>");
    if let unused @ 1.. = fleet.entries.iter().filter(|row| row.names_no_rule == Some(true)).count() {
        let (plural, verb) = if unused == 1 { ("", "names") } else { ("s", "name") };
        write!(html, "<p class=\"bad\">{unused} setting{plural} {verb} no rule of this process.</p>")?;
    }
    match fleet.entries.len().saturating_sub(ROWS_MAX) {
        0 => Ok(()),
        more => write!(html, "<p class=\"soft\">and {more} more in the JSON of this page</p>"),
    }
}

/// Writes the folded form that changes an entry.
fn change_of(html: &mut String, revision: u64, row: &FleetRow, can_roll_back: bool) -> fmt::Result {
    html.push_str("<td>");
    if !matches!(row.kind, FleetKind::FormerRules | FleetKind::UndoneRules) {
        write!(
            html,
            "<details><summary>change</summary><form method=\"post\"><input type=\"hidden\" name=\"entry\" value=\"{}\">\
             <input type=\"hidden\" name=\"seen\" value=\"{revision}\"><label>why<input name=\"why\" required></label>",
            row.entry
        )?;
        if row.kind == FleetKind::Rules {
            html.push_str("<p class=\"acts\">");
            if can_roll_back {
                html.push_str("<button name=\"action\" value=\"rollback\">Roll back</button>");
            }
        } else {
            let value = HtmlText(row.value.as_deref().unwrap_or_default());
            write!(
                html,
                "<label>value<input name=\"value\" value=\"{value}\"></label>\
                 <label>for how long<input name=\"lasting\" placeholder=\"until it is ended\"></label>\
                 <p class=\"acts\"><button name=\"action\" value=\"set\">Set</button>"
            )?;
        }
        html.push_str("<button name=\"action\" value=\"end\">End</button></p></form></details>");
    }
    html.push_str("</td>");
    Ok(())
}

/// Writes the form that makes a setting.
fn set(html: &mut String, fleet: &FleetView, form: Option<&SettingForm>) -> fmt::Result {
    let form = form.filter(|form| form.entry.is_empty() && form.key.is_none());
    let sent = |field: fn(&SettingForm) -> &str| form.map_or("", field);
    write!(
        html,
        "<form class=\"explain\" method=\"post\"><input type=\"hidden\" name=\"action\" value=\"set\">\
         <input type=\"hidden\" name=\"seen\" value=\"{}\"><label class=\"wide\">setting<select name=\"setting\">",
        fleet.revision
    )?;
    for (kind, name) in fleet.settable.iter().take(OFFERED_MAX) {
        let setting = format!("{kind} {name}");
        let chosen = if sent(|form| &form.setting) == setting { " selected" } else { "" };
        write!(html, "<option value=\"{0}\"{chosen}>{0}</option>", HtmlText(&setting))?;
    }
    write!(
        html,
        "</select></label>\
         <label class=\"wide\">key or network, except of a mode or a quota<input name=\"subject\" value=\"{}\"></label>\
         <label class=\"wide\">value: enforce, degrade or shadow of a mode; deny, allow or limit of a network or a key; \
         a number of a plan; otherwise a quota, such as 600 per minute<input name=\"value\" required value=\"{}\"></label>\
         <label class=\"wide\">for how long<input name=\"lasting\" placeholder=\"until it is ended\" value=\"{}\"></label>\
         <label class=\"wide\">why<input name=\"why\" required value=\"{}\"></label>\
         <div class=\"wide\"><button>Set for all processes</button></div></form>",
        HtmlText(sent(|form| &form.subject)),
        HtmlText(sent(|form| &form.value)),
        HtmlText(sent(|form| &form.lasting)),
        HtmlText(sent(|form| &form.why))
    )
}

/// Writes the folded list of the operators' actions in all processes.
fn actions(html: &mut String, fleet: &FleetView) -> fmt::Result {
    if fleet.actions.is_empty() {
        return Ok(());
    }
    write!(
        html,
        "<details><summary>Last {} changes for all processes</summary><table><thead><tr><th>setting</th><th>value</th>\
         <th>when</th><th>by</th><th>why</th></tr></thead><tbody>",
        fleet.actions.len()
    )?;
    for row in &fleet.actions {
        write!(
            html,
            "<tr><td>{}</td><td data-of=\"value\">{}</td><td data-of=\"when\">{}</td><td data-of=\"by\">{}</td>\
             <td data-of=\"why\">{}</td></tr>",
            ShownSetting(row),
            HtmlText(row.value.as_deref().unwrap_or("ended")),
            Utc(row.at),
            HtmlText(&row.by),
            HtmlText(&row.why)
        )?;
    }
    html.push_str("</tbody></table></details>");
    Ok(())
}

/// Prints the kind, the name and the subject of a row.
struct ShownSetting<'a>(&'a FleetRow);

impl fmt::Display for ShownSetting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FleetRow { kind, name, subject, typed, .. } = self.0;
        write!(f, "{kind} <span class=\"name\">{}</span>", HtmlText(name))?;
        if self.0.names_no_rule == Some(true) {
            let what =
                if *kind == FleetKind::Rules { "no rules of this process have" } else { "no rule of this process has" };
            write!(f, "<div class=\"bad\">{what} this name</div>")?;
        }
        if !subject.is_empty() {
            write!(f, "<div class=\"quota\">{}</div>", HtmlText(subject))?;
        }
        match typed {
            Some(typed) => write!(f, "<div class=\"quota\">you typed {}</div>", HtmlText(typed)),
            None => Ok(()),
        }
    }
}

/// Prints when an entry ends.
struct Until(Option<Timestamp>);

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(until) => Utc(until).fmt(f),
            None => f.write_str("it is ended"),
        }
    }
}
