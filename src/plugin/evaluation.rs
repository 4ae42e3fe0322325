//! The pod of a call, and its desired policy: evaluated from the configurations of its attachments, their arguments and
//! the pod's facts.
//!
//! After a reboot, the runtime calls the plugin before the node's agent runs. The annotations that the container runtime
//! passes show whether Istio's injector has processed the pod. A pod without the injector's annotation has no sidecar, so
//! it starts at once, without facts.

use super::inputs::{AddInputs, EvaluatedWith, group_ids};
use crate::cluster::{self, Api, Cluster, Event};
use crate::cni::{Block, Error, NetConf, Request};
use crate::pod::well_known::{DEFAULT_NETWORK, INJECTION_STATUS, NETWORKS};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::policy::Policy;
use crate::sub_plugins::{
    self, ChainInput, DecidedRequest, Resolvers, Severity, SkipReason, SubPlugin, guards, skip_reason,
};
use serde_json::Value;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::BTreeSet;

/// A source of facts, if the configuration has one.
type Source = OnceCell<Option<Box<dyn Cluster>>>;

/// A pod whose data is fetched when needed.
pub(super) struct LazyPod<'a> {
    /// The pod that `CNI_ARGS` names.
    pub(super) reference: Option<&'a PodRef>,
    conf: &'a NetConf,
    /// The source for a pod that waits.
    cluster: Source,
    /// The source for a pod that does not wait.
    memory: Source,
    /// The pod as the runtime describes it: with its annotations only.
    of_runtime: OnceCell<Option<Pod>>,
    fetched: OnceCell<Pod>,
    namespace: OnceCell<Namespace>,
    /// Why its facts could not be fetched.
    unavailable: OnceCell<Error>,
}

impl<'a> LazyPod<'a> {
    /// Returns the pod of a call, without a request.
    pub(super) const fn new(request: &'a Request, conf: &'a NetConf) -> Self {
        Self {
            reference: request.args.pod.as_ref(),
            conf,
            cluster: OnceCell::new(),
            memory: OnceCell::new(),
            of_runtime: OnceCell::new(),
            fetched: OnceCell::new(),
            namespace: OnceCell::new(),
            unavailable: OnceCell::new(),
        }
    }

    /// Returns the pod with the annotations that the runtime passes; `None` if it passes none.
    fn of_runtime(&self) -> Option<&Pod> {
        let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
        let annotated = || {
            let annotations = self.conf.pod_annotations()?.iter().filter_map(text).collect();
            Some(Pod { annotations, ..self.reference?.clone().into() })
        };
        self.of_runtime.get_or_init(annotated).as_ref()
    }

    /// Returns whether the pod has no sidecar and selects no network, according to the container runtime.
    pub(super) fn needs_only_configured_networks(&self) -> bool {
        let selects = |pod: &Pod| [NETWORKS, DEFAULT_NETWORK].iter().any(|key| pod.annotations.contains_key(*key));
        self.of_runtime().is_some_and(|pod| is_injected(self.conf) == Some(false) && !selects(pod))
    }

    /// Returns the source that answers at once or not at all.
    pub(super) fn memory(&self) -> Option<&dyn Cluster> {
        self.memory.get_or_init(|| cluster::memory(&self.conf.kubernetes)).as_deref()
    }

    /// Returns the source of pods and definitions.
    pub(super) fn cluster(&self) -> Option<&dyn Cluster> {
        self.cluster.get_or_init(|| source_of(self.conf)).as_deref()
    }

    /// Returns the source that is asked for the facts that the sub-plugins of `conf` need; `None` if they have no effect,
    /// or the configuration names no source.
    fn source(&self, conf: &NetConf) -> Option<&dyn Cluster> {
        if waits(conf) {
            return self.cluster();
        }
        // Only exclusions apply to pods in the ambient mesh, which also depends on their namespaces. Without an answer at
        // once, the pod starts without rules, and the agent adds its exclusions later.
        if sub_plugins::wants(&conf.chain).namespace { self.memory() } else { None }
    }

    /// Returns the pod with its annotations; `None` if the call names no pod, there is no cluster source, or the pod
    /// is the node agent's own: that pod must start without the source, because the agent provides it.
    ///
    /// # Errors
    /// The pod can't be fetched.
    pub(super) fn with_annotations(&self) -> Result<Option<&Pod>, Error> {
        if is_agent(self.conf, self.reference) {
            return Ok(None);
        }
        if let Some(pod) = self.of_runtime() {
            return Ok(Some(pod));
        }
        let (Some(pod_ref), Some(cluster)) = (self.reference, self.cluster()) else { return Ok(None) };
        let is_skipped = skip_reason(self.conf, pod_ref).is_some();
        self.fetch(cluster, pod_ref, !is_skipped && sub_plugins::wants(&self.conf.chain).namespace)?;
        Ok(self.fetched.get())
    }

