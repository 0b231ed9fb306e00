//! The cost of a request.

use http::HeaderValue;

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
        CostSpec::ContentLength | CostSpec::Reserved(_) => head.content_length().unwrap_or(u64::MAX),
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
        for (length, expected) in [("400000", 400_000), ("+5", u64::MAX)] {
            let request = http::Request::put("/").header("content-length", length).body(()).unwrap();
            assert_eq!(cost(&Head::from(&request)), expected, "{length}");
        }
    }
}
