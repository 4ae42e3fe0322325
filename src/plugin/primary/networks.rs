//! The networks of a pod, with their configurations. Users of the cluster write network definitions, so keys that
//! belong to the node's administrator are replaced in them.

use super::call::PrimaryCall;
use crate::cluster::{Cluster, Definitions, Reports};
use crate::cni::{Error, NetConf, NodeConf, PROGRAM, Primary};
use crate::networks::{PodNetworks, resolve};
use crate::pod::Pod;

/// Resolves the networks of a pod, as [`resolve`]. In configurations that the node's administrator did not write,
/// blocks of this plugin get the node's keys in place of their own; each ignored key is a warning.
///
/// # Errors
/// Those of [`resolve`]; a definition would make this plugin the primary plugin.
pub(super) fn pod_networks(
    conf: &NetConf,
    primary: &Primary,
    cluster: Option<&dyn Definitions>,
    pod: Option<&Pod>,
    ifname: &str,
    reports: Option<&dyn Reports>,
) -> Result<PodNetworks, Error> {
    let mut resolved = resolve(primary, cluster, pod, ifname, reports)?;
    let PodNetworks { networks, warnings } = &mut resolved;
    let mut node = None;
    for network in networks.iter_mut().filter(|network| !network.configuration.trusted) {
        let (place, node) =
            (format!("network {}", network.name), node.get_or_insert_with(|| NodeConf::from_configuration(conf)));
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

impl PrimaryCall<'_> {
    /// Resolves the networks that all pods have in common: the default network of pods that select no other, and
    /// `delegates` after the first. Without a `cluster`, only files and the configuration itself are read.
    ///
    /// # Errors
    /// A network is missing or invalid.
    pub(super) fn common_networks(&self, cluster: Option<&dyn Cluster>) -> Result<PodNetworks, Error> {
        let primary = self.primary.without_default_networks();
        let definitions = cluster.map(|cluster| cluster as &dyn Definitions);
        pod_networks(self.conf, &primary, definitions, None, &self.request.ifname, None)
    }
}
