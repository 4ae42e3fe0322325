//! Which of a pod's networks run where: as delegates, in this process, or on the default network's
//! result. All is understood before anything runs.
//!
//! What an ADD as the primary plugin would ask for, of a pod that no call was made for: nothing is run,
//! and nothing on the node is looked at.

use super::invocation::Invocation;
use super::lazy_pod::LazyPod;
use super::mesh::{InProcessAttachment, asking, dialect, unite};
use super::{PrimaryCall, lazy_pod};
use crate::cluster::{Cluster, ReadOnly};
use crate::cni::{Code, DefaultNetwork, Error, NetConf, NetworkName, Primary, at_most};
use crate::networks::{PodNetwork, PodNetworks, RunnableConfiguration, Selection};
use crate::plugin::desired_policy::is_agent;
use crate::pod::{Pod, PodRef};
use serde_json::json;

/// The most attachments of a pod that run in this process: each evaluates all that the pod asks for.
const MOST_HERE: usize = 16;

/// What an ADD will do.
pub(super) struct AddPlan {
    /// In the order of ADD: the default network, the others, the members of the chain.
    pub(super) members: Vec<Invocation>,
    /// The selections of the members that are networks, in their order.
    pub(super) selections: Vec<Option<Selection>>,
    /// The attachments that run in this process.
    pub(super) attached: Vec<InProcessAttachment>,
    /// Whether the pod itself selects networks.
    pub(super) selects: bool,
}

impl AddPlan {
    /// What is to be done for `pod`.
    ///
    /// # Errors
    /// A reference, a definition or an executable is wrong or missing.
    pub(super) fn of(context: &PrimaryCall<'_>, known: &LazyPod<'_>, pod: Option<&Pod>) -> Result<Self, Error> {
        let (request, conf, primary) = (context.request, context.conf, context.primary);
        let resolved = match known.is_agent() {
            true => of_agent(context, known)?,
            false => lazy_pod::networks(conf, primary, known.cluster(), pod, &request.ifname)?,
        };
        for warning in &resolved.warnings {
            tracing::warn!("{warning}");
        }
        let default = resolved.networks.first().map(|network| network.interface.clone()).unwrap_or_default();
        let mut plan = Self { members: Vec::new(), selections: Vec::new(), attached: Vec::new(), selects: false };
        let mut chain = Vec::new();
        for (position, (network, place)) in placed(primary, resolved.networks)?.into_iter().enumerate() {
            plan.selects |= network.selection.is_some();
            let member = Invocation::network_of(&network, position == 0, &conf.runtime_config, request);
            match place {
                NetworkRunner::Delegate => {
                    plan.members.push(member);
                    plan.selections.push(network.selection);
                }
                NetworkRunner::Chain => chain.push(member.on_default(&default)),
                NetworkRunner::Here => {
                    let attached = InProcessAttachment::of(conf, &network)?;
                    chain.extend(Invocation::executables(&network.name, &default, &attached.conf, &request.args_text));
                    plan.attached.push(attached);
                }
            }
        }
        unite(conf, &mut plan.attached, request.args.pod.as_ref())?;
        plan.members.extend(chain);
        plan.members.extend(Invocation::executables(&conf.name, &default, conf, &request.args_text));
        let call = context.call();
        plan.members.iter().try_for_each(|member| member.find(&call))?;
        Ok(plan)
    }
}

/// The networks of the node agent's own pod: those that `delegates` or `clusterNetwork` give to every pod. The agent
/// makes the API available to this plugin, so the API is asked only for what no file has.
fn of_agent(context: &PrimaryCall<'_>, known: &LazyPod<'_>) -> Result<PodNetworks, Error> {
    context.common_networks(None).or_else(|error| match known.cluster() {
        Some(cluster) => context.common_networks(Some(cluster)),
        None => Err(error),
    })
}

/// Where a network is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkRunner {
    /// By executables, with an interface of its own.
    Delegate,
    /// In this process.
    Here,
    /// By an executable, on the default network's result.
    Chain,
}

