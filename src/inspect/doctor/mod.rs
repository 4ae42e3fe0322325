//! `detour doctor`: a list of checks of a node, and of a pod on it. Each check reports what it found and, if it fails,
//! what to do next. Nothing is changed. With `--probe`, a few packets are sent to addresses that are reserved for
//! documentation.
//!
//! Each check is implemented in the file of its subject and returns a verdict. A check that depends on another one is
//! reported as not checked if that one did not pass.

mod checks;
mod configuration;
mod containers;
mod node;
mod pod;
mod probe;
mod report;
mod rules;

pub use report::{CheckOutcome, CheckTarget, CheckVerdict, Checklist, OwnList, ReportLine};

use super::needless_exclusions;
use super::subject::{AppliedConf, Subject};
use crate::cluster::agent::PoliciesReport;
use crate::cluster::{self, Api, Cluster, Definitions};
use crate::cni::NetConf;
use crate::host_path::HostPath;
use crate::plugin::FormatCounts;
use crate::pod::{Facts, PodRef};
use crate::state::{ROOT, Store};
use configuration::foremost;
use containers::CheckedPod;
use report::Results;
use std::path::{Path, PathBuf};

/// What the checks of the node have found, for those that follow.
struct CheckedNode {
    configurations: Vec<AppliedConf>,
    policies: Result<PoliciesReport, String>,
    kubeconfig: Option<PathBuf>,
}

/// Runs the checks of the node and, if a pod is named, of the pod.
#[must_use]
pub fn examine(target: &CheckTarget) -> Checklist {
    let mut results = Results::default();
    let node = check_node(target, &mut results);
    let pod = target.pod.as_ref().map(|pod| check_pod(target, pod, &node, &mut results));
    containers::examine(target, &node.configurations, pod.as_ref(), &mut results);
    let needless = || {
        let api = api(target, node.kubeconfig.as_ref(), &results).ok()?;
        needless_exclusions::find(target.node_name.as_deref()?, &api, &node.configurations)
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
    let kinds = configurations.iter().map(|applied| applied.conf.kind.clone()).collect();
    configuration::examine_own_list(target, results);
    configuration::examine_multus_chain(target, results);
    configuration::examine_node_configuration(target, results);
    node::examine_program(target, &kinds, results);
    let kubeconfig = node::examine_kubeconfig(target, conf, results);
    node::examine_installation(target, results);
    let api = kubeconfig.as_ref().map(|path| of_plugin(target, path));
    node::examine_rights(api.as_ref(), conf, results);
    node::examine_agent(target, conf, results);
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
    let configurations = configuration::examine(target, &mut results);
    let kubeconfig = node::examine_kubeconfig(target, foremost(&configurations), &mut results);
    let api = api(target, kubeconfig.as_ref(), &results);
    NodeSetup { configurations, api, store: store(target) }
}

fn store(target: &CheckTarget) -> Store {
    HostPath::new(ROOT).and_then(|root| target.reach(&root).ok()).map_or_else(|| Store::new(ROOT), Store::new)
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
    let facts = pod::known(source.clone(), pod, results);
    let definitions = source.ok().map(|cluster| cluster as &dyn Definitions);
    let given = |facts: Facts| Subject::given(&node.configurations, facts, definitions).ok();
    let subject = facts.clone().and_then(given);
    pod::examine_networks(target, definitions, subject.as_ref(), results);
    let explained = pod::examine(&node.configurations, subject.as_ref(), results);

    let known = facts.as_ref().map(|facts| &facts.pod);
    let place = rules::find(target, pod, known);
    let found = place.as_ref().ok().and_then(Option::as_ref);
    // Events come first: they explain why a pod that never started has no network namespace.
    pod::events(api.as_ref().ok(), pod, found.is_some(), results);
    rules::examine_place(&place, known, target, results);
    let live = rules::examine(found, &store(target), explained.as_ref().map(|explained| &explained.policy), results);
    let policy = live.as_ref().and_then(|(live, _)| live.desired.as_ref()).map(|asked| &asked.policy);
    rules::examine_default_route(found, policy, results);
    rules::examine_listeners(found, policy, results);
    if target.probe {
        probe::examine(found, policy, facts.as_ref(), results);
    }
    node::examine_policy(node.policies.as_ref(), pod, results);
    pod::runtime_log(target, pod, found.and_then(|found| found.container_id.as_deref()), results);
    pod::plugin_log(target, conf, pod, results);
    CheckedPod { found: found.cloned(), explained, live }
}

/// Returns the API server of the pod that this process runs in, or else the plugin's, unless that can't be reached.
fn api(target: &CheckTarget, kubeconfig: Option<&PathBuf>, results: &Results) -> Result<Api, String> {
    if let Some(api) = Api::in_cluster() {
        return Ok(api.within(Api::PROBE_TIMEOUT).once());
    }
    let kubeconfig = kubeconfig.ok_or_else(|| crate::inspect::NO_CREDENTIALS.to_owned())?;
    results.obstacle(&[checks::API_REACHABLE]).map_or_else(|| Ok(of_plugin(target, kubeconfig)), Err)
}

fn of_plugin(target: &CheckTarget, kubeconfig: &Path) -> Api {
    Api::of_kubeconfig(&target.mount, kubeconfig.to_owned()).within(Api::PROBE_TIMEOUT).once()
}

/// Returns the manifests directory as the source of facts.
fn manifests(target: &CheckTarget, conf: &NetConf) -> Option<Box<dyn Cluster>> {
    let directory = conf.kubernetes.manifests_dir.as_ref()?;
    let manifests_dir = Some(target.reach_named(directory).ok()?);
    cluster::source(&crate::cni::Kubernetes { manifests_dir, ..conf.kubernetes.clone() })
}
