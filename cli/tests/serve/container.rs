//! The image and the containers, step by step, as far as this can run without Docker.
//!
//! Not run: the images of others are not fetched, the program is that of the tests and not a release, and Grafana does
//! not start. Prometheus' own checker reads its configuration. The build of the image takes minutes, so it is a
//! campaign.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::health;
use crate::http::get;
use crate::proxies;
use crate::python;
use crate::server::{Folder, Proxy, Server, example, rules};
use crate::support::redis_server::free_port;
use crate::wait::wait_until;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/serve")
}

/// Returns the values of an instruction of the image's file.
fn instructions(name: &str) -> Vec<String> {
    let file = example("Dockerfile");
    let lines = file.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    lines.map(str::to_owned).collect()
}

/// Returns the variables of the program that a text sets.
fn variables(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
    words.filter(|word| word.starts_with("TOWER_RATELIMIT_")).map(str::to_owned).collect()
}

#[test]
fn image_builds_and_starts_what_there_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // The build: the package makes the program that is copied, with the compiler that the workspace asks for.
    let build = instructions("RUN").join("\n");
    assert_eq!(build, "cargo build --locked --release --package tower-ratelimit-cli");
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = \"")).unwrap();
    let from = instructions("FROM");
    assert!(from[0].starts_with(&format!("rust:{}-", version.trim_end_matches('"'))), "{from:?}");
    let plan = Command::new(env!("CARGO"))
        .current_dir(&root)
        .args(["metadata", "--locked", "--offline", "--no-deps", "--format-version", "1"])
        .output()
        .unwrap();
    let plan: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    let packages = plan["packages"].as_array().unwrap();
    let package = packages.iter().find(|package| package["name"] == "tower-ratelimit-cli").unwrap();
    let bins: Vec<&str> =
        package["targets"].as_array().unwrap().iter().filter_map(|target| target["name"].as_str()).collect();
    let copied = instructions("COPY");
    assert!(bins.contains(&"tower-ratelimit") && copied[1].contains("/release/tower-ratelimit "), "{copied:?}");
    assert!(instructions("USER") == ["nonroot"] && from[1].ends_with(":nonroot"));

    // The start: the command of the image, with its variables.
    let folder = Folder::new();
    let start = [instructions("ENTRYPOINT"), instructions("CMD")].concat().join(" ");
    assert_eq!(start, r#"["tower-ratelimit", "serve"] ["/etc/tower-ratelimit/rules.yaml"]"#);
    let help = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit")).args(["serve", "--help"]).output().unwrap();
    let known = variables(&String::from_utf8_lossy(&help.stdout));
    for text in [example("Dockerfile"), example("compose.yaml")] {
        let set = variables(&text);
        assert!(set.len() >= 2 && set.is_subset(&known), "{:?}", set.difference(&known));
    }
    folder.write("operators", &example("operators"));
    let arguments = ["--listen", "0.0.0.0:0", "--admin", "0.0.0.0:0", "--operators", "operators"];
    let server = Server::start_in(folder, &example("rules.yaml"), &arguments);
    let admin = (std::net::Ipv4Addr::LOCALHOST, server.admin.port()).into();
    assert_eq!(get(admin, "/limits", &[]).status, 401);
    let demo = ("Authorization", "Basic ZGVtbzpjaGFuZ2UtdGhpcy10b2tlbg==");
    assert_eq!((get(admin, "/limits", &[demo]).status, get(admin, "/metrics", &[]).status), (200, 200));
}

/// Puts what the image's build sees into a folder: the files of the repository, without those that are left out.
fn context() -> Folder {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let listed = Command::new("git").current_dir(&root).args(["ls-files", "-z"]).output().unwrap();
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let left_out = example("Dockerfile.dockerignore");
    let left_out: Vec<&str> = left_out.lines().collect();
    let folder = Folder::new();
    for name in String::from_utf8(listed.stdout).unwrap().split_terminator('\0') {
        if left_out.iter().any(|left_out| name.split('/').next() == Some(left_out)) || !root.join(name).is_file() {
            continue;
        }
        let to = folder.path().join(name);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(root.join(name), to).unwrap();
    }
    folder
}

