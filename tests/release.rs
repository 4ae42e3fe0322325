//! `hack/release.sh` refuses sources that are not ready, and builds the same complete files each time. `hack/sbom.sh`
//! lists the packages of `Cargo.lock`.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A git repository with the files of this one, committed, and a changelog for the release.
struct Repository(PathBuf);

impl Repository {
    fn new(name: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("release-{name}"));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).expect("writable");
        // Its own repository, because this directory may belong to another user, or may not be a repository.
        let index = format!("--git-dir={}", directory.join("index").display());
        text(&run(source, "git", &["init", "--quiet", "--bare", &directory.join("index").display().to_string()]));
        let tree = format!("--work-tree={}", source.display());
        let listed = run(source, "git", &[&index, &tree, "ls-files", "--others", "--exclude-standard"]);
        fs::remove_dir_all(directory.join("index")).expect("writable");
        for file in text(&listed).lines().filter(|file| source.join(file).is_file()) {
            let copy = directory.join(file);
            fs::create_dir_all(copy.parent().expect("below the directory")).expect("writable");
            fs::copy(source.join(file), copy).expect("a copy");
        }
        let repository = Self(directory);
        let changelog = repository.0.join("CHANGELOG.md");
        let section =
            format!("# Changelog\n\n## {VERSION} - 2026-01-31\n\n- A change.\n\n## 0.1.0\n\nFirst version.\n");
        fs::write(changelog, section).expect("writable");
        repository.git(&["init", "--quiet"]);
        repository.commit();
        repository
    }

    fn git(&self, arguments: &[&str]) {
        let who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"];
        let output = run(&self.0, "git", &[&who, arguments].concat());
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    fn commit(&self) {
        self.git(&["add", "--all"]);
        self.git(&["commit", "--quiet", "--message", "Change"]);
    }

    fn release(&self, arguments: &[&str]) -> Output {
        run(&self.0, "hack/release.sh", arguments)
    }

    /// Replaces a text in a file and commits.
    fn edit(&self, file: &str, before: &str, after: &str) {
        let path = self.0.join(file);
        let content = fs::read_to_string(&path).expect("readable");
        assert!(content.contains(before), "{file} does not contain {before:?}");
        fs::write(path, content.replacen(before, after, 1)).expect("writable");
        self.commit();
    }
}

fn run(directory: &Path, program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command
        .current_dir(directory)
        .args(arguments)
        .env("SOURCE_DATE_EPOCH", "1767225600")
        .env_remove("CARGO_TARGET_DIR");
    command.output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

#[test]
fn sources_that_are_not_ready_are_refused() {
    let repository = Repository::new("refused");
    assert!(text(&repository.release(&["--check", VERSION])).contains("ready for release"));

    let (chart, version) = ("manifests/chart/Chart.yaml", format!("version: {VERSION}"));
    let (quoted, section) = (format!("version = \"{VERSION}\""), format!("## {VERSION} - 2026-01-31"));
    let cases: [(&str, &str, &str, &str); 9] = [
        ("Cargo.toml", &quoted, "version = \"9.9.9\"", "Cargo.toml: version: expected"),
        (
            "Cargo.lock",
            &format!("name = \"detour-cni\"\n{quoted}"),
            "name = \"detour-cni\"\nversion = \"9.9.9\"",
            "Cargo.lock",
        ),
        (chart, &version, "version: 9.9.9", "Chart.yaml: version: expected"),
        (chart, &format!("appVersion: {VERSION}"), "appVersion: 9.9.9", "Chart.yaml: appVersion: expected"),
        (
            "manifests/openshift/rendered.yaml",
            &format!("detour:{VERSION}\""),
            "detour:9.9.9\"",
            "tag of the image: expected",
        ),
        ("manifests/chart/values.yaml", "global:", "global: ", "manifests/kubernetes/rendered.yaml: not rendered"),
        ("CHANGELOG.md", &section, &format!("## {VERSION}"), "CHANGELOG.md: expected a section"),
        ("CHANGELOG.md", &section, &format!("## Unreleased\n\n{section}"), "\"Unreleased\" found"),
        ("CHANGELOG.md", "- A change.\n", "", "is empty"),
    ];
    for (file, before, after, expected) in cases {
        repository.edit(file, before, after);
        let output = repository.release(&[VERSION]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(expected), "{file}: {errors}");
        repository.git(&["reset", "--quiet", "--hard", "HEAD~1"]);
    }

    fs::write(repository.0.join("new"), "").expect("writable");
    let errors = repository.release(&["--check", VERSION]).stderr;
    assert!(String::from_utf8_lossy(&errors).contains("working tree has changes"), "{errors:?}");
    repository.git(&["tag", &format!("v{VERSION}")]);
    repository.commit();
    let errors = repository.release(&["--check", VERSION]).stderr;
    assert!(String::from_utf8_lossy(&errors).contains("another commit"), "{errors:?}");
    for wrong in ["v1", "", "1.2"] {
        assert!(!repository.release(&["--check", wrong]).status.success(), "{wrong:?}");
    }
}

/// Returns the content of each file in a directory.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let read = entries.map(|entry| {
        let entry = entry.expect("readable");
        (entry.file_name().into_string().expect("text"), fs::read(entry.path()).expect("readable"))
    });
    read.collect()
}

