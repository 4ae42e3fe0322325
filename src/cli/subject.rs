//! The arguments that several commands share: those that select a pod and a configuration, and those that select
//! a network namespace on this node.

use super::cluster::{ClusterArguments, NodeArguments, ON_NODE, files, on_node, read_text};
use super::kubectl::Kubectl;
use super::output::CommandError;
use super::print_message;
use clap::Args;
use detour_cni::cni::{Code, DEFAULT_INTERFACE, Error};
use detour_cni::firewall::{Destination, Sender};
use detour_cni::inspect::{LiveRules, ManifestTexts, PodManifest, PodSelector, Subject, node_hint};
use detour_cni::netns::find::{FoundNetns, NodeSnapshot};
use detour_cni::netns::{NetNs, interface_with, outgoing_interface};
use detour_cni::pod::Pod;
use detour_cni::state::{ROOT, Store};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// The extensions of the files that `--definitions DIR` reads.
const MANIFEST_EXTENSIONS: [&str; 3] = [".yaml", ".yml", ".json"];

/// Selects a pod, from manifests or from the cluster, and a configuration.
#[derive(Debug, Args)]
pub(super) struct SubjectArguments {
    /// Read pods from this file instead of the cluster; - is stdin
    ///
    /// The file contains pods after injection, or objects with pod templates, as YAML or JSON: one object, several
    /// documents, or a list. A Namespace in it applies to the pods in that namespace.
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Read the pod's Namespace object from this file
    #[arg(long, value_name = "FILE", requires = "file")]
    namespace_file: Option<PathBuf>,
    /// Read the NetworkAttachmentDefinitions of the pod's networks from this file or directory; may be repeated
    ///
    /// Without --config, only the pod's attachments count, as if Multus ran them. With --config, they count too.
    #[arg(long, value_name = "FILE|DIR", requires = "file")]
    definitions: Vec<PathBuf>,
    /// Name of the pod in the cluster; with -f, NAME or KIND/NAME of an object in FILE
    #[arg(value_name = "POD")]
    pod: Option<String>,
    #[command(flatten)]
    cluster: ClusterArguments,
}

impl SubjectArguments {
    /// Returns namespace and name of a pod in the cluster; `None` if files of this machine take part.
    pub(super) fn in_cluster(&self) -> Option<(Option<&str>, Option<&str>)> {
        let uses_files = self.file.is_some() || !self.cluster.configs.is_empty();
        (!uses_files).then_some((self.cluster.namespace.as_deref(), self.pod.as_deref()))
    }

    /// Reads the pod of the cluster that POD names, for commands that do not use its configuration.
    ///
    /// # Errors
    /// As [`ClusterArguments::pod`].
    pub(super) fn live_pod(&self, root: &Path) -> Result<Option<Pod>, CommandError> {
        self.pod.as_deref().map(|pod| self.cluster.pod(pod, root)).transpose()
    }

    /// Reads the pod with kubectl.
    pub(super) fn read_with(&mut self, kubectl: &Kubectl) {
        self.cluster.kubectl = Some(kubectl.clone());
    }

    /// Reads exactly one pod. The node's file system is mounted at `root`.
    ///
    /// # Errors
    /// As [`Self::read_all`]; a file contains several pods.
    pub(super) fn read(&self, root: &Path) -> Result<Subject, CommandError> {
        let mut subjects = self.read_all(root, true)?;
        subjects.pop().ok_or_else(|| CommandError::usage("expected a pod"))
    }

    /// Reads all selected pods, or `only_one`. The node's file system is mounted at `root`.
    ///
    /// # Errors
    /// A file is unreadable or malformed, the cluster does not return the pod, or several pods are selected.
    pub(super) fn read_all(&self, root: &Path, only_one: bool) -> Result<Vec<Subject>, CommandError> {
        let is_stdin = |path: &&PathBuf| path.as_os_str() == "-";
        let paths = [&self.file, &self.namespace_file].into_iter().flatten().chain(&self.cluster.configs);
        if paths.filter(is_stdin).count() > 1 {
            let message =
                "stdin can be read only once: expected - for only one of --file, --config and --namespace-file";
            return Err(CommandError::usage(message));
        }
        match (&self.file, &self.pod) {
            (Some(file), name) => {
                let mut configurations = self.cluster.configurations(root)?;
                if configurations.is_empty() && self.definitions.is_empty() {
                    configurations.push(ClusterArguments::built_in()?);
                }
                let read = |path: &PathBuf| Ok::<_, CommandError>((path.clone(), read_text(path)?));
                let is_manifest = |name: &str| MANIFEST_EXTENSIONS.iter().any(|known| name.ends_with(known));
                let mut definitions = Vec::new();
                for path in &self.definitions {
                    for (path, _) in files(Path::new("/"), path, is_manifest)? {
                        definitions.push(read(&path)?);
                    }
                }
                let namespace = self.namespace_file.as_ref().map(read).transpose()?;
                let texts = ManifestTexts { pods: read(file)?, namespace, definitions };
                let selector = PodSelector { namespace: self.cluster.namespace.as_deref(), name: name.as_deref() };
                let mut manifest = PodManifest::read(&texts, &selector).map_err(CommandError::input)?;
                if self.cluster.configs.is_empty() {
                    // Multus runs the definitions.
                    manifest = manifest.without_devices();
                }
                if let Some(skipped) = manifest.skipped() {
                    let note = format_args!("{}: skipped objects without a pod: {skipped}", file.display());
                    print_message("note", note);
                }
                if only_one {
                    manifest.one().map_err(CommandError::input)?;
                }
                let subject = |pod| manifest.subject(pod, &configurations);
                Ok(manifest.pods.iter().map(subject).collect::<Result<_, _>>()?)
            }
            (None, Some(pod)) => Ok(vec![self.cluster.subject(pod, root)?]),
            _ => Err(CommandError::usage("expected a pod: -f FILE, or -n NAMESPACE POD")),
        }
    }
}