/// Where each of a pod's networks is run; the first is the default network.
///
/// # Errors
/// That one makes no interface.
pub(super) fn placed(primary: &Primary, networks: Vec<PodNetwork>) -> Result<Vec<(PodNetwork, NetworkRunner)>, Error> {
    let place = |(position, network): (usize, PodNetwork)| {
        let place = runs_in(&network.configuration, &primary.in_process_types, &primary.chain_types);
        if position == 0 && place != NetworkRunner::Delegate {
            Err(no_interface(&network))
        } else {
            Ok((network, place))
        }
    };
    let placed: Vec<_> = networks.into_iter().enumerate().map(place).collect::<Result<_, _>>()?;
    let mut here = placed.iter().filter(|(_, place)| *place == NetworkRunner::Here);
    let count = here.clone().count();
    if let Some((network, _)) = here.nth(MOST_HERE) {
        let place = network.selection.as_ref().map_or(network.name.as_str(), |selection| &selection.place);
        at_most(MOST_HERE, "attachments of in_process_types", place, count)?;
    }
    Ok(placed)
}

/// Only a single plugin says by its type alone what it is.
fn runs_in(configuration: &RunnableConfiguration, in_process: &[String], chain: &[String]) -> NetworkRunner {
    let is_one_of = |types: &[String]| {
        configuration.plugins.len() == 1 && configuration.types().all(|own| types.iter().any(|kind| kind == own))
    };
    if is_one_of(in_process) {
        NetworkRunner::Here
    } else if is_one_of(chain) {
        NetworkRunner::Chain
    } else {
        NetworkRunner::Delegate
    }
}

fn no_interface(network: &PodNetwork) -> Error {
    let kind = network.configuration.types().next().unwrap_or_default();
    let msg = format!(
        "the default network, {}, is of type {kind:?}, which makes no interface (in_process_types, chain_types); \
         name the cluster's network in clusterNetwork, by its own file where it is in one directory with this configuration",
        network.name
    );
    Error::new(Code::InvalidConfig, msg)
}

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
pub fn together(conf: &NetConf, primary: &Primary, cluster: Option<&dyn Cluster>, pod: &Pod) -> Result<Preview, Error> {
    let cluster = cluster.map(ReadOnly);
    let cluster = cluster.as_ref().map(|cluster| cluster as &dyn Cluster);
    let wanted = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
    let resolved = match is_agent(conf, &wanted) {
        true => lazy_pod::networks(conf, &unseen(primary).without_default_networks(), cluster, None, IFNAME)?,
        false => lazy_pod::networks(conf, &unseen(primary), cluster, Some(pod), IFNAME)?,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, NetConf};

    /// So many networks of which all but the default one run in this process.
    fn networks(here: usize) -> Result<Vec<(PodNetwork, NetworkRunner)>, Error> {
        let conf = NetConf::parse(br#"{"name":"n","type":"detour","clusterNetwork":"x"}"#, CniCommand::Add, "");
        let network = |(position, kind)| PodNetwork {
            name: format!("shop/n{position}"),
            interface: format!("net{position}"),
            selection: Some(Selection { place: format!("element {position}"), ..Selection::default() }),
            configuration: RunnableConfiguration::parse("k", &format!(r#"{{"name":"n","type":"{kind}"}}"#), None)
                .expect("one"),
        };
        let kinds = std::iter::once("bridge").chain(std::iter::repeat_n("istio-cni", here));
        placed(&conf.expect("accepted").primary.expect("a primary plugin"), kinds.enumerate().map(network).collect())
    }

    #[test]
    fn more_attachments_in_this_process_than_a_pod_may_have_are_refused() {
        assert_eq!(networks(MOST_HERE).expect("accepted").len(), 1 + MOST_HERE);
        let error = networks(100).expect_err("too many");
        let wanted = "element 17: expected at most 16 attachments of in_process_types, got 100";
        assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
    }
}
