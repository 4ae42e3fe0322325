//! The guard of a pod, from the blocks of `mesh-guard`: a pod in the mesh whose redirection is missing or lost fails closed.
//! A pod's author can't switch it off.

use super::ambient::bypasses_inbound;
use super::chain::{ChainInput, ParsedChain};
use super::context::FACT_SOURCES;
use super::context::{Requests, StartedWith};
use super::decision::{SkipReason, pod_skip_reason};
use super::grants::selects;
use super::istio_redirect::{self, OverridingLayers};
use super::mesh_guard::MeshGuard;
use super::sub_plugin::{Note, SubPlugin};
use crate::cni::{Block, Code, Error};
use crate::pod::well_known::INTERCEPTION_MODE;
use crate::policy::{AmbientGuard, Guard, Interception};

/// Why a pod with the init container istio-init has no guard.
pub const UNGUARDED: &str = "mesh-guard: the pod gets no guard: its init container istio-init redirects it after other \
    containers have used the network; use Istio's CNI plugin or detour instead of istio-init";

/// Returns the blocks of the guard in a chain.
pub fn guards(chain: &[Block]) -> impl Iterator<Item = &Block> {
    chain.iter().filter(|block| SubPlugin::of(block) == Some(SubPlugin::MeshGuard))
}

/// Returns the guard of a pod in the mesh; `None` if the chain has none, or an administrator excludes the namespace.
/// `interception` is what the chain's own redirection does. `running` is what a running pod has; `None` for a new pod. What
/// the author of a pod changes later does not end its guard, unless the pod's label takes it out of the ambient mesh.
///
/// # Errors
/// There are no facts, or a setting of the redirection is invalid.
pub(super) fn guard(
    chain: &ParsedChain,
    input: &ChainInput<'_>,
    interception: &Interception,
    running: Option<StartedWith>,
    requests: &mut Requests<'_>,
    notes: &mut Vec<Note>,
) -> Result<Option<Guard>, Error> {
    let Some(first) = chain.guards.first() else { return Ok(None) };
    let Some(facts) = input.facts else {
        let msg = format!("{}: mesh-guard needs facts of the pod: {FACT_SOURCES}", first.path);
        return Err(Error::new(Code::InvalidConfig, msg).naming_network());
    };
    let mut guards = chain.guards.iter().map(|block| &block.parsed);
    let is_exempt = |guard: &MeshGuard| guard.exempt.as_ref().is_some_and(|exempt| selects(exempt, Some(facts)));
    let Some(own) = guards.find(|guard| !is_exempt(guard)) else { return Ok(None) };
    let pod = &facts.pod;
    if input.is_ambient(running) {
        let (dns, inbound, probes) = (own.dns, !bypasses_inbound(pod), own.probes.clone());
        return Ok(Some(Guard::Ambient(AmbientGuard { dns, inbound, probes })));
    }
    let is_kept = running.is_some_and(|running| running.redirection || running.guard);
    let skip_reason = pod_skip_reason(pod).filter(|reason| !is_kept || *reason == SkipReason::IstioInit);
    match (skip_reason, pod.proxy(), interception) {
        (Some(SkipReason::IstioInit), ..) => {
            notes.push(Note::warning(UNGUARDED.to_owned()));
            Ok(None)
        }
        (Some(_), ..) => Ok(None),
        (None, _, Interception::On(redirect)) => Ok(Some(Guard::Sidecar(redirect.clone()))),
        (None, None, _) => Ok(None),
        // Another tool redirects the pod; or its author turns the redirection off, but not the guard.
        (None, Some(proxy), Interception::Unset | Interception::Off) => {
            let mut pod = pod.clone();
            pod.annotations.remove(INTERCEPTION_MODE);
            let (pod_overrides, is_new) = (requests.count(), running.is_none());
            let overriding = OverridingLayers { pod: &pod, proxy, args: None, pod_overrides, is_new };
            let (origins, notes) = (&mut Vec::new(), &mut Vec::new());
            let own = istio_redirect::interception(&chain.redirects, overriding, requests, origins, notes)?;
            Ok(match own {
                Interception::On(redirect) => Some(Guard::Sidecar(redirect)),
                Interception::Unset | Interception::Off => None,
            })
        }
    }
}
