//! The rules in force, the limiter, and the layers that decide by them.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use http::request::Parts;
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::fleet::Fleet;
use tower_ratelimit::key::{PeerAddr, TrustedProxies, client_address};
use tower_ratelimit::limiter::{BoxLimiter, Limiter};
use tower_ratelimit::middleware::{Admission, Refused, ResetEncoding};
use tower_ratelimit::observe::{Observer, RulesEvent};
use tower_ratelimit::rules::{Descriptor, DescriptorLimits, Rules, RulesBuilder, RulesError};
use tower_ratelimit::{Head, Headers, MemoryLimiter, RateLimitLayer, Refusals};

use super::failure::{Failure, text_with_causes, with_causes};
use super::log::{PushedNames, Watcher};
use super::options::{HeaderFormat, Options};
use super::rates::Rates;
use super::store::{StoreFailure, kind_of};
use super::uri::Paths;
use crate::files;

pub(crate) type AnyLimiter = Rates<BoxLimiter>;
pub(crate) type Layer = RateLimitLayer<AnyLimiter>;

/// The limits of this server.
pub(crate) struct Limits {
    pub(crate) limiter: AnyLimiter,
    pub(crate) form: Form,
    /// The operators' settings for all processes.
    pub(crate) fleet: Option<Fleet>,
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
        let fleet = fleet(options, &limiter).await?;
        if let Some(fleet) = &fleet {
            fleet.observe(Arc::clone(watcher));
        }
        let form = form(options, watcher, &limiter, fleet.as_ref(), &proxies, &headers)?;
        let limits = Self { limiter, form, fleet, headers, proxies };
        for error in limits.rules().into_iter().filter_map(Rules::error) {
            // Rules that an operator pushed were refused before their layer had an observer.
            watcher.on_rules_event(&RulesEvent::refused(text_with_causes(&error)));
        }
        if let Some(fleet) = &limits.fleet {
            let own = options.rules.iter().filter_map(|file| rules_name(file)).collect();
            fleet.observe(PushedNames::new(fleet.clone(), own, watcher.log));
        }
        Ok(limits)
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
    pub(crate) async fn probe(&self) -> Result<(), StoreFailure> {
        let failed = |error| StoreFailure { kind: kind_of(&error), message: text_with_causes(&error) };
        self.limiter.probe().await.map_err(failed)
    }
}

/// Makes the limiter that the options choose.
async fn limiter(options: &Options, watcher: &Arc<Watcher>) -> Result<BoxLimiter, Failure> {
    if let Some(limiter) = options.store.connect(options.deadline, watcher).await? {
        return Ok(limiter);
    }
    let limiter = MemoryLimiter::builder().max_keys(options.max_keys).build().map_err(with_causes)?;
    Ok(BoxLimiter::new(limiter))
}

/// Makes what keeps the settings of operators, if there is a place for them.
async fn fleet(options: &Options, limiter: &AnyLimiter) -> Result<Option<Fleet>, Failure> {
    match (&options.fleet, limiter.hooks().shared_text()) {
        (Some(_), Some(_)) => {
            Err(Failure::setup("--fleet is for a limiter in memory: with --redis or --postgres it is kept there"))
        }
        (Some(file), None) => Fleet::in_file(file).await.map(Some).map_err(with_causes),
        (None, Some(_)) => Fleet::beside(limiter).await.map(Some).map_err(with_causes),
        (None, None) => Ok(None),
    }
}

/// Reads the files.
fn form(
    options: &Options,
    watcher: &Arc<Watcher>,
    limiter: &AnyLimiter,
    fleet: Option<&Fleet>,
    proxies: &TrustedProxies,
    headers: &Headers,
) -> Result<Form, Failure> {
    let mut domains: Vec<Domain> = Vec::new();
    for file in &options.rules {
        let failed = |error: RulesError| Failure::Rules(file.display().to_string().into(), error);
        let rules = read(file, options, fleet, proxies).map_err(failed)?;
        let layer = rules.layer(limiter.clone()).map_err(failed)?;
        let layer = layer
            .observer(Arc::clone(watcher))
            .headers(headers.clone())
            // A refusal in the shape of gRPC has the status 200, which a proxy takes for a permission.
            .refusals(Refusals::problem_json().grpc(false))
            .on_error(options.on_error)
            .timer(TokioTimer::new());
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

/// Adds the settings that all servers have to a builder.
fn as_server(builder: RulesBuilder) -> RulesBuilder {
    builder
        .heads_only(true)
        .descriptors(|head| head.extensions.get::<Stated>().map_or_else(Vec::new, |stated| stated.0.clone()))
}

fn read(file: &Path, options: &Options, fleet: Option<&Fleet>, proxies: &TrustedProxies) -> Result<Rules, RulesError> {
    let mut rules = as_server(Rules::builder())
        .folded_paths(options.paths == Paths::Folded)
        .trusted_proxies(proxies.clone())
        .reload_every(options.reload_every);
    if let (Some(fleet), Some(name)) = (fleet, rules_name(file)) {
        rules = rules.fleet(fleet, name);
    }
    rules.read_file(file)
}

/// Returns the name of a file's rules, under which operators push other rules.
pub(crate) fn rules_name(file: &Path) -> Option<String> {
    file.file_stem().map(|stem| stem.to_string_lossy().into_owned())
}

/// Returns an error if a server with this limiter could not use the rules of a text.
pub(crate) fn check(file: &Path, text: &str, limiter: BoxLimiter) -> Result<(), Failure> {
    let rules = as_server(files::builder().map_err(Failure::Setup)?).read_text(text);
    let checked = rules.and_then(|rules| rules.layer(Rates(limiter)).map(drop));
    checked.map_err(|error| Failure::Rules(files::name(file).into(), error))
}
