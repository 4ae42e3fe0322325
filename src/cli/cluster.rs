//! The cluster of a command, its kubeconfig, and the files that the command line names.

use super::kubectl::Kubectl;
use super::output::CommandError;
use clap::Args;
use detour_cni::agent::install::{HostPath, HostRoot, NodeFiles, state_path};
use detour_cni::cluster::{self, Api, Cluster};
use detour_cni::cni::{
    CniCommand, Code, Error, Kubernetes, NODE_CONFIGURATION, NetConf, OWN_TYPES, is_configuration_file,
};
use detour_cni::inspect::{AppliedConf, ConfigurationOrigin, NO_CREDENTIALS, Subject, socket_lb};
use detour_cni::plugin::node::{self, InstalledText};
use detour_cni::pod::{Facts, Pod, PodRef};
use detour_cni::trusted_file;
use std::env;
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The heading of options that select objects or files of the node on which the command runs; `kubectl detour` hides them.
pub(super) const ON_NODE: &str = "Options on the node";
/// The configuration without `--config`.
pub(super) const DEFAULT_CONF: &str = r#"{"cniVersion": "1.1.0", "name": "istio-cni", "type": "detour"}"#;
/// The timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Limit per file. A list of all definitions of a large cluster is smaller.
const MAX_FILE: u64 = 16 << 20;
/// Limit for a file with a host name. Names have at most 64 bytes (gethostname(2)), but hostname(5) allows comments.
const MAX_HOSTNAME_FILE: u64 = 4 << 10;

/// Selects configurations, and the cluster that has the pod.
#[derive(Debug, Args)]
pub(super) struct ClusterArguments {
    /// Configuration of the plugin, or a directory of configurations; - is stdin; may be repeated [default: for a pod in the cluster, the configuration that is installed on its node; with -f, type detour with its defaults, for every pod]
    ///
    /// A configuration list, a primary plugin's configuration and a recorded stdin of an ADD apply to every pod. Any
    /// other configuration applies to pods whose annotation k8s.v1.cni.cncf.io/networks selects a definition of its
    /// name, as Multus runs it.
    #[arg(long = "config", value_name = "FILE|DIR")]
    pub(super) configs: Vec<PathBuf>,
    /// Namespace of the pod
    ///
    /// It also selects objects in manifests. Objects without a namespace belong to it, as with kubectl.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(super) namespace: Option<String>,
    /// Reads the pod in place of this program's own credentials.
    #[arg(skip)]
    pub(super) kubectl: Option<Kubectl>,
}

impl ClusterArguments {
    /// Parses the files of `--config`; those of a node are below `root`.
    pub(super) fn configurations(&self, root: &Path) -> Result<Vec<AppliedConf>, CommandError> {
        let mut all = Vec::new();
        for path in &self.configs {
            for (place, reached) in files(root, path, is_configuration_file)? {
                let text = read(&reached, &place)?;
                match AppliedConf::parse(&place, &text) {
                    // A directory has configurations of other plugins, too.
                    Err(_) if place != *path && !mentions_own_type(&text) => {}
                    parsed => all.push(parsed.map_err(CommandError::input)?),
                }
            }
        }
        if all.is_empty() && !self.configs.is_empty() {
            let names = self.configs.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
            return Err(CommandError::usage(format!("{names}: no configuration of type {}", OWN_TYPES.join(", "))));
        }
        Ok(all)
    }

    /// Returns the built-in configuration.
    pub(super) fn built_in() -> Result<AppliedConf, CommandError> {
        Ok(NetConf::parse(DEFAULT_CONF.as_bytes(), CniCommand::Add, "detour")?.into())
    }

    /// Reads a pod with the configurations of `--config` or, without it, with those of its node. The file system of this
    /// node is mounted at `root`.
    ///
    /// # Errors
    /// The namespace is missing, a configuration is invalid, or the cluster does not return the pod.
    pub(super) fn subject(&self, pod: &str, root: &Path) -> Result<Subject, CommandError> {
        let configured = self.configurations(root)?;
        if let Some(kubectl) = &self.kubectl {
            let facts = kubectl.facts(self.namespace.as_deref(), pod)?;
            return Ok(Subject::given(&configured, facts, Some(kubectl))?);
        }
        let pod = named_pod(self.namespace.as_deref(), pod)?;
        let source = source(configured.first().map(|applied| &applied.conf), root)?;
        let facts = source.facts(&pod, true)?;
        match configured.is_empty() {
            false => Ok(Subject::given(&configured, facts, Some(&*source))?),
            true => installed_on_node(facts, &*source, root),
        }
    }

