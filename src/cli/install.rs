//! `detour install` and `detour uninstall`: change the files of the plugin on a node.

use super::output::CommandError;
use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgAction, Args};
use detour_cni::agent::install::kubeconfig::PluginCredentials;
use detour_cni::agent::install::plan::undo;
use detour_cni::agent::install::{
    ConfigurationTarget, DesiredState, Digest, EntrySettings, HostPath, HostRoot, InstallError, InstallPlan, NodeFiles,
    PROGRAM, Platform, kubeconfig, reconcile,
};
use detour_cni::cluster::{KubeconfigSummary, ServiceAccount};
use detour_cni::cni::{LogLevel, NODE_CONFIGURATION};
use detour_cni::printable::Text;
use detour_cni::trusted_file::{follow, read, read_trusted};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, io};

const EXAMPLES: &str = "\
Examples:
  detour install --dry-run --kubeconfig /etc/kubernetes/detour.kubeconfig
        show what would change on this node, as a unified diff
  detour install --platform openshift --root /host --config /etc/detour/config.json
        install from a pod that mounts the node's file system at /host, with its service account
  detour install --chained=true --conf-name 10-calico.conflist --name istio-cni
        add the plugin to this plugin list, and install the program also under the name istio-cni

Platforms: openshift (aro, crc, ocp, okd, rosa) and microshift, both with a separate configuration
file for Multus; gke, k3d, k3s, microk8s, bottlerocket, minikube; and kubernetes (aks, default, eks,
iks, k0s, kind, kubeadm, rke1, rke2, talos).

Repeat the command to restore missing or changed files; it changes nothing else. To revert all
changes, use `detour uninstall`. With invalid arguments or input, the command changes nothing.

The node configuration, /var/lib/cni/detour/node.json, contains the program directory, kubeconfig,
log file, timeouts and pinned sub-plugins. They apply to every attachment and override its values.

Exit codes: 0 success, 1 incomplete (see stderr), 2 invalid arguments or input.";

const UNINSTALL_EXAMPLES: &str = "\
Examples:
  detour uninstall --dry-run
        show what would change on this node, as a unified diff
  detour uninstall --root /host
        uninstall from a pod that mounts the node's file system at /host

Pods keep their rules. The command first removes the configuration, then the node configuration, the
kubeconfig and the program. It keeps files that were edited after the installation and the files
that they require, and lists them.

Exit codes: 0 success, 1 incomplete (see stderr), 2 invalid arguments or input.";

/// The running program's file.
pub(super) const PROGRAM_FILE: &str = "/proc/self/exe";
/// Limit for the file of `--config`, which becomes part of the plugin's configuration.
const MAX_CONFIG: u64 = 1 << 20;
/// Limit for each credential file. The largest is ca.crt.
const MAX_CREDENTIAL: u64 = 1 << 20;

/// Install the program, a kubeconfig and the plugin's configuration on a node
///
/// The command replaces each file atomically. At any time, runtimes find a valid configuration that names an existing
/// program.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct InstallArguments {
    #[command(flatten)]
    options: InstallOptions,
    /// Print the changes as a unified diff, without making them
    #[arg(long)]
    dry_run: bool,
}

/// Revert the changes of `install`, and keep files that were edited afterwards
#[derive(Debug, Args)]
#[command(after_help = UNINSTALL_EXAMPLES)]
pub(super) struct UninstallArguments {
    #[command(flatten)]
    place: NodeArguments,
    /// Print the changes as a unified diff, without making them
    #[arg(long)]
    dry_run: bool,
}

