//! The head of a request, borrowed.

use std::fmt;

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
