//! `detour doctor`: a list of checks of a node, and of a pod on it. Each check reports what it found and, if it fails,
//! what to do next. Nothing is changed. With `--probe`, a few packets are sent to addresses that are reserved for
//! documentation.
//!
//! Each check is implemented in the file of its subject and returns a verdict. A check that depends on another one is
//! reported as not checked if that one did not pass.

mod checks;
mod configuration;
mod containers;
mod credentials;
mod kernel;
mod listeners;
mod logs;
mod needless_exclusions;
mod own_list;
mod pod;
mod policies;
mod probe;
mod program;
mod report;
mod rules;
mod target;

pub use checks::CheckGroup;
pub use report::{CheckOutcome, Checklist, ReportLine};
pub use report::{CheckTarget, Installation, MultusChain, OwnList};

use super::explain::Explained;
use super::rules::{LiveRules, RulesReport};
use super::subject::AppliedConf;
use crate::cluster::agent::PoliciesReport;
use crate::cluster::{self, Api, Cluster, KubeconfigSummary};
use crate::cni::NetConf;
use crate::host_path::HostPath;
use crate::netns::find::FoundNetns;
use crate::plugin::FormatCounts;
use crate::pod::{Facts, PodRef};
use crate::state::{ROOT, Store};
use configuration::Configured;
use containers::PodSubject;
use pod::Attachment;
use report::Results;
use rules::PodNetns;
use std::path::PathBuf;

/// What the checks have found so far, for those that follow.
struct Examination {
    configurations: Vec<Configured>,
    policies: Result<PoliciesReport, String>,
    kubeconfig: Option<(PathBuf, KubeconfigSummary)>,
    explained: Option<Explained>,
    live: Option<(LiveRules, RulesReport)>,
}

/// Runs the checks of the node and, if a pod is named, of the pod.
#[must_use]
pub fn examine(target: &CheckTarget) -> Checklist {
    let mut results = Results::default();
    let mut seen = check_node(target, &mut results);
    let checked = target.pod.as_ref().map(|pod| check_pod(target, pod, &mut seen, &mut results));
    check_containers(target, &seen, checked, &mut results);
    let pod = target.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name));
    let (node, platform) = (target.node_name.clone(), target.platform.clone());
    let rule_formats = FormatCounts::read(&store(target)).ok();
    let needless_exclusions = match target.pod {
        None => api(target, &seen, &results).ok().and_then(|api| needless_exclusions::find(target, &api)),
        Some(_) => None,
    };
    let policies = seen.policies.ok();
    Checklist { pod, node, platform, policies, rule_formats, needless_exclusions, ..Checklist::of(results.lines) }
}

fn check_node(target: &CheckTarget, results: &mut Results) -> Examination {
    let configurations = configuration::examine(target, results);
    let conf = foremost(&configurations);
    let kinds = configurations.iter().map(|configured| configured.conf.kind.clone()).collect();
    own_list::examine(target, results);
    own_list::examine_multus_chain(target, results);
    configuration::examine_node_configuration(target, results);
    program::examine(target, &kinds, results);
    let kubeconfig = credentials::examine_kubeconfig(target, conf, results);
    program::examine_installation(target, results);
    let api = of_plugin(target, kubeconfig.as_ref());
    credentials::examine_rights(api.as_ref(), conf, results);
    credentials::examine_agent(target, conf, results);
    let policies = policies::ask(target, conf, results);
    if target.pod.is_none() {
        policies::examine_node(policies.as_ref(), results);
    }
    kernel::examine(conf, results);
    kernel::examine_socket_lb(target, results);
    Examination { configurations, policies, kubeconfig, explained: None, live: None }
}

/// The plugin's configurations on a node, and the API server to ask about its pods.
pub(super) struct NodeSetup {
    /// The valid configurations, and to which pods each applies.
    pub(super) configurations: Vec<AppliedConf>,
    /// The API server, or why none is known.
    pub(super) api: Result<Api, String>,
    /// The saved state of attachments.
    pub(super) store: Store,
}

/// Reads the setup of a node, without any request.
pub(super) fn node_setup(target: &CheckTarget) -> NodeSetup {
    let mut results = Results::default();
    let found = configuration::examine(target, &mut results);
    let kubeconfig = credentials::examine_kubeconfig(target, foremost(&found), &mut results);
    let applied = found.into_iter().map(|Configured { path, text, conf, .. }| {
        let parsed = AppliedConf::parse(path.as_path(), text.as_bytes());
        let in_chain = target.is_in_multus_chain(&path);
        let as_attachment = !in_chain && parsed.is_ok_and(|applied| applied.as_attachment);
        AppliedConf { as_attachment, ..AppliedConf::from(conf) }
    });
    let api = own_api(target, kubeconfig.as_ref());
    NodeSetup { configurations: applied.collect(), api, store: store(target) }
}

fn store(target: &CheckTarget) -> Store {
    HostPath::new(ROOT).and_then(|root| target.reach(&root).ok()).map_or_else(|| Store::new(ROOT), Store::new)
}

/// Returns the configuration that stands for the node: the first one that redirects, or else the first.
fn foremost(configurations: &[Configured]) -> Option<&NetConf> {
    let redirects = |configured: &&Configured| {
        configured.conf.chain.iter().any(|block| block.keys.get("type").is_some_and(|kind| kind == "istio-redirect"))
    };
    let first = configurations.iter().find(redirects).or(configurations.first());
    first.map(|configured| &configured.conf)
}

/// The results of the checks of a pod that those of its excluded containers need.
struct CheckedPod {
    conf: Option<NetConf>,
    found: Option<FoundNetns>,
}

