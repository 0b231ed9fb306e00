//! The public handle of rules: their builder, and the rules in force.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "fleet")]
use std::sync::Weak;
use std::time::Duration;

use super::check::check;
use super::descriptors::DescriptorLimits;
use super::error::RulesError;
use super::names::Names;
use super::read::can_be_registered;
use super::report::RulesReport;
#[cfg(doc)]
use super::report::RulesWarningKind;
use super::store::RuleStore;
use super::tree::Descriptor;
use super::watch;
use crate::base::head::Head;
use crate::clock::Clock;
#[cfg(feature = "fleet")]
use crate::fleet::{Fleet, FollowFleet};
use crate::key::{IntoKey, TrustedProxies};
use crate::limiter::{Limiter, supports_in_layer};
use crate::middleware::layer::RateLimitLayer;
use crate::rules_in_force::RulesInForce;

/// Rules from a file, and the layers that use new rules when the file changes. Clones share rules and layers.
///
/// ```
/// use tower_ratelimit::MemoryLimiter;
/// use tower_ratelimit::rules::Rules;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rules = Rules::builder()
///     .key("tenant", |request| request.extensions.get::<u64>().copied())
///     .read_text(
///         "rules:
///        - name: create-post
///          quota: 5 per hour
///          key: tenant
///          match: {method: POST, path: /posts}",
///     )?;
/// let layer = rules.layer(MemoryLimiter::new())?;
/// # Ok(()) }
/// ```
///
/// # Reloading
///
/// [`reload`](Self::reload) reads the file again, and [`RulesBuilder::reload_every`] does so at intervals. A file with
/// a problem changes nothing. A valid file replaces all rules at once:
///
/// * A request is decided by one version of the rules from beginning to end.
/// * Usage belongs to the rule's name and the key. A rule that did not change keeps its states. A changed quota keeps
///   its usage. For a renamed rule, `was` states the former name. Usage under a removed rule stays until it expires.
/// * Processes that share a Redis may reload at different times. Each process converts the states that it reads, and no
///   charge is counted twice or lost.
#[derive(Clone)]
pub struct Rules(Arc<RuleStore>);

impl Rules {
    /// Makes a builder, for files that use names that the program registers.
    #[must_use]
    pub fn builder() -> RulesBuilder {
        RulesBuilder::default()
    }

    /// Reads the rules of a file whose keys are built in, such as `peer-ip`.
    ///
    /// # Errors
    /// Returns all problems of the file.
    #[doc(alias = "load")]
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, RulesError> {
        Self::builder().read_file(path)
    }

    /// Reads rules whose keys are built in, such as `peer-ip`.
    ///
    /// # Errors
    /// Returns all problems of the text.
    pub fn from_text(text: impl Into<Vec<u8>>) -> Result<Self, RulesError> {
        Self::builder().read_text(text)
    }

    /// Makes a layer with these rules. When the rules are replaced, the layer uses the new rules. Other settings, such
    /// as [`headers`](RateLimitLayer::headers), are set on the layer. Rules that [`and`](RateLimitLayer::and) adds are
    /// charged after the rules of the file, and do not change when the file is reloaded.
    ///
    /// # Errors
    /// Returns the quotas that the limiter does not [support](Limiter::supports), with their positions in the
    /// file. Also returns an error for a file in Envoy's form if [`RulesBuilder::descriptors`] was not called.
    pub fn layer<L: Limiter>(&self, limiter: L) -> Result<RateLimitLayer<L>, RulesError> {
        if self.0.tree().is_some() && !self.0.describes() {
            return Err(RulesError::of_file(
                "the file has Envoy's form, and the program does not say which descriptors a request has: set \
                 RulesBuilder::descriptors, or use Rules::descriptor_limits if there are no HTTP requests",
            ));
        }
        self.0.check(&|quota| supports_in_layer(&limiter, quota))?;
        let layer = RateLimitLayer::sourced(limiter, Arc::clone(&self.0) as Arc<_>);
        // Other rules may have come into force before the store knew the layer.
        self.0.check(&|quota| supports_in_layer(layer.limiter(), quota))?;
        Ok(layer)
    }

