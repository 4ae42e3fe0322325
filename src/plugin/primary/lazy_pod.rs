//! The pod of a call: what the runtime tells of it for nothing, and what has to be asked for. Each
//! thing is asked for once.

use super::PrimaryCall;
use crate::sub_plugins;
use crate::cluster::Cluster;
use crate::cni::{Error, wrong_type};
use crate::plugin::desired_policy::is_agent;
use crate::pod::{Facts, Namespace, Pod, PodRef};
use serde_json::Value;
use std::cell::OnceCell;

/// What a runtime passes under this name of capability: all annotations of the pod (CRI-O,
/// `internal/config/cnimgr`; containerd, `pkg/cri/annotations`).
const ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";

/// Istio's injector leaves it on every pod that it gave a sidecar (`sidecar.istio.io/status`).
const INJECTED: &str = "sidecar.istio.io/status";

/// A pod, known as far as was needed so far.
pub(super) struct LazyPod<'a> {
    context: &'a PrimaryCall<'a>,
    wanted: Option<&'a PodRef>,
    source: Option<Box<dyn Cluster>>,
    /// As the runtime tells: annotations only.
    told: Option<Pod>,
    fetched: OnceCell<Pod>,
    namespace: OnceCell<Namespace>,
}

impl<'a> LazyPod<'a> {
    /// The pod that `CNI_ARGS` names; nothing is asked for yet.
    ///
    /// # Errors
    /// What the runtime passes as annotations is none.
    pub(super) fn of(context: &'a PrimaryCall<'a>) -> Result<Self, Error> {
        let wanted = context.request.args.pod.as_ref();
        let told = match (wanted, context.conf.runtime_config.get(ANNOTATIONS).filter(|told| !told.is_null())) {
            (Some(wanted), Some(told)) => Some(told_pod(wanted, told)?),
            _ => None,
        };
        let source = context.source();
        Ok(Self { context, wanted, source, told, fetched: OnceCell::new(), namespace: OnceCell::new() })
    }

    /// Whom to ask.
    pub(super) fn cluster(&self) -> Option<&dyn Cluster> {
        self.source.as_deref()
    }

    /// The pod with its annotations; `None` where nobody knows it: there is no source of facts, or
    /// no pod is named. The node agent's own pod comes up without: it is what makes the source
    /// available.
    ///
    /// # Errors
    /// The pod can't be known.
    pub(super) fn annotated(&self) -> Result<Option<&Pod>, Error> {
        if self.is_agent() {
            return Ok(None);
        }
        if self.told.is_some() {
            return Ok(self.told.as_ref());
        }
        match self.wanted {
            Some(wanted) if self.source.is_some() => {
                let conf = self.context.conf;
                let excluded = conf.kubernetes.excludes(&wanted.namespace);
                self.fetch(wanted, !excluded && sub_plugins::wants(&conf.chain).namespace)?;
                Ok(self.fetched.get())
            }
            _ => Ok(None),
        }
    }

    /// Whether it is the node agent's own.
    pub(super) fn is_agent(&self) -> bool {
        self.wanted.is_some_and(|wanted| is_agent(self.context.conf, wanted))
    }

    /// Whether it may have a sidecar, as far as is known for nothing.
    pub(super) fn may_be_meshed(&self) -> bool {
        self.told.as_ref().is_none_or(|pod| pod.annotations.contains_key(INJECTED))
    }

    /// Its facts, and its namespace's where `with_namespace`.
    ///
    /// # Errors
    /// They can't be known.
    pub(super) fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.fetch(wanted, with_namespace)?;
        let pod = self.fetched.get().cloned().unwrap_or_default();
        Ok(Facts { pod, namespace: self.namespace.get().filter(|_| with_namespace).cloned() })
    }

    fn fetch(&self, wanted: &PodRef, with_namespace: bool) -> Result<(), Error> {
        let Some(source) = &self.source else { return Ok(()) };
        if self.fetched.get().is_none() {
            let Facts { pod, namespace } = source.facts(wanted, with_namespace)?;
            self.fetched.get_or_init(|| pod);
            namespace.map(|namespace| self.namespace.get_or_init(|| namespace));
        }
        if with_namespace && self.namespace.get().is_none() {
            let namespace = source.namespace(wanted)?;
            self.namespace.get_or_init(|| namespace);
        }
        Ok(())
    }
}

fn told_pod(wanted: &PodRef, told: &Value) -> Result<Pod, Error> {
    let place = format!("runtimeConfig.{ANNOTATIONS}");
    let wrong = |place: &str, value: &Value, accepted| Err(wrong_type(place, value, accepted));
    let Value::Object(told) = told else { return wrong(&place, told, "an object of strings") };
    let mut pod = Pod {
        namespace: wanted.namespace.clone(),
        name: wanted.name.clone(),
        uid: wanted.uid.clone(),
        ..Pod::default()
    };
    for (key, value) in told {
        let Value::String(text) = value else { return wrong(&format!("{place}.{key}"), value, "a string") };
        pod.annotations.insert(key.clone(), text.clone());
    }
    Ok(pod)
}
