//! The formats of logs, by name and by detection.

use http::HeaderName;

use super::columns::Columns;
use super::envelope::{LAYERS_MAX, Opened};
use super::field::{Field, Fields, HeaderNames, Unit};
use super::json::Paths;
use super::pairs;
use super::request::{Keep, Request, address, hash, host_name, request_line};
use super::sources::{Sources, is_of_access_log, is_of_other_logger};
use super::text::Pattern;

/// A format that reads lines.
#[derive(Clone, Debug)]
pub(crate) struct Format {
    pub(crate) name: String,
    lines: Lines,
    /// Whether it is one of the named formats, whose lines have fields of a known form. The user's own have not.
    is_named: bool,
    /// Whether the time of a line is that of its prefix.
    has_no_time: bool,
}

#[derive(Clone, Debug)]
enum Lines {
    /// Ways to write a line, of which the first that fits is taken.
    Text(Vec<Pattern>),
    Json(Paths),
    /// Names and values. The time is that of the prefix.
    Pairs(Paths),
    Columns {
        /// The columns of a file without a directive.
        columns: Columns,
        headers: HeaderNames,
        /// A column that each directive of this format has. `None` if the format has no directives.
        sign: Option<&'static str>,
    },
}

/// A named format: its names, the first of which is printed, and how its lines are written.
type Named = (&'static [&'static str], Written);

#[derive(Clone, Copy)]
enum Written {
    /// As in nginx's `log_format`. `$time_start` is the time of arrival. Each line is one way to write it.
    Text(&'static str),
    /// The same without a time, which is that of the prefix.
    Timeless(&'static str),
    /// Paths of JSON and what they mean.
    Json(&'static [(&'static str, Meaning)]),
    /// Names of values and what they mean.
    Pairs(&'static [(&'static str, Meaning)]),
    /// The first columns, and the column that a directive `#Fields` of this format has, if the format has directives.
    Columns(&'static str, Option<&'static str>),
}

