//! `detour install`.
//!
//! `detour uninstall`.

use super::CommandError;
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
        what would change on this node, as a unified diff
  detour install --platform openshift --root /host --config /etc/detour/config.json
        from a pod that has the node's file system at /host, with its service account
  detour install --chained=true --conf-name 10-calico.conflist --name istio-cni
        as a member of that list, and also in the place of the program istio-cni

Platforms: openshift (a file of its own, for Multus), gke, k3d, k3s, microk8s, kubernetes (aks, eks,
iks, kind, kubeadm, minikube, rke1, rke2). Installing again repairs what is not as it should be, and
changes nothing else; `detour uninstall` takes all back.

The node configuration, /var/lib/cni/detour/node.json, states which program directory, kubeconfig,
log file, timeouts and pinned sub-plugins apply to every attachment, whatever its author writes.

Exit codes: 0 installed, 1 not all of it (stderr says why), 2 wrong usage or input: no changes.";

/// The largest file of --config, which becomes a part of the plugin's configuration.
const LARGEST_CONFIG: u64 = 1 << 20;
/// The largest file of a service account: the authorities in ca.crt.
const LARGEST_CREDENTIAL: u64 = 1 << 20;

/// Puts this program, a kubeconfig and the plugin's configuration on a node.
///
/// Each file is replaced as a whole: whatever happens, runtimes find a valid configuration, and one
/// that names a program which is there.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct InstallArguments {
    #[command(flatten)]
    wanted: InstallOptions,
    /// Print what would change as a unified diff, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// What is wanted on the node.
#[derive(Debug, Args)]
pub(super) struct InstallOptions {
    /// The kind of node, which implies directories and --chained; else it is detected.
    #[arg(long, value_name = "NAME", value_parser = Platform::named)]
    platform: Option<&'static Platform>,
    #[command(flatten)]
    place: NodeArguments,
    /// Whether the plugin is a member of the cluster network's list, or has a file of its own.
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    chained: Option<bool>,
    /// Whether the runtime calls the plugin as the primary plugin; if not, no attachment can make it one [default: whether the installed configuration is that of a primary plugin].
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    primary: Option<bool>,
    /// The configuration's file: the one to insert into (else the first that is valid), or of its own (istio-cni.conf).
    #[arg(long, value_name = "FILE", value_parser = file_name)]
    conf_name: Option<String>,
    /// Where the node's runtime, or Multus, looks for plugins.
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<HostPath>,
    /// Where the node's runtime, or Multus, looks for configurations.
    #[arg(long, value_name = "DIR")]
    conf_dir: Option<HostPath>,
    /// Another name under which the program is installed: istio-cni, excludedns. May be repeated.
    #[arg(long = "name", value_name = "NAME", value_parser = file_name)]
    names: Vec<String>,
    /// The network's name in a file of its own: the one that attachments use.
    #[arg(long, value_name = "NAME", default_value = "istio-cni")]
    network: String,
    /// A JSON object with keys of the plugin's configuration; they override flags. Without "chain", the
    /// plugin redirects, and UID 1337 and its DNS bypass the sidecar.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// From which severity on the plugin logs: none, error, warn, info, debug.
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = log_level)]
    log_level: String,
    /// Namespaces for whose pods nothing is done, separated by commas.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "istio-system,kube-system")]
    exclude_namespaces: Vec<String>,
    /// The namespace of the agent's own pods, for which nothing is done [default: $POD_NAMESPACE].
    #[arg(long, value_name = "NAME")]
    agent_namespace: Option<String>,
    /// A kubeconfig on the node that the plugin is to use; none is written then.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["token_file", "api_server", "service_account"])]
    kubeconfig: Option<HostPath>,
    /// A token on the node that the kubeconfig names; else the service account's token is written into it.
    #[arg(long, value_name = "FILE")]
    token_file: Option<HostPath>,
    /// Install even if the kubeconfig of --kubeconfig or --config, or a token, is not on the node yet, or not below --root.
    #[arg(long)]
    allow_missing_credentials: bool,
    /// The API's URL [default: from $KUBERNETES_SERVICE_HOST and $KUBERNETES_SERVICE_PORT].
    #[arg(long, value_name = "URL")]
    api_server: Option<String>,
    /// The directory with this pod's ca.crt and token.
    #[arg(long, value_name = "DIR", default_value = "/var/run/secrets/kubernetes.io/serviceaccount")]
    service_account: PathBuf,
}

