//! The plan of an ADD: how each network of the pod is run, as a delegate, in this process, or chained to the default
//! network's result. Everything is resolved and checked before anything runs.
//!
//! [`preview`] makes the same plan for a pod without a call: it runs nothing and reads nothing on the node.

use super::PrimaryCall;
use super::invocation::Invocation;
use super::networks::{auxiliary_networks, is_one_of, networks_of, pod_networks, runs_in_process};
use super::pod_policy::{InProcessAttachment, combine, evaluated, rule_format};
use crate::cluster::Definitions;
use crate::cni::{Code, DefaultNetwork, Error, NetConf, NetworkName, Primary, at_most};
use crate::networks::{PodNetwork, PodNetworks, Selection};
use crate::plugin::lazy_pod::{LazyPod, is_agent, is_injected};
use crate::pod::{Pod, PodRef};
use serde_json::json;

/// The maximum number of attachments of a pod that run in this process; each of them is evaluated with the pod's facts.
const MAX_IN_PROCESS: usize = 16;

/// The steps of an ADD.
pub(super) struct AddPlan {
    /// What to run, in the order of ADD: the default network, the other networks, the chained plugins.
    pub(super) invocations: Vec<Invocation>,
    /// The selections of the invocations that are networks, in the same order.
    pub(super) selections: Vec<Option<Selection>>,
    /// The attachments whose policies apply to the pod.
    pub(super) evaluated: Vec<InProcessAttachment>,
    /// Whether the pod itself selects networks.
    pub(super) selects_networks: bool,
}

impl AddPlan {
    /// Plans the ADD of a pod. `annotated` is the pod with its annotations, if they are known.
    ///
    /// # Errors
    /// A network selection, a definition or an executable is invalid or missing.
    pub(super) fn new(call: &PrimaryCall<'_>, pod: &LazyPod<'_>, annotated: Option<&Pod>) -> Result<Self, Error> {
        Self::of(call, networks_of(call, pod, annotated)?, is_injected(call.conf).unwrap_or(true))
    }

    /// Plans the ADD of a pod with these networks.
    ///
    /// # Errors
    /// A configuration is invalid, or an executable is missing.
    pub(super) fn of(call: &PrimaryCall<'_>, resolved: PodNetworks, may_have_sidecar: bool) -> Result<Self, Error> {
        let (request, conf, primary) = (call.request, call.conf, call.primary);
        for warning in &resolved.warnings {
            tracing::warn!("{warning}");
        }
        let default = resolved.networks.first().map(|network| network.interface.clone()).unwrap_or_default();
        let (mut invocations, mut chained) = (Vec::new(), Vec::new());
        let (mut selections, mut attached, mut selects_networks) = (Vec::new(), Vec::new(), false);
        let mut networks = with_runners(primary, resolved.networks)?;
        let (in_process, auxiliary) = auxiliary_networks(conf, primary, networks.len())?;
        networks.extend(in_process.into_iter().map(|network| (network, NetworkRunner::Here)));
        for (position, (network, runner)) in networks.into_iter().enumerate() {
            selects_networks |= network.selection.is_some();
            let invocation = Invocation::for_network(&network, position == 0, &conf.runtime_config, request);
            match runner {
                NetworkRunner::Delegate => {
                    invocations.push(invocation);
                    selections.push(network.selection);
                }
                NetworkRunner::Chain => chained.push(invocation.chained_to(&default)),
                NetworkRunner::Here => {
                    let attachment = InProcessAttachment::of(conf, &network)?;
                    let executables =
                        Invocation::for_executables(&network.name, &default, &attachment.conf, &request.args_text);
                    chained.extend(executables);
                    attached.push(attachment);
                }
            }
        }
        if let Some(list) = &auxiliary {
            let invocation = Invocation::for_network(list, false, &conf.runtime_config, request);
            invocations.push(Invocation { is_auxiliary: true, ..invocation });
            selections.push(None);
        }
        combine(conf, &mut attached, request.args.pod.as_ref())?;
        invocations.extend(chained);
        invocations.extend(Invocation::for_executables(&conf.name, &default, conf, &request.args_text));
        let delegate_call = call.delegate_call();
        invocations.iter().try_for_each(|invocation| invocation.find(&delegate_call))?;
        let evaluated = evaluated(conf, attached, may_have_sidecar);
        Ok(Self { invocations, selections, evaluated, selects_networks })
    }
}

/// How a network is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkRunner {
    /// By executables, with its own interface.
    Delegate,
    /// In this process.
    Here,
    /// By an executable, on the default network's result.
    Chain,
}

/// Returns how each network of a pod is run. The first is the default network.
///
/// # Errors
/// The default network creates no interface, or too many networks run in this process.
fn with_runners(primary: &Primary, networks: Vec<PodNetwork>) -> Result<Vec<(PodNetwork, NetworkRunner)>, Error> {
    let with_runner = |(position, network): (usize, PodNetwork)| {
        let runner = runner(primary, &network);
        if position == 0 && runner != NetworkRunner::Delegate {
            Err(no_interface(&network))
        } else {
            Ok((network, runner))
        }
    };
    let networks: Vec<_> = networks.into_iter().enumerate().map(with_runner).collect::<Result<_, _>>()?;
    let in_process = networks.iter().filter(|(_, runner)| *runner == NetworkRunner::Here).count();
    at_most(MAX_IN_PROCESS, "attachments of in_process_types", "the pod's networks", in_process)?;
    Ok(networks)
}

