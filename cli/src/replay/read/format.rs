//! The formats of logs, by name and by detection.

use http::HeaderName;

use super::columns::Columns;
use super::field::{Field, Fields, HeaderNames, Unit};
use super::json::Paths;
use super::request::{Keep, Request};
use super::text::Pattern;

/// A format that reads lines.
#[derive(Clone, Debug)]
pub(crate) struct Format {
    pub(crate) name: String,
    lines: Lines,
}

#[derive(Clone, Debug)]
enum Lines {
    Text(Pattern),
    Json(Paths),
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
    /// As in nginx's `log_format`. `$time_start` is the time of arrival.
    Text(&'static str),
    /// Paths of JSON and what they mean.
    Json(&'static [(&'static str, Meaning)]),
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
/// Caddy's access logs, Traefik's access log fields, Envoy's and Istio's default format strings, HAProxy's HTTP log
/// format, the access logs of AWS' classic and application load balancers and of CloudFront, GCP's HttpRequest, W3C's
/// working draft of the extended log file format with the fields of IIS, and Squid's logformat.
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
        Written::Text(
            r#"$host:$port $remote_addr $ident $remote_user [$time_local] "$request" $status $size "$http_referer" "$http_user_agent""#,
        ),
    ),
    (
        &["VCOMMON", "VHOSTCOMMON"],
        Written::Text(r#"$host:$port $remote_addr $ident $remote_user [$time_local] "$request" $status $size"#),
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
        &["CADDY"],
        Written::Json(&[
            ("ts", is(Field::End)),
            ("duration", is(Field::Duration(Unit::Seconds))),
            ("status", is(Field::Status)),
            ("user_id", is(Field::User)),
            ("request.client_ip", is(Field::Client)),
            ("request.remote_ip", is(Field::Peer)),
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
        &["HAPROXY"],
        Written::Text(
            r#"$syslog]: $remote_addr [$time_start] $frontend $backend $duration_ms $status $bytes $cookie $set_cookie $end $connections $queues "$request""#,
        ),
    ),
    (
        &["HAPROXYRAW"],
        Written::Text(
            r#"$remote_addr [$time_start] $frontend $backend $duration_ms $status $bytes $cookie $set_cookie $end $connections $queues "$request""#,
        ),
    ),
    (
        &["AWSALB", "ALB"],
        Written::Text(
            r#"$type $time_end $elb $remote_addr $target $t1 $t2 $t3 $status $target_status $received $sent "$request" "$http_user_agent" $cipher $protocol $group "$trace" "$domain" "$certificate" $priority $time_start "$rest"#,
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
            let lines = Pattern::parse(text).map(Lines::Text)?;
            return Ok(Self { name: "log_format".to_owned(), lines });
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

    /// Returns the format that reads most of these lines, or `None` if none reads any. A line counts twice if a
    /// client's address is where the format has it: formats with other fields in front would be read, too. A name
    /// there may be a virtual host.
    pub(crate) fn detect<'l>(lines: &(impl Iterator<Item = &'l [u8]> + Clone)) -> Option<Self> {
        let worth = |request: &Request| if request.client.is_some() && request.host.is_none() { 2 } else { 1 };
        let mut best = None;
        for named in FORMATS {
            let mut format = Self::of(named);
            let mut reader = Reader::default();
            let requests = lines.clone().filter_map(|line| reader.read(&mut format, line, Keep::Nothing));
            let count = requests.map(|request| worth(&request)).sum::<usize>();
            if count > best.as_ref().map_or(0, |(most, _)| *most) {
                best = Some((count, format));
            }
        }
        best.map(|(_, format)| format)
    }

    /// Returns a format that reads nothing.
    pub(crate) fn nothing() -> Self {
        Self { name: String::new(), lines: Lines::Json(Paths::default()) }
    }

    fn of((names, written): &Named) -> Self {
        let name = names.first().copied().unwrap_or_default().to_owned();
        let lines = match written {
            Written::Text(text) => Pattern::parse(text).map(Lines::Text).unwrap_or(Lines::Json(Paths::default())),
            Written::Json(known) => Lines::Json(paths(known)),
            Written::Columns(names, sign) => {
                let mut headers = HeaderNames::default();
                Lines::Columns { columns: Columns::open(names, &mut headers), headers, sign: *sign }
            }
        };
        Self { name, lines }
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
        Ok(Self { name: name.to_owned(), lines: Lines::Json(paths) })
    }

    /// Returns the names of the headers that the log has.
    pub(crate) fn headers(&self) -> &[HeaderName] {
        match &self.lines {
            Lines::Text(pattern) => &pattern.headers.0,
            Lines::Json(paths) => &paths.headers.0,
            Lines::Columns { headers, .. } => &headers.0,
        }
    }

    /// Returns the request of a line, or `None` if the line is not of this format or has no time. `declared` are the
    /// columns that a directive before the line names.
    fn read(&self, line: &[u8], declared: Option<&Columns>, keep: Keep) -> Option<Request> {
        let mut fields = Fields::default();
        match &self.lines {
            Lines::Text(pattern) => pattern.read(line, &mut fields)?,
            Lines::Json(paths) => paths.read(line, &mut fields)?,
            Lines::Columns { columns, .. } => declared.unwrap_or(columns).read(line, &mut fields)?,
        }
        Request::new(&fields, self.headers(), keep)
    }
}

/// Reads the lines of one file in their order: a directive says which columns the lines after it have.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    declared: Option<Columns>,
}

impl Reader {
    /// Returns the request of a line. Returns `None` for a directive, and for a line that is not of this format or has
    /// no time. A directive may add headers to the format.
    pub(crate) fn read(&mut self, format: &mut Format, line: &[u8], keep: Keep) -> Option<Request> {
        let Some(directive) = directive(line) else { return format.read(line, self.declared.as_ref(), keep) };
        if let Lines::Columns { headers, sign: Some(sign), .. } = &mut format.lines {
            let names = String::from_utf8_lossy(directive);
            let is_own = names.split_ascii_whitespace().any(|name| name.eq_ignore_ascii_case(sign));
            let names = if is_own { &*names } else { "" }; // without names, no line is read
            self.declared = Some(Columns::declared(names, headers));
        }
        None
    }
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
        line: r#"Feb  6 12:14:14 localhost haproxy[14389]: 192.0.2.1:33317 [06/Feb/2009:12:14:14.655] http-in static/srv1 10/0/30/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 {1wt.eu} {} "GET /index.html HTTP/1.1""#,
        at_us: 1_233_922_454_655_000,
        client: "192.0.2.1",
        status: 200,
        texts: ["GET", "/index.html", "", ""],
        agent: "",
    },
    Facts {
        format: "HAPROXYRAW",
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
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_read_and_detected() {
        for facts in FACTS {
            let detected = Format::detect(&std::iter::once(facts.line.as_bytes())).expect("a format reads it");
            assert_eq!(detected.name, facts.format);
            let format = Format::named(&facts.format.to_lowercase(), &[]).expect("it is a format's name");
            let request = format.read(facts.line.as_bytes(), None, Keep::All).expect("it reads its own line");
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
    fn duration_is_read_if_a_format_has_one() {
        let micros = |facts: &Facts| {
            let format = Format::named(facts.format, &[]).unwrap();
            format.read(facts.line.as_bytes(), None, Keep::Nothing).unwrap().duration_us
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
        let format = Format::named("json", &fields).unwrap();
        let request = format
            .read(br#"{"at":1646861401250,"from":{"ip":"192.0.2.1"},"took":250,"k":"v"}"#, None, Keep::All)
            .unwrap();
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