    /// Returns a [`DescriptorLimits`], which decides about Envoy's descriptors without an HTTP request. The
    /// `DescriptorLimits` uses new limits of the file as soon as they replace the old limits.
    ///
    /// # Errors
    /// Returns an error with the quotas that the limiter does not [support](Limiter::supports). Also returns
    /// an error if the file does not have Envoy's form.
    pub fn descriptor_limits<L: Limiter>(&self, limiter: L) -> Result<DescriptorLimits<L>, RulesError> {
        if self.0.tree().is_none() {
            return Err(RulesError::of_file("only a file in Envoy's form, with `domain`, has limits for descriptors"));
        }
        self.0.check(&|quota| limiter.supports(quota))?;
        let limits = DescriptorLimits::new(Arc::clone(&self.0), limiter);
        // Other rules may have come into force before the store knew the limits.
        self.0.check(&|quota| limits.limiter().supports(quota))?;
        Ok(limits)
    }

    /// Reads the file again, and puts its rules in force if they have changed. Returns the [version](Self::version).
    /// Call this method when the program receives `SIGHUP`, or from an endpoint for operators.
    ///
    /// # Errors
    /// Returns an error with all problems of the file, including quotas that the limiter of a layer does not
    /// support. Also returns an error if the rules are not from a file. After an error, the rules do not change.
    pub fn reload(&self) -> Result<u64, RulesError> {
        self.0.reload(|_| true).unwrap_or_else(|| Ok(self.version()))
    }

    /// Puts the rules of a text in force, instead of the rules of the file. The next [`reload`](Self::reload) replaces
    /// the rules of the text, and with [`reload_every`](RulesBuilder::reload_every) the next change of the file
    /// replaces them.
    ///
    /// # Errors
    /// Returns the errors of [`reload`](Self::reload).
    pub fn replace(&self, text: impl Into<Vec<u8>>) -> Result<u64, RulesError> {
        self.0.replace(&text.into().into())
    }

    /// Returns the number of times that the rules were replaced. It begins with 0.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.0.version()
    }

    /// Returns which rules are in force, and since when, so that you can compare processes.
    #[must_use]
    pub fn in_force(&self) -> RulesInForce {
        self.0.facts()
    }

    /// Returns the error of the last [`reload`](Self::reload) or [`replace`](Self::replace). If that call succeeded,
    /// returns the error of the rules that an operator pushed, or `None` if these rules are in force or there are none.
    #[must_use]
    pub fn error(&self) -> Option<RulesError> {
        self.0.error()
    }
}

#[cfg(feature = "fleet")]
impl Rules {
    fn follow(&self, fleet: Option<(Fleet, String)>) {
        if let Some((fleet, name)) = fleet {
            let rules: Weak<dyn FollowFleet> = Arc::downgrade(&(Arc::clone(&self.0) as Arc<_>));
            fleet.follow_rules(&name, &rules);
            self.0.keep(fleet);
        }
    }
}

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules").field("version", &self.version()).finish_non_exhaustive()
    }
}

/// Registers the names that a file of rules may use, and reads the file.
#[derive(Clone, Default)]
pub struct RulesBuilder {
    names: Names,
    every: Option<Duration>,
    #[cfg(feature = "fleet")]
    fleet: Option<(Fleet, String)>,
    /// A name that cannot be used in any file.
    unusable: Option<String>,
}

/// The shortest time between two readings of the file.
const EVERY_MIN: Duration = Duration::from_millis(100);

