//! Reads the requests of browsers and programs.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use http::header::{ACCEPT, CONTENT_TYPE, HOST, ORIGIN};
use http::request::Parts;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri};
use percent_encoding::percent_decode_str;

#[cfg(feature = "fleet")]
use super::action::ActionKind;
use super::action::{Act, OWN};
use crate::base::fields::is_unacceptable;
use crate::key::{DescribedClient, PeerAddr};
use crate::mode::Mode;

/// The longest form, in bytes.
pub(super) const FORM_MAX: usize = 16_384;

/// The maximum number of headers of a described request.
const HEADERS_MAX: usize = 64;

/// The prefix of the names of fields that describe an extension.
pub(super) const EXTENSION: &str = "extension.";

/// Adds the extension that a text describes to a request. Returns `false` if the text describes no extension.
type InsertExtension = Arc<dyn Fn(&str, &mut Extensions) -> bool + Send + Sync>;

/// A field of the form that describes an extension of a request.
#[derive(Clone)]
pub(super) struct ExtensionField {
    pub(super) name: String,
    insert: InsertExtension,
}

/// An error: the status of the answer, and its text.
pub(super) type Wrong = (StatusCode, Cow<'static, str>);

/// Returns whether the answer should be JSON, because the client accepts JSON and not HTML.
pub(super) fn wants_json(headers: &HeaderMap) -> bool {
    accepts(headers, "application/json") && !wants_page(headers)
}

/// Returns whether the client accepts HTML by its name, as browsers do.
pub(super) fn wants_page(headers: &HeaderMap) -> bool {
    accepts(headers, "text/html")
}

fn accepts(headers: &HeaderMap, kind: &str) -> bool {
    let texts = headers.get_all(ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    let mut ranges = texts.flat_map(|text| text.split(',')).filter(|range| !is_unacceptable(range.as_bytes()));
    ranges.any(|range| range.split(';').next().is_some_and(|range| range.trim().eq_ignore_ascii_case(kind)))
}

/// Refuses a form that a page of another site caused a browser to send. A browser states the origin of a request in
/// `Sec-Fetch-Site`, and an older browser in `Origin`. A program that sends neither header acts only for itself.
pub(super) fn refuse_other_sites(parts: &Parts) -> Result<(), Wrong> {
    let text = |name: HeaderName| parts.headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let is_own = match (text(HeaderName::from_static("sec-fetch-site")), text(ORIGIN)) {
        (Some(site), _) => site == "same-origin" || site == "none",
        (None, Some(origin)) => {
            let host = parts.uri.authority().map(|authority| authority.as_str()).or_else(|| text(HOST));
            let of_origin = origin.split_once("://").map(|(_, host)| host);
            of_origin.is_some_and(|origin| host.is_some_and(|host| origin.eq_ignore_ascii_case(host)))
        }
        (None, None) => true,
    };
    if is_own { Ok(()) } else { Err((StatusCode::FORBIDDEN, "the form comes from another site".into())) }
}

/// Refuses an action that a browser sends to a name which the program does not list. Another site may point its own
/// name at this server, and the browser then treats the site's pages and this page as one site. Nobody can point an
/// IP address or `localhost` to another server.
///
/// A program that is not a browser sends neither `Sec-Fetch-Site` nor `Origin`, and acts only for itself.
pub(super) fn refuse_other_names(parts: &Parts, hosts: &[String]) -> Result<(), Wrong> {
    let is_browser =
        [HeaderName::from_static("sec-fetch-site"), ORIGIN].iter().any(|name| parts.headers.contains_key(name));
    match host_name(parts).filter(|_| is_browser) {
        Some(name) if !is_known(name, hosts) => {
            let message = format!(
                "the program does not list the host name {}, which a foreign site may have given this server: list the \
                 name with `StatusPage::hosts` to act under it",
                printable(name)
            );
            Err((StatusCode::FORBIDDEN, message.into()))
        }
        _ => Ok(()),
    }
}

/// Refuses a request to a host name that is not listed, if the program lists names.
pub(super) fn refuse_unlisted_names(parts: &Parts, hosts: &[String]) -> Result<(), Wrong> {
    let is_refused = |name: &str| !hosts.is_empty() && !is_known(name, hosts);
    if host_name(parts).is_some_and(is_refused) {
        return Err((StatusCode::MISDIRECTED_REQUEST, "this page has another name".into()));
    }
    Ok(())
}

fn is_known(name: &str, hosts: &[String]) -> bool {
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let is_local = |name: &str| name.eq_ignore_ascii_case("localhost");
    bare.parse::<IpAddr>().is_ok() || is_local(name) || hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
}

/// Returns the host name that a request was sent to, without a port and a trailing dot. Returns `None` if the request
/// has no host name.
fn host_name(parts: &Parts) -> Option<&str> {
    let host = parts.uri.authority().map(|authority| authority.as_str());
    // A host that is not text becomes `?`, which no list of hosts has.
    let host = host.or_else(|| Some(parts.headers.get(HOST)?.to_str().unwrap_or("?")))?;
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    Some(name.strip_suffix('.').unwrap_or(name))
}

/// The action of a form.
#[derive(Debug)]
pub(super) enum FormAction {
    Explain(Box<Described>),
    /// Explains the listed key with this fingerprint.
    ExplainKey(String),
    /// A request with a wrong description, and the error.
    Unclear(ExplainForm, String),
    /// Sets the mode of the switch with this name.
    Switch(String, Mode),
    /// Acts on the keys that were explained with this token, under the policies with these names, or under all policies
    /// if there are no names.
    Act {
        act: Act,
        token: String,
        policies: Vec<String>,
        /// The request or key that was explained, for a process that did not explain it.
        explained: Option<ExplainForm>,
    },
    /// Changes a setting of all processes.
    #[cfg(feature = "fleet")]
    Setting(SettingForm),
}

/// The fields of the form that makes or ends a setting for all processes, as they were sent.
#[cfg(feature = "fleet")]
#[derive(Debug)]
pub(super) struct SettingForm {
    pub(super) action: ActionKind,
    /// The kind and the name of the setting, separated by a space.
    pub(super) setting: String,
    pub(super) subject: String,
    /// The name of an entry that the page lists, if the form has this name instead of a setting and a
    /// subject.
    pub(super) entry: String,
    pub(super) value: String,
    pub(super) lasting: String,
    pub(super) why: String,
    /// The revision of the settings that the operator saw.
    pub(super) seen: String,
    /// The explained key, if the form has it instead of a setting and a subject.
    pub(super) key: Option<KeyForm>,
}

/// The fields of a form that name a key that was explained.
#[cfg(feature = "fleet")]
#[derive(Debug)]
pub(super) struct KeyForm {
    pub(super) token: String,
    /// The policy under which the key is meant.
    pub(super) policy: String,
    /// The request or key that was explained, for a process that did not explain it.
    pub(super) explained: Option<ExplainForm>,
}

/// A described request, and the form that describes it.
#[derive(Debug)]
pub(super) struct Described {
    pub(super) form: ExplainForm,
    pub(super) request: Parts,
}

/// The fields of the form that describes a request, as they were sent.
#[derive(Debug, Default)]
pub(super) struct ExplainForm {
    /// The fingerprint of the key, if a listed key is explained instead of a request.
    pub(super) fingerprint: Option<String>,
    /// The name of the key with this fingerprint, if it has a name.
    pub(super) name: Option<Box<str>>,
    pub(super) method: String,
    pub(super) uri: String,
    pub(super) client: String,
    pub(super) headers: String,
    /// The names and texts of extensions that are not empty.
    pub(super) extensions: Vec<(String, String)>,
}

impl ExtensionField {
    pub(super) fn new<T, F>(name: String, read: F) -> Self
    where
        T: Clone + Send + Sync + 'static,
        F: Fn(&str) -> Option<T> + Send + Sync + 'static,
    {
        let insert = move |text: &str, extensions: &mut Extensions| {
            let extension = read(text);
            extension.map(|extension| extensions.insert(extension)).is_some()
        };
        Self { name, insert: Arc::new(insert) }
    }
}

impl FormAction {
    /// Reads a form. `known` are the extensions that the form may describe.
    pub(super) fn read(parts: &Parts, body: &[u8], known: &[ExtensionField]) -> Result<Self, Wrong> {
        let kind = parts.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
        if kind
            .split(';')
            .next()
            .is_none_or(|kind| !kind.trim().eq_ignore_ascii_case("application/x-www-form-urlencoded"))
        {
            let message = "send a form: Content-Type: application/x-www-form-urlencoded";
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, message.into()));
        }
        let fields = fields(body);
        let field = |name: &str| {
            let found = fields.iter().find(|(own, _)| own == name);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        match field("action").as_str() {
            "explain" if !field("fingerprint").trim().is_empty() => {
                Ok(Self::ExplainKey(field("fingerprint").trim().to_owned()))
            }
            "explain" => {
                let form = ExplainForm::of(&fields);
                Ok(match form.request(known) {
                    Ok(request) => Self::Explain(Box::new(Described { form, request })),
                    Err(message) => Self::Unclear(form, message),
                })
            }
            "switch" => {
                let label = field("mode");
                let Some(mode) = Mode::ALL.iter().find(|mode| mode.as_str() == label) else {
                    return Err(wrong(&format!("`mode` is `enforce`, `degrade` or `shadow`, not `{label}`")));
                };
                Ok(Self::Switch(field("name"), *mode))
            }
            #[cfg(feature = "fleet")]
            action @ ("set" | "end" | "rollback") => Ok(Self::Setting(SettingForm {
                action: match action {
                    "set" => ActionKind::Set,
                    "end" => ActionKind::End,
                    _ => ActionKind::Rollback,
                },
                setting: field("setting"),
                subject: field("subject"),
                entry: field("entry"),
                value: field("value"),
                lasting: field("lasting"),
                why: field("why"),
                seen: field("seen"),
                key: (!field("token").trim().is_empty()).then(|| KeyForm {
                    token: field("token").trim().to_owned(),
                    policy: field("policy"),
                    explained: Some(ExplainForm::of(&fields)).filter(|form| !form.is_empty()),
                }),
            })),
            other => {
                let act = match (other, other.strip_prefix(OWN)) {
                    ("unblock", _) => Act::Unblock,
                    ("reset", _) => Act::Reset,
                    (_, Some(name)) => Act::Own(name.into()),
                    _ => {
                        let known = "`explain`, `unblock`, `reset`, `switch`, `set`, `end`, `rollback`, or a name after \
                                     `own.`";
                        return Err(wrong(&format!("`action` is {known}, not `{other}`")));
                    }
                };
                let policies = fields.iter().filter(|(name, _)| name == "policy").map(|(_, policy)| policy.clone());
                let (token, form) = (field("token").trim().to_owned(), ExplainForm::of(&fields));
                let explained = (!form.is_empty()).then_some(form);
                Ok(Self::Act { act, token, policies: policies.collect(), explained })
            }
        }
    }
}

impl ExplainForm {
    /// Makes the form from its fields.
    fn of(fields: &[(String, String)]) -> Self {
        let field = |name: &str| {
            let found = fields.iter().find(|(own, _)| own == name);
            found.map(|(_, value)| value.clone()).unwrap_or_default()
        };
        let fingerprint = field("fingerprint").trim().to_owned();
        Self {
            fingerprint: (!fingerprint.is_empty()).then_some(fingerprint),
            name: None,
            method: field("method"),
            uri: field("uri"),
            client: field("client"),
            headers: field("headers"),
            extensions: extensions(fields),
        }
    }

    /// Returns the names and texts of the fields that are not empty.
    pub(super) fn fields(&self) -> impl Iterator<Item = (Cow<'static, str>, &str)> {
        let texts = [
            ("fingerprint", self.fingerprint.as_deref().unwrap_or_default()),
            ("method", &self.method),
            ("uri", &self.uri),
            ("client", &self.client),
            ("headers", &self.headers),
        ];
        let texts = texts.into_iter().map(|(name, text)| (Cow::Borrowed(name), text));
        let extensions = self.extensions.iter().map(|(name, text)| (format!("{EXTENSION}{name}").into(), &**text));
        texts.filter(|(_, text)| !text.is_empty()).chain(extensions)
    }

    /// Returns whether the form describes neither a request nor a key.
    fn is_empty(&self) -> bool {
        self.fields().next().is_none()
    }

    /// Returns the method as it was sent, or `GET` if it is empty.
    pub(super) fn method(&self) -> &str {
        if self.method.is_empty() { "GET" } else { &self.method }
    }

    /// Returns the URI as it was sent, or `/` if it is empty.
    pub(super) fn uri(&self) -> &str {
        if self.uri.is_empty() { "/" } else { &self.uri }
    }

    /// Returns the request that the form describes, or a text that says what is wrong with the form.
    pub(super) fn request(&self, known: &[ExtensionField]) -> Result<Parts, String> {
        let method = self.method().trim();
        let method =
            Method::from_bytes(method.as_bytes()).map_err(|_| printable(&format!("`{method}` is not a method")))?;
        let uri = self.uri().trim();
        // A path without its slash would be read as a host.
        let is_whole = |parsed: &Uri| parsed.scheme().is_some() || parsed.path().starts_with('/') || uri == "*";
        let uri: Uri = uri
            .parse()
            .ok()
            .filter(is_whole)
            .ok_or_else(|| printable(&format!("`{uri}` is not a path or a URI: write it like `/posts?page=2`")))?;
        let (mut request, ()) = Request::new(()).into_parts();
        (request.method, request.uri) = (method, uri);
        for line in self.headers.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let header = line.split_once(':').and_then(|(name, value)| {
                Some((HeaderName::try_from(name.trim()).ok()?, HeaderValue::try_from(value.trim()).ok()?))
            });
            let Some((name, value)) = header else {
                return Err(printable(&format!("`{line}` is not a header: write it like `x-api-key: abc`")));
            };
            if request.headers.len() == HEADERS_MAX {
                return Err(printable(&format!("a described request has at most {HEADERS_MAX} headers")));
            }
            request.headers.append(name, value);
        }
        if !self.client.trim().is_empty() {
            let client: IpAddr = self.client.trim().parse().map_err(|_| {
                printable(&format!(
                    "`{}` is not an address: write it like `192.0.2.1` or `2001:db8::1`",
                    self.client.trim()
                ))
            })?;
            request.extensions.insert(PeerAddr::from(client));
            request.extensions.insert(DescribedClient(client.to_canonical()));
        }
        for (name, text) in &self.extensions {
            let Some(field) = known.iter().find(|field| field.name == *name) else {
                let names: Vec<String> = known.iter().map(|field| format!("`{EXTENSION}{}`", field.name)).collect();
                let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                return Err(printable(&format!("`{EXTENSION}{name}` is not a field of this page, which has {names}")));
            };
            if !(field.insert)(text, &mut request.extensions) {
                return Err(printable(&format!("`{text}` stands for no {name}")));
            }
        }
        Ok(request)
    }
}

