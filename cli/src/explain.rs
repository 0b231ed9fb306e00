//! `tower-ratelimit explain`: which rules a request meets.

use std::borrow::Cow;
use std::future::Future;
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use http::header::HOST;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use serde_json::{Value, json};
use tower_ratelimit::MemoryLimiter;
use tower_ratelimit::clock::{ManualClock, Timestamp};
use tower_ratelimit::key::PeerAddr;
use tower_ratelimit::rules::{Descriptor, NameKind, Rules, UnregisteredName};

use crate::output::Output;
use crate::replay::date;
use crate::{exit, files};

/// Say which rules of a file a request meets, under which keys, and what it would be charged
///
/// All allowances are unused, so the remaining units are those after the first request.
///
/// Keys and actions that the program registers are not known here. Give their values by --key and --action. The output
/// notes those that were not given.
///
/// The exit code is 0 if the request was explained, 1 if the file has a problem, and 2 if it cannot be read or an
/// option is wrong.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The file of rules; `-` is the standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The request's method
    #[arg(long, default_value = "GET")]
    method: Method,
    /// The request's path, with its query if it has one
    #[arg(long, default_value = "/", value_parser = path)]
    path: Uri,
    /// The request's host
    #[arg(long, value_parser = value)]
    host: Option<HeaderValue>,
    /// A header of the request; may be repeated
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = header)]
    headers: Vec<(HeaderName, HeaderValue)>,
    /// The client's address, whatever proxies are in front of the program
    #[arg(long, value_name = "IP")]
    client: Option<IpAddr>,
    /// The value of a key that the program registers; may be repeated
    #[arg(long = "key", value_name = "NAME=VALUE", value_parser = pair)]
    keys: Vec<(String, String)>,
    /// An action of the request, by the name that the program registers; may be repeated
    #[arg(long = "action", value_name = "NAME")]
    actions: Vec<String>,
    /// The time of the request, such as `2026-11-25T09:00:00+01:00`; now if it is absent
    #[arg(long, value_name = "TIME", value_parser = time)]
    at: Option<Timestamp>,
    /// A descriptor of the request, for a file in Envoy's form; may be repeated
    #[arg(long = "descriptor", value_name = "KEY=VALUE,...", value_parser = descriptor)]
    descriptors: Vec<Descriptor>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn path(text: &str) -> Result<Uri, String> {
    // The server gets what comes after the host.
    match text.parse::<PathAndQuery>() {
        Ok(path) if text.starts_with('/') || text == "*" => Ok(path.into()),
        Ok(_) => Err("a path begins with a slash".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, text) = text.split_once(':').ok_or("write it like `x-plan: pro`")?;
    let name = name.trim().parse().map_err(|_| format!("`{}` is not the name of a header", name.trim()))?;
    Ok((name, value(text.trim())?))
}

fn value(text: &str) -> Result<HeaderValue, String> {
    // Clients may send any bytes but control characters.
    HeaderValue::from_bytes(text.as_bytes()).map_err(|_| "a header cannot have control characters".to_owned())
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write it like `tenant=7`")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn time(text: &str) -> Result<Timestamp, String> {
    let stamp = date::parse(text.as_bytes()).filter(|_| text.contains(':'));
    let stamp = stamp.ok_or("write it like `2026-11-25T09:00:00+01:00`")?;
    Ok(Timestamp::from_micros(stamp.us))
}

fn descriptor(text: &str) -> Result<Descriptor, String> {
    let entries = text.split(',').map(|entry| entry.split_once('=').ok_or("write it like `path=/search,tenant=7`"));
    Ok(Descriptor::new(entries.collect::<Result<Vec<_>, _>>()?))
}

pub(crate) fn run(options: &Options, output: &mut Output) -> Result<u8, String> {
    let mut builder = files::builder()?;
    for (name, value) in &options.keys {
        let value = value.clone();
        builder = builder.key(name, move |_| value.clone());
    }
    for action in &options.actions {
        builder = builder.action(action, |_| true);
    }
    if let Some(at) = options.at {
        builder = builder.clock(ManualClock::at(at));
    }
    files::check_names(&builder)?;
    let descriptors = options.descriptors.clone();
    builder = builder.descriptors(move |_| descriptors.clone());
    let (file, text) = (files::name(&options.file), files::read(&options.file)?);
    let mut notes: Vec<Cow<'static, str>> = Vec::new();
    if let Ok(used) = files::builder()?.check(&text) {
        let is_used =
            |kind, name: &str| used.unregistered().iter().any(|used| (used.kind(), used.name()) == (kind, name));
        let keys = options.keys.iter().filter(|(name, _)| !is_used(NameKind::Key, name));
        notes.extend(keys.map(|(name, _)| format!("no rule uses what --key {name} names").into()));
        let actions = options.actions.iter().filter(|name| !is_used(NameKind::Action, name));
        notes.extend(actions.map(|name| format!("no rule uses what --action {name} names").into()));
    }
    let rules = builder.check(&text).and_then(|report| {
        for name in report.unregistered() {
            notes.push(note(name).into());
            let (kind, name) = (name.kind(), name.name().to_owned());
            let given = builder.clone();
            builder = match kind {
                NameKind::Action => given.action(name, |_| false),
                _ => given.key(name.clone(), move |_| format!("<{name}>")),
            };
        }
        builder.read_text(text)
    });
    // It has room for every quota that a file can have.
    let mut limiter = MemoryLimiter::builder().max_keys(1_000).min_entries(1_100_000);
    if let Some(at) = options.at {
        limiter = limiter.clock(ManualClock::at(at));
    }
    let limiter = limiter.build().map_err(|error| format!("error: {error}"))?;
    let has_descriptors = |rules: &Rules| rules.descriptor_limits(limiter.clone()).is_ok();
    let layer = match rules.and_then(|rules| Ok((has_descriptors(&rules), rules.layer(limiter.clone())?))) {
        Ok((has_descriptors, layer)) => {
            let given = (has_descriptors, options.descriptors.is_empty(), options.client);
            let note = match given {
                (true, true, _) => Some("the request has no descriptor, as there is no --descriptor KEY=VALUE"),
                (false, false, _) => Some("no rule uses --descriptor, as the file does not have Envoy's form"),
                (false, true, None) => Some("the request has no client's address, as there is no --client IP"),
                _ => None,
            };
            notes.extend(note.map(Cow::Borrowed));
            layer
        }
        Err(error) => {
            output.problems(&file, &error);
            return Ok(exit::PROBLEMS);
        }
    };
    let request = options.request();
    let Poll::Ready(explanation) = pin!(layer.explain(&request)).poll(&mut Context::from_waker(Waker::noop())) else {
        return Err("error: the limiter in memory did not answer at once".to_owned());
    };
    if options.json {
        let explanation: Value = serde_json::from_str(&explanation.to_json()).map_err(|error| error.to_string())?;
        output.json(json!({ "notes": notes, "explanation": explanation }));
    } else {
        notes.iter().for_each(|note| output.line(format_args!("note: {note}")));
        output.line(explanation);
    }
    Ok(exit::FINE)
}

/// Says that only the program knows a name.
fn note(name: &UnregisteredName) -> String {
    let line = name.problem().line();
    let meant = name.problem().suggestion().map(|meant| format!(" (did you mean `{meant}`?)")).unwrap_or_default();
    let (kind, name) = (name.kind(), name.name());
    match kind {
        NameKind::Action => format!(
            "line {line}: only the program knows which requests are `{name}`{meant}; this one is not, as there is no \
             --action {name}"
        ),
        _ => format!(
            "line {line}: only the program knows the key `{name}`{meant}; it is <{name}> here, as there is no --key \
             {name}=VALUE"
        ),
    }
}

impl Options {
    fn request(&self) -> Parts {
        let (mut parts, ()) = Request::new(()).into_parts();
        (parts.method, parts.uri) = (self.method.clone(), self.path.clone());
        if let Some(host) = &self.host {
            parts.headers.append(HOST, host.clone());
        }
        for (name, value) in &self.headers {
            parts.headers.append(name, value.clone());
        }
        if let Some(client) = self.client {
            parts.extensions.insert(PeerAddr::from(client));
        }
        parts
    }
}
