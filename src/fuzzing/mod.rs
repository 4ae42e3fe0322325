//! Targets of coverage-guided fuzzing (`hack/fuzz.sh`): every parser of input that others control, and the laws that
//! connect them. A target gets arbitrary bytes; it panics if a law does not hold. The unit test `corpus` runs the kept
//! inputs of `fuzz/corpus` through the same functions.
//!
//! Only tests and the fuzzer compile this module.
//!
//! Parsers that are private to a module have their target in that module's file `fuzzing.rs`.

mod checks;
mod drawn;
mod input;
mod kernel_socket;
mod laws;
mod netlink;
mod simulated_kernel;
mod texts;

pub(crate) use checks::{check_error, check_printed, check_warnings};
pub(crate) use input::{Choices, sections, text_sections};

/// A target: its name, which is that of its directory in `fuzz/corpus`, and its function.
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
    ("delegate", crate::delegate::fuzzing::answer),
    ("kubeconfig", crate::cluster::fuzzing::kubeconfig),
    ("api", crate::cluster::fuzzing::api),
    ("agent-request", crate::cluster::fuzzing::agent_request),
    ("agent-answer", crate::cluster::fuzzing::agent_answer),
    ("nri", crate::agent::nri::fuzzing::session),
    ("record", crate::plugin::fuzzing::record),
    ("netfilter", netlink::dump),
    ("routing", crate::netns::fuzzing::dump),
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
    use std::collections::BTreeSet;
    use std::path::Path;

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

    /// Every input in `fuzz/corpus` was interesting once: a new path through a parser, or a crash.
    #[test]
    fn corpus() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
        let mut seen = BTreeSet::new();
        for target in std::fs::read_dir(&corpus).expect("a corpus") {
            let directory = target.expect("readable").path();
            let name = directory.file_name().and_then(|name| name.to_str()).expect("text").to_owned();
            for input in std::fs::read_dir(&directory).expect("a directory per target") {
                let path = input.expect("readable").path();
                let input = std::fs::read(&path).expect("readable");
                let ran = std::panic::catch_unwind(|| run(&name, &input));
                assert!(ran.is_ok(), "{}: see the panic above", path.display());
            }
            seen.insert(name);
        }
        let all: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(seen, all, "each target has kept inputs");
    }
}
