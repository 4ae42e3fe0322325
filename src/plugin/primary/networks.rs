//! The networks of a pod, with their configurations. Users of the cluster write network definitions, so keys that
//! belong to the node's administrator are replaced in them.

use super::PrimaryCall;
use super::lazy_pod::LazyPod;
use crate::cluster::{Cluster, DefinitionQuery, Definitions, Lookup, Reports};
use crate::cni::{Error, NetConf, NodeConf, PROGRAM, Primary};
use crate::networks::{PodNetworks, resolve};
use crate::pod::Pod;
use std::cell::OnceCell;

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

/// Resolves the networks of the node agent's own pod: those that `delegates` or `clusterNetwork` give to every pod.
/// The agent makes the API server reachable for this plugin, so the API is used only if the files do not suffice.
pub(super) fn agent_networks(call: &PrimaryCall<'_>, pod: &LazyPod<'_>) -> Result<PodNetworks, Error> {
    call.common_networks(None).or_else(|error| match pod.cluster() {
        Some(cluster) => call.common_networks(Some(cluster)),
        None => Err(error),
    })
}

/// Resolves the networks of a pod. While no source answers, the networks of a pod that selects none and has no sidecar
/// are those of files.
pub(super) fn networks_of(
    call: &PrimaryCall<'_>,
    pod: &LazyPod<'_>,
    annotated: Option<&Pod>,
) -> Result<PodNetworks, Error> {
    let reports = pod.cluster().and_then(Cluster::reports);
    let resolve =
        |definitions| pod_networks(call.conf, call.primary, definitions, annotated, &call.request.ifname, reports);
    let definitions = pod.cluster().map(|cluster| cluster as &dyn Definitions);
    let Some(cluster) = definitions.filter(|_| pod.needs_only_configured_networks()) else {
        return resolve(definitions);
    };
    let files = OptionalDefinitions::of(cluster);
    resolve(Some(&files)).map_err(|error| match files.failure.get() {
        Some(failure) => {
            let msg = format!("networks of pod {}: {}", call.request.about, failure.msg);
            Error { msg, ..failure.clone() }.with_details(format!("{}; {error}", failure.details))
        }
        None => error,
    })
}

/// A source that reports definitions as missing if it can't look them up. A pod that needs only the networks of the
/// configuration gets those of files while the source is unavailable.
struct OptionalDefinitions<'a> {
    source: &'a dyn Definitions,
    failure: OnceCell<Error>,
}

impl<'a> OptionalDefinitions<'a> {
    fn of(source: &'a dyn Definitions) -> Self {
        Self { source, failure: OnceCell::new() }
    }
}

impl Definitions for OptionalDefinitions<'_> {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        self.source.definitions(wanted).or_else(|error| {
            tracing::info!("the networks of the configuration are read from files, without definitions: {error}");
            let missing = |_: &DefinitionQuery| Lookup::Missing(error.to_string());
            let all = wanted.iter().map(missing).collect();
            self.failure.get_or_init(|| error);
            Ok(all)
        })
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        self.source.namespaces_with_definition(name)
    }
}