/// The desired installation.
#[derive(Debug, Args)]
pub(super) struct InstallOptions {
    /// Platform of the node, which determines directories and --chained [default: detected]
    #[arg(long, value_name = "NAME", value_parser = Platform::named)]
    platform: Option<&'static Platform>,
    #[command(flatten)]
    place: NodeArguments,
    /// Add the plugin to the cluster network's plugin list (true), or write a separate configuration file (false) [default: depends on the platform]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    chained: Option<bool>,
    /// Whether the runtime calls the plugin as the primary plugin; if false, attachments can't make it the primary plugin [default: depends on the installed configuration]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    primary: Option<bool>,
    /// Configuration file to change or write [default: the first valid plugin list with --chained=true, else istio-cni.conf]
    #[arg(long, value_name = "FILE", value_parser = parse_file_name)]
    conf_name: Option<String>,
    /// Directory on the node from which the runtime, or Multus, runs plugins [default: depends on the platform]
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<HostPath>,
    /// Directory on the node from which the runtime, or Multus, reads configurations [default: depends on the platform]
    #[arg(long, value_name = "DIR")]
    conf_dir: Option<HostPath>,
    /// Install the program also under this name: istio-cni or excludedns; may be repeated
    #[arg(long = "name", value_name = "NAME", value_parser = parse_file_name)]
    names: Vec<String>,
    /// Name of the network in a separate configuration file; attachments refer to it
    #[arg(long, value_name = "NAME", default_value = "istio-cni")]
    network: String,
    /// JSON object with keys of the plugin's configuration, which override flags. Without "chain", the plugin
    /// redirects traffic, and UID 1337 and its DNS bypass the sidecar
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Lowest severity that the plugin logs: none, error, warn, info or debug
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = parse_log_level)]
    log_level: String,
    /// Skip the pods in these namespaces, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "istio-system,kube-system")]
    exclude_namespaces: Vec<String>,
    /// Namespace of the agent's pods; the plugin skips these pods [default: $POD_NAMESPACE]
    #[arg(long, value_name = "NAME")]
    agent_namespace: Option<String>,
    /// Kubeconfig on the node for the plugin [default: write one with the service account]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["token_file", "api_server", "service_account"])]
    kubeconfig: Option<HostPath>,
    /// Token file on the node to which the written kubeconfig refers [default: write the service account's token into it]
    #[arg(long, value_name = "FILE")]
    token_file: Option<HostPath>,
    /// Install even if a kubeconfig or token file that --kubeconfig, --token-file or --config names is missing on the node (below --root)
    #[arg(long)]
    allow_missing_credentials: bool,
    /// URL of the API server [default: from $KUBERNETES_SERVICE_HOST and $KUBERNETES_SERVICE_PORT]
    #[arg(long, value_name = "URL")]
    api_server: Option<String>,
    /// Directory with ca.crt and token of this pod's service account
    #[arg(long, value_name = "DIR", default_value = "/var/run/secrets/kubernetes.io/serviceaccount")]
    service_account: PathBuf,
}

/// The node's directories.
#[derive(Debug, Args)]
pub(super) struct NodeArguments {
    /// Directory at which the node's file system, or the required part of it, is mounted
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Directory on the node for the installation record and the kubeconfig; the default directory also contains the node configuration
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cni/detour")]
    state_dir: HostPath,
}

impl NodeArguments {
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Checks that `--root` is a directory, because `install` would create a misspelled one.
    ///
    /// # Errors
    /// It is missing or not a directory.
    pub(super) fn check_root(&self) -> Result<(), CommandError> {
        if self.root.is_dir() {
            return Ok(());
        }
        Err(CommandError::Usage(format!("--root {}: expected a directory", self.root.display())))
    }

    /// Returns the path of the installation record.
    pub(super) fn record_path(&self) -> HostPath {
        self.state_dir.join("install.json")
    }

    /// Returns the path of the node configuration if it is in the state directory: the plugin reads no other path.
    fn node_configuration(&self) -> Option<HostPath> {
        HostPath::new(NODE_CONFIGURATION).filter(|path| path.parent() == self.state_dir)
    }

    pub(super) fn node(&self) -> NodeFiles {
        NodeFiles::new(HostRoot::new(&self.root), self.state_dir.clone())
    }
}

fn parse_file_name(text: &str) -> Result<String, String> {
    let is_plain = !text.is_empty() && !text.starts_with('.') && !text.contains('/');
    is_plain.then(|| text.to_owned()).ok_or_else(|| "expected a file name without a directory".into())
}

fn parse_log_level(text: &str) -> Result<String, String> {
    let expected = || "expected none, error, warn, info or debug".to_owned();
    LogLevel::named(text).map(|_| text.to_owned()).ok_or_else(expected)
}

impl InstallArguments {
    pub(super) fn run(&self) -> ExitCode {
        super::exit_code(self.install())
    }

