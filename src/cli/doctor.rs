//! `detour doctor`: checks a node, and optionally a pod on it.

use super::cluster::host_name;
use super::install::NodeArguments;
use super::output::{CommandError, CommandOutput, OutputArguments};
use clap::{ArgAction, Args};
use detour_cni::agent::install::{FoundState, InstallRecord, Platform, Role, changed, state_path};
use detour_cni::host_path::HostPath;
use detour_cni::inspect::doctor::{CheckTarget, Installation, MultusChain, OwnList, examine};
use detour_cni::pod::PodRef;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

const EXAMPLES: &str = "\
Examples:
  detour doctor
        check this node: the installation, API access and permissions, whether running pods have
        their current policies, and the kernel; if the configuration excludes containers, also the
        container runtime
  detour doctor -n shop web-0
        also check the pod: from its annotations to its rules in the kernel
  detour doctor -n shop web-0 --probe
        also send packets from the pod's network namespace to unused addresses, with captured and
        with excluded UIDs
  detour doctor -n shop web-0 -o json > web-0.json
        save all findings, for example for a support case
  kubectl exec -n kube-system detour-agent-x7k2p -- /detour doctor --root /host -n shop web-0
        run in the agent's pod on the node

If the pod is on another node, the output contains the command to run there. A check is skipped if
it depends on a failed check; the output gives the reason.

The command changes nothing. The kernel and pod checks require root. The agent's container can run
all checks while the agent repairs pods (chart value repair.enabled), except those that read log
files and the journal.

To read the pod, the command uses the service account of the pod in which it runs, or else the
plugin's own kubeconfig, which may lack permissions. With your own kubeconfig, use kubectl detour.

A warning names a next step on a node that works as configured, for example for a pod with an older
policy. It does not change the exit code.

Exit codes: 0 no check failed, 1 a check failed, 2 invalid arguments or input.";

/// Check a node and a pod, and suggest what to do about each problem
///
/// Each line of the output is a check with its result, the evidence and, if it failed, the next step.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DoctorArguments {
    /// Check only the node; this is the default without POD
    #[arg(long, conflicts_with = "pod")]
    node: bool,
    /// Namespace of the pod
    #[arg(short, long, value_name = "NAMESPACE", requires = "pod")]
    namespace: Option<String>,
    /// Name of the pod to check
    #[arg(value_name = "POD")]
    pod: Option<String>,
    /// Send packets in the pod's network namespace and check where they arrive
    #[arg(long, requires = "pod")]
    probe: bool,
    #[command(flatten)]
    node_target: TargetArguments,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

/// The node to examine: its files, its name and its cluster.
#[derive(Debug, Args)]
pub(super) struct TargetArguments {
    /// The plugin's configuration on the node, or its directory [default: from the installation record, or from the platform]
    #[arg(long = "config", alias = "conf", value_name = "FILE|DIR")]
    conf: Option<HostPath>,
    /// Platform of the node [default: from the installation record, or detected]
    #[arg(long, value_name = "NAME", value_parser = Platform::named)]
    platform: Option<&'static Platform>,
    /// Whether the plugin is part of the cluster network's configuration list [default: from the installation record, or from the platform]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    chained: Option<bool>,
    /// Directory on the node from which the runtime, or Multus, runs plugins [default: from the installation record, or from the platform]
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<HostPath>,
    /// Name of the Node object [default: $NODE_NAME, or the host name]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    #[command(flatten)]
    place: NodeArguments,
}

pub(super) fn run(arguments: &DoctorArguments) -> Result<CommandOutput, CommandError> {
    if let (Some(pod), None) = (&arguments.pod, &arguments.namespace) {
        return Err(CommandError::Usage(format!("pod {pod:?}: unknown namespace; add -n NAMESPACE")));
    }
    let target = CheckTarget { probe: arguments.probe, pod: arguments.pod(), ..arguments.node_target.read()? };
    let checklist = examine(&target);
    arguments.output.render_verdict(&checklist, checklist.healthy)
}

impl DoctorArguments {
    /// Returns namespace and name of the pod.
    pub(super) fn selected(&self) -> (Option<&str>, Option<&str>) {
        (self.namespace.as_deref(), self.pod.as_deref())
    }

    fn pod(&self) -> Option<PodRef> {
        let pod = self.namespace.clone().zip(self.pod.clone());
        pod.map(|(namespace, name)| PodRef { namespace, name, uid: None })
    }
}

