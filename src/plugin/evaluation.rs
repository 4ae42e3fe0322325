//! The desired policy of an attachment: evaluated from its configuration, its arguments and the pod's facts.
//!
//! After a reboot, the runtime calls the plugin before the node's agent runs. The annotations that the container runtime
//! passes show whether Istio's injector has processed the pod. A pod without the injector's annotation has no sidecar, so
//! it starts at once, without facts.

use crate::cluster::{Cluster, Event};
use crate::cni::{Block, Error, NetConf, Request};
use crate::pod::well_known::INJECTION_STATUS;
use crate::pod::{Facts, Pod, PodRef};
use crate::policy::Policy;
use crate::sub_plugins::{
    ChainInput, DecidedRequest, Ignored, Resolvers, Severity, SkipReason, SubPlugin, guards, skip_reason,
};
use crate::trusted_file::read_text;
use crate::{cluster, sub_plugins};
use std::cell::OnceCell;
use std::collections::HashMap;
use std::path::Path;

/// A group file with more bytes is a mistake: NSS serves directories of many users.
const MAX_GROUP_FILE: u64 = 4 << 20;

/// The desired policy of an attachment, and a line that explains it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct DesiredPolicy {
    pub(super) policy: Policy,
    pub(super) why: String,
    /// Settings of the pod that have no effect.
    pub(super) ignored: Vec<Ignored>,
    /// The Event about requests of the pod and its namespace outside the bounds.
    event: Option<Event>,
    /// The pod's node, for Events.
    node: Option<String>,
    /// Why the pod must not start because of them.
    rejection: Option<Error>,
    /// The facts with which it was evaluated.
    pub(super) with: EvaluatedWith,
}

/// The facts with which a policy was evaluated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum EvaluatedWith {
    /// None: the pod is skipped without them.
    #[default]
    Nothing,
    /// None: the configuration names no source of facts.
    NoSource,
    /// None: no source of facts answered.
    MissingFacts,
    /// The facts of the pod.
    Facts,
    /// The facts of a pod that no configuration can affect while it runs: it has no sidecar, and the sub-plugins do
    /// nothing for a pod that a label enrolls in the ambient mesh later.
    FinalFacts,
}

impl EvaluatedWith {
    fn of(facts: Option<&Facts>, blocks: &[Block]) -> Self {
        let is_final = |facts: &Facts| {
            facts.pod.host_network || (facts.pod.proxy().is_none() && !sub_plugins::wants(blocks).namespace)
        };
        match facts {
            None => Self::NoSource,
            Some(facts) if is_final(facts) => Self::FinalFacts,
            Some(_) => Self::Facts,
        }
    }
}

impl DesiredPolicy {
    fn skip(reason: &SkipReason) -> Self {
        Self { why: reason.to_string(), ..Self::default() }
    }

    /// Returns the policy of a pod that starts although no source of facts answered.
    fn missing_facts(why: String) -> Self {
        Self { why, with: EvaluatedWith::MissingFacts, ..Self::default() }
    }

    /// Records an Event of the pod if it requests what is outside the bounds. The Event does not delay other pods.
    ///
    /// # Errors
    /// The pod must not start.
    pub(super) fn report_outside(&self, pod: Option<&PodRef>, cluster: Option<&dyn Cluster>) -> Result<(), Error> {
        if let (Some(event), Some(pod), Some(reports)) = (&self.event, pod, cluster) {
            let pod = Pod { node_name: self.node.clone(), ..pod.clone().into() };
            let reported = reports.report(&pod, None, std::slice::from_ref(event));
            reported.unwrap_or_else(|failure| tracing::warn!("{failure}"));
        }
        self.rejection.clone().map_or(Ok(()), Err)
    }
}

/// The facts with which the pods of a configuration are evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactsOf {
    /// Those of its source. A primary plugin can also use the service account of the pod in which it runs.
    Source,
    /// None: the configuration names no source, and its sub-plugins need none.
    Configuration,
    /// None, although `istio-redirect` needs them: an ADD fails.
    Missing,
}

