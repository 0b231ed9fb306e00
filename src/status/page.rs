//! The service that answers with the page.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use tower_service::Service;

use super::action::{Act, Done, OWN, OperatorAction};
use super::operators::Operators;
#[cfg(feature = "fleet")]
use super::processes::{ProcessesView, ReportSource};
#[cfg(feature = "fleet")]
use super::request::KeyForm;
use super::request::{
    ExplainForm, ExtensionField, FORM_MAX, FormAction, Wrong, refuse_other_names, refuse_other_sites,
    refuse_unlisted_names, wants_json, wants_page, wrong,
};
#[cfg(feature = "fleet")]
use super::settings::{self, SettingRequest};
use super::source::{ErasedLayer, LayerSource};
use super::target::{Held, LayerKeys, ListedKey};
use super::view::{ExplainedLayer, PageView, RulesView};
use super::{html, json};
use crate::base::head::Head;
use crate::error::WithSources;
use crate::explanation::Explanation;
use crate::key::Key;
use crate::limiter::Limiter;
use crate::middleware::layer::RateLimitLayer;
use crate::mode::ModeSwitch;
use crate::stats::Stats;

/// A service that shows what layers do, on a page for people, and as JSON for programs that accept JSON and not HTML.
///
/// The page shows the counts of a [`Stats`]: for each policy the requests of the last five minutes and of the last
/// hour, the shares of requests that were near and over the limit, the places that are held, the keys that are refused
/// most and the keys that hold the most places, and the [last
/// refusals](crate::observe::StatsBuilder::max_recent_refusals), if they are stored. With the [layers](Self::layer) the
/// page also shows quotas, modes and setup warnings, and how full a limiter in memory is. A page with layers also
/// explains what would happen to a request.
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_ratelimit::observe::{Stats, StatusPage};
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let stats = Stats::new();
/// let client = Rule::new("client", Quota::per_minute(100))?;
/// let limit = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip())
///     .observer(stats.clone());
///
/// let page = StatusPage::new(stats).layer("api", &limit);
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limit);
/// // For operators: on a port of its own, or behind a login.
/// let operators: Router = Router::new().route_service("/limits", page);
/// # Ok(()) }
/// ```
///
/// **The page is for operators.** Mount it where clients cannot reach it, because it shows the limits. The page has no
/// login of its own. The page is read-only unless the program says [who may act](Self::operators).
///
/// `GET` and `HEAD` requests get the page. A `POST` request sends the fields of a form of at most 16 KiB:
///
/// | `action` | other fields | answer in JSON |
/// |---|---|---|
/// | `explain` | `method`, `uri`, `client`, `headers` and [extensions](Self::extension), which describe a request; or the `fingerprint` of a key that the page lists | a list of layers |
/// | `unblock`, `reset`, `own.NAME` | the `token` of a layer that was explained; `policy`, as often as needed, or none for all of them | `actions` |
/// | `switch` | `name`, and the `mode`: `enforce`, `degrade` or `shadow` | `actions` |
/// | `set` | `setting`, such as `mode login`; `subject`, the key or network if the kind has one; `value`; `why`; and, as needed, `lasting`, such as `1 hour`, and `seen`, the revision that was seen | `actions` |
/// | `set`, for an explained key | the `token`, one `policy`, and as `value` the key's own quota in all processes: `0 per minute` denies the key; `why`, `lasting` and `seen` as above | `actions` |
/// | `end`, `rollback` | `setting` and `subject`, and `why` | `actions` |
///
/// `curl -H 'accept: application/json' -d action=explain -d uri=/posts -d client=192.0.2.1 …` explains in JSON. A layer
/// has
///
/// * `layer`, its title,
/// * `explanation`, in the form of [`Explanation::to_json`](crate::observe::Explanation::to_json), or `null` if a key
///   is explained,
/// * `states`, the units that the keys have left now under each policy: `policy`, `quota`, `fingerprint`, `name`,
///   `limit`, `used`, `remaining`, `reset_after_us`, `wait`, `wait_us` and `blocked`, where `limit` and `remaining`
///   are `null` if the quota is unlimited, and `blocked` is `null` if the policy is not a block,
/// * `failure`, the limiter's error, or `null`,
/// * `token`, a token for [operators](Self::operators) or `null`, and `own`, the names of the [program's
///   own](Self::action) actions that operators may take,
/// * `recent_refusals`, the recent refusals of these keys, or `null` if refusals are not stored.
///
/// `set`, `end` and `rollback` make and end the settings of a [fleet](Self::fleet), like
/// [`Fleet::change`](crate::fleet::Fleet::change). Instead of `setting` and `subject`, a form can send `entry`, the
/// name of an entry that the page lists. A fingerprint as `subject` is refused. If nothing is counted for a typed key,
/// the action has a [warning](crate::observe::OperatorAction::warning).
///
/// Each of the `actions` has the form of [`OperatorAction::to_json`](crate::observe::OperatorAction::to_json). The
/// status is 503 if an action failed. Other answers say what is wrong with the request. A browser gets the error on the
/// page, and a program gets it as plain text. The status is 400 for a form that cannot be read, 403 for a sender who
/// may not act, 404 for a key that is not listed, and 409 for a token that was used or is too old.
///
/// * A described request has a client, headers, and the extensions that the operator [states](Self::extension). A
///   rule that reads another extension is explained as for a request without that extension. The client is the peer,
///   and also the client behind [trusted proxies](crate::key::TrustedProxies), unless a header names another client.
/// * A form that a browser sends for another site is refused. The page reads `Sec-Fetch-Site` for this or, without
///   this header, compares `Origin` with `Host`. Another site may point its own name at this server (DNS rebinding),
///   and a browser then treats the site's pages and this page as one site. Therefore a browser can act only if it
///   uses an IP address, `localhost`, or a name that the program [lists](Self::hosts).
/// * The page has no scripts, is sent with `Cache-Control: no-store`, and cannot be framed. Names of policies and keys
///   are shown as text.
/// * A page takes some microseconds for each policy, and some milliseconds for each million keys of a limiter in
///   memory. The keys of a limiter with room for more than 100,000 keys are counted at most once per second.
///
/// # What support asks
///
/// | question | on the page | in the JSON of explain, for each layer |
/// |---|---|---|
/// | Was it refused? How often? | the recent refusals under these keys | `recent_refusals` |
/// | Since when? | the last row; a key keeps at most 16, and *Refused most* counts all | the last `at`; `refusals` in `most_limited` |
/// | Which request was it? | the column *request*: the id, and the path if it is kept | `request_id`, `request` |
/// | By which rule? | the column *refused by* | `policy`, `quota` |
/// | What has it used? | *left now* | `used` in `states` |
/// | When can it go on? | *lets a request pass*: the longest of its rows | the largest `wait_us` in `states` |
/// | Is it blocked? | *left now* says so | `blocked` in `states` |
/// | Who else shares its key? | the key in the explanation: an address, a /64, `(all requests)` | `key` in the `rules` of `explanation` |
/// | Would the same request pass now? | the first line of the explanation | `passes` in `explanation` |
/// | What would a raise do? | raise it, and explain again: *left now* under the other plan; or replay the log, see below | `limit` and `remaining` in `states` |
/// | Has a colleague helped already? | *Done by operators* | `actions` in the JSON of the page |
///
/// If each request [brings its quota](crate::Rule::quota_from), the page cannot find the quota for
/// a fingerprint. The page shows the used units of the key, and the recent refusals show the quota.
/// To see the remaining units and the wait, explain a request, and state the quota in the field
/// that brings it.
#[derive(Clone)]
pub struct StatusPage(Arc<PageContent>);