#[derive(Clone, Copy)]
enum Meaning {
    Field(Field),
    Header(&'static str),
}

use Meaning::Header;

const fn is(field: Field) -> Meaning {
    Meaning::Field(field)
}

/// All named formats. If several read as many lines of a log, the first is taken.
///
/// Sources: the documentation of Apache's mod_log_config, nginx's ngx_http_log_module and its default nginx.conf,
/// ingress-nginx's and Nginx Proxy Manager's log formats, Uvicorn's, Caddy's access logs, Traefik's access log
/// fields, Envoy's and Istio's default format strings, HAProxy's HTTP and HTTPS log formats, the access logs of
/// AWS' classic and application load balancers, of its API Gateway and of CloudFront, GCP's HttpRequest, Azure's
/// Application Gateway and Front Door, Cloudflare's Logpush fields of HTTP requests, Fastly's log format in JSON,
/// Kong's serializer, Heroku's router, W3C's working draft of the extended log file format with the fields of IIS,
/// and Squid's logformat.
const FORMATS: &[Named] = &[
    (
        &["COMBINED", "NGINX", "APACHE"],
        Written::Text(
            r#"$remote_addr $ident $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent""#,
        ),
    ),
    (&["COMMON", "CLF"], Written::Text(r#"$remote_addr $ident $remote_user [$time_local] "$request" $status $size"#)),
    (
        &["VCOMBINED", "VHOSTCOMBINED"],
        Written::Text(concat!(
            r#"$vhost $remote_addr $ident $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent""#,
            "\n",
            r#"$vhost $remote_addr $ident $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent" $rest"#,
        )),
    ),
    (
        &["VCOMMON", "VHOSTCOMMON"],
        Written::Text(r#"$vhost $remote_addr $ident $remote_user [$time_local] "$request" $status $size"#),
    ),
    (
        &["NGINXMAIN", "MAIN"],
        Written::Text(
            r#"$remote_addr - $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent" "$http_x_forwarded_for""#,
        ),
    ),
    (
        &["TRAEFIKCLF"],
        Written::Text(
            r#"$remote_addr $ident $remote_user [$time_start] "$request" $status $size "$http_referer" "$http_user_agent" $count "$router" "$server" $duration_ms"#,
        ),
    ),
    (
        &["INGRESSNGINX", "INGRESS"],
        Written::Text(
            r#"$remote_addr - $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent" $size $request_time [$upstream] $more"#,
        ),
    ),
    // As AWS Elastic Beanstalk configures Apache.
    (
        &["COMBINEDXFF", "BEANSTALK"],
        Written::Text(
            r#"$remote_addr ($http_x_forwarded_for) $ident $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent""#,
        ),
    ),
    (
        &["NGINXPROXYMANAGER", "NPM"],
        Written::Text(concat!(
            r#"[$time_local] $cache $upstream $status - $request_method $scheme $vhost "$request_uri" [Client $remote_addr] [Length $size] [Gzip $gzip] [Sent-to $server] "$http_user_agent" "$http_referer""#,
            "\n",
            r#"[$time_local] $status - $request_method $scheme $vhost "$request_uri" [Client $remote_addr] [Length $size] [Gzip $gzip] "$http_user_agent" "$http_referer""#,
        )),
    ),
    // Fields that a server's administrator added behind those of the combined format.
    (
        &["COMBINEDPLUS"],
        Written::Text(
            r#"$remote_addr $ident $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent" $rest"#,
        ),
    ),
    (
        &["CADDY"],
        Written::Json(&[
            ("logger", is(Field::Logger)),
            ("ts", is(Field::End)),
            ("duration", is(Field::Duration(Unit::Seconds))),
            ("status", is(Field::Status)),
            ("user_id", is(Field::User)),
            ("request.client_ip", is(Field::Client)),
            ("request.remote_ip", is(Field::Peer)),
            ("request.remote_addr", is(Field::Peer)), // before version 2.5
            ("request.method", is(Field::Method)),
            ("request.host", is(Field::Host)),
            ("request.uri", is(Field::Target)),
            ("request.headers.User-Agent", Header("user-agent")),
            ("request.headers.Referer", Header("referer")),
            ("request.headers.X-Forwarded-For", Header("x-forwarded-for")),
        ]),
    ),
    (
        &["TRAEFIK", "TRAEFIKJSON"],
        Written::Json(&[
            ("StartUTC", is(Field::Start)),
            ("time", is(Field::End)),
            ("Duration", is(Field::Duration(Unit::Nanos))),
            ("DownstreamStatus", is(Field::Status)),
            ("ClientHost", is(Field::Client)),
            ("ClientUsername", is(Field::User)),
            ("RequestMethod", is(Field::Method)),
            ("RequestHost", is(Field::Host)),
            ("RequestPath", is(Field::Target)),
            ("request_User-Agent", Header("user-agent")),
            ("request_Referer", Header("referer")),
            ("request_X-Forwarded-For", Header("x-forwarded-for")),
        ]),
    ),
    (
        &["GCP", "GCPLB"],
        Written::Json(&[
            ("timestamp", is(Field::Start)),
            ("httpRequest.latency", is(Field::Duration(Unit::Seconds))),
            ("httpRequest.status", is(Field::Status)),
            ("httpRequest.remoteIp", is(Field::Client)),
            ("httpRequest.requestMethod", is(Field::Method)),
            ("httpRequest.requestUrl", is(Field::Target)),
            ("httpRequest.userAgent", Header("user-agent")),
            ("httpRequest.referer", Header("referer")),
        ]),
    ),
    (
        &["CLOUDFLARE"],
        Written::Json(&[
            ("EdgeStartTimestamp", is(Field::Start)),
            ("EdgeEndTimestamp", is(Field::End)),
            ("EdgeResponseStatus", is(Field::Status)),
            ("ClientIP", is(Field::Client)),
            ("ClientRequestMethod", is(Field::Method)),
            ("ClientRequestHost", is(Field::Host)),
            ("ClientRequestURI", is(Field::Target)),
            ("ClientRequestUserAgent", Header("user-agent")),
            ("ClientRequestReferer", Header("referer")),
        ]),
    ),
    (
        &["AZURE", "APPGATEWAY", "FRONTDOOR"],
        Written::Json(&[
            ("timeStamp", is(Field::End)),
            ("time", is(Field::End)),
            ("properties.timeTaken", is(Field::Duration(Unit::Seconds))),
            ("properties.httpStatus", is(Field::Status)),
            ("properties.httpStatusCode", is(Field::Status)),
            ("properties.clientIP", is(Field::Client)),
            ("properties.clientIp", is(Field::Client)),
            ("properties.httpMethod", is(Field::Method)),
            ("properties.originalHost", is(Field::Host)),
            ("properties.host", is(Field::Host)),
            ("properties.hostName", is(Field::Host)),
            ("properties.originalRequestUriWithArgs", is(Field::Target)),
            ("properties.requestUri", is(Field::Target)),
            ("properties.userAgent", Header("user-agent")),
            ("properties.referer", Header("referer")),
        ]),
    ),
    (
        &["FASTLY"],
        Written::Json(&[
            ("timestamp", is(Field::End)),
            ("response_status", is(Field::Status)),
            ("client_ip", is(Field::Client)),
            ("request_method", is(Field::Method)),
            ("host", is(Field::Host)),
            ("url", is(Field::Target)),
            ("request_user_agent", Header("user-agent")),
            ("request_referer", Header("referer")),
        ]),
    ),
    (
        &["APIGATEWAY", "AWSAPIGATEWAY"],
        Written::Json(&[
            ("requestTime", is(Field::End)),
            ("requestTimeEpoch", is(Field::End)),
            ("status", is(Field::Status)),
            ("ip", is(Field::Client)),
            ("sourceIp", is(Field::Client)),
            ("user", is(Field::User)),
            ("httpMethod", is(Field::Method)),
            ("domainName", is(Field::Host)),
            ("path", is(Field::Target)),
            ("resourcePath", is(Field::Target)),
            ("userAgent", Header("user-agent")),
        ]),
    ),
    (
        &["KONG"],
        Written::Json(&[
            ("started_at", is(Field::Start)),
            ("latencies.request", is(Field::Duration(Unit::Millis))),
            ("response.status", is(Field::Status)),
            ("client_ip", is(Field::Client)),
            ("consumer.username", is(Field::User)),
            ("request.method", is(Field::Method)),
            ("request.uri", is(Field::Target)),
            ("request.headers.host", is(Field::Host)),
            ("request.headers.user-agent", Header("user-agent")),
            ("request.headers.referer", Header("referer")),
            ("request.headers.x-forwarded-for", Header("x-forwarded-for")),
        ]),
    ),
    // Operators choose these names; those of Istio are the usual ones.
    (
        &["ENVOYJSON", "ISTIOJSON"],
        Written::Json(&[
            ("start_time", is(Field::Start)),
            ("duration", is(Field::Duration(Unit::Millis))),
            ("response_code", is(Field::Status)),
            ("downstream_remote_address", is(Field::Peer)),
            ("method", is(Field::Method)),
            ("authority", is(Field::Host)),
            ("path", is(Field::Target)),
            ("user_agent", Header("user-agent")),
            ("x_forwarded_for", Header("x-forwarded-for")),
            // Those of Envoy Gateway and of newer versions of Envoy.
            (":authority", is(Field::Host)),
            ("x-envoy-origin-path", is(Field::Target)),
            ("user-agent", Header("user-agent")),
            ("x-forwarded-for", Header("x-forwarded-for")),
        ]),
    ),
    // Those of nginx's variables, and the usual ones for them.
    (
        &["NGINXJSON"],
        Written::Json(&[
            ("time_local", is(Field::End)),
            ("time_iso8601", is(Field::End)),
            ("msec", is(Field::End)),
            ("time", is(Field::End)),
            ("@timestamp", is(Field::End)),
            ("timestamp", is(Field::End)),
            ("request_time", is(Field::Duration(Unit::Seconds))),
            ("status", is(Field::Status)),
            ("response", is(Field::Status)),
            ("remote_addr", is(Field::Client)),
            ("remote_ip", is(Field::Client)),
            ("client_ip", is(Field::Client)),
            ("clientip", is(Field::Client)),
            ("remote_user", is(Field::User)),
            ("request", is(Field::RequestLine)),
            ("request_method", is(Field::Method)),
            ("method", is(Field::Method)),
            ("request_uri", is(Field::Target)),
            ("uri", is(Field::Target)),
            ("path", is(Field::Target)),
            ("http_host", is(Field::Host)),
            ("host", is(Field::Host)),
            ("server_name", is(Field::Host)),
            ("vhost", is(Field::Host)),
            ("http_user_agent", Header("user-agent")),
            ("user_agent", Header("user-agent")),
            ("agent", Header("user-agent")),
            ("http_referer", Header("referer")),
            ("http_referrer", Header("referer")),
            ("referer", Header("referer")),
            ("referrer", Header("referer")),
            ("http_x_forwarded_for", Header("x-forwarded-for")),
            ("x_forwarded_for", Header("x-forwarded-for")),
        ]),
    ),
    (
        &["UVICORN"],
        Written::Timeless(concat!(
            r#"INFO:     $remote_addr - "$request" $status $reason"#,
            "\n",
            r#"$remote_addr - "$request" $status"#,
        )),
    ),
    (
        &["HEROKU"],
        Written::Pairs(&[
            ("method", is(Field::Method)),
            ("path", is(Field::Target)),
            ("host", is(Field::Host)),
            ("fwd", Header("x-forwarded-for")),
            ("connect", is(Field::Duration(Unit::Millis))),
            ("service", is(Field::Duration(Unit::Millis))),
            ("status", is(Field::Status)),
        ]),
    ),
    (
        &["ENVOY"],
        Written::Text(
            r#"[$time_start] "$request" $status $flags $received $sent $duration_ms $upstream_took "$http_x_forwarded_for" "$http_user_agent" "$request_id" "$host" "$upstream""#,
        ),
    ),
    (
        &["ISTIO"],
        Written::Text(
            r#"[$time_start] "$request" $status $flags $details $termination "$failure" $received $sent $duration_ms $upstream_took "$http_x_forwarded_for" "$http_user_agent" "$request_id" "$host" "$upstream" $cluster $local $own $realip_remote_addr $server $route"#,
        ),
    ),
    (
        &["HAPROXY", "HAPROXYRAW", "HAPROXYHTTPS"],
        Written::Text(concat!(
            r#"$remote_addr [$time_start] $frontend $backend $duration_ms $status $bytes $cookie $set_cookie $end $connections $queues "$request""#,
            "\n",
            r#"$remote_addr [$time_start] $frontend $backend $duration_ms $status $bytes $cookie $set_cookie $end $connections $queues "$request" $tls"#,
        )),
    ),
    (
        &["AWSALB", "ALB"],
        Written::Text(
            r#"$type $time_end $elb $remote_addr $target $t1 $t2 $t3 $status $target_status $received $sent "$request" "$http_user_agent" $cipher $protocol $group "$trace" "$domain" "$certificate" $priority $time_start "$more"#,
        ),
    ),
    (
        &["AWSELB", "ELB"],
        Written::Text(
            r#"$time_start $elb $remote_addr $backend $duration_s $duration_s $duration_s $status $backend_status $received $sent "$request" "$http_user_agent" $cipher $protocol"#,
        ),
    ),
    (
        &["CLOUDFRONT"],
        Written::Columns(
            "date time x-edge-location sc-bytes c-ip cs-method cs(Host) cs-uri-stem sc-status cs(Referer) cs(User-Agent) \
             cs-uri-query cs(Cookie) x-edge-result-type x-edge-request-id x-host-header cs-protocol cs-bytes time-taken \
             x-forwarded-for",
            Some("x-edge-location"),
        ),
    ),
    (
        &["W3C", "W3CEXTENDED", "IIS"],
        // Those that IIS writes unless it is told otherwise.
        Written::Columns(
            "date time s-ip cs-method cs-uri-stem cs-uri-query s-port cs-username c-ip cs(User-Agent) cs(Referer) sc-status \
             sc-substatus sc-win32-status time-taken",
            Some("time"),
        ),
    ),
    (
        &["SQUID"],
        Written::Columns(
            "squid-time time-taken c-ip squid-status sc-bytes cs-method cs-uri cs-username s-hierarchy sc-type",
            None,
        ),
    ),
];

impl Format {
    /// Returns the format that a text names or describes. `fields` are those of the option `--field`.
    pub(crate) fn named(text: &str, fields: &[(String, String)]) -> Result<Self, String> {
        if text.contains('$') {
            let lines = Lines::Text(vec![Pattern::parse(text)?]);
            return Ok(Self { name: "log_format".to_owned(), lines, is_named: false, has_no_time: false });
        }
        let name: String =
            text.chars().filter(|c| !matches!(c, '-' | '_' | ' ')).collect::<String>().to_ascii_uppercase();
        let found = FORMATS.iter().find(|(names, _)| names.contains(&&*name));
        match found {
            Some(named) if fields.is_empty() => Ok(Self::of(named)),
            Some((names, Written::Json(known))) => Self::json(names.first().unwrap_or(&"JSON"), known, fields),
            Some(_) => Err(format!("--field is for logs in JSON, and {name} is text")),
            None if name == "JSON" => Self::json("JSON", &[], fields),
            None => {
                let names: Vec<&str> = FORMATS.iter().filter_map(|(names, _)| names.first().copied()).collect();
                Err(format!(
                    "`{text}` is no format: take one of {}, JSON with --field, or a text with variables as nginx's log_format \
                     has them",
                    names.join(", ")
                ))
            }
        }
    }

    /// Returns the format that reads most of these lines, or `None` if none reads any. A line in which each field has
    /// its form counts twice: a request that a scanner sent has another form in each format.
    pub(crate) fn detect<'l>(lines: &(impl Iterator<Item = &'l [u8]> + Clone)) -> Option<Self> {
        let mut best = None;
        for named in FORMATS {
            let mut format = Self::of(named);
            let mut reader = Reader::default();
            let worth = lines.clone().map(|line| reader.worth(&mut format, line)).sum::<u32>();
            if worth > best.as_ref().map_or(0, |(most, _)| *most) {
                best = Some((worth, format));
            }
        }
        best.map(|(_, format)| format)
    }

    /// Returns a format that reads nothing.
    pub(crate) fn nothing() -> Self {
        Self { name: String::new(), lines: Lines::Json(Paths::default()), is_named: true, has_no_time: false }
    }

    fn of((names, written): &Named) -> Self {
        let name = names.first().copied().unwrap_or_default().to_owned();
        let lines = match written {
            Written::Text(text) => Lines::Text(text.lines().filter_map(|way| Pattern::parse(way).ok()).collect()),
            Written::Timeless(text) => {
                Lines::Text(text.lines().filter_map(|way| Pattern::timeless(way).ok()).collect())
            }
            Written::Json(known) => Lines::Json(paths(known)),
            Written::Pairs(known) => Lines::Pairs(paths(known)),
            Written::Columns(names, sign) => {
                let mut headers = HeaderNames::default();
                Lines::Columns { columns: Columns::open(names, &mut headers), headers, sign: *sign }
            }
        };
        let has_no_time = matches!(written, Written::Timeless(_) | Written::Pairs(_));
        Self { name, lines, is_named: true, has_no_time }
    }

    fn json(name: &str, known: &[(&str, Meaning)], fields: &[(String, String)]) -> Result<Self, String> {
        let mut paths = paths(known);
        for (name, path) in fields {
            let field = match &*name.to_ascii_lowercase() {
                "client" => Field::Client,
                "user" => Field::User,
                "time" => Field::End,
                "start" => Field::Start,
                "request" => Field::RequestLine,
                "method" => Field::Method,
                "path" | "uri" => Field::Target,
                "host" => Field::Host,
                "status" => Field::Status,
                "duration" | "duration-s" => Field::Duration(Unit::Seconds),
                "duration-ms" => Field::Duration(Unit::Millis),
                "duration-us" => Field::Duration(Unit::Micros),
                "duration-ns" => Field::Duration(Unit::Nanos),
                header => paths.headers.field(header).ok_or_else(|| {
                    format!("`{name}` of --field is neither a field (client, user, time, start, …) nor a header's name")
                })?,
            };
            paths.add(path, field);
        }
        if !paths.has(&[Field::Start, Field::End]) {
            return Err("the log's time is missing: give --field time=PATH, or --field start=PATH".to_owned());
        }
        Ok(Self { name: name.to_owned(), lines: Lines::Json(paths), is_named: false, has_no_time: false })
    }

    /// Returns the names of the headers that the log has.
    pub(crate) fn headers(&self) -> &[HeaderName] {
        match &self.lines {
            // The ways of a format have their first headers in common.
            Lines::Text(ways) => {
                let most = ways.iter().max_by_key(|pattern| pattern.headers.0.len());
                most.map_or(&[], |pattern| &pattern.headers.0)
            }
            Lines::Json(paths) | Lines::Pairs(paths) => &paths.headers.0,
            Lines::Columns { headers, .. } => &headers.0,
        }
    }

    /// Returns the fields of a line, or `None` if the line is not of this format. `declared` are the columns that a
    /// directive before the line names.
    fn fields<'l>(&self, line: &'l [u8], declared: Option<&Columns>) -> Option<Fields<'l>> {
        let mut fields = Fields::default();
        match &self.lines {
            Lines::Text(ways) => {
                let mut ways = ways.iter();
                while ways.next()?.read(line, &mut fields).is_none() {
                    fields = Fields::default();
                }
            }
            Lines::Json(paths) => paths.read(line, &mut fields)?,
            Lines::Pairs(paths) => pairs::read(line, paths, &mut fields)?,
            Lines::Columns { columns, .. } => declared.unwrap_or(columns).read(line, &mut fields)?,
        }
        (!self.is_named || self.has_its_form(&fields)).then_some(fields)
    }