/// Returns how a network is run. Its type decides only if the network has a single plugin.
pub(super) fn runner(primary: &Primary, PodNetwork { configuration, .. }: &PodNetwork) -> NetworkRunner {
    if runs_in_process(primary, configuration) {
        NetworkRunner::Here
    } else if is_one_of(&primary.chain_types, configuration) {
        NetworkRunner::Chain
    } else {
        NetworkRunner::Delegate
    }
}

fn no_interface(network: &PodNetwork) -> Error {
    let kind = network.configuration.types().next().unwrap_or_default();
    let msg = format!(
        "default network {}: type {kind:?} creates no interface (in_process_types, chain_types); set clusterNetwork to \
         the name of the cluster's network, or to the path of its file if that is in the directory of this \
         configuration",
        network.name
    );
    Error::new(Code::InvalidConfig, msg)
}

/// The networks of a pod, and the attachments whose policies apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Preview {
    /// The networks in the order of ADD, each with how it is run; the default network is the first.
    pub networks: Vec<(PodNetwork, NetworkRunner)>,
    /// The attachments that run in this process, or the node's own sub-plugins if there are none.
    pub evaluated: Vec<InProcessAttachment>,
    /// Warnings, one line each.
    pub warnings: Vec<String>,
}

/// The interface name that runtimes request.
const IFNAME: &str = "eth0";
/// The type of a network whose configuration is not read.
pub const UNREAD: &str = "unseen";

/// Plans an ADD of `pod` with definitions from `cluster`. The file of `clusterNetwork` is not read: it may exist on
/// the node only.
///
/// # Errors
/// Those of an ADD: a network selection or a definition is invalid or missing.
pub fn preview(
    conf: &NetConf,
    primary: &Primary,
    cluster: Option<&dyn Definitions>,
    pod: &Pod,
) -> Result<Preview, Error> {
    let pod_ref = PodRef { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: None };
    let primary = with_placeholder(primary);
    let resolved = match is_agent(conf, &pod_ref) {
        true => pod_networks(conf, &primary.without_default_networks(), cluster, None, IFNAME, None)?,
        false => pod_networks(conf, &primary, cluster, Some(pod), IFNAME, None)?,
    };
    let networks = with_runners(&primary, resolved.networks)?;
    let here = networks.iter().filter(|(_, runner)| *runner == NetworkRunner::Here);
    let mut attached: Vec<_> =
        here.map(|(network, _)| InProcessAttachment::of(conf, network)).collect::<Result<_, _>>()?;
    combine(conf, &mut attached, Some(&pod_ref))?;
    let evaluated = evaluated(conf, attached, true);
    rule_format(conf, &evaluated)?;
    let mut warnings = resolved.warnings;
    warnings.extend(primary.auxiliary_chain.as_ref().map(|directory| {
        format!(
            "auxiliaryCNIChainName: the plugins in {} also run for the pod; they are not shown",
            directory.display()
        )
    }));
    Ok(Preview { networks, evaluated, warnings })
}

/// Returns `primary` with a placeholder for `clusterNetwork`.
fn with_placeholder(primary: &Primary) -> Primary {
    let mut primary = primary.clone();
    if let DefaultNetwork::Cluster(name) = &primary.default {
        let name = match name {
            NetworkName::Name(name) => name.clone(),
            NetworkName::Path(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        };
        primary.default = DefaultNetwork::Delegates(vec![json!({"name": name, "type": UNREAD})]);
    }
    primary
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::{CniCommand, NetConf};
    use crate::networks::RunnableConfiguration;

    /// Plans a default network and `in_process` networks that run in this process.
    fn networks(in_process: usize) -> Result<Vec<(PodNetwork, NetworkRunner)>, Error> {
        let conf = NetConf::parse(br#"{"name":"n","type":"detour","clusterNetwork":"x"}"#, CniCommand::Add, "");
        let network = |(position, kind)| PodNetwork {
            name: format!("shop/n{position}"),
            interface: format!("net{position}"),
            selection: Some(Selection { place: format!("element {position}"), ..Selection::default() }),
            configuration: RunnableConfiguration::parse("k", &format!(r#"{{"name":"n","type":"{kind}"}}"#), None)
                .expect("one"),
        };
        let kinds = std::iter::once("bridge").chain(std::iter::repeat_n("istio-cni", in_process));
        with_runners(
            &conf.expect("accepted").primary.expect("a primary plugin"),
            kinds.enumerate().map(network).collect(),
        )
    }

    #[test]
    fn too_many_in_process_attachments_are_refused() {
        assert_eq!(networks(MAX_IN_PROCESS).expect("accepted").len(), 1 + MAX_IN_PROCESS);
        let error = networks(100).expect_err("too many");
        let wanted = "the pod's networks: expected at most 16 attachments of in_process_types, got 100";
        assert_eq!(error, Error::new(Code::InvalidConfig, wanted));
    }
}