/// The settings of the page, and the sources of its content.
#[derive(Clone)]
struct PageContent {
    stats: Stats,
    sources: Vec<(String, Arc<dyn ErasedLayer>)>,
    extensions: Vec<ExtensionField>,
    switches: Vec<(String, ModeSwitch)>,
    operators: Option<Arc<Operators>>,
    /// The host names that browsers may use for the page.
    hosts: Vec<String>,
    own: Vec<OwnAction>,
    #[cfg(feature = "rules")]
    rules: Option<crate::rules::Rules>,
    #[cfg(feature = "fleet")]
    fleet: Option<crate::fleet::Fleet>,
    #[cfg(feature = "fleet")]
    report: Arc<ReportSource>,
}

/// An action that the program added.
#[derive(Clone)]
struct OwnAction {
    name: String,
    policy: String,
    run: Arc<ActionFn>,
}

type ActionFn = dyn Fn(&Key) -> Result<(), String> + Send + Sync;

impl StatusPage {
    /// Makes a page that shows these statistics.
    #[must_use]
    pub fn new(stats: Stats) -> Self {
        Self(Arc::new(PageContent {
            stats,
            sources: Vec::new(),
            extensions: Vec::new(),
            switches: Vec::new(),
            operators: None,
            hosts: Vec::new(),
            own: Vec::new(),
            #[cfg(feature = "rules")]
            rules: None,
            #[cfg(feature = "fleet")]
            fleet: None,
            #[cfg(feature = "fleet")]
            report: Arc::default(),
        }))
    }

