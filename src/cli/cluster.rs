//! The cluster of a command, its kubeconfig, and the files that the command line names.

use super::output::CommandError;
use clap::Args;
use detour_cni::cluster::{AgentPod, UserApi};
use detour_cni::cni::{CniCommand, Error, NetConf};
use detour_cni::inspect::{AppliedConf, Subject};
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The configuration without `--config`.
pub(super) const DEFAULT_CONF: &str = r#"{"cniVersion": "1.1.0", "name": "istio-cni", "type": "detour"}"#;
/// Limit per file. A list of all definitions of a large cluster is smaller.
const MAX_FILE: u64 = 16 << 20;

/// Selects the cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct ConnectionArguments {
    /// Kubeconfig [default: the files in $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE", global = true)]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current context]
    #[arg(long, value_name = "NAME", global = true)]
    context: Option<String>,
    /// Namespace of the agents' pods [default: all namespaces]
    #[arg(long, value_name = "NAMESPACE", global = true)]
    agent_namespace: Option<String>,
}

impl ConnectionArguments {
    /// Opens the API server of the kubeconfig.
    ///
    /// # Errors
    /// The kubeconfig is missing or invalid.
    pub(crate) fn open(&self) -> Result<UserApi, CommandError> {
        if let Some(path) = &self.kubeconfig {
            check_exists("--kubeconfig", path)?;
        }
        UserApi::open(self.kubeconfig.as_deref(), self.context.as_deref()).map_err(CommandError::Input)
    }

    pub(crate) fn agent_namespace(&self) -> Option<&str> {
        self.agent_namespace.as_deref()
    }

    /// Returns the agents' pods on one or all nodes.
    ///
    /// # Errors
    /// The request failed.
    pub(crate) fn agents(&self, api: &UserApi, node: Option<&str>) -> Result<Vec<AgentPod>, Error> {
        api.agents(self.agent_namespace(), node)
    }
}

/// Selects a configuration, and the cluster that has the pod.
#[derive(Debug, Args)]
pub(super) struct ClusterArguments {
    /// Configuration of the plugin; - is stdin [default: for a pod in the cluster, the configuration that is installed on its node; with -f, type detour with its defaults, for every pod]
    ///
    /// A plugin list, a primary plugin's configuration and a recorded stdin of an ADD apply to every pod. Any other
    /// configuration applies to pods whose annotation k8s.v1.cni.cncf.io/networks selects a definition of its name, as
    /// Multus runs it.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Namespace of the pod
    ///
    /// It also selects objects in manifests. Objects without a namespace belong to it, as with kubectl.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(super) namespace: Option<String>,
    /// Kubeconfig for reading the pod [default: $KUBECONFIG, ~/.kube/config, or from --config]
    #[arg(long, value_name = "FILE")]
    pub(super) kubeconfig: Option<PathBuf>,
    /// The cluster as kubectl selects it; `None` for the program's own rules.
    #[arg(skip)]
    pub(super) connection: Option<ConnectionArguments>,
}

impl ClusterArguments {
    /// Parses the file of `--config`, or `default` without it.
    pub(super) fn conf(&self, default: &str) -> Result<AppliedConf, CommandError> {
        Ok(match &self.config {
            Some(path) => AppliedConf::parse(path, &read(path)?).map_err(CommandError::Input)?,
            None => NetConf::parse(default.as_bytes(), CniCommand::Add, "detour")?.into(),
        })
    }

    /// Reads a pod of `--namespace` from the cluster.
    ///
    /// # Errors
    /// The namespace is missing, the configuration is malformed, or the cluster does not return the pod.
    pub(super) fn subject(&self, pod: &str) -> Result<Subject, CommandError> {
        if let Some(connection) = &self.connection {
            let api = connection.open()?;
            let namespace = self.namespace.as_deref().unwrap_or(api.namespace());
            return Ok(Subject::from_source(self.conf(DEFAULT_CONF)?, api.cluster(), (namespace, pod))?);
        }
        let namespace = self.required_namespace(pod)?;
        let kubeconfig = kubeconfig(self.kubeconfig.as_deref())?;
        Ok(Subject::from_cluster(self.conf(DEFAULT_CONF)?, kubeconfig, (namespace, pod))?)
    }

    /// Returns the namespace of a pod.
    ///
    /// # Errors
    /// It is missing.
    pub(super) fn required_namespace(&self, pod: &str) -> Result<&str, CommandError> {
        let missing = || CommandError::Usage(format!("pod {pod:?}: unknown namespace; add -n NAMESPACE"));
        self.namespace.as_deref().ok_or_else(missing)
    }
}

/// Returns the absolute path of the kubeconfig that the flag or else the environment names.
///
/// # Errors
/// The flag names a missing file.
pub(super) fn kubeconfig(flag: Option<&Path>) -> Result<Option<PathBuf>, CommandError> {
    if let Some(path) = flag {
        check_exists("--kubeconfig", path)?;
    }
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(|error| CommandError::Usage(format!("{}: {error}", path.display())))
    };
    flag.map(Path::to_owned).or_else(kubeconfig_from_environment).map(absolute).transpose()
}

/// Returns the first file in `KUBECONFIG`, or `~/.kube/config` if it exists, as kubectl does.
pub(super) fn kubeconfig_from_environment() -> Option<PathBuf> {
    let listed = || env::split_paths(&env::var_os("KUBECONFIG")?).find(|path| !path.as_os_str().is_empty());
    let home = || env::var_os("HOME").filter(|home| !home.is_empty()).map(|home| Path::new(&home).join(".kube/config"));
    listed().or_else(|| home().filter(|path| path.is_file()))
}

/// Checks that the file or directory of a flag exists.
///
/// # Errors
/// `stat` fails.
pub(super) fn check_exists(flag: &str, path: &Path) -> Result<(), CommandError> {
    let failed = |why| CommandError::Usage(format!("{flag} {}: {why}", path.display()));
    fs::metadata(path).map(|_| ()).map_err(failed)
}

pub(super) fn read_failed(path: &Path, why: &dyn Display) -> CommandError {
    CommandError::Usage(format!("can't read {}: {why}", path.display()))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, CommandError> {
    #[expect(clippy::disallowed_methods, reason = "the user may name a pipe, such as <(kubectl get ...)")]
    let source: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(stdin()),
        false => Box::new(File::open(path).map_err(|error| read_failed(path, &error))?),
    };
    let mut bytes = Vec::new();
    source.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|error| read_failed(path, &error))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(read_failed(path, &format!("expected at most {MAX_FILE} bytes, got more")));
    }
    Ok(bytes)
}

/// Reads a UTF-8 file, or stdin if the path is `-`.
///
/// # Errors
/// The file is unreadable, not UTF-8, or larger than [`MAX_FILE`].
pub(super) fn read_text(path: &Path) -> Result<String, CommandError> {
    String::from_utf8(read(path)?).map_err(|_| read_failed(path, &"expected UTF-8"))
}