    /// Returns whether the fields of a line have the forms that they have in each line of the format. Others' lines
    /// have something else in these places: the month of a date where the client is, or no status.
    fn has_its_form(&self, fields: &Fields<'_>) -> bool {
        let has_status = match fields.get(Field::Status) {
            Some(status) => status.len() <= 3 && status.iter().all(|byte| byte.is_ascii_digit() || *byte == b'-'),
            None => matches!(self.lines, Lines::Text(_) | Lines::Columns { .. }),
        };
        has_status
            && has_client_form(fields)
            && (!matches!(self.lines, Lines::Json(_) | Lines::Pairs(_)) || has_request(fields))
    }

    /// Returns 2 if each field of a line has the form that it has in a request that a server understood, and 1 if only
    /// the client's address has, or only the others.
    fn worth(&self, fields: &Fields<'_>) -> u32 {
        let is_word = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_alphabetic);
        let line = fields.get(Field::RequestLine).and_then(request_line).map(|(method, _)| method);
        let has_method = fields.get(Field::Method).or(line).is_some_and(is_word);
        let has_status = fields.get(Field::Status).is_some_and(|status| status.len() == 3 && status != b"000");
        let (client, peer) = (fields.get(Field::Client), fields.get(Field::Peer));
        let is_address = |text: Option<&[u8]>| text.is_some_and(|text| address(text).is_some());
        let is_host = || client.is_some_and(|name| host_name(name).is_some() && name.contains(&b'.'));
        let has_client = is_address(client) || is_address(peer) || client.is_none() && peer.is_none() || is_host();
        let is_request = has_method && has_status;
        if is_request && has_client { 2 } else { u32::from(is_request || is_address(client) || is_address(peer)) }
    }
}

