//! Google's gRPC client for Python asks as Envoy would, by messages that it defines itself.

use std::path::Path;
use std::process::Command;

use crate::python;
use crate::server::{Folder, Server};
use crate::support::redis_server::free_port;

const ANOTHER: &str = "
domain: another
descriptors:
- {key: key2, rate_limit: {unit: year, requests_per_unit: 20}}
- {key: key3, rate_limit: {unit: year, requests_per_unit: 10}}
- {key: file, value: f/*, share_threshold: true, rate_limit: {unit: year, requests_per_unit: 2}}
";

const BASIC: &str = "
domain: basic
descriptors:
- {key: key1, rate_limit: {name: named, unit: second, requests_per_unit: 50}}
- {key: open, rate_limit: {unlimited: true}}
";

const HOSTILE: &str = "
domain: hostile
descriptors:
- {key: x, rate_limit: {unit: year, requests_per_unit: 9}}
- {key: y, descriptors: [{key: z, rate_limit: {unit: year, requests_per_unit: 9}}]}
- {key: k_v, value: w, rate_limit: {unit: year, requests_per_unit: 6}}
- {key: k, value: v_w, rate_limit: {unit: year, requests_per_unit: 7}}
- {key: k, value: v, descriptors: [{key: w, value: x, rate_limit: {unit: year, requests_per_unit: 8}}]}
";

const INSTALL: &str = "python3 with venv is needed, and PyPI when this test runs for the first time; on Debian: \
                       apt-get install python3 python3-venv";

/// Serves the three files, of which `rules.yaml` has the domain `another`.
fn serve(arguments: &[&str]) -> Server {
    let folder = Folder::new();
    folder.write("basic.yaml", BASIC);
    folder.write("hostile.yaml", HOSTILE);
    Server::start_in(folder, ANOTHER, &[&["basic.yaml", "hostile.yaml"], arguments].concat())
}

#[test]
fn python_client_is_answered_as_by_envoys_service() {
    let server = serve(&[]);
    let failing = serve(&["--redis", &format!("redis://127.0.0.1:{}", free_port())]);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/grpc_python");
    let environment = python::environment("envoy_client", &folder.join("requirements.txt"), &[], INSTALL);
    let mut client = Command::new(environment.join("bin/python"));
    client.arg(folder.join("envoy.py")).args([server.asked.to_string(), failing.asked.to_string()]);
    client.arg(server.folder.path().join("rules.yaml")).env("no_proxy", "127.0.0.1");
    println!("{}", python::run(&mut client, ""));
}
