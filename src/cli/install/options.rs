//! The flags of an installation, which `detour install` and `detour agent` share, and the desired state that they
//! describe.

use super::PROGRAM_FILE;
use super::attachments::{Attachment, GivenKeys};
use crate::cli::cluster::{NodeArguments, own_kubeconfig};
use crate::cli::output::CommandError;
use anyhow::{Context, Result, anyhow, ensure};
use clap::{ArgAction, Args};
use detour_cni::agent::install::{
    Content, DesiredFile, DesiredState, Digest, Entry, EntrySettings, HostPath, ListEntry, NodeFiles, OWN_LIST,
    PROGRAM, Platform, Role, kubeconfig, server_url,
};
use detour_cni::cluster::{Api, KubeconfigSummary};
use detour_cni::cni::{
    GROUP_FILE, NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NetConf, NodeConf, RuleFormat, is_identifier,
};
use detour_cni::inspect::kubeconfig_warning;
use detour_cni::plugin::TargetNode;
use detour_cni::plugin::probe::needed_format;
use detour_cni::trusted_file::read_trusted;
use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Limit for the name of a file. On Linux, a name has up to 255 bytes (NAME_MAX). The longest name that is made of
/// this one is that of a temporary file: `.detour-NAMElist.tmp`, where `NAME.conflist` replaces `NAME.conf`.
const MAX_FILE_NAME: usize = 239;
/// The rule format that this kernel needs, found once: the agent evaluates the configuration again and again.
static NEEDED_FORMAT: LazyLock<Option<RuleFormat>> = LazyLock::new(needed_format);
/// The plugin's file in the directory of Multus's auxiliary chain.
const MULTUS_CHAIN_FILE: &str = "detour.conf";
/// Multus's directory of configurations, for the files of attachments beside an entry in the cluster network's list.
const ATTACHMENT_DIRECTORY: &str = "/etc/cni/multus/net.d";
/// Limit for each credential file. The largest is ca.crt.
const MAX_CREDENTIAL: u64 = 1 << 20;

/// The plugin's configurations on the node.
#[derive(Default)]
struct Configurations {
    /// Those with a file of their own.
    files: Vec<DesiredFile>,
    /// For each network, its part of the node configuration.
    nodes: Vec<(String, NodeConf)>,
    warnings: Vec<String>,
}