/// `IMAGE_BUILD=1` builds the program as well, as a release.
#[test]
fn build_of_the_image_has_all_that_it_reads() {
    let context = context();
    let metadata = Command::new(env!("CARGO"))
        .current_dir(context.path())
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .output()
        .unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    if std::env::var_os("IMAGE_BUILD").is_some() {
        build_image(&context);
    }
}

/// Does what the build of the image does in its folder, and starts the program that it copies.
fn build_image(context: &Folder) {
    for line in instructions("RUN") {
        let status =
            Command::new("sh").current_dir(context.path()).args(["-c", &line]).env_remove("CARGO_TARGET_DIR").status();
        assert!(status.unwrap().success(), "{line}");
    }
    let copied = instructions("COPY");
    let program = copied[1].split(' ').nth(1).unwrap().replace("/src/", "");
    let program = context.path().join(program);
    let size = std::fs::metadata(&program).unwrap().len();
    let version = Command::new(&program).arg("--version").output().unwrap();
    println!("{size} bytes: {}", String::from_utf8_lossy(&version.stdout));
    assert!(version.status.success() && size < 64 << 20, "{size} bytes");
}

/// Returns the description of the containers, with what its anchors stand for.
fn composition() -> Value {
    let read = "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)";
    let file = examples().join("compose.yaml");
    let text = python::run(health::python().arg("-c").arg(read).arg(file), "");
    serde_json::from_str(&text).unwrap()
}

/// Returns a text with what stands for parts of it on this machine.
fn replaced(text: &str, parts: &[(&str, &str)]) -> String {
    parts.iter().fold(text.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from} is not in {text}");
        text.replace(from, to)
    })
}

/// An nginx in a folder of its own, by the script of a container.
fn nginx(folder: Folder, port: u16, script: &str) -> Proxy {
    let mut command = Command::new("sh");
    command.arg("-c").arg(script);
    Proxy::start(command, folder, port, "nginx is missing. Install it, on Debian with: apt-get install nginx-light")
}

