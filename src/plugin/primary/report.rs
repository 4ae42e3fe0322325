//! What the cluster is told of a pod's networks.

use super::PrimaryCall;
use super::lazy_pod::LazyPod;
use super::invocation::Invocation;
use super::plan::AddPlan;
use crate::cni::NetworkStatus;
use crate::cni::result::AddResult;
use crate::networks::{AddedNetwork, added_interface, network_status};
use crate::pod::Pod;

/// How long the annotation may be, in bytes: all of a pod's annotations together may have 256 KiB
/// (apimachinery, `TotalAnnotationSizeLimitB`).
const STATUS_LIMIT: usize = 64 << 10;

/// Writes the pod's network status and its events, where they are to be written. Nothing here fails
/// an ADD.
pub(super) fn tell(context: &PrimaryCall<'_>, known: &LazyPod<'_>, pod: Option<&Pod>, plan: &AddPlan, results: &[AddResult]) {
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
