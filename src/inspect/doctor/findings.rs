//! What a check is, and what the checks have found. Also the configurations on a node: the files that runtimes read, those of
//! the plugin, and whether it accepts them.

use super::report::{CheckOutcome, CheckTarget, CheckVerdict, ReportLine};
use crate::cluster::agent::PoliciesReport;
use crate::cluster::{self, Api, Cluster, Lookup, ObjectRef};
use crate::cni::{
    Error, GROUP_FILE, Kubernetes, NODE_CONFIGURATION, NetConf, NodeConf, OWN_TYPES, is_configuration_file,
};
use crate::host_path::HostPath;
use crate::inspect::explain::Explanation;
use crate::inspect::rules::{LiveRules, RulesReport};
use crate::inspect::subject::{AppliedConf, Subject};
use crate::inspect::validate::is_program;
use crate::netns::find::{FoundNetns, NodeSnapshot};
use crate::plugin::node::{self, InstalledText};
use crate::plugin::{TargetNode, validate};
use crate::pod::Pod;
use crate::policy::Policy;
use crate::printable::without_secrets;
use crate::state::{ROOT, Store};
use crate::sub_plugins::SubPlugin;
use crate::trusted_file::{names_in, read_nofollow};
use serde_json::Value;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::slice;

/// A check: its name, subject and condition, and how it is made.
pub(super) struct Check {
    /// The name; stable across releases.
    pub(super) id: &'static str,
    /// The subject.
    pub(super) group: &'static str,
    /// The condition that is met if the check passes.
    pub(super) holds: &'static str,
    /// The checks without which this one has no meaning: it is not made if one of them failed or was not made.
    pub(super) needs: &'static [&'static str],
    /// Makes the check; `None` if it does not apply to this node or pod.
    pub(super) examine: fn(&mut Findings<'_>) -> Option<CheckVerdict>,
}

/// What the checks have found, for those that follow.
pub(in crate::inspect) struct Findings<'a> {
    pub(super) target: &'a CheckTarget,
    /// The results so far, in the order of the checks.
    pub(super) lines: Vec<ReportLine>,
    pub(super) files: ConfigurationFiles,
    /// The valid configurations, and to which pods each applies.
    pub(in crate::inspect) configurations: Vec<AppliedConf>,
    /// The path in this process of the plugin's kubeconfig.
    pub(super) kubeconfig: Option<PathBuf>,
    /// The policies of the node's pods, or why they are unknown; `None` if the agent was not asked.
    pub(super) policies: Option<Result<PoliciesReport, String>>,
    /// The pod, with the first configuration that applies to it.
    pub(super) subject: Option<Subject>,
    /// The definitions that the pod selects, as far as they can be read.
    pub(super) definitions: BTreeMap<ObjectRef, Lookup>,
    /// What an ADD of the pod would do now.
    pub(super) explained: Option<Result<Explanation, Error>>,
    /// Where the pod is on this node; see [`Self::place`].
    place: OnceCell<Result<Option<FoundNetns>, Error>>,
    pub(super) live: Option<(LiveRules, RulesReport)>,
}

impl<'a> Findings<'a> {
    /// Reads the configurations of a node, without any request.
    pub(super) fn new(target: &'a CheckTarget) -> Self {
        let (files, configurations) = ConfigurationFiles::read(target);
        Self {
            target,
            lines: Vec::new(),
            files,
            configurations,
            kubeconfig: None,
            policies: None,
            subject: None,
            definitions: BTreeMap::new(),
            explained: None,
            place: OnceCell::new(),
            live: None,
        }
    }

    /// Makes a check if all that it needs were made and did not fail; otherwise adds it as not checked. User names and
    /// passwords in URLs are removed, because users share these lists.
    pub(super) fn run(&mut self, Check { id, group, holds, needs, examine }: &Check) {
        let verdict = self.obstacle(needs).or_else(|| examine(self));
        let public = |text: String| without_secrets(&text);
        self.lines.extend(verdict.map(|CheckVerdict { outcome, found, next }| {
            let verdict = CheckVerdict { outcome, found: public(found), next: next.map(public) };
            ReportLine { id: (*id).into(), group: (*group).into(), checked: (*holds).into(), verdict }
        }));
    }

