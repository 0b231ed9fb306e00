//! The release check finds what a release lacks, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The files of a tree that lacks nothing.
const COMPLETE: [(&str, &str); 7] = [
    (
        "Cargo.toml",
        "[workspace.package]\nversion = \"0.1.0\"\nrepository = \"https://github.com/a/b\"\n\n\
         [package]\nname = \"tower-ratelimit\"\nversion.workspace = true\nrepository.workspace = true\n\
         documentation = \"https://docs.rs/tower-ratelimit\"\nreadme = \"README.md\"\n",
    ),
    (
        "cli/Cargo.toml",
        "[package]\nname = \"tower-ratelimit-cli\"\nversion.workspace = true\nrepository.workspace = true\n\
         documentation = \"https://docs.rs/tower-ratelimit\"\nreadme = \"README.md\"\n\n\
         [dependencies]\ntower-ratelimit = { version = \"0.1.0\", path = \"..\" }\n",
    ),
    ("CHANGELOG.md", "## [Unreleased]\n\n## 0.1.0 - 2027-01-31\n\n- all\n\n## [0.0.9] - 2026-12-31\n"),
    ("SECURITY.md", "**Contact:** security@example.org\n"),
    (
        "README.md",
        "See [how](CONTRIBUTING.md#how), `[no](link)` and [the docs][docs].\n\n```sh\n[no](link)\n```\n\n\
         [docs]: https://docs.rs/tower-ratelimit\n",
    ),
    ("cli/README.md", "[The docs](https://docs.rs/tower-ratelimit).\n"),
    ("CONTRIBUTING.md", ""),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs the check. Returns whether nothing is missing, and what it prints.
fn check(folder: &Path) -> (bool, String) {
    let script = root().join("tests/release.sh");
    let output = Command::new("bash").arg(script).arg(folder).output().expect("bash can be run");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let text = String::from_utf8(output.stdout).expect("the check prints text");
    assert!(matches!(output.status.code(), Some(0 | 1)), "{:?}: {text}", output.status);
    (output.status.success(), text)
}

/// A folder with the files of such a tree.
struct Tree(PathBuf);

impl Tree {
    fn new() -> Self {
        let tree = Self(std::env::temp_dir().join(format!("tower-ratelimit-release-{}", std::process::id())));
        COMPLETE.iter().for_each(|(file, text)| tree.write(file, text));
        tree
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).expect("the file is text")
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        fs::create_dir_all(path.parent().expect("it is in a folder")).expect("a folder can be made");
        fs::write(path, text).expect("a file can be written");
    }

    /// Asserts that the check finds a change, and undoes the change.
    fn lacks(&self, file: &str, from: &str, to: &str, expected: &str) {
        let before = self.read(file);
        assert!(before.contains(from), "{file} has no {from:?}");
        self.write(file, &before.replacen(from, to, 1));
        let (is_complete, text) = check(&self.0);
        assert!(!is_complete && text.contains(expected), "{file} without {from:?}: {text}");
        self.write(file, &before);
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0); // it is a temporary one
    }
}

#[test]
fn release_check_finds_each_thing_that_is_missing() {
    let tree = Tree::new();
    let (is_complete, text) = check(&tree.0);
    assert!(is_complete, "{text}");
    assert_eq!(text, "Nothing is missing for the release of 0.1.0.\n");

    tree.lacks("Cargo.toml", "repository = \"https://github.com/a/b\"\n", "", "repository of tower-ratelimit:");
    tree.lacks("Cargo.toml", "https://github.com/", "https://git.example/", "a target of the link CONTRIBUTING.md");
    tree.lacks("Cargo.toml", "version = \"0.1.0\"", "version = \"0.1\"", "a version of three numbers");
    tree.lacks("Cargo.toml", "\ndocumentation = ", "\nx = ", "documentation or homepage of tower-ratelimit,");
    tree.lacks("cli/Cargo.toml", "\ndocumentation = ", "\nx = ", "documentation or homepage of tower-ratelimit-cli,");
    tree.lacks("cli/Cargo.toml", "repository.workspace = true\n", "", "repository of tower-ratelimit-cli:");
    tree.lacks("cli/Cargo.toml", "version = \"0.1.0\", path", "version = \"0.0.9\", path", "needs the library 0.0.9");
    tree.lacks("CHANGELOG.md", "2027-01-31", "soon", "a heading '## 0.1.0 - YYYY-MM-DD'");
    tree.lacks("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n- news\n", "under [Unreleased]");
    tree.lacks("SECURITY.md", "security@example.org", "", "an address after **Contact:**");
    tree.lacks("README.md", "CONTRIBUTING.md", "CONTRIBUTE.md", "CONTRIBUTE.md#how, to which ./README.md links");
    tree.lacks("cli/README.md", "https://docs.rs/tower-ratelimit", "../no", "../no, to which cli/README.md links");
}

/// Until a release is made, it lacks what only the one who makes it knows.
#[test]
fn release_check_runs_on_this_tree() {
    let (is_complete, text) = check(root());
    let line = |line: &str| line.starts_with("missing: ") || line.starts_with("Nothing is missing");
    assert!(!text.is_empty() && text.lines().all(line), "{text}");
    assert_eq!(is_complete, text.starts_with("Nothing"), "{text}");
}
