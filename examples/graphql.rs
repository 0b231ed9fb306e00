//! A GraphQL API, charged by the nodes that a query can return, which is known only after the query was parsed.
//! A list has `first` or `last`, and its nodes multiply with those of the lists inside.
//!
//! ```sh
//! cargo run --example graphql
//! # 1 viewer, 10 repositories, and 10 times 20 issues: 211 points
//! curl -si http://127.0.0.1:3000/graphql -H 'authorization: Bearer k' \
//!     -d '{"query": "{ viewer { repositories(first: 10) { name issues(first: 20) { title } } } }"}'
//! # More than the quota holds: refused for good, so without Retry-After.
//! curl -si http://127.0.0.1:3000/graphql -H 'authorization: Bearer k' \
//!     -d '{"query": "{ repositories(first: 100) { issues(first: 100) { title } } }"}'
//! ```

use std::error::Error;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::post};
use graphql_parser::query::{Definition, Document, Field, OperationDefinition, Selection, SelectionSet, Value};
use serde_json::{Map, json};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::Refused};

type Limit = RateLimitLayer<MemoryLimiter>;

/// The nodes of a list that does not say how many it wants.
const UNBOUNDED: u64 = 100;

/// The selections that a cost may look at. Fragments that use fragments can stand for very many.
const MAX_STEPS: u32 = 1_000;

/// The cost of a request, in its extensions.
#[derive(Clone, Copy)]
struct Points(u64);

/// Counts the nodes of a query.
struct Count<'q> {
    document: &'q Document<'q, &'q str>,
    variables: &'q Map<String, serde_json::Value>,
    steps: u32,
}

impl<'q> Count<'q> {
    /// Returns the nodes that the document can return, or `None` if it is too large to tell.
    fn nodes(mut self) -> Option<u64> {
        let mut nodes = 0_u64;
        for definition in &self.document.definitions {
            let selected = match definition {
                Definition::Operation(OperationDefinition::SelectionSet(set)) => set,
                Definition::Operation(OperationDefinition::Query(query)) => &query.selection_set,
                Definition::Operation(OperationDefinition::Mutation(mutation)) => &mutation.selection_set,
                Definition::Operation(OperationDefinition::Subscription(events)) => &events.selection_set,
                Definition::Fragment(_) => continue,
            };
            nodes = nodes.saturating_add(self.of_set(selected)?);
        }
        Some(nodes)
    }

    fn of_set(&mut self, set: &'q SelectionSet<'q, &'q str>) -> Option<u64> {
        set.items.iter().try_fold(0_u64, |nodes, item| {
            self.steps += 1;
            let of_item = match item {
                _ if self.steps > MAX_STEPS => return None,
                Selection::Field(field) if field.selection_set.items.is_empty() => 0,
                Selection::Field(field) => {
                    let inside = self.of_set(&field.selection_set)?;
                    self.length(field).saturating_mul(inside.saturating_add(1))
                }
                Selection::InlineFragment(fragment) => self.of_set(&fragment.selection_set)?,
                Selection::FragmentSpread(spread) => {
                    let document = self.document;
                    let named = document.definitions.iter().find_map(|definition| match definition {
                        Definition::Fragment(fragment) if fragment.name == spread.fragment_name => Some(fragment),
                        _ => None,
                    });
                    self.of_set(&named?.selection_set)?
                }
            };
            Some(nodes.saturating_add(of_item))
        })
    }

    /// Returns how many nodes a field asks for: one, unless it is a list.
    fn length(&self, field: &Field<'q, &'q str>) -> u64 {
        let asked = field.arguments.iter().find(|(name, _)| matches!(*name, "first" | "last"));
        match asked {
            None => 1,
            Some((_, Value::Int(number))) => number.as_i64().and_then(|n| u64::try_from(n).ok()).unwrap_or(UNBOUNDED),
            Some((_, Value::Variable(name))) => {
                self.variables.get(*name).and_then(serde_json::Value::as_u64).unwrap_or(UNBOUNDED)
            }
            Some(_) => UNBOUNDED,
        }
    }
}

/// Returns the points of a request's body, at least one.
fn points(body: &str) -> Result<u64, &'static str> {
    let request: serde_json::Value = serde_json::from_str(body).map_err(|_| "the body is not JSON\n")?;
    let query = request["query"].as_str().unwrap_or_default();
    let document = graphql_parser::parse_query(query).map_err(|_| "the query cannot be parsed\n")?;
    let none = Map::new();
    let count = Count { document: &document, variables: request["variables"].as_object().unwrap_or(&none), steps: 0 };
    let nodes = count.nodes().ok_or("the query has too many selections, or an unknown fragment\n")?;
    Ok(nodes.max(1))
}

async fn graphql(State(limit): State<Limit>, mut head: Parts, body: String) -> Result<Response, Refused> {
    let points = match points(&body) {
        Ok(points) => points,
        Err(wrong) => return Ok((StatusCode::BAD_REQUEST, wrong).into_response()),
    };
    head.extensions.insert(Points(points));
    let admission = limit.admit(&head).await?;
    let mut response = Json(json!({ "data": {}, "cost": points })).into_response();
    admission.add_headers(response.headers_mut());
    Ok(response)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let points = Rule::new("points", Quota::per_hour(5_000))?
        .unit("points")?
        .cost(|request| request.extensions.get().map_or(1, |Points(points)| *points));
    let limit = Limit::new(MemoryLimiter::new(), points, key::bearer_token());
    limit.check()?;

    // A query is at most 16 KiB, so that parsing it is cheap.
    let app = Router::new().route("/graphql", post(graphql)).layer(DefaultBodyLimit::max(16 << 10)).with_state(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!(
        "curl -si http://127.0.0.1:3000/graphql -H 'authorization: Bearer k' -d '{{\"query\": \"{{ viewer {{ name }} }}\"}}'"
    );
    axum::serve(listener, app).await?;
    Ok(())
}