    /// Returns the facts of the pod from `source`, and those of its namespace if `with_namespace`. After an error, it sends
    /// no further request.
    ///
    /// # Errors
    /// The facts can't be fetched.
    pub(super) fn facts(&self, source: &dyn Cluster, pod_ref: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        if let Some(error) = self.unavailable.get() {
            return Err(error.clone());
        }
        let fetched = self.fetch(source, pod_ref, with_namespace);
        fetched.inspect_err(|error| drop(self.unavailable.set(error.clone())))?;
        let pod = self.fetched.get().cloned().unwrap_or_default();
        Ok(Facts { pod, namespace: self.namespace.get().filter(|_| with_namespace).cloned() })
    }

    fn fetch(&self, source: &dyn Cluster, pod_ref: &PodRef, with_namespace: bool) -> Result<(), Error> {
        if self.fetched.get().is_none() {
            let Facts { pod, namespace } = source.facts(pod_ref, with_namespace)?;
            self.fetched.get_or_init(|| pod);
            namespace.map(|namespace| self.namespace.get_or_init(|| namespace));
        }
        if with_namespace && self.namespace.get().is_none() {
            let namespace = source.namespace(pod_ref)?;
            self.namespace.get_or_init(|| namespace);
        }
        Ok(())
    }
}

/// Returns the source of pods and definitions: the configured one. The fallback of a primary plugin is the API server that
/// the environment of this process names. `None` if there is neither.
pub(super) fn source_of(conf: &NetConf) -> Option<Box<dyn Cluster>> {
    cluster::source_or(&conf.kubernetes, conf.primary.as_ref().and_then(|_| Api::in_cluster()))
}

/// Returns whether `pod` is the node agent's own. It must start without facts, because the agent provides them.
pub(super) fn is_agent(conf: &NetConf, pod: Option<&PodRef>) -> bool {
    pod.is_some_and(|pod| skip_reason(conf, pod) == Some(SkipReason::AgentPod))
}

/// Returns whether Istio's injector has processed the pod, according to the container runtime; `None` if the runtime
/// passes no annotations.
pub(super) fn is_injected(conf: &NetConf) -> Option<bool> {
    conf.pod_annotations().map(|annotations| annotations.contains_key(INJECTION_STATUS))
}

/// Returns whether a pod with the sub-plugins of `conf` waits for its facts. With the guard, every pod does, because only
/// labels show whether it is in the ambient mesh.
fn waits(conf: &NetConf) -> bool {
    is_injected(conf) != Some(false) || guards(&conf.chain).next().is_some()
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
) -> Result<(NamedPolicies<'a>, Option<AddInputs>), Error> {
    let (mut policies, mut ignored, mut inputs) = (Vec::new(), BTreeSet::new(), Vec::new());
    for (network, conf) in evaluated {
        let named = |error: Error| error.of_network(network);
        let with = evaluated_with(pod, conf).map_err(named)?;
        let (policy, why) = match &with {
            EvaluatedWith::Nothing(why) | EvaluatedWith::MissingFacts(why) => (Policy::default(), why.clone()),
            EvaluatedWith::Configuration => evaluate(pod, conf, None).map_err(named)?,
            EvaluatedWith::Facts(facts) => {
                ignored.extend(sub_plugins::ignored(facts));
                evaluate(pod, conf, Some(facts)).map_err(named)?
            }
        };
        tracing::info!(attachment = network, exclusions = policy.exclusion_count(), "{why}");
        policies.push((network.unwrap_or(&conf.name), policy));
        inputs.push((network, conf, with));
    }
    ignored.iter().for_each(|ignored| tracing::warn!("{ignored}"));
    Ok((policies, AddInputs::new(request, &inputs)))
}

