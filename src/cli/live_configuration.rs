//! The configuration of a pod's node: the files that are installed on it, or the ConfigMaps of its agents.

use super::cluster::{ClusterArguments, DEFAULT_CONF, kubeconfig};
use super::doctor::host_name;
use super::install::own_kubeconfig;
use super::output::CommandError;
use super::{Cli, Command};
use anyhow::anyhow;
use clap::Parser;
use detour_cni::agent::install::{HostPath, HostRoot, InstalledTexts, NodeFiles};
use detour_cni::cluster::{AgentPod, ObjectRef, UserApi};
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::{AppliedConf, ConfigurationOrigin, ConfigurationSource, InstalledText, Subject};
use detour_cni::pod::{Pod, PodRef};
use std::path::Path;
use std::time::Duration;

/// The timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a pod with the configuration of its node. The file system of this node is mounted at `root`.
///
/// # Errors
/// The cluster does not return the pod, or the configuration is invalid for it.
pub(super) fn live_subject(arguments: &ClusterArguments, pod: &str, root: &Path) -> Result<Subject, CommandError> {
    if arguments.connection.is_none() {
        arguments.required_namespace(pod)?;
    }
    let api = api(arguments, root)?;
    let namespace = arguments.namespace.as_deref().unwrap_or(api.namespace());
    let wanted = PodRef { namespace: namespace.to_owned(), name: pod.to_owned(), uid: None };
    let facts = api.cluster().facts(&wanted, true)?;
    let agent_namespace = arguments.connection.as_ref().and_then(|connection| connection.agent_namespace());
    match installed(&facts.pod, root).or_else(|why| in_config_maps(&api, agent_namespace, &facts.pod, &why)) {
        Ok(Live { source, texts, reason }) => {
            let mut places: Vec<String> = texts.iter().map(|one| one.place.clone()).collect();
            places.dedup();
            Ok(Subject::installed(&texts, ConfigurationOrigin { source, places, reason }, facts, api.cluster())?)
        }
        Err(reason) => {
            let origin = ConfigurationOrigin { reason: Some(reason), ..ConfigurationOrigin::default() };
            let mut applied = arguments.conf(DEFAULT_CONF)?;
            applied.conf.kubernetes.kubeconfig = Some(api.kubeconfig().to_owned());
            Ok(Subject::with_facts(AppliedConf { origin, ..applied }, facts, api.cluster())?)
        }
    }
}

/// Returns the API server: that of kubectl, of the kubeconfig, of the agent's service account, or of the plugin.
fn api(arguments: &ClusterArguments, root: &Path) -> Result<UserApi, CommandError> {
    if let Some(connection) = &arguments.connection {
        return connection.open();
    }
    if let Some(path) = kubeconfig(arguments.kubeconfig.as_deref())? {
        return Ok(UserApi::of_file(path, TIMEOUT));
    }
    let installed = || {
        let path = NodeFiles::new(HostRoot::new(root)).reach(&own_kubeconfig()).ok()?;
        path.exists().then(|| UserApi::of_node(root, path, TIMEOUT))
    };
    UserApi::in_cluster(TIMEOUT).or_else(installed).ok_or_else(|| {
        let msg = "no kubeconfig: add --kubeconfig, set KUBECONFIG, or create ~/.kube/config";
        Error::new(Code::InvalidConfig, msg).into()
    })
}

/// The configurations that apply to pods of a node.
struct Live {
    source: ConfigurationSource,
    texts: Vec<InstalledText>,
    /// Why they may be incomplete.
    reason: Option<String>,
}

/// Returns the configurations that are installed on this node if the pod is on it; otherwise the reason why not.
fn installed(pod: &Pod, root: &Path) -> Result<Live, String> {
    let Some(node) = pod.node_name.as_deref() else { return Err("the pod is not scheduled to a node".to_owned()) };
    if host_name(root).is_none_or(|name| name != node) {
        return Err(format!("this is not the pod's node {node}"));
    }
    let InstalledTexts { texts, missing } = NodeFiles::new(HostRoot::new(root)).installed_texts()?;
    let missing: Vec<String> = missing.iter().map(ToString::to_string).collect();
    let reason = (!missing.is_empty()).then(|| format!("not found: {}", missing.join(", ")));
    if texts.is_empty() {
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        return Err(format!("no configuration is installed on node {node}{reason}"));
    }
    let text = |(path, text): (HostPath, String)| InstalledText { place: path.to_string(), text };
    Ok(Live { source: ConfigurationSource::Node, texts: texts.into_iter().map(text).collect(), reason })
}

