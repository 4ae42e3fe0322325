//! `detour doctor`: checks a node, and optionally a pod on it. `detour audit`: lists the pods of a node whose traffic
//! bypasses the mesh.

use super::cluster::{NodeArguments, ON_NODE, host_name, named_pod};
use super::output::{CommandError, CommandOutput, OutputArguments};
use clap::Args;
use detour_cni::agent::install::{FileRecord, InstallRecord, Platform, Role, changed};
use detour_cni::host_path::HostPath;
use detour_cni::inspect::audit::audit;
use detour_cni::inspect::doctor::{CheckTarget, OwnList, examine};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs;

const DOCTOR_EXAMPLES: &str = "\
Examples:
  detour doctor
        check this node: the installation, API access, the kernel, and the rules of running pods
  detour doctor -n shop web-0 --probe
        also check the pod, and send packets in its network namespace to unused addresses";

const AUDIT_EXAMPLES: &str = "\
Examples:
  detour audit
  detour audit --all -n shop -o json
  kubectl exec -n kube-system detour-agent-x7k2p -- /detour audit --root /host";

/// Check a node and a pod, and suggest what to do about each problem
///
/// Each line of the output is a check with its result, the evidence and, if it failed, the next step. For a pod on
/// another node, the output contains the command to run. The command changes nothing, and requires root. With your own
/// kubeconfig, use kubectl detour.
///
/// Exit codes: 0 no check failed, 1 a check failed, 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(after_help = DOCTOR_EXAMPLES)]
pub(super) struct DoctorArguments {
    /// Check only the node; this is the default without POD
    #[arg(long, conflicts_with = "pod", help_heading = ON_NODE)]
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

/// List the pods of this node whose traffic bypasses the mesh, and why
///
/// Each line about a pod is a live rule that lets traffic bypass the sidecar, with what it has counted. The command
/// changes nothing. It requires root, and the service account of the agent's pod: the plugin's own kubeconfig can't list
/// pods. With your own kubeconfig, use kubectl detour audit.
///
/// Exit codes: 0 all pods are redirected by the desired rules, apart from exclusions, 1 a pod bypasses the mesh entirely,
/// has other rules than desired, has a rule of another program before the desired ones, or was not examined, 2 invalid
/// arguments or input.
#[derive(Debug, Args)]
#[command(after_help = AUDIT_EXAMPLES)]
pub(super) struct AuditArguments {
    /// List only the pods of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// List all pods with a sidecar, and exclusions that no traffic has used
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    node_target: TargetArguments,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

/// The node to examine: its files, its name and its cluster.
#[derive(Debug, Args)]
struct TargetArguments {
    /// The plugin's configuration on the node, or its directory [default: from the installation record, or from the platform]
    #[arg(long = "config", alias = "conf", value_name = "FILE|DIR", help_heading = ON_NODE)]
    conf: Option<HostPath>,
    /// Platform of the node [default: from the installation record, or detected]
    #[arg(long, value_name = "NAME", value_parser = Platform::named, help_heading = ON_NODE)]
    platform: Option<&'static Platform>,
    /// Name of the Node object [default: $NODE_NAME, or the host name]
    #[arg(long, value_name = "NAME", help_heading = ON_NODE)]
    node_name: Option<String>,
    #[command(flatten)]
    place: NodeArguments,
}

pub(super) fn run_audit(arguments: &AuditArguments) -> Result<CommandOutput, CommandError> {
    let target = arguments.node_target.read()?;
    let report = audit(&target, arguments.namespace.as_deref(), arguments.all)?;
    arguments.output.render_verdict(&report, report.is_clean())
}

pub(super) fn run(arguments: &DoctorArguments) -> Result<CommandOutput, CommandError> {
    let (namespace, pod) = arguments.selected();
    let pod = pod.map(|pod| named_pod(namespace, pod)).transpose()?;
    let target = CheckTarget { probe: arguments.probe, pod, ..arguments.node_target.read()? };
    let checklist = examine(&target);
    arguments.output.render_verdict(&checklist, checklist.healthy)
}

impl DoctorArguments {
    /// Returns namespace and name of the pod.
    pub(super) fn selected(&self) -> (Option<&str>, Option<&str>) {
        (self.namespace.as_deref(), self.pod.as_deref())
    }
}

impl TargetArguments {
    /// Returns the node to examine, without a pod: combines the arguments, the installation record and the platform's
    /// defaults, in this order of precedence.
    ///
    /// # Errors
    /// A file or directory of the arguments does not exist.
    fn read(&self) -> Result<CheckTarget, CommandError> {
        let node = self.place.node()?;
        if let Some(path) = &self.conf {
            let failed = |why: &dyn Display| CommandError::usage(format!("--config {path}: {why}"));
            fs::metadata(node.reach(path).map_err(|why| failed(&why))?).map_err(|why| failed(&why))?;
        }
        let found = node.look(None);
        let none = InstallRecord::default();
        let record = found.as_ref().map_or(&none, |found| &found.record);
        // An agent's container lacks the directories that identify a platform.
        let recorded = record.platform.as_deref().and_then(|name| Platform::named(name).ok());
        let platform = self.platform.or(recorded).unwrap_or_else(|| Platform::detect(|path| node.has(path)));
        let programs: Vec<HostPath> = record.with_role(Role::Program).map(|(path, _)| path.clone()).collect();
        let mut bin_dirs: BTreeSet<HostPath> = programs.iter().map(HostPath::parent).collect();
        bin_dirs.extend(HostPath::new(platform.bin_dir).filter(|_| programs.is_empty()));
        // The directory of the cluster network comes first.
        let of_role = |role| record.with_role(role).next().map(|(path, _)| path.parent());
        let recorded = [Role::Entry, Role::OwnList, Role::Configuration].into_iter().find_map(of_role);
        let conf = self.conf.clone().or(recorded).or_else(|| HostPath::new(platform.conf_dir));
        let installed = node.installed_texts().ok().filter(|_| self.conf.is_none()).unwrap_or_default().0;
        let own_list = |(path, file): (&HostPath, &FileRecord)| {
            let (source, kind) = file.source.clone().zip(file.plugin.as_deref())?;
            let difference = node.check_own_list(path, &source, kind).err();
            Some(OwnList { path: path.clone(), source, difference })
        };
        let multus_chain = record.multus_chain.as_ref().map(|directory| {
            let invalid = node.invalid_chain_files(directory);
            (directory.clone(), invalid.unwrap_or_else(|why| vec![why.to_string()]))
        });
        let root = self.place.root()?;
        Ok(CheckTarget {
            mount: root.to_owned(),
            node_name: self.node_name.clone().or_else(|| host_name(root)),
            platform: platform.name.to_owned(),
            chained: match record.files.is_empty() {
                true => platform.chained,
                false => record.files.values().any(|file| file.plugin.is_some()),
            },
            bin_dirs,
            conf: conf.unwrap_or_else(HostPath::root),
            programs,
            installed,
            own_lists: record.with_role(Role::OwnList).filter_map(own_list).collect(),
            multus_chain,
            changed: match &found {
                Ok(found) => Ok((!found.record.files.is_empty()).then(|| changed(found))),
                Err(why) => Err(why.to_string()),
            },
            pod: None,
            probe: false,
        })
    }
}
