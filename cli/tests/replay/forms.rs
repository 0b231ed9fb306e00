//! Logs in the forms in which they come: each report has the figures of an independent count, or there is none.

use std::process::Command;

use serde_json::{Value, json};

use crate::{Folder, error, here, run, run_with};

/// A request of the logs.
struct Row {
    client: String,
    /// The second after 10:00:00 on 2024-03-01.
    second: u64,
    method: &'static str,
    path: String,
    status: u16,
}

impl Row {
    fn time(&self) -> String {
        format!("{:02}:{:02}:{:02}", 10 + self.second / 3_600, self.second / 60 % 60, self.second % 60)
    }

    fn iso(&self) -> String {
        format!("2024-03-01T{}.250000Z", self.time())
    }

    fn nanos(&self) -> u64 {
        (1_709_287_200 + self.second) * 1_000_000_000
    }

    fn common(&self) -> String {
        let Self { client, method, path, status, .. } = self;
        format!("{client} - - [01/Mar/2024:{} +0000] \"{method} {path} HTTP/1.1\" {status} 512", self.time())
    }

    fn combined(&self) -> String {
        format!("{} \"-\" \"curl\"", self.common())
    }

    fn haproxy(&self) -> String {
        let Self { client, method, path, status, .. } = self;
        let time = self.time();
        format!(
            "{client}:51000 [01/Mar/2024:{time}.250] front~ back/web1 1/0/2/3/6 {status} 512 - - ---- 1/1/0/0/0 0/0 \"{method} {path} HTTP/1.1\""
        )
    }
}

fn rows() -> Vec<Row> {
    let mut state = 5_u64;
    let mut below = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let rows = (0..400).map(|n| {
        let client = below(12) * below(3);
        Row {
            client: match client % 4 {
                0 => format!("2001:db8:{client:x}::1"),
                _ => format!("192.0.2.{client}"),
            },
            second: n * 7,
            method: ["GET", "POST", "PUT"][below(3) as usize],
            path: format!("/a/{}?b={}", below(50), n),
            status: [200, 200, 200, 301, 404, 429, 503][below(7) as usize],
        }
    });
    rows.collect()
}

/// Writes a line for each request, and after every tenth one the lines of other loggers.
fn log(line: impl Fn(&Row) -> String, others: &[&str]) -> String {
    let mut log = String::new();
    for (n, row) in rows().iter().enumerate() {
        log += &(line(row) + "\n");
        if n % 10 == 9 {
            others.iter().for_each(|other| log += &(other.replace("TIME", &row.iso()) + "\n"));
        }
    }
    log
}

const NGINX_ERROR: &str =
    "2024/03/01 10:00:00 [error] 29#29: *1 open() \"/a\" failed, client: 192.0.2.1, request: \"GET /a HTTP/1.1\"";

