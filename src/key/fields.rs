//! Extractors for headers, cookies, methods, hosts and extensions.

use std::any::Any;
use std::borrow::Cow;

use http::header::{AUTHORIZATION, COOKIE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::base::head::Head;

use super::forwarded::split_once;
use super::value::{IntoKey, Key};

/// Returns an extractor of one key for all requests.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
///
/// let layer =
///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_second(5_000), key::global());
/// ```
pub fn global() -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    |_| Some(Key::global())
}

/// Returns an extractor of a header's value: `key::header("x-api-key")`.
///
/// The key is missing if the header is absent or empty. The key is always missing if `name` is not a
/// valid header name. Spaces around the value are ignored.
///
/// All requests with several headers of this name share one key, because the service may read another
/// value than the extractor. Requests with several headers do not count as requests without a key.
/// Otherwise a client could send its API key twice to escape a rule with
/// [`MissingKey::Exempt`](crate::MissingKey::Exempt).
///
/// A client can send any value. Unless an outer layer or a proxy checks the value, a client can invent
/// a new value for each request. So add a limit by address.
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let by_key = key::header("x-api-key");
/// let request = Request::get("/").header("x-api-key", "k1").body(())?;
/// assert_eq!(by_key(&Head::from(&request)), Key::of("k1"));
/// assert_eq!(by_key(&Head::from(&Request::new(()))), None);
/// # Ok(()) }
/// ```
pub fn header(name: &str) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    let name = HeaderName::try_from(name).ok();
    move |head| only(head.headers, name.as_ref()?).map_or_else(|none| none, IntoKey::into_key)
}

/// Returns an extractor of the token of `Authorization: Bearer <token>`. The case of the scheme
/// does not matter (RFC 9110 section 11.1).
///
/// The key is missing if the header or the token is missing. All requests with several `Authorization`
/// headers share one key. The token is not checked; see [`header`].
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let by_token = key::bearer_token();
/// let request = Request::get("/").header("authorization", "bearer t1").body(())?;
/// assert_eq!(by_token(&Head::from(&request)), Key::of("t1"));
/// # Ok(()) }
/// ```
pub fn bearer_token() -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    |head| {
        let value = match only(head.headers, &AUTHORIZATION) {
            Ok(value) => value.as_bytes(),
            Err(none) => return none,
        };
        let (scheme, token) = value.split_at_checked(6)?;
        let rest = token.trim_ascii();
        let spaced = token.first().is_some_and(u8::is_ascii_whitespace);
        (scheme.eq_ignore_ascii_case(b"bearer") && spaced && !rest.is_empty()).then(|| text_or_bytes(rest))?
    }
}

/// Returns an extractor of a cookie's value: `key::cookie("session")`.
///
/// Names and values are percent-decoded, and quotes around values are removed, as in cookie libraries.
/// So a client does not get a second allowance with another spelling of its session.
///
/// The key is missing if the cookie is absent or empty. All requests with several different values
/// share one key, because the service may read another value than the extractor. The value is not
/// checked; see [`header`].
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let by_session = key::cookie("session");
/// let request = Request::get("/").header("cookie", "lang=en; session=%73%31").body(())?;
/// assert_eq!(by_session(&Head::from(&request)), Key::of("s1"));
/// # Ok(()) }
/// ```
pub fn cookie(name: impl Into<String>) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    let name = name.into();
    move |head| {
        let mut found: Option<Cow<'_, [u8]>> = None;
        for line in head.headers.get_all(COOKIE) {
            for pair in line.as_bytes().split(|byte| *byte == b';') {
                let Some((candidate, value)) = split_once(pair, b'=') else { continue };
                if *percent_decoded(candidate.trim_ascii()) != *name.as_bytes() {
                    continue;
                }
                let value = percent_decoded(unquoted(value.trim_ascii()));
                if found.is_some_and(|earlier| earlier != value) {
                    return Some(Key::ambiguous());
                }
                found = Some(value);
            }
        }
        found.filter(|value| !value.is_empty()).and_then(|value| text_or_bytes(&value))
    }
}

/// Drops one pair of quotes.
fn unquoted(value: &[u8]) -> &[u8] {
    value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")).unwrap_or(value)
}

fn percent_decoded(text: &[u8]) -> Cow<'_, [u8]> {
    percent_encoding::percent_decode(text).into()
}

/// Returns an extractor of the request's method. A client can invent methods. The service refuses
/// invented methods, but each method is a new key.
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let request = Request::post("/").body(())?;
/// assert_eq!(key::method()(&Head::from(&request)), Key::of("POST"));
/// # Ok(()) }
/// ```
pub fn method() -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    |head| head.method.as_str().into_key()
}

