//! The head of a request, borrowed.

use std::fmt;

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use http::{Extensions, HeaderMap, Method, Request, Uri, Version};

/// The head of a request, by references. Extractors, conditions and observers see only the head of a
/// request.
///
/// A closure reads the fields of the head: `|request| request.headers.get("x-user").cloned()`.
///
/// A `Head` is made from an `http::Request`, from `Parts`, or from the five fields if a framework does
/// not have these types. Making a `Head` is cheap, because it copies only references.
///
/// ```
/// use http::{Extensions, HeaderMap, Method, Request, Uri, Version};
/// use tower_ratelimit::{Head, Key, key};
///
/// let by_path = key::path();
/// let request = Request::get("/posts").body(())?;
/// assert_eq!(by_path(&Head::from(&request)), Key::of("/posts"));
///
/// let (uri, headers, extensions) =
///     (Uri::from_static("/posts"), HeaderMap::new(), Extensions::new());
/// let head = Head::new(&Method::GET, &uri, Version::HTTP_11, &headers, &extensions);
/// assert_eq!(by_path(&head), Key::of("/posts"));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Head<'a> {
    /// The request's method.
    pub method: &'a Method,
    /// The request's URI.
    pub uri: &'a Uri,
    /// The version of HTTP.
    pub version: Version,
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// The extensions that the server and other middleware put into the request.
    pub extensions: &'a Extensions,
}

impl<'a> Head<'a> {
    /// Makes the head of a request from its five fields.
    #[must_use]
    pub fn new(
        method: &'a Method,
        uri: &'a Uri,
        version: Version,
        headers: &'a HeaderMap,
        extensions: &'a Extensions,
    ) -> Self {
        Self { method, uri, version, headers, extensions }
    }

    /// Returns the number of bytes of the request's body, or `None` if the head does not state this number
    /// beyond doubt.
    ///
    /// Charge what is unknown as more than any quota has, so that a client gains nothing by leaving the length
    /// out:
    ///
    /// ```
    /// use tower_ratelimit::{Quota, Rule};
    ///
    /// let uploads = Rule::new("uploads", Quota::per_hour(1_000_000))?
    ///     .cost(|request| request.content_length().unwrap_or(u64::MAX))
    ///     .unit("content-bytes")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// This cost is refused with 429, and the body says that the request costs more than its limit. To answer 411
    /// (Length Required) instead, change the layer's own response. A middleware before the layer would answer while the
    /// client still sends, and many clients then lose the answer. The layer first reads the rest of the body, up to the
    /// size of [`discard_body`](crate::RateLimitLayer::discard_body). Set that to the size of your largest upload.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::Refusals;
    ///
    /// let refusals = Refusals::with(|refusal| {
    ///     let mut response = refusal.default_response();
    ///     if refusal.head().content_length().is_none() {
    ///         *response.status_mut() = StatusCode::LENGTH_REQUIRED;
    ///     }
    ///     response
    /// });
    /// ```
    ///
    /// The body is still that of the 429. To change it, return a body of your own.
    ///
    /// The number is unknown if the request has the header `Transfer-Encoding`, several headers
    /// `Content-Length`, or one that is not a number. Without these headers a request of HTTP/1 has no body, and
    /// the number is 0. So it is for a `GET`, `HEAD`, `OPTIONS`, `DELETE` or `TRACE` of later versions, in which
    /// the head does not say whether there is a body. It is unknown for their other methods.
    #[must_use]
    pub fn content_length(&self) -> Option<u64> {
        let mut lengths = self.headers.get_all(CONTENT_LENGTH).iter();
        match (lengths.next(), lengths.next()) {
            _ if self.headers.contains_key(TRANSFER_ENCODING) => None,
            (Some(length), None) => {
                let digits = length.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
                digits.and_then(|digits| digits.parse().ok())
            }
            (Some(_), Some(_)) => None,
            // In HTTP/1 a request without these headers has no body (RFC 9112, section 6.3).
            (None, _) => {
                let has_usually_none = [Method::GET, Method::HEAD, Method::OPTIONS, Method::DELETE, Method::TRACE];
                let is_empty = self.version <= Version::HTTP_11 || has_usually_none.contains(self.method);
                is_empty.then_some(0)
            }
        }
    }

    /// Returns a request that has a copy of this head and no body.
    pub(crate) fn to_request(self) -> Request<()> {
        let mut request = Request::new(());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = self.version;
        *request.headers_mut() = self.headers.clone();
        *request.extensions_mut() = self.extensions.clone();
        request
    }
}

impl<'a, B> From<&'a Request<B>> for Head<'a> {
    #[inline]
    fn from(request: &'a Request<B>) -> Self {
        Self {
            method: request.method(),
            uri: request.uri(),
            version: request.version(),
            headers: request.headers(),
            extensions: request.extensions(),
        }
    }
}

impl<'a> From<&'a Parts> for Head<'a> {
    #[inline]
    fn from(parts: &'a Parts) -> Self {
        Self {
            method: &parts.method,
            uri: &parts.uri,
            version: parts.version,
            headers: &parts.headers,
            extensions: &parts.extensions,
        }
    }
}

impl fmt::Debug for Head<'_> {
    /// Leaves out the query, the headers and the extensions, because they may contain secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Head")
            .field("method", self.method)
            .field("path", &self.uri.path())
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_length_is_unknown_if_the_head_leaves_doubt() {
        for (method, version, headers, expected) in [
            ("PUT", Version::HTTP_11, &[("content-length", "400000")][..], Some(400_000)),
            ("PUT", Version::HTTP_2, &[("content-length", "0")], Some(0)),
            ("PUT", Version::HTTP_11, &[("content-length", "+5")], None),
            ("PUT", Version::HTTP_11, &[("content-length", "99999999999999999999")], None),
            ("PUT", Version::HTTP_11, &[("content-length", "5"), ("content-length", "5")], None),
            ("PUT", Version::HTTP_11, &[("content-length", "5"), ("transfer-encoding", "chunked")], None),
            ("GET", Version::HTTP_11, &[("transfer-encoding", "chunked")], None),
            ("POST", Version::HTTP_11, &[], Some(0)),
            ("POST", Version::HTTP_2, &[], None),
            ("GET", Version::HTTP_2, &[], Some(0)),
        ] {
            let mut request = Request::builder().method(method).version(version);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let request = request.body(()).unwrap();
            assert_eq!(Head::from(&request).content_length(), expected, "{method} {version:?} {headers:?}");
        }
    }
}
