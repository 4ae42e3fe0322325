//! Flags and commands of earlier versions, each with its replacement.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The flags, and what to do instead.
const REMOVED: &[(&str, &str)] = &[
    (
        "--oci-hooks-dir",
        "enable NRI in the container runtime (containerd 2.0, CRI-O 1.30 or later), and run the agent with --nri-socket",
    ),
    ("--release", "a node has one installation: add exclusions to it with --attachments"),
    ("--network", "set the key name in the file of --config"),
    ("--log-level", "set the key log_level in the file of --config"),
    ("--exclude-namespaces", "set the key kubernetes.exclude_namespaces in the file of --config"),
    (
        "--agent-namespace",
        "set the variable POD_NAMESPACE, or the key kubernetes.agent_namespace in the file of --config",
    ),
    ("--token-file", "use --kubeconfig with a file on the node that contains tokenFile"),
    ("--allow-missing-credentials", "create the kubeconfig on the node first"),
    ("--state-dir", "remove it: the directory on the node is /var/lib/cni/detour"),
    ("--bundle", "-o json prints all findings; oc adm must-gather and sosreport collect files"),
    (
        "--live-policy-opt-out",
        "to apply a rule to every pod, set pod_overrides to false in its sub-plugin: the annotation detour.io/live-policy \
         does not keep bypasses that the configuration forbids",
    ),
    (
        "--repair-otherwise",
        "after five failed attempts, a pod keeps running and gets the Event DetourRepairFailed; --repair=delete deletes \
         pods instead of repairing them in place",
    ),
    ("--repair-interval", "remove it: the agent checks each pod once or twice a minute, and when it changes"),
    ("--repair-annotation", VALIDATION),
    ("--repair-init-container", VALIDATION),
    ("--repair-exit-code", VALIDATION),
    ("--repair-message", VALIDATION),
];

/// What replaces the flags that described the init container which validates the redirection.
const VALIDATION: &str = "remove it: the agent recognizes Istio's init container istio-validation by its exit code 126, in \
                          pods with the annotation sidecar.istio.io/status";

/// The commands that `kubectl detour` had.
const REMOVED_OF_KUBECTL: [&str; 3] = ["validate", "version", "completion"];

/// Returns the message for a removed flag or command; `None` if clap's error has another cause.
pub(super) fn message(error: &clap::Error) -> Option<String> {
    if let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand) {
        let is_removed = REMOVED_OF_KUBECTL.contains(&name.as_str());
        return is_removed.then(|| format!("{name}: this command no longer exists here; use detour {name}"));
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let (flag, next) = REMOVED.iter().find(|(removed, _)| removed == flag)?;
    (error.kind() == ErrorKind::UnknownArgument).then(|| format!("{flag}: this flag no longer exists; {next}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::{CommandFactory, Parser};

    #[test]
    fn a_removed_flag_is_refused_with_its_replacement() {
        for (flag, next) in REMOVED {
            for argument in [(*flag).to_owned(), format!("{flag}=value")] {
                let error = Cli::try_parse_from(["detour", "agent", &argument]).expect_err("no such flag");
                assert_eq!(message(&error), Some(format!("{flag}: this flag no longer exists; {next}")));
            }
        }
        let error = Cli::try_parse_from(["detour", "agent", "--unknown"]).expect_err("no such flag");
        assert_eq!(message(&error), None);
    }

    #[test]
    fn no_command_has_a_removed_flag() {
        let command = Cli::command();
        let agent = command.find_subcommand("agent").expect("a command");
        let flags: Vec<_> = agent.get_arguments().filter_map(|argument| argument.get_long()).collect();
        for (removed, _) in REMOVED {
            assert!(!flags.contains(&removed.trim_start_matches("--")), "{removed}");
        }
    }
}
