//! The cost of a request.

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderValue, Method, Version};

use super::super::spec::CostSpec;
use crate::base::head::Head;

/// Returns the units that a request takes. A header's number counts only between 1 and the bound that the rule
/// states, because clients can send the header, too.
pub(super) fn cost_of(spec: &CostSpec) -> impl Fn(&Head<'_>) -> u64 + Send + Sync + 'static {
    let spec = spec.taken_first().clone();
    move |head| match &spec {
        CostSpec::Units(units) => *units,
        CostSpec::Header { name, at_most } => {
            let units = |value: &HeaderValue| {
                let units = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
                units.unwrap_or(*at_most).clamp(1, *at_most)
            };
            // The largest of several values counts, because a client may add a value of its own before the gateway's.
            head.headers.get_all(name).iter().map(units).max().unwrap_or(1)
        }
        // `Reserved` never gets here, because `taken_first` returns the units or the header inside it.
        CostSpec::ContentLength | CostSpec::Reserved(_) => content_length(head).unwrap_or(u64::MAX),
    }
}

/// Returns the number of bytes of a request's body, or `None` if the head does not state this number.
fn content_length(head: &Head<'_>) -> Option<u64> {
    let mut lengths = head.headers.get_all(CONTENT_LENGTH).iter();
    match (lengths.next(), lengths.next()) {
        _ if head.headers.contains_key(TRANSFER_ENCODING) => None,
        (Some(length), None) => {
            let digits = length.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
            digits.and_then(|digits| digits.parse().ok())
        }
        (Some(_), Some(_)) => None,
        // In HTTP/1 a request without these headers has no body (RFC 9112, section 6.3). In later versions of HTTP
        // the head does not say whether there is a body.
        (None, _) => {
            let has_usually_none = [Method::GET, Method::HEAD, Method::OPTIONS, Method::DELETE, Method::TRACE];
            let is_empty = head.version <= Version::HTTP_11 || has_usually_none.contains(head.method);
            is_empty.then_some(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;

    #[test]
    fn header_can_only_raise_the_cost() {
        let cost = cost_of(&CostSpec::Header { name: HeaderName::from_static("x-cost"), at_most: 100 });
        let of = |value: Option<&str>| {
            let mut request = http::Request::new(());
            if let Some(value) = value {
                request.headers_mut().insert("x-cost", value.parse().unwrap());
            }
            cost(&Head::from(&request))
        };
        for (value, expected) in
            [(None, 1), (Some("0"), 1), (Some("7"), 7), (Some("101"), 100), (Some("-1"), 100), (Some("much"), 100)]
        {
            assert_eq!(of(value), expected, "{value:?}");
        }
    }

    #[test]
    fn request_of_unknown_length_costs_more_than_any_quota_has() {
        let cost = cost_of(&CostSpec::ContentLength);
        let unknown = u64::MAX;
        for (method, version, headers, expected) in [
            ("PUT", Version::HTTP_11, &[("content-length", "400000")][..], 400_000),
            ("PUT", Version::HTTP_2, &[("content-length", "0")], 0),
            ("PUT", Version::HTTP_11, &[("content-length", "+5")], unknown),
            ("PUT", Version::HTTP_11, &[("content-length", "99999999999999999999")], unknown),
            ("PUT", Version::HTTP_11, &[("content-length", "5"), ("content-length", "5")], unknown),
            ("PUT", Version::HTTP_11, &[("content-length", "5"), ("transfer-encoding", "chunked")], unknown),
            ("GET", Version::HTTP_11, &[("transfer-encoding", "chunked")], unknown),
            ("POST", Version::HTTP_11, &[], 0),
            ("POST", Version::HTTP_2, &[], unknown),
            ("GET", Version::HTTP_2, &[], 0),
        ] {
            let mut request = http::Request::builder().method(method).version(version);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let request = request.body(()).unwrap();
            assert_eq!(cost(&Head::from(&request)), expected, "{method} {version:?} {headers:?}");
        }
    }
}