    /// Shows a layer under a title: its quotas, modes and setup warnings, how full its limiter is, and what it would do
    /// with a request. Call this method when the layer is set up, because later settings are not shown.
    #[must_use]
    pub fn layer<L: Limiter, O>(mut self, title: impl Into<String>, layer: &RateLimitLayer<L, O>) -> Self
    where
        O: Clone + Send + Sync + 'static,
    {
        Arc::make_mut(&mut self.0).sources.push((title.into(), Arc::new(LayerSource::new(layer.clone()))));
        self
    }

    /// Allows operators to state an extension of the request that is to be explained. `read` makes the extension from
    /// the operator's text, or returns `None` if the text is not a valid value. The form then has a field with this
    /// name, and programs send the field as `extension.NAME`. An empty field adds no extension.
    ///
    /// With the extension, a rule with [`key::extension`](crate::key::extension) is explained as for a request that
    /// went through authentication. Conditions, costs and plans can read the extension, too. Make the value that your
    /// authentication would add to a request:
    ///
    /// ```
    /// use tower_ratelimit::observe::{Stats, StatusPage};
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    /// }
    ///
    /// let stats = Stats::new();
    /// let by_user = key::extension(|user: &User| user.id);
    /// let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), by_user)
    ///     .observer(stats.clone());
    /// let page = StatusPage::new(stats)
    ///     .layer("api", &limit)
    ///     .extension("user", |text| Some(User { id: text.parse().ok()? }));
    /// // curl -H 'accept: application/json' -d action=explain -d uri=/posts …
    /// ```
    ///
    /// `read` is called while the page is made, so it must not block. A second field with this name replaces the first
    /// field. An extension that only a framework can make, such as axum's `MatchedPath`, cannot be stated.
    #[must_use]
    pub fn extension<T, F>(mut self, name: impl Into<String>, read: F) -> Self
    where
        T: Clone + Send + Sync + 'static,
        F: Fn(&str) -> Option<T> + Send + Sync + 'static,
    {
        let (name, extensions) = (name.into(), &mut Arc::make_mut(&mut self.0).extensions);
        extensions.retain(|field| field.name != name);
        extensions.push(ExtensionField::new(name, read));
        self
    }

    /// Shows the version of a file of rules, and why its newest version was refused.
    ///
    /// The page shows this without a call of this method if a layer with the rules has the `Stats` of the page as its
    /// observer. Call this method if no layer has this observer, if there are several files, or if operators
    /// [push](crate::fleet) rules: pushed rules may be refused before a layer has its observer.
    #[cfg(feature = "rules")]
    #[must_use]
    pub fn rules(mut self, rules: &crate::rules::Rules) -> Self {
        let content = Arc::make_mut(&mut self.0);
        content.rules = Some(rules.clone());
        #[cfg(feature = "fleet")]
        let _ = content.report.rules.set(rules.clone()); // the first ones
        self
    }

    /// Shows the operators' settings for [all processes](crate::fleet), who made them and why, which revision this
    /// process has, and the reason if the store does not answer. [Operators](Self::operators) can change the settings
    /// on the page, and their tokens are valid in all processes.
    ///
    /// If the fleet has a store, this process reports its counts every five seconds. With a store, the page shows up to
    /// 64 processes by name, and sums over these processes. For each process the page shows the hash of its rules and
    /// the hash of its settings, and since when they are in force. If all 64 places are taken, or if a report cannot be
    /// read, the page says so. A report has at most 8 kB. A process without a report for 12 seconds is shown as silent,
    /// and its last report disappears after 20 seconds.
    ///
    /// For rules of a file that operators pushed, the page lists what they change.
    #[cfg(feature = "fleet")]
    #[must_use]
    pub fn fleet(mut self, fleet: &crate::fleet::Fleet) -> Self {
        let content = Arc::make_mut(&mut self.0);
        content.fleet = Some(fleet.clone());
        let (source, stats) = (Arc::clone(&content.report), content.stats.clone());
        fleet.report_by(move |fleet| source.report(&stats, fleet));
        self
    }

    /// Looks whether the key or the network of a change is mistyped, as the page does when an operator types one. The
    /// returned warning says that nothing is counted for the key now, and that the page does not list the key. Or it
    /// says that the change denies an IPv4 `/8`, an IPv6 `/16`, or a larger network. The key or the network may still
    /// be right, so the change can be made all the same.
    ///
    /// For an override or a plan, the limiters of the page's [layers](Self::layer) are asked about the policy with the
    /// name of the change. For an entry of an access list, they are asked about all policies. A limiter with a store
    /// answers for all processes. The answer is `None` if the change has no key or ends an entry, if there is already
    /// an entry for the key, if a limiter fails, or if no layer has such a policy.
    ///
    /// # Errors
    /// Returns an error if the key is the text of a [fingerprint](crate::observe::TopKey::fingerprint) that the page
    /// lists.
    #[cfg(feature = "fleet")]
    pub async fn check_key(
        &self,
        change: &crate::fleet::FleetChange,
    ) -> Result<Option<String>, crate::fleet::FleetError> {
        let PageContent { fleet, stats, sources, .. } = &*self.0;
        match fleet {
            Some(fleet) => settings::check_key(fleet, stats, sources, change).await,
            None => Ok(None),
        }
    }