#[test]
fn a_release_is_complete_and_reproducible() {
    let repository = Repository::new("complete");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
    fs::create_dir(repository.0.join("target")).expect("writable");
    symlink(target.join("tools"), repository.0.join("target/tools")).expect("a link");
    let directory = repository.0.join(format!("target/release-{VERSION}-dry-run"));

    let arguments = ["--dry-run", "/bin/true", VERSION];
    let listed = text(&repository.release(&arguments));
    let first = files(&directory);
    text(&repository.release(&arguments));
    let second = files(&directory);
    for (name, content) in &first {
        assert!(second.get(name) == Some(content), "{name} differs between two runs");
        assert!(listed.contains(name.as_str()), "{name} is not in the list: {listed}");
    }

    let names: Vec<String> = first.keys().cloned().collect();
    let expected = [
        "SHA256SUMS".to_owned(),
        format!("detour-{VERSION}.tgz"),
        format!("detour-v{VERSION}-kubernetes.yaml"),
        format!("detour-v{VERSION}-linux-amd64.tar.gz"),
        format!("detour-v{VERSION}-linux-arm64.tar.gz"),
        format!("detour-v{VERSION}-openshift.yaml"),
        format!("detour-v{VERSION}-sbom.cdx.json"),
        "detour.yaml".to_owned(),
        "notes.md".to_owned(),
    ];
    assert_eq!(names, expected);
    let sums = text(&run(&directory, "sha256sum", &["--check", "SHA256SUMS"]));
    assert_eq!(sums.lines().count(), names.len() - 1, "every file but SHA256SUMS itself");
    assert_eq!(first["notes.md"], b"- A change.\n\n");
    let packed = text(&run(&directory, "tar", &["-tzf", &expected[3]]));
    assert_eq!(packed, "LICENSE\ndetour\n");
    let krew = String::from_utf8_lossy(&first["detour.yaml"]);
    assert!(krew.contains(&format!("v{VERSION}")) && !krew.contains("VERSION") && !krew.contains("SHA256"), "{krew}");
}

/// Returns the name, version and checksum of each package in `Cargo.lock`; the crate itself has no checksum.
fn locked() -> BTreeSet<(String, String, Option<String>)> {
    let lock = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock")).expect("readable");
    let packages = lock.split("[[package]]\n").skip(1).map(|package| {
        let value = |key: &str| {
            let mut lines = package.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
            lines.next().map(|value| value.trim_end_matches('"').to_owned())
        };
        (value("name").expect("a name"), value("version").expect("a version"), value("checksum"))
    });
    packages.collect()
}

#[test]
fn the_sbom_lists_exactly_the_packages_of_cargo_lock() {
    let output = run(Path::new(env!("CARGO_MANIFEST_DIR")), "hack/sbom.sh", &[]);
    let sbom: Value = serde_json::from_str(&text(&output)).expect("JSON");
    let components = sbom["components"].as_array().expect("a list");
    let string = |value: &Value| value.as_str().map(str::to_owned);
    let of = |component: &Value| {
        let checksum = string(&component["hashes"][0]["content"]);
        (string(&component["name"]).expect("text"), string(&component["version"]).expect("text"), checksum)
    };
    let program = of(&sbom["metadata"]["component"]);
    let listed: BTreeSet<_> = components.iter().map(of).chain([program]).collect();
    assert_eq!(listed, locked());
    assert_eq!(listed.len(), components.len() + 1, "no package is listed twice");

    let uses: BTreeMap<&str, (&str, &str)> = components
        .iter()
        .map(|component| {
            assert!(!component["licenses"].as_array().expect("a list").is_empty(), "{component}");
            let [name, used, scope] = [&component["name"], &component["properties"][0]["value"], &component["scope"]]
                .map(|value| value.as_str().expect("text"));
            (name, (used, scope))
        })
        .collect();
    for (name, expected) in [
        ("kube", ("linked", "required")),
        ("dlmalloc", ("linked", "required")),
        ("clap_derive", ("build", "excluded")),
        ("cc", ("build", "excluded")),
        ("proptest", ("other", "excluded")),
        ("rcgen", ("other", "excluded")),
        ("windows-sys", ("other", "excluded")),
    ] {
        assert_eq!(uses.get(name), Some(&expected), "{name}");
    }
    let nodes = sbom["dependencies"].as_array().expect("a list");
    let refs: BTreeSet<_> = nodes.iter().map(|node| node["ref"].as_str()).collect();
    assert_eq!(refs.len(), listed.len());
    for needed in nodes.iter().flat_map(|node| node["dependsOn"].as_array().expect("a list")) {
        assert!(refs.contains(&needed.as_str()), "{needed} has no entry");
    }
}