/// Returns the facts with which the pods of `conf` are evaluated.
#[must_use]
pub fn facts_of(conf: &NetConf) -> FactsOf {
    if conf.primary.is_some() || cluster::source(&conf.kubernetes).is_some() {
        FactsOf::Source
    } else if conf.chain.iter().filter_map(SubPlugin::of).any(SubPlugin::needs_facts) {
        FactsOf::Missing
    } else {
        FactsOf::Configuration
    }
}

/// Fetches the facts of a pod; with those of its namespace if the flag is set.
pub(super) type FetchFacts<'a> = dyn Fn(&PodRef, bool) -> Result<Facts, Error> + 'a;

/// Evaluates the desired policy of an ADD, with facts from the configured source.
///
/// # Errors
/// As [`evaluate`] and [`DesiredPolicy::report_outside`].
pub(super) fn desired_policy(request: &Request, conf: &NetConf) -> Result<DesiredPolicy, Error> {
    let pod = request.args.pod.as_ref();
    let source = match asked(conf, &conf.chain) {
        Asked::Nothing => None,
        Asked::Memory => cluster::memory(&conf.kubernetes),
        Asked::All => cluster::source(&conf.kubernetes),
    };
    let desired = match &source {
        Some(source) => evaluate(pod, conf, Some(&|pod: &PodRef, with_namespace| source.facts(pod, with_namespace))),
        None => evaluate(pod, conf, None),
    }?;
    desired.report_outside(pod, source.as_deref())?;
    Ok(desired)
}

/// Evaluates the desired policy of a pod. `fetch_facts` is `None` without a source of facts. No facts are fetched for
/// pods that are skipped. Without facts, the annotations from the container runtime decide whether the pod needs them.
///
/// # Errors
/// The facts can't be fetched, or a setting of the configuration or of the pod is invalid.
pub(super) fn evaluate(
    pod: Option<&PodRef>,
    conf: &NetConf,
    fetch_facts: Option<&FetchFacts<'_>>,
) -> Result<DesiredPolicy, Error> {
    if let Some(reason) = pod.and_then(|pod| skip_reason(conf, pod)) {
        return Ok(DesiredPolicy::skip(&reason));
    }
    match (pod, fetch_facts) {
        (None, Some(_)) => Ok(DesiredPolicy::skip(&SkipReason::NoPodName)),
        (None, None) => {
            let of_pods =
                [Some(SubPlugin::IstioRedirect), Some(SubPlugin::ContainerExclude), Some(SubPlugin::MeshGuard)];
            let others: Vec<Block> =
                conf.chain.iter().filter(|block| !of_pods.contains(&SubPlugin::of(block))).cloned().collect();
            run(&others, conf, None)
        }
        (Some(_), None) => match not_injected(conf, || "it is not looked up".to_owned()) {
            Some(why) => Ok(DesiredPolicy::missing_facts(why)),
            None => run(&conf.chain, conf, None),
        },
        (Some(pod), Some(fetch_facts)) => {
            let wants = sub_plugins::wants(&conf.chain);
            if !wants.pod {
                return Ok(DesiredPolicy::skip(&SkipReason::NoSubPlugin));
            }
            match fetch_facts(pod, wants.namespace) {
                Ok(facts) => run(&conf.chain, conf, Some(&facts)),
                Err(error) => check_without_facts(pod, conf, error).map(DesiredPolicy::missing_facts),
            }
        }
    }
}

/// Returns whether `pod` is the node agent's own. It must start without facts, because the agent provides them.
pub(super) fn is_agent(conf: &NetConf, pod: &PodRef) -> bool {
    skip_reason(conf, pod) == Some(SkipReason::AgentPod)
}