    /// Returns that the first of the checks `needed` that failed or was not checked prevents other checks.
    pub(super) fn obstacle(&self, needed: &[&str]) -> Option<CheckVerdict> {
        let reason = |id: &&str| {
            let line = self.lines.iter().find(|line| line.id == *id)?;
            match line.verdict.outcome {
                CheckOutcome::Pass | CheckOutcome::Warn => None,
                CheckOutcome::Fail => self.failure(|line| line.id == *id),
                CheckOutcome::NotChecked => Some(CheckVerdict::not_checked(format!("because {id} was not checked"))),
            }
        };
        needed.iter().find_map(reason)
    }

    /// Returns that the first failed check of those that `matches` prevents other checks.
    pub(super) fn failure(&self, matches: impl Fn(&ReportLine) -> bool) -> Option<CheckVerdict> {
        let failed = self.lines.iter().find(|line| line.verdict.outcome == CheckOutcome::Fail && matches(line))?;
        Some(CheckVerdict::not_checked(format!("because {} failed", failed.id)))
    }

    /// Returns the first configuration whose chain has the sub-plugin.
    pub(super) fn conf_with(&self, sub_plugin: SubPlugin) -> Option<&NetConf> {
        let has_it = |conf: &&NetConf| conf.chain.iter().any(|block| SubPlugin::of(block) == Some(sub_plugin));
        self.configurations.iter().map(|applied| &applied.conf).find(has_it)
    }

    /// Returns the configuration that stands for the node: the first one that redirects, or else the first.
    pub(super) fn conf(&self) -> Option<&NetConf> {
        self.conf_with(SubPlugin::IstioRedirect).or_else(|| Some(&self.configurations.first()?.conf))
    }

    /// Returns the path in this process of the agent's socket.
    pub(super) fn agent_socket(&self) -> Option<PathBuf> {
        self.target.reach_named(self.conf()?.kubernetes.agent_socket.as_deref()?).ok()
    }

    /// Returns the saved state of attachments.
    pub(in crate::inspect) fn store(&self) -> Store {
        HostPath::new(ROOT).and_then(|root| self.target.reach(&root).ok()).map_or_else(|| Store::new(ROOT), Store::new)
    }

    /// Returns the API server with the plugin's credentials.
    pub(super) fn plugin_api(&self) -> Option<Api> {
        let api = Api::of_kubeconfig(&self.target.mount, self.kubeconfig.clone()?);
        Some(api.within(Api::PROBE_TIMEOUT).once())
    }

    /// Returns the API server of the pod that this process runs in, or else the plugin's, unless that can't be reached.
    pub(in crate::inspect) fn api(&self) -> Result<Api, String> {
        if let Some(api) = Api::in_cluster() {
            return Ok(api.within(Api::PROBE_TIMEOUT).once());
        }
        let api = self.plugin_api().ok_or_else(|| crate::inspect::NO_CREDENTIALS.to_owned())?;
        self.obstacle(&["api-reachable"]).map_or(Ok(api), |because| Err(because.found))
    }

    /// Returns the source of facts about pods: the manifests directory of the configuration, or the API server.
    pub(super) fn source(&self) -> Result<Box<dyn Cluster>, String> {
        let manifests = || {
            let kubernetes = &self.conf()?.kubernetes;
            let manifests_dir = Some(self.target.reach_named(kubernetes.manifests_dir.as_ref()?).ok()?);
            cluster::source(&Kubernetes { manifests_dir, ..kubernetes.clone() })
        };
        manifests().map_or_else(|| Ok(Box::new(self.api()?) as Box<dyn Cluster>), Ok)
    }

    /// Returns the pod, if the cluster knows it.
    pub(super) fn pod(&self) -> Option<&Pod> {
        self.subject.as_ref().map(|subject| &subject.facts.pod)
    }

    /// Returns where the pod is on this node, found once: by its UID or, if the UID is unknown, by its name.
    pub(super) fn place(&self) -> &Result<Option<FoundNetns>, Error> {
        self.place.get_or_init(|| match (self.pod(), &self.target.pod) {
            (Some(pod), _) if pod.host_network => Ok(None),
            (Some(pod), _) => NodeSnapshot::take(&self.target.mount)?.of_pod(pod),
            (None, Some(named)) => NodeSnapshot::take(&self.target.mount)?.of_name(&named.namespace, &named.name),
            (None, None) => Ok(None),
        })
    }

