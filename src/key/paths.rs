//! Extractors and conditions for the path of a request.

use http::Uri;

use crate::base::head::Head;

use super::value::{IntoKey, Key};

/// Returns an extractor of the path of the request's URI, with its percent-encoding.
///
/// A client can send any path. If the path is the only part of the key, each new path gets a fresh
/// allowance. To limit by the route that matched, use `key::matched_route`.
///
/// Inside axum's `Router::nest` the path lacks the prefix; see [`original_path`].
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let request = Request::get("/users/7?page=2").body(())?;
/// assert_eq!(key::path()(&Head::from(&request)), Key::of("/users/7"));
/// # Ok(()) }
/// ```
pub fn path() -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    |head| head.uri.path().into_key()
}

/// Returns an extractor of the path as the client sent it, even inside axum's `Router::nest`; see
/// [`original_uri`].
pub fn original_path() -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    |head| original_uri(head).path().into_key()
}

/// Returns an extractor of the route that axum matched, such as `/users/{id}` (feature `axum`).
///
/// In a `Router::route_layer` each request has a route. In a `Router::layer`, requests for unknown
/// paths have no route. All requests for unknown paths share one key, and the router answers them with
/// 404 until the allowance of this key is used up. A layer around the whole router runs before a route
/// is matched, so all its requests share one key. The layer reports such a setup as `key-never-found`.
///
/// ```
/// # #[cfg(feature = "axum")] {
/// use axum::{Router, routing::get};
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
///
/// let limit = RateLimitLayer::new(
///     MemoryLimiter::new(),
///     Quota::per_second(50),
///     key::matched_route(),
/// );
/// let app: Router =
///     Router::new().route("/users/{id}", get(|| async { "a user" })).layer(limit);
/// # drop(app);
/// # }
/// ```
#[cfg(feature = "axum")]
pub fn matched_route() -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    |head| match head.extensions.get::<axum::extract::MatchedPath>() {
        Some(route) => route.as_str().into_key(),
        None => Some(Key::keyless()),
    }
}

/// Returns the URI as the client sent it, for conditions and closures.
///
/// Inside axum's `Router::nest("/api", ..)`, a request's URI has no `/api`. With the feature `axum`
/// this function returns the original URI (axum's `OriginalUri`). Without the feature, or if the request
/// has not passed a router of axum, this function returns the request's URI.
///
/// ```
/// use tower_ratelimit::{Quota, Rule, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Applies wherever the layer is.
/// let export = Rule::new("export", Quota::per_hour(10))?
///     .when(|request| key::original_uri(request).path().starts_with("/api/export"));
/// # Ok(()) }
/// ```
#[must_use]
pub fn original_uri<'a>(head: &Head<'a>) -> &'a Uri {
    #[cfg(feature = "axum")]
    if let Some(original) = head.extensions.get::<axum::extract::OriginalUri>() {
        return &original.0;
    }
    head.uri
}

#[cfg(test)]
mod tests {
    use http::request::Parts;

    use super::*;

    fn parts() -> Parts {
        http::Request::get("https://example.com/x?y").body(()).unwrap().into_parts().0
    }

    #[test]
    fn path_is_that_of_the_uri() {
        assert_eq!(path()(&Head::from(&parts())), Key::of("/x"));
        assert_eq!(original_path()(&Head::from(&parts())), Key::of("/x"));
    }

    #[cfg(feature = "axum")]
    #[test]
    fn original_path_is_found_where_axum_puts_it() {
        let mut parts = parts();
        parts.extensions.insert(axum::extract::OriginalUri(Uri::from_static("/api/x")));
        assert_eq!(path()(&Head::from(&parts)), Key::of("/x"));
        assert_eq!(original_path()(&Head::from(&parts)), Key::of("/api/x"));
        assert_eq!(original_uri(&Head::from(&parts)).path(), "/api/x");
    }
}
