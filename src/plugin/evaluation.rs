//! The desired policy of a pod: evaluated from the configurations of its attachments, their arguments and the pod's facts.

use super::inputs::{AddInputs, EvaluatedWith, host_groups};
use super::lazy_pod::{LazyPod, is_injected};
use crate::cluster::{self, Event};
use crate::cni::{Block, Error, NetConf, Request};
use crate::pod::well_known::INJECTION_STATUS;
use crate::pod::{Facts, PodRef};
use crate::policy::Policy;
use crate::sub_plugins::{
    self, ChainInput, DecidedRequest, Ignored, Resolvers, Severity, SkipReason, SubPlugin, guards, skip_reason,
};
use std::cell::OnceCell;
use std::collections::BTreeSet;

/// The desired policy of an attachment, and a line that explains it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct DesiredPolicy {
    policy: Policy,
    why: String,
    /// Settings of the pod that have no effect.
    ignored: Vec<Ignored>,
    /// The Event about requests of the pod and its namespace outside the bounds.
    event: Option<Event>,
    /// Why the pod must not start because of them.
    rejection: Option<Error>,
    /// The facts with which it was evaluated.
    with: EvaluatedWith,
}

impl DesiredPolicy {
    fn skip(reason: &SkipReason) -> Self {
        Self { why: reason.to_string(), ..Self::default() }
    }

    /// Returns the policy of a pod that starts although no source of facts answered.
    fn missing_facts(why: String) -> Self {
        Self { why, with: EvaluatedWith::Facts, ..Self::default() }
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

/// Policies with the names of their networks.
pub(super) type NamedPolicies<'a> = Vec<(&'a str, Policy)>;

/// Evaluates the desired policies of an ADD's configurations, for a primary plugin with the names of their networks, and
/// the inputs for live policy. An Event about a request outside the bounds does not delay other pods.
///
/// # Errors
/// The facts can't be fetched, a setting of a configuration or of the pod is invalid, or the pod must not start.
pub(super) fn desired_policies<'a>(
    request: &Request,
    pod: &LazyPod<'_>,
    evaluated: impl IntoIterator<Item = (Option<&'a str>, &'a NetConf)>,
) -> Result<(NamedPolicies<'a>, Option<AddInputs<'a>>), Error> {
    let (mut policies, mut ignored, mut inputs) = (Vec::new(), BTreeSet::new(), Vec::new());
    for (network, conf) in evaluated {
        let named = |error: Error| match network {
            Some(network) => error.of_network(network),
            None => error,
        };
        let desired = evaluate(pod, conf).map_err(named)?;
        if let (Some(event), Some(reports), Some(pod)) = (&desired.event, pod.cluster(), pod.fetched()) {
            let reported = reports.report(pod, None, std::slice::from_ref(event));
            reported.unwrap_or_else(|failure| tracing::warn!("{failure}"));
        }
        desired.rejection.map_or(Ok(()), |error| Err(named(error)))?;
        tracing::info!(attachment = network, exclusions = desired.policy.exclusion_count(), "{}", desired.why);
        policies.push((network.unwrap_or(&conf.name), desired.policy));
        ignored.extend(desired.ignored);
        inputs.push((network, conf, desired.with));
    }
    ignored.iter().for_each(|ignored| tracing::warn!("{ignored}"));
    Ok((policies, AddInputs::new(request, inputs)))
}

/// What a pod is evaluated with.
enum Basis {
    /// Nothing: this is its policy.
    Decided(DesiredPolicy),
    /// The configuration alone.
    Configuration,
    /// Its facts.
    Facts(Facts),
}

/// Fetches what the pod is evaluated with. No facts are fetched for pods that are skipped. Without facts, the annotations
/// from the container runtime decide whether the pod needs them.
///
/// # Errors
/// The facts can't be fetched.
fn basis(pod: &LazyPod<'_>, conf: &NetConf) -> Result<Basis, Error> {
    let skip = |reason| Basis::Decided(DesiredPolicy::skip(&reason));
    if let Some(reason) = pod.reference.and_then(|pod| skip_reason(conf, pod)) {
        return Ok(skip(reason));
    }
    let wants = sub_plugins::wants(&conf.chain);
    Ok(match (pod.reference, pod.source(&conf.chain)) {
        (None, Some(_)) => skip(SkipReason::NoPodName),
        (None, None) => Basis::Configuration,
        (Some(_), None) => match not_injected(conf, || "it is not looked up".to_owned()) {
            Some(why) => Basis::Decided(DesiredPolicy::missing_facts(why)),
            None => Basis::Configuration,
        },
        (Some(_), Some(_)) if !wants.pod => skip(SkipReason::NoSubPlugin),
        (Some(pod_ref), Some(source)) => match pod.facts(source, pod_ref, wants.namespace) {
            Ok(facts) => Basis::Facts(facts),
            Err(error) => Basis::Decided(DesiredPolicy::missing_facts(check_without_facts(pod_ref, conf, error)?)),
        },
    })
}

/// Fetches the facts that the pod is evaluated with, before anything is changed. A pod that can start without them may
/// have none.
///
/// # Errors
/// The facts can't be fetched.
pub(super) fn fetch_facts(pod: &LazyPod<'_>, conf: &NetConf) -> Result<(), Error> {
    basis(pod, conf).map(drop)
}

/// Evaluates the desired policy of a pod.
fn evaluate(pod: &LazyPod<'_>, conf: &NetConf) -> Result<DesiredPolicy, Error> {
    match basis(pod, conf)? {
        Basis::Decided(desired) => Ok(desired),
        Basis::Facts(facts) => run(&conf.chain, conf, Some(&facts)),
        Basis::Configuration if pod.reference.is_some() => run(&conf.chain, conf, None),
        Basis::Configuration => {
            let of_pods =
                [Some(SubPlugin::IstioRedirect), Some(SubPlugin::ContainerExclude), Some(SubPlugin::MeshGuard)];
            let others: Vec<Block> =
                conf.chain.iter().filter(|block| !of_pods.contains(&SubPlugin::of(block))).cloned().collect();
            run(&others, conf, None)
        }
    }
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

/// Checks that a pod without facts can start: that its annotations from the runtime show that it is not redirected.
/// `error` is the reason why there are no facts. Returns a line that explains it.
///
/// # Errors
/// `error`, with the pod's name.
fn check_without_facts(pod: &PodRef, conf: &NetConf, error: Error) -> Result<String, Error> {
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
}