/// The command of a container, as `docker compose` hands it over.
fn command_of(service: &Value) -> Vec<&str> {
    service["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

/// Each container as a process, by its command and its variables as they stand, with addresses and folders of this
/// machine.
#[test]
fn containers_limit_together() {
    let all = composition();
    let services = &all["services"];

    // Redis, with its options.
    let (port, folder) = (free_port(), Folder::new());
    let words = command_of(&services["redis"]);
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).args(["--port", &port.to_string(), "--dir"]).arg(folder.path());
    let redis = Proxy::start(command, folder, port, "Redis is missing. Install it: apt-get install redis-server");

    // Both limiters.
    let limiters = ["limiter-1", "limiter-2"].map(|name| {
        let folder = Folder::new();
        folder.write("operators", &example("operators"));
        let mut arguments = Vec::new();
        for (variable, value) in services[name]["environment"].as_object().unwrap() {
            let flag = variable.strip_prefix("TOWER_RATELIMIT_").unwrap().to_lowercase().replace('_', "-");
            let value = value.as_str().unwrap();
            let value = match &*flag {
                "redis" => replaced(value, &[("redis:6379", &redis.address.to_string())]),
                "trust" => {
                    assert_eq!(all["networks"]["default"]["ipam"]["config"][0]["subnet"], value);
                    "127.0.0.1".to_owned()
                }
                "admin" => replaced(value, &[(":8081", ":0")]),
                "operators" => replaced(value, &[("/etc/tower-ratelimit/", "")]),
                other => panic!("the test does not know --{other}"),
            };
            arguments.extend([format!("--{flag}"), value]);
        }
        arguments.extend(["--deadline", "20s"].map(str::to_owned)); // on a busy machine
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let server = Server::start_in(folder, &rules(), &arguments);
        let admin = SocketAddr::from(([127, 0, 0, 1], server.admin.port()));
        wait_until(|| get(admin, "/ready", &[]).status == 200);
        (server, admin)
    });

    // The application: its script writes a file that the image's own includes.
    let (port, folder) = (free_port(), Folder::new());
    let path = folder.path().display().to_string();
    let temporary: String =
        ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"].map(|of| format!("{of}_temp_path temp;\n")).concat();
    folder.write(
        "image.conf",
        &format!("events {{}} http {{ access_log off; {temporary} include {path}/default.conf; }}"),
    );
    let start = |file: &str| {
        format!("exec nginx -p {path} -c {file} -e stderr -g 'daemon off; master_process off; pid nginx.pid;'")
    };
    let words = command_of(&services["application"]);
    assert_eq!(words[..2], ["sh", "-c"]);
    let script = replaced(
        words[2],
        &[
            ("/etc/nginx/conf.d/default.conf", &format!("{path}/default.conf")),
            ("listen 9000", &format!("listen 127.0.0.1:{port}")),
            ("exec nginx -g 'daemon off;'", &start("image.conf")),
        ],
    );
    let application = nginx(folder, port, &script);
    assert_eq!(get(application.address, "/", &[]).body, "hello\n");

    // The proxy: its script changes the example's file.
    let (port, folder) = (free_port(), Folder::new());
    let path = folder.path().display().to_string();
    folder.write("limits.conf", &proxies::patient(&example("nginx.conf")));
    let words = command_of(&services["proxy"]);
    assert_eq!(words[..2], ["sh", "-c"]);
    let here = format!(
        "sed -i -e 's/limiter-1:8080/{}/' -e 's/limiter-2:8080/{}/' -e 's/application:9000/{}/' \
         -e 's/listen 8000/listen 127.0.0.1:{port}/' -e 's/^http {{/http {{ access_log off; {}/' nginx.conf && ",
        limiters[0].0.asked,
        limiters[1].0.asked,
        application.address,
        temporary.replace('\n', " "),
    );
    let start =
        format!("exec nginx -p {path} -c nginx.conf -e stderr -g 'daemon off; master_process off; pid nginx.pid;'");
    let script = replaced(
        words[2],
        &[
            ("/etc/limits.conf", "limits.conf"),
            ("/etc/nginx/nginx.conf", "nginx.conf"),
            ("exec nginx -g 'daemon off;'", &format!("{here}{start}")),
        ],
    );
    let proxy = nginx(folder, port, &script);

    // The first line of the file's comment.
    let first = get(proxy.address, "/", &[]);
    assert!(first.status == 200 && first.body == "hello\n", "{first:?}");
    assert!(first.header("ratelimit").contains("\"client\";r=29"), "{first:?}");
    let refused = (0..60).map(|_| get(proxy.address, "/", &[])).find(|answer| answer.status != 200).unwrap();
    assert_eq!(refused.status, 429, "both limiters share 30 an hour: {refused:?}");
    // And the last one.
    let demo = ("Authorization", "Basic ZGVtbzpjaGFuZ2UtdGhpcy10b2tlbg==");
    for (_, admin) in &limiters {
        assert_eq!(get(*admin, "/limits", &[demo]).status, 200);
        let metrics = get(*admin, "/metrics", &[]).body;
        assert!(metrics.contains("ratelimit_requests_total{outcome=\"allowed\"}"), "each of both was asked: {metrics}");
    }
}

#[test]
fn containers_have_the_files_that_they_mount() {
    let all = composition();
    let mut count = 0;
    for service in all["services"].as_object().unwrap().values() {
        for mount in service["volumes"].as_array().into_iter().flatten() {
            let mount = mount.as_str().unwrap();
            let path = examples().join(mount.split(':').next().unwrap());
            assert!(path.is_file() && mount.ends_with(":ro"), "{mount}");
            count += 1;
        }
    }
    assert!(count >= 8, "{count} files");
    let folder = Folder::new();
    folder.write("prometheus.yaml", &example("prometheus.yaml"));
    folder.write("alerts.yaml", &std::fs::read_to_string(examples().join("../observe/alerts.yaml")).unwrap());
    let promtool = std::env::var("PROMTOOL").unwrap_or_else(|_| "promtool".to_owned());
    let checked =
        Command::new(promtool).current_dir(folder.path()).args(["check", "config", "prometheus.yaml"]).output();
    let install = "promtool is missing. Install it, on Debian with: apt-get install prometheus";
    let checked = checked.unwrap_or_else(|error| panic!("{error}\n{install}"));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}