    /// Sets the name of this process among the processes of a [fleet](Self::fleet). The default is the name of the host
    /// from the variable `HOSTNAME`, with the process's id.
    #[cfg(feature = "fleet")]
    #[must_use]
    pub fn process_name(self, name: impl Into<String>) -> Self {
        let _ = self.0.report.name.set(name.into()); // the first one
        self
    }

    /// Shows a mode under a name. [Operators](Self::operators) can switch the mode on the page.
    #[must_use]
    pub fn switch(mut self, name: impl Into<String>, switch: &ModeSwitch) -> Self {
        Arc::make_mut(&mut self.0).switches.push((name.into(), switch.clone()));
        self
    }

    /// Adds an action of the program, which [operators](Self::operators) can take on keys under the policy with the
    /// name `policy`: for example to raise a customer's plan. `name` is the text of the button, and programs send it as
    /// `action=own.NAME`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::middleware::Overrides;
    /// use tower_ratelimit::observe::{Stats, StatusPage};
    /// use tower_ratelimit::{Head, MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let stats = Stats::new();
    /// let overrides = Overrides::new();
    /// let usual = |_: &Head<'_>| Quota::per_minute(60);
    /// let customer =
    ///     Rule::quota_from("customer", overrides.or(key::header("x-api-key"), usual))?;
    /// let limit = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"))
    ///     .observer(stats.clone());
    ///
    /// let (raised, hour) = (Quota::per_minute(600), Duration::from_secs(3_600));
    /// let page = StatusPage::new(stats)
    ///     .layer("api", &limit)
    ///     .operators(|_| Some("alice".to_owned()), |action| eprintln!("{action}"))
    ///     .action("customer", "raise", move |key| {
    ///         overrides.set(key.clone(), raised, hour).map(drop)
    ///     });
    /// # Ok(()) }
    /// ```
    ///
    /// The program decides what the action does, so an operator cannot mistype a number. The action runs while the page
    /// is made, so it must not block. An action that panics is reported as cut off.
    #[must_use]
    pub fn action<F, E>(mut self, policy: impl Into<String>, name: impl Into<String>, run: F) -> Self
    where
        F: Fn(&Key) -> Result<(), E> + Send + Sync + 'static,
        E: std::error::Error,
    {
        let run = move |key: &Key| run(key).map_err(|error| WithSources(&error).to_string());
        let own = OwnAction { name: name.into(), policy: policy.into(), run: Arc::new(run) };
        Arc::make_mut(&mut self.0).own.push(own);
        self
    }

