//! What the documents say of the code is so: names, numbers, versions, links and commands.

use detour_cni::cni::Code;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

#[test]
fn every_error_code_is_in_the_table() {
    let text = read("conf/README.md");
    let (_, table) = text.split_once("## Error codes").expect("a section");
    for (code, name) in Code::NAMES {
        let row = format!("\n| {} | `{}` |", code.number(), name);
        assert!(table.contains(&row), "{code:?} is not in the table");
    }
}

/// Adds the files of a directory, as paths within `root`.
fn files(root: &Path, directory: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            files(root, &path, found);
        } else {
            found.insert(path.strip_prefix(root).expect("below src").to_str().expect("text").to_owned());
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the paths of the documents: all Markdown except recorded output.
fn documents() -> BTreeSet<String> {
    let mut found: BTreeSet<String> = BTreeSet::new();
    for entry in std::fs::read_dir(root()).expect("readable") {
        let name = entry.expect("readable").file_name().into_string().expect("text");
        match name.as_str() {
            "conf" | "docs" | "manifests" | "src" | "examples" | "hack" => {
                files(root(), &root().join(&name), &mut found);
            }
            name if name.ends_with(".md") => drop(found.insert(name.to_owned())),
            _ => {}
        }
    }
    found.retain(|path| path.ends_with(".md"));
    assert!(found.contains("README.md") && found.contains("docs/README.md"), "{found:?}");
    found
}

/// Returns the lines outside of blocks of code, and those in blocks of shell commands.
fn lines(text: &str) -> (Vec<&str>, Vec<&str>) {
    let (mut prose, mut commands, mut block) = (Vec::new(), Vec::new(), None);
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), block) {
            (Some(_), Some(_)) => block = None,
            (Some(language), None) => block = Some(language),
            (None, Some("sh")) => commands.push(line.trim_start()),
            (None, Some(_)) => {}
            (None, None) => prose.push(line),
        }
    }
    (prose, commands)
}

/// Returns the anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let (prose, _) = lines(text);
    let headings = prose.into_iter().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#'));
    let anchor = |heading: &str| -> String {
        let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut broken = Vec::new();
    let mut linked = BTreeSet::new();
    let documents = documents();
    for document in &documents {
        let text = read(document);
        for line in lines(&text).0 {
            for link in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                if link.starts_with("https://") || link.contains("://") {
                    continue;
                }
                let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
                let target = match path {
                    "" => root().join(document),
                    path => root().join(document).parent().expect("a directory").join(path),
                };
                let Ok(target) = target.canonicalize() else {
                    broken.push(format!("{document}: {link}"));
                    continue;
                };
                linked.insert(target.clone());
                let is_page = target.extension().is_some_and(|extension| extension == "md");
                if !anchor.is_empty() && is_page {
                    let page = std::fs::read_to_string(&target).expect("readable");
                    if !anchors(&page).contains(anchor) {
                        broken.push(format!("{document}: {link}: no such heading"));
                    }
                }
            }
        }
    }
    assert_eq!(broken, [""; 0]);
    let pages = documents.iter().filter(|page| !linked.contains(&root().join(page).canonicalize().expect("a file")));
    assert_eq!(pages.collect::<Vec<_>>(), ["README.md"; 0], "no page links to these");
}

/// The most lines and words of all documents together. Change them only with a reason.
const MAX_LINES: usize = 3300;
const MAX_WORDS: usize = 32_000;

#[test]
fn the_documents_are_short() {
    let texts: BTreeMap<String, String> = documents().into_iter().map(|path| (path.clone(), read(&path))).collect();
    let readme: Vec<&str> = texts["README.md"].lines().collect();
    assert!(readme.len() <= 130, "README.md: {}", readme.len());
    for command in ["hack/demo.sh", "hack/test.sh"] {
        assert!(readme[..30].contains(&command), "README.md: {command} is in the first 30 lines");
    }
    assert!(readme[..14].iter().any(|line| line.contains("evaluation")), "README.md: maturity in the first lines");
    let lines: usize = texts.values().map(|text| text.lines().count()).sum();
    let words: usize = texts.values().map(|text| text.split_whitespace().count()).sum();
    assert!(lines <= MAX_LINES && words <= MAX_WORDS, "{lines} lines, {words} words");
}

