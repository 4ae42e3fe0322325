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
mod logs;
mod node;
mod pod;
mod probe;
mod report;
mod rules;

pub use report::{CheckOutcome, CheckTarget, CheckVerdict, Checklist, Installation, MultusChain, OwnList, ReportLine};

use super::needless_exclusions;
use super::subject::AppliedConf;
use crate::cluster::agent::PoliciesReport;
use crate::cluster::{self, Api, Cluster, KubeconfigSummary};
use crate::cni::NetConf;
use crate::host_path::HostPath;
use crate::plugin::FormatCounts;
use crate::pod::PodRef;
use crate::state::{ROOT, Store};
use configuration::Configured;
use containers::CheckedPod;
use pod::Attachment;
use report::Results;
use std::path::PathBuf;

/// What the checks of the node have found, for those that follow.
struct CheckedNode {
    configurations: Vec<Configured>,
    policies: Result<PoliciesReport, String>,
    kubeconfig: Option<(PathBuf, KubeconfigSummary)>,
}

/// Runs the checks of the node and, if a pod is named, of the pod.
#[must_use]
pub fn examine(target: &CheckTarget) -> Checklist {
    let mut results = Results::default();
    let node = check_node(target, &mut results);
    let pod = target.pod.as_ref().map(|pod| check_pod(target, pod, &node, &mut results));
    let all: Vec<&NetConf> = node.configurations.iter().map(|configured| &configured.applied.conf).collect();
    containers::examine(target, (&all, foremost(&node.configurations)), pod.as_ref(), &mut results);
    let needless = || {
        let (api, name) = (api(target, node.kubeconfig.as_ref(), &results).ok()?, target.node_name.as_deref()?);
        needless_exclusions::find(name, &api, &applied(&node.configurations))
    };
    Checklist {
        pod: target.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)),
        node: target.node_name.clone(),
        platform: target.platform.clone(),
        rule_formats: FormatCounts::read(&store(target)).ok(),
        needless_exclusions: target.pod.is_none().then(needless).flatten(),
        policies: node.policies.ok(),
        ..Checklist::of(results.lines)
    }
}

fn check_node(target: &CheckTarget, results: &mut Results) -> CheckedNode {
    let configurations = configuration::examine(target, results);
    let conf = foremost(&configurations);
    let kinds = configurations.iter().map(|configured| configured.applied.conf.kind.clone()).collect();
    configuration::examine_own_lists(target, results);
    configuration::examine_multus_chain(target, results);
    configuration::examine_node_configuration(target, results);
    node::examine_program(target, &kinds, results);
    let kubeconfig = credentials::examine_kubeconfig(target, conf, results);
    node::examine_installation(target, results);
    let api = of_plugin(target, kubeconfig.as_ref());
    credentials::examine_rights(api.as_ref(), conf, results);
    credentials::examine_agent(target, conf, results);
    let policies = node::ask_policies(target, conf, results);
    if target.pod.is_none() {
        node::examine_policies(policies.as_ref(), results);
    }
    node::examine_kernel(conf, results);
    node::examine_socket_lb(target, results);
    CheckedNode { configurations, policies, kubeconfig }
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
    let api = api(target, kubeconfig.as_ref(), &results);
    NodeSetup { configurations: applied(&found), api, store: store(target) }
}

fn applied(found: &[Configured]) -> Vec<AppliedConf> {
    found.iter().map(|configured| configured.applied.clone()).collect()
}

fn store(target: &CheckTarget) -> Store {
    HostPath::new(ROOT).and_then(|root| target.reach(&root).ok()).map_or_else(|| Store::new(ROOT), Store::new)
}

/// Returns the configuration that stands for the node: the first one that redirects, or else the first.
fn foremost(configurations: &[Configured]) -> Option<&NetConf> {
    let redirects = |configured: &&Configured| {
        configured
            .applied
            .conf
            .chain
            .iter()
            .any(|block| block.keys.get("type").is_some_and(|kind| kind == "istio-redirect"))
    };
    let first = configurations.iter().find(redirects).or(configurations.first());
    first.map(|configured| &configured.applied.conf)
}