/// The logs, by their names in `forms.py`, each with its format.
fn forms() -> Vec<(&'static str, &'static str, String)> {
    let text = |text: &str| Value::from(text).to_string();
    vec![
        ("combined", "COMBINED", log(Row::combined, &[])),
        ("common", "COMMON", log(Row::common, &[])),
        ("vhost with port", "VCOMBINED", log(|row| format!("shop.example:443 {}", row.combined()), &[])),
        ("vhost", "VCOMBINED", log(|row| format!("shop.example {}", row.combined()), &[])),
        (
            "syslog",
            "COMBINED",
            log(
                |row| format!("Mar  1 {} web1 nginx: {}", row.time(), row.combined()),
                &["Mar  1 10:00:00 web1 sshd[7]: Accepted publickey", "Mar  1 10:00:00 web1 CRON[8]: (root) CMD (true)"],
            ),
        ),
        (
            "syslog on the wire",
            "NGINXMAIN",
            log(|row| format!("<190>Mar  1 {} nginx: {} \"-\"", row.time(), row.combined()), &[]),
        ),
        (
            "syslog by RFC 5424",
            "COMBINED",
            log(|row| format!("<190>1 {} web1 nginx - - - {}", row.iso(), row.combined()), &["<13>1 TIME web1 app 17 - - started"]),
        ),
        (
            "journald",
            "COMBINED",
            log(
                |row| format!("Mar 01 {} web1 nginx[812]: {}", row.time(), row.combined()),
                &["Mar 01 10:00:00 web1 systemd[1]: Reloading nginx.", "Mar 01 10:00:00 web1 kernel: eth0: up"],
            ),
        ),
        (
            "journald json",
            "COMBINED",
            log(
                |row| json!({"MESSAGE": row.combined(), "SYSLOG_IDENTIFIER": "nginx", "__REALTIME_TIMESTAMP": "1"}).to_string(),
                &[r#"{"MESSAGE":"Reloading","SYSLOG_IDENTIFIER":"systemd","__REALTIME_TIMESTAMP":"1"}"#],
            ),
        ),
        (
            "compose",
            "COMBINED",
            log(
                |row| format!("web-1    | {}", row.combined()),
                &["db-1     | LOG:  checkpoint starting: time", &format!("web-1    | {NGINX_ERROR}"), "worker-1 | done in 12 ms"],
            ),
        ),
        (
            "compose coloured",
            "COMBINED",
            log(|row| format!("\u{1b}[36mweb-1  |\u{1b}[0m {}", row.combined()), &["\u{1b}[33mdb-1   |\u{1b}[0m ready"]),
        ),
        (
            "cri",
            "COMBINED",
            log(|row| format!("{} stdout F {}", row.iso(), row.combined()), &[&format!("TIME stderr F {NGINX_ERROR}")]),
        ),
        (
            "docker",
            "COMBINED",
            log(
                |row| json!({"log": row.combined() + "\n", "stream": "stdout", "time": row.iso()}).to_string(),
                &[
                    r#"{"log":"/docker-entrypoint.sh: Configuration complete\n","stream":"stdout","time":"TIME"}"#,
                    &format!(r#"{{"log":{},"stream":"stderr","time":"TIME"}}"#, text(NGINX_ERROR)),
                ],
            ),
        ),
        (
            "kubectl ingress",
            "INGRESSNGINX",
            log(
                |row| {
                    let more = "35 0.002 [shop-web-80] [] 10.8.0.4:80 512 0.001 200 60f2d1e6";
                    format!("[pod/ingress-0/controller] {} {more}", row.combined())
                },
                &["[pod/ingress-0/controller] I0301 10:00:00.250000       7 event.go:364] Event"],
            ),
        ),
        (
            "filebeat",
            "COMBINED",
            log(|row| json!({"@timestamp": row.iso(), "message": row.combined(), "host": {"name": "web1"}}).to_string(), &[]),
        ),
        ("more fields", "COMBINEDPLUS", log(|row| format!("{} \"-\" 0.002 0.001 .", row.combined()), &[])),
        (
            "heroku",
            "HEROKU",
            log(
                |row| {
                    let (Row { client, method, path, status, .. }, iso) = (row, row.iso());
                    format!(
                        "<158>1 {iso} host heroku router - at=info method={method} path=\"{path}\" host=e.org request_id=8601 fwd=\"{client}\" dyno=web.1 connect=1ms service=18ms status={status} bytes=13 protocol=https"
                    )
                },
                &[
                    "<40>1 TIME host app web.1 - 10.1.2.3 - - [01/Mar/2024:10:00:00 +0000] \"GET / HTTP/1.1\" 200 - \"-\" \"curl\"",
                    "<40>1 TIME host heroku web.1 - State changed from starting to up",
                ],
            ),
        ),
        ("caddy", "CADDY", caddy()),
        (
            "traefik",
            "TRAEFIK",
            log(
                |row| {
                    json!({"ClientHost": row.client, "DownstreamStatus": row.status, "Duration": 12_000_000, "RequestHost": "e.org",
                        "RequestMethod": row.method, "RequestPath": row.path, "StartUTC": row.iso(), "level": "info", "msg": ""})
                    .to_string()
                },
                &[r#"{"level":"info","msg":"Configuration loaded from flags.","time":"TIME"}"#],
            ),
        ),
        (
            "nginx json",
            "NGINXJSON",
            log(
                |row| {
                    json!({"@timestamp": row.iso(), "remote_addr": row.client, "request_method": row.method,
                        "request_uri": row.path, "status": row.status.to_string(), "request_time": "0.004"})
                    .to_string()
                },
                &[NGINX_ERROR],
            ),
        ),
        (
            "haproxy",
            "HAPROXY",
            log(
                |row| format!("Mar  1 {} lb1 haproxy[17]: {}", row.time(), row.haproxy()),
                &["Mar  1 10:00:00 lb1 haproxy[17]: Server back/web1 is DOWN, reason: Layer4 timeout."],
            ),
        ),
        ("haproxy https", "HAPROXY", log(|row| format!("{} 0/0000000000000000/0/0/0 -/-/-", row.haproxy()), &[])),
        (
            "envoy",
            "ENVOY",
            log(
                |row| {
                    let (Row { client, method, path, status, .. }, iso) = (row, row.iso());
                    format!(
                        "[{iso}] \"{method} {path} HTTP/2\" {status} - 0 512 6 5 \"{client}\" \"curl\" \"cc21d9b0\" \"e.org\" \"10.0.2.1:80\""
                    )
                },
                &[],
            ),
        ),
        (
            "istio",
            "ISTIO",
            log(
                |row| {
                    let (Row { client, method, path, status, .. }, iso) = (row, row.iso());
                    format!(
                        "{iso} stdout F [{iso}] \"{method} {path} HTTP/1.1\" {status} - via_upstream - \"-\" 0 512 3 1 \"-\" \"curl\" \"8496\" \"e.org\" \"10.0.0.9:80\" inbound|80|| 127.0.0.6:41 10.0.0.1:80 {client}:37652 - default"
                    )
                },
                &["TIME stderr F TIME	info	xdsproxy	connected to upstream XDS server"],
            ),
        ),
        (
            "alb",
            "AWSALB",
            log(
                |row| {
                    let (Row { client, method, path, status, .. }, iso) = (row, row.iso());
                    format!(
                        "https {iso} app/lb/50dc {client}:2817 10.0.0.1:80 0.000 0.001 0.000 {status} {status} 34 366 \"{method} https://e.org:443{path} HTTP/2.0\" \"curl\" ECDHE TLSv1.2 arn:aws:x \"Root=1\" \"e.org\" \"arn\" 0 {iso} \"forward\" \"-\" \"-\" \"10.0.0.1:80\" \"200\" \"-\" \"-\" TID_1"
                    )
                },
                &[],
            ),
        ),
        (
            "cloudfront",
            "CLOUDFRONT",
            "#Version: 1.0\n#Fields: date time x-edge-location sc-bytes c-ip cs-method cs(Host) cs-uri-stem sc-status\n".to_owned()
                + &log(
                    |row| {
                        let (Row { client, method, path, status, .. }, time) = (row, row.time());
                        format!("2024-03-01\t{time}\tLAX1\t512\t{client}\t{method}\te.org\t{path}\t{status}")
                    },
                    &[],
                ),
        ),
        (
            "iis",
            "W3C",
            "#Software: Microsoft Internet Information Services 10.0\r\n#Fields: date time s-ip cs-method cs-uri-stem cs-uri-query \
             s-port cs-username c-ip cs(User-Agent) cs(Referer) sc-status time-taken\r\n"
                .to_owned()
                + &log(
                    |row| {
                        let (Row { client, method, path, status, .. }, time) = (row, row.time());
                        format!("2024-03-01 {time} 10.0.0.2 {method} {path} - 443 - {client} curl - {status} 15\r")
                    },
                    &[],
                ),
        ),
        (
            "squid",
            "SQUID",
            log(
                |row| {
                    let (Row { client, method, path, status, .. }, second) = (row, row.nanos() / 1_000_000_000);
                    format!("{second}.250    198 {client} TCP_MISS/{status} 4321 {method} http://e.org{path} - HIER_DIRECT/1.2.3.4 text/html")
                },
                &[],
            ),
        ),
        (
            "cloudflare",
            "CLOUDFLARE",
            log(
                |row| {
                    json!({"ClientIP": row.client, "ClientRequestMethod": row.method, "ClientRequestURI": row.path,
                        "EdgeEndTimestamp": row.nanos(), "EdgeResponseStatus": row.status, "EdgeStartTimestamp": row.nanos()})
                    .to_string()
                },
                &[],
            ),
        ),
        (
            "gcp",
            "GCP",
            log(
                |row| {
                    json!({"httpRequest": {"remoteIp": row.client, "requestMethod": row.method, "requestUrl": row.path,
                        "status": row.status}, "timestamp": row.iso()})
                    .to_string()
                },
                &[r#"{"timestamp":"TIME","severity":"INFO","jsonPayload":{"message":"backend healthy"}}"#],
            ),
        ),
        (
            "kong",
            "KONG",
            log(
                |row| {
                    json!({"client_ip": row.client, "request": {"method": row.method, "uri": row.path},
                        "response": {"status": row.status}, "started_at": row.nanos() / 1_000_000})
                    .to_string()
                },
                &[],
            ),
        ),
    ]
}

/// Two loggers of Caddy's log each request, and a third one those that failed.
fn caddy() -> String {
    let mut log = String::new();
    for (n, row) in rows().iter().enumerate() {
        let time = row.nanos() as f64 / 1e9 + 0.25;
        let request = json!({"client_ip": row.client, "host": "e.org", "method": row.method, "remote_ip": "10.0.0.1", "uri": row.path});
        let line = |logger: &str, msg: &str| {
            json!({"duration": 0.5, "level": "info", "logger": logger, "msg": msg, "request": request, "size": n,
                "status": row.status, "ts": time})
            .to_string()
                + "\n"
        };
        if row.status == 503 {
            log += &line("http.log.error", "dial tcp: connection refused");
        }
        log += &line("http.log.access.log0", "handled request");
        log += &line("http.log.access", "handled request");
        if n % 10 == 9 {
            log += "{\"level\":\"info\",\"ts\":1709287200.5,\"logger\":\"tls\",\"msg\":\"certificate obtained\",\"status\":200}\n";
        }
    }
    log
}

const LIMIT: u64 = 20;

#[test]
fn figures_of_each_form_are_those_of_a_count() {
    let folder = Folder::new("forms");
    let forms: Vec<(&str, &str, String)> = forms()
        .into_iter()
        .map(|(form, format, log)| (form, format, folder.file(&format!("{}.log", form.replace(' ', "-")), log)))
        .collect();
    let mut python = Command::new("python3");
    python.arg(here("forms.py")).arg(LIMIT.to_string());
    let python = python.args(forms.iter().map(|(form, _, file)| format!("{form}={file}"))).output().unwrap();
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
    let counted: Value = serde_json::from_slice(&python.stdout).unwrap();
    for (form, format, file) in &forms {
        let quota = format!("{LIMIT} per day, fixed window");
        let report: Value = serde_json::from_str(&run(&["--json", "--window", "1h", "--quota", &quota, file])).unwrap();
        let (read, policy) = (&report["read"], &report["policies"][0]);
        let figures = json!({"requests": read["requests"], "clients": policy["clients"], "answered_429": read["answered_429"],
            "refused": policy["refused"]});
        assert_eq!((&read["format"], &figures), (&Value::from(*format), &counted[form]), "{form}: {read}");
        assert_eq!((&read["requests"], &read["unreadable"]), (&400.into(), &0.into()), "{form}: {read}");
    }
    assert!(forms.len() > 30);
}

/// A file of which the program cannot say how many requests it has: it says so, and reports nothing.
#[test]
fn log_that_cannot_be_counted_has_no_report() {
    let folder = Folder::new("uncountable");
    let (rows, quota) = (rows(), ["--quota", "20 per day, fixed window"]);
    let all = |line: &dyn Fn(usize, &Row) -> String| -> String {
        rows.iter().enumerate().map(|(n, row)| line(n, row) + "\n").collect()
    };
    let forwarded = all(&|_, row| {
        let (Row { client, method, path, status, .. }, time) = (row, row.time());
        format!(
            "{client}, 10.0.0.9 - - [01/Mar/2024:{time} +0000] \"{method} {path} HTTP/1.1\" {status} 5 \"-\" \"curl\""
        )
    });
    let direct = all(&|_, row| {
        format!("[{}] \"GET / HTTP/2\" 200 - 0 5 6 5 \"-\" \"curl\" \"cc21\" \"e.org\" \"10.0.2.1:80\"", row.iso())
    });
    let mixed = all(&|n, row| if n % 4 == 3 { row.haproxy() } else { row.combined() });
    let two_servers = all(&|n, row| match n % 2 {
        0 => format!("web-1    | {}", row.combined()),
        _ => format!("proxy-1  | {}", row.haproxy()),
    });
    let front_and_back = all(&|_, row| {
        let back = Row { client: "172.18.0.2".to_owned(), path: row.path.clone(), ..*row };
        format!("app-1    | {}\nproxy-1  | {}", back.combined(), row.combined())
    });
    let twice = all(&|_, row| format!("web-1  | {0}\ncopy-1 | {0}", row.combined()));
    let sockets = all(&|_, row| row.combined().replace(&row.client, "unix:"));
    let json = all(&|n, row| json!({"at": row.iso(), "peer": {"ip": row.client}, "n": n}).to_string());
    let document = format!("[\n{}\n]", all(&|_, row| format!("  {{\"at\": \"{}\"}},", row.iso())));
    // As Apache's ssl_request_log, which has no status. It begins as a list of JSON does.
    let ssl_requests = all(&|_, row| {
        let Row { client, method, path, .. } = row;
        format!(
            "[01/Mar/2024:{} +0000] {client} TLSv1.3 TLS_AES_128_GCM_SHA256 \"{method} {path} HTTP/1.1\" 5",
            row.time()
        )
    });
    let truncated = rows.iter().map(|row| row.combined()[..60].to_owned() + "\n").collect::<String>();
    for (log, expected) in [
        (forwarded, "--format"),
        (direct, "400 of 400 requests (100%) have no client's address"),
        (mixed, "100 lines: not of the format COMBINED"),
        (two_servers, "not of the format"),
        (front_and_back, "two programs logged the same requests"),
        (twice, "two programs logged the same requests"),
        (sockets, "have no client's address"),
        (json, "fields at, n, peer.ip: name those of a request, as in --format JSON --field time=PATH"),
        (document, "jq -c"),
        (ssl_requests, "name the format by --format, with nginx's log_format"),
        (truncated, "--format"),
        (NGINX_ERROR.to_owned() + "\n", "--format"),
    ] {
        let file = folder.file("access.log", log);
        let error = error(&[&quota[..], &[&file]].concat(), b"");
        assert!(error.contains(expected), "{error}");
    }
    let without =
        |key: &str| run_with(&["--quota", "20 per day", "--key", key, "-"], direct_log().as_bytes()).status.code();
    assert_eq!((without("path"), without("client")), (Some(0), Some(2)), "a path needs no client");
}

fn direct_log() -> String {
    let line = |row: &Row| {
        format!("[{}] \"GET / HTTP/2\" 200 - 0 5 6 5 \"-\" \"curl\" \"cc21\" \"e.org\" \"10.0.2.1:80\"\n", row.iso())
    };
    rows().iter().map(line).collect()
}

/// Proxies of many addresses, of which none sends most requests.
#[test]
fn clients_behind_several_proxies_are_noticed() {
    let folder = Folder::new("proxies");
    let of = |line: &dyn Fn(&Row, u64) -> String| -> String {
        rows().iter().enumerate().map(|(n, row)| line(row, n as u64 % 7) + "\n").collect()
    };
    let proxied = |row: &Row, n: u64| Row { client: format!("10.0.0.{n}"), path: row.path.clone(), ..*row };
    for (format, log) in [
        (
            "COMBINEDPLUS",
            of(&|row, n| format!("{} \"-\" 0.1 \"6.6.6.6, {}\" .", proxied(row, n).combined(), row.client)),
        ),
        ("NGINXMAIN", of(&|row, n| format!("{} \"{}\"", proxied(row, n).combined(), row.client))),
        (
            "COMBINEDXFF",
            of(&|row, n| proxied(row, n).combined().replacen(" - -", &format!(" ({}) - -", row.client), 1)),
        ),
    ] {
        let file = folder.file("access.log", log);
        let args = ["--json", "--quota", "20 per day", &file];
        let report: Value = serde_json::from_str(&run(&args)).unwrap();
        let (format_read, addresses) = (&report["read"]["format"], &report["read"]["addresses"]);
        assert_eq!((format_read, addresses), (&format.into(), &7.into()));
        assert!(
            report["warnings"].to_string().contains("400 of 400 requests came through a proxy"),
            "{}",
            report["warnings"]
        );
        let report: Value = serde_json::from_str(&run(&[&args[..], &["--trusted-proxies", "1"]].concat())).unwrap();
        assert_eq!(report["read"]["addresses"], 18, "{format}");
        assert!(!report["warnings"].to_string().contains("proxy"), "{format}: {}", report["warnings"]);
    }
}

/// Replicas behind a load balancer log different requests, however alike they are.
#[test]
fn requests_of_replicas_all_count() {
    let folder = Folder::new("replicas");
    let mut log = String::new();
    for (n, row) in rows().iter().enumerate() {
        let row = Row { client: row.client.clone(), path: "/".to_owned(), status: 200, method: "GET", ..*row };
        log += &format!("web-{}  | {}\n", 1 + n % 2, row.combined());
        if n % 20 == 0 {
            let probe = Row { client: "10.0.0.1".to_owned(), path: "/healthz".to_owned(), ..row };
            log += &format!("web-1  | {0}\nweb-2  | {0}\n", probe.combined());
        }
    }
    let file = folder.file("access.log", log);
    let report: Value = serde_json::from_str(&run(&["--json", "--quota", "20 per day", &file])).unwrap();
    assert_eq!(report["read"]["requests"], 440);
}

#[test]
fn log_that_ends_within_a_line_is_read_to_there() {
    let folder = Folder::new("cut");
    let log = log(|row| format!("{} stdout F {}", row.iso(), row.combined()), &[]);
    let file = folder.file("access.log", &log[..log.len() - 40]);
    let report: Value = serde_json::from_str(&run(&["--json", "--quota", "20 per day", &file])).unwrap();
    assert_eq!((&report["read"]["requests"], &report["read"]["unreadable"]), (&399.into(), &1.into()));
}

/// Load balancers also log connections over TCP, in which they see no requests, and Envoy those that it resets.
#[test]
fn connections_without_a_request_are_no_requests() {
    let folder = Folder::new("connections");
    let elb = |row: &Row, request: &str, status: &str| {
        let (time, client) = (row.iso(), &row.client);
        format!(
            "{time} elb {client}:51600 10.0.0.47:80 0.0009 0.00001 0.000015 {status} {status} 134 859 \"{request}\" \"-\" - -\n"
        )
    };
    let envoy = |row: &Row, request: &str, status: u16| {
        let (time, client) = (row.iso(), &row.client);
        format!("[{time}] \"{request}\" {status} - 0 0 3 - \"{client}\" \"-\" \"-\" \"-\" \"10.0.0.9:80\"\n")
    };
    let rows: Vec<Row> = rows().into_iter().filter(|row| !row.client.contains(':')).collect();
    let mut logs = [String::new(), String::new()];
    for row in &rows {
        let request = format!("{} {} HTTP/1.1", row.method, row.path);
        logs[0] += &elb(row, &request, &row.status.to_string());
        logs[0] += &elb(row, "- - - ", "-");
        // The balancer could not read this request, and has answered it with 400.
        logs[0] += &elb(row, "- - - ", "400");
        logs[1] += &envoy(row, &request, row.status);
        logs[1] += &envoy(row, "- - -", 0);
        logs[1] += &envoy(row, "- - -", 400);
    }
    for (log, name) in logs.iter().zip(["elb.log", "envoy.log"]) {
        let file = folder.file(name, log);
        let report: Value = serde_json::from_str(&run(&["--json", "--quota", "20 per day", &file])).unwrap();
        let (read, count) = (&report["read"], rows.len());
        assert_eq!((&read["requests"], &read["no_requests"]), (&(2 * count).into(), &count.into()), "{name}: {read}");
    }
    let tcp: String = rows.iter().map(|row| elb(row, "- - - ", "-")).collect();
    let error = error(&["--quota", "20 per day", &folder.file("tcp.log", tcp)], b"");
    assert!(error.contains("none of 189 lines is a request in the format AWSELB"), "{error}");
}