#[test]
fn lines_and_cells_of_tables_are_short() {
    let mut long = Vec::new();
    for document in documents() {
        for (number, line) in read(&document).lines().enumerate() {
            let is_too_long = match line.trim().strip_prefix('|') {
                Some(row) => row.split(" | ").any(|cell| cell.split_whitespace().count() > 40),
                None => line.chars().count() > 120,
            };
            if is_too_long {
                long.push(format!("{document}:{}", number + 1));
            }
        }
    }
    assert_eq!(long, [""; 0], "at most 120 characters outside tables, and 40 words in a cell");
}

/// A path is below `src`, or from the repository's root.
#[test]
fn the_architecture_page_names_existing_files() {
    let page = read("docs/architecture.md");
    let is_path = |word: &&str| word.contains('/') && !word.starts_with('/') && !word.contains("NAME");
    let paths = page.split('`').skip(1).step_by(2).filter(|code| !code.contains(' ')).filter(is_path);
    let is_file = |path: &str| {
        [".rs", ".tpl", ".yaml", ".json", ".conf", ".md", ".sh", "/"].iter().any(|end| path.ends_with(end))
    };
    let paths: Vec<&str> = paths.filter(|path| is_file(path)).collect();
    let missing: Vec<&&str> =
        paths.iter().filter(|path| !root().join("src").join(path).exists() && !root().join(path).exists()).collect();
    assert!(paths.len() > 80 && missing.is_empty(), "{} paths, missing: {missing:?}", paths.len());
}

#[test]
fn the_picture_of_the_first_page_is_current() {
    let readme = read("README.md");
    let command = readme.split('`').find(|code| code.starts_with("detour explain -f conf/")).expect("a command");
    let output = Command::new(env!("CARGO_BIN_EXE_detour"))
        .args(command.split(' ').skip(1))
        .current_dir(root())
        .output()
        .expect("detour");
    let drawn = String::from_utf8(output.stdout).expect("UTF-8");
    let path = root().join("docs/explain.svg");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &drawn).expect("writable");
    }
    assert!(drawn == read("docs/explain.svg"), "docs/explain.svg is not current; set UPDATE_GOLDEN=1 to write it");
}

/// Returns the version that a file states after `prefix`, up to the minor version.
fn minor(path: &str, prefix: &str) -> String {
    let text = read(path);
    let rest = text.split(prefix).nth(1).unwrap_or_else(|| panic!("{path}: no {prefix}"));
    let version: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    version.split('.').take(2).collect::<Vec<_>>().join(".")
}

#[test]
fn the_first_page_states_the_tested_versions() {
    let readme = read("README.md");
    let tested = |component: &str| -> String {
        let row = readme.lines().find(|line| line.starts_with(&format!("| {component} |")));
        row.and_then(|row| row.split('|').nth(2)).unwrap_or_else(|| panic!("no row for {component}")).to_owned()
    };
    for (component, path, prefix) in [
        ("Kubernetes", "tests/apiserver/kube-apiserver/go.mod", "k8s.io/kubernetes v"),
        ("containerd", "tests/runtimes/containerd/go.mod", "github.com/containerd/containerd/v2 v"),
        ("CRI-O", "tests/runtimes/cri-o/go.mod", "github.com/cri-o/cri-o v"),
        ("Multus", "tests/runtimes/multus/go.mod", "multus-cni.v4 v"),
        ("Istio", "tests/injector/go.mod", "istio.io/api v"),
        ("Helm", "hack/machine.sh", "cmd/helm@v"),
    ] {
        let version = minor(path, prefix);
        assert!(tested(component).contains(&version), "{component}: {} instead of {version}", tested(component));
    }
    let mut recorded = BTreeSet::new();
    files(root(), &root().join("tests/golden/injected"), &mut recorded);
    let recorded = recorded.iter().filter_map(|path| path.strip_prefix("tests/golden/injected/1."));
    for version in recorded.filter_map(|name| name.split('-').next()) {
        assert!(tested("Istio").contains(&format!("1.{version}")), "Istio: 1.{version} is missing");
    }
    let version = env!("CARGO_PKG_VERSION");
    assert!(readme.contains(&format!("Version {version}")) && readme.contains(&format!("/detour:{version}")));
    assert!(readme.contains(&format!("Rust {}", env!("CARGO_PKG_RUST_VERSION"))));
    assert!(read("manifests/chart/Chart.yaml").contains(&format!("\nversion: {version}\nappVersion: {version}\n")));
}