    /// Allows operators to unblock and reset keys, to [switch](Self::switch) modes, and to change the settings of a
    /// [fleet](Self::fleet). Without operators the page is read-only.
    ///
    /// `who` returns the name of the operator who sent a request, or `None` if the sender may not act. `who` reads the
    /// data that your login adds to the request: an extension, or a header that a proxy sets and clients cannot set.
    /// `audit` gets each action after the action has ended: [who, what, which key, when, and the
    /// result](crate::observe::OperatorAction). Write it to your log.
    ///
    /// ```
    /// use tower_ratelimit::observe::{Stats, StatusPage};
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    ///
    /// /// What the application's login puts into requests.
    /// #[derive(Clone)]
    /// struct Staff {
    ///     name: String,
    ///     may_act: bool,
    /// }
    ///
    /// let stats = Stats::new();
    /// let limit =
    ///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip());
    /// let limit = limit.observer(stats.clone());
    /// let page = StatusPage::new(stats).layer("api", &limit).operators(
    ///     |request| {
    ///         request
    ///             .extensions
    ///             .get::<Staff>()
    ///             .filter(|staff| staff.may_act)
    ///             .map(|staff| staff.name.clone())
    ///     },
    ///     |action| eprintln!("{action}"),
    /// );
    /// ```
    ///
    /// An operator first explains a request, or a key that the page lists with its fingerprint. The answer shows the
    /// units that each key has left now, and has a token for each layer. With the token the operator acts on these
    /// keys:
    ///
    /// * *Unblock* opens blocks. The used units of the rules' quotas stay used.
    /// * *Reset* forgets the used units of the keys, and opens blocks. Meters are kept, because they are billed.
    ///
    /// Both actions take effect in this process at once. With Redis or another store, other processes remember denials,
    /// and may still refuse the keys for about a second.
    ///
    /// A token is valid for one action within five minutes, and only for the operator who asked for the explanation.
    /// Therefore another site cannot make a browser act, and a form that is sent twice acts only once.
    ///
    /// Behind a load balancer, the next request may reach the page of another process. If the processes share a
    /// [fleet](Self::fleet), a token is valid once in each process, together with the fields that describe the request.
    /// The page sends the fields of the request, and the other process explains the request again. A key that one
    /// process lists with its fingerprint is known only to that process.
    ///
    /// * From now on the statistics store the keys that the page lists, so that a fingerprint is enough to act on a
    ///   key. Keys of more than 512 bytes are not stored. The page does not show the stored keys. A stored key needs
    ///   about 100 bytes. The most refused keys, the keys of recent refusals, and the keys that use the most units of
    ///   each policy are stored.
    /// * All tokens together hold at most 1 MiB of keys. The oldest tokens are forgotten. The page lists the last 100
    ///   actions.
    /// * `who` and `audit` are called while the page is made, so they must not block. A panic of `audit` is caught, and
    ///   the operator still gets the answer.
    /// * An action that is cut off because the operator's browser disconnected is reported as possibly done.
    #[must_use]
    pub fn operators<W, A>(mut self, who: W, audit: A) -> Self
    where
        W: Fn(&Head<'_>) -> Option<String> + Send + Sync + 'static,
        A: Fn(&OperatorAction) + Send + Sync + 'static,
    {
        let shown = Arc::make_mut(&mut self.0);
        shown.stats.keep_keys();
        shown.operators = Some(Arc::new(Operators::new(who, audit)));
        self
    }
}

impl StatusPage {
    /// Lists the host names that browsers use for the page, such as `limits.example.com`, without a port. Requests to
    /// names that are not listed are refused with the status 421, from browsers and from programs.
    ///
    /// By default the page is shown under every name, but a browser can act only if it uses an IP address or
    /// `localhost`. Other names are not enough, because another site can point its own name at this server. Scripts of
    /// such a site then reach the page through the operator's browser, from within the operator's network. Nobody can
    /// point an address or `localhost` to another server, so both are always allowed. Programs such as `curl`, which
    /// send no `Origin`, can act under every name, or, if the program lists names, under every listed name.
    ///
    /// A proxy that replaces `Host` has to check the name.
    #[must_use]
    pub fn hosts<I>(mut self, hosts: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Arc::make_mut(&mut self.0).hosts = hosts.into_iter().map(Into::into).collect();
        self
    }
}

impl PageContent {
    /// Returns the names of the policies for which the program added an action with this name.
    fn own_policies(&self, name: &str) -> Vec<&str> {
        self.own.iter().filter(|own| own.name == name).map(|own| own.policy.as_str()).collect()
    }

    /// Returns an error if the program added no action with this name.
    fn check_own(&self, name: &str) -> Result<(), Wrong> {
        if !self.own_policies(name).is_empty() {
            return Ok(());
        }
        let known: Vec<String> = self.own.iter().map(|own| format!("`{OWN}{}`", own.name)).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Err(wrong(&format!("this page has no action `{OWN}{name}`, only {known}")))
    }

    /// Acts on a key.
    async fn act_on(&self, act: &Act, source: &dyn ErasedLayer, held: &Held) -> Result<(), String> {
        let Act::Own(name) = act else { return source.reset(&held.policy, &held.key).await };
        let mut own = self.own.iter().filter(|own| own.name == **name && own.policy == held.policy.name());
        own.try_for_each(|own| (own.run)(&held.key))
    }

    async fn view(&self, parts: &Parts) -> PageView {
        let mut view = PageView::new(self.stats.snapshot(), &self.sources);
        view.rules = view.stats.rules().map(|in_force| {
            let error = view.stats.events().rules_error().map(str::to_owned);
            RulesView { in_force, error }
        });
        #[cfg(feature = "rules")]
        if let Some(rules) = &self.rules {
            let error = rules.error().map(|error| WithSources(&error).to_string());
            view.rules = Some(RulesView { in_force: rules.in_force(), error });
        }
        #[cfg(feature = "fleet")]
        {
            view.fleet = self.fleet.as_ref().map(|fleet| settings::FleetView::new(fleet, &self.stats));
            if let Some(fleet) = &self.fleet {
                view.processes = ProcessesView::of(fleet).await;
            }
        }
        view.extensions = self.extensions.iter().map(|field| field.name.clone()).collect();
        view.switches = self.switches.iter().map(|(name, switch)| (name.clone(), switch.get())).collect();
        match self.acting(parts) {
            #[cfg(feature = "fleet")]
            Ok((operators, operator)) => {
                if let Some(fleet) = &mut view.fleet {
                    fleet.show_typed(operators, &operator);
                }
                view.operator = Some(operator);
            }
            #[cfg(not(feature = "fleet"))]
            Ok((_, operator)) => view.operator = Some(operator),
            Err((_, message)) if self.operators.as_ref().is_some_and(|operators| operators.who(parts).is_some()) => {
                view.wrong = Some(message.into_owned());
            }
            Err(_) => {}
        }
        view.done = self.operators.as_ref().map(|operators| operators.done());
        view
    }