/// Returns an extractor of the request's host, in lower case, without a port and a dot at its end. The
/// host is taken from the URI (HTTP/2), and otherwise from the `Host` header.
///
/// The key is missing if neither the URI nor a `Host` header has a host. All requests with several
/// `Host` headers share one key. Requests whose URI and `Host` header have different hosts share this
/// key, too, because the service may use either host. A client can send any host, so check the host
/// against the hosts that you serve, or add a limit by address.
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let request = Request::get("/").header("host", "Shop.example.:8080").body(())?;
/// assert_eq!(key::host()(&Head::from(&request)), Key::of("shop.example"));
/// # Ok(()) }
/// ```
pub fn host() -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    |head| match host_of(head) {
        Ok(host) => text_or_bytes(&host),
        Err(none) => none,
    }
}

/// Returns the request's host like [`host`]. If the host is ambiguous or missing, returns the key to
/// use instead, if there is one.
pub(crate) fn host_of<'a>(head: &Head<'a>) -> Result<Cow<'a, [u8]>, Option<Key>> {
    let header = only(head.headers, &HOST).map(|value| named(without_port(value.as_bytes().trim_ascii())));
    let host = match (head.uri.host(), header) {
        (None, header) => header?,
        (Some(host), Err(None)) => named(host.as_bytes()),
        (Some(_), Err(several)) => return Err(several),
        (Some(host), Ok(header)) => match named(host.as_bytes()) {
            host if host.eq_ignore_ascii_case(header) => host,
            _ => return Err(Some(Key::ambiguous())),
        },
    };
    match host {
        [] => Err(None),
        host if host.iter().any(u8::is_ascii_uppercase) => Ok(host.to_ascii_lowercase().into()),
        host => Ok(host.into()),
    }
}

/// Returns an extractor of a value that an outer layer has put into the request's extensions, such as
/// an authenticated user, a tenant, or a peer's certificate.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
///
/// #[derive(Clone)]
/// struct User {
///     id: u64,
/// }
///
/// let by_user = key::extension(|user: &User| user.id);
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), by_user);
/// ```
///
/// The key is missing if there is no such value, or if `read` returns `None`.
///
/// If `read` returns a borrow, such as `&user.name`, the compiler says `lifetime may not live long enough`. Return
/// `Key::of(user.name.as_str())`.
pub fn extension<T, K, F>(read: F) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static
where
    T: Any + Send + Sync,
    K: IntoKey,
    F: Fn(&T) -> K + Clone + Send + Sync + 'static,
{
    move |head| read(head.extensions.get::<T>()?).into_key()
}

/// Returns an extractor that combines the keys of two other extractors. For example,
/// `key::both(key::peer_ip(), key::path())` gives each address a separate allowance for each path. The
/// key is missing if either of the two keys is missing.
///
/// A closure that returns a tuple combines its parts in the same way.
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let by_both = key::both(key::header("x-tenant"), key::path());
/// let request = Request::get("/search?q=1").header("x-tenant", "acme").body(())?;
/// assert_eq!(by_both(&Head::from(&request)), Key::of(("acme", "/search")));
/// # Ok(()) }
/// ```
pub fn both<A, B, K, J>(first: A, second: B) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static
where
    A: Fn(&Head<'_>) -> K + Clone + Send + Sync + 'static,
    B: Fn(&Head<'_>) -> J + Clone + Send + Sync + 'static,
    K: IntoKey,
    J: IntoKey,
{
    move |head| Key::of((first(head), second(head)))
}

/// Returns an extractor of the first key, or of the second key if the first is missing. For example, such an
/// extractor limits by user, and by address while a client has not logged in.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
///
/// struct User {
///     id: u64,
/// }
///
/// let client = key::either(key::extension(|user: &User| user.id), key::peer_ip());
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), client);
/// ```
///
/// The service should check the value of the first key, because a client that can choose this value escapes its
/// limit by address. Keys of different types are never equal, but equal texts from both extractors are the same
/// key. To give users and addresses separate quotas, use two rules and
/// [`MissingKey::Exempt`](crate::MissingKey::Exempt).
pub fn either<A, B, K, J>(first: A, second: B) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static
where
    A: Fn(&Head<'_>) -> K + Clone + Send + Sync + 'static,
    B: Fn(&Head<'_>) -> J + Clone + Send + Sync + 'static,
    K: IntoKey,
    J: IntoKey,
{
    move |head| first(head).into_key().or_else(|| second(head).into_key())
}

impl IntoKey for HeaderValue {
    /// Makes the key from the value's text without the spaces around it, or from the value's bytes if
    /// they are not text. An empty value makes no key.
    fn into_key(self) -> Option<Key> {
        // HTTP/1 removes the spaces around a value (RFC 9110 section 5.5). HTTP/2 does not.
        let value = self.as_bytes().trim_ascii();
        if value.is_empty() { None } else { text_or_bytes(value) }
    }
}

impl IntoKey for Method {
    fn into_key(self) -> Option<Key> {
        self.as_str().into_key()
    }
}

/// Returns the header's value if the request has exactly one such header. If the request has none or
/// several such headers, returns the key to use instead, if there is one.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a HeaderValue, Option<Key>> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value),
        (None, _) => Err(None),
        (Some(_), Some(_)) => Err(Some(Key::ambiguous())),
    }
}