#[test]
fn the_changelog_has_a_dated_section_for_this_version_and_no_empty_one() {
    let text = read("CHANGELOG.md");
    let heading = format!("\n## {} - ", env!("CARGO_PKG_VERSION"));
    let (_, section) = text.split_once(&heading).expect("a section for this version");
    let date: Vec<&str> = section.lines().next().expect("a date").split('-').collect();
    let is_number = |part: &&str, length| part.len() == length && part.chars().all(|c| c.is_ascii_digit());
    assert!(date.len() == 3 && date.iter().zip([4, 2, 2]).all(|(part, length)| is_number(part, length)), "{date:?}");
    let mut lines = text.lines().filter(|line| !line.is_empty()).peekable();
    while let Some(line) = lines.next() {
        // A heading of the second level can be followed by one of the third.
        let next = lines.peek().copied().unwrap_or("#");
        let is_empty =
            line.starts_with("## ") && next.starts_with("## ") || line.starts_with("### ") && next.starts_with('#');
        assert!(!is_empty, "{line}: no entries");
    }
}

/// The agents' and the command line's programs have the same commands; those of `kubectl detour` are some of them.
#[test]
fn documented_commands_have_the_flags_that_they_use() {
    let mut helps: BTreeMap<(bool, String), String> = BTreeMap::new();
    let mut help = |kubectl: bool, command: &str| -> String {
        let found = helps.entry((kubectl, command.to_owned())).or_insert_with(|| {
            let mut program = Command::new(env!("CARGO_BIN_EXE_detour"));
            if kubectl {
                std::os::unix::process::CommandExt::arg0(&mut program, "kubectl-detour");
            }
            let output = program.args([command, "--help"]).env_remove("CNI_COMMAND").output().expect("detour");
            assert!(output.status.success(), "{command}: unknown command");
            String::from_utf8(output.stdout).expect("UTF-8")
        });
        found.clone()
    };
    let mut checked = 0;
    for document in documents().into_iter().filter(|path| path != "CHANGELOG.md") {
        let text = read(&document);
        let (prose, commands) = lines(&text);
        let inline = prose.iter().flat_map(|line| line.split('`').skip(1).step_by(2));
        for line in commands.into_iter().chain(inline) {
            let line = line.split(" #").next().unwrap_or_default();
            let line = line.split(" | ").find(|part| part.contains("detour ")).unwrap_or(line);
            let words: Vec<&str> = line.trim_start_matches("$ ").split_whitespace().collect();
            let (kubectl, rest) = match &words[..] {
                ["kubectl" | "oc", "detour", rest @ ..] => (true, rest),
                ["detour", rest @ ..] => (false, rest),
                _ => continue,
            };
            let Some((command, arguments)) = rest.split_first() else { continue };
            if !command.chars().all(|c| c.is_ascii_lowercase()) || *command == "help" {
                continue;
            }
            let text = help(kubectl, command);
            for flag in arguments.iter().filter(|argument| argument.starts_with('-') && argument.len() > 1) {
                let flag = flag.split('=').next().expect("a flag");
                let known = text.split(|c: char| !c.is_alphanumeric() && c != '-').any(|word| word == flag);
                assert!(known, "{document}: {line}: {flag} is not in the help of {command}");
                checked += 1;
            }
        }
    }
    assert!(checked > 50, "{checked}");
}

/// Names of annotations, Events and metrics that a document uses exist in the source or in the chart.
#[test]
fn documented_names_exist() {
    let mut sources = BTreeSet::new();
    files(root(), &root().join("src"), &mut sources);
    files(root(), &root().join("manifests/chart"), &mut sources);
    sources.retain(|path| !path.ends_with(".md"));
    let source: String = sources.iter().map(|path| read(path)).collect();
    // The registry adds the prefix and the suffix of a metric's kind.
    let exists = |name: &str| {
        let metric = name.strip_prefix("detour_").map(|name| name.trim_end_matches("_total"));
        source.contains(name) || metric.is_some_and(|metric| source.contains(&format!("\"{metric}\"")))
    };
    for document in documents().into_iter().filter(|path| path != "CHANGELOG.md") {
        let text = read(&document);
        for code in text.split('`').skip(1).step_by(2) {
            for word in code.split(|c: char| !c.is_alphanumeric() && !"_-./".contains(c)) {
                let is_name = ["detour.io/", "detour_"].iter().any(|prefix| word.starts_with(prefix))
                    || word
                        .strip_prefix("Detour")
                        .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
                if is_name && !["detour.io/canary", "detour.io/no-istio-cni"].contains(&word.trim_end_matches('-')) {
                    assert!(exists(word), "{document}: `{word}` is in no source file");
                }
            }
        }
    }
}

