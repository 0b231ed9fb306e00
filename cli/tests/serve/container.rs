//! The image and the containers, step by step, as far as this can run without Docker.
//!
//! Not run: the images of others are not fetched, the program is that of the tests and not a release, and Grafana does not
//! start. Prometheus' own checker reads its configuration.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::http::get;
use crate::server::{Folder, Server, example};

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

#[test]
fn containers_have_the_files_that_they_mount() {
    let compose = example("compose.yaml");
    let mounted = compose.split([' ', '"', '[', '\n']).filter_map(|word| word.strip_suffix(":ro").or(Some(word)));
    let mounted: Vec<&str> = mounted.filter(|word| word.starts_with("./") || word.starts_with("../")).collect();
    let mut count = 0;
    for word in mounted {
        let path = examples().join(word.split(':').next().unwrap().trim_end_matches(','));
        assert!(path.exists(), "{}", path.display());
        count += 1;
    }
    assert!(count >= 8, "{count} files");
    // The lines that nginx's container changes are in its file.
    let nginx = example("nginx.conf");
    for line in ["server 127.0.0.1:8080 max_fails=0;", "listen 127.0.0.1:8000", "127.0.0.1:9000"] {
        assert!(compose.contains(line) && nginx.contains(line), "{line}");
    }
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