/// Where the node is.
#[derive(Debug, Args)]
pub(super) struct NodeArguments {
    /// Where the node's file system, or as much of it as is needed, is mounted.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Directory on the node for the installation record, the kubeconfig and, only in the default one, the node configuration.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/cni/detour")]
    state_dir: HostPath,
}

impl NodeArguments {
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Checks that `--root` is a directory: with a misspelled path, the node's files would be written to a new one.
    ///
    /// # Errors
    /// It is not.
    pub(super) fn check_root(&self) -> Result<(), CommandError> {
        if self.root.is_dir() {
            return Ok(());
        }
        Err(CommandError::Usage(format!("--root {}: expected a directory, found none", self.root.display())))
    }

    /// The log of the installation.
    pub(super) fn log(&self) -> HostPath {
        self.state_dir.join("install.json")
    }

    /// The node configuration, if the state directory is the one in which the plugin looks for it.
    fn node_configuration(&self) -> Option<HostPath> {
        HostPath::new(NODE_CONFIGURATION).filter(|path| path.parent() == self.state_dir)
    }

    pub(super) fn node(&self) -> NodeFiles {
        NodeFiles::new(HostRoot::new(&self.root), self.state_dir.clone())
    }
}

fn file_name(text: &str) -> Result<String, String> {
    let plain = !text.is_empty() && !text.starts_with('.') && !text.contains('/');
    plain.then(|| text.to_owned()).ok_or_else(|| "accepted: the name of a file, without a directory".into())
}

fn log_level(text: &str) -> Result<String, String> {
    let accepted = || "accepted: none, error, warn, info, debug".to_owned();
    LogLevel::named(text).map(|_| text.to_owned()).ok_or_else(accepted)
}

impl InstallArguments {
    pub(super) fn run(&self) -> ExitCode {
        super::ended(self.install())
    }

    fn install(&self) -> Result<ExitCode> {
        let node = self.wanted.node()?;
        let platform = Text::message(&format!("note: {}", self.wanted.describe_platform(&node)));
        crate::print(io::stderr(), &platform, ExitCode::SUCCESS);
        let program = program()?;
        let warn = |warnings: Vec<String>| {
            for warning in warnings {
                crate::print(io::stderr(), &Text::message(&format!("warning: {warning}")), ExitCode::SUCCESS);
            }
        };
        let desired = |given| self.wanted.desired(&node, &program, &given, &|| self.wanted.token(), None, &warn);
        let desired = match self.wanted.given().and_then(desired) {
            Ok(desired) => desired,
            Err(why) => return Ok(super::complain(format_args!("{why:#}"), ExitCode::from(2))),
        };
        if self.dry_run {
            let plan = reconcile(&desired, &node.look(Some(&desired))?);
            return Ok(shown(&plan));
        }
        let lock = node.lock()?;
        let plan = reconcile(&desired, &node.look(Some(&desired))?);
        node.apply(&plan, Path::new(PROGRAM_FILE), &lock)?;
        Ok(done(&plan))
    }
}

/// This program's own file.
pub(super) const PROGRAM_FILE: &str = "/proc/self/exe";

/// What tells this program from others.
pub(super) fn program() -> Result<Digest> {
    let digest = follow(Path::new(PROGRAM_FILE)).and_then(Digest::read);
    digest.with_context(|| format!("{PROGRAM_FILE}: this program can't be read, so it can't be copied"))
}

/// Prints what a plan would do.
pub(super) fn shown(plan: &InstallPlan) -> ExitCode {
    let text: String = plan.actions.iter().map(|action| action.diff()).collect();
    let text = if text.is_empty() { "# nothing to do\n".to_owned() } else { text };
    super::say(&Text::lines(text.trim_end()), remarks(plan))
}

/// Prints what a plan did.
pub(super) fn done(plan: &InstallPlan) -> ExitCode {
    let mut text = Text::default();
    for action in &plan.actions {
        text.push(&action.to_string());
        text.end_line();
    }
    if plan.actions.is_empty() {
        text.push("nothing to do");
    }
    super::say(&text, remarks(plan))
}

fn remarks(plan: &InstallPlan) -> ExitCode {
    for note in &plan.notes {
        crate::print(io::stderr(), &Text::message(&format!("note: {note}")), ExitCode::SUCCESS);
    }
    match &plan.waits_for {
        None => ExitCode::SUCCESS,
        Some(what) => super::complain(format_args!("missing: {what}"), ExitCode::FAILURE),
    }
}