    fn install(&self) -> Result<ExitCode> {
        let node = self.options.node()?;
        print_note("note", &self.options.describe_platform(&node));
        let program = program_digest()?;
        let warn = |warnings: Vec<String>| warnings.iter().for_each(|warning| print_note("warning", warning));
        let token = || self.options.token();
        let desired = |keys| self.options.desired(&node, &program, &keys, &token, None, &warn);
        let desired = match self.options.config_keys().and_then(desired) {
            Ok(desired) => desired,
            Err(why) => return Ok(super::print_error(format_args!("{why:#}"), ExitCode::from(2))),
        };
        if self.dry_run {
            let plan = reconcile(&desired, &node.look(Some(&desired))?);
            return Ok(print_diff(&plan));
        }
        let lock = node.lock()?;
        let plan = reconcile(&desired, &node.look(Some(&desired))?);
        node.apply(&plan, Path::new(PROGRAM_FILE), &lock)?;
        Ok(print_changes(&plan))
    }
}

impl UninstallArguments {
    pub(super) fn run(&self) -> ExitCode {
        super::exit_code(self.uninstall())
    }

    fn uninstall(&self) -> Result<ExitCode> {
        self.place.check_root()?;
        let node = self.place.node();
        if self.dry_run {
            let found = node.look(None)?;
            return Ok(print_diff(&undo(&found)));
        }
        let lock = node.lock()?;
        let found = node.look(None)?;
        let plan = undo(&found);
        node.apply(&plan, Path::new(PROGRAM_FILE), &lock)?;
        node.forget_absent();
        node.forget_lock(lock);
        let code = print_changes(&plan);
        Ok(if plan.notes.is_empty() { code } else { ExitCode::FAILURE })
    }
}

/// Returns the digest of the running program.
pub(super) fn program_digest() -> Result<Digest> {
    let digest = follow(Path::new(PROGRAM_FILE)).and_then(Digest::read);
    digest.with_context(|| format!("can't read the running program for copying: {PROGRAM_FILE}"))
}

/// Prints the changes that a plan would make, as a unified diff.
fn print_diff(plan: &InstallPlan) -> ExitCode {
    let text: String = plan.actions.iter().map(|action| action.diff()).collect();
    let text = if text.is_empty() { "# nothing to do\n".to_owned() } else { text };
    super::print_output(&Text::lines(text.trim_end()), print_notes(plan))
}

/// Prints the changes that a plan has made.
fn print_changes(plan: &InstallPlan) -> ExitCode {
    let mut text = Text::default();
    for action in &plan.actions {
        text.push(&action.to_string());
        text.end_line();
    }
    if plan.actions.is_empty() {
        text.push("nothing to do");
    }
    super::print_output(&text, print_notes(plan))
}

/// Prints the plan's notes to stderr and returns a failure if the plan is incomplete.
fn print_notes(plan: &InstallPlan) -> ExitCode {
    plan.notes.iter().for_each(|note| print_note("note", note));
    match &plan.waits_for {
        None => ExitCode::SUCCESS,
        Some(what) => super::print_error(format_args!("missing: {what}"), ExitCode::FAILURE),
    }
}

fn print_note(kind: &str, text: &str) {
    crate::print(io::stderr(), &Text::message(&format!("{kind}: {text}")), ExitCode::SUCCESS);
}

impl InstallOptions {
    /// Returns the node's files.
    ///
    /// # Errors
    /// Those of [`NodeArguments::check_root`].
    pub(super) fn node(&self) -> Result<NodeFiles, CommandError> {
        self.place.check_root().map(|()| self.place.node())
    }

    /// Returns the directories of the input files, which the agent watches for changes.
    pub(super) fn source_directories(&self) -> Vec<PathBuf> {
        let account = self.kubeconfig.is_none().then_some(self.service_account.as_path());
        account.into_iter().chain(self.config.as_deref().and_then(Path::parent)).map(Path::to_owned).collect()
    }

