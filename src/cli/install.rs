//! `detour install` and `detour uninstall`: change the files of the plugin on a node.

mod options;

pub(super) use options::{InstallOptions, agent_namespace, parse_file_name};

use super::cluster::NodeArguments;
use super::output::{CommandError, CommandOutput};
use super::{print_error, print_message};
use anyhow::{Context, Result, anyhow};
use clap::Args;
use detour_cni::agent::install::{Digest, FileAction, InstallPlan};
use detour_cni::printable::{Text, line};
use detour_cni::trusted_file::open_of_any_kind;
use std::path::Path;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  detour install --dry-run --kubeconfig /etc/kubernetes/detour.kubeconfig
  detour install --platform openshift --root /host --config /etc/detour/config.json
        install from a pod that mounts the node's file system at /host, with its service account
  detour install --chained=true --conf-name 10-calico.conflist --name istio-cni
        add the plugin to this configuration list, and install it also under the name istio-cni";

/// The running program's file.
pub(super) const PROGRAM_FILE: &str = "/proc/self/exe";

/// Install the program, a kubeconfig and the plugin's configuration on a node
///
/// The command replaces each file atomically. At any time, runtimes find a valid configuration that names an existing
/// program. Repeat the command to restore missing or changed files. It never replaces a file of another owner; a
/// configuration list of another owner gets the plugin's entry. A node has one installation; if an agent owns it, the
/// command refuses to change it.
///
/// Platforms: openshift (aro, crc, ocp, okd, rosa) and microshift, both with a separate configuration file for Multus;
/// gke, k3d, k3s, microk8s, bottlerocket, minikube; and kubernetes (aks, default, eks, iks, k0s, kind, kubeadm, rke1,
/// rke2, talos).
///
/// Exit codes: 0 success, 1 incomplete (see stderr), 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct InstallArguments {
    #[command(flatten)]
    options: InstallOptions,
    /// Install the program also under this name: istio-cni or excludedns; may be repeated
    #[arg(long = "name", value_name = "NAME", value_parser = parse_file_name)]
    names: Vec<String>,
    /// Print the changes as a unified diff, without making them
    #[arg(long)]
    dry_run: bool,
}

/// Remove what `install` wrote, and keep files that were edited afterwards
///
/// Pods keep their rules; recreate a pod to remove its guard (mesh-guard). The command also keeps the files that edited
/// files require, and the program while CRI-O or Multus needs it to delete running pods; it lists them.
///
/// Exit codes: 0 success, also if the program stays for running pods, 1 incomplete (see stderr), 2 invalid arguments or
/// input.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  detour uninstall --dry-run")]
pub(super) struct UninstallArguments {
    #[command(flatten)]
    place: NodeArguments,
    /// Print the changes as a unified diff, without making them
    #[arg(long)]
    dry_run: bool,
}

impl InstallArguments {
    pub(super) fn run(&self) -> Result<CommandOutput> {
        let mut options = self.options.clone();
        options.names.clone_from(&self.names);
        let node = options.node()?;
        print_message("note", options.describe_platform(&node));
        let program = program_digest()?;
        let warn = |warnings: Vec<String>| warnings.iter().for_each(|warning| print_message("warning", warning));
        let token = || options.token();
        let desired = |given| options.desired(&node, &program, &given, Some(&token), None, &warn);
        let desired = options.given_keys().and_then(desired).map_err(CommandError::input)?;
        let plan = node.preview(Some(&desired))?;
        if let Some(why) = &plan.lacks {
            return Err(CommandError::input(anyhow!("{why}")).into());
        }
        Ok(output(&if self.dry_run { plan } else { node.change(Some(&desired))? }, self.dry_run))
    }
}

impl UninstallArguments {
    pub(super) fn run(&self) -> Result<CommandOutput> {
        let node = self.place.node()?;
        let plan = if self.dry_run { node.preview(None)? } else { node.change(None)? };
        if node.has_agent() {
            let what = "an agent on this node installs the plugin again; delete its DaemonSet (helm uninstall)";
            print_message("warning", what);
        }
        let output = output(&plan, self.dry_run);
        Ok(CommandOutput { code: if plan.incomplete { ExitCode::FAILURE } else { output.code }, ..output })
    }
}

/// Returns the digest of the running program.
pub(super) fn program_digest() -> Result<Digest> {
    let digest = open_of_any_kind(Path::new(PROGRAM_FILE)).and_then(Digest::read);
    digest.with_context(|| format!("can't read the running program for copying: {PROGRAM_FILE}"))
}

/// Returns the changes that a plan would make, each with its unified diff, or has made, and prints its notes. The exit code
/// is that of a failure if the plan leaves something undone.
fn output(plan: &InstallPlan, is_dry: bool) -> CommandOutput {
    let change =
        |action: &FileAction| if is_dry { action.diff() } else { line(&action.to_string()).into_owned() + "\n" };
    let text: String = plan.actions.iter().map(change).collect();
    let nothing = if is_dry { "# nothing to do" } else { "nothing to do" };
    plan.notes.iter().for_each(|note| print_message("note", note));
    let code = plan.unmet().map_or(ExitCode::SUCCESS, |why| print_error(why, ExitCode::FAILURE));
    CommandOutput { text: Text::lines(if text.is_empty() { nothing } else { text.trim_end() }), code }
}