/// Returns whether an address is where the client is, or what servers write in its place: a name, or that there is
/// none. The field after it is not an address then: that line has another field in front.
fn has_client_form(fields: &Fields<'_>) -> bool {
    let is_ident = |ident: &[u8]| ident.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_.@-\\".contains(byte));
    if fields.get(Field::Ident).is_some_and(|ident| address(ident).is_some() || !is_ident(ident)) {
        return false;
    }
    let Some(client) = fields.get(Field::Client) else { return true };
    // Another field stands before a user of this form.
    if fields.get(Field::User).is_some_and(|user| user.starts_with(b"- ")) {
        return false;
    }
    let is_name = || host_name(client).is_some() && !fields.get(Field::User).is_some_and(|user| user.contains(&b' '));
    address(client).is_some() || is_name() || matches!(client, b"unix:" | b"@" | b"unknown" | b"(null)")
}

/// Returns whether JSON has a request beside the status.
fn has_request(fields: &Fields<'_>) -> bool {
    let has = |field| fields.get(field).is_some();
    let has_target = has(Field::Method) || has(Field::RequestLine) || has(Field::Target);
    has_target && !fields.get(Field::Logger).is_some_and(is_other_logger)
}

/// Returns whether the name of a logger of Caddy's is not that of access logs.
fn is_other_logger(name: &[u8]) -> bool {
    !name.starts_with(b"http.log.access")
}

/// Returns whether a line without a status says that it had no request: a load balancer logs connections over TCP so, and
/// Envoy those that it resets. A format may have neither fields of a request nor a status, and says nothing then.
fn is_connection(fields: &Fields<'_>) -> bool {
    let is_dashes = |text: &[u8]| text.iter().all(|byte| matches!(byte, b'-' | b' '));
    let request =
        || [Field::RequestLine, Field::Method, Field::Target].into_iter().filter_map(|field| fields.get(field));
    request().all(is_dashes) && (request().next().is_some() || fields.get(Field::Status).is_some())
}

/// The kind of a line whose fields can be read.
enum Line {
    Request,
    /// The hash of a line of a logger that has a name.
    Logger(u64),
    Connection,
}

/// Reads the lines of one file in their order: a directive says which columns the lines after it have.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    declared: Option<Columns>,
    pub(crate) sources: Sources,
}

/// A line, as a reader found it.
#[derive(Debug)]
pub(crate) enum Read {
    Request(Request),
    /// A line of a program that logs no requests.
    Other,
    /// A line that this source may write beside requests. Whether it does is known in the end.
    Unknown(u64),
    Unreadable,
}

impl Reader {
    /// Returns the request of a line. Returns `None` for a directive, and for a line that is not of this format or has
    /// no time. A directive may add headers to the format.
    pub(crate) fn read(&mut self, format: &mut Format, line: &[u8], keep: Keep) -> Option<Request> {
        match self.look(format, line, keep) {
            Read::Request(request) => Some(request),
            _ => None,
        }
    }

    /// Returns the request of a line, or what the line is.
    pub(crate) fn look(&mut self, format: &mut Format, line: &[u8], keep: Keep) -> Read {
        if self.take_directive(format, line) {
            return Read::Other;
        }
        let found = self.find(format, line, |fields, opened| {
            let request = Request::new(
                fields,
                format.headers(),
                opened.at.filter(|_| format.has_no_time || opened.has_own_time),
                keep,
            )?;
            if format.is_named && request.status == 0 && is_connection(fields) {
                return Some((request, None, Line::Connection));
            }
            let compared = opened.source.map(|source| (source, fields.hash(), of_request(fields, &request)));
            let line = fields.get(Field::Logger).map_or(Line::Request, |_| Line::Logger(fields.hash()));
            Some((request, compared, line))
        });
        match found {
            Some((_, _, Line::Connection)) => Read::Other,
            // Caddy can log a request by several loggers, or several times by one.
            Some((_, _, Line::Logger(whole))) if self.sources.has_line(whole) => Read::Other,
            Some((request, Some((source, whole, of_request)), _)) => {
                match self.sources.repeats(source, whole, &request, of_request, line) {
                    true => Read::Other,
                    false => Read::Request(request),
                }
            }
            Some((request, None, _)) => Read::Request(request),
            None => self.unread(format, line),
        }
    }

    /// Says what a line is that is not a request.
    fn unread(&mut self, format: &Format, line: &[u8]) -> Read {
        let plain = Opened::plain(line);
        let opened = Opened::without_prefixes(line).unwrap_or(plain);
        let inner = if matches!(format.lines, Lines::Json(_)) { None } else { opened.within() };
        let Opened { text, source, .. } = inner.as_ref().unwrap_or(&opened);
        let is_of_caddy = || {
            let Lines::Json(paths) = &format.lines else { return false };
            let mut fields = Fields::default();
            let is_json = paths.read(text, &mut fields).is_some();
            is_json && fields.get(Field::Logger).is_some_and(is_other_logger)
        };
        if is_of_other_logger(text) || is_of_caddy() {
            return Read::Other;
        }
        // A line of a program behind Heroku's router is not a request, or is one that the router has logged.
        if matches!(format.lines, Lines::Pairs(_)) && source.is_some() && !text.starts_with(b"at=") {
            return Read::Other;
        }
        match source {
            Some(source) if !is_of_access_log(text) && self.sources.note_other(*source) => Read::Unknown(*source),
            _ => Read::Unreadable,
        }
    }

    /// Returns how sure it is that a line is of a format.
    fn worth(&mut self, format: &mut Format, line: &[u8]) -> u32 {
        if self.take_directive(format, line) {
            return 0;
        }
        let worth = self.find(format, line, |fields, opened| {
            let at = opened.at.filter(|_| format.has_no_time || opened.has_own_time);
            Request::new(fields, &[], at, Keep::Nothing).map(|_| format.worth(fields))
        });
        worth.unwrap_or(0)
    }

    /// Finds the fields of a line: in what other programs put around it, or in the line itself.
    fn find<T>(&self, format: &Format, line: &[u8], take: impl Fn(&Fields<'_>, &Opened<'_>) -> Option<T>) -> Option<T> {
        let read = |opened: &Opened<'_>| take(&format.fields(&opened.text, self.declared.as_ref())?, opened);
        let plain = Opened::plain(line);
        let opened = match Opened::without_prefixes(line) {
            // The user's own format may begin with what looks like a prefix.
            Some(opened) if format.is_named => opened,
            Some(opened) => match read(&plain) {
                Some(found) => return Some(found),
                None => opened,
            },
            None => plain,
        };
        let mut opened = opened;
        for _ in 1..LAYERS_MAX {
            if let Some(found) = read(&opened) {
                return Some(found);
            }
            opened = opened.within()?; // not before: it reads the line again
        }
        read(&opened)
    }

    /// Takes the columns of a directive. Returns whether the line is one.
    fn take_directive(&mut self, format: &mut Format, line: &[u8]) -> bool {
        let Some(directive) = directive(line) else { return false };
        if let Lines::Columns { headers, sign: Some(sign), .. } = &mut format.lines {
            let names = String::from_utf8_lossy(directive);
            let is_own = names.split_ascii_whitespace().any(|name| name.eq_ignore_ascii_case(sign));
            let names = if is_own { &*names } else { "" }; // without names, no line is read
            self.declared = Some(Columns::declared(names, headers));
        }
        true
    }
}

/// Returns a hash of what two programs that log the same request agree about.
fn of_request(fields: &Fields<'_>, request: &Request) -> u64 {
    let line = fields.get(Field::RequestLine).and_then(request_line).unwrap_or_default();
    let method = fields.get(Field::Method).unwrap_or(line.0);
    let target = fields.get(Field::Target).unwrap_or(line.1);
    let agent = request.agent.to_ne_bytes();
    hash(&[method, b" ", target, b" ", &request.status.to_ne_bytes(), &agent].concat())
}

/// Returns the names of the columns if a line is a directive `#Fields`.
pub(crate) fn directive(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(b"#Fields:")
}