    /// Reads a pod whose configuration is not used; `--config` can name the source of facts.
    ///
    /// # Errors
    /// As [`Self::subject`].
    pub(super) fn pod(&self, pod: &str, root: &Path) -> Result<Pod, CommandError> {
        let first = self.configurations(root)?.into_iter().next().map(|applied| applied.conf);
        let pod = named_pod(self.namespace.as_deref(), pod)?;
        Ok(source(first.as_ref(), root)?.facts(&pod, true)?.pod)
    }
}

/// Returns the pod that `-n` and POD name.
///
/// # Errors
/// The namespace is missing.
pub(super) fn named_pod(namespace: Option<&str>, name: &str) -> Result<PodRef, CommandError> {
    let unknown = || CommandError::usage(format!("pod {name:?}: unknown namespace; add -n NAMESPACE"));
    Ok(PodRef { namespace: namespace.ok_or_else(unknown)?.to_owned(), name: name.to_owned(), uid: None })
}

/// The node.
#[derive(Debug, Clone, Args)]
pub(super) struct NodeArguments {
    /// Directory at which the node's file system, or the required part of it, is mounted: /host in the agent's container
    #[arg(long, value_name = "DIR", default_value = "/", help_heading = ON_NODE)]
    root: PathBuf,
}

impl NodeArguments {
    /// Returns the directory.
    ///
    /// # Errors
    /// It is missing or not a directory: `install` would create a misspelled one.
    pub(super) fn root(&self) -> Result<&Path, CommandError> {
        let missing = || CommandError::usage(format!("--root {}: expected a directory", self.root.display()));
        self.root.is_dir().then_some(&*self.root).ok_or_else(missing)
    }

    /// Returns the node's files.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub(super) fn node(&self) -> Result<NodeFiles, CommandError> {
        Ok(NodeFiles::new(HostRoot::new(self.root()?)))
    }
}

/// Returns the path of the kubeconfig that the installation writes.
pub(super) fn own_kubeconfig() -> HostPath {
    state_path("kubeconfig")
}

/// Returns the path itself or, for a directory, its files whose names are accepted, sorted by name. Each one has its path
/// on the node, and where this process reaches it.
pub(super) fn files(
    root: &Path,
    path: &Path,
    accepts: impl Fn(&str) -> bool,
) -> Result<Vec<(PathBuf, PathBuf)>, CommandError> {
    let reached = on_node(root, path)?;
    if !reached.is_dir() {
        return Ok(vec![(path.to_owned(), reached)]);
    }
    let names = trusted_file::names_in(&reached).map_err(|error| read_failed(path, &error))?;
    Ok(names.iter().filter(|name| accepts(name)).map(|name| (path.join(name), reached.join(name))).collect())
}

/// Whether a configuration names a type of this program.
fn mentions_own_type(text: &[u8]) -> bool {
    let text = String::from_utf8_lossy(text);
    OWN_TYPES.iter().any(|kind| text.contains(&format!("{kind:?}")))
}

/// Returns where this process reaches a path on the node, whose file system is mounted at `root`.
///
/// # Errors
/// The path leaves the root.
pub(super) fn on_node(root: &Path, path: &Path) -> Result<PathBuf, CommandError> {
    if root == Path::new("/") || path.is_relative() {
        return Ok(path.to_owned());
    }
    let refused = || CommandError::usage(format!("{}: expected a path without \"..\"", path.display()));
    let reached = HostRoot::new(root).reach(&HostPath::new(path).ok_or_else(refused)?);
    reached.map_err(|error| read_failed(path, &error))
}

/// Returns the source of pods: the one in the configuration, or the API server with the credentials of the pod in which
/// this process runs, or of the plugin on this node.
fn source(conf: Option<&NetConf>, root: &Path) -> Result<Box<dyn Cluster>, CommandError> {
    let reached = |path: &Option<PathBuf>| {
        let path = HostPath::new(path.as_ref().filter(|path| !path.as_os_str().is_empty())?)?;
        HostRoot::new(root).reach(&path).ok()
    };
    // Without retries: the user sees at once why a request fails.
    let of_user = |api: Api| -> Box<dyn Cluster> { Box::new(api.within(TIMEOUT).once()) };
    let of_node = |path| of_user(Api::of_kubeconfig(root, path));
    let of_configuration = |named: &Kubernetes| {
        let kubernetes = Kubernetes {
            kubeconfig: reached(&named.kubeconfig),
            agent_socket: reached(&named.agent_socket),
            manifests_dir: reached(&named.manifests_dir),
            ..named.clone()
        };
        match (&kubernetes.kubeconfig, &kubernetes.agent_socket, &kubernetes.manifests_dir) {
            (Some(path), None, None) => Some(of_node(path.clone())),
            _ => cluster::source(&kubernetes),
        }
    };
    let of_plugin = || reached(&Some(own_kubeconfig().as_path().to_owned())).filter(|path| path.exists()).map(of_node);
    let found = conf.and_then(|conf| of_configuration(&conf.kubernetes));
    let found = found.or_else(|| Api::in_cluster().map(of_user)).or_else(of_plugin);
    found.ok_or_else(|| Error::new(Code::InvalidConfig, NO_CREDENTIALS).into())
}

