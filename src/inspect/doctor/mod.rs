//! What is wrong with a node, or with a pod on it: a list of checks, each with what was found and what
//! to do next. Nothing is changed; with `--probe` a few packets are sent, to addresses that nobody has.
//!
//! A check is done in the file of what it is about and comes to a verdict; one that makes sense only
//! where others hold is not done where they don't, and says so.
//!
//! | file | what it knows |
//! |---|---|
//! | `case` | whom it looks at, and where things are |
//! | `check`, `report` | checks and their verdicts; the list of them |
//! | `configuration`, `node_configuration`, `program` (`elf`), `installation` | what the node has on disk |
//! | `kubeconfig`, `rights`, `agent` | how the plugin comes by facts |
//! | `kernel` | what the kernel can do |
//! | `pod`, `decision` | what the pod asks for, and what is made of it |
//! | `sandbox`, `rules`, `listeners` | where the pod is, and what is in its network namespace |
//! | `probe`, `flight`, `users` | what real packets do |
//! | `logs`, `complaint`, `tool` | what has been said of the pod, and what that means |
//! | `bundle`, `redact` (`scan`, `open_keys`), `ustar` | all of it in one archive, without secrets |

mod bundle;
mod configuration;
mod credentials;
mod kernel;
mod listeners;
mod logs;
mod pod;
mod probe;
mod program;
mod redact;
mod report;
mod rules;
mod scan;

pub use report::{CheckGroup, CheckOutcome, Checklist, ReportLine};
pub use report::{CheckTarget, Installation};

use super::explain::Explained;
use super::rules::{LiveRules, RulesReport};
use crate::cluster::{self, ApiProbe, Cluster, KubeconfigSummary};
use crate::cni::NetConf;
use crate::host_path::HostPath;
use crate::netns::find::FoundNetns;
use crate::pod::{Facts, PodRef};
use crate::state::{ROOT, Store};
use configuration::Configured;
use report::Results;
use rules::PodNetns;
use std::path::PathBuf;

/// The list of checks, and what was seen on the way.
pub struct Examination {
    /// The list.
    pub checklist: Checklist,
    configurations: Vec<Configured>,
    kubeconfig: Option<(PathBuf, KubeconfigSummary)>,
    explained: Option<Explained>,
    live: Option<(LiveRules, RulesReport)>,
    said: Vec<String>,
    /// The pod's UID and its container's ID.
    names: Vec<String>,
}

/// Looks at the node, and at the pod where one is named.
#[must_use]
pub fn examine(case: &CheckTarget) -> Examination {
    let mut checkup = Results::default();
    let mut seen = node(case, &mut checkup);
    if let Some(pod) = &case.pod {
        of_pod(case, pod, &mut seen, &mut checkup);
    }
    let pod = case.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name));
    let (node, platform) = (case.node_name.clone(), case.platform.clone());
    seen.checklist = Checklist { pod, node, platform, ..Checklist::of(checkup.lines) };
    seen
}

fn node(case: &CheckTarget, checkup: &mut Results) -> Examination {
    let configurations = configuration::examine(case, checkup);
    let conf = foremost(&configurations);
    let kinds = configurations.iter().map(|configured| configured.conf.kind.clone()).collect();
    configuration::examine_node_configuration(case, checkup);
    program::examine(case, &kinds, checkup);
    let kubeconfig = credentials::examine_kubeconfig(case, conf, checkup);
    program::examine_installation(case, checkup);
    let reads_files = conf.is_some_and(|conf| conf.kubernetes.manifests_dir.is_some());
    match case.kubeconfig.as_ref().filter(|_| reads_files) {
        Some(path) => credentials::examine_api_of_user(&ApiProbe::of_user(path.clone()), conf, checkup),
        None => {
            let inquiry = kubeconfig.as_ref().map(|(path, _)| ApiProbe::new(&case.mount, path.clone()));
            credentials::examine_rights(inquiry.as_ref(), conf, checkup);
        }
    }
    credentials::examine_agent(case, conf, checkup);
    kernel::examine(conf, checkup);
    let checklist = Checklist::of(Vec::new());
    Examination {
        checklist,
        configurations,
        kubeconfig,
        explained: None,
        live: None,
        said: Vec::new(),
        names: Vec::new(),
    }
}

/// The configuration that speaks for the node: the one that redirects, else the first.
fn foremost(configurations: &[Configured]) -> Option<&NetConf> {
    let redirects = |configured: &&Configured| {
        configured.conf.chain.iter().any(|block| block.keys.get("type").is_some_and(|kind| kind == "istio-redirect"))
    };
    let first = configurations.iter().find(redirects).or(configurations.first());
    first.map(|configured| &configured.conf)
}

