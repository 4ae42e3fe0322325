//! DEL: from what was kept, without asking anybody.

use super::PrimaryCall;
use super::saved_state::SavedState;
use super::invocation::Invocation;
use crate::cni::{Code, Error};
use crate::networks::PodNetworks;

/// Takes away what the ADD made: in reverse, everything tried. It succeeds without a namespace,
/// twice, and without an ADD; where nothing is kept, the networks that the configuration itself
/// holds get their DEL all the same, so that no address stays taken.
///
/// # Errors
/// What failed; with `retryDeleteOnError` what is needed for another try is kept. State that can't be read
/// now is kept in any case.
pub(super) fn run_del(context: &PrimaryCall<'_>) -> Result<(), Error> {
    let (store, attachment) = (context.store(), context.attachment());
    let kept = match SavedState::read_to_remove(&store, &attachment) {
        Err(error) if error.code == Code::State => {
            tracing::warn!("DEL uses the configuration only, without saved state: {error}");
            None
        }
        other => other?,
    };
    let taken = context.take_away(&kept.unwrap_or_else(|| configured(context)));
    if taken.is_ok() || !context.primary.retry_delete_on_error {
        store.remove(&attachment).unwrap_or_else(|error| tracing::warn!("{error}"));
    }
    taken
}

/// What the configuration says of any pod.
fn configured(context: &PrimaryCall<'_>) -> SavedState {
    let PodNetworks { networks, .. } = context.common_networks(None).unwrap_or_else(|error| {
        tracing::warn!("nothing was kept of this pod, and its networks can't be known without: {error}");
        PodNetworks::default()
    });
    let (request, conf) = (context.request, context.conf);
    let member = |(position, network)| Invocation::network_of(network, position == 0, &conf.runtime_config, request);
    let mut members: Vec<_> = networks.iter().enumerate().map(member).collect();
    let default = networks.first().map_or(request.ifname.as_str(), |network| network.interface.as_str());
    members.extend(Invocation::executables(&conf.name, default, conf, &request.args_text));
    SavedState::without_namespace(members)
}
