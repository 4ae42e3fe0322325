//! Definitions of networks come from users of the cluster: what is the node's to state is the node's in them
//! too.

use crate::cluster::Cluster;
use crate::cni::{Error, NetConf, NodeConf, PROGRAM, Primary};
use crate::networks::{PodNetworks, resolve};
use crate::pod::Pod;

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