    /// Returns the operators of the page, and the name of the operator who sent a request.
    fn acting(&self, parts: &Parts) -> Result<(&Operators, Box<str>), Wrong> {
        let Some(operators) = self.operators.as_deref() else {
            let message = "this page changes nothing: its program has not set `StatusPage::operators`";
            return Err((StatusCode::FORBIDDEN, message.into()));
        };
        let Some(name) = operators.who(parts) else {
            let message =
                "you may not act here: `StatusPage::operators` of the program names no operator for this request";
            return Err((StatusCode::FORBIDDEN, message.into()));
        };
        refuse_other_names(parts, &self.hosts)?;
        Ok((operators, name))
    }

    async fn answer<B>(&self, parts: &Parts, body: B) -> Response<StatusBody>
    where
        B: Body,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let is_json = wants_json(&parts.headers);
        if let Err((status, message)) = refuse_unlisted_names(parts, &self.hosts) {
            return plain(status, message.into_owned());
        }
        match parts.method {
            Method::GET | Method::HEAD => self.page(parts, StatusCode::OK, is_json, &self.view(parts).await),
            Method::POST => match self.act(parts, body, is_json).await {
                Ok(response) => response,
                Err((status, message)) if wants_page(&parts.headers) => {
                    let mut view = self.view(parts).await;
                    view.wrong = Some(message.into_owned());
                    self.page(parts, status, false, &view)
                }
                Err((status, message)) => plain(status, message.into_owned()),
            },
            _ => {
                let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET, HEAD or POST".to_owned());
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD, POST"));
                response
            }
        }
    }

    fn page(&self, parts: &Parts, status: StatusCode, is_json: bool, view: &PageView) -> Response<StatusBody> {
        let refresh = parts.method != Method::POST && parts.uri.query() == Some("refresh");
        let (kind, text) = match (is_json, &view.explained) {
            (true, None) => ("application/json", json::render(view)),
            (true, Some(_)) => ("application/json", json::explanations(view)),
            (false, _) => ("text/html; charset=utf-8", html::render(view, refresh)),
        };
        response(status, kind, text)
    }