    /// Returns the pod's network namespace on this node.
    pub(super) fn found(&self) -> Option<&FoundNetns> {
        self.place().as_ref().ok()?.as_ref()
    }

    /// Returns the policy of the pod's attachments, from the saved state.
    pub(super) fn policy(&self) -> Option<&Policy> {
        let (live, _) = self.live.as_ref()?;
        live.desired.as_ref().map(|desired| &desired.policy)
    }

    /// Returns the policy that an ADD would have now.
    pub(super) fn wanted(&self) -> Option<&Policy> {
        self.explained.as_ref()?.as_ref().ok().map(|explanation| &explanation.policy)
    }
}

/// The maximum size of a configuration file, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// A configuration file that runtimes read.
pub(super) struct RuntimeFile {
    pub(super) path: HostPath,
    text: String,
    pub(super) json: Result<Value, String>,
}

impl RuntimeFile {
    fn json(&self) -> &Value {
        self.json.as_ref().unwrap_or(&Value::Null)
    }

    fn is_ours(&self) -> bool {
        types(self.json()).iter().any(|kind| OWN_TYPES.contains(kind))
    }

    /// Whether the file configures Multus, which runs the cluster network itself.
    pub(super) fn is_multus(&self) -> bool {
        types(self.json()).first().is_some_and(|kind| ["multus", "multus-shim"].contains(kind))
    }

    /// Returns the types of the cluster network's plugins in the file; none if the file has no cluster network. Thin
    /// Multus copies the list of the cluster network into its own file.
    pub(super) fn cluster_network(&self) -> Vec<&str> {
        let network = if self.is_multus() { &plugins(self.json())[0]["delegates"][0] } else { self.json() };
        let types = types(network);
        if types.iter().all(|kind| *kind == "loopback") { Vec::new() } else { types }
    }
}

/// Returns the plugins of a configuration, which is a list or a plugin.
fn plugins(json: &Value) -> &[Value] {
    json["plugins"].as_array().map_or(slice::from_ref(json), Vec::as_slice)
}

fn types(json: &Value) -> Vec<&str> {
    plugins(json).iter().filter_map(|plugin| plugin["type"].as_str()).collect()
}

/// The configuration files of a node.
pub(super) struct ConfigurationFiles {
    /// The files that runtimes read (libcni, `ConfFiles`), in the order of their names, or the one that the user named.
    pub(super) all: Result<Vec<RuntimeFile>, String>,
    /// The configurations of the installation; without one, those in the directory.
    pub(super) ours: Vec<InstalledText>,
    /// Why the plugin rejects some of them.
    pub(super) wrong: Vec<Error>,
}

impl ConfigurationFiles {
    /// Reads the files, and returns the valid configurations of this plugin, too.
    pub(super) fn read(target: &CheckTarget) -> (Self, Vec<AppliedConf>) {
        let all = runtime_files(target);
        // Runtimes skip a file that is not JSON.
        let is_json = |one: &&InstalledText| serde_json::from_str::<Value>(&one.text).is_ok();
        let of_file = |file: &RuntimeFile| InstalledText {
            path: file.path.clone(),
            text: file.text.clone(),
            for_every_pod: target.chained && file.json.as_ref().is_ok_and(|json| json["plugins"].is_array()),
        };
        let ours: Vec<InstalledText> = match target.installed.is_empty() {
            true => all.iter().flatten().filter(|file| file.is_ours()).map(of_file).collect(),
            false => target.installed.iter().filter(is_json).cloned().collect(),
        };
        let node = read_node_configuration(target).ok().flatten().map(|(node, _)| node);
        let (mut valid, mut wrong) = (Vec::new(), Vec::new());
        for text in &ours {
            let applied = AppliedConf::installed(text, node.as_ref());
            match applied.and_then(|applied| accepted(target, &applied.conf).map(|()| applied)) {
                Ok(applied) => valid.push(applied),
                Err(error) => wrong.push(error),
            }
        }
        (Self { all, ours, wrong }, valid)
    }
}

