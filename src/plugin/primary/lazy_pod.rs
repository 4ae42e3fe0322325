//! The pod of a call: what the runtime tells of it for nothing, and what has to be asked for. Each
//! thing is asked for once.
//!
//! Definitions of networks come from users of the cluster: what is the node's to state is the node's in them
//! too.
//!
//! What the cluster is told of a pod's networks.

use super::PrimaryCall;
use super::invocation::Invocation;
use super::plan::AddPlan;
use crate::cluster::Cluster;
use crate::cni::result::AddResult;
use crate::cni::{Error, NetConf, NetworkStatus, NodeConf, PROGRAM, Primary, wrong_type};
use crate::networks::{AddedNetwork, PodNetworks, added_interface, network_status, resolve};
use crate::plugin::desired_policy::is_agent;
use crate::pod::well_known::INJECTION_STATUS;
use crate::pod::{Facts, Namespace, Pod, PodRef};
use crate::sub_plugins;
use serde_json::Value;
use std::cell::OnceCell;

/// What a runtime passes under this name of capability: all annotations of the pod (CRI-O,
/// `internal/config/cnimgr`; containerd, `pkg/cri/annotations`).
const ANNOTATIONS: &str = "io.kubernetes.cri.pod-annotations";

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
                let skipped = sub_plugins::skip_reason(conf, wanted).is_some();
                self.fetch(wanted, !skipped && sub_plugins::wants(&conf.chain).namespace)?;
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
        self.told.as_ref().is_none_or(|pod| pod.annotations.contains_key(INJECTION_STATUS))
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

/// As [`resolve`]; in configurations that the node's administrator did not write, those of this plugin have
/// the node's keys in place of their own. What is ignored of those is in the warnings.
///
/// # Errors
/// Those of [`resolve`]; a definition would make this plugin the primary plugin.
pub(super) fn networks(
    conf: &NetConf,
    primary: &Primary,
    cluster: Option<&dyn Cluster>,
    pod: Option<&Pod>,
    ifname: &str,
) -> Result<PodNetworks, Error> {
    let mut resolved = resolve(primary, cluster, pod, ifname)?;
    let PodNetworks { networks, warnings } = &mut resolved;
    let mut node = None;
    for network in networks.iter_mut().filter(|network| !network.configuration.trusted) {
        let (place, node) = (format!("network {}", network.name), node.get_or_insert_with(|| NodeConf::of(conf)));
        let governed = network.configuration.changed(&place, |text| {
            let governed = node
                .govern_all(text, &|kind| kind == PROGRAM || primary.in_process_types.iter().any(|own| own == kind));
            let governed = governed.map_err(|error| Error { msg: format!("{place}: {}", error.msg), ..error })?;
            Ok(governed.map(|(text, ignored)| {
                warnings.extend(ignored.into_iter().map(|ignored| format!("{place}: {ignored}")));
                text
            }))
        });
        if let Some(governed) = governed? {
            network.configuration = governed;
        }
    }
    Ok(resolved)
}

/// How long the annotation may be, in bytes: all of a pod's annotations together may have 256 KiB
/// (apimachinery, `TotalAnnotationSizeLimitB`).
const STATUS_LIMIT: usize = 64 << 10;

/// Writes the pod's network status and its events, where they are to be written. Nothing here fails
/// an ADD.
pub(super) fn tell(
    context: &PrimaryCall<'_>,
    known: &LazyPod<'_>,
    pod: Option<&Pod>,
    plan: &AddPlan,
    results: &[AddResult],
) {
    let wanted = match context.primary.network_status {
        NetworkStatus::Auto => plan.selects,
        NetworkStatus::Always => true,
        NetworkStatus::Never => false,
    };
    let (Some(cluster), Some(pod), true) = (known.cluster(), pod, wanted) else { return };
    let (mut networks, mut events) = (Vec::new(), Vec::new());
    let devices: Vec<_> = plan.members.iter().map(Invocation::device_info).collect();
    for (position, ((member, result), device)) in plan.members.iter().zip(results).zip(&devices).enumerate() {
        let added = AddedNetwork { name: &member.name, default: position == 0, result, device_info: device.as_ref() };
        networks.push(added);
        events.extend(added_interface(&member.interface, added));
    }
    let status = network_status(&networks);
    let fits = status.len() <= STATUS_LIMIT;
    if !fits {
        let (Pod { namespace, name, .. }, length) = (pod, status.len());
        tracing::warn!(
            "network-status not written: pod {namespace}/{name}: expected at most {STATUS_LIMIT} bytes, got {length}; \
             see the results of its networks' plugins"
        );
    }
    cluster.report(pod, fits.then_some(status.as_str()), &events).unwrap_or_else(|failure| tracing::warn!("{failure}"));
}
