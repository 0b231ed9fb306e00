//! Patterns of paths.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::super::problem::Quoted;
use crate::middleware::rule::{PathPattern, Segment};

/// The ASCII characters that a request's path can contain only in their percent-encoded form.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'<').add(b'>').add(b'`').add(b'\\').add(b'^').add(b'|');

/// The longest pattern, in bytes.
const LENGTH_MAX: usize = 1_000;

/// Reads a pattern, or returns why no request could match it.
pub(in crate::rules) fn pattern(text: &str) -> Result<PathPattern, String> {
    let segments = segments(text).map_err(|why| format!("no path matches {}: {why}", Quoted(text)))?;
    Ok(PathPattern { segments })
}

fn segments(text: &str) -> Result<Vec<Segment>, String> {
    if text.len() > LENGTH_MAX {
        return Err(format!("a pattern has at most {LENGTH_MAX} bytes"));
    }
    let rest = text.strip_prefix('/').ok_or("it must begin with a slash")?;
    let (mut segments, mut names) = (Vec::new(), Vec::new());
    for part in rest.split('/') {
        if matches!(segments.last(), Some(Segment::Rest)) {
            return Err("`{*…}` stands for the rest of a path, so it must come last".to_owned());
        }
        let inner = part.strip_prefix('{').and_then(|inner| inner.strip_suffix('}'));
        let Some(inner) = inner.filter(|inner| !inner.contains(['{', '}'])) else {
            segments.push(Segment::Literal(literal(part)?));
            continue;
        };
        let (name, segment) = match inner.strip_prefix('*') {
            Some(name) => (name, Segment::Rest),
            None => (inner, Segment::Any),
        };
        if name.is_empty() || name.contains(['*', ':']) {
            return Err(format!("{} has no name; write it like `{{id}}` or `{{*rest}}`", Quoted(part)));
        }
        if names.contains(&name) {
            return Err(format!("two of its segments are named {}", Quoted(name)));
        }
        names.push(name);
        segments.push(segment);
    }
    Ok(segments)
}

/// Reads a segment that is not a name. `{{` and `}}` mean literal braces.
fn literal(part: &str) -> Result<Box<str>, String> {
    if part.replace("{{", "").replace("}}", "").contains(['{', '}']) {
        return Err(format!(
            "in {} a name in braces must be the whole segment; a brace itself is written `{{{{` or `}}}}`",
            Quoted(part)
        ));
    }
    if let Some(name) = part.strip_prefix(':') {
        return Err(format!("write a named segment as in axum 0.8, {}", Quoted(&format!("{{{name}}}"))));
    }
    if part.starts_with('*') {
        return Err("write the rest of a path as in axum 0.8, `{*rest}`".to_owned());
    }
    if part.contains(['?', '#']) {
        return Err(
            "a path has no `?` and no `#`; the query is compared by `query`, as in `query: {page: \"*\"}`".to_owned()
        );
    }
    if part.contains('*') {
        return Err(format!("in {} the `*` is not a wildcard: write `{{name}}` or `{{*rest}}`", Quoted(part)));
    }
    let encoded = utf8_percent_encode(part, ENCODED).to_string();
    if encoded != part {
        return Err(format!("requests have it percent-encoded, as {}", Quoted(&encoded)));
    }
    Ok(part.replace("{{", "{").replace("}}", "}").into())
}