/// Checks what an ADD would reject. The log file is no reason for a refusal.
fn accepted(target: &CheckTarget, conf: &NetConf) -> Result<(), Error> {
    let groups = target.reach_named(GROUP_FILE.as_ref()).ok().filter(|path| path.is_file());
    let is_installed = |conf: &NetConf, kind: &str| {
        let own = conf.kubernetes.cni_bin_dir.as_ref().map(|directory| target.reach_named(directory));
        let directories = target.bin_dirs.iter().map(|directory| target.reach(directory)).chain(own);
        is_program(directories.map(Result::unwrap_or_default), kind)
    };
    let node = TargetNode { is_installed: &is_installed, group_file: groups.as_deref(), may_name_source: false };
    validate(&NetConf { log_file: None, ..conf.clone() }, node).map(drop)
}

fn runtime_files(target: &CheckTarget) -> Result<Vec<RuntimeFile>, String> {
    let conf = &target.conf;
    let reached = target.reach(conf).map_err(|why| why.to_string())?;
    if reached.is_file() {
        return Ok(vec![read(target, conf.clone())]);
    }
    let mut names = names_in(&reached).map_err(|why| why.to_string())?;
    names.retain(|name| is_configuration_file(name));
    Ok(names.iter().map(|name| read(target, conf.join(name))).collect())
}

/// Reads a file. Runtimes skip a file that can't be read, or is not JSON.
fn read(target: &CheckTarget, path: HostPath) -> RuntimeFile {
    let bytes = target.reach(&path).and_then(|reached| read_nofollow(&reached, MAX_FILE));
    let text = bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let json = match &text {
        Ok(text) => serde_json::from_str(text).map_err(|why| format!("invalid JSON: {why}")),
        Err(why) => Err(format!("can't read the file: {why}")),
    };
    RuntimeFile { path, text: text.unwrap_or_default(), json }
}

/// Reads the node configuration, with its warnings; `None` without one.
pub(super) fn read_node_configuration(target: &CheckTarget) -> Result<Option<(NodeConf, Vec<String>)>, String> {
    let path = target.reach_named(NODE_CONFIGURATION.as_ref()).map_err(|why| format!("{NODE_CONFIGURATION}: {why}"))?;
    node::read(NODE_CONFIGURATION, &path).map_err(|error| error.msg)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// A node without any file.
    fn target() -> CheckTarget {
        CheckTarget {
            mount: PathBuf::from("/no/such/directory"),
            node_name: None,
            platform: "k3s".into(),
            chained: false,
            bin_dirs: BTreeSet::new(),
            conf: HostPath::root(),
            programs: Vec::new(),
            installed: Vec::new(),
            own_lists: Vec::new(),
            multus_chain: None,
            changed: Ok(None),
            pod: None,
            probe: false,
        }
    }

    const fn check(
        id: &'static str,
        needs: &'static [&'static str],
        examine: fn(&mut Findings<'_>) -> Option<CheckVerdict>,
    ) -> Check {
        Check { id, group: "node", holds: id, needs, examine }
    }

    const A: &Check = &check("a", &[], |_| Some(CheckVerdict::pass("fine")));
    const B: &Check = &check("b", &["a"], |_| Some(CheckVerdict::fail("broken", "mend it")));
    const C: &Check = &check("c", &["a", "b"], |_| unreachable!("b failed"));
    const SECRET: &Check =
        &check("s", &[], |_| Some(CheckVerdict::fail("https://u:s3cr3t@a failed", "ask http://s3cr3t@b")));

    #[test]
    fn user_names_and_passwords_are_removed_from_urls() {
        let target = target();
        let mut findings = Findings::new(&target);
        findings.run(SECRET);
        let CheckVerdict { found, next, .. } = &findings.lines[0].verdict;
        let shown = (found.as_str(), next.as_deref());
        assert_eq!(shown, ("https://(redacted)@a failed", Some("ask http://(redacted)@b")));
    }

    #[test]
    fn a_check_that_depends_on_a_failed_one_is_not_run() {
        let target = target();
        let mut findings = Findings::new(&target);
        [A, B, C].iter().for_each(|check| findings.run(check));
        let outcomes: Vec<_> =
            findings.lines.iter().map(|line| (line.verdict.outcome, line.verdict.found.as_str())).collect();
        let wanted = [
            (CheckOutcome::Pass, "fine"),
            (CheckOutcome::Fail, "broken"),
            (CheckOutcome::NotChecked, "because b failed"),
        ];
        assert_eq!(outcomes, wanted);
        assert_eq!(findings.obstacle(&["c"]), Some(CheckVerdict::not_checked("because c was not checked")));
        assert_eq!(findings.obstacle(&["a"]), None);
    }
}