fn paths(known: &[(&str, Meaning)]) -> Paths {
    let mut paths = Paths::default();
    for (path, meaning) in known {
        let field = match meaning {
            Meaning::Field(field) => Some(*field),
            Header(name) => paths.headers.field(name),
        };
        paths.add(path, field.unwrap_or(Field::Other));
    }
    paths
}

/// A line of a format, and what it says.
#[cfg(test)]
pub(crate) struct Facts {
    pub(crate) format: &'static str,
    pub(crate) line: &'static str,
    pub(crate) at_us: u64,
    client: &'static str,
    status: u16,
    texts: [&'static str; 4],
    agent: &'static str,
}

#[cfg(test)]
pub(crate) const FACTS: &[Facts] = &[
    Facts {
        format: "COMBINED",
        line: r#"192.0.2.1 - ann [17/May/2015:10:05:03 +0000] "GET /a?b=c HTTP/1.1" 200 20 "https://e.org/" "curl/8""#,
        at_us: 1_431_857_103_000_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a?b=c", "", "ann"],
        agent: "curl/8",
    },
    Facts {
        format: "COMMON",
        line: r#"2001:db8::1 - - [17/May/2015:12:05:03 +0200] "POST / HTTP/2.0" 404 -"#,
        at_us: 1_431_857_103_000_000,
        client: "2001:db8::1",
        status: 404,
        texts: ["POST", "/", "", ""],
        agent: "",
    },
    Facts {
        format: "VCOMBINED",
        line: r#"shop.example:443 192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 301 20 "-" "curl/8""#,
        at_us: 1_431_857_103_000_000,
        client: "192.0.2.1",
        status: 301,
        texts: ["GET", "/", "shop.example", ""],
        agent: "curl/8",
    },
    Facts {
        format: "VCOMMON",
        line: r#"shop.example:443 192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 301 20"#,
        at_us: 1_431_857_103_000_000,
        client: "192.0.2.1",
        status: 301,
        texts: ["GET", "/", "shop.example", ""],
        agent: "",
    },
    Facts {
        format: "NGINXMAIN",
        line: r#"192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 429 20 "-" "curl/8" "198.51.100.7""#,
        at_us: 1_431_857_103_000_000,
        client: "192.0.2.1",
        status: 429,
        texts: ["GET", "/", "", ""],
        agent: "curl/8",
    },
    Facts {
        format: "TRAEFIKCLF",
        line: r#"192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 8 "-" "curl/8" 17 "api@docker" "http://10.0.0.2:80" 12ms"#,
        at_us: 1_431_857_103_000_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/", "", ""],
        agent: "curl/8",
    },
    Facts {
        format: "CADDY",
        line: r#"{"level":"info","ts":1646861401.5241024,"logger":"http.log.access","msg":"handled request","request":{"remote_ip":"127.0.0.1","remote_port":"41342","client_ip":"192.0.2.1","proto":"HTTP/2.0","method":"GET","host":"localhost","uri":"/a","headers":{"User-Agent":["curl/7.82.0"],"Accept":["*/*"]},"tls":{"resumed":false}},"bytes_read":0,"user_id":"","duration":0.5,"size":10900,"status":200,"resp_headers":{"Server":["Caddy"]}}"#,
        at_us: 1_646_861_401_024_102,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a", "localhost", ""],
        agent: "curl/7.82.0",
    },
    Facts {
        format: "TRAEFIK",
        line: r#"{"ClientAddr":"192.0.2.1:51000","ClientHost":"192.0.2.1","ClientUsername":"-","DownstreamStatus":200,"Duration":12000000,"RequestHost":"e.org","RequestMethod":"GET","RequestPath":"/a","StartUTC":"2024-03-01T10:00:00.123456789Z","request_User-Agent":"curl/8","time":"2024-03-01T10:00:01Z"}"#,
        at_us: 1_709_287_200_123_456,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a", "e.org", ""],
        agent: "curl/8",
    },
    Facts {
        format: "GCP",
        line: r#"{"httpRequest":{"latency":"0.07s","remoteIp":"192.0.2.1","requestMethod":"GET","requestUrl":"https://e.org/a?b","status":200,"userAgent":"curl/8"},"timestamp":"2024-03-01T10:00:00.5Z"}"#,
        at_us: 1_709_287_200_500_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "https://e.org/a?b", "", ""],
        agent: "curl/8",
    },
    Facts {
        format: "ENVOYJSON",
        line: r#"{"start_time":"2024-03-01T10:00:00.250Z","method":"GET","path":"/a","response_code":503,"duration":12,"authority":"e.org","downstream_remote_address":"192.0.2.1:4711","user_agent":"curl/8","x_forwarded_for":null}"#,
        at_us: 1_709_287_200_250_000,
        client: "192.0.2.1",
        status: 503,
        texts: ["GET", "/a", "e.org", ""],
        agent: "curl/8",
    },
    Facts {
        format: "ENVOY",
        line: r#"[2016-04-15T20:17:00.310Z] "POST /api/v1/locations HTTP/2" 204 - 154 0 226 100 "10.0.35.28, 192.0.2.1" "nsq2http" "cc21d9b0-cf5c-432b-8c7e-98aeb7988cd2" "locations" "tcp://10.0.2.1:80""#,
        at_us: 1_460_751_420_310_000,
        client: "192.0.2.1",
        status: 204,
        texts: ["POST", "/api/v1/locations", "locations", ""],
        agent: "nsq2http",
    },
    Facts {
        format: "ISTIO",
        line: r#"[2020-11-25T21:26:18.409Z] "GET /status/418 HTTP/1.1" 418 - via_upstream - "-" 0 135 3 1 "-" "curl/7.73.0-DEV" "84961386-6d84-929d-98bd-c5aee93b5c88" "httpbin:8000" "127.0.0.1:80" inbound|8000|| 127.0.0.1:41854 10.44.1.27:80 192.0.2.1:37652 outbound_.8000_._.httpbin.foo.svc.cluster.local default"#,
        at_us: 1_606_339_578_409_000,
        client: "192.0.2.1",
        status: 418,
        texts: ["GET", "/status/418", "httpbin:8000", ""],
        agent: "curl/7.73.0-DEV",
    },
    Facts {
        format: "HAPROXY",
        line: r#"2001:db8::1:33317 [06/Feb/2009:12:14:14.655] https~ static/srv1 10/0/30/69/109 503 +2750 - - SC-- 1/1/1/1/0 0/0 "GET / HTTP/2.0""#,
        at_us: 1_233_922_454_655_000,
        client: "2001:db8::1",
        status: 503,
        texts: ["GET", "/", "", ""],
        agent: "",
    },
    Facts {
        format: "AWSALB",
        line: r#"http 2018-07-02T22:23:00.186641Z app/my-loadbalancer/50dc6c495c0c9188 192.0.2.1:2817 10.0.0.1:80 0.000 0.001 0.000 200 200 34 366 "GET http://www.example.com:80/ HTTP/1.1" "curl/7.46.0" - - arn:aws:elasticloadbalancing:us-east-2:123456789012:targetgroup/my-targets/73e2d6bc24d8a067 "Root=1-58337262-36d228ad5d99923122bbe354" "-" "-" 0 2018-07-02T22:22:48.364000Z "forward" "-" "-" "10.0.0.1:80" "200" "-" "-""#,
        at_us: 1_530_570_168_364_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "http://www.example.com:80/", "", ""],
        agent: "curl/7.46.0",
    },
    Facts {
        format: "AWSELB",
        line: r#"2015-05-13T23:39:43.945958Z my-loadbalancer 192.0.2.1:2817 10.0.0.1:80 0.000073 0.001048 0.000057 200 200 0 29 "GET http://www.example.com:80/ HTTP/1.1" "curl/7.38.0" - -"#,
        at_us: 1_431_560_383_945_958,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "http://www.example.com:80/", "", ""],
        agent: "curl/7.38.0",
    },
    Facts {
        format: "CLOUDFRONT",
        line: "2019-12-04\t21:02:31\tLAX1\t392\t192.0.2.1\tGET\td111111abcdef8.cloudfront.net\t/a%20b\t200\t-\tMozilla/5.0%20(Windows)%20+b\tc=d\t-\tHit\tSOX4xwn4XV6Q4rgb7XiVGOHms_BGlTAC4KyHmureZmBNrjGdRLiNIQ==\te.org\thttps\t23\t0.500\t-\tTLSv1.2\tECDHE-RSA-AES128-GCM-SHA256\tHit\tHTTP/2.0\t-\t-\t11040\t0.001\tHit\ttext/html\t78\t-\t-",
        at_us: 1_575_493_350_500_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a%20b?c=d", "e.org", ""],
        agent: "Mozilla/5.0 (Windows) +b",
    },
    Facts {
        format: "W3C",
        line: "2024-03-01 10:00:00 10.0.0.2 GET /a+b c=d 443 SHOP\\ann 192.0.2.1 Mozilla/5.0+(Windows) https://e.org/ 404 0 2 250",
        at_us: 1_709_287_199_750_000,
        client: "192.0.2.1",
        status: 404,
        texts: ["GET", "/a b?c=d", "", "SHOP\\ann"],
        agent: "Mozilla/5.0 (Windows)",
    },
    Facts {
        format: "SQUID",
        line: "1286536309.450    198 192.0.2.1 TCP_MISS/200 4321 GET http://e.org/a?b ann HIER_DIRECT/198.51.100.7 text/html",
        at_us: 1_286_536_309_252_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "http://e.org/a?b", "", "ann"],
        agent: "",
    },
    Facts {
        format: "INGRESSNGINX",
        line: r#"192.0.2.1 - - [01/Mar/2024:10:00:00 +0000] "GET /a HTTP/2.0" 200 45 "-" "curl/8" 35 0.002 [shop-web-80] [] 10.8.0.4:8080, 10.8.0.5:8080 0, 45 0.001, 0.001 502, 200 60f2d1e6c5b8a4930d7f1e2c3b4a5968"#,
        at_us: 1_709_287_200_000_000 - 2_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a", "", ""],
        agent: "curl/8",
    },
    Facts {
        format: "COMBINEDPLUS",
        line: r#"192.0.2.1 - - [01/Mar/2024:10:00:00 +0000] "GET /a HTTP/1.1" 200 45 "-" "curl/8" rt=0.002 uct="0.000""#,
        at_us: 1_709_287_200_000_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a", "", ""],
        agent: "curl/8",
    },
    Facts {
        format: "CLOUDFLARE",
        line: r#"{"ClientIP":"192.0.2.1","ClientRequestHost":"e.org","ClientRequestMethod":"GET","ClientRequestURI":"/a?b","ClientRequestUserAgent":"curl/8","EdgeEndTimestamp":1709287200750000000,"EdgeResponseStatus":403,"EdgeStartTimestamp":1709287200500000000,"RayID":"3a6050bcbe121a87"}"#,
        at_us: 1_709_287_200_500_000,
        client: "192.0.2.1",
        status: 403,
        texts: ["GET", "/a?b", "e.org", ""],
        agent: "curl/8",
    },
    Facts {
        format: "AZURE",
        line: r#"{"resourceId":"/SUBSCRIPTIONS/X","operationName":"ApplicationGatewayAccess","timeStamp":"2024-03-01T10:00:00.509Z","category":"ApplicationGatewayAccessLog","properties":{"instanceId":"appgw_1","clientIP":"192.0.2.1","clientPort":45057,"httpMethod":"GET","requestUri":"/a","requestQuery":"b=c","userAgent":"curl/8","httpStatus":200,"httpVersion":"HTTP/1.1","timeTaken":0.009,"host":"e.org"}}"#,
        at_us: 1_709_287_200_500_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a", "e.org", ""],
        agent: "curl/8",
    },
    Facts {
        format: "FASTLY",
        line: r#"{"timestamp":"2024-03-01T10:00:00+0000","client_ip":"192.0.2.1","geo_country":"france","host":"e.org","url":"/a?b","request_method":"GET","request_protocol":"HTTP/2","request_referer":"","request_user_agent":"curl/8","response_state":"HIT","response_status":200,"fastly_server":"cache-cdg"}"#,
        at_us: 1_709_287_200_000_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a?b", "e.org", ""],
        agent: "curl/8",
    },
    Facts {
        format: "APIGATEWAY",
        line: r#"{"requestId":"c6af9ac6-7b61","ip":"192.0.2.1","caller":"-","user":"-","requestTime":"01/Mar/2024:10:00:00 +0000","httpMethod":"GET","resourcePath":"/{proxy+}","status":"429","protocol":"HTTP/1.1","responseLength":"29"}"#,
        at_us: 1_709_287_200_000_000,
        client: "192.0.2.1",
        status: 429,
        texts: ["GET", "/{proxy+}", "", ""],
        agent: "",
    },
    Facts {
        format: "KONG",
        line: r#"{"service":{"name":"api"},"client_ip":"192.0.2.1","started_at":1709287200500,"latencies":{"kong":5,"proxy":12,"request":17},"request":{"method":"GET","uri":"/a?b","size":77,"headers":{"host":"e.org","user-agent":"curl/8"}},"response":{"status":200,"size":300},"consumer":{"username":"ann"}}"#,
        at_us: 1_709_287_200_500_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a?b", "e.org", "ann"],
        agent: "curl/8",
    },
    Facts {
        format: "NGINXJSON",
        line: r#"{"time_local":"01/Mar/2024:10:00:00 +0000","remote_addr":"192.0.2.1","remote_user":"","request":"GET /a HTTP/1.1","status":"200","body_bytes_sent":"45","request_time":"0.004","http_referrer":"","http_user_agent":"curl/8"}"#,
        at_us: 1_709_287_200_000_000 - 4_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a", "", ""],
        agent: "curl/8",
    },
    Facts {
        format: "COMBINEDXFF",
        line: r#"10.0.2.100 (198.51.100.7, 203.0.113.7) - - [01/Mar/2024:10:00:00 +0000] "GET /a HTTP/1.1" 200 24917 "-" "curl/8""#,
        at_us: 1_709_287_200_000_000,
        client: "10.0.2.100",
        status: 200,
        texts: ["GET", "/a", "", ""],
        agent: "curl/8",
    },
    Facts {
        format: "NGINXPROXYMANAGER",
        line: r#"[01/Mar/2024:10:00:00 +0000] - 200 404 - GET https e.org "/a?b" [Client 192.0.2.1] [Length 45] [Gzip 2.1] [Sent-to web] "curl/8" "-""#,
        at_us: 1_709_287_200_000_000,
        client: "192.0.2.1",
        status: 404,
        texts: ["GET", "/a?b", "e.org", ""],
        agent: "curl/8",
    },
    Facts {
        format: "UVICORN",
        line: r#"2024-03-01T10:00:00.500000000Z stdout F INFO:     192.0.2.1:52345 - "GET /a HTTP/1.1" 307 Temporary Redirect"#,
        at_us: 1_709_287_200_500_000,
        client: "192.0.2.1",
        status: 307,
        texts: ["GET", "/a", "", ""],
        agent: "",
    },
    Facts {
        format: "HEROKU",
        line: r#"2024-03-01T10:00:00.500000+00:00 heroku[router]: at=info method=GET path="/a?b=c" host=e.herokuapp.com request_id=8601b555-6a83 fwd="192.0.2.1" dyno=web.1 connect=1ms service=45ms status=200 bytes=13 protocol=https"#,
        at_us: 1_709_287_200_454_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/a?b=c", "e.herokuapp.com", ""],
        agent: "",
    },
];