/// Returns the configurations in the ConfigMaps of the agents on the pod's node. The error starts with `why`, the reason
/// for which the node's files are not used.
fn in_config_maps(api: &UserApi, agent_namespace: Option<&str>, pod: &Pod, why: &str) -> Result<Live, String> {
    let Some(node) = pod.node_name.as_deref() else { return Err(why.to_owned()) };
    let found = || {
        let mut agents = api.agents(agent_namespace, Some(node)).map_err(|error| error.to_string())?;
        // During an upgrade, a release has two agents on the node.
        agents.sort_by(|a, b| (&a.release, !a.ready).cmp(&(&b.release, !b.ready)));
        agents.dedup_by(|b, a| a.release == b.release);
        let mut texts = Vec::new();
        for agent in &agents {
            texts.extend(of_agent(api, agent).map_err(|error| format!("agent {}: {error:#}", agent.object))?);
        }
        if texts.is_empty() { Err(format!("no agent on node {node}")) } else { Ok(texts) }
    };
    let live = |texts| Live { source: ConfigurationSource::ConfigMap, texts, reason: None };
    found().map(live).map_err(|error| format!("{why}; {error}"))
}

/// Returns the configurations that an agent installs, from the arguments of its container and its ConfigMap.
fn of_agent(api: &UserApi, agent: &AgentPod) -> anyhow::Result<Vec<InstalledText>> {
    let words = std::iter::once("detour").chain(agent.arguments.iter().map(String::as_str));
    let unknown = || anyhow!("the arguments of its container belong to another version of detour");
    let Ok(Cli { command: Command::Agent(arguments) }) = Cli::try_parse_from(words) else { return Err(unknown()) };
    let name = agent.config_map.clone().ok_or_else(|| anyhow!("its pod has no ConfigMap"))?;
    let config_map = ObjectRef { namespace: agent.object.namespace.clone(), name };
    let data = api.config_map(&config_map).map_err(|error| anyhow!("{error}"))?;
    let texts = arguments.install.texts(&data, &agent.object.namespace)?;
    let place = format!("ConfigMap {config_map}");
    Ok(texts.into_iter().map(|text| InstalledText { place: place.clone(), text }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Returns the configurations of an agent with these arguments and this ConfigMap.
    fn texts(arguments: &[&str], data: &[(&str, &str)]) -> Result<Vec<serde_json::Value>, String> {
        let words = ["detour", "agent", "--root=/host", "--config=/etc/detour/config.json"];
        let cli = Cli::try_parse_from(words.iter().chain(arguments)).map_err(|error| error.to_string())?;
        let Command::Agent(agent) = cli.command else { return Err("expected agent".to_owned()) };
        let data: BTreeMap<_, _> = data.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned())).collect();
        let texts = agent.install.texts(&data, "mesh").map_err(|error| format!("{error:#}"))?;
        Ok(texts.iter().map(|text| serde_json::from_str(text).expect("JSON")).collect())
    }

    #[test]
    fn the_configurations_of_an_agent_follow_from_its_arguments_and_its_config_map() {
        let config = ("config.json", r#"{"chain": [{"type": "istio-redirect"}]}"#);
        let attachments =
            ("attachments.json", r#"[{"name": "excludedns", "chain": [{"type": "dns-exclude", "uids": ["7"]}]}]"#);
        let chained = texts(&["--chained=true", "--exclude-namespaces=a,b"], &[config]).expect("texts");
        assert_eq!(chained.len(), 1);
        let entry = &chained[0]["plugins"][0];
        assert_eq!(entry["kubernetes"]["exclude_namespaces"], serde_json::json!(["a", "b"]));
        assert_eq!(entry["kubernetes"]["agent_namespace"], "mesh");
        let file = "--attachments=/etc/detour/attachments.json";
        let names = |texts: &[serde_json::Value]| texts.iter().map(|text| text["name"].to_string()).collect::<Vec<_>>();
        assert_eq!(names(&texts(&["--chained=false"], &[config]).expect("texts")), ["\"istio-cni\""]);
        let own = texts(&["--chained=false", file], &[config, attachments]).expect("texts");
        assert_eq!((names(&own), &own[0]["chain"][0]["uids"][0]), (vec!["\"excludedns\"".to_owned()], &"7".into()));
        assert_eq!(texts(&["--chained=true", file], &[config, attachments]).expect("texts").len(), 2);
        assert!(
            texts(&["--chained=true"], &[("config.json", "[")]).is_err_and(|why| why.contains("config.json: expected"))
        );
    }
}
