//! The flags of an installation, which `detour install` and `detour agent` share, and the desired state that they
//! describe.

use super::PROGRAM_FILE;
use crate::cli::cluster::{NodeArguments, own_kubeconfig, variable};
use crate::cli::output::CommandError;
use anyhow::{Context, Result, anyhow, ensure};
use clap::{ArgAction, Args};
use detour_cni::agent::install::{
    Attachment, CHAIN_FILE, Content, DesiredFile, DesiredState, Digest, Entry, GivenKeys, HostPath, ListEntry,
    NodeFiles, PROGRAM, Platform, Role, kubeconfig, server_url,
};
use detour_cni::cluster::{Api, KubeconfigSummary};
use detour_cni::cni::{
    AUTO_DIALECT, GROUP_FILE, NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NetConf, NodeConf, RuleFormat,
    primary_in_attachment,
};
use detour_cni::inspect::kubeconfig_warning;
use detour_cni::plugin::probe::needed_format;
use detour_cni::plugin::{TargetNode, validate};
use detour_cni::trusted_file::{read, read_trusted};
use serde_json::json;
use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The rule format that this kernel needs, found once: the agent evaluates the configuration again and again.
static NEEDED_FORMAT: LazyLock<Option<RuleFormat>> = LazyLock::new(needed_format);
/// Multus's directory of configurations, for the files of attachments beside an entry in the cluster network's list.
const ATTACHMENT_DIRECTORY: &str = "/etc/cni/multus/net.d";
/// The namespaces whose pods are skipped, unless the administrator's keys name others.
const DEFAULT_EXCLUDED: [&str; 2] = ["istio-system", "kube-system"];
/// Limit for each file of an administrator or of a service account.
const MAX_FILE: u64 = 1 << 20;

/// The desired installation.
#[derive(Debug, Clone, Args)]
pub(in crate::cli) struct InstallOptions {
    /// Platform of the node, which determines directories and --chained [default: detected]
    #[arg(long, value_name = "NAME", value_parser = Platform::named)]
    platform: Option<&'static Platform>,
    #[command(flatten)]
    place: NodeArguments,
    /// Add the plugin to the cluster network's configuration list (true), or write a separate configuration file (false) [default: depends on the platform]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    chained: Option<bool>,
    /// Add the plugin to a copy of the cluster network's configuration list, 00-detour.conflist, which runtimes use instead (true), or to the list itself (false); only `detour agent` follows changes of the list [default: false]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, default_value_t = false, hide_default_value = true)]
    own_list: bool,
    /// Whether the runtime calls the plugin as the primary plugin; if false, attachments can't make it the primary plugin [default: depends on the installed configuration]
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    pub(in crate::cli) primary: Option<bool>,
    /// Configuration file to change, copy (--own-list=true) or write [default: the first valid configuration list with --chained=true, otherwise istio-cni.conf; with --attachments and --chained=false, it is not used]
    #[arg(long, value_name = "FILE", value_parser = parse_file_name)]
    conf_name: Option<String>,
    /// Directory on the node from which the runtime, or Multus, runs plugins [default: depends on the platform]
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<HostPath>,
    /// Directory on the node from which the runtime, or Multus, reads configurations [default: depends on the platform]
    #[arg(long, value_name = "DIR")]
    conf_dir: Option<HostPath>,
    /// Further names of the program; only `detour install` has a flag for them.
    #[arg(skip)]
    pub(super) names: Vec<String>,
    /// JSON object with keys of the plugin's configuration, which override flags. Without "chain", the plugin
    /// redirects traffic, and UID 1337 and its DNS bypass the sidecar
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// JSON array of attachments: objects with a name, and keys of the plugin's configuration that override those of
    /// --config. Each one becomes the configuration file NAME.conf of the network NAME, in --conf-dir, or with
    /// --chained=true in /etc/cni/multus/net.d
    #[arg(long, value_name = "FILE")]
    attachments: Option<PathBuf>,
    /// Directory of Multus's auxiliary chain on the node (auxiliaryCNIChainName): write detour.conf there too (only there if the configuration only excludes), so that Multus runs the plugin for every pod [default: no such file]
    #[arg(long, value_name = "DIR")]
    multus_chain: Option<HostPath>,
    /// Kubeconfig on the node for the plugin [default: write one with the service account]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["api_server", "service_account"])]
    kubeconfig: Option<HostPath>,
    /// URL of the API server [default: from $KUBERNETES_SERVICE_HOST and $KUBERNETES_SERVICE_PORT]
    #[arg(long, value_name = "URL")]
    api_server: Option<String>,
    /// Directory with ca.crt and token of this pod's service account
    #[arg(long, value_name = "DIR", default_value = "/var/run/secrets/kubernetes.io/serviceaccount")]
    service_account: PathBuf,
}

