//! The help texts, and the commands that print what is built in.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::program::Folder;

const COMMANDS: [&str; 8] = ["serve", "check", "explain", "convert", "diff", "replay", "schema", "completions"];

const RULES: &str = "rules: [{name: client, quota: 100 per minute, key: client-ip}]\n";

const LOG: &str = "192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"\n";

/// Runs a line of a shell in which the program is the one that is tested.
fn shell(folder: &Folder, line: &str) -> (Option<i32>, String) {
    let program = Path::new(env!("CARGO_BIN_EXE_tower-ratelimit")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let output = Command::new("sh").args(["-ec", line]).env("PATH", path).current_dir(folder.path()).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn commands_in_the_help_run_as_they_stand() {
    let folder = Folder::with_rules(RULES);
    for (file, content) in [("old.yaml", RULES), ("new.yaml", RULES), ("access.log", LOG)] {
        folder.write(file, content);
    }
    let git = "git init -q -b main . && git add rules.yaml && git -c user.name=a -c user.email=a@b commit -qm a";
    assert_eq!(shell(&folder, git), (Some(0), String::new()));
    let mut count = 0;
    for command in COMMANDS {
        let help = folder.run(&[command, "--help"]);
        assert_eq!((help.code, help.err.as_str()), (Some(0), ""));
        let is_command = |line: &&str| line.starts_with("tower-ratelimit ") || line.contains("| tower-ratelimit ");
        for line in help.out.lines().map(str::trim).filter(is_command) {
            assert_eq!(shell(&folder, line), (Some(0), String::new()), "{line}");
            count += 1;
        }
    }
    assert!(count >= 6, "{count} commands were found");
}

#[test]
fn help_names_every_command() {
    let help = Folder::new().run(&["--help"]).out;
    for command in COMMANDS {
        assert!(help.contains(&format!("\n  {command} ")), "{command}: {help}");
    }
}

#[test]
fn schema_is_that_of_the_library() {
    let folder = Folder::with_rules(RULES);
    let schema = folder.run(&["schema"]);
    assert_eq!(schema.code, Some(0));
    let schema: Value = serde_json::from_str(&schema.out).unwrap();
    assert_eq!(schema, serde_json::from_str::<Value>(tower_ratelimit::rules::SCHEMA).unwrap());
}

#[test]
fn completions_are_scripts_of_their_shells() {
    let folder = Folder::new();
    for (shell, word) in
        [("bash", "complete -F"), ("zsh", "#compdef"), ("fish", "complete -c"), ("powershell", "Register-")]
    {
        let run = folder.run(&["completions", shell]);
        assert_eq!((run.code, run.err.as_str()), (Some(0), ""));
        assert!(run.out.contains(word) && COMMANDS.iter().all(|command| run.out.contains(command)), "{shell}");
    }
    assert_eq!(folder.run(&["completions", "dos"]).code, Some(2));
}