/// Fetches what the pod is evaluated with. No facts are fetched for pods that are skipped. Without facts, the annotations
/// from the container runtime decide whether the pod needs them.
///
/// # Errors
/// The facts can't be fetched.
pub(super) fn evaluated_with(pod: &LazyPod<'_>, conf: &NetConf) -> Result<EvaluatedWith, Error> {
    if let Some(reason) = pod.reference.and_then(|pod| skip_reason(conf, pod)) {
        return Ok(EvaluatedWith::Nothing(reason.to_string()));
    }
    let wants = sub_plugins::wants(&conf.chain);
    Ok(match (pod.reference, pod.source(conf)) {
        (None, Some(_)) => EvaluatedWith::Nothing(SkipReason::NoPodName.to_string()),
        (None, None) => EvaluatedWith::Configuration,
        (Some(_), None) => {
            not_injected(conf, "it is not looked up").map_or(EvaluatedWith::Configuration, EvaluatedWith::MissingFacts)
        }
        (Some(_), Some(_)) if !wants.pod => EvaluatedWith::Nothing(SkipReason::NoSubPlugin.to_string()),
        (Some(pod_ref), Some(source)) => match pod.facts(source, pod_ref, wants.namespace) {
            Ok(facts) => EvaluatedWith::Facts(Box::new(facts)),
            Err(error) => EvaluatedWith::MissingFacts(check_without_facts(pod_ref, conf, error)?),
        },
    })
}

/// Evaluates the desired policy of a pod, and a line that explains it.
fn evaluate(pod: &LazyPod<'_>, conf: &NetConf, facts: Option<&Facts>) -> Result<(Policy, String), Error> {
    let of_pod = |error: Error| match facts {
        Some(facts) => error.of_pod(&facts.pod.namespace, &facts.pod.name),
        None => error,
    };
    let of_pods = [Some(SubPlugin::IstioRedirect), Some(SubPlugin::ContainerExclude), Some(SubPlugin::MeshGuard)];
    let mut chain = Cow::Borrowed(conf.chain.as_slice());
    if pod.reference.is_none() {
        chain.to_mut().retain(|block| !of_pods.contains(&SubPlugin::of(block)));
    }
    let output = output(&chain, conf, facts).map_err(of_pod)?;
    for note in &output.notes {
        match note.severity {
            Severity::Info => tracing::info!("{}", note.text),
            Severity::Warning => tracing::warn!("{}", note.text),
        }
    }
    let rejection = output.rejection(&conf.bounds).map(of_pod);
    let outside: Vec<String> = output.outside().map(DecidedRequest::reason).collect();
    if let (false, Some(reports), Some(pod)) = (outside.is_empty(), pod.cluster(), pod.fetched.get()) {
        let (reason, message) = match &rejection {
            Some(error) => ("DetourExclusionRejected", error.to_string()),
            None => ("DetourExclusionIgnored", format!("without effect: {}", outside.join("; "))),
        };
        let reported = reports.report(pod, None, &[Event { warning: true, reason: reason.into(), message }]);
        reported.unwrap_or_else(|failure| tracing::warn!("{failure}"));
    }
    rejection.map_or_else(|| Ok((output.policy, output.decision.to_string())), Err)
}

/// Evaluates the sub-plugins in `blocks` with the pod's facts, if they are known. Requests outside the bounds are without
/// effect, even if an ADD would fail.
///
/// # Errors
/// As [`sub_plugins::explain`].
pub fn output(blocks: &[Block], conf: &NetConf, facts: Option<&Facts>) -> Result<sub_plugins::ChainOutput, Error> {
    let (runtime, previous) = (conf.runtime_nameservers(), conf.prev_result_nameservers());
    let resolvers = Resolvers { runtime: &runtime, cluster_dns: &conf.kubernetes.cluster_dns, previous: &previous };
    let group_id = group_ids(&conf.group_file);
    let input = ChainInput { facts, args: &conf.args, bounds: &conf.bounds, resolvers, group_id: &group_id };
    sub_plugins::explain(blocks, &input)
}

/// Checks that a pod without facts can start: that its annotations from the runtime show that it is not redirected.
/// `error` is the reason why there are no facts. Returns a line that explains it.
///
/// # Errors
/// `error`, with the pod's name.
fn check_without_facts(pod: &PodRef, conf: &NetConf, error: Error) -> Result<String, Error> {
    if let Some(why) = not_injected(conf, &format!("its facts are unavailable: {error}")) {
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
fn not_injected(conf: &NetConf, cause: &str) -> Option<String> {
    let why = "is missing according to the container runtime";
    (!waits(conf)).then(|| format!("not redirected: annotation {INJECTION_STATUS} {why}; {cause}"))
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
    fn only_a_pod_that_the_injector_has_processed_waits() {
        let waits_with = |annotations| waits(&conf(annotations));
        assert!(!waits_with(Some(json!({"a": "b"}))));
        assert!(waits_with(Some(json!({"sidecar.istio.io/status": "{}"}))) && waits_with(None));
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