    /// Returns the installation that the flags, the environment and the input files describe.
    ///
    /// `given` has the keys of `--config`, `token` returns the token for the kubeconfig, `socket` is the path of the
    /// agent's socket if an agent serves the plugin, and `warn` receives the configuration's warnings.
    ///
    /// # Errors
    /// The plugin would refuse the configuration, or an input file or a credential on the node is unusable.
    pub(super) fn desired(
        &self,
        node: &NodeFiles,
        program: &Digest,
        given: &Map<String, Value>,
        token: &dyn Fn() -> Result<String>,
        socket: Option<&HostPath>,
        warn: &dyn Fn(Vec<String>),
    ) -> Result<DesiredState> {
        let platform = self.platform(node);
        let directory = |flag: &Option<HostPath>, default: &str| match flag {
            Some(path) => Ok(path.clone()),
            None => default.parse::<HostPath>().map_err(|why| anyhow!(why)),
        };
        let bin_dir = directory(&self.bin_dir, platform.bin_dir)?;
        let conf_dir = directory(&self.conf_dir, platform.conf_dir)?;
        let names = self.program_names();
        let own_kubeconfig = self.own_kubeconfig();
        let settings = EntrySettings {
            given: given.clone(),
            log_level: self.log_level.clone(),
            kubeconfig: self.kubeconfig.clone().unwrap_or_else(|| own_kubeconfig.clone()),
            agent_socket: socket.cloned(),
            exclude_namespaces: self.exclude_namespaces.iter().filter(|name| !name.is_empty()).cloned().collect(),
            agent_namespace: self.agent_namespace(),
            bin_dir: bin_dir.clone(),
            primary: self.primary,
        };
        self.check_credentials(node, settings.effective_kubeconfig()?.as_ref())?;
        let directories = settings.program_directories()?;
        let is_installed =
            |kind: &str| if names.contains(&kind) { Some(true) } else { node.has_program(kind, &directories) };
        warn(settings.check(&is_installed)?);
        let configuration = if self.chained.unwrap_or(platform.chained) {
            ConfigurationTarget::Listed { dir: conf_dir, file: self.conf_name.clone(), entry: settings.member()? }
        } else {
            let name = self.conf_name.as_deref().unwrap_or("istio-cni.conf");
            ConfigurationTarget::Own { path: conf_dir.join(name), text: settings.standalone(&self.network)? }
        };
        let node_configuration = self.place.node_configuration();
        let node_configuration = node_configuration.map(|path| Ok::<_, InstallError>((path, settings.node()?)));
        let kubeconfig = match &self.kubeconfig {
            Some(_) => None,
            None => Some((own_kubeconfig, self.kubeconfig_text(token)?)),
        };
        Ok(DesiredState {
            installer: env::var("HOSTNAME").unwrap_or_else(|_| "the command line".into()),
            program: program.clone(),
            programs: names.iter().map(|name| bin_dir.join(name)).collect(),
            kubeconfig,
            node: node_configuration.transpose()?,
            configuration,
        })
    }

    /// Checks that the plugin can use the credentials on the node, because every ADD needs them.
    ///
    /// `kubeconfig` is the one that the whole configuration names.
    fn check_credentials(&self, node: &NodeFiles, kubeconfig: Option<&HostPath>) -> Result<()> {
        if self.allow_missing_credentials {
            return Ok(());
        }
        let root = self.place.root.display();
        let unusable = |file: String| {
            format!(
                "{file}: the plugin can't use this file of the node (below --root {root}); create it first, or add \
                 --allow-missing-credentials"
            )
        };
        if let Some(path) = &self.token_file {
            let read = read_trusted(&node.reach(path)?, MAX_CREDENTIAL);
            read.with_context(|| unusable(format!("--token-file {path}")))?;
        }
        let own = self.own_kubeconfig();
        let is_written = |path: &HostPath| self.kubeconfig.is_none() && *path == own;
        let named = kubeconfig.filter(|path| self.kubeconfig.as_ref() != Some(path) && !is_written(path));
        let named = named.map(|path| ("--config: kubernetes.kubeconfig", path));
        for (place, path) in self.kubeconfig.iter().map(|path| ("--kubeconfig", path)).chain(named) {
            self.check_kubeconfig(node, path).with_context(|| unusable(format!("{place} {path}")))?;
        }
        Ok(())
    }

    /// Reads a kubeconfig on the node as the plugin does, with the files to which it refers.
    fn check_kubeconfig(&self, node: &NodeFiles, path: &HostPath) -> Result<()> {
        let reached = node.reach(path)?;
        read_trusted(&reached, MAX_CREDENTIAL)?;
        KubeconfigSummary::read(&self.place.root, &reached).map(drop).map_err(|error| anyhow!("{error}"))
    }

