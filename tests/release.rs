//! `hack/release.sh` refuses sources that are not ready, and builds the same complete files each time. `hack/publish.sh`
//! pushes and signs them. `hack/sbom.sh` lists the packages of `Cargo.lock`, and `hack/deny.sh` checks them.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The address of the sources in the release.
const ADDRESS: &str = "https://github.com/owner/detour";

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
            format!("# Changelog\n\n## {VERSION} - 2026-01-31\n\n- [A](docs/a.md#b).\n\n## 0.1.0\n\nFirst version.\n");
        fs::write(changelog, section).expect("writable");
        repository.git(&["init", "--quiet"]);
        repository.edit("Cargo.toml", "default-run", &format!("repository = \"{ADDRESS}\"\ndefault-run"));
        repository.edit("manifests/chart/Chart.yaml", "keywords:", &format!("home: {ADDRESS}\nkeywords:"));
        for platform in ["kubernetes", "openshift"] {
            let digest = text(&run(&repository.0, "hack/manifests.sh", &["--digest"]));
            let rendered = format!("manifests/{platform}/rendered.yaml");
            let content = fs::read_to_string(repository.0.join(&rendered)).expect("readable");
            let before = content.lines().find(|line| line.starts_with("# Chart: ")).expect("the chart's digest");
            repository.edit(&rendered, before, &format!("# Chart: {}", digest.trim()));
        }
        repository
    }

    /// Uses the programs that the tests have built.
    fn with_tools(self) -> Self {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
        fs::create_dir(self.0.join("target")).expect("writable");
        symlink(target.join("tools"), self.0.join("target/tools")).expect("a link");
        self
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
        .env("COSIGN_PASSWORD", "throw-away")
        .env_remove("CARGO_TARGET_DIR");
    command.output().unwrap_or_else(|error| panic!("{program}: {error}"))
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// In each row: a file, a text in it, the text in its place, and a part of the error.
const NOT_READY: &str = "\
Cargo.toml | repository = | # repository = | Cargo.toml: repository: missing
manifests/chart/Chart.yaml | home: ADDRESS | home: https://example.com | Chart.yaml: home: expected https://github.com/
Cargo.toml | version = \"VERSION\" | version = \"9.9.9\" | Cargo.toml: version: expected
Cargo.lock | name = \"detour-cni\"\\nversion = \"VERSION\" | name = \"detour-cni\"\\nversion = \"9.9.9\" | Cargo.lock
manifests/chart/Chart.yaml | version: VERSION | version: 9.9.9 | Chart.yaml: version: expected
manifests/chart/Chart.yaml | appVersion: VERSION | appVersion: 9.9.9 | Chart.yaml: appVersion: expected
manifests/openshift/rendered.yaml | detour:VERSION\" | detour:9.9.9\" | tag of the image: expected
manifests/chart/values.yaml | global: | global: # changed | manifests/kubernetes/rendered.yaml: not rendered
CHANGELOG.md | ## VERSION - 2026-01-31 | ## VERSION | CHANGELOG.md: expected a section
CHANGELOG.md | ## VERSION - 2026-01-31 | ## Unreleased\\n\\n## VERSION - 2026-01-31 | \"Unreleased\" found
CHANGELOG.md | - [A](docs/a.md#b).\\n |  | is empty";

#[test]
fn sources_that_are_not_ready_are_refused() {
    let repository = Repository::new("refused");
    assert!(text(&repository.release(&["--check", VERSION])).contains("ready for release"));

    for row in NOT_READY.lines() {
        let row = row.replace("VERSION", VERSION).replace("ADDRESS", ADDRESS).replace("\\n", "\n");
        let [file, before, after, expected] = row.split(" | ").collect::<Vec<_>>()[..] else { panic!("{row}") };
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
    let repository = Repository::new("complete").with_tools();
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
    let notes = format!("- [A]({ADDRESS}/blob/v{VERSION}/docs/a.md#b).\n\n");
    assert_eq!(String::from_utf8_lossy(&first["notes.md"]), notes);
    let packed = text(&run(&directory, "tar", &["-tzf", &expected[3]]));
    assert_eq!(packed, "LICENSE\ndetour\n");
    let krew = String::from_utf8_lossy(&first["detour.yaml"]);
    assert!(krew.contains(&format!("v{VERSION}")) && !krew.contains("VERSION") && !krew.contains("SHA256"), "{krew}");

    // cargo binstall downloads the archives that krew downloads, and finds the program in them.
    let manifest = run(&repository.0, "cargo", &["metadata", "--offline", "--no-deps", "--format-version", "1"]);
    let manifest: Value = serde_json::from_str(&text(&manifest)).expect("JSON");
    let binstall = &manifest["packages"][0]["metadata"]["binstall"];
    for (machine, architecture) in [("x86_64", "amd64"), ("aarch64", "arm64")] {
        let address = binstall["overrides"][format!("{machine}-unknown-linux-musl")]["pkg-url"].as_str();
        let address = address.expect("an address").replace("{ repo }", ADDRESS).replace("{ version }", VERSION);
        let archive = format!("detour-v{VERSION}-linux-{architecture}.tar.gz");
        assert_eq!(address, format!("{ADDRESS}/releases/download/v{VERSION}/{archive}"));
        assert!(names.contains(&archive) && krew.contains(&format!("uri: {address}\n")), "{address}: {krew}");
    }
    assert_eq!((&binstall["pkg-fmt"], &binstall["bin-dir"]), (&"tgz".into(), &"{ bin }".into()));
}

/// A registry on loopback, which ends with the test.
struct Registry(Child, u16);

impl Registry {
    fn start(directory: &Path) -> Self {
        let storage = json!({"filesystem": {"rootdirectory": directory.join("registry")}});
        let file = json!({"version": 0.1, "storage": storage, "http": {"addr": "127.0.0.1:0"}});
        fs::write(directory.join("registry.yaml"), file.to_string()).expect("writable");
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(directory.join("registry.yaml")).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("docker-registry");
        let mut log = BufReader::new(process.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
        let listening = log.find(|line| line.contains("listening on ")).expect("it listens");
        let port = listening.split("listening on 127.0.0.1:").nth(1).and_then(|rest| rest.split('"').next());
        let port = port.and_then(|port| port.parse().ok()).unwrap_or_else(|| panic!("{listening}"));
        // The process ends if nothing reads what it logs.
        thread::spawn(move || log.for_each(drop));
        Self(process, port)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// With a key that only this test knows.
#[test]
fn image_and_chart_are_published_and_signed_by_digest() {
    let repository = Repository::new("published").with_tools();
    let target = repository.0.join("target");
    let tool = |name: &str, arguments: &[&str]| run(&target, &format!("tools/{name}"), arguments);
    let registry = Registry::start(&target);
    let hub = format!("127.0.0.1:{}/mesh", registry.1);
    for name in ["releaser", "other"] {
        text(&tool("cosign", &["generate-key-pair", "--output-key-prefix", name]));
    }
    let key = target.join("releaser.key").display().to_string();
    let directory = target.join(format!("release-{VERSION}-dry-run"));
    let release = directory.display().to_string();

    text(&repository.release(&["--dry-run", "/bin/true", "--hub", &hub, "--sign", &key, VERSION]));
    // Without the image, which a dry run does not build.
    let publish = |key: &str| run(&repository.0, "hack/publish.sh", &["--sign", key, &release]);
    assert!(String::from_utf8_lossy(&publish(&key).stderr).contains("no image; build"));
    let binaries = target.join("binaries");
    fs::create_dir(&binaries).expect("writable");
    fs::copy(env!("CARGO_BIN_EXE_detour"), binaries.join("detour-amd64")).expect("a copy");
    let pack = |label: &str| {
        fs::write(repository.0.join("label"), label).expect("writable");
        repository.commit();
        let image = ["--arch", "amd64", "--binaries", "target/binaries", "--output", "target/image", VERSION];
        text(&run(&repository.0, "hack/image.sh", &image));
        let file = directory.join(format!("detour-v{VERSION}-image.tar"));
        text(&run(&target.join("image"), "tar", &["-cf", &file.display().to_string(), "."]));
    };
    pack("first");
    let published = text(&publish(&key));

    // Both references have digests, and only the releaser's key verifies them.
    let signed: Vec<&str> = published.lines().filter_map(|line| line.split("published and signed ").nth(1)).collect();
    let [image, chart] = signed[..] else { panic!("expected an image and a chart: {published}") };
    for (reference, name) in [(image, format!("{hub}/detour@sha256:")), (chart, format!("{hub}/charts/detour@sha256:"))]
    {
        assert!(reference.starts_with(&name), "{published}");
        let verify = |key: &str| tool("cosign", &["verify", "--key", key, "--insecure-ignore-tlog=true", reference]);
        text(&verify("releaser.pub"));
        assert!(!verify("other.pub").status.success(), "{reference}");
    }
    // The published chart names the published image.
    let chart = format!("oci://{hub}/charts/detour");
    let alerts = ["--set", "prometheusRule.enabled=true"];
    let arguments = ["template", "d", &chart, "--plain-http", "--kube-version", "1.33.0"];
    let rendered = text(&tool("helm", &[&arguments[..], &alerts].concat()));
    let wanted = format!("image: \"{hub}/detour:{VERSION}\"");
    assert!(rendered.contains(&wanted), "{rendered}");
    let runbook = format!("runbook_url: {ADDRESS}/blob/v{VERSION}/docs/alerts.md#");
    assert!(rendered.contains(&runbook), "{rendered}");
    let kubernetes =
        fs::read_to_string(directory.join(format!("detour-v{VERSION}-kubernetes.yaml"))).expect("readable");
    assert!(kubernetes.contains(&wanted) && !kubernetes.contains("registry.invalid"), "{kubernetes}");

    // The same release can be published again, another one of this version can't.
    assert_eq!(text(&publish(&key)), published);
    pack("second");
    let refused = publish(&key);
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && errors.contains("choose a new version"), "{errors}");
    fs::write(directory.join("notes.md"), "Changed.\n").expect("writable");
    let refused = publish(&key);
    assert!(
        !refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("did NOT match"),
        "{refused:?}"
    );
}

/// Programs that record their calls stand for those of GitHub's machine and for the scripts.
#[test]
fn a_tag_publishes_under_the_repositorys_own_name() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("workflow");
    let _ = fs::remove_dir_all(&directory);
    let (bin, hack, calls) = (directory.join("bin"), directory.join("hack"), directory.join("calls"));
    for path in [&bin, &hack] {
        fs::create_dir_all(path).expect("writable");
    }
    let record = format!("echo \"${{0##*/}} $*\" >>{}", calls.display());
    let build = "mkdir -p target/release-1.2.3-rc.1 && touch target/release-1.2.3-rc.1/{notes.md,SHA256SUMS}";
    for (path, body) in [
        (bin.join("sudo"), "[[ $1 != --preserve-env ]] || shift; exec \"$@\"".to_owned()),
        (bin.join("docker"), format!("{record}; cat >>{}", calls.display())),
        (bin.join("gh"), record.clone()),
        (hack.join("release.sh"), format!("{record}; cat \"$4\" >>{}; {build}", calls.display())),
        (hack.join("publish.sh"), record),
    ] {
        fs::write(&path, format!("#!/bin/bash\n{body}\n")).expect("writable");
        fs::set_permissions(path, Permissions::from_mode(0o755)).expect("writable");
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(".github/workflows/release.yaml");
    let workflow: Value = serde_saphyr::from_str(&fs::read_to_string(file).expect("readable")).expect("YAML");
    let step = |name: &str, key: &str| {
        let steps = workflow["jobs"]["publish"]["steps"].as_array().expect("a list");
        let step = steps.iter().find(|step| step["name"] == name).unwrap_or_else(|| panic!("no step {name}"));
        let mut command = Command::new("bash");
        command.args(["-eo", "pipefail", "-c", step["run"].as_str().expect("a script")]).current_dir(&directory);
        command.env("PATH", format!("{}:/usr/bin:/bin", bin.display())).env("HOME", &directory).env("USER", "root");
        command.envs([("GITHUB_REPOSITORY", "Owner/Detour"), ("GITHUB_REPOSITORY_OWNER", "Owner")]);
        command.envs([("GITHUB_REF_NAME", "v1.2.3-rc.1"), ("GITHUB_ACTOR", "someone")]).env("RUNNER_TEMP", &directory);
        for (variable, value) in step["env"].as_object().into_iter().flatten() {
            let value = value.as_str().expect("text").replace("${{ github.token }}", "token\n");
            command.env(variable, value.replace("${{ secrets.COSIGN_PRIVATE_KEY }}", key));
        }
        command.output().expect("bash")
    };
    let refused = step("Build and sign", "");
    assert!(
        !refused.status.success() && String::from_utf8_lossy(&refused.stdout).contains("COSIGN_PRIVATE_KEY: missing")
    );
    for name in ["Build and sign", "Publish image and chart", "Publish files", "Delete the key"] {
        text(&step(name, "the key\n"));
    }
    let key = directory.join("cosign.key");
    assert!(!key.exists());
    let expected = format!(
        "release.sh --hub ghcr.io/owner --sign {key} 1.2.3-rc.1\nthe key\n\
         docker login ghcr.io --username someone --password-stdin\ntoken\n\n\
         publish.sh --sign {key} target/release-1.2.3-rc.1\n\
         gh release create v1.2.3-rc.1 --repo Owner/Detour --verify-tag --title v1.2.3-rc.1 --notes-file notes.md \
         --prerelease -- SHA256SUMS notes.md\n",
        key = key.display()
    );
    assert_eq!(fs::read_to_string(calls).expect("written"), expected);
}

/// A database with one advisory stands for RustSec's.
#[test]
fn packages_are_checked_for_known_vulnerabilities() {
    let repository = Repository::new("packages").with_tools();
    let check = |database: &Path, arguments: &[&str]| {
        let mut command = Command::new("hack/deny.sh");
        command.current_dir(&repository.0).args(arguments).env_remove("CARGO_TARGET_DIR").env("GIT_CONFIG_COUNT", "1");
        command.env("GIT_CONFIG_KEY_0", format!("url.file://{}.insteadOf", database.display()));
        command.env("GIT_CONFIG_VALUE_0", "https://github.com/RustSec/advisory-db");
        let output = command.output().expect("hack/deny.sh");
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        (output.status.success(), text)
    };
    let database = Path::new(env!("CARGO_TARGET_TMPDIR")).join("advisories");
    let _ = fs::remove_dir_all(&database);
    let (success, output) = check(&database, &[]);
    assert!(success && output.contains("known vulnerabilities: NOT checked: can't download"), "{output}");
    let (success, output) = check(&database, &["--online"]);
    assert!(!success && output.contains("known vulnerabilities: NOT checked: can't download"), "{output}");

    fs::create_dir_all(database.join("crates/ring")).expect("writable");
    let advisories = Repository(database.clone());
    let advisory = "```toml\n[advisory]\nid = \"RUSTSEC-2026-9999\"\npackage = \"PACKAGE\"\ndate = \"2026-01-01\"\n\
                    [versions]\npatched = []\n```\n\n# A fault\n\nText.\n";
    let file = "crates/ring/RUSTSEC-2026-9999.md";
    fs::write(database.join(file), advisory.replace("PACKAGE", "absent")).expect("writable");
    advisories.git(&["init", "--quiet", "--initial-branch", "main"]);
    advisories.commit();
    let (success, output) = check(&database, &["--online"]);
    assert!(success && output.contains("advisories ok"), "{output}");
    advisories.edit(file, "absent", "ring");
    let (success, output) = check(&database, &["--online"]);
    assert!(!success && output.contains("RUSTSEC-2026-9999"), "{output}");

    let licenses = "allow = [\"Apache-2.0\", ";
    repository.edit("deny.toml", licenses, "allow = [");
    let (success, output) = check(&database, &["--online"]);
    assert!(!success && output.contains("licenses FAILED"), "{output}");
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
