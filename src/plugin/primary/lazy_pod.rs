//! The pod of a call. The runtime may pass its annotations; everything else is fetched from the cluster when it is
//! first needed, and only once.

use super::call::PrimaryCall;
use crate::cluster::Cluster;
use crate::cni::{Error, wrong_type};
use crate::plugin::desired_policy::is_agent;
use crate::pod::well_known::INJECTION_STATUS;
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::sub_plugins;
use serde_json::Value;
use std::cell::OnceCell;

/// The capability with which runtimes pass all annotations of the pod (CRI-O, `internal/config/cnimgr`; containerd,
/// `pkg/cri/annotations`).
const POD_ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";

/// A pod whose data is fetched when needed.
pub(super) struct LazyPod<'a> {
    call: &'a PrimaryCall<'a>,
    pod_ref: Option<&'a PodRef>,
    cluster: Option<Box<dyn Cluster>>,
    /// The pod as the runtime describes it: with its annotations only.
    from_runtime: Option<Pod>,
    fetched: OnceCell<Pod>,
    namespace: OnceCell<Namespace>,
}

impl<'a> LazyPod<'a> {
    /// Returns the pod that `CNI_ARGS` names, without a request.
    ///
    /// # Errors
    /// The annotations that the runtime passes are not an object of strings.
    pub(super) fn new(call: &'a PrimaryCall<'a>) -> Result<Self, Error> {
        let pod_ref = call.request.args.pod.as_ref();
        let annotations = call.conf.runtime_config.get(POD_ANNOTATIONS).filter(|value| !value.is_null());
        let from_runtime = match (pod_ref, annotations) {
            (Some(pod_ref), Some(annotations)) => Some(annotated_pod(pod_ref, annotations)?),
            _ => None,
        };
        let cluster = call.cluster();
        Ok(Self { call, pod_ref, cluster, from_runtime, fetched: OnceCell::new(), namespace: OnceCell::new() })
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
        match self.pod_ref {
            Some(pod_ref) if self.cluster.is_some() => {
                let conf = self.call.conf;
                let skipped = sub_plugins::skip_reason(conf, pod_ref).is_some();
                self.fetch(pod_ref, !skipped && sub_plugins::wants(&conf.chain).namespace)?;
                Ok(self.fetched.get())
            }
            _ => Ok(None),
        }
    }

    /// Returns whether the pod is the node agent's own.
    pub(super) fn is_agent(&self) -> bool {
        self.pod_ref.is_some_and(|pod_ref| is_agent(self.call.conf, pod_ref))
    }

    /// Returns whether the pod may have a sidecar, judged without a request.
    pub(super) fn may_have_sidecar(&self) -> bool {
        self.from_runtime.as_ref().is_none_or(|pod| pod.annotations.contains_key(INJECTION_STATUS))
    }

    /// Returns the facts of the pod, and those of its namespace if `with_namespace`.
    ///
    /// # Errors
    /// The facts can't be fetched.
    pub(super) fn facts(&self, pod_ref: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.fetch(pod_ref, with_namespace)?;
        let pod = self.fetched.get().cloned().unwrap_or_default();
        Ok(Facts { pod, namespace: self.namespace.get().filter(|_| with_namespace).cloned() })
    }

    fn fetch(&self, pod_ref: &PodRef, with_namespace: bool) -> Result<(), Error> {
        let Some(cluster) = &self.cluster else { return Ok(()) };
        if self.fetched.get().is_none() {
            let Facts { pod, namespace } = cluster.facts(pod_ref, with_namespace)?;
            self.fetched.get_or_init(|| pod);
            namespace.map(|namespace| self.namespace.get_or_init(|| namespace));
        }
        if with_namespace && self.namespace.get().is_none() {
            let namespace = cluster.namespace(pod_ref)?;
            self.namespace.get_or_init(|| namespace);
        }
        Ok(())
    }
}

/// Returns the pod with the annotations that the runtime passes.
fn annotated_pod(pod_ref: &PodRef, annotations: &Value) -> Result<Pod, Error> {
    let place = format!("runtimeConfig.{POD_ANNOTATIONS}");
    let invalid = |place: &str, value: &Value, expected| Err(wrong_type(place, value, expected));
    let Value::Object(annotations) = annotations else { return invalid(&place, annotations, "an object of strings") };
    let mut pod = Pod {
        namespace: pod_ref.namespace.clone(),
        name: pod_ref.name.clone(),
        uid: pod_ref.uid.clone(),
        ..Pod::default()
    };
    for (key, value) in annotations {
        let Value::String(text) = value else { return invalid(&format!("{place}.{key}"), value, "a string") };
        pod.annotations.insert(key.clone(), text.clone());
    }
    Ok(pod)
}
