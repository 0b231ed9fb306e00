//! Logs of several files, compressed or not, and logs of which too much cannot be used.

use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;

use crate::{Folder, error, json, log, run_with};

const QUOTA: [&str; 2] = ["--quota", "20 per minute"];

fn gzip(content: impl AsRef<[u8]>) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(content.as_ref()).unwrap();
    gzip.finish().unwrap()
}

/// Writes the files of a log as logrotate names them: the newest has no number, and older ones are compressed. Returns
/// their names as a shell sorts them.
fn rotate(folder: &Folder, files: &[String]) -> Vec<String> {
    let names = files.iter().rev().enumerate().map(|(age, content)| match age {
        0 => folder.file("access.log", content),
        1 => folder.file("access.log.1", content),
        _ => folder.file(&format!("access.log.{age}.gz"), gzip(content)),
    });
    names.collect()
}

fn with<'a>(args: &[&'a str], files: &'a [String]) -> Vec<&'a str> {
    args.iter().copied().chain(files.iter().map(String::as_str)).collect()
}

/// Returns a report without the list of files.
fn without_files(mut report: Value) -> Value {
    report["read"].as_object_mut().unwrap().remove("files").unwrap();
    report
}

#[test]
fn rotated_log_has_the_report_of_the_whole_one() {
    let folder = Folder::new("rotated");
    let (whole, files) = log::rotated();
    let whole = json(&[QUOTA[0], QUOTA[1], &folder.file("whole.log", whole)]);
    let days =
        (whole["read"]["last_us"].as_u64().unwrap() - whole["read"]["first_us"].as_u64().unwrap()) / 86_400_000_000;
    assert_eq!(days, log::DAYS - 1);
    assert!(whole["policies"][0]["refused"].as_u64().unwrap() > 300);
    let whole = without_files(whole);
    let mut names = rotate(&folder, &files);
    assert_eq!(names.len(), log::FILES);
    for _ in 0..2 {
        let report = json(&with(&QUOTA, &names));
        let listed: Vec<&str> =
            report["read"]["files"].as_array().unwrap().iter().map(|file| file["name"].as_str().unwrap()).collect();
        assert!(listed[0].ends_with("access.log.8.gz") && listed[8].ends_with("access.log"), "{listed:?}");
        assert_eq!(without_files(report), whole);
        names.reverse();
    }
}

#[test]
fn files_of_several_servers_are_merged() {
    let folder = Folder::new("servers");
    let (whole, _) = log::rotated();
    let mut servers = vec![String::new(); 3];
    for (at, line) in whole.split_inclusive('\n').enumerate() {
        servers[at * at % 3] += line; // the third has no line
    }
    let whole = json(&[QUOTA[0], QUOTA[1], &folder.file("whole.log", &whole)]);
    let files: Vec<String> =
        servers.iter().enumerate().map(|(at, content)| folder.file(&format!("server-{at}.log"), content)).collect();
    let merged = json(&with(&QUOTA, &files));
    for name in ["requests", "late", "unreadable", "first_us", "last_us", "addresses"] {
        assert_eq!(merged["read"][name], whole["read"][name], "{name}");
    }
    // Requests of the same second may change places.
    assert_eq!(merged["policies"][0]["refused"], whole["policies"][0]["refused"]);
}

