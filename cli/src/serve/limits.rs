//! The rules in force, the limiter, and the layers that decide by them.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use http::request::Parts;
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::key::{PeerAddr, TrustedProxies, client_address};
use tower_ratelimit::limiter::store::StoreLimiterBuilder;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};
use tower_ratelimit::limiter::{BoxLimiter, Limiter};
use tower_ratelimit::middleware::{Admission, Refused, ResetEncoding};
use tower_ratelimit::rules::{Descriptor, DescriptorLimits, Rules, RulesError};
use tower_ratelimit::{Head, Headers, MemoryLimiter, RateLimitLayer, RedisLimiter, Refusals};

use super::log::Watcher;
use super::options::{HeaderFormat, Options};
use super::rates::Rates;

pub(crate) type AnyLimiter = Rates<BoxLimiter>;
pub(crate) type Layer = RateLimitLayer<AnyLimiter>;

/// The limits of this server.
pub(crate) struct Limits {
    pub(crate) limiter: AnyLimiter,
    pub(crate) form: Form,
    pub(crate) headers: Headers,
    /// The networks whose members may ask, and are believed.
    pub(crate) proxies: TrustedProxies,
}

/// The form of the files.
pub(crate) enum Form {
    /// Rules about requests.
    Native {
        /// The rules, which follow their file.
        rules: Rules,
        /// Decides by them.
        layer: Box<Layer>,
    },
    /// Limits of descriptors, by domain.
    Envoy(Vec<Domain>),
}

/// The limits of a file in Envoy's form.
pub(crate) struct Domain {
    pub(crate) rules: Rules,
    /// Decides about descriptors as Envoy's service does.
    pub(crate) limits: DescriptorLimits<AnyLimiter>,
    /// Decides about descriptors that are in a request's extensions.
    pub(crate) layer: Box<Layer>,
}

/// Why the server cannot begin.
pub(crate) enum Failure {
    /// A file has problems.
    Rules(String, RulesError),
    /// A setting is wrong, or a store refuses.
    Setup(String),
}

impl Failure {
    pub(crate) fn setup(error: impl std::fmt::Display) -> Self {
        Self::Setup(format!("error: {error}"))
    }
}

/// The descriptors that a caller states, in the extensions of a request.
#[derive(Clone)]
pub(crate) struct Stated(pub(crate) Vec<Descriptor>);

impl Limits {
    /// Reads the rules, and connects to the store.
    pub(crate) async fn new(options: &Options, watcher: &Arc<Watcher>) -> Result<Self, Failure> {
        let proxies = TrustedProxies::networks(&options.trust)
            .map_err(|error| Failure::setup(format_args!("--trust: {error}")))?;
        let limiter = Rates(limiter(options, watcher).await?);
        let headers = match options.headers {
            HeaderFormat::Draft11 => Headers::draft_11(),
            HeaderFormat::XRatelimit => Headers::x_rate_limit(ResetEncoding::DeltaSeconds),
            HeaderFormat::RetryAfter => Headers::none().retry_after(true),
        };
        let form = form(options, watcher, &limiter, &proxies, &headers)?;
        Ok(Self { limiter, form, headers, proxies })
    }

    /// Returns whether a peer may ask.
    pub(crate) fn is_trusted(&self, peer: IpAddr) -> bool {
        let (mut head, ()) = http::Request::new(()).into_parts();
        head.extensions.insert(PeerAddr::from(peer));
        // A peer outside of the networks is itself the client. Without a header, one inside of them names none.
        client_address(&self.proxies, &Head::from(&head)).is_none()
    }

    /// Returns the layers with their titles.
    pub(crate) fn layers(&self) -> Vec<(String, &Layer)> {
        match &self.form {
            Form::Native { layer, .. } => vec![("rules".to_owned(), layer)],
            Form::Envoy(domains) => domains.iter().map(|domain| (domain.limits.domain(), &*domain.layer)).collect(),
        }
    }