/// Returns the strings of the source that follow `prefix`, up to the closing quote.
fn strings_after(directory: &str, prefix: &str) -> BTreeSet<String> {
    let mut sources = BTreeSet::new();
    files(root(), &root().join(directory), &mut sources);
    let found: BTreeSet<String> = sources
        .iter()
        .flat_map(|path| {
            let text = read(path);
            let rest = text.split(prefix).skip(1).filter_map(|rest| rest.split('"').next());
            rest.map(str::to_owned).collect::<Vec<_>>()
        })
        .filter(|name| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'))
        .collect();
    assert!(found.len() > 4, "{directory}: {prefix}: {found:?}");
    found
}

#[test]
fn the_reference_has_each_event_annotation_and_warning() {
    let guides: String = documents().iter().filter(|path| *path != "CHANGELOG.md").map(|path| read(path)).collect();
    for event in strings_after("src/agent", "\"Detour") {
        assert!(guides.contains(&format!("`Detour{event}`")), "the Event Detour{event} is on no page");
    }
    let configuration = read("conf/README.md");
    for name in strings_after("src/pod", ": &str = \"detour.io/").iter().filter(|name| *name != "policy") {
        assert!(configuration.contains(&format!("`detour.io/{name}")), "conf/README.md: detour.io/{name}");
    }
    let reports = read("docs/reports.md");
    for code in strings_after("src", "Warning::new(\"") {
        assert!(reports.contains(&format!("\n| `{code}` |")), "docs/reports.md: the warning {code}");
    }
}

/// A limit that changes in the source also changes in the table.
#[test]
fn the_limits_are_those_of_the_source() {
    let page = read("conf/README.md");
    let (_, limits) = page.split_once("\n## Limits\n").expect("a section");
    for (path, line, row, text) in [
        ("cni/block.rs", "LIST_ITEMS: usize = 2000;", "a list:", "2000 items"),
        ("cni/block.rs", "MAX_LIST_BYTES: usize = 64 * 1024;", "a list:", "64 KiB of text"),
        ("sub_plugins/context.rs", "MAX_EXCLUSIONS: usize = 10_000;", "exclusions of a pod", "10000"),
        ("firewall/istio.rs", "MAX_RULES: usize = 16_000;", "rules of a pod", "16000"),
        ("sub_plugins/settings.rs", "MAX_GROUPS: usize = 64;", "`owner_groups_include`", "64 groups"),
        ("sub_plugins/context.rs", "MAX_CONTAINERS: usize = 100;", "containers of a pod", "100"),
        ("sub_plugins/container_exclude.rs", "MAX_ITEMS: usize = 100;", "`containers` of", "100 items"),
        ("cni/netconf/chain.rs", "MAX_BLOCKS: usize = 32;", "`chain`", "32 entries"),
        ("plugin/record.rs", "MAX_ATTACHMENTS: usize = 32;", "attachments on one", "32"),
        ("cni/names.rs", "MAX_NETWORK_NAME: usize = 225;", "the network's name", "225 bytes"),
        ("plugin/primary/plan.rs", "MAX_IN_PROCESS: usize = 16;", "attachments of `in_process_types`", "16"),
        ("networks/annotations.rs", "MAX_ELEMENTS: usize = 100;", "`k8s.v1.cni.cncf.io/networks`", "100 elements"),
        ("cluster/resources.rs", "MAX_CONFIG: usize = 256 << 10;", "`spec.config`", "256 KiB"),
        ("netlink/socket.rs", "objects: 20_000, bytes: 16 << 20", "tables, netfilter chains", "20000 objects, 16 MiB"),
        ("firewall/containers.rs", "MAX_ELEMENTS: u32 = 1024;", "running excluded containers", "1024"),
        ("agent/nri/session.rs", "START_TIMEOUT: Duration = Duration::from_secs(1);", "the container runtime", "1 s;"),
        ("cni/document.rs", "MAX_CONFIGURATION: usize = 4 << 20;", "stdin", "4 MiB"),
        ("cni/document.rs", "MAX_VALUES: usize = 100_000;", "stdin", "100,000 values"),
        ("agent/facts/cache.rs", "MAX_TOTAL: usize = 24 << 20;", "a pod or definition", "24 MiB"),
        ("delegate/process.rs", "MAX_STDOUT: usize = 4 << 20;", "stdout of an executable", "4 MiB"),
        ("logging.rs", "MAX_LINES: usize = 100;", "log of one call", "100 lines"),
        ("cluster/api/session.rs", "MAX_ANSWER: usize = 16 << 20;", "a response of the API", "16 MiB"),
        ("cni/node_conf.rs", "NODE_CONFIGURATION_LIMIT: u64 = 64 << 10;", "`node.json`", "64 KiB"),
        ("cluster/kubeconfig.rs", "MAX_FILE: u64 = 1 << 20;", "kubeconfig", "1 MiB"),
        ("cluster/manifests.rs", "MAX_FILE: u64 = 4 << 20;", "a file of `manifests_dir`", "4 MiB"),
        ("state/mod.rs", "MAX_RECORD_BYTES: u64 = 16 << 20;", "a state file", "16 MiB"),
    ] {
        assert!(read(&format!("src/{path}")).contains(line), "src/{path}: {line}: correct the limit on the page, too");
        let row = limits.lines().find(|line| line.starts_with(&format!("| {row}"))).unwrap_or_else(|| panic!("{row}"));
        assert!(row.contains(text), "{row}: {text}");
    }
}

/// Answering takes no privileges, and neither builds nor installs anything: it ends at once, from any directory.
#[test]
fn every_script_prints_its_usage() {
    let mut scripts = BTreeSet::new();
    files(root(), &root().join("hack"), &mut scripts);
    files(root(), &root().join(".ci"), &mut scripts);
    scripts.retain(|path| {
        let mode = std::fs::metadata(root().join(path)).expect("readable").permissions().mode();
        mode & 0o111 != 0
    });
    assert!(scripts.contains(".ci/run") && scripts.contains("hack/image.sh"), "{scripts:?}");
    for (script, option) in scripts.iter().flat_map(|script| [(script, "-h"), (script, "--help")]) {
        let (directory, name) = script.rsplit_once('/').expect("a directory");
        let output = Command::new("timeout")
            .args(["120", &format!("./{name}"), option])
            .current_dir(root().join(directory))
            .output()
            .expect("timeout(1)");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && output.stderr.is_empty(), "{script} {option}: {output:?}");
        assert!(text.contains(&format!("\nUsage: {script}")) && !text.contains("set -e"), "{script} {option}: {text}");
    }
}

