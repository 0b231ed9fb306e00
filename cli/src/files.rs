//! Reading files of rules.

use std::fs::File;
use std::io::{Read, stdin};
use std::path::Path;

use tower_ratelimit::key::TrustedProxies;
use tower_ratelimit::rules::{Rules, RulesBuilder};

/// A byte more than a file of rules may have: the library reports a larger one.
const BYTES_MAX: u64 = (1 << 20) + 1;

/// Reads a file, or the standard input if its name is `-`. The error names the file.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>, String> {
    let mut content = Vec::new();
    let read = if is_stdin(file) {
        stdin().lock().take(BYTES_MAX).read_to_end(&mut content)
    } else {
        File::open(file).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut content))
    };
    read.map(|_| content).map_err(|error| format!("error: {} cannot be read: {error}", name(file)))
}

/// Returns the name of a file in messages.
pub(crate) fn name(file: &Path) -> String {
    if is_stdin(file) { "<stdin>".to_owned() } else { file.display().to_string() }
}

fn is_stdin(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Returns a builder for rules whose requests come without a proxy: the client is the peer.
pub(crate) fn builder() -> Result<RulesBuilder, String> {
    // No client has this address.
    let nobody = TrustedProxies::networks(["0.0.0.0/32"]).map_err(|error| error.to_string())?;
    Ok(Rules::builder().trusted_proxies(nobody))
}

/// Checks the names that options register.
pub(crate) fn check_names(builder: &RulesBuilder) -> Result<(), String> {
    match builder.check("rules: []") {
        Ok(_) => Ok(()),
        Err(error) => {
            let problem = error.problems().first();
            Err(format!("error: {}", problem.map_or("a name is wrong", |problem| problem.message())))
        }
    }
}