fn run(blocks: &[Block], conf: &NetConf, facts: Option<&Facts>) -> Result<DesiredPolicy, Error> {
    let of_pod = |error: Error| match facts {
        Some(facts) => error.of_pod(&facts.pod.namespace, &facts.pod.name),
        None => error,
    };
    let output = output(blocks, conf, facts).map_err(of_pod)?;
    for note in &output.notes {
        match note.severity {
            Severity::Info => tracing::info!("{}", note.text),
            Severity::Warning => tracing::warn!("{}", note.text),
        }
    }
    let rejection = output.rejection(&conf.bounds).map(of_pod);
    let outside: Vec<String> = output.outside().map(DecidedRequest::reason).collect();
    let event = (!outside.is_empty()).then(|| {
        let (reason, message) = match &rejection {
            Some(error) => ("DetourExclusionRejected", error.to_string()),
            None => ("DetourExclusionIgnored", format!("without effect: {}", outside.join("; "))),
        };
        Event { warning: true, reason: reason.into(), message }
    });
    Ok(DesiredPolicy {
        why: output.decision.to_string(),
        ignored: facts.map(sub_plugins::ignored).unwrap_or_default(),
        event,
        node: facts.and_then(|facts| facts.pod.node_name.clone()),
        rejection,
        with: EvaluatedWith::of(facts, blocks),
        policy: output.policy,
    })
}

/// Evaluates the sub-plugins in `blocks` with the pod's facts, if they are known. Requests outside the bounds are without
/// effect, even if an ADD would fail.
///
/// # Errors
/// As [`sub_plugins::explain`].
pub fn output(blocks: &[Block], conf: &NetConf, facts: Option<&Facts>) -> Result<sub_plugins::ChainOutput, Error> {
    let (runtime, previous) = (conf.runtime_nameservers(), conf.prev_result_nameservers());
    let resolvers = Resolvers { runtime: &runtime, cluster_dns: &conf.kubernetes.cluster_dns, previous: &previous };
    let groups = OnceCell::new();
    let group_id = |name: &str| groups.get_or_init(|| host_groups(&conf.group_file)).get(name).copied();
    let input = ChainInput { facts, args: &conf.args, bounds: &conf.bounds, resolvers, group_id: &group_id };
    sub_plugins::explain(blocks, &input)
}

/// Returns whether Istio's injector has processed the pod, according to the container runtime; `None` if the runtime
/// passes no annotations.
pub(super) fn is_injected(conf: &NetConf) -> Option<bool> {
    conf.pod_annotations().map(|annotations| annotations.contains_key(INJECTION_STATUS))
}

/// Who is asked for the facts of a pod when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// Nothing: they have no effect.
    Nothing,
    /// The agent's memory, for a fraction of a second: whether the pod is in the ambient mesh. Without an answer, the pod
    /// starts without rules, and the agent adds its exclusions later.
    Memory,
    /// All sources, within the configured timeout: the pod waits.
    All,
}

/// Returns who is asked for the facts of a pod with the sub-plugins in `chain`.
pub(super) fn asked(conf: &NetConf, chain: &[Block]) -> Asked {
    // With the guard, every pod waits, because only labels show whether it is in the ambient mesh.
    if is_injected(conf) != Some(false) || guards(chain).next().is_some() {
        return Asked::All;
    }
    // Only exclusions apply to pods in the ambient mesh, which also depends on their namespaces.
    if sub_plugins::wants(chain).namespace { Asked::Memory } else { Asked::Nothing }
}

/// Checks that a pod without facts can start: that its annotations from the runtime show that it is not redirected.
/// `error` is the reason why there are no facts. Returns a line that explains it.
///
/// # Errors
/// `error`, with the pod's name.
pub(super) fn check_without_facts(pod: &PodRef, conf: &NetConf, error: Error) -> Result<String, Error> {
    let no_facts = || format!("its facts are unavailable: {error}");
    if let Some(why) = not_injected(conf, no_facts) {
        return Ok(why);
    }
    let mut error = error.of_pod(&pod.namespace, &pod.name);
    if is_injected(conf) == Some(true) {
        let separator = if error.details.is_empty() { "" } else { "; " };
        error.details += &format!(
            "{separator}the pod has a sidecar (annotation {INJECTION_STATUS}), so it starts only with its rules; the \
             runtime retries"
        );
    }
    Err(error)
}