/// The rules of krew's validation (krew.sigs.k8s.io, "Writing Krew plugin manifests"; `internal/index/validation`), and
/// what hack/release.sh replaces.
#[test]
fn the_manifest_for_krew_is_valid() {
    let text = read("manifests/krew/detour.yaml");
    let sum = "0123456789abcdef".repeat(4);
    let text = text.replace("SHA256_AMD64", &sum).replace("SHA256_ARM64", &sum).replace("VERSION", "0.2.0");
    let text = text.replace("REPOSITORY", "https://github.com/owner/detour");
    let manifest: serde_json::Value = serde_saphyr::from_str(&text).expect("YAML");
    let keys = |value: &serde_json::Value, known: &[&str]| {
        let object = value.as_object().expect("an object");
        assert!(object.keys().all(|key| known.contains(&key.as_str())), "{object:?}: expected only {known:?}");
    };
    keys(&manifest, &["apiVersion", "kind", "metadata", "spec"]);
    assert_eq!(manifest["apiVersion"], "krew.googlecontainertools.github.com/v1alpha2");
    // The name is that of the file, and `kubectl NAME` runs the plugin.
    assert_eq!((&manifest["kind"], &manifest["metadata"]["name"]), (&"Plugin".into(), &"detour".into()));
    let spec = &manifest["spec"];
    keys(spec, &["version", "shortDescription", "description", "caveats", "homepage", "platforms"]);
    assert_eq!(spec["version"], "v0.2.0");
    let short = spec["shortDescription"].as_str().expect("a text");
    assert!(!short.contains('\n') && short.len() <= 50, "{short}");
    let platforms = spec["platforms"].as_array().expect("a list");
    assert_eq!(platforms.len(), 2);
    for (platform, architecture) in platforms.iter().zip(["amd64", "arm64"]) {
        keys(platform, &["uri", "sha256", "selector", "files", "bin", "license"]);
        assert_eq!(platform["selector"]["matchLabels"], serde_json::json!({"os": "linux", "arch": architecture}));
        let archive = format!("/releases/download/v0.2.0/detour-v0.2.0-linux-{architecture}.tar.gz");
        assert!(platform["uri"].as_str().is_some_and(|uri| uri.starts_with("https://") && uri.ends_with(&archive)));
        assert_eq!((platform["sha256"].as_str(), platform["bin"].as_str()), (Some(sum.as_str()), Some("detour")));
    }
}