#[test]
fn concatenated_files_in_wrong_order_are_no_log() {
    let (_, files) = log::rotated();
    let newest_first: String = files.iter().rev().map(String::as_str).collect();
    let text = error(&[&QUOTA[..], &["-"]].concat(), newest_first.as_bytes());
    for part in ["5,872 of 6,600 lines (89.0%)", "out of order", "Name all files of a rotated log", "--window"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // So is a file that somebody concatenated, with any output, and it leaves no report behind.
    let folder = Folder::new("concatenated");
    let (file, html) = (folder.file("access.log", newest_first), folder.0.join("report.html"));
    for options in [&["--json"][..], &["--html", html.to_str().unwrap()]] {
        error(&[&QUOTA[..], options, &[&file]].concat(), b"");
    }
    assert!(!html.exists());
}

#[test]
fn log_with_more_than_a_tenth_left_out_is_refused() {
    let folder = Folder::new("tenth");
    let good = "192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"\n";
    let late = good.replace("10:05:03", "10:03:03");
    for bad in ["nothing\n", &late] {
        let report = json(&[QUOTA[0], QUOTA[1], &folder.file("a.log", good.repeat(90) + &bad.repeat(10))]);
        assert_eq!(report["read"]["requests"], 90);
        let text = error(&[QUOTA[0], QUOTA[1], &folder.file("b.log", good.repeat(90) + &bad.repeat(11))], b"");
        assert!(text.contains("11 of 101 lines (10.9%) had to be left out"), "{text}");
    }
    // The error names the files with such lines.
    let files = [folder.file("c.log", good.repeat(50)), folder.file("d.log", good.repeat(40) + &"?\n".repeat(20))];
    let text = error(&with(&QUOTA, &files), b"");
    assert!(text.contains("d.log: 20 of 60 lines") && !text.contains("c.log"), "{text}");
    assert!(text.contains("not of the format COMBINED") && text.contains("The first is: ?"), "{text}");
}

#[test]
fn log_of_few_lines_a_month_is_read_whole() {
    let folder = Folder::new("sparse");
    let days: Vec<String> = ["Jan", "Feb", "Mar", "Apr", "May", "Jun"]
        .iter()
        .flat_map(|month| (1..28).step_by(2).map(move |day| format!("{day:02}/{month}")))
        .collect();
    let log: String = days
        .iter()
        .map(|day| format!("192.0.2.1 - - [{day}/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"\n"))
        .collect();
    let report = json(&[QUOTA[0], QUOTA[1], &folder.file("access.log", log)]);
    assert_eq!((&report["read"]["requests"], &report["read"]["late"]), (&84.into(), &0.into()));
}

#[test]
fn log_of_many_years_is_refused() {
    let folder = Folder::new("years");
    let log = |years: std::ops::Range<u64>| -> String {
        let line = |year| format!("192.0.2.1 - - [17/May/{year}:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1\n").repeat(10);
        years.map(line).collect()
    };
    let report = json(&[QUOTA[0], QUOTA[1], &folder.file("a.log", log(2005..2017))]);
    assert_eq!(report["read"]["requests"], 120);
    let text = error(&[QUOTA[0], QUOTA[1], &folder.file("b.log", log(2005..2018))], b"");
    assert!(text.contains("from 2005-05-17 10:05:03 to 2017-05-17 10:05:03") && text.contains("11 years"), "{text}");
}

#[test]
fn left_out_lines_are_counted_for_each_file() {
    let folder = Folder::new("counted");
    let (_, files) = log::rotated();
    let mut names = rotate(&folder, &files);
    names[3] = folder.file("access.log.3.gz", gzip(format!("{}no line\n\0\n", files[5])));
    let report = json(&with(&QUOTA, &names));
    let counts: Vec<u64> =
        report["read"]["files"].as_array().unwrap().iter().map(|file| file["unreadable"].as_u64().unwrap()).collect();
    assert_eq!(counts, [0, 0, 0, 0, 0, 2, 0, 0, 0]);
    let text = String::from_utf8(run_with(&with(&QUOTA, &names), b"").stdout).unwrap();
    assert!(text.contains("files      9, in the order of their times\n"), "{text}");
    assert!(text.contains("access.log.3.gz: 736 lines, 2 not read\n"), "{text}");
}

#[test]
fn gzip_is_read_by_its_content() {
    let folder = Folder::new("gzip");
    let (whole, files) = log::rotated();
    let expected = without_files(json(&[QUOTA[0], QUOTA[1], &folder.file("whole.log", &whole)]));
    let members: Vec<u8> = files.iter().flat_map(gzip).collect();
    for file in
        [folder.file("members.gz", &members), folder.file("plain.gz", &whole), folder.file("gzip.log", gzip(&whole))]
    {
        assert_eq!(without_files(json(&[QUOTA[0], QUOTA[1], &file])), expected, "{file}");
    }
    let output = run_with(&[QUOTA[0], QUOTA[1], "--json", "-"], &members);
    assert_eq!(without_files(serde_json::from_slice(&output.stdout).unwrap()), expected);
}

#[test]
fn damaged_gzip_is_an_error_with_its_place() {
    let folder = Folder::new("damaged");
    let (whole, files) = log::rotated();
    let newest = folder.file("access.log", &files[8]);
    let good = gzip(&whole);
    let (half, mut flipped, mut checksum) = (good.len() / 2, good.clone(), good.clone());
    flipped[half..half + 40].fill(0xff);
    *checksum.last_mut().unwrap() ^= 1;
    let place = format!("ends too early, at byte {half} of the file");
    for (content, expected) in [
        (&good[..half], &*place),
        (&good[..5], "ends too early, at byte 5 of"),
        (&flipped, "is damaged"),
        (&checksum, "is damaged"),
        (&[&good[..], b"garbage that is no member"].concat(), "is damaged"),
        (&gzip(&good), "compressed by gzip twice"),
        (b"\x1f\x8b\xff\xff", "gzip data"),
    ] {
        let file = folder.file("access.log.2.gz", content);
        let text = error(&[QUOTA[0], QUOTA[1], &newest, &file], b"");
        assert!(text.contains("access.log.2.gz: ") && text.contains(expected), "{expected}: {text}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn gzip_bomb_stays_within_memory() {
    let folder = Folder::new("bomb");
    let (whole, _) = log::rotated();
    for (byte, unreadable) in [(b'a', 1), (b'\n', 0)] {
        // 128 MiB, which are less than 150 KB, and 110 MB of memory, of which the empty tables need 85.
        let bomb = gzip(vec![byte; 8 << 20]).repeat(16);
        let file = folder.file("access.log.gz", [gzip(&whole), bomb].concat());
        let output = std::process::Command::new("bash")
            .args(["-c", "ulimit -d 110000; exec \"$@\"", "bash", env!("CARGO_BIN_EXE_tower-ratelimit"), "replay"])
            .args(QUOTA)
            .args(["--json", "--max-clients", "1000", &file])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let read = &serde_json::from_slice::<Value>(&output.stdout).unwrap()["read"];
        assert_eq!((&read["unreadable"], &read["too_long"]), (&unreadable.into(), &unreadable.into()));
    }
}

#[test]
fn odd_files_beside_a_log_are_reported() {
    let folder = Folder::new("odd-files");
    let (_, files) = log::rotated();
    let mut names = rotate(&folder, &files);
    let expected = json(&with(&QUOTA, &names));
    let fails = |file: &str, expected: &str| {
        let args = with(&QUOTA, &names);
        for args in [[&args[..], &[file]].concat(), [&[file], &args[..]].concat()] {
            let text = error(&args, b"");
            assert!(text.contains(expected) && !text.contains("panicked"), "{file}: {text}");
        }
    };
    let binary: Vec<u8> = (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fails(&folder.file("binary", binary), "binary: none of its");
    fails(
        &folder.file("error.log", "[error] 1#1: *1 open() failed\n".repeat(3)),
        "error.log: none of its 3 lines could be read as COMBINED",
    );
    fails(&folder.0.join("gone").to_string_lossy(), "gone: No such file");
    fails(folder.0.to_str().unwrap(), "it is a folder");
    fails(&names[4], "begin with the same lines: name each log only once");
    fails(&folder.file("copy.log", &files[4]), "begin with the same lines: name each log only once");
    fails(&folder.file("access.log.9.zst", b"\x28\xb5\x2f\xfd\0\0"), "access.log.9.zst: it is compressed by zstd");
    #[cfg(target_os = "linux")]
    fails("/proc/self/mem", "/proc/self/mem: ");
    for empty in ["", "\n\n", "# a comment\n"] {
        names.push(folder.file(&format!("empty-{}", names.len()), empty));
    }
    names.push(folder.file("empty.gz", gzip("")));
    assert_eq!(without_files(json(&with(&QUOTA, &names))), without_files(expected));
    let text = error(&with(&QUOTA, &names[9..]), b"");
    assert!(text.contains("all logs are empty"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn pipes_are_read_once() {
    let folder = Folder::new("pipes");
    let (_, files) = log::rotated();
    let names = rotate(&folder, &files);
    let expected = without_files(json(&with(&QUOTA, &names)));
    let script = format!(
        "exec {} replay --quota \"$1\" --json \"${{@:4}}\" <(cat \"$2\") <(zcat \"$3\")",
        env!("CARGO_BIN_EXE_tower-ratelimit")
    );
    let output = std::process::Command::new("bash")
        .args(["-c", &script, "bash", QUOTA[1], &names[0], &names[5]])
        .args(names[1..5].iter().chain(&names[6..]))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(without_files(serde_json::from_slice(&output.stdout).unwrap()), expected);
}

#[test]
fn name_of_a_file_is_no_terminal_command() {
    let folder = Folder::new("names");
    let (_, files) = log::rotated();
    let odd = "a\u{1b}[2J\u{202e}<img src=x>.log";
    let names = [folder.file(odd, format!("{}?\n", files[1])), folder.file("b.log", &files[0])];
    let html = folder.file("report.html", "");
    let text = String::from_utf8(run_with(&with(&["--quota", "20/min", "--html", &html], &names), b"").stdout).unwrap();
    let page = fs::read_to_string(&html).unwrap();
    let failed = error(&with(&["--quota", "20/min"], &[names[0].clone(), names[0].clone()]), b"");
    for shown in [&text, &page, &failed] {
        assert!(shown.contains("\\u{1b}[2J\\u{202e}") && !shown.contains(['\u{1b}', '\u{202e}']), "{shown}");
    }
    assert!(!page.contains("<img"));
}