/// Returns a line that explains that the pod is not redirected, if the annotations from the runtime show it. `cause` is
/// why only these annotations are known.
fn not_injected(conf: &NetConf, cause: impl FnOnce() -> String) -> Option<String> {
    (is_injected(conf) == Some(false) && guards(&conf.chain).next().is_none()).then(|| {
        let cause = cause();
        format!("not redirected: annotation {INJECTION_STATUS} is missing according to the container runtime; {cause}")
    })
}

/// Reads the GIDs of the host's groups by name (group(5): `name:password:GID:members`). The first entry of a name
/// takes precedence.
pub(super) fn host_groups(file: &Path) -> HashMap<String, u32> {
    let groups = read_text(file, MAX_GROUP_FILE).unwrap_or_default();
    let group = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    groups.lines().rev().filter_map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, Code};
    use serde_json::{Value, json};

    fn conf(annotations: Option<Value>) -> NetConf {
        let mut conf = json!({"name": "n", "type": "detour"});
        if let Some(annotations) = annotations {
            conf["runtimeConfig"] = json!({"io.kubernetes.cri.pod-annotations": annotations});
        }
        NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("accepted")
    }

    fn decided(annotations: Option<Value>, error: Error) -> Result<String, Error> {
        let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: None };
        check_without_facts(&pod, &conf(annotations), error)
    }

    fn down() -> Error {
        Error::new(Code::TryAgain, "pod shop/web-0: GET …: no usable answer").with_details("connection refused")
    }

    #[test]
    fn a_pod_that_the_injector_has_not_processed_starts_without_facts() {
        for annotations in [json!({}), json!({"k8s.v1.cni.cncf.io/networks": "a", "detour.io/exclude-uids": "7"})] {
            let why = decided(Some(annotations), down()).expect("it starts");
            for part in ["sidecar.istio.io/status is missing", "container runtime", "connection refused"] {
                assert!(why.contains(part), "{why}");
            }
        }
    }

    #[test]
    fn other_pods_fail_with_their_name_and_the_cause() {
        // Istio's rule is about the annotation, not its value.
        for value in ["{}", ""] {
            let error = decided(Some(json!({"sidecar.istio.io/status": value})), down()).expect_err("it waits");
            assert_eq!((error.code, &error.msg), (Code::TryAgain, &down().msg));
            assert!(error.details.starts_with("connection refused; the pod has a sidecar"), "{error}");
        }
        assert_eq!(decided(None, down()), Err(down()));
        let error = decided(None, Error::new(Code::InvalidConfig, "kubeconfig /k: empty")).expect_err("it waits");
        assert_eq!(error.msg, "pod shop/web-0: kubeconfig /k: empty");
    }

    #[test]
    fn only_a_pod_that_the_injector_has_processed_waits() {
        let annotations = || [Some(json!({"a": "b"})), Some(json!({"sidecar.istio.io/status": "{}"})), None];
        let asked_of = |chain: Value| {
            annotations().map(|annotations| {
                let mut conf = json!({"name": "n", "type": "detour", "chain": chain});
                if let Some(annotations) = annotations {
                    conf["runtimeConfig"] = json!({"io.kubernetes.cri.pod-annotations": annotations});
                }
                let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "").expect("accepted");
                asked(&conf, &conf.chain)
            })
        };
        let redirect = json!({"type": "istio-redirect"});
        assert_eq!(asked_of(json!([redirect])), [Asked::Nothing, Asked::All, Asked::All]);
        let exclude = json!({"type": "uid-exclude", "uids": ["1337"]});
        assert_eq!(asked_of(json!([redirect, exclude])), [Asked::Memory, Asked::All, Asked::All]);
        assert_eq!(asked_of(json!([exclude])), [Asked::Memory, Asked::All, Asked::All]);
    }
}