/// Returns the names and texts of the fields that describe extensions, except empty fields.
fn extensions(fields: &[(String, String)]) -> Vec<(String, String)> {
    let of = |(name, text): &(String, String)| Some((name.strip_prefix(EXTENSION)?.to_owned(), text.trim().to_owned()));
    fields.iter().filter_map(of).filter(|(_, text)| !text.is_empty()).collect()
}

/// Makes an error.
pub(super) fn wrong(message: &str) -> Wrong {
    (StatusCode::BAD_REQUEST, printable(message).into())
}

/// Returns the text of an error. The text may repeat parts of the form, so control characters are replaced, because
/// they could move a terminal's cursor.
pub(super) fn printable(message: &str) -> String {
    message.replace(char::is_control, "\u{fffd}")
}

/// Reads the fields of a form (WHATWG URL, section 5.1).
fn fields(body: &[u8]) -> Vec<(String, String)> {
    let decoded = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).replace('+', " ");
        percent_decode_str(&text).decode_utf8_lossy().into_owned()
    };
    let fields = body.split(|byte| *byte == b'&').filter(|field| !field.is_empty());
    let fields = fields.map(|field| {
        let (name, value) = match field.iter().position(|byte| *byte == b'=') {
            Some(at) => (field.get(..at).unwrap_or_default(), field.get(at + 1..).unwrap_or_default()),
            None => (field, &[][..]),
        };
        (decoded(name), decoded(value))
    });
    fields.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::post("/status");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn browser_acts_under_addresses_and_listed_names_only() {
        let hosts = ["limits.example".to_owned()];
        let acts = |host: &str| {
            let parts = parts(&[("host", host), ("sec-fetch-site", "same-origin")]);
            refuse_other_names(&parts, &hosts).is_ok()
        };
        for host in ["127.0.0.1:3001", "[::1]:3001", "10.2.3.4", "localhost", "LocalHost.:80", "Limits.example:8443"] {
            assert!(acts(host), "{host}");
        }
        for host in
            ["attacker.example", "127.0.0.1.attacker.example:3001", "limits.example.attacker.example", "", "a@b"]
        {
            assert!(!acts(host), "{host}");
        }
        let old_browser = parts(&[("host", "attacker.example"), ("origin", "http://attacker.example")]);
        assert!(refuse_other_names(&old_browser, &hosts).is_err());
        let program = parts(&[("host", "limits.internal")]);
        assert!(refuse_other_names(&program, &[]).is_ok(), "a program sends no Origin");
    }

    #[test]
    fn unlisted_name_is_refused_if_names_are_listed() {
        let program = parts(&[("host", "limits.internal")]);
        assert!(refuse_unlisted_names(&program, &[]).is_ok());
        assert!(refuse_unlisted_names(&program, &["limits.internal".to_owned()]).is_ok());
        assert!(refuse_unlisted_names(&program, &["limits.example".to_owned()]).is_err());
    }

    #[derive(Clone, Debug, PartialEq)]
    struct User(u64);

    fn user() -> ExtensionField {
        ExtensionField::new("user".to_owned(), |text| Some(User(text.parse().ok()?)))
    }

    fn read(form: &str) -> Result<FormAction, String> {
        let parts = parts(&[("content-type", "application/x-www-form-urlencoded; charset=utf-8")]);
        match FormAction::read(&parts, form.as_bytes(), &[user()]) {
            Ok(FormAction::Unclear(_, message)) => Err(message),
            read => read.map_err(|(_, message)| message.into_owned()),
        }
    }

    #[test]
    fn json_is_answered_if_it_is_accepted_and_html_is_not() {
        let json = |accept| wants_json(&parts(&[("accept", accept)]).headers);
        assert!(json("application/json") && json("Application/JSON;q=1, */*"));
        assert!(!json("text/html,application/xhtml+xml,application/json;q=0.9,*/*") && !json("*/*"));
        assert!(!wants_json(&HeaderMap::new()));
        assert!(
            json("text/html;q=0, application/json")
                && !json("application/json;q=0")
                && !json("application/json; Q=0.0")
        );
    }

    #[test]
    fn form_of_another_site_is_refused() {
        let refused = |headers: &[(&str, &str)]| refuse_other_sites(&parts(headers)).is_err();
        for own in [
            &[][..],
            &[("sec-fetch-site", "same-origin"), ("origin", "null")],
            &[("sec-fetch-site", "none")],
            &[("origin", "https://Ops.example:8443"), ("host", "ops.example:8443")],
        ] {
            assert!(!refused(own), "{own:?}");
        }
        for other in [
            &[("sec-fetch-site", "cross-site")][..],
            &[("sec-fetch-site", "same-site"), ("origin", "https://ops.example"), ("host", "ops.example")],
            &[("sec-fetch-site", "\u{fe}")],
            &[("origin", "null"), ("host", "ops.example")],
            &[("origin", "https://evil.example"), ("host", "ops.example")],
            &[("origin", "https://ops.example:1"), ("host", "ops.example")],
            &[("origin", "https://ops.example")],
        ] {
            assert!(refused(other), "{other:?}");
        }
    }

    #[test]
    fn described_request_is_made_of_its_fields() {
        let form = "action=explain&method=POST&uri=%2Fposts%3Fa%3Db+c&client=2001%3Adb8%3A%3A1&headers=x-a%3A+1%0D%0A%0D%0Ax-a%3A2";
        assert_eq!(read(form).unwrap_err(), "`/posts?a=b c` is not a path or a URI: write it like `/posts?page=2`");
        let Ok(FormAction::Explain(described)) = read(&form.replace("b+c", "b%2520c")) else { panic!() };
        let Described { request, form } = *described;
        assert!(request.extensions.get::<User>().is_none());
        assert_eq!((request.method.as_str(), request.uri.to_string().as_str()), ("POST", "/posts?a=b%20c"));
        assert_eq!(request.headers.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(crate::key::peer_address(&(&request).into()), "2001:db8::1".parse().ok());
        assert_eq!(form.headers, "x-a: 1\r\n\r\nx-a:2");
        let Ok(FormAction::Explain(described)) = read("action=explain") else { panic!() };
        let request = described.request;
        assert_eq!((request.method.as_str(), request.uri.path()), ("GET", "/"));
    }

    #[test]
    fn extension_is_made_of_its_field() {
        let user = |form: &str| match read(form) {
            Ok(FormAction::Explain(described)) => described.request.extensions.get::<User>().cloned(),
            other => panic!("{other:?}"),
        };
        assert_eq!(user("action=explain&extension.user=+7"), Some(User(7)));
        assert_eq!((user("action=explain&extension.user=+"), user("action=explain&extension.=&user=7")), (None, None));
    }

    #[test]
    fn wrong_form_is_refused_with_the_reason() {
        for (form, reason) in [
            ("", "`action` is"),
            ("action=delete", "not `delete`"),
            ("action=switch&mode=off", "not `off`"),
            ("action=explain&method=G%20T", "is not a method"),
            ("action=explain&method=%1B%5B2J", "`\u{fffd}[2J` is not a method"),
            ("action=explain&uri=posts", "`posts` is not a path or a URI: write it like `/posts?page=2`"),
            ("action=explain&uri=%1B%5B2J", "`\u{fffd}[2J` is not a path"),
            ("action=explain&client=nobody", "is not an address"),
            ("action=explain&headers=nothing", "is not a header"),
            ("action=explain&extension.user=ali%1Bce", "`ali\u{fffd}ce` stands for no user"),
            (
                "action=explain&extension.plan=1",
                "`extension.plan` is not a field of this page, which has `extension.user`",
            ),
            ("action=explain&headers=a%3A%01", "is not a header"),
        ] {
            assert!(read(form).unwrap_err().contains(reason), "{form}");
        }
        let headers = format!("action=explain&headers={}", "a:b%0A".repeat(HEADERS_MAX + 1));
        assert!(read(&headers).unwrap_err().contains("at most 64 headers"));
        assert_eq!(
            FormAction::read(&parts(&[]), b"action=explain", &[]).unwrap_err().0,
            StatusCode::UNSUPPORTED_MEDIA_TYPE
        );
    }
}