impl RulesBuilder {
    /// Registers an extractor, which rules use as `key: <name>`. A name is one word that is not built in. For any other
    /// name, `read_file` and `read_text` return an error. If a name is registered twice, the last extractor is used.
    #[must_use]
    pub fn key<E, K>(mut self, name: impl Into<String>, extract: E) -> Self
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let name = name.into();
        if !can_be_registered(&name) {
            self.unusable.get_or_insert_with(|| name.clone());
        }
        self.names.key(name, extract);
        self
    }

    /// Registers a classifier, which rules use as `match: {action: <name>}`. In the short form of a file, which is a
    /// list of rules, a rule uses a classifier as `action: <name>`.
    #[must_use]
    pub fn action(
        mut self,
        name: impl Into<String>,
        is_it: impl Fn(&Head<'_>) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.names.action(name.into(), is_it);
        self
    }

    /// Sets the function that returns the descriptors of a request, for files in Envoy's form. A request without
    /// descriptors passes. A request that names more than 1,000 counters is over the limit, and nothing is charged.
    ///
    /// ```
    /// use tower_ratelimit::rules::{Descriptor, Rules};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let rules = Rules::builder()
    ///     .descriptors(|request| [Descriptor::new([("path", request.uri.path())])])
    ///     .read_text(
    ///         "{domain: edge, descriptors: [
    ///          {key: path, rate_limit: {unit: second, requests_per_unit: 50}}]}",
    ///     )?;
    /// let layer = rules.layer(tower_ratelimit::MemoryLimiter::new())?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn descriptors<D>(mut self, describe: impl Fn(&Head<'_>) -> D + Send + Sync + 'static) -> Self
    where
        D: IntoIterator<Item = Descriptor>,
    {
        self.names.describe = Some(Arc::new(move |head| describe(head).into_iter().collect()));
        self
    }

    /// Sets the trusted proxies, whose reports of the client's address are used for `client-ip`, for
    /// `match: {client: …}` and for access lists. Without trusted proxies `client-ip` is an error, and
    /// `match: {client: …}` and access lists use the peer's address.
    #[must_use]
    pub fn trusted_proxies(mut self, proxies: TrustedProxies) -> Self {
        self.names.proxies = Some(proxies);
        self
    }

    /// Sets the clock of `match: {time: …}`, for tests. The clock must return the time of the calendar. The default is
    /// the operating system's clock, with all of its corrections.
    ///
    /// ```
    /// use tower_ratelimit::clock::ManualClock;
    /// use tower_ratelimit::{MemoryLimiter, rules::Rules};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let wednesday = ManualClock::new(); // 2025-01-01 00:00:00 UTC
    /// let rules = Rules::builder().clock(wednesday.clone()).read_text(
    ///     "rules: [{name: night, quota: 5 per hour, key: global,
    ///               match: {time: '22:00-06:00 UTC'}}]",
    /// )?;
    /// let layer = rules.layer(MemoryLimiter::new())?;
    /// let (request, ()) = http::Request::get("/").body(())?.into_parts();
    /// assert!(layer.explain(&request).await.to_string().contains("night: charges 1"));
    /// wednesday.advance(std::time::Duration::from_secs(12 * 3_600));
    /// assert!(
    ///     layer
    ///         .explain(&request)
    ///         .await
    ///         .to_string()
    ///         .ends_with("the time is not 22:00-06:00 UTC, which begins in 10h")
    /// );
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.names.clock = Some(Arc::new(clock));
        self
    }

    /// Sets whether the program sees only the heads of requests, for example because a proxy asks it for decisions.
    /// With `true`, a rule with `pace` is a problem of its file, because `pace` applies to bodies. By default the
    /// program sees bodies.
    ///
    /// ```
    /// use tower_ratelimit::rules::Rules;
    /// let text = "rules: [{name: a, quota: 1 MB per second, key: peer-ip, pace: responses}]";
    /// assert!(Rules::builder().read_text(text).is_ok());
    /// let error = Rules::builder().heads_only(true).read_text(text).unwrap_err();
    /// assert!(error.problems()[0].message().starts_with("`pace` applies to bodies"));
    /// ```
    #[must_use]
    pub fn heads_only(mut self, heads_only: bool) -> Self {
        self.names.heads_only = heads_only;
        self
    }

    /// Sets whether the program folds the paths of requests before the rules see them: into lower case, without
    /// `;parameters`, and without a slash at the end. With `true`, a pattern that no folded path can match is a problem
    /// of its file. By default the rules see paths as clients sent them.
    ///
    /// ```
    /// use tower_ratelimit::rules::Rules;
    /// let text = "rules: [{name: a, quota: 5 per second, key: global, match: {path: /Login}}]";
    /// assert!(Rules::builder().read_text(text).is_ok());
    /// let error = Rules::builder().folded_paths(true).read_text(text).unwrap_err();
    /// assert!(error.problems()[0].message().starts_with("no path matches `/Login`"));
    /// ```
    #[must_use]
    pub fn folded_paths(mut self, folded_paths: bool) -> Self {
        self.names.folded_paths = folded_paths;
        self
    }

    /// Reads the file at this interval, at least 100 ms, and reloads it when its content has changed. A separate thread
    /// reads the file, and ends at its next reading after the rules and their layers were dropped. By default the file
    /// is read only once.
    ///
    /// A change is used only after two equal readings, one second apart. To be sure that no half-written file is used,
    /// rename a finished file into place, or end the file with a line `...`. After a file with a last line `...` is in
    /// force, a file without such a line is an error.
    #[must_use]
    pub fn reload_every(mut self, interval: Duration) -> Self {
        self.every = Some(interval.max(EVERY_MIN));
        self
    }

    /// Allows operators to put a text of rules in force in all processes, instead of the text of the file. Operators
    /// put such a text in force by [`FleetChange::rules`](crate::fleet::FleetChange::rules) with this name. While the
    /// operators' text is in force, the file is read but its rules are not put in force.
    ///
    /// Other sources of rules need no setting: read the rules from the source, and call [`Rules::replace`].
    #[cfg(feature = "fleet")]
    #[must_use]
    pub fn fleet(mut self, fleet: &Fleet, name: impl Into<String>) -> Self {
        self.fleet = Some((fleet.clone(), name.into()));
        self
    }

    /// Checks rules without putting them in force, for tools and tests that do not know all names that the program
    /// registers. Returns the names that the rules use but that are not registered, and [warnings](RulesWarningKind).
    /// Apart from unregistered names, the rules are valid.
    ///
    /// ```
    /// use tower_ratelimit::rules::Rules;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let report = Rules::builder()
    ///     .check("rules: [{name: a, quota: 5 per hour, key: [tenant, peer-ip]}]")?;
    /// assert_eq!(report.unregistered()[0].name(), "tenant");
    /// assert!(
    ///     report.unregistered()[0].problem().message().starts_with("no key is named `tenant`")
    /// );
    /// assert!(report.warnings().is_empty());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error with the problems that [`read_text`](Self::read_text) would return, except
    /// unregistered names.
    pub fn check(&self, text: impl AsRef<[u8]>) -> Result<RulesReport, RulesError> {
        check(&self.clone().checked()?, text.as_ref())
    }

    /// Reads the rules of a file.
    ///
    /// # Errors
    /// Returns an error with all problems of the file. Also returns an error if a thread for reloading could
    /// not be started.
    pub fn read_file(self, path: impl AsRef<Path>) -> Result<Rules, RulesError> {
        let every = self.every;
        #[cfg(feature = "fleet")]
        let fleet = self.fleet.clone();
        let rules = Rules(Arc::new(RuleStore::of_file(self.checked()?, path.as_ref())?));
        #[cfg(feature = "fleet")]
        rules.follow(fleet);
        if let Some(every) = every {
            watch::start(Arc::downgrade(&rules.0), every)
                .map_err(|error| RulesError::caused_by("no thread could be started for reloading", error))?;
        }
        Ok(rules)
    }

    /// Reads rules from a text. The text is not reloaded; see [`Rules::replace`].
    ///
    /// # Errors
    /// Returns all problems of the text.
    pub fn read_text(self, text: impl Into<Vec<u8>>) -> Result<Rules, RulesError> {
        #[cfg(feature = "fleet")]
        let fleet = self.fleet.clone();
        let rules = Rules(Arc::new(RuleStore::of_text(self.checked()?, text.into())?));
        #[cfg(feature = "fleet")]
        rules.follow(fleet);
        Ok(rules)
    }

    fn checked(self) -> Result<Names, RulesError> {
        match self.unusable {
            Some(name) => Err(RulesError::unusable_name(&name)),
            None => Ok(self.names),
        }
    }
}

impl fmt::Debug for RulesBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RulesBuilder")
            .field("keys", &self.names.keys.keys())
            .field("actions", &self.names.actions.keys())
            .field("every", &self.every)
            .finish_non_exhaustive()
    }
}