impl InstallOptions {
    /// The node.
    ///
    /// # Errors
    /// As [`Place::check_root`].
    pub(super) fn node(&self) -> Result<NodeFiles, CommandError> {
        self.place.check_root().map(|()| self.place.node())
    }

    /// The directories of the files that are read.
    pub(super) fn sources(&self) -> Vec<PathBuf> {
        let account = self.kubeconfig.is_none().then_some(self.service_account.as_path());
        account.into_iter().chain(self.config.as_deref().and_then(Path::parent)).map(Path::to_owned).collect()
    }

    /// What the flags, the environment and the files that they name ask for; `given` has the keys of `--config`.
    /// `token` gives the one for the kubeconfig. With the socket of an agent that stays, the plugin asks
    /// there first. `warn` gets the configuration's warnings.
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
        let directory = |given: &Option<HostPath>, usual: &str| match given {
            Some(path) => Ok(path.clone()),
            None => usual.parse::<HostPath>().map_err(|why| anyhow!(why)),
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
        self.credentials_exist(node, settings.effective_kubeconfig()?.as_ref())?;
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
        let kubeconfig = match &self.kubeconfig {
            Some(_) => None,
            None => Some((own_kubeconfig, self.kubeconfig_text(token)?)),
        };
        Ok(DesiredState {
            installer: env::var("HOSTNAME").unwrap_or_else(|_| "the command line".into()),
            program: program.clone(),
            programs: names.iter().map(|name| bin_dir.join(name)).collect(),
            kubeconfig,
            node: self
                .place
                .node_configuration()
                .map(|path| Ok::<_, InstallError>((path, settings.node()?)))
                .transpose()?,
            configuration,
        })
    }

    /// Checks the files of the node that the plugin is to use: without them, every ADD would fail. `kubeconfig` is
    /// the one that the whole configuration names.
    fn credentials_exist(&self, node: &NodeFiles, kubeconfig: Option<&HostPath>) -> Result<()> {
        if self.allow_missing_credentials {
            return Ok(());
        }
        let root = self.place.root.display();
        let unusable = |what: String| {
            format!(
                "{what}: the plugin can't use this file of the node (below --root {root}); create it first, or add \
                 --allow-missing-credentials"
            )
        };
        if let Some(path) = &self.token_file {
            let read = read_trusted(&node.reach(path)?, LARGEST_CREDENTIAL);
            read.with_context(|| unusable(format!("--token-file {path}")))?;
        }
        let own = self.own_kubeconfig();
        let is_written = |path: &HostPath| self.kubeconfig.is_none() && *path == own;
        let named = kubeconfig.filter(|path| self.kubeconfig.as_ref() != Some(path) && !is_written(path));
        let named = named.map(|path| ("--config: kubernetes.kubeconfig", path));
        for (place, path) in self.kubeconfig.iter().map(|path| ("--kubeconfig", path)).chain(named) {
            self.kubeconfig_works(node, path).with_context(|| unusable(format!("{place} {path}")))?;
        }
        Ok(())
    }

    /// Reads a kubeconfig of the node as the plugin does, with the files that it names.
    fn kubeconfig_works(&self, node: &NodeFiles, path: &HostPath) -> Result<()> {
        let reached = node.reach(path)?;
        read_trusted(&reached, LARGEST_CREDENTIAL)?;
        KubeconfigSummary::read(&self.place.root, &reached).map(drop).map_err(|error| anyhow!("{error}"))
    }

