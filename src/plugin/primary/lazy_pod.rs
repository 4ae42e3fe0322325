//! The pod of a call. The runtime may pass its annotations; everything else is fetched from the cluster when it is
//! first needed, and only once.

use super::PrimaryCall;
use crate::cluster;
use crate::cluster::Cluster;
use crate::cni::{Block, Error, NetConf};
use crate::plugin::evaluation::{Asked, asked, is_agent, is_injected};
use crate::pod::well_known::{DEFAULT_NETWORK, NETWORKS};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::sub_plugins;
use serde_json::Value;
use std::cell::OnceCell;

/// A pod whose data is fetched when needed.
pub(super) struct LazyPod<'a> {
    call: &'a PrimaryCall<'a>,
    cluster: Option<Box<dyn Cluster>>,
    /// The source for a pod that does not wait.
    memory: Option<Box<dyn Cluster>>,
    /// The pod as the runtime describes it: with its annotations only.
    from_runtime: Option<Pod>,
    fetched: OnceCell<Pod>,
    namespace: OnceCell<Namespace>,
    /// Why its facts could not be fetched.
    unavailable: OnceCell<Error>,
}

impl<'a> LazyPod<'a> {
    /// Returns the pod that `CNI_ARGS` names, without a request.
    pub(super) fn new(call: &'a PrimaryCall<'a>) -> Self {
        let from_runtime = call.request.args.pod.as_ref().and_then(|pod_ref| annotated_pod(pod_ref, call.conf));
        let (fetched, namespace, unavailable) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        let cluster = cluster::source_or_in_cluster(&call.conf.kubernetes);
        let memory = cluster::memory(&call.conf.kubernetes);
        Self { call, cluster, memory, from_runtime, fetched, namespace, unavailable }
    }

    /// Returns whether the pod has no sidecar and selects no network, according to the container runtime.
    pub(super) fn needs_only_configured_networks(&self) -> bool {
        let selects = |pod: &Pod| [NETWORKS, DEFAULT_NETWORK].iter().any(|key| pod.annotations.contains_key(*key));
        self.from_runtime.as_ref().is_some_and(|pod| !self.may_have_sidecar() && !selects(pod))
    }

    /// Returns the source that answers at once or not at all.
    pub(super) fn memory(&self) -> Option<&dyn Cluster> {
        self.memory.as_deref()
    }

    /// Returns whether facts of the pod have an effect on the sub-plugins in `chain`, and a source may have them.
    pub(super) fn needs_facts(&self, chain: &[Block]) -> bool {
        self.source(chain).is_some()
    }

    fn source(&self, chain: &[Block]) -> Option<&dyn Cluster> {
        match asked(self.call.conf, chain) {
            Asked::Nothing => None,
            Asked::Memory => self.memory(),
            Asked::All => self.cluster(),
        }
    }

    /// Returns the source of pods and definitions.
    pub(super) fn cluster(&self) -> Option<&dyn Cluster> {
        self.cluster.as_deref()
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
        if self.from_runtime.is_some() {
            return Ok(self.from_runtime.as_ref());
        }
        let (Some(pod_ref), Some(cluster)) = (&self.call.request.args.pod, self.cluster()) else { return Ok(None) };
        let conf = self.call.conf;
        let is_skipped = sub_plugins::skip_reason(conf, pod_ref).is_some();
        self.fetch(cluster, pod_ref, !is_skipped && sub_plugins::wants(&conf.chain).namespace)?;
        Ok(self.fetched.get())
    }

    /// Returns whether the pod is the node agent's own.
    pub(super) fn is_agent(&self) -> bool {
        self.call.request.args.pod.as_ref().is_some_and(|pod_ref| is_agent(self.call.conf, pod_ref))
    }

    /// Returns whether the pod may have a sidecar, judged without a request.
    pub(super) fn may_have_sidecar(&self) -> bool {
        is_injected(self.call.conf).unwrap_or(true)
    }

    /// Returns the facts of the pod for the sub-plugins in `chain`, and those of its namespace if `with_namespace`. After an
    /// error, it sends no further request.
    ///
    /// # Errors
    /// The facts can't be fetched.
    pub(super) fn facts(&self, pod_ref: &PodRef, chain: &[Block], with_namespace: bool) -> Result<Facts, Error> {
        if let Some(error) = self.unavailable.get() {
            return Err(error.clone());
        }
        if let Some(source) = self.source(chain) {
            let fetched = self.fetch(source, pod_ref, with_namespace);
            fetched.inspect_err(|error| drop(self.unavailable.set(error.clone())))?;
        }
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

/// Returns the pod with the annotations that the runtime passes; `None` if it passes none.
fn annotated_pod(pod_ref: &PodRef, conf: &NetConf) -> Option<Pod> {
    let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    let annotations = conf.pod_annotations()?.iter().filter_map(text).collect();
    Some(Pod { annotations, ..pod_ref.clone().into() })
}