fn of_pod(case: &CheckTarget, pod: &PodRef, seen: &mut Examination, checkup: &mut Results) {
    let conf = foremost(&seen.configurations).cloned();
    let inquiry = inquiry(case, seen, checkup);
    let (facts, conf) = asked_for(case, pod, (conf, &inquiry), seen, checkup);
    let inquiry = inquiry.as_ref().ok();

    let whereabouts = PodNetns::of(case, pod, facts.as_ref());
    // Why it was never started explains why there is nothing to be found of it.
    logs::events(inquiry, pod, whereabouts.found().is_some(), checkup);
    whereabouts.examine(case, inquiry, conf.as_ref(), checkup);
    in_sandbox(case, whereabouts.found(), facts.as_ref(), seen, checkup);
    let container = whereabouts.found().and_then(|found| found.container_id.as_deref());
    let uid = facts.as_ref().and_then(|facts| facts.pod.uid.as_deref());
    seen.names = [container, uid].into_iter().flatten().map(str::to_owned).collect();
    seen.said = logs::journal(case, pod, container, checkup);
    seen.said.extend(logs::plugin(case, conf.as_ref(), pod, checkup));
}

/// What the pod asks for, from its annotation to the decision; its facts, and the configuration that it leads to.
fn asked_for(
    case: &CheckTarget,
    pod: &PodRef,
    (conf, inquiry): (Option<NetConf>, &Result<ApiProbe, String>),
    seen: &mut Examination,
    checkup: &mut Results,
) -> (Option<Facts>, Option<NetConf>) {
    let files = conf.as_ref().and_then(|conf| manifests(case, conf));
    let source = match (&files, inquiry) {
        (Some(files), _) => Ok(&**files),
        (None, Ok(inquiry)) => Ok(inquiry.cluster()),
        (None, Err(why)) => Err(why.clone()),
    };
    let cluster = source.as_ref().ok().copied();
    let facts = pod::known(source, pod, checkup);
    let ours = pod::references(case, cluster, facts.as_ref(), conf.as_ref(), checkup);
    let conf = ours.first().cloned().or(conf);
    let configured = [&pod::KNOWN, &configuration::PRESENT, &configuration::VALID];
    let led = [&configured[..], &[&pod::ANNOTATION, &pod::DEFINITION, &pod::LEADS]].concat();
    // A primary plugin adds the pod's networks itself, and nothing where one of them can't be had.
    let is_primary = conf.as_ref().is_some_and(|conf| conf.primary.is_some());
    let needed = if is_primary { &led } else { &configured[..] };
    seen.explained = pod::examine(facts.as_ref(), conf.as_ref(), cluster, needed, checkup);
    let followed = [&led[..], &[&pod::DECISION]].concat();
    pod::attached(case, &ours, &seen.configurations, &followed, checkup);
    (facts, conf)
}

/// What is in its network namespace, and what packets do there.
fn in_sandbox(
    case: &CheckTarget,
    found: Option<&FoundNetns>,
    facts: Option<&Facts>,
    seen: &mut Examination,
    checkup: &mut Results,
) {
    let wanted = seen.explained.as_ref().map(|explained| &explained.policy);
    let store =
        HostPath::new(ROOT).and_then(|root| case.reach(&root).ok()).map_or_else(|| Store::new(ROOT), Store::new);
    seen.live = rules::examine(found, &store, wanted, checkup);
    let policy = seen.live.as_ref().and_then(|(live, _)| live.asked.as_ref()).map(|asked| &asked.policy);
    let listeners = listeners::examine(found, policy, checkup);
    if case.probe {
        let before = seen.live.as_ref().map(|(_, report)| report);
        probe::examine(found, policy, facts, listeners.as_deref(), (before, &store), checkup);
    }
}

/// Whom to ask about the pod: as whoever calls wants, else as the pod that this process runs in, else as the
/// plugin does.
fn inquiry(case: &CheckTarget, seen: &Examination, checkup: &Results) -> Result<ApiProbe, String> {
    if let Some(path) = &case.kubeconfig {
        return Ok(ApiProbe::of_user(path.clone()));
    }
    if let Some(inquiry) = ApiProbe::in_cluster() {
        return Ok(inquiry);
    }
    let (path, _) = seen.kubeconfig.as_ref().ok_or("there is no API to ask: give --kubeconfig")?;
    checkup.obstacle(&[&credentials::API]).map_or_else(|| Ok(ApiProbe::new(&case.mount, path.clone())), Err)
}

/// Facts from files, where the configuration names a directory of them and the user names no API server.
fn manifests(case: &CheckTarget, conf: &NetConf) -> Option<Box<dyn Cluster>> {
    let directory = conf.kubernetes.manifests_dir.as_ref().filter(|_| case.kubeconfig.is_none())?;
    let reached = case.reach_named(directory).ok()?;
    let mut kubernetes = conf.kubernetes.clone();
    kubernetes.manifests_dir = Some(reached);
    cluster::source(&kubernetes)
}