/// Returns a pod with the configurations that are installed on this node, if the pod is on it; otherwise with the built-in
/// configuration, and the reason.
fn installed_on_node(facts: Facts, cluster: &dyn Cluster, root: &Path) -> Result<Subject, CommandError> {
    let (texts, reason) = match installed(&facts.pod, root) {
        Ok(found) => found,
        Err(reason) => {
            let origin = ConfigurationOrigin { reason: Some(reason), ..ConfigurationOrigin::default() };
            let built_in = AppliedConf { origin, ..ClusterArguments::built_in()? };
            return Ok(Subject::given(&[built_in], facts, Some(cluster))?);
        }
    };
    let node = node::read(NODE_CONFIGURATION, &on_node(root, Path::new(NODE_CONFIGURATION))?)?.map(|(node, _)| node);
    let applied =
        texts.iter().map(|text| AppliedConf::installed(text, node.as_ref())).collect::<Result<Vec<_>, _>>()?;
    let mut subject = Subject::given(&applied, facts, Some(cluster))?;
    subject.origin.reason = reason;
    // The command runs on the pod's node.
    Ok(Subject { socket_lb: socket_lb::products(root).unwrap_or_default(), ..subject })
}

/// Returns the configurations that are installed on this node, and why they may be incomplete. The error is the reason
/// why they don't apply to the pod.
fn installed(pod: &Pod, root: &Path) -> Result<(Vec<InstalledText>, Option<String>), String> {
    let Some(node) = pod.node_name.as_deref() else { return Err("the pod is not scheduled to a node".to_owned()) };
    if host_name(root).is_none_or(|name| name != node) {
        return Err(format!("this is not the pod's node {node}"));
    }
    let (texts, missing) = NodeFiles::new(HostRoot::new(root)).installed_texts()?;
    let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let reason = (!missing.is_empty()).then(|| format!("not found: {}", missing.join(", ")));
    if texts.is_empty() {
        return Err(reason.unwrap_or_else(|| format!("no configuration is installed on node {node}")));
    }
    Ok((texts, reason))
}

pub(super) fn read_failed(path: &Path, why: &dyn Display) -> CommandError {
    CommandError::usage(format!("can't read {}: {why}", path.display()))
}

/// Reads a file, or stdin if the path is `-`; `place` is its name for messages.
fn read(path: &Path, place: &Path) -> Result<Vec<u8>, CommandError> {
    #[expect(clippy::disallowed_methods, reason = "the user may name a pipe, such as <(kubectl get ...)")]
    let source: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(stdin()),
        false => Box::new(File::open(path).map_err(|error| read_failed(place, &error))?),
    };
    let mut bytes = Vec::new();
    source.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|error| read_failed(place, &error))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(read_failed(place, &format!("expected at most {MAX_FILE} bytes, got more")));
    }
    Ok(bytes)
}

/// Reads a UTF-8 file, or stdin if the path is `-`.
///
/// # Errors
/// The file is unreadable, not UTF-8, or larger than [`MAX_FILE`].
pub(super) fn read_text(path: &Path) -> Result<String, CommandError> {
    String::from_utf8(read(path, path)?).map_err(|_| read_failed(path, &"expected UTF-8"))
}

/// Returns an environment variable, unless it is empty.
pub(super) fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the Node object's name as the kubelet derives it by default.
///
/// With another root, this process may run in a pod: then the kernel returns the pod's host name, and only
/// /etc/hostname of the node is reliable.
pub(super) fn host_name(root: &Path) -> Option<String> {
    let path = Path::new(if root == Path::new("/") { "/proc/sys/kernel/hostname" } else { "/etc/hostname" });
    let text = || trusted_file::read_nofollow(&on_node(root, path).ok()?, MAX_HOSTNAME_FILE).ok();
    let name = || Some(String::from_utf8_lossy(&text()?).trim().to_lowercase());
    variable("NODE_NAME").or_else(|| name().filter(|name| !name.is_empty()))
}