    async fn act<B>(&self, parts: &Parts, body: B, is_json: bool) -> Result<Response<StatusBody>, Wrong>
    where
        B: Body,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        refuse_other_sites(parts)?;
        let form = match Limited::new(body, FORM_MAX).collect().await {
            Ok(form) => form.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                return Err((StatusCode::PAYLOAD_TOO_LARGE, "the form has more than 16 KiB".into()));
            }
            Err(_) => return Err((StatusCode::BAD_REQUEST, "the form could not be received".into())),
        };
        match FormAction::read(parts, &form, &self.extensions)? {
            FormAction::Explain(described) => {
                let explained = self.explain(&described.request).await;
                let explained = explained.into_iter().map(|(target, explanation)| (target, Some(explanation)));
                Ok(self.explained(parts, is_json, described.form, explained.collect()).await)
            }
            FormAction::ExplainKey(fingerprint) => {
                let (listed, targets) = self.find_key(&fingerprint)?;
                let explained: Vec<_> = targets.into_iter().map(|target| (target, None)).collect();
                if explained.is_empty() {
                    let message = "no layer of this page has the rule under which this key is listed: the program \
                                   shows layers by `StatusPage::layer`";
                    return Err((StatusCode::NOT_FOUND, message.into()));
                }
                let shown = listed.shown(&self.stats);
                let form =
                    ExplainForm { fingerprint: Some(shown.fingerprint), name: shown.name, ..ExplainForm::default() };
                Ok(self.explained(parts, is_json, form, explained).await)
            }
            FormAction::Unclear(_, message) if !wants_page(&parts.headers) => {
                Err((StatusCode::BAD_REQUEST, message.into()))
            }
            FormAction::Unclear(form, message) => {
                let mut view = self.view(parts).await;
                view.explained = Some((form, Err(message)));
                Ok(self.page(parts, StatusCode::BAD_REQUEST, false, &view))
            }
            FormAction::Act { act, token, policies, explained } => {
                let (operators, operator) = self.acting(parts)?;
                let own = if let Act::Own(name) = &act {
                    self.check_own(name)?;
                    self.own_policies(name)
                } else {
                    Vec::new()
                };
                let narrow = |target: &mut LayerKeys| target.narrow(&act, &own, &policies);
                let target = self.take(operators, &operator, &token, explained.as_ref(), narrow).await?;
                let mut actions = Vec::with_capacity(target.held.len());
                for held in &target.held {
                    let done = Done::OnKey {
                        act: act.clone(),
                        layer: (*target.title).into(),
                        policy: held.policy.name().into(),
                        fingerprint: held.shown.fingerprint.clone(),
                        name: held.shown.name.clone(),
                    };
                    let underway = operators.begin(&self.stats, &operator, done);
                    actions.push(underway.end(self.act_on(&act, &*target.source, held).await));
                }
                Ok(self.answer_actions(parts, is_json, &actions, StatusCode::SERVICE_UNAVAILABLE).await)
            }
            #[cfg(feature = "fleet")]
            FormAction::Setting(form) => {
                let (operators, operator) = self.acting(parts)?;
                let Some(fleet) = &self.fleet else {
                    return Err(wrong("this page changes no settings for all processes: see `StatusPage::fleet`"));
                };
                let request = SettingRequest::read(&form)?;
                let change = match &form.key {
                    Some(KeyForm { token, policy, explained }) => {
                        let narrow = |target: &mut LayerKeys| target.narrow_to(policy);
                        let target = self.take(operators, &operator, token, explained.as_ref(), narrow).await?;
                        request.change_of_key(&target)?
                    }
                    None => request.change_of_form(fleet)?,
                };
                let made = request.make(change, fleet, operators, &self.stats, &self.sources, &operator).await;
                let (action, failed) = made;
                if failed.is_some() && wants_page(&parts.headers) {
                    let mut view = self.view(parts).await;
                    view.wrong = Some(action.to_string());
                    view.setting = Some(form);
                    return Ok(self.page(parts, failed.unwrap_or_default(), false, &view));
                }
                Ok(self.answer_actions(parts, is_json, &[action], failed.unwrap_or_default()).await)
            }
            FormAction::Switch(name, mode) => {
                let (operators, operator) = self.acting(parts)?;
                let Some((_, switch)) = self.switches.iter().find(|(own, _)| *own == name) else {
                    return Err(wrong(&format!("there is no switch `{name}`")));
                };
                let underway = operators.begin(&self.stats, &operator, Done::Switched { switch: name.into(), mode });
                switch.set(mode);
                Ok(self.answer_actions(parts, is_json, &[underway.end(Ok(()))], StatusCode::OK).await)
            }
        }
    }

    /// Takes the keys that an operator explained with this token. The token is used up unless this fails.
    async fn take(
        &self,
        operators: &Operators,
        operator: &str,
        token: &str,
        explained: Option<&ExplainForm>,
        narrow: impl FnOnce(&mut LayerKeys) -> Result<(), Wrong>,
    ) -> Result<LayerKeys, Wrong> {
        let explained = match explained {
            Some(form) if !operators.knows(token) => self.explain_again(form).await?,
            _ => Vec::new(),
        };
        operators.take(self.shared_secret(), operator, token, explained, narrow, self.stats.now())
    }

    /// Returns what each layer would do with a request.
    async fn explain(&self, request: &Parts) -> Vec<(LayerKeys, Explanation)> {
        let mut explained = Vec::with_capacity(self.sources.len());
        for (title, source) in &self.sources {
            let explanation = source.explain(request).await;
            explained.push((LayerKeys::of_explanation(title, source, &explanation, &self.stats), explanation));
        }
        explained
    }

    /// Finds a listed key. Also returns, for each layer, the key with the policies of the rules for which the key is
    /// listed.
    fn find_key(&self, fingerprint: &str) -> Result<(ListedKey, Vec<LayerKeys>), Wrong> {
        let listed = ListedKey::find(&self.stats.snapshot(), fingerprint)?;
        let targets = self.sources.iter();
        let targets = targets.map(|(title, source)| LayerKeys::of_key(title, source, &listed, &self.stats));
        let targets = targets.filter(|target| !target.held.is_empty()).collect();
        Ok((listed, targets))
    }

    /// Explains again the request or key that another process explained, as the form describes it.
    /// Returns the keys.
    async fn explain_again(&self, form: &ExplainForm) -> Result<Vec<LayerKeys>, Wrong> {
        if let Some(fingerprint) = &form.fingerprint {
            return Ok(self.find_key(fingerprint).map_or_else(|_| Vec::new(), |(_, targets)| targets));
        }
        let request = form.request(&self.extensions).map_err(|message| wrong(&message))?;
        Ok(self.explain(&request).await.into_iter().map(|(target, _)| target).collect())
    }

    /// Returns the secret for tokens that all processes share, if it is known.
    fn shared_secret(&self) -> Option<u128> {
        #[cfg(feature = "fleet")]
        return self.fleet.as_ref().and_then(crate::fleet::Fleet::secret);
        #[cfg(not(feature = "fleet"))]
        None
    }

    /// Answers with the explanation, and also with tokens if an operator sent the request.
    async fn explained(
        &self,
        parts: &Parts,
        is_json: bool,
        form: ExplainForm,
        explained: Vec<(LayerKeys, Option<Explanation>)>,
    ) -> Response<StatusBody> {
        let acting = self.acting(parts).ok();
        #[cfg(feature = "fleet")]
        if let (Some(fleet), Some(_)) = (&self.fleet, &acting) {
            let _ = fleet.shared_secret().await; // without it the tokens hold in this process
        }
        let mut layers = Vec::with_capacity(explained.len());
        for (target, explanation) in explained {
            let states = target.look().await;
            layers.push((target, explanation, states));
        }
        let mut view = self.view(parts).await;
        let now = view.stats.taken_at();
        let layers = layers.into_iter().map(|(target, explanation, states)| {
            let (title, recent) = (target.title.to_string(), view.find_recent(&target));
            let acting = acting.as_ref().filter(|_| !target.is_empty());
            let is_held = |own: &&OwnAction| target.held.iter().any(|held| held.policy.name() == own.policy);
            let own = self.own.iter().filter(|_| acting.is_some()).filter(is_held);
            let own = own.map(|own| (own.name.clone(), own.policy.clone())).collect();
            #[cfg(feature = "fleet")]
            let overridable = match (&view.fleet, &acting) {
                (Some(fleet), Some(_)) => fleet.overridable(&target),
                _ => Vec::new(),
            };
            #[cfg(not(feature = "fleet"))]
            let overridable = Vec::new();
            let secret = self.shared_secret();
            let token = acting.map(|(operators, operator)| operators.offer(secret, operator, target, now));
            ExplainedLayer { title, explanation, states, token, own, overridable, recent }
        });
        let layers = layers.collect();
        view.explained = Some((form, Ok(layers)));
        self.page(parts, StatusCode::OK, is_json, &view)
    }

    /// Answers with the result of actions. The status is `if_failed` if an action failed.
    async fn answer_actions(
        &self,
        parts: &Parts,
        is_json: bool,
        actions: &[OperatorAction],
        if_failed: StatusCode,
    ) -> Response<StatusBody> {
        let failed = || actions.iter().filter(|action| action.error().is_some());
        let status = if failed().next().is_some() { if_failed } else { StatusCode::OK };
        let lines = |actions: &mut dyn Iterator<Item = &OperatorAction>| {
            actions.map(ToString::to_string).collect::<Vec<_>>().join("\n")
        };
        match (is_json, wants_page(&parts.headers), status) {
            (true, ..) => response(status, "application/json", json::actions(actions)),
            (_, true, StatusCode::OK) if actions.iter().any(|action| action.warning().is_some()) => {
                let mut view = self.view(parts).await;
                view.warning = Some(lines(&mut actions.iter()));
                self.page(parts, status, false, &view)
            }
            (_, true, StatusCode::OK) => {
                // With this status the browser loads the page again without sending the form again.
                let mut response = plain(StatusCode::SEE_OTHER, String::new());
                response.headers_mut().insert(header::LOCATION, HeaderValue::from_static("?"));
                response
            }
            (_, true, _) => {
                let mut view = self.view(parts).await;
                view.wrong = Some(lines(&mut failed()));
                self.page(parts, status, false, &view)
            }
            _ => plain(status, lines(&mut actions.iter()) + "\n"),
        }
    }
}

fn plain(status: StatusCode, text: String) -> Response<StatusBody> {
    response(status, "text/plain; charset=utf-8", text)
}

fn response(status: StatusCode, kind: &'static str, text: String) -> Response<StatusBody> {
    let mut response = Response::new(StatusBody(Full::from(text)));
    *response.status_mut() = status;
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, html::CONTENT_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "same-origin"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

impl<B> Service<Request<B>> for StatusPage
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<StatusBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shown = Arc::clone(&self.0);
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            Ok(shown.answer(&parts, body).await)
        })
    }
}

impl fmt::Debug for StatusPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let titles: Vec<&str> = self.0.sources.iter().map(|(title, _)| title.as_str()).collect();
        f.debug_struct("StatusPage").field("layers", &titles).finish_non_exhaustive()
    }
}

/// The body of a [`StatusPage`]'s answer.
#[derive(Debug)]
pub struct StatusBody(Full<Bytes>);

impl Body for StatusBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}