    /// Returns the rules of each file.
    pub(crate) fn rules(&self) -> Vec<&Rules> {
        match &self.form {
            Form::Native { rules, .. } => vec![rules],
            Form::Envoy(domains) => domains.iter().map(|domain| &domain.rules).collect(),
        }
    }

    /// Decides about a request by rules about requests. Returns `None` if the files have Envoy's form: they say nothing
    /// about requests, and a proxy must not take that for a permission.
    pub(crate) async fn admit(&self, head: &Parts) -> Option<Result<Admission, Box<Refused>>> {
        match &self.form {
            Form::Native { layer, .. } => Some(layer.admit(head).await.map_err(Box::new)),
            Form::Envoy(_) => None,
        }
    }

    /// Asks whether the store decides now. Returns why not.
    pub(crate) async fn probe(&self) -> Result<(), String> {
        self.limiter.probe().await.map_err(|error| error.to_string())
    }
}

/// Makes the limiter that the options choose.
async fn limiter(options: &Options, watcher: &Arc<Watcher>) -> Result<BoxLimiter, Failure> {
    if let Some(url) = &options.redis {
        let builder = RedisLimiter::builder().prefix(&options.prefix).deadline(options.deadline);
        let limiter = builder.observer(Arc::clone(watcher)).connect(url).await.map_err(with_causes)?;
        return Ok(BoxLimiter::new(limiter));
    }
    if let Some(url) = &options.postgres {
        let store = PostgresStore::builder().create_table(Durability::Unlogged).connect(url);
        let store = store.await.map_err(with_causes)?;
        let builder = StoreLimiterBuilder::new().prefix(&options.prefix).deadline(options.deadline);
        let limiter = builder.observer(Arc::clone(watcher)).build(store).map_err(with_causes)?;
        return Ok(BoxLimiter::new(limiter));
    }
    let limiter = MemoryLimiter::builder().max_keys(options.max_keys).build().map_err(with_causes)?;
    Ok(BoxLimiter::new(limiter))
}

/// Makes the failure of an error with its causes.
#[allow(clippy::needless_pass_by_value, reason = "it is an argument of map_err")]
fn with_causes(error: impl std::error::Error) -> Failure {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    Failure::setup(text)
}

/// Reads the files.
fn form(
    options: &Options,
    watcher: &Arc<Watcher>,
    limiter: &AnyLimiter,
    proxies: &TrustedProxies,
    headers: &Headers,
) -> Result<Form, Failure> {
    let mut domains: Vec<Domain> = Vec::new();
    for file in &options.rules {
        let failed = |error: RulesError| Failure::Rules(file.display().to_string(), error);
        let rules = read(file, options, proxies).map_err(failed)?;
        let layer = rules.layer(limiter.clone()).map_err(failed)?;
        let layer = layer
            .observer(Arc::clone(watcher))
            .headers(headers.clone())
            // A refusal in the shape of gRPC has the status 200, which a proxy takes for a permission.
            .refusals(Refusals::problem_json().grpc(false))
            .on_error(options.on_error)
            .delay(TokioTimer::new());
        let layer = Box::new(layer);
        let Ok(limits) = rules.descriptor_limits(limiter.clone()) else {
            if options.rules.len() > 1 {
                return Err(Failure::setup("only files in Envoy's form can be several: put all rules into one file"));
            }
            return Ok(Form::Native { rules, layer });
        };
        let limits = limits.observer(Arc::clone(watcher));
        if domains.iter().any(|other| other.limits.domain() == limits.domain()) {
            return Err(Failure::setup(format_args!("two files have the domain {}", limits.domain())));
        }
        domains.push(Domain { rules, limits, layer });
    }
    Ok(Form::Envoy(domains))
}

fn read(file: &Path, options: &Options, proxies: &TrustedProxies) -> Result<Rules, RulesError> {
    Rules::builder()
        .heads_only(true)
        .trusted_proxies(proxies.clone())
        .descriptors(|head| head.extensions.get::<Stated>().map_or_else(Vec::new, |stated| stated.0.clone()))
        .reload_every(options.reload_every)
        .read_file(file)
}