impl TargetArguments {
    /// Returns the node to examine, without a pod.
    ///
    /// # Errors
    /// A file or directory of the arguments does not exist.
    pub(super) fn read(&self) -> Result<CheckTarget, CommandError> {
        self.place.check_root()?;
        if let Some(path) = &self.conf {
            let reached =
                self.place.node().reach(path).map_err(|why| CommandError::Usage(format!("--config {path}: {why}")))?;
            fs::metadata(reached).map_err(|why| CommandError::Usage(format!("--config {path}: {why}")))?;
        }
        Ok(self.target())
    }

    /// Combines the arguments, the installation record and the platform's defaults, in this order of precedence.
    fn target(&self) -> CheckTarget {
        let node = self.place.node();
        let found = node.look(None);
        let none = InstallRecord::default();
        let record = found.as_ref().map_or(&none, |found| &found.record);
        // An agent's container lacks the directories that identify a platform.
        let recorded = record.platform.as_deref().and_then(|name| Platform::named(name).ok());
        let platform = self.platform.or(recorded).unwrap_or_else(|| Platform::detect(|path| node.has(path)));
        let own_lists = own_lists(record);
        let is_listed = record.files.values().any(|file| file.plugin.is_some());
        let platform_dir = |path: &str| HostPath::new(path).into_iter().collect::<Vec<_>>();
        let programs = programs(record);
        let mut bin_dirs: Vec<HostPath> = self.bin_dir.clone().into_iter().collect();
        if bin_dirs.is_empty() {
            bin_dirs = programs.iter().map(HostPath::parent).collect();
            bin_dirs.dedup();
        }
        if bin_dirs.is_empty() {
            bin_dirs = platform_dir(platform.bin_dir);
        }
        let conf = self
            .conf
            .clone()
            .or_else(|| conf_dirs(record).into_iter().next())
            .or_else(|| platform_dir(platform.conf_dir).pop());
        let conf = conf.unwrap_or_else(|| state_path(""));
        let mut other_conf_dirs = if self.conf.is_none() { conf_dirs(record) } else { Vec::new() };
        other_conf_dirs.retain(|directory| *directory != conf);
        CheckTarget {
            mount: self.place.root().to_owned(),
            node_name: self.node_name.clone().or_else(|| host_name(self.place.root())),
            platform: platform.name.to_owned(),
            chained: self.chained.unwrap_or(if record.is_empty() { platform.chained } else { is_listed }),
            bin_dirs,
            conf,
            other_conf_dirs,
            installation: Installation {
                programs,
                listed_types: listed_types(record),
                own_lists,
                multus_chain: record.multus_chain.as_ref().map(|directory| MultusChain {
                    directory: directory.clone(),
                    own_files: record.files.keys().filter(|path| path.parent() == *directory).cloned().collect(),
                    invalid_files: node
                        .invalid_chain_files(directory, record)
                        .unwrap_or_else(|why| vec![why.to_string()]),
                }),
                changed: found.as_ref().map(differences).map_err(ToString::to_string),
            },
            pod: None,
            probe: false,
        }
    }
}

/// Returns the differences between the node and the installation record; `None` without an installation.
fn differences(found: &FoundState) -> Option<Vec<String>> {
    (!found.record.is_empty()).then(|| changed(found))
}

fn programs(record: &InstallRecord) -> Vec<HostPath> {
    record.with_role(Role::Program).map(|(path, _)| path.clone()).collect()
}

fn listed_types(record: &InstallRecord) -> BTreeMap<HostPath, BTreeSet<String>> {
    let listed = record.files.iter().filter_map(|(path, file)| Some((path.clone(), file.plugin.clone()?)));
    listed.map(|(path, kind)| (path, BTreeSet::from([kind]))).collect()
}

fn own_lists(record: &InstallRecord) -> BTreeMap<HostPath, OwnList> {
    let copied = record.with_role(Role::OwnList).filter_map(|(path, file)| {
        let (source, kind) = file.source.clone().zip(file.plugin.clone())?;
        Some((path.clone(), OwnList { source, kind }))
    });
    copied.collect()
}

/// Returns the directories of the plugin's configurations, that of the cluster network first.
fn conf_dirs(record: &InstallRecord) -> Vec<HostPath> {
    let roles = [Role::Entry, Role::OwnList, Role::Configuration];
    let files = roles.into_iter().flat_map(|role| record.with_role(role));
    let mut directories: Vec<HostPath> = Vec::new();
    for directory in files.map(|(path, _)| path.parent()) {
        if !directories.contains(&directory) {
            directories.push(directory);
        }
    }
    directories
}