/// Selects a network namespace on this node.
#[derive(Debug, Args)]
pub(super) struct NetnsArguments {
    /// Use the network namespace of this process
    #[arg(long, value_name = "PID", help_heading = ON_NODE)]
    pid: Option<u32>,
    /// Use the network namespace of this container: its ID, or the beginning of the ID
    #[arg(long, value_name = "ID", help_heading = ON_NODE)]
    container: Option<String>,
    #[command(flatten)]
    pub(super) place: NodeArguments,
}

/// The usage error of a command without a network namespace.
pub(super) const NO_NETNS: &str = "expected a network namespace, or a pod: -n NAMESPACE POD";

/// Returns the interface through which the packet leaves, or at which it arrives. An inbound packet arrives at the
/// interface with its destination; the fallback is the interface of the route back. Without a route, it is the pod's
/// default interface.
///
/// # Errors
/// The network namespace can't be entered, or the kernel refuses the request.
pub(super) fn interface_of(netns: &Path, from: Sender, to: Destination) -> Result<String, Error> {
    let address = to.address.ip();
    let find = || match from {
        Sender::Process { uid, .. } => outgoing_interface(address, Some(uid), Some((to.protocol, to.address.port()))),
        Sender::Inbound(client) => match interface_with(address)? {
            Some(interface) => Ok(Some(interface)),
            None => outgoing_interface(client.unwrap_or_else(|| outside(address)), None, None),
        },
    };
    let found = match NetNs::open(netns)? {
        Some(netns) => netns.enter_without_lock(find)?,
        None => None,
    };
    Ok(found.unwrap_or_else(|| DEFAULT_INTERFACE.to_owned()))
}

/// Returns an address that only a default route reaches: it is reserved for documentation (RFC 5737, RFC 3849).
fn outside(to: IpAddr) -> IpAddr {
    match to {
        IpAddr::V4(_) => Ipv4Addr::new(192, 0, 2, 1).into(),
        IpAddr::V6(_) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
    }
}

impl NetnsArguments {
    /// Whether an option selects a network namespace.
    pub(super) const fn is_given(&self) -> bool {
        self.pid.is_some() || self.container.is_some()
    }

    /// Reads the live rules of `pod`, of `netns` (a path, or a name in /run/netns), or of what the options select. `command`
    /// is the command with its arguments except the selector; it is used in the hint to run it on another node.
    ///
    /// # Errors
    /// The namespace is not on this node (if the pod's node is known, with the command to run there) or can't be read.
    pub(super) fn read(
        &self,
        pod: Option<&Pod>,
        netns: Option<&Path>,
        command: &str,
    ) -> Result<LiveRules, CommandError> {
        let root = self.place.root()?;
        let store = Store::new(root.join(ROOT.trim_start_matches('/')));
        let found = match (pod, &self.container) {
            (Some(pod), _) => Some(find_pod(root, pod, command)?),
            (None, Some(id)) => {
                let found = NodeSnapshot::take(root)?.of_container(id)?;
                Some(found_or_error(found, &format!("container {id}"))?)
            }
            (None, None) => None,
        };
        if let Some(found) = found {
            return Ok(LiveRules::of_found(&found, &store)?);
        }
        let path = match (netns, self.pid) {
            (Some(path), _) if is_name(path) => root.join("run/netns").join(path),
            (Some(path), _) => on_node(root, path)?,
            (None, Some(pid)) => root.join(format!("proc/{pid}/ns/net")),
            (None, None) => return Err(CommandError::usage(NO_NETNS)),
        };
        LiveRules::read(&path, &store).map_err(|error| match netns.filter(|_| !path.exists()) {
            Some(name) if is_name(name) => {
                let hint = format!("`ip netns` lists names; to select a pod, use -n NAMESPACE {}", name.display());
                CommandError::input(Error { msg: format!("{}; {hint}", error.msg), ..error })
            }
            Some(_) => CommandError::input(error),
            None => error.into(),
        })
    }
}

fn find_pod(root: &Path, pod: &Pod, command: &str) -> Result<FoundNetns, Error> {
    let name = format!("{}/{}", pod.namespace, pod.name);
    let failed = |why: &str| Error::new(Code::InvalidNetns, format!("pod {name}: {why}"));
    if pod.host_network {
        return Err(failed("no rules: the pod uses its node's network (spec.hostNetwork)"));
    }
    let uid = pod.uid_on_node().ok_or_else(|| failed("can't find the pod on its node: metadata.uid is missing"))?;
    let found =
        NodeSnapshot::take(root).and_then(|node| found_or_error(node.of_pod(pod)?, &format!("pod {name} ({uid})")));
    found.map_err(|error| Error { msg: format!("{}; {}", error.msg, node_hint(pod, command)), ..error })
}

/// Returns whether the argument is a name in /run/netns, as `ip netns` uses it, rather than a path.
fn is_name(path: &Path) -> bool {
    path.components().count() == 1 && path.is_relative()
}

fn found_or_error(found: Option<FoundNetns>, object: &str) -> Result<FoundNetns, Error> {
    let msg = || format!("{object}: not found on this node: it has neither a cached CNI result nor a process here");
    found.ok_or_else(|| Error::new(Code::InvalidNetns, msg()))
}