/// Returns a line as other programs pass it on, each with a name for messages.
#[cfg(test)]
pub(crate) fn passed_on(line: &str) -> Vec<(&'static str, String)> {
    let json = serde_json::Value::from(format!("{line}\n"));
    let iso = "2024-03-01T10:00:00.123456789Z";
    vec![
        ("syslog", format!("Mar  1 10:00:00 web1 nginx: {line}")),
        ("syslog of a process", format!("Mar 01 10:00:00 web1 nginx[17]: {line}")),
        ("syslog without a host", format!("<190>Mar  1 10:00:00 nginx: {line}")),
        ("syslog on the wire", format!("<190>Mar  1 10:00:00 web1 nginx: {line}")),
        ("syslog by RFC 5424", format!("<190>1 {iso} web1 nginx 17 - - {line}")),
        ("syslog with data", format!("<190>1 {iso} web1 nginx 17 ID [a@1 b=\"c]\\\"\"][d] \u{feff}{line}")),
        ("syslog with a long time", format!("2024-03-01T10:00:00.123456+01:00 web1 nginx[17]: {line}")),
        ("syslog over TCP", format!("{} <190>Mar  1 10:00:00 web1 nginx: {line}", line.len() + 33)),
        ("journald", format!("Mar 01 10:00:00 web1 docker/web[17]: {line}")),
        ("journald, short-full", format!("Fri 2024-03-01 10:00:00 UTC web1 nginx[17]: {line}")),
        ("journald, short-unix", format!("1709287200.123456 web1 nginx[17]: {line}")),
        ("journald, JSON", format!(r#"{{"__REALTIME_TIMESTAMP":"1709287200123456","MESSAGE":{json},"_PID":"1"}}"#)),
        ("CRI", format!("{iso} stdout F {line}")),
        ("Docker's files", format!(r#"{{"log":{json},"stream":"stdout","time":"{iso}"}}"#)),
        ("docker logs -t", format!("{iso} {line}")),
        ("compose", format!("web-1  | {line}")),
        ("compose, version 1", format!("shop_web_1   | {line}")),
        ("compose, coloured", format!("\u{1b}[36mweb-1  |\u{1b}[0m {line}")),
        ("compose with times", format!("web-1  | {iso} {line}")),
        ("kubectl", format!("[pod/web-6d4b75cb6d-hk2zv/nginx] {line}")),
        ("kubectl with times", format!("[pod/web-6d4b75cb6d-hk2zv/nginx] {iso} {line}")),
        ("aws logs tail", format!("{iso} ecs/web/0123 {line}")),
        ("Filebeat", format!(r#"{{"@timestamp":"{iso}","message":{json},"host":{{"name":"web1"}}}}"#)),
        ("GCP", format!(r#"{{"insertId":"a","textPayload":{json},"timestamp":"{iso}"}}"#)),
        ("CRI in JSON", format!(r#"{{"message":{}}}"#, serde_json::Value::from(format!("{iso} stdout F {line}")))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_read_and_detected() {
        for facts in FACTS {
            let detected = Format::detect(&std::iter::once(facts.line.as_bytes())).expect("a format reads it");
            assert_eq!(detected.name, facts.format);
            let mut format = Format::named(&facts.format.to_lowercase(), &[]).expect("it is a format's name");
            let request = Reader::default().read(&mut format, facts.line.as_bytes(), Keep::All);
            let request = request.expect("it reads its own line");
            assert_eq!(request.at_us, facts.at_us, "{}", facts.format);
            assert_eq!(request.client, Some(facts.client.parse().unwrap()), "{}", facts.format);
            assert_eq!(request.status, facts.status, "{}", facts.format);
            let texts = request.texts.expect("it was asked for texts");
            let read = [texts.method(), texts.target(), texts.host(), texts.user()];
            assert_eq!(read.map(|text| std::str::from_utf8(text).unwrap()), facts.texts, "{}", facts.format);
            let agent = format.headers().iter().position(|name| name == "user-agent");
            let agent = agent.map_or(&b""[..], |at| texts.header(at));
            assert_eq!(agent, facts.agent.as_bytes(), "{}", facts.format);
        }
        assert_eq!(FACTS.len(), FORMATS.len(), "each format has its facts");
    }

    #[test]
    fn line_that_was_passed_on_is_the_same_request() {
        for facts in FACTS {
            for (by, line) in passed_on(facts.line) {
                let what = format!("{} by {by}", facts.format);
                let detected = Format::detect(&std::iter::once(line.as_bytes())).expect(&what);
                assert_eq!(detected.name, facts.format, "{what}");
                let request = Reader::default().read(&mut detected.clone(), line.as_bytes(), Keep::All).expect(&what);
                assert_eq!((request.at_us, request.status), (facts.at_us, facts.status), "{what}");
                assert_eq!(request.client, Some(facts.client.parse().unwrap()), "{what}");
                assert_eq!(request.texts.unwrap().target(), facts.texts[1].as_bytes(), "{what}");
            }
        }
    }

    /// Lines of public reports, with other addresses, and the figures of each: format, client, status, target.
    #[test]
    fn lines_of_public_reports_are_read() {
        for (line, expected) in [
            (
                r#"[01/Mar/2024:10:00:00 -0500] 444 - GET http e.org "/a" [Client 192.0.2.1] [Length 0] [Gzip -] "curl" "-""#,
                ("NGINXPROXYMANAGER", "192.0.2.1", 444, "/a"),
            ),
            (
                r#"shop.example 192.0.2.1 - - [01/Mar/2024:10:00:00 +0000] "GET /a HTTP/1.1" 200 5 "-" "curl" "2.13""#,
                ("VCOMBINED", "192.0.2.1", 200, "/a"),
            ),
            (
                r#"192.0.2.1 - - [01/Mar/2024:10:00:00 CDT] "GET /a HTTP/1.1" 200 139 "-" "python" 0 - 9582 0.009582"#,
                ("COMBINEDPLUS", "192.0.2.1", 200, "/a"),
            ),
            (
                r#"2024-03-01T10:00:00.511485+00:00 app[web.1]: 192.0.2.1 - - [01/Mar/2024 10:00:00] "GET /a HTTP/1.1" 200 -"#,
                ("COMMON", "192.0.2.1", 200, "/a"),
            ),
            (
                "2024/03/01 10:00:00.541\tinfo\thttp.log.access.log0\thandled request\t{\"request\": {\"remote_addr\": \"192.0.2.1:63746\", \"method\": \"GET\", \"uri\": \"/a\"}, \"duration\": 0.04, \"status\": 200}",
                ("CADDY", "192.0.2.1", 200, "/a"),
            ),
            (
                "2024/03/01 10:00:00.541\t\u{1b}[34mINFO\u{1b}[0m\thttp.log.access\thandled request\t{\"request\": {\"remote_ip\": \"192.0.2.1\", \"method\": \"GET\", \"uri\": \"/a\"}, \"status\": 200}",
                ("CADDY", "192.0.2.1", 200, "/a"),
            ),
            (
                r#"<134>1 2024-03-01T10:00:00+00:00 lb ingress 44 - - 192.0.2.1:48548 [01/Mar/2024:10:00:00.165] front~ back/10.2.0.1:80 0/0/1/593/595 404 9085 - - ---- 4/2/1/1/0 0/0 "GET /a HTTP/1.1""#,
                ("HAPROXY", "192.0.2.1", 404, "/a"),
            ),
            (
                r#"Mar  1 10:00:00 192.0.2.1:33317 [01/Mar/2024:10:00:00.655] http-in static/srv1 10/0/30/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 "GET /a HTTP/1.1""#,
                ("HAPROXY", "192.0.2.1", 200, "/a"),
            ),
            (
                r#"{"timestamp":"2024-03-01T10:00:00+00:00","remote_addr":"192.0.2.1","msec":"1709287200.500","request":"GET /a HTTP/1.1","status":"200","request_method":"GET","request_uri":"/a","http_user_agent":"curl"}"#,
                ("NGINXJSON", "192.0.2.1", 200, "/a"),
            ),
            (r#"2024-03-01T10:00:00.5Z 192.0.2.1:62618 - "GET /a HTTP/1.1" 200"#, ("UVICORN", "192.0.2.1", 200, "/a")),
        ] {
            let mut format = Format::detect(&std::iter::once(line.as_bytes())).expect(line);
            let request = Reader::default().read(&mut format, line.as_bytes(), Keep::All).expect(line);
            let texts = request.texts.as_ref().unwrap();
            let client = request.client.unwrap().to_string();
            let target = std::str::from_utf8(texts.target()).unwrap();
            assert_eq!((&*format.name, &*client, request.status, target), expected, "{line}");
            assert!(request.at_us.abs_diff(1_709_287_200_000_000) < 6 * 3_600_000_000, "{line}");
        }
    }

    /// Each was taken for a log of requests, with a client that is none.
    #[test]
    fn line_of_no_access_log_is_of_no_format() {
        for line in [
            "Nov 28 10:00:00 web1 192.0.2.1 - - [28/Nov/2025:10:00:00 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"",
            "192.0.2.1 - - 0.011 [28/Nov/2025:10:00:00 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\" \"-\"",
            "192.0.2.1 - - [28/Nov/2025:10:00:00 +0000] [0.003] [PORT 80] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"",
            "192.0.2.1 - - [28/Nov/2025:10:00:00 +0000] \"GET / HTTP/2.0\" to: 10.0.0.2:80 422 35 \"-\" \"curl\" \"-\"",
            "INFO:     127.0.0.1:0 - \"GET /api HTTP/1.0\" 200 OK",
            "lb.example:80  192.0.2.1 - - [28/Nov/2025:10:00:00 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"",
            "10.0.0.9 192.0.2.1 - - [28/Nov/2025:10:00:00 +0000] \"GET / HTTP/1.1\" 200 1 - \"curl\"",
            "192.0.2.1, 10.0.0.9 - - [28/Nov/2025:10:00:00 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"",
            r#"{"timestamp":"2024-03-01T10:00:00Z","level":"info","message":"started"}"#,
            r#"{"timestamp":"2024-03-01T10:00:00Z","user":"ann","action":"login","status":200}"#,
            r#"{"ts":1709287200.5,"level":"info","logger":"tls","msg":"certificate obtained","status":200}"#,
            r#"{"ts":1709287200.5,"caller":"main.go:17","msg":"listening"}"#,
            r#"{"start_time":"2024-03-01T10:00:00Z","job":"backup","duration":12}"#,
            "2024-03-01T10:00:00Z stdout F listening on :8080",
            "2024/03/01 10:00:00 [error] 29#29: *1 open() failed, client: 192.0.2.1, request: \"GET / HTTP/1.1\"",
            "2024-03-01 10:00:00,123 INFO main: 192.0.2.1 GET / 200",
            "name,quota\nann,200",
        ] {
            let detected = Format::detect(&std::iter::once(line.as_bytes()));
            assert!(detected.is_none(), "{line}: {}", detected.unwrap().name);
        }
    }

    #[test]
    fn duration_is_read_if_a_format_has_one() {
        let micros = |facts: &Facts| {
            let mut format = Format::named(facts.format, &[]).unwrap();
            Reader::default().read(&mut format, facts.line.as_bytes(), Keep::Nothing).unwrap().duration_us
        };
        let read = FACTS.iter().filter_map(|facts| Some((facts.format, micros(facts)?))).collect::<Vec<_>>();
        let of = |name: &str| read.iter().find(|(format, _)| *format == name).map(|(_, micros)| *micros);
        for (name, expected) in [
            ("COMBINED", None),
            ("TRAEFIKCLF", Some(12_000)),
            ("TRAEFIK", Some(12_000)),
            ("CADDY", Some(500_000)),
            ("GCP", Some(70_000)),
            ("ENVOY", Some(226_000)),
            ("ISTIO", Some(3_000)),
            ("HAPROXY", Some(109_000)),
            ("INGRESSNGINX", Some(2_000)),
            ("HEROKU", Some(46_000)),
            ("KONG", Some(17_000)),
            ("CLOUDFLARE", Some(250_000)),
            ("AZURE", Some(9_000)),
            ("NGINXJSON", Some(4_000)),
            ("AWSALB", Some(11_822_641)),
            ("AWSELB", Some(1_178)),
            ("SQUID", Some(198_000)),
        ] {
            assert_eq!(of(name), expected, "{name} of {read:?}");
        }
    }

    #[test]
    fn name_is_found_in_every_spelling() {
        for name in ["combined", "VHOST-COMBINED", "vhost_combined", "Caddy", "AWSALB", "alb", "clf", "iis", "Squid"] {
            Format::named(name, &[]).expect(name);
        }
        let error = Format::named("combinde", &[]).unwrap_err();
        assert!(error.contains("COMBINED") && error.contains("log_format"), "{error}");
    }

    #[test]
    fn paths_of_json_are_chosen_by_flags() {
        let field = |name: &str, path: &str| (name.to_owned(), path.to_owned());
        let fields =
            [field("time", "at"), field("client", "from.ip"), field("duration-ms", "took"), field("x-api-key", "k")];
        let mut format = Format::named("json", &fields).unwrap();
        let line = br#"{"at":1646861401250,"from":{"ip":"192.0.2.1"},"took":250,"k":"v"}"#;
        let request = Reader::default().read(&mut format, line, Keep::All).unwrap();
        assert_eq!(request.at_us, 1_646_861_401_000_000);
        assert_eq!(request.texts.unwrap().header(0), b"v");
        assert!(Format::named("json", &fields[1..]).unwrap_err().contains("time"));
        assert!(Format::named("combined", &fields).unwrap_err().contains("JSON"));
    }
    /// Reads lines in their order, and returns the client and the user agent of each request.
    fn read_all(format: &mut Format, lines: &[&str]) -> Vec<(String, String)> {
        let mut reader = Reader::default();
        let requests: Vec<Request> =
            lines.iter().filter_map(|line| reader.read(format, line.as_bytes(), Keep::All)).collect();
        let agent = format.headers().iter().position(|name| name == "user-agent").unwrap();
        let text = |request: &Request| request.texts.as_ref().unwrap().header(agent).to_vec();
        let read = |request: &Request| (request.client.unwrap().to_string(), String::from_utf8(text(request)).unwrap());
        requests.iter().map(read).collect()
    }

    #[test]
    fn directive_names_the_columns_of_the_lines_after_it() {
        let w3c = [
            "#Fields: date time c-ip",
            "2024-03-01 10:00:00 192.0.2.1",
            "2024-03-01 10:00:00 192.0.2.1 200",
            "#Fields: c-ip cs(User-Agent) date time cs(X-New)",
            "192.0.2.2 a+b 2024-03-01 10:00:01 new",
            "2024-03-01 10:00:00 192.0.2.1",
        ];
        let mut detected = Format::detect(&w3c.iter().map(|line| line.as_bytes())).expect("a format reads it");
        assert_eq!(detected.name, "W3C");
        let expected =
            [("192.0.2.1", ""), ("192.0.2.2", "a b")].map(|(client, agent)| (client.to_owned(), agent.to_owned()));
        assert_eq!(read_all(&mut detected, &w3c), expected);
        assert!(detected.headers().iter().any(|name| name == "x-new"));
        let cloudfront =
            ["#Fields: date time x-edge-location c-ip cs(User-Agent)", "2024-03-01\t10:00:00\tLAX1\t192.0.2.1\ta%20b"];
        let mut detected = Format::detect(&cloudfront.iter().map(|line| line.as_bytes())).expect("a format reads it");
        assert_eq!(detected.name, "CLOUDFRONT");
        assert_eq!(read_all(&mut detected, &cloudfront), [("192.0.2.1".to_owned(), "a b".to_owned())]);
        let mut other = Format::named("combined", &[]).unwrap();
        let line = r#"192.0.2.1 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 1 "-" "a""#;
        assert_eq!(read_all(&mut other, &["#Fields: c-ip", line]).len(), 1);
    }
}
