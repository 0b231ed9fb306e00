//! The cost to adopt: the crates and the seconds that a limiter adds to the build of a fresh application with axum and
//! Tokio. The versions are those of this package's lock file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use crate::race::{Plan, Raced};
use crate::report::{Better, Case};

const AGAINST: &str = "tower_governor";
const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");

/// A clean build takes long, and two more show how steady it is.
const ROUNDS: usize = 3;

const MAIN: &str = r#"
use std::net::SocketAddr;

use axum::{Router, routing::get};

#[tokio::main]
async fn main() {
    let app = Router::new().route("/", get(|| async { "hello" }))LAYER;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await.unwrap();
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await.unwrap();
}
"#;

/// A limiter, with the dependency and the layer that an application adds for it.
struct Adopted {
    name: &'static str,
    dependency: &'static str,
    layer: &'static str,
}

const ADOPTED: [Adopted; 3] = [
    Adopted { name: "axum and Tokio alone", dependency: "", layer: "" },
    Adopted {
        name: "tower-ratelimit",
        dependency: r#"tower-ratelimit = { path = "PACKAGE/../..", features = ["axum"] }"#,
        layer: ".layer(tower_ratelimit::RateLimitLayer::new(tower_ratelimit::MemoryLimiter::new(), \
                tower_ratelimit::Quota::per_minute(100), tower_ratelimit::key::peer_ip()))",
    },
    Adopted {
        name: AGAINST,
        dependency: r#"tower_governor = "0.8""#,
        layer: ".layer(tower_governor::GovernorLayer::new(tower_governor::governor::GovernorConfig::default()))",
    },
];

pub fn run(plan: &Plan) -> Vec<Case> {
    let applications: Vec<Application> = ADOPTED.iter().map(Application::write).collect();
    let crates: Vec<f64> = applications.iter().map(|application| application.crates() as f64).collect();
    let added = crates[1..].iter().map(|count| count - crates[0]);
    let mut cases = Vec::new();
    for (name, release) in [("debug", false), ("release", true)] {
        if !plan.is_wanted(name) {
            continue;
        }
        // All builds take minutes, so a smoke run only counts the crates.
        let mut seconds = vec![vec![0.0]; applications.len()];
        if !plan.is_smoke() {
            seconds = vec![Vec::new(); applications.len()];
            for _ in 0..ROUNDS {
                for (application, seconds) in applications.iter().zip(&mut seconds) {
                    seconds.push(application.build(release));
                }
            }
        }
        let built = Raced::of(seconds);
        let in_all = built.medians();
        let beyond = built.beyond_first();
        let names = ADOPTED[1..].iter().map(|adopted| adopted.name).collect();
        let mut case = Case::new(name.to_owned(), "seconds added", Better::Lower, AGAINST, names, &beyond.medians());
        case.note("crates added", added.clone());
        case.note("seconds in all", in_all[1..].iter().copied());
        case.remark(format!("axum and Tokio alone: {} crates, {:.1} s", crates[0], in_all[0]));
        cases.push(case.told());
    }
    cases
}

/// A fresh application in a folder, which is removed when this is dropped.
struct Application(PathBuf);

impl Application {
    fn write(adopted: &Adopted) -> Self {
        let folder =
            std::env::temp_dir().join(format!("adopt-{}-{}", std::process::id(), adopted.name.replace(' ', "-")));
        let manifest = format!(
            "[package]\nname = \"adopt\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\naxum = \"0.8\"\n\
             tokio = {{ version = \"1\", features = [\"full\"] }}\n{}\n\n[workspace]\n",
            adopted.dependency.replace("PACKAGE", PACKAGE),
        );
        std::fs::create_dir_all(folder.join("src")).expect("a folder");
        std::fs::write(folder.join("Cargo.toml"), manifest).expect("a file");
        std::fs::write(folder.join("src/main.rs"), MAIN.replace("LAYER", adopted.layer)).expect("a file");
        std::fs::copy(Path::new(PACKAGE).join("Cargo.lock"), folder.join("Cargo.lock")).expect("a lock file");
        let application = Self(folder);
        application.cargo(&["fetch"]);
        application
    }

    fn cargo(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("cargo");
        command.current_dir(&self.0).args(arguments).env("CARGO_TARGET_DIR", self.0.join("target"));
        // Cargo compiles a dependency in a folder incrementally, which takes longer, and one of a registry not.
        command.env("CARGO_INCREMENTAL", "0");
        let output = command.output().expect("cargo is installed");
        assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Returns the number of crates that are built.
    fn crates(&self) -> usize {
        let output = self.cargo(&["tree", "--edges", "normal,build", "--prefix", "none", "--no-dedupe"]);
        String::from_utf8_lossy(&output.stdout).lines().collect::<BTreeSet<_>>().len()
    }

    /// Returns the seconds of a clean build.
    fn build(&self, release: bool) -> f64 {
        let target = self.0.join("target");
        if target.exists() {
            std::fs::remove_dir_all(target).expect("it is removed");
        }
        let started = Instant::now();
        self.cargo(if release { &["build", "--release"] } else { &["build"] });
        started.elapsed().as_secs_f64()
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        // It is in the folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