/// Checks the path from the pod's annotation to the decision, its network namespace, and the logs.
fn check_pod(target: &CheckTarget, pod: &PodRef, node: &CheckedNode, results: &mut Results) -> CheckedPod {
    let conf = foremost(&node.configurations);
    let api = api(target, node.kubeconfig.as_ref(), results);
    let files = conf.and_then(|conf| manifests(target, conf));
    let source = match (&files, &api) {
        (Some(files), _) => Ok(&**files),
        (None, Ok(api)) => Ok(api as &dyn Cluster),
        (None, Err(why)) => Err(why.clone()),
    };
    let cluster = source.as_ref().ok().copied();
    let facts = pod::known(source, pod, results);
    let ours = pod::references(target, cluster, facts.as_ref(), conf, results);
    let conf = ours.first().or(conf).cloned();
    // A primary plugin adds the pod's networks itself, and fails as a whole if one of them is missing.
    let is_primary = conf.as_ref().is_some_and(|conf| conf.primary.is_some());
    let needed = if is_primary { checks::PLUGIN_ATTACHED.needs } else { checks::REDIRECTED.needs };
    let attachment = Attachment::of(target, &ours, &node.configurations);
    let explained = pod::examine(facts.as_ref(), conf.as_ref(), cluster, (&attachment, needed), results);
    attachment.add(results);

    let api = api.as_ref().ok();
    let known = facts.as_ref().map(|facts| &facts.pod);
    let place = rules::find(target, pod, known);
    let found = place.as_ref().ok().and_then(Option::as_ref);
    // Events come first: they explain why a pod that never started has no network namespace.
    logs::events(api, pod, found.is_some(), results);
    rules::examine_place(&place, known, (target, conf.as_ref()), results);
    let live = rules::examine(found, &store(target), explained.as_ref().map(|explained| &explained.policy), results);
    let policy = live.as_ref().and_then(|(live, _)| live.desired.as_ref()).map(|asked| &asked.policy);
    rules::examine_default_route(found, policy, results);
    rules::examine_listeners(found, policy, results);
    if target.probe {
        probe::examine(found, policy, facts.as_ref(), results);
    }
    node::examine_policy(node.policies.as_ref(), pod, results);
    logs::runtime(target, pod, found.and_then(|found| found.container_id.as_deref()), results);
    logs::plugin(target, conf.as_ref(), pod, results);
    CheckedPod { found: found.cloned(), conf, explained, live }
}

/// Returns the API server of the pod that this process runs in, or else the plugin's, unless that can't be reached.
fn api(
    target: &CheckTarget,
    kubeconfig: Option<&(PathBuf, KubeconfigSummary)>,
    results: &Results,
) -> Result<Api, String> {
    if let Some(api) = Api::in_cluster() {
        return Ok(api.within(Api::PROBE_TIMEOUT).once());
    }
    let api = of_plugin(target, kubeconfig).ok_or_else(|| crate::inspect::NO_CREDENTIALS.to_owned())?;
    results.obstacle(&[checks::API_REACHABLE]).map_or(Ok(api), Err)
}

fn of_plugin(target: &CheckTarget, kubeconfig: Option<&(PathBuf, KubeconfigSummary)>) -> Option<Api> {
    let (path, _) = kubeconfig?;
    Some(Api::of_kubeconfig(&target.mount, path.clone()).within(Api::PROBE_TIMEOUT).once())
}

/// Returns the manifests directory as the source of facts.
fn manifests(target: &CheckTarget, conf: &NetConf) -> Option<Box<dyn Cluster>> {
    let directory = conf.kubernetes.manifests_dir.as_ref()?;
    let manifests_dir = Some(target.reach_named(directory).ok()?);
    cluster::source(&crate::cni::Kubernetes { manifests_dir, ..conf.kubernetes.clone() })
}
