//! Targets of coverage-guided fuzzing (`hack/fuzz.sh`): every parser of input that others control, and the laws that
//! connect them. A target gets arbitrary bytes; it panics if a law does not hold. Unit tests run the inputs that once
//! failed (`fuzz/failed`), and the golden files and sample configurations, which are also the seeds of `hack/fuzz.sh`.
//!
//! Only tests and the fuzzer compile this module.

mod cluster;
mod drawn;
mod input;
mod laws;
mod netlink;
mod processes;
mod simulated_kernel;
mod texts;

use input::{Choices, check_error, check_printed, check_warnings, sections, text_sections};

/// A target: its name, which is that of its directory in `fuzz/failed`, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("annotation", texts::annotation),
    ("definition", texts::definition),
    ("pod", texts::pod),
    ("manifests", texts::manifests),
    ("conflist", texts::conflist),
    ("stdin", texts::stdin),
    ("node-conf", texts::node_conf),
    ("result", texts::result),
    ("delegate", processes::answer),
    ("kubeconfig", cluster::kubeconfig),
    ("api", cluster::api),
    ("agent-request", cluster::agent_request),
    ("agent-answer", cluster::agent_answer),
    ("nri", processes::session),
    ("record", processes::record),
    ("netfilter", netlink::netfilter),
    ("routing", netlink::routing),
    ("rules", laws::rules),
    ("changes", laws::changes),
    ("policies", laws::policies),
];

/// Runs the target `name`.
///
/// # Panics
/// A law does not hold, or there is no such target.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    let Some((_, function)) = target else {
        let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
        panic!("unknown target {name:?}; expected one of {}", names.join(", "));
    };
    function(input);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::{Path, PathBuf};

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..400)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_rules_of_any_policy_are_read_back_and_removed(input in bytes()) {
            laws::rules(&input);
        }

        #[test]
        fn any_policy_can_replace_any_other_between_foreign_rules(input in bytes()) {
            laws::changes(&input);
        }

        #[test]
        fn policies_obey_the_laws_of_unions_and_of_live_changes(input in bytes()) {
            laws::policies(&input);
        }
    }

    /// Returns all files in a directory of the repository.
    fn files(directory: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        let paths = entries.map(|entry| entry.expect("readable").path());
        paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
    }

    fn check(target: &str, path: &Path) {
        let input = std::fs::read(path).expect("readable");
        let ran = std::panic::catch_unwind(|| run(target, &input));
        assert!(ran.is_ok(), "target {target}, {}: see the panic above", path.display());
    }

    #[test]
    fn inputs_that_once_failed() {
        let failed = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/failed");
        let all = files(&failed);
        assert!(!all.is_empty());
        for path in all {
            let target = path.parent().and_then(Path::file_name).and_then(|name| name.to_str()).expect("text");
            check(target, &path);
        }
    }

    #[test]
    fn golden_files_and_samples() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let seeds = ["conf", "manifests/samples", "tests/golden", "tests/records"];
        for path in seeds.iter().flat_map(|directory| files(&root.join(directory))) {
            TARGETS.iter().for_each(|(target, _)| check(target, &path));
        }
    }
}
