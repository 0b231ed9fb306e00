//! When, where and how the program was built that measures.

use std::process::Command;

/// Whether a part of the report was written.
pub type Done = Result<(), Box<dyn std::error::Error>>;

/// The profiles of Cargo.toml, and what tables call them. The first one is what users have first.
pub const PROFILES: [(&str, &str); 2] = [("release", "Cargo's release profile"), ("thin", "thin LTO")];

/// Returns the profile that this program was built with. Cargo names the folder of its output after it.
pub fn profile() -> Option<String> {
    let program = std::env::current_exe().ok()?;
    Some(program.parent()?.file_name()?.to_str()?.to_owned())
}

/// Says when, where and with which compiler this runs.
pub fn taken() -> String {
    let output = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let unknown = || "?".to_owned();
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        processors.lines().find_map(|line| Some(line.strip_prefix("model name")?.split_once(": ")?.1.to_owned()));
    let compiler = output("rustc", &["--version"]).and_then(|told| Some(told.split(' ').nth(1)?.to_owned()));
    format!(
        "{}, {} with {} processors, rustc {}, commit {}",
        output("date", &["+%F"]).unwrap_or_else(unknown),
        model.unwrap_or_else(unknown),
        std::thread::available_parallelism().map_or(0, usize::from),
        compiler.unwrap_or_else(unknown),
        output("git", &["describe", "--always", "--dirty"]).unwrap_or_else(unknown),
    )
}