fn check_containers(target: &CheckTarget, seen: &Examination, pod: Option<CheckedPod>, results: &mut Results) {
    let conf = pod.as_ref().and_then(|pod| pod.conf.as_ref());
    let all = seen.configurations.iter().map(|configured| &configured.conf);
    let is_configured = containers::is_configured(all.chain(conf));
    let subject = pod.as_ref().map(|pod| PodSubject {
        found: pod.found.as_ref(),
        wanted: seen.explained.as_ref().map(|explained| &explained.policy),
        live: seen.live.as_ref(),
        notes: seen.explained.as_ref().map_or(&[], |explained| &explained.explanation.notes),
        warnings: seen.explained.as_ref().map_or(&[], |explained| &explained.explanation.warnings),
    });
    containers::examine(target, (is_configured, foremost(&seen.configurations)), subject.as_ref(), results);
}

fn check_pod(target: &CheckTarget, pod: &PodRef, seen: &mut Examination, results: &mut Results) -> CheckedPod {
    let conf = foremost(&seen.configurations).cloned();
    let api = api(target, seen, results);
    let (facts, conf) = check_references(target, pod, (conf, &api), seen, results);
    let api = api.as_ref().ok();

    let pod_netns = PodNetns::of(target, pod, facts.as_ref());
    // Events come first: they explain why a pod that never started has no network namespace.
    logs::events(api, pod, pod_netns.found().is_some(), results);
    pod_netns.examine(target, api, conf.as_ref(), results);
    check_netns(target, pod_netns.found(), facts.as_ref(), seen, results);
    let container = pod_netns.found().and_then(|found| found.container_id.as_deref());
    policies::examine_pod(seen.policies.as_ref(), pod, results);
    logs::node(target, pod, container, results);
    logs::plugin(target, conf.as_ref(), pod, results);
    CheckedPod { conf, found: pod_netns.found().cloned() }
}

/// Checks the path from the pod's annotation to the decision. Returns the pod's facts and its configuration.
fn check_references(
    target: &CheckTarget,
    pod: &PodRef,
    (conf, api): (Option<NetConf>, &Result<Api, String>),
    seen: &mut Examination,
    results: &mut Results,
) -> (Option<Facts>, Option<NetConf>) {
    let files = conf.as_ref().and_then(|conf| manifests(target, conf));
    let source = match (&files, api) {
        (Some(files), _) => Ok(&**files),
        (None, Ok(api)) => Ok(api as &dyn Cluster),
        (None, Err(why)) => Err(why.clone()),
    };
    let cluster = source.as_ref().ok().copied();
    let facts = pod::known(source, pod, results);
    let ours = pod::references(target, cluster, facts.as_ref(), conf.as_ref(), results);
    let conf = ours.first().cloned().or(conf);
    // A primary plugin adds the pod's networks itself, and fails as a whole if one of them is missing.
    let is_primary = conf.as_ref().is_some_and(|conf| conf.primary.is_some());
    let needed = if is_primary { checks::PLUGIN_ATTACHED.needs } else { checks::REDIRECTED.needs };
    let attachment = Attachment::of(target, &ours, &seen.configurations);
    seen.explained = pod::examine(facts.as_ref(), conf.as_ref(), cluster, (&attachment, needed), results);
    attachment.add(results);
    (facts, conf)
}

/// Checks the pod's network namespace and, with `--probe`, real packets. Returns the listening sockets; `None` if they
/// are not known.
fn check_netns(
    target: &CheckTarget,
    found: Option<&FoundNetns>,
    facts: Option<&Facts>,
    seen: &mut Examination,
    results: &mut Results,
) {
    let wanted = seen.explained.as_ref().map(|explained| &explained.policy);
    let store = store(target);
    seen.live = rules::examine(found, &store, wanted, results);
    let policy = seen.live.as_ref().and_then(|(live, _)| live.desired.as_ref()).map(|asked| &asked.policy);
    rules::examine_default_route(found, policy, results);
    let listeners = listeners::examine(found, policy, results);
    if target.probe {
        probe::examine(found, policy, facts, listeners.as_deref(), results);
    }
}

/// Returns the API server to ask about the pod, unless it is the plugin's and can't be reached.
fn api(target: &CheckTarget, seen: &Examination, results: &Results) -> Result<Api, String> {
    let is_plugins = Api::in_cluster().is_none() && seen.kubeconfig.is_some();
    match results.obstacle(&[checks::API_REACHABLE]).filter(|_| is_plugins) {
        Some(why) => Err(why),
        None => own_api(target, seen.kubeconfig.as_ref()),
    }
}

/// Returns the API server of the pod that this process runs in, or else the plugin's.
fn own_api(target: &CheckTarget, kubeconfig: Option<&(PathBuf, KubeconfigSummary)>) -> Result<Api, String> {
    let in_cluster = Api::in_cluster().map(|api| api.within(Api::PROBE_TIMEOUT).once());
    let api = in_cluster.or_else(|| of_plugin(target, kubeconfig));
    api.ok_or_else(|| crate::inspect::NO_CREDENTIALS.to_owned())
}

fn of_plugin(target: &CheckTarget, kubeconfig: Option<&(PathBuf, KubeconfigSummary)>) -> Option<Api> {
    let (path, _) = kubeconfig?;
    Some(Api::of_kubeconfig(&target.mount, path.clone()).within(Api::PROBE_TIMEOUT).once())
}

/// Returns the manifests directory as the source of facts.
fn manifests(target: &CheckTarget, conf: &NetConf) -> Option<Box<dyn Cluster>> {
    let directory = conf.kubernetes.manifests_dir.as_ref()?;
    let reached = target.reach_named(directory).ok()?;
    let mut kubernetes = conf.kubernetes.clone();
    kubernetes.manifests_dir = Some(reached);
    cluster::source(&kubernetes)
}