pub(in crate::cli) fn parse_file_name(text: &str) -> Result<String, String> {
    match text.is_empty() || text.starts_with('.') || text.contains('/') {
        true => Err("expected a file name without a directory".into()),
        false => Ok(text.to_owned()),
    }
}

impl InstallOptions {
    /// Returns the node's files.
    ///
    /// # Errors
    /// Those of [`NodeArguments::root`]; flags contradict each other.
    pub(in crate::cli) fn node(&self) -> Result<NodeFiles, CommandError> {
        let node = self.place.node()?;
        let platform = self.platform(&node);
        let is_chained = self.chained.unwrap_or(platform.chained);
        let default =
            if self.chained.is_none() { format!(", the default of {}", platform.name) } else { String::new() };
        match &self.multus_chain {
            _ if self.own_list && !is_chained => {
                Err(CommandError::usage(format!("--own-list=true: expected --chained=true, got false{default}")))
            }
            Some(directory) if is_chained => Err(CommandError::usage(format!(
                "--multus-chain {directory}: expected --chained=false, got true{default}; the plugin would run twice for \
                 each pod"
            ))),
            _ => Ok(node),
        }
    }

    /// Returns the directories of the input files, which the agent watches for changes.
    pub(in crate::cli) fn source_directories(&self) -> Vec<PathBuf> {
        let account = self.kubeconfig.is_none().then_some(self.service_account.as_path());
        let files = [&self.config, &self.attachments].into_iter().flatten();
        let directories: BTreeSet<_> = account.into_iter().chain(files.filter_map(|file| file.parent())).collect();
        directories.into_iter().map(Path::to_owned).collect()
    }

    /// Returns the installation that the flags, the environment and the input files describe.
    ///
    /// `given` is the content of `--config` and `--attachments`, and `token` returns the token for the kubeconfig, whose
    /// failure is a part of the result; without `token`, the plugin has no kubeconfig.
    /// `socket` is the path of the agent's socket if an agent serves the plugin. `warn` receives the configuration's
    /// warnings.
    ///
    /// # Errors
    /// The plugin would reject the configuration, an input file or a kubeconfig that it names is unusable, or the API server
    /// is unknown.
    pub(in crate::cli) fn desired(
        &self,
        node: &NodeFiles,
        program: &Digest,
        given: &GivenKeys,
        token: Option<&dyn Fn() -> Result<String>>,
        socket: Option<&HostPath>,
        warn: &dyn Fn(Vec<String>),
    ) -> Result<DesiredState> {
        let platform = self.platform(node);
        let (bin_dir, conf_dir) = (self.bin_dir(node), self.conf_dir(node));
        let is_chained = self.chained.unwrap_or(platform.chained);
        let auto_format = if platform.nftables { Some(RuleFormat::Nftables) } else { *NEEDED_FORMAT };
        let own = json!({
            "type": PROGRAM,
            "log_level": "info",
            "kubernetes": {
                "kubeconfig": self.kubeconfig.clone().or_else(|| token.map(|_| own_kubeconfig())),
                "cni_bin_dir": bin_dir,
                "exclude_namespaces": DEFAULT_EXCLUDED,
                "agent_socket": socket,
                "agent_namespace": agent_namespace(),
            },
            (AUTO_DIALECT): auto_format.map(RuleFormat::name),
        });
        let entry = Entry::new(&own, &[&given.config])?;
        let only_in_chain = self.multus_chain.is_some() && self.conf_name.is_none() && entry.only_excludes();
        // Each configuration with its network and its file; that of the cluster network's list has none.
        let mut configurations = Vec::new();
        let mut list = None;
        let has_file = !is_chained && given.attachments.is_empty() && !only_in_chain;
        let network = given.network(has_file)?;
        if is_chained {
            let (dir, file) = (conf_dir.clone(), self.conf_name.clone());
            list = Some(ListEntry { dir, file, value: entry.listed()?, own_list: self.own_list });
            configurations.push((network, None, entry.clone()));
        } else if has_file {
            let name = self.conf_name.as_deref().unwrap_or("istio-cni.conf");
            configurations.push((network, Some(conf_dir.join(name)), entry.clone()));
        }
        let attachment_dir = if is_chained { HostPath::root().join(ATTACHMENT_DIRECTORY) } else { conf_dir };
        let uses_entry = is_chained || given.attachments.is_empty() || self.multus_chain.is_some();
        let mut warnings = if uses_entry { self.check(node, &entry, "--config: ")? } else { Vec::new() };
        for Attachment { name, keys } in &given.attachments {
            let file = self.attachments.as_deref().unwrap_or(Path::new("")).display();
            let place = || format!("--attachments {file}: attachment {name:?}");
            let attached = Entry::new(&own, &[&given.config, keys]).with_context(place)?;
            ensure!(attached.conf.primary.is_none(), "{}: {}", place(), primary_in_attachment());
            let found = self.check(node, &attached, "").with_context(place)?;
            warnings.extend(found.iter().map(|warning| format!("attachment {name:?}: {warning}")));
            configurations.push((name.clone(), Some(attachment_dir.join(&format!("{name}.conf"))), attached));
        }
        if let Some(directory) = &self.multus_chain {
            ensure!(
                entry.conf.primary.is_none(),
                "--multus-chain {directory}: expected a configuration without clusterNetwork and delegates: the primary \
                 plugin runs the chain itself (auxiliaryCNIChainName)"
            );
            configurations.push((directory.name(), Some(directory.join(CHAIN_FILE)), entry.clone()));
        }
        warn(warnings);
        let file = |path, role, content| DesiredFile { path, role, content };
        let copy = || Content::Program(PROGRAM_FILE.into(), program.clone());
        let mut files: Vec<_> =
            self.program_names().into_iter().map(|name| file(bin_dir.join(name), Role::Program, copy())).collect();
        if let Some(token) = token.filter(|_| self.kubeconfig.is_none()) {
            files.push(file(own_kubeconfig(), Role::Kubeconfig, self.written_kubeconfig(token)?));
        }
        let node_configuration = Content::Text(self.node_configuration(&configurations)?);
        files.push(file(HostPath::root().join(NODE_CONFIGURATION), Role::Node, node_configuration));
        for (network, path, entry) in configurations {
            if let Some(path) = path {
                files.push(file(path, Role::Configuration, Content::Text(entry.standalone(&network)?)));
            }
        }
        let (platform, multus_chain) = (Some(platform.name.to_owned()), self.multus_chain.clone());
        Ok(DesiredState { platform, files, entry: list, multus_chain, ..DesiredState::default() })
    }

