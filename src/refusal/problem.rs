//! The text of a refusal's body over plain HTTP.

use http::{HeaderValue, StatusCode};

use crate::base::json::push_string;

/// The format of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyFormat {
    /// A problem of RFC 9457.
    ProblemJson,
    /// The object of a problem, sent as `application/json`.
    Json,
    /// One line of text.
    Text,
}

/// The content of a body.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProblemDetails<'a> {
    pub(super) kind: &'a str,
    pub(super) title: &'a str,
    pub(super) status: StatusCode,
    pub(super) detail: Option<&'a str>,
    /// The policies that refused, if a quota is the reason.
    pub(super) policies: Option<&'a [&'a str]>,
}

impl BodyFormat {
    pub(super) fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::ProblemJson => "application/problem+json",
            Self::Json => "application/json",
            Self::Text => "text/plain; charset=utf-8",
        })
    }

    pub(super) fn render(self, problem: &ProblemDetails<'_>) -> String {
        match self {
            Self::ProblemJson | Self::Json => json(problem),
            Self::Text => text(problem),
        }
    }
}

fn json(problem: &ProblemDetails<'_>) -> String {
    let mut body = String::from("{\"type\":");
    push_string(&mut body, problem.kind);
    body.push_str(",\"title\":");
    push_string(&mut body, problem.title);
    body.push_str(",\"status\":");
    body.push_str(problem.status.as_str());
    if let Some(detail) = problem.detail {
        body.push_str(",\"detail\":");
        push_string(&mut body, detail);
    }
    if let Some(policies) = problem.policies {
        body.push_str(",\"violated-policies\":[");
        for (index, policy) in policies.iter().enumerate() {
            if index > 0 {
                body.push(',');
            }
            push_string(&mut body, policy);
        }
        body.push(']');
    }
    body.push('}');
    body
}

fn text(problem: &ProblemDetails<'_>) -> String {
    let mut body = problem.title.to_owned();
    match (problem.detail, problem.policies) {
        (Some(detail), _) => {
            body.push_str(": ");
            body.push_str(detail);
        }
        (None, Some(policies)) if !policies.is_empty() => {
            body.push_str(": ");
            body.push_str(&policies.join(", "));
        }
        (None, _) => {}
    }
    body.push('\n');
    body
}