    fn platform(&self, node: &NodeFiles) -> &'static Platform {
        self.platform.unwrap_or_else(|| Platform::detect(|path| node.has(path)))
    }

    /// Returns the platform and the directories in use, as a note for the user.
    pub(super) fn describe_platform(&self, node: &NodeFiles) -> String {
        let Platform { name, bin_dir, conf_dir, .. } = self.platform(node);
        let detected = if self.platform.is_none() { " (detected)" } else { "" };
        let programs = self.bin_dir.as_ref().map_or_else(|| (*bin_dir).to_owned(), ToString::to_string);
        let configuration = self.conf_dir.as_ref().map_or_else(|| (*conf_dir).to_owned(), ToString::to_string);
        format!("platform {name}{detected}: programs in {programs}, configuration in {configuration}")
    }

    /// Returns the names under which the program is installed.
    fn program_names(&self) -> Vec<&str> {
        [PROGRAM].into_iter().chain(self.names.iter().map(String::as_str)).collect()
    }

    /// Returns the keys in the file of `--config`.
    pub(super) fn config_keys(&self) -> Result<Map<String, Value>> {
        let names = self.program_names();
        let Some(path) = &self.config else { return Ok(Map::new()) };
        let file = path.display();
        let text = read(path, MAX_CONFIG).with_context(|| format!("can't read --config {file}"))?;
        let keys: Map<String, Value> =
            serde_json::from_slice(&text).with_context(|| format!("--config {file}: expected a JSON object"))?;
        match keys.get("type").and_then(Value::as_str) {
            Some(kind) if !names.contains(&kind) => {
                bail!(
                    "--config {file}: type: expected {}, got {kind:?}; add --name {kind}, or remove the key",
                    names.join(" or ")
                )
            }
            _ => Ok(keys),
        }
    }

    /// Returns the namespace of the agent's pods.
    pub(super) fn agent_namespace(&self) -> Option<String> {
        self.agent_namespace.clone().or_else(|| env::var("POD_NAMESPACE").ok())
    }

    /// Returns the path of the kubeconfig that the installation writes.
    pub(super) fn own_kubeconfig(&self) -> HostPath {
        self.place.state_dir.join("kubeconfig")
    }

    /// Returns the token of this pod's service account.
    pub(super) fn token(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.read_credential("token")?).trim().to_owned())
    }

    /// Returns the URL of the API server, `None` if neither a flag nor the environment of a pod contains it.
    fn server(&self) -> Option<String> {
        let in_pod = || {
            let host = env::var("KUBERNETES_SERVICE_HOST").ok()?;
            Some(kubeconfig::server(&host, &env::var("KUBERNETES_SERVICE_PORT").unwrap_or_else(|_| "443".into())))
        };
        self.api_server.clone().or_else(in_pod)
    }

    /// Returns the service account for this process's own API requests; `purpose` is for the error message.
    pub(super) fn account_for(&self, purpose: &str) -> Result<ServiceAccount> {
        let server = self.server().with_context(|| {
            let instead =
                if self.kubeconfig.is_some() { " and --service-account DIR in place of --kubeconfig" } else { "" };
            format!("{purpose}: unknown API server; outside of a pod, add --api-server URL{instead}")
        })?;
        Ok(ServiceAccount { server, directory: self.service_account.clone() })
    }

    fn kubeconfig_text(&self, token: &dyn Fn() -> Result<String>) -> Result<String> {
        let server = self.server().context(
            "can't write a kubeconfig for the plugin: unknown API server; outside of a pod, add --kubeconfig FILE with \
             a file on the node, or --api-server URL and --service-account DIR",
        )?;
        let ca = self.read_credential("ca.crt")?;
        let credentials = match &self.token_file {
            Some(path) => PluginCredentials::TokenFile(path.clone()),
            None => PluginCredentials::Token(token()?),
        };
        Ok(kubeconfig::text(&server, Some(&ca), &credentials))
    }

    fn read_credential(&self, name: &str) -> Result<Vec<u8>> {
        let path: &Path = &self.service_account.join(name);
        read_trusted(path, MAX_CREDENTIAL).with_context(|| format!("can't read --service-account: {}", path.display()))
    }
}
