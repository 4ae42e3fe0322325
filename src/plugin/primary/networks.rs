//! The networks of a pod, with their configurations, and the readiness file of the cluster's network. Users of the cluster
//! write network definitions, so keys that belong to the node's administrator are replaced in them.

use super::invocation::{NetworkRunner, PrimaryCall};
use crate::cluster::{Cluster, DefinitionQuery, Definitions, Lookup};
use crate::cni::{Code, Error, NetConf, NodeConf, PROGRAM, Primary};
use crate::networks::{PodNetwork, PodNetworks, RunnableConfiguration, auxiliary_chain, beside, resolve};
use crate::plugin::evaluation::{LazyPod, is_agent};
use crate::pod::Pod;
use crate::wait;
use std::cell::OnceCell;
use std::time::Duration;

const POLL_INTERVALS: wait::Intervals = [Duration::from_millis(5), Duration::from_millis(50)];

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
    reports: Option<&dyn Cluster>,
) -> Result<PodNetworks, Error> {
    let mut resolved = resolve(primary, cluster, pod, ifname, reports)?;
    let PodNetworks { networks, warnings } = &mut resolved;
    for network in networks {
        govern(conf, primary, &network.name, &mut network.configuration, warnings)?;
    }
    Ok(resolved)
}

/// Gives the blocks of this plugin in a configuration that the node's administrator did not write the node's keys.
fn govern(
    conf: &NetConf,
    primary: &Primary,
    network: &str,
    configuration: &mut RunnableConfiguration,
    warnings: &mut Vec<String>,
) -> Result<(), Error> {
    if configuration.trusted {
        return Ok(());
    }
    let place = format!("network {network}");
    let node = NodeConf::from_configuration(conf);
    let own: Vec<&str> = primary.in_process_types.iter().map(String::as_str).chain([PROGRAM]).collect();
    let governed = configuration.changed(&place, |text| {
        let governed = node.govern_all(text, &own);
        let governed = governed.map_err(|error| error.at(&place))?;
        Ok(governed.map(|(text, ignored)| {
            warnings.extend(ignored.into_iter().map(|ignored| format!("{place}: {ignored}")));
            text
        }))
    });
    if let Some(governed) = governed? {
        *configuration = governed;
    }
    Ok(())
}

/// Returns the plugins of Multus's auxiliary chain, which runs after the `position` networks of a pod: those that run in
/// this process, each as a network of its own, and the list of the others.
///
/// # Errors
/// A file of the chain is invalid.
pub(super) fn auxiliary_networks(
    conf: &NetConf,
    primary: &Primary,
    position: usize,
) -> Result<(Vec<PodNetwork>, Option<PodNetwork>), Error> {
    let Some(directory) = &primary.auxiliary_chain else { return Ok((Vec::new(), None)) };
    let chain = directory.file_name().unwrap_or_default().to_string_lossy();
    let network = |name: String, configuration| PodNetwork {
        name,
        interface: format!("net{position}"),
        selection: None,
        configuration,
    };
    let (mut in_process, mut others) = (Vec::new(), Vec::new());
    for (file, mut configuration) in auxiliary_chain(directory, &conf.cni_version)? {
        if NetworkRunner::of(primary, &configuration) == NetworkRunner::Here {
            let name = format!("{chain}/{}", file.file_name().unwrap_or_default().to_string_lossy());
            let mut warnings = Vec::new();
            govern(conf, primary, &name, &mut configuration, &mut warnings)?;
            warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            in_process.push(network(name, configuration));
        } else {
            others.push(configuration);
        }
    }
    let place = directory.to_string_lossy();
    let list = RunnableConfiguration::list_of(&place, &chain, &conf.cni_version, &others)?;
    Ok((in_process, list.map(|list| network(chain.into_owned(), list))))
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

/// Resolves the networks of a pod; for the agent's own pod, those that `delegates` or `clusterNetwork` give to every pod.
/// Those of a pod that selects none and has no sidecar are definitions in the agent's
/// memory, or else files; other sources are asked only if these do not suffice.
pub(super) fn networks_of(
    call: &PrimaryCall<'_>,
    pod: &LazyPod<'_>,
    annotated: Option<&Pod>,
) -> Result<PodNetworks, Error> {
    if is_agent(call.conf, pod.reference) {
        // The agent makes the API server reachable for this plugin, so the API is used only if the files do not suffice.
        return call.common_networks(None).or_else(|error| match pod.cluster() {
            Some(cluster) => call.common_networks(Some(cluster)),
            None => Err(error),
        });
    }
    let resolve = |definitions: Option<&dyn Definitions>| {
        pod_networks(call.conf, call.primary, definitions, annotated, &call.request.ifname, pod.cluster())
    };
    let definitions = pod.cluster().map(|cluster| cluster as &dyn Definitions);
    let Some(cluster) = definitions.filter(|_| pod.needs_only_configured_networks()) else {
        return resolve(definitions);
    };
    let of_files = |definitions| {
        let known = OptionalDefinitions { source: definitions, failure: OnceCell::new() };
        let networks = resolve(Some(&known));
        (networks, known.failure.into_inner())
    };
    let in_memory = pod.memory().map(|memory| of_files(memory));
    match in_memory
        .filter(|(networks, failure)| networks.is_ok() || failure.is_none())
        .unwrap_or_else(|| of_files(cluster))
    {
        (Err(error), Some(failure)) => {
            let msg = format!("networks of pod {}: {}", call.request.about, failure.msg);
            let details = format!("{}; {error}", failure.details);
            Err(Error { msg, ..failure }.with_details(details))
        }
        (networks, _) => networks,
    }
}

/// A source that reports definitions as missing if it can't look them up. A pod that needs only the networks of the
/// configuration gets those of files while the source is unavailable.
struct OptionalDefinitions<'a> {
    source: &'a dyn Definitions,
    failure: OnceCell<Error>,
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
}

/// Waits until the readiness file exists, if one is configured; without a `timeout`, only checks it.
///
/// # Errors
/// [`Code::TryAgain`]: file not found.
pub(super) fn require_ready(conf: &Primary, timeout: Option<Duration>) -> Result<(), Error> {
    let Some(file) = conf.readiness_file.as_deref().filter(|file| !file.exists()) else { return Ok(()) };
    let mut waited = String::new();
    if let Some(timeout) = timeout {
        tracing::info!("waiting for {}", file.display());
        if wait::until(timeout, POLL_INTERVALS, || Ok::<_, Error>(file.exists().then_some(())))?.is_some() {
            return Ok(());
        }
        waited = format!(" after {} s", timeout.as_secs());
    }
    let next = beside(file).map_or_else(
        || {
            "the agent of the cluster's network writes it when that network is ready; check that the agent's pod runs on \
             this node"
                .to_owned()
        },
        |list| format!("{} is beside it; set this file instead", list.display()),
    );
    let msg = format!("readinessindicatorfile: {} does not exist{waited}: {next}", file.display());
    Err(Error::new(Code::TryAgain, msg))
}