    /// Returns the text of the node configuration for these configurations.
    fn node_configuration(&self, configurations: &[(String, Option<HostPath>, Entry)]) -> Result<String> {
        let primary = Some(self.primary.unwrap_or(false));
        let mut nodes = configurations.iter().map(|(network, _, entry)| {
            (network.clone(), NodeConf::from_configuration(&entry.conf).with_primary(primary))
        });
        let first = nodes.next().map(|(_, first)| first).unwrap_or_default();
        let text = first.with_networks(nodes).text();
        ensure!(
            text.len() as u64 <= NODE_CONFIGURATION_LIMIT,
            "{NODE_CONFIGURATION}: expected at most {NODE_CONFIGURATION_LIMIT} bytes, got {}; shorten the lists \
             exclude_namespaces of the attachments",
            text.len()
        );
        Ok(text)
    }

    /// Returns the content of the kubeconfig to write, which may be unknown now.
    fn written_kubeconfig(&self, token: &dyn Fn() -> Result<String>) -> Result<Content> {
        let server = self.server().context(
            "can't write a kubeconfig for the plugin: unknown API server; outside of a pod, add --kubeconfig FILE with a \
             file on the node, or --api-server URL and --service-account DIR",
        )?;
        let text = self.read_credential("ca.crt").and_then(|ca| Ok(kubeconfig(&server, &ca, &token()?)));
        Ok(text.map_or_else(|why| Content::Unknown(format!("{why:#}")), Content::Text))
    }