impl Configurations {
    /// Adds the configuration of a network with a file of its own.
    fn add(&mut self, entry: &Entry, network: &str, path: HostPath) -> Result<()> {
        let content = Content::Text(entry.standalone(network)?);
        self.files.push(DesiredFile { path, role: Role::Configuration, content });
        self.nodes.push((network.to_owned(), entry.node()));
        Ok(())
    }
}

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
    primary: Option<bool>,
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
    let is_plain = !text.is_empty() && !text.starts_with('.') && !text.contains('/');
    if !is_plain {
        return Err("expected a file name without a directory".into());
    }
    match text.len() {
        0..=MAX_FILE_NAME => Ok(text.to_owned()),
        got => Err(format!("expected at most {MAX_FILE_NAME} bytes, got {got}")),
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
        if self.own_list && !is_chained {
            return Err(CommandError::Usage(format!("--own-list=true: expected --chained=true, got false{default}")));
        }
        if let Some(directory) = &self.multus_chain {
            if is_chained {
                return Err(CommandError::Usage(format!(
                    "--multus-chain {directory}: expected --chained=false, got true{default}; the plugin would run twice \
                     for each pod"
                )));
            }
            if !is_identifier(&directory.name()) {
                return Err(CommandError::Usage(format!(
                    "--multus-chain {directory}: expected a directory with the name of a network: letters, digits, _, . and \
                     -, a letter or digit first"
                )));
            }
        }
        if self.own_list && self.conf_name.as_deref() == Some(OWN_LIST) {
            let message = format!(
                "--conf-name {OWN_LIST}: expected the cluster network's configuration list, got the copy of it"
            );
            return Err(CommandError::Usage(message));
        }
        Ok(node)
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
        let bin_dir = self.bin_dir(node)?;
        let conf_dir = directory(self.conf_dir.as_ref(), platform.conf_dir)?;
        let settings = EntrySettings {
            given: given.config.clone(),
            kubeconfig: self.kubeconfig.clone().or_else(|| token.map(|_| own_kubeconfig())),
            agent_socket: socket.cloned(),
            agent_namespace: agent_namespace(),
            auto_format: if platform.nftables { Some(RuleFormat::Nftables) } else { *NEEDED_FORMAT },
            bin_dir: bin_dir.clone(),
            primary: self.primary,
        };
        let is_chained = self.chained.unwrap_or(platform.chained);
        let entry = settings.entry()?;
        let only_in_chain = self.multus_chain.is_some() && self.conf_name.is_none() && entry.only_excludes();
        let mut configurations = Configurations::default();
        let mut list = None;
        if is_chained || (given.attachments.is_empty() && !only_in_chain) {
            configurations.warnings = self.check(node, &entry, "--config: ")?;
            let network = given.network(!is_chained)?;
            if is_chained {
                let (dir, file) = (conf_dir.clone(), self.conf_name.clone());
                list = Some(ListEntry { dir, file, value: entry.listed()?, own_list: self.own_list });
                configurations.nodes.push((network, entry.node()));
            } else {
                let name = self.conf_name.as_deref().unwrap_or("istio-cni.conf");
                configurations.add(&entry, &network, conf_dir.join(name))?;
            }
        } else {
            given.network(false)?;
        }
        let attachment_dir = if is_chained { directory(None, ATTACHMENT_DIRECTORY)? } else { conf_dir };
        for attachment in &given.attachments {
            let place = || format!("{}: attachment {:?}", self.attachments_place(), attachment.name);
            let added = self.add_attachment(node, &settings, attachment, &attachment_dir, &mut configurations);
            added.with_context(place)?;
        }
        if let Some(directory) = &self.multus_chain {
            ensure!(
                entry.conf.primary.is_none(),
                "--multus-chain {directory}: expected a configuration without clusterNetwork and delegates: the primary \
                 plugin runs the chain itself (auxiliaryCNIChainName)"
            );
            // The configuration of the cluster network is the same: if there is one, it is checked already.
            if !given.attachments.is_empty() || only_in_chain {
                configurations.warnings.extend(self.check(node, &entry, "--config: ")?);
            }
            configurations.add(&entry, &directory.name(), directory.join(MULTUS_CHAIN_FILE))?;
        }
        warn(configurations.warnings);
        let program = |name| DesiredFile {
            path: bin_dir.join(name),
            role: Role::Program,
            content: Content::Program(PROGRAM_FILE.into(), program.clone()),
        };
        let mut files: Vec<_> = self.program_names().into_iter().map(program).collect();
        if let Some(token) = token.filter(|_| self.kubeconfig.is_none()) {
            files.push(self.written_kubeconfig(token)?);
        }
        files.extend(node_configuration(configurations.nodes)?);
        files.extend(configurations.files);
        Ok(DesiredState {
            owner: None,
            platform: Some(platform.name.to_owned()),
            files,
            entry: list,
            multus_chain: self.multus_chain.clone(),
            expired: None,
        })
    }

    /// Adds the configuration of an attachment, whose keys override `settings`.
    fn add_attachment(
        &self,
        node: &NodeFiles,
        settings: &EntrySettings,
        attachment: &Attachment,
        directory: &HostPath,
        configurations: &mut Configurations,
    ) -> Result<()> {
        let entry = attachment.entry(settings)?;
        let place = if attachment.has_kubeconfig() { "" } else { "--config: " };
        let warnings = self.check(node, &entry, place)?.into_iter();
        let named = warnings.map(|warning| format!("attachment {:?}: {warning}", attachment.name));
        configurations.warnings.extend(named);
        configurations.add(&entry, &attachment.name, directory.join(&attachment.file_name()))
    }

    /// Returns the kubeconfig to write. Its text may be unknown now.
    fn written_kubeconfig(&self, token: &dyn Fn() -> Result<String>) -> Result<DesiredFile> {
        let server = self.server().context(
            "can't write a kubeconfig for the plugin: unknown API server; outside of a pod, add --kubeconfig FILE with a \
             file on the node, or --api-server URL and --service-account DIR",
        )?;
        let content = match self.kubeconfig_text(&server, token) {
            Ok(text) => Content::Text(text),
            Err(why) => Content::Unknown(format!("{why:#}")),
        };
        Ok(DesiredFile { path: own_kubeconfig(), role: Role::Kubeconfig, content })
    }

    /// Whether the plugin may be the primary plugin on the node.
    pub(in crate::cli) fn may_be_primary(&self) -> bool {
        self.primary != Some(false)
    }

    /// Returns the flag of the attachments and its value, for messages.
    fn attachments_place(&self) -> String {
        let file = self.attachments.as_ref().map(|path| format!(" {}", path.display()));
        format!("--attachments{}", file.unwrap_or_default())
    }

    /// Checks a configuration of the plugin and the credentials that it names. Returns warnings. `place` is where the
    /// configuration's own kubeconfig is set.
    fn check(&self, node: &NodeFiles, entry: &Entry, place: &str) -> Result<Vec<String>> {
        let kubernetes = &entry.conf.kubernetes;
        let kubeconfig = kubernetes.kubeconfig.clone().filter(|_| kubernetes.manifests_dir.is_none());
        let mut warnings = self.check_credentials(node, kubeconfig.and_then(HostPath::new).as_ref(), place)?;
        let bin_dir = self.bin_dir(node)?;
        let own = kubernetes.cni_bin_dir.clone().and_then(HostPath::new).filter(|own| *own != bin_dir);
        let directories: Vec<_> = [bin_dir].into_iter().chain(own).collect();
        let names = self.program_names();
        let is_installed = |_: &NetConf, kind: &str| {
            if names.contains(&kind) { Some(true) } else { node.has_program(kind, &directories) }
        };
        // An agent's container has no mount of it.
        let groups = HostPath::new(GROUP_FILE).and_then(|path| node.reach(&path).ok()).filter(|path| path.is_file());
        let node = TargetNode { is_installed: &is_installed, group_file: groups.as_deref(), may_name_source: false };
        warnings.extend(entry.check(node)?);
        Ok(warnings)
    }

    /// Checks that the plugin can use the credentials on the node, because every ADD needs them. Returns warnings.
    ///
    /// `kubeconfig` is the one that the whole configuration names, and `place` is where it is set.
    fn check_credentials(&self, node: &NodeFiles, kubeconfig: Option<&HostPath>, place: &str) -> Result<Vec<String>> {
        let root = self.place.root()?.display();
        let unusable = |file: String| {
            format!("{file}: the plugin can't use this file of the node (below --root {root}); create it first")
        };
        let own = own_kubeconfig();
        let is_written = |path: &HostPath| self.kubeconfig.is_none() && *path == own;
        let named = kubeconfig.filter(|path| self.kubeconfig.as_ref() != Some(path) && !is_written(path));
        let named = named.map(|path| (format!("{place}kubernetes.kubeconfig"), path));
        let mut warnings = Vec::new();
        for (place, path) in self.kubeconfig.iter().map(|path| ("--kubeconfig".to_owned(), path)).chain(named) {
            let summary = self.read_kubeconfig(node, path).with_context(|| unusable(format!("{place} {path}")))?;
            warnings.extend(kubeconfig_warning(&summary).map(|warning| format!("{place} {path}: {warning}")));
        }
        Ok(warnings)
    }

    /// Reads a kubeconfig on the node as the plugin does, with the files to which it refers.
    fn read_kubeconfig(&self, node: &NodeFiles, path: &HostPath) -> Result<KubeconfigSummary> {
        let reached = node.reach(path)?;
        read_trusted(&reached, MAX_CREDENTIAL)?;
        KubeconfigSummary::read(self.place.root()?, &reached).map_err(|error| anyhow!("{error}"))
    }

    /// Returns the directory of the program.
    fn bin_dir(&self, node: &NodeFiles) -> Result<HostPath> {
        directory(self.bin_dir.as_ref(), self.platform(node).bin_dir)
    }

    fn platform(&self, node: &NodeFiles) -> &'static Platform {
        self.platform.unwrap_or_else(|| Platform::detect(|path| node.has(path)))
    }

    /// Returns the platform and the directories in use, as a note for the user.
    pub(in crate::cli) fn describe_platform(&self, node: &NodeFiles) -> String {
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

    /// Reads the files of `--config` and `--attachments`.
    pub(in crate::cli) fn given_keys(&self) -> Result<GivenKeys> {
        GivenKeys::read(self.config.as_deref(), self.attachments.as_deref(), &self.program_names())
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

    /// Returns the service account for this process's own API requests; `purpose` is for the error message.
    pub(in crate::cli) fn account_for(&self, purpose: &str) -> Result<Api> {
        let server = self.server().with_context(|| {
            let instead =
                if self.kubeconfig.is_some() { " and --service-account DIR in place of --kubeconfig" } else { "" };
            format!("{purpose}: unknown API server; outside of a pod, add --api-server URL{instead}")
        })?;
        Ok(Api::of_account(server, self.service_account.clone()))
    }

    fn kubeconfig_text(&self, server: &str, token: &dyn Fn() -> Result<String>) -> Result<String> {
        let ca = self.read_credential("ca.crt")?;
        Ok(kubeconfig(server, Some(&ca), &token()?))
    }

    fn read_credential(&self, name: &str) -> Result<Vec<u8>> {
        let path: &Path = &self.service_account.join(name);
        read_trusted(path, MAX_CREDENTIAL).with_context(|| format!("can't read --service-account: {}", path.display()))
    }
}

/// Returns the namespace of the agent's pods.
pub(in crate::cli) fn agent_namespace() -> Option<String> {
    env::var("POD_NAMESPACE").ok().filter(|namespace| !namespace.is_empty())
}

/// Returns the directory of a flag, or else the default.
fn directory(flag: Option<&HostPath>, default: &str) -> Result<HostPath> {
    flag.map_or_else(|| default.parse().map_err(|why: String| anyhow!(why)), |path| Ok(path.clone()))
}

/// Returns the node configuration for the configurations of these networks.
fn node_configuration(configurations: Vec<(String, NodeConf)>) -> Result<Option<DesiredFile>> {
    let mut configurations = configurations.into_iter();
    let Some((_, first)) = configurations.next() else { return Ok(None) };
    let text = first.with_networks(configurations).text();
    ensure!(
        text.len() as u64 <= NODE_CONFIGURATION_LIMIT,
        "{NODE_CONFIGURATION}: expected at most {NODE_CONFIGURATION_LIMIT} bytes, got {}; shorten the lists \
         exclude_namespaces of the attachments",
        text.len()
    );
    let file = |path| DesiredFile { path, role: Role::Node, content: Content::Text(text) };
    Ok(HostPath::new(NODE_CONFIGURATION).map(file))
}
