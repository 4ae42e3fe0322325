//! What an ADD as the primary plugin would ask for, of a pod that no call was made for: nothing is run,
//! and nothing on the node is looked at.

use super::definitions;
use super::mesh::{InProcessAttachment, asking, dialect, unite};
use super::plan::{NetworkRunner, placed};
use crate::cluster::{Cluster, ReadOnly};
use crate::cni::{DefaultNetwork, Error, NetConf, NetworkName, Primary};
use crate::plugin::desired_policy::is_agent;
use crate::pod::{Pod, PodRef};
use serde_json::json;

/// A pod's networks, and who of them asks for rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preview {
    /// In the order of ADD, the default network first.
    pub networks: Vec<PreviewedNetwork>,
    /// The attachments that run in this process, else the node's own chain.
    pub asking: Vec<InProcessAttachment>,
    /// What was ignored and should be looked at, one line each.
    pub warnings: Vec<String>,
}

/// A network of the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviewedNetwork {
    /// `NAMESPACE/NAME` of its definition, else its configuration's name.
    pub name: String,
    /// Its interface, where it has one of its own.
    pub interface: Option<String>,
    /// Its plugins' types; empty where its configuration was not looked at.
    pub types: Vec<String>,
    /// Where it is run.
    pub place: NetworkRunner,
    /// Whether the pod selects it; else the node's configuration does.
    pub selected: bool,
}

/// The interface that runtimes ask for.
const IFNAME: &str = "eth0";
/// The type of a network that is not looked at.
const UNSEEN: &str = "unseen";

/// Finds out, with definitions from `cluster`. `clusterNetwork`, whose file may be on the node only, is not
/// looked at.
///
/// # Errors
/// Those of an ADD: a reference or a definition is wrong or missing.
pub fn together(
    conf: &NetConf,
    primary: &Primary,
    cluster: Option<&dyn Cluster>,
    pod: &Pod,
) -> Result<Preview, Error> {
    let cluster = cluster.map(ReadOnly);
    let cluster = cluster.as_ref().map(|cluster| cluster as &dyn Cluster);
    let wanted = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
    let resolved = match is_agent(conf, &wanted) {
        true => definitions::networks(conf, &unseen(primary).without_default_networks(), cluster, None, IFNAME)?,
        false => definitions::networks(conf, &unseen(primary), cluster, Some(pod), IFNAME)?,
    };
    let (mut networks, mut attached) = (Vec::new(), Vec::new());
    for (network, place) in placed(primary, resolved.networks)? {
        if place == NetworkRunner::Here {
            attached.push(InProcessAttachment::of(conf, &network)?);
        }
        let types = network.configuration.types().filter(|kind| *kind != UNSEEN).map(str::to_owned);
        networks.push(PreviewedNetwork {
            types: types.collect(),
            interface: (place == NetworkRunner::Delegate).then_some(network.interface),
            place,
            selected: network.selection.is_some(),
            name: network.name,
        });
    }
    unite(conf, &mut attached, Some(&wanted))?;
    let node = [InProcessAttachment::node(conf)];
    let asking = asking(&attached, &node, true).to_vec();
    dialect(conf, &asking)?;
    Ok(Preview { networks, asking, warnings: resolved.warnings })
}

/// The same with a stand-in for `clusterNetwork`.
fn unseen(primary: &Primary) -> Primary {
    let mut primary = primary.clone();
    if let DefaultNetwork::Cluster(name) = &primary.default {
        let name = match name {
            NetworkName::Name(name) => name.clone(),
            NetworkName::Path(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        };
        primary.default = DefaultNetwork::Delegates(vec![json!({"name": name, "type": UNSEEN})]);
    }
    primary
}
