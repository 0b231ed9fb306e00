//! Recognises files of other programs that a user passes as files of rules, and says how to convert them.

use super::super::document::{Node, NodeValue};
use super::super::problem::{Position, Quoted};

/// Returns a message for a file of another program. Without this message, all fields of the file would be reported as
/// wrong.
pub(super) fn recognised(root: &Node<'_>) -> Option<(Position, String)> {
    let message = match &root.value {
        NodeValue::Map(_) => of_kubernetes(root).or_else(|| of_program(root))?,
        NodeValue::List(items) => {
            let first = items.first()?;
            let is_limitador = field(first, "namespace").is_some() && field(first, "max_value").is_some();
            is_limitador.then(|| LIMITADOR.to_owned())?
        }
        NodeValue::Scalar { text, .. } => {
            let is_nginx = ["limit_req", "limit_conn", "http {", "server {"].iter().any(|word| text.starts_with(word));
            is_nginx.then(|| {
                "the file is nginx's configuration, and no file of rules: the guide's page `coming_from::nginx` says how its limits are \
                 written here"
                    .to_owned()
            })?
        }
    };
    Some((root.position, message))
}

const LIMITADOR: &str = "the file has limits of Limitador, and no rules. Write a rule for each: `name`, `quota: MAX_VALUE per SECONDS s, \
                         fixed window`, its variables as `key`, and its conditions as `match`";

const ENVOY: &str = "Envoy's own configuration, and its limits are in the file of its rate limit service";

const ENVOY_DUMP: &str =
    "a dump of Envoy's own configuration (`/config_dump`), and its limits are in the file of its rate limit service";

const ENVOY_RESOURCE: &str = "the file is a RateLimitConfig of Envoy's control plane (xDS), and not yet a file in Envoy's form. Write its \
                              `domain` and `descriptors` alone, with underscores in the fields' names, such as `rate_limit` and \
                              `requests_per_unit`";

/// Returns what a Kubernetes object is and how to get rules from it.
fn of_kubernetes(root: &Node<'_>) -> Option<String> {
    field(root, "apiVersion")?;
    let items = field(root, "items").map(|_| "List");
    Some(match field(root, "kind").and_then(text).or(items)? {
        "ConfigMap" => {
            let names = match field(root, "data").map(|data| &data.value) {
                Some(NodeValue::Map(entries)) => entries.iter().map(|entry| &*entry.name).collect(),
                _ => Vec::new(),
            };
            let is_file = |name: &&&str| name.ends_with(".yaml") || name.ends_with(".yml") || name.ends_with(".json");
            let name = names.iter().find(is_file).or(names.first()).map_or("rules.yaml", |name| name);
            format!(
                "the file is a ConfigMap of Kubernetes, which may contain a file of rules as a text. Read the file \
                 that Kubernetes mounts, or extract the text, for example with `yq '.data[\"{name}\"]' FILE`"
            )
        }
        "RateLimitConfig" => "the file is Gloo's RateLimitConfig, and no file of rules. Write its `spec.raw.descriptors` in the form of \
                              Envoy's rate limit service: `domain`, `descriptors`, and `rate_limit` with `unit` and `requests_per_unit`"
            .to_owned(),
        "BackendTrafficPolicy" | "SecurityPolicy" | "ClientTrafficPolicy" => {
            "the file configures Envoy Gateway, and is not a file of rules. Write a rule for each entry of `spec.rateLimit`: `limit` as \
             `quota`, and `clientSelectors` as `match` or `key`"
                .to_owned()
        }
        "EnvoyFilter" => "the file is Istio's EnvoyFilter, and no file of rules: it says which descriptors Envoy \
                          sends. The limits of these descriptors are in the file of the rate limit service, often in a \
                          ConfigMap"
            .to_owned(),
        "RateLimitPolicy" | "Limitador" => {
            "the file configures Kuadrant, and is not a file of rules. Write a rule for each of its rates: `limit` and `window` as `quota`, \
             `counters` as `key`, and `when` as `match`"
                .to_owned()
        }
        "List" => "the file is a list of objects of Kubernetes, and no file of rules".to_owned(),
        kind => format!("the file is an object of Kubernetes of the kind {}, and no file of rules", Quoted(kind)),
    })
}

/// Returns which program a mapping configures. The program is recognised by a field of its files.
fn of_program(root: &Node<'_>) -> Option<String> {
    // A text with a field `rules` is treated as a file of rules.
    if field(root, "rules").is_some() {
        return None;
    }
    let limits = field(root, "limits").map(|limits| &limits.value);
    if matches!(limits, Some(NodeValue::List(items)) if items.first().is_some_and(|item| field(item, "max_value").is_some()))
    {
        return Some(LIMITADOR.to_owned());
    }
    let resources = field(root, "resources").map(|resources| &resources.value);
    if is_resource(root)
        || matches!(resources, Some(NodeValue::List(items)) if items.first().is_some_and(|item| is_resource(item)))
    {
        return Some(ENVOY_RESOURCE.to_owned());
    }
    let known = [
        ("configs", ENVOY_DUMP),
        ("static_resources", ENVOY),
        ("virtual_hosts", ENVOY),
        ("route_config", ENVOY),
        ("resources", ENVOY),
        ("token_bucket", ENVOY),
        ("_format_version", "Kong's configuration: write a rule for each of its plugins `rate-limiting`"),
        ("spring", "Spring's configuration: write a rule for each filter `RequestRateLimiter`"),
        ("entryPoints", "Traefik's configuration: write a rule for each middleware `rateLimit`"),
    ];
    let found = known.iter().find(|(name, _)| field(root, name).is_some()).map(|(_, what)| *what);
    let of_traefik = || field(field(root, "http")?, "middlewares").and(known.last()).map(|(_, what)| *what);
    found.or_else(of_traefik).map(|what| format!("this is not a file of rules. It is {what}"))
}

/// Returns whether a mapping is a RateLimitConfig as Envoy's control plane sends it.
fn is_resource(node: &Node<'_>) -> bool {
    field(node, "@type").and_then(text).is_some_and(|kind| kind.ends_with(".RateLimitConfig"))
}

/// Returns the value of a field of a mapping.
fn field<'n, 'a>(node: &'n Node<'a>, name: &str) -> Option<&'n Node<'a>> {
    let NodeValue::Map(entries) = &node.value else { return None };
    entries.iter().find(|entry| entry.name == name).map(|entry| &*entry.node)
}

fn text<'n>(node: &'n Node<'_>) -> Option<&'n str> {
    if let NodeValue::Scalar { text, .. } = &node.value { Some(text) } else { None }
}
