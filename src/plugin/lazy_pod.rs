//! The pod of a call. The runtime may pass its annotations; everything else is fetched from the cluster when it is
//! first needed, and only once.
//!
//! After a reboot, the runtime calls the plugin before the node's agent runs. The annotations that the container runtime
//! passes show whether Istio's injector has processed the pod. A pod without the injector's annotation has no sidecar, so
//! it starts at once, without facts.

use crate::cluster::{self, Cluster};
use crate::cni::{Block, Error, NetConf, Request};
use crate::pod::well_known::{DEFAULT_NETWORK, INJECTION_STATUS, NETWORKS};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::sub_plugins::{self, SkipReason, guards, skip_reason};
use serde_json::Value;
use std::cell::OnceCell;

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

    /// Returns the source of pods and definitions: the configured one; for a primary plugin, otherwise the API server that
    /// the environment of this process names.
    pub(super) fn cluster(&self) -> Option<&dyn Cluster> {
        let of = if self.conf.primary.is_some() { cluster::source_or_in_cluster } else { cluster::source };
        self.cluster.get_or_init(|| of(&self.conf.kubernetes)).as_deref()
    }

    /// Returns the source that is asked for the facts that the sub-plugins in `chain` need; `None` if they have no effect,
    /// or the configuration names no source.
    pub(super) fn source(&self, chain: &[Block]) -> Option<&dyn Cluster> {
        match asked(self.conf, chain) {
            Asked::Nothing => None,
            Asked::Memory => self.memory(),
            Asked::All => self.cluster(),
        }
    }

    /// Returns the pod with its annotations; `None` if the call names no pod, there is no cluster source, or the pod
    /// is the node agent's own: that pod must start without the source, because the agent provides it.
    ///
    /// # Errors
    /// The pod can't be fetched.
    pub(super) fn with_annotations(&self) -> Result<Option<&Pod>, Error> {
        if self.is_agent() {
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

    /// Returns the pod, if it has been fetched.
    pub(super) fn fetched(&self) -> Option<&Pod> {
        self.fetched.get()
    }

    /// Returns whether the pod is the node agent's own.
    pub(super) fn is_agent(&self) -> bool {
        self.reference.is_some_and(|pod_ref| is_agent(self.conf, pod_ref))
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

/// Returns whether `pod` is the node agent's own. It must start without facts, because the agent provides them.
pub(super) fn is_agent(conf: &NetConf, pod: &PodRef) -> bool {
    skip_reason(conf, pod) == Some(SkipReason::AgentPod)
}

/// Returns whether Istio's injector has processed the pod, according to the container runtime; `None` if the runtime
/// passes no annotations.
pub(super) fn is_injected(conf: &NetConf) -> Option<bool> {
    conf.pod_annotations().map(|annotations| annotations.contains_key(INJECTION_STATUS))
}

/// Who is asked for the facts of a pod when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// Nothing: they have no effect.
    Nothing,
    /// The agent's memory, for a fraction of a second: whether the pod is in the ambient mesh. Without an answer, the pod
    /// starts without rules, and the agent adds its exclusions later.
    Memory,
    /// All sources, within the configured timeout: the pod waits.
    All,
}

/// Returns who is asked for the facts of a pod with the sub-plugins in `chain`.
fn asked(conf: &NetConf, chain: &[Block]) -> Asked {
    // With the guard, every pod waits, because only labels show whether it is in the ambient mesh.
    if is_injected(conf) != Some(false) || guards(chain).next().is_some() {
        return Asked::All;
    }
    // Only exclusions apply to pods in the ambient mesh, which also depends on their namespaces.
    if sub_plugins::wants(chain).namespace { Asked::Memory } else { Asked::Nothing }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::CniCommand;
    use serde_json::json;

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
