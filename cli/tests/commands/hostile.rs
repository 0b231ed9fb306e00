//! Hostile files, arguments and readers.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::process::Stdio;

use crate::program::{Folder, Run};

fn check(content: impl AsRef<[u8]>) -> Run {
    let folder = Folder::new();
    folder.write("rules.yaml", content);
    let check = folder.run(&["check", "rules.yaml"]);
    let explained = folder.run(&["explain", "rules.yaml"]);
    assert_eq!(check.code, explained.code, "{} {}", check.out, explained.err);
    assert_eq!(folder.run(&["convert", "rules.yaml"]).code, Some(1), "it has Envoy's form in no case");
    check
}

/// In text they are replaced, and in JSON they are escaped, so that a reader gets what was there.
#[test]
fn text_of_a_file_neither_turns_nor_moves_that_of_the_terminal() {
    let is_harmful =
        |c: char| c.is_control() && c != '\n' || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let folder = Folder::with_rules(
        "rules: [{name: a, quota: 5/s, key: \"k\\u202e\"}, {name: b, quota: 5/s, key: global, match: {user-agent: \"u\\u202e\"}}]",
    );
    folder.write(
        "envoy.yaml",
        "{domain: \"d\\u202e\", descriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1, name: \"n\\u202e\"}}]}",
    );
    for arguments in [
        &["check", "rules.yaml"][..],
        &["explain", "rules.yaml"],
        &["explain", "rules.yaml", "--key", "k\u{202e}=\u{85}\u{202e}"],
        &["convert", "envoy.yaml"],
        &["check", "--json", "rules.yaml"],
        &["explain", "--json", "rules.yaml", "--key", "k\u{202e}=\u{85}\u{202e}"],
    ] {
        let run = folder.run(arguments);
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(!run.out.contains(is_harmful), "{run:?}");
    }
    let json = folder.run(&["explain", "--json", "rules.yaml", "--key", "k\u{202e}=\u{85}\u{202e}"]).out;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["explanation"]["rules"][1]["expected"], "u\u{202e}");
}

#[test]
fn file_that_is_too_large_is_refused() {
    let comments = "# a comment that says nothing\n".repeat(350_000);
    assert!(comments.len() > 10_000_000);
    let run = check(&comments);
    assert_eq!((run.code, run.out.as_str()), (Some(1), "rules.yaml:1:1: the file has more than 1048576 bytes\n"));
}

#[test]
fn binary_file_is_refused() {
    for content in [&b"\0\0\0\0"[..], b"\x7fELF\x02\x01\x01", b"\xff\xfe\0a", b"rules: []\x1b[2J", b"\x1f\x8b\x08\0"] {
        let run = check(content);
        assert_eq!(run.code, Some(1), "{run:?}");
        assert!(!run.out.contains(|c: char| c.is_control() && c != '\n'), "{run:?}");
    }
    assert_eq!(check("").code, Some(1));
}

#[test]
fn deep_nesting_and_alias_bombs_are_refused() {
    let deep = "[".repeat(100_000);
    let indented = (0..700).fold(String::new(), |mut text, at| {
        writeln!(text, "{}a:", " ".repeat(at)).unwrap();
        text
    });
    let bomb = (1..20).fold("a0: &a0 [x, x]\n".to_owned(), |mut text, at| {
        writeln!(text, "a{at}: &a{at} [{}]", format!("*a{},", at - 1).repeat(10)).unwrap();
        text
    });
    for content in [deep, indented, bomb, "{".repeat(1 << 20), "- ".repeat(500_000), "? ".repeat(500_000)] {
        let run = check(&content);
        assert_eq!(run.code, Some(1), "{}", run.out);
        assert!(run.out.len() < 10_000);
    }
}

#[test]
fn path_that_is_no_file_is_refused() {
    let folder = Folder::new();
    fs::create_dir(folder.path().join("folder")).unwrap();
    let mut names = vec!["folder", "gone", "folder/gone", ""];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("loop", folder.path().join("loop")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("link")).unwrap();
        names.extend(["loop", "link", "folder\u{1b}[2J"]);
    }
    for name in names {
        for command in ["check", "explain", "convert"] {
            let run = folder.run(&[command, name]);
            assert_eq!((run.code, run.out.as_str()), (Some(2), ""), "{name}");
            assert!(run.err.starts_with("error: ") && !run.err.contains('\u{1b}'), "{}", run.err);
        }
    }
}

#[cfg(unix)]
#[test]
fn file_without_the_right_to_read_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::with_rules("rules: []");
    let file = folder.path().join("rules.yaml");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
    let may_read = fs::File::open(&file).is_ok(); // root may
    let run = folder.run(&["check", "rules.yaml"]);
    assert_eq!(run.code, Some(if may_read { 0 } else { 2 }), "{run:?}");
}

/// They never end.
#[cfg(target_os = "linux")]
#[test]
fn endless_files_are_not_read_to_their_end() {
    let folder = Folder::new();
    for file in ["/dev/zero", "/dev/urandom"] {
        assert_eq!(folder.run(&["check", file]).code, Some(1), "{file}");
    }
}

#[cfg(unix)]
#[test]
fn arguments_that_are_not_utf8_are_files_or_errors() {
    use std::os::unix::ffi::OsStringExt;
    let odd = || OsString::from_vec(b"r\xff.yaml".to_vec());
    let folder = Folder::with_rules("rules: []");
    for option in ["--path", "--header", "--key", "--method", "--client", "--bogus", ""] {
        let run = folder.run(&["explain".into(), "rules.yaml".into(), OsString::from(option), odd()]);
        assert_eq!(run.code, Some(2), "{option}: {run:?}");
    }
    assert_eq!(folder.run(&[odd()]).code, Some(2));
    fs::write(folder.path().join(odd()), "rules: {}").unwrap();
    let run = folder.run(&["check".into(), odd()]);
    assert_eq!(run.code, Some(1));
    assert!(run.out.starts_with("r\u{fffd}.yaml:1:8: "), "{run:?}");
}

#[test]
fn reader_that_has_gone_changes_no_exit_code() {
    let folder = Folder::with_rules(&format!("rules:\n{}", "- {}\n".repeat(50)));
    for arguments in [&["check", "rules.yaml"][..], &["check", "--json", "rules.yaml"], &["--help"]] {
        let mut child = folder.command().args(arguments).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(if arguments[0] == "check" { 1 } else { 0 }), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_trouble() {
    let folder = Folder::with_rules("rules: {}");
    let full = fs::File::create("/dev/full").unwrap();
    let child = folder.command().args(["check", "rules.yaml"]).stdout(Stdio::from(full)).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: the output cannot be written: "));
}