fn text_or_bytes(bytes: &[u8]) -> Option<Key> {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into_key(),
        Err(_) => bytes.into_key(),
    }
}

/// Returns a host without the dot at its end.
fn named(host: &[u8]) -> &[u8] {
    host.strip_suffix(b".").unwrap_or(host)
}

fn without_port(host: &[u8]) -> &[u8] {
    match host.iter().rposition(|byte| *byte == b':').map(|colon| host.split_at(colon)) {
        Some((name, port)) if port.iter().skip(1).all(u8::is_ascii_digit) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use http::request::Parts;

    use super::*;
    use crate::key::value::OrAbsent;

    fn parts(fields: &[(&str, &[u8])]) -> Parts {
        let (mut parts, ()) = http::Request::new(()).into_parts();
        for (name, value) in fields {
            let value = HeaderValue::from_bytes(value).unwrap();
            parts.headers.append(HeaderName::try_from(*name).unwrap(), value);
        }
        parts
    }

    #[test]
    fn a_header_is_the_key_of_its_text() {
        let by_key = header("X-Api-Key");
        assert_eq!(by_key(&Head::from(&parts(&[("x-api-key", b"abc")]))), Key::of("abc"));
        assert_eq!(HeaderValue::from_static("abc").into_key(), Key::of("abc"));
        assert_eq!((&HeaderValue::from_static("abc")).into_key(), Key::of("abc"));
    }

    /// A client can send them over HTTP/2; `tests/middleware/spoofing.rs` does.
    #[test]
    fn spaces_around_a_value_make_no_other_key() {
        let by_key = header("x-api-key");
        for spelling in [&b" abc"[..], b"abc  ", b"\tabc \t"] {
            assert_eq!(by_key(&Head::from(&parts(&[("x-api-key", spelling)]))), Key::of("abc"), "{spelling:?}");
            assert_eq!(HeaderValue::from_bytes(spelling).unwrap().into_key(), Key::of("abc"), "{spelling:?}");
        }
        assert_eq!(by_key(&Head::from(&parts(&[("x-api-key", b"a b")]))), Key::of("a b"));
        assert_eq!(by_key(&Head::from(&parts(&[("x-api-key", b"  ")]))), None);
    }

    #[test]
    fn header_that_is_absent_empty_or_impossible_is_no_key() {
        let by_key = header("x-api-key");
        assert_eq!(by_key(&Head::from(&parts(&[]))), None);
        assert_eq!(by_key(&Head::from(&parts(&[("x-api-key", b"")]))), None);
        assert_eq!(header("no such name")(&Head::from(&parts(&[("x-api-key", b"a")]))), None);
    }

    #[test]
    fn several_values_are_one_key_that_nothing_else_makes() {
        let twice = |name: &str, value: &[u8]| parts(&[(name, value), (name, value)]);
        let shared = Some(Key::ambiguous());
        assert_eq!(header("x-api-key")(&Head::from(&twice("x-api-key", b"a"))), shared);
        assert_eq!(bearer_token()(&Head::from(&twice("authorization", b"Bearer a"))), shared);
        assert_eq!(host()(&Head::from(&twice("host", b"example.com"))), shared);
        assert_eq!(cookie("a")(&Head::from(&parts(&[("cookie", b"a=b; a=c")]))), shared);
        for other in
            [Some(Key::global()), Key::of(""), Key::of("a"), Key::of(OrAbsent::<&str>(None)), Some(Key::keyless())]
        {
            assert_ne!(other, shared);
        }
    }

    #[test]
    fn a_value_that_is_not_text_is_a_key_of_its_own() {
        let by_key = header("x-api-key");
        let latin = by_key(&Head::from(&parts(&[("x-api-key", b"caf\xe9")])));
        assert_eq!(latin, Key::of(&b"caf\xe9"[..]));
        assert_ne!(latin, by_key(&Head::from(&parts(&[("x-api-key", b"caf\xe8")]))));
    }

    #[test]
    fn a_bearer_token_is_found_whatever_the_case_of_its_scheme() {
        for value in [&b"Bearer abc"[..], b"bearer abc", b"BEARER   abc ", b"Bearer\tabc"] {
            assert_eq!(bearer_token()(&Head::from(&parts(&[("authorization", value)]))), Key::of("abc"), "{value:?}");
        }
        for value in [&b"Bearer"[..], b"Bearer ", b"Bearerabc", b"Basic abc", b"", b"B", b"abcdef\xff"] {
            assert_eq!(bearer_token()(&Head::from(&parts(&[("authorization", value)]))), None, "{value:?}");
        }
    }

    #[test]
    fn a_cookie_is_found_among_others_and_over_several_lines() {
        let session = cookie("session");
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"a=b; session=abc; c=d")]))), Key::of("abc"));
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"a=b"), ("cookie", b"session=x=y")]))), Key::of("x=y"));
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"session=a; session=a")]))), Key::of("a"));
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"session=")]))), None);
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"xsession=a; ;;=;session")]))), None);
    }

    #[test]
    fn spellings_of_one_cookie_are_one_key() {
        let session = cookie("session");
        for spelling in ["session=abc", "session=%61bc", "session=a%62%63", "session=\"abc\"", " session = abc ;"] {
            assert_eq!(session(&Head::from(&parts(&[("cookie", spelling.as_bytes())]))), Key::of("abc"), "{spelling}");
        }
        for spelling in ["%73ession=abc", "session=abc; sess%69on=%61bc", "session=abc; session=\"%61bc\""] {
            assert_eq!(session(&Head::from(&parts(&[("cookie", spelling.as_bytes())]))), Key::of("abc"), "{spelling}");
        }
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"session=abc; %73ession=b")]))), Some(Key::ambiguous()));
        for (value, key) in [("%", "%"), ("%4", "%4"), ("%zz", "%zz"), ("%2525", "%25"), ("\"", "\""), ("a+b", "a+b")] {
            let line = format!("session={value}");
            assert_eq!(session(&Head::from(&parts(&[("cookie", line.as_bytes())]))), Key::of(key), "{value}");
        }
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"session=%ff")]))), Key::of(&b"\xff"[..]));
        assert_eq!(session(&Head::from(&parts(&[("cookie", b"session=\"\"")]))), None);
    }

    #[test]
    fn a_host_has_no_port_and_no_capitals() {
        assert_eq!(host()(&Head::from(&parts(&[("host", b"Example.COM:8080")]))), Key::of("example.com"));
        assert_eq!(host()(&Head::from(&parts(&[("host", b"[2001:db8::1]:443")]))), Key::of("[2001:db8::1]"));
        for spelling in [&b"example.com."[..], b"EXAMPLE.com.:443", b" example.com:"] {
            assert_eq!(host()(&Head::from(&parts(&[("host", spelling)]))), Key::of("example.com"), "{spelling:?}");
        }
        for unusable in [&b""[..], b":80", b"."] {
            assert_eq!(host()(&Head::from(&parts(&[("host", unusable)]))), None, "{unusable:?}");
        }
        assert!(host()(&Head::from(&parts(&[("host", b"caf\xe9")]))).is_some());
        assert_eq!(host()(&Head::from(&parts(&[]))), None);
        let mut from_uri = parts(&[]);
        from_uri.uri = http::Uri::from_static("https://Example.com:1/x");
        assert_eq!(host()(&Head::from(&from_uri)), Key::of("example.com"));
        assert_eq!(method()(&Head::from(&from_uri)), Key::of("GET"));
        assert_eq!(Method::GET.into_key(), Key::of("GET"));
    }

    /// The service may read the other one. `tests/middleware/spoofing.rs` sends them over TCP.
    #[test]
    fn hosts_that_contradict_share_one_key() {
        for (fields, expected) in [
            (&[][..], Key::of("a.example")),
            (&[("host", &b"A.example.:80"[..])], Key::of("a.example")),
            (&[("host", b"b.example")], Some(Key::ambiguous())),
            (&[("host", b"")], Some(Key::ambiguous())),
            (&[("host", b"a.example:x")], Some(Key::ambiguous())),
            (&[("host", b"a.example"), ("host", b"a.example")], Some(Key::ambiguous())),
        ] {
            let mut both = parts(fields);
            both.uri = http::Uri::from_static("http://a.example:1/x");
            assert_eq!(host()(&Head::from(&both)), expected, "{fields:?}");
        }
    }

    #[test]
    fn both_keys_make_one_and_either_can_be_missing() {
        let pair = both(header("a"), header("b"));
        assert_eq!(pair(&Head::from(&parts(&[("a", b"1"), ("b", b"2")]))), Key::of(("1", "2")));
        assert_eq!(pair(&Head::from(&parts(&[("a", b"1")]))), None);
    }

    #[test]
    fn an_extension_is_read_if_it_is_there() {
        let by_number = extension(|number: &u64| *number);
        let mut with = parts(&[]);
        assert_eq!(by_number(&Head::from(&with)), None);
        with.extensions.insert(7_u64);
        assert_eq!(by_number(&Head::from(&with)), Key::of(7_u64));
    }
}