    fn platform(&self, node: &NodeFiles) -> &'static Platform {
        self.platform.unwrap_or_else(|| Platform::detect(|path| node.has(path)))
    }

    /// The platform, how it is known and what it implies, for people.
    pub(super) fn describe_platform(&self, node: &NodeFiles) -> String {
        let Platform { name, bin_dir, conf_dir, .. } = self.platform(node);
        let detected = if self.platform.is_none() { " (detected)" } else { "" };
        let programs = self.bin_dir.as_ref().map_or_else(|| (*bin_dir).to_owned(), ToString::to_string);
        let configuration = self.conf_dir.as_ref().map_or_else(|| (*conf_dir).to_owned(), ToString::to_string);
        format!("platform {name}{detected}: programs in {programs}, configuration in {configuration}")
    }

    /// The names under which the program is installed.
    fn program_names(&self) -> Vec<&str> {
        [PROGRAM].into_iter().chain(self.names.iter().map(String::as_str)).collect()
    }

    /// The keys of `--config`.
    pub(super) fn given(&self) -> Result<Map<String, Value>> {
        let names = self.program_names();
        let Some(path) = &self.config else { return Ok(Map::new()) };
        let file = path.display();
        let text = read(path, LARGEST_CONFIG).with_context(|| format!("--config {file} can't be read"))?;
        let keys: Map<String, Value> =
            serde_json::from_slice(&text).with_context(|| format!("--config {file} is no JSON object"))?;
        match keys.get("type").and_then(Value::as_str) {
            Some(kind) if !names.contains(&kind) => {
                bail!("--config {file}: type: {kind:?} would name no program; add --name {kind}, or leave it out")
            }
            _ => Ok(keys),
        }
    }

    /// The namespace of the agent's own pods.
    pub(super) fn agent_namespace(&self) -> Option<String> {
        self.agent_namespace.clone().or_else(|| env::var("POD_NAMESPACE").ok())
    }

    /// Where the kubeconfig is that is written.
    pub(super) fn own_kubeconfig(&self) -> HostPath {
        self.place.state_dir.join("kubeconfig")
    }

    /// This pod's own token.
    pub(super) fn token(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.read("token")?).trim().to_owned())
    }

    /// The API's URL, as far as it is known.
    fn server(&self) -> Option<String> {
        let in_pod = || {
            let host = env::var("KUBERNETES_SERVICE_HOST").ok()?;
            Some(kubeconfig::server(&host, &env::var("KUBERNETES_SERVICE_PORT").unwrap_or_else(|_| "443".into())))
        };
        self.api_server.clone().or_else(in_pod)
    }

    /// As whom this process asks the API.
    fn account(&self) -> Option<ServiceAccount> {
        Some(ServiceAccount { server: self.server()?, directory: self.service_account.clone() })
    }

    /// As [`Self::account`]; `purpose` is what it is for.
    pub(super) fn account_for(&self, purpose: &str) -> Result<ServiceAccount> {
        let instead =
            if self.kubeconfig.is_some() { " and --service-account DIR in place of --kubeconfig" } else { "" };
        self.account()
            .with_context(|| format!("{purpose}: outside of a pod, name the API by --api-server URL{instead}"))
    }

    fn kubeconfig_text(&self, token: &dyn Fn() -> Result<String>) -> Result<String> {
        let server = self.server().context(
            "how the plugin reaches the API is not known outside a pod: name a kubeconfig on the node (--kubeconfig \
             FILE), or --api-server URL and --service-account DIR",
        )?;
        let ca = self.read("ca.crt")?;
        let credentials = match &self.token_file {
            Some(path) => PluginCredentials::TokenFile(path.clone()),
            None => PluginCredentials::Token(token()?),
        };
        Ok(kubeconfig::text(&server, Some(&ca), &credentials))
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path: &Path = &self.service_account.join(name);
        let read = read_trusted(path, LARGEST_CREDENTIAL);
        read.with_context(|| format!("--service-account: {}: the file can't be read", path.display()))
    }
}

const UNINSTALL_EXAMPLES: &str = "\
Examples:
  detour uninstall --dry-run         what would be taken away from this node, as a unified diff
  detour uninstall --root /host      from a pod that has the node's file system at /host

Pods keep their rules. The configuration is removed first, then the node configuration, the
kubeconfig and the program. Files that were edited after the installation stay, and so do the
files that they need; the output names them.

Exit codes: 0 all is gone, 1 something is left (stderr says what), 2 wrong usage or input.";

/// Takes away what `install` put on a node, as far as nobody changed it since.
#[derive(Debug, Args)]
#[command(after_help = UNINSTALL_EXAMPLES)]
pub(super) struct UninstallArguments {
    #[command(flatten)]
    place: NodeArguments,
    /// Print what would change as a unified diff, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

impl UninstallArguments {
    pub(super) fn run(&self) -> ExitCode {
        super::ended(self.uninstall())
    }

    fn uninstall(&self) -> Result<ExitCode> {
        self.place.check_root()?;
        let node = self.place.node();
        if self.dry_run {
            let found = node.look(None)?;
            return Ok(shown(&undo(&found)));
        }
        let lock = node.lock()?;
        let found = node.look(None)?;
        let plan = undo(&found);
        node.apply(&plan, Path::new(PROGRAM_FILE), &lock)?;
        node.forget_absent();
        node.forget_lock(lock);
        let code = done(&plan);
        Ok(if plan.notes.is_empty() { code } else { ExitCode::FAILURE })
    }
}