    /// Checks a configuration of the plugin, and that the plugin can use the kubeconfig that it names, because every ADD
    /// needs it. Returns warnings. `place` is where the configuration's own kubeconfig is set.
    fn check(&self, node: &NodeFiles, entry: &Entry, place: &str) -> Result<Vec<String>> {
        let kubernetes = &entry.conf.kubernetes;
        let mut warnings = Vec::new();
        let named =
            kubernetes.kubeconfig.clone().filter(|_| kubernetes.manifests_dir.is_none()).and_then(HostPath::new);
        // The installation writes its own.
        if let Some(path) = named.filter(|path| self.kubeconfig.is_some() || *path != own_kubeconfig()) {
            let place = match self.kubeconfig.as_ref() == Some(&path) {
                true => format!("--kubeconfig {path}"),
                false => format!("{place}kubernetes.kubeconfig {path}"),
            };
            let root = self.place.root()?.display();
            // As the plugin does, with the files to which it refers.
            let read = || {
                let reached = node.reach(&path)?;
                read_trusted(&reached, MAX_FILE)?;
                KubeconfigSummary::read(self.place.root()?, &reached).map_err(|error| anyhow!("{error}"))
            };
            let summary = read().with_context(|| {
                format!("{place}: the plugin can't use this file of the node (below --root {root}); create it first")
            })?;
            warnings.extend(kubeconfig_warning(&summary).map(|warning| format!("{place}: {warning}")));
        }
        let (bin_dir, names) = (self.bin_dir(node), self.program_names());
        let is_own = kubernetes.cni_bin_dir.as_deref() == Some(bin_dir.as_path());
        let is_installed = |_: &NetConf, kind: &str| match names.contains(&kind) || node.has(&bin_dir.join(kind)) {
            true => Some(true),
            // Another directory of the configuration may not be mounted here.
            false => is_own.then_some(false),
        };
        // An agent's container has no mount of it.
        let groups = HostPath::new(GROUP_FILE).and_then(|path| node.reach(&path).ok()).filter(|path| path.is_file());
        let node = TargetNode { is_installed: &is_installed, group_file: groups.as_deref(), may_name_source: false };
        warnings.extend(validate(&entry.conf, node).context("invalid plugin configuration")?);
        Ok(warnings)
    }

    /// Returns the directory of the program.
    fn bin_dir(&self, node: &NodeFiles) -> HostPath {
        self.bin_dir.clone().unwrap_or_else(|| HostPath::root().join(self.platform(node).bin_dir))
    }

    /// Returns the directory of configurations.
    fn conf_dir(&self, node: &NodeFiles) -> HostPath {
        self.conf_dir.clone().unwrap_or_else(|| HostPath::root().join(self.platform(node).conf_dir))
    }

    fn platform(&self, node: &NodeFiles) -> &'static Platform {
        self.platform.unwrap_or_else(|| Platform::detect(|path| node.has(path)))
    }

    /// Returns the platform and the directories in use, as a note for the user.
    pub(in crate::cli) fn describe_platform(&self, node: &NodeFiles) -> String {
        let detected = if self.platform.is_none() { " (detected)" } else { "" };
        let (name, bin_dir, conf_dir) = (self.platform(node).name, self.bin_dir(node), self.conf_dir(node));
        format!("platform {name}{detected}: programs in {bin_dir}, configuration in {conf_dir}")
    }

    /// Returns the names under which the program is installed.
    fn program_names(&self) -> Vec<&str> {
        [PROGRAM].into_iter().chain(self.names.iter().map(String::as_str)).collect()
    }

    /// Reads the files of `--config` and `--attachments`.
    pub(in crate::cli) fn given_keys(&self) -> Result<GivenKeys> {
        let (mut given, names) = (GivenKeys::default(), self.program_names());
        let text = |path, place: &str| read(path, MAX_FILE).with_context(|| format!("can't read {place}"));
        if let Some(path) = &self.config {
            let place = format!("--config {}", path.display());
            given.add_config(&text(path, &place)?, &place, &names)?;
        }
        if let Some(path) = &self.attachments {
            let place = format!("--attachments {}", path.display());
            given.add_attachments(&text(path, &place)?, &place, &names)?;
        }
        Ok(given)
    }

    /// Returns the token of this pod's service account.
    pub(in crate::cli) fn token(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.read_credential("token")?).trim().to_owned())
    }

    /// Returns the URL of the API server, `None` if neither a flag nor the environment of a pod contains it.
    fn server(&self) -> Option<String> {
        let in_pod = || {
            let host = env::var("KUBERNETES_SERVICE_HOST").ok()?;
            Some(server_url(&host, &env::var("KUBERNETES_SERVICE_PORT").unwrap_or_else(|_| "443".into())))
        };
        self.api_server.clone().or_else(in_pod)
    }

    /// Returns the service account for this process's own API requests.
    ///
    /// # Errors
    /// The API server is unknown.
    pub(in crate::cli) fn account(&self) -> Result<Api, &'static str> {
        let server = self.server().ok_or(
            "unknown API server; outside of a pod, add --api-server URL and --service-account DIR in place of --kubeconfig",
        )?;
        Ok(Api::of_account(server, self.service_account.clone()))
    }

    fn read_credential(&self, name: &str) -> Result<Vec<u8>> {
        let path: &Path = &self.service_account.join(name);
        read_trusted(path, MAX_FILE).with_context(|| format!("can't read --service-account: {}", path.display()))
    }
}

/// Returns the namespace of the agent's pods.
pub(in crate::cli) fn agent_namespace() -> Option<String> {
    variable("POD_NAMESPACE")
}
