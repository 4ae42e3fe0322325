//! The configurations of a report: where they come from, to which pods they apply, and how several of them apply together,
//! as the runtime and Multus run them. And the networks that a pod selects, with what each leads to.

use crate::cluster::{Definition, DefinitionQuery, Definitions, Lookup, ObjectRef};
use crate::cni::{
    CniCommand, Code, Error, GLOBAL_NAMESPACE, NetConf, NodeConf, PROGRAM, SYSTEM_NAMESPACE, closest, configuration,
};
use crate::networks::{Selection, default_network, networks, plugin_types};
use crate::plugin::node::{InstalledText, effective};
use crate::pod::Pod;
use crate::pod::well_known::NETWORKS;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{self, Path};

/// The configuration for a node where Multus runs the plugin: only the pod's attachments count.
const MULTUS: &str = r#"{"cniVersion": "1.1.0", "name": "cluster", "type": "detour", "clusterNetwork": "cluster"}"#;

/// Where the configuration of a report comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ConfigurationOrigin {
    /// The kind of the source.
    pub source: ConfigurationSource,
    /// The files or objects with the configuration.
    pub places: Vec<String>,
    /// Why the configuration of the pod's node was not used, or may be incomplete.
    pub reason: Option<String>,
    /// To which pods the configuration of the command line applies.
    #[serde(skip)]
    pub applies: String,
}

/// The kind of the source of a configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConfigurationSource {
    /// A file of the command line.
    File,
    /// The files that are installed on the pod's node.
    Node,
    /// The defaults of this program.
    #[default]
    BuiltIn,
}

impl ConfigurationOrigin {
    /// Returns the origin of all configurations.
    pub(super) fn of(all: &[AppliedConf]) -> Self {
        if let [one] = all {
            return one.origin.clone();
        }
        let mut places: Vec<String> = all.iter().flat_map(|applied| applied.origin.places.clone()).collect();
        places.dedup();
        let is_of_node = all.iter().any(|applied| applied.origin.source == ConfigurationSource::Node);
        let source = if is_of_node { ConfigurationSource::Node } else { ConfigurationSource::File };
        let applies = "each applies as the runtime or Multus runs it".to_owned();
        Self { source, places, reason: None, applies }
    }

    /// Returns which configuration is used, and why.
    pub(super) fn text(&self) -> String {
        let places = self.places.join(", ");
        match (self.source, &self.reason) {
            (ConfigurationSource::Node, None) => format!("installed on the node: {places}"),
            (ConfigurationSource::Node, Some(why)) => format!("installed on the node, in part: {places}; {why}"),
            (ConfigurationSource::File, _) => format!("{places}, given with --config; {}", self.applies),
            (ConfigurationSource::BuiltIn, Some(why)) => {
                format!("built-in defaults: {why}; use --config FILE or kubectl detour")
            }
            (ConfigurationSource::BuiltIn, None) => "built-in defaults, for every pod; use --config FILE".to_owned(),
        }
    }
}

/// A configuration, and to which pods it applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppliedConf {
    /// The configuration.
    pub conf: NetConf,
    /// Whether it applies only to pods that select its network.
    pub as_attachment: bool,
    /// Where it comes from.
    pub origin: ConfigurationOrigin,
    /// Its text, for definitions without a configuration; `None` for a built-in one.
    pub text: Option<String>,
}

impl AppliedConf {
    /// Parses a configuration file.
    ///
    /// A configuration list, a primary plugin, the stdin of a plugin in a list (which has `prevResult`) and a file in the
    /// directory of its network's name (Multus's auxiliary chain) apply to every pod. Multus runs every other plugin for
    /// the pods that select its network.
    ///
    /// # Errors
    /// As [`configuration`].
    pub fn parse(place: &Path, text: &[u8]) -> Result<Self, Error> {
        let conf = configuration(place, text)?;
        let is_list = serde_json::from_slice::<Value>(text).is_ok_and(|value| value.get("plugins").is_some());
        let directory = path::absolute(place).ok().and_then(|place| Some(place.parent()?.file_name()?.to_owned()));
        let in_chain = directory.is_some_and(|directory| directory == *conf.name);
        let as_attachment = !is_list && !in_chain && conf.primary.is_none() && conf.prev_result.is_none();
        let applies = match as_attachment {
            true => format!("Multus runs it for pods that select network {}", conf.name),
            false => "it applies to every pod".to_owned(),
        };
        let places = vec![place.display().to_string()];
        let origin = ConfigurationOrigin { source: ConfigurationSource::File, places, reason: None, applies };
        let text = Some(String::from_utf8_lossy(text).into_owned());
        Ok(Self { conf, as_attachment, origin, text })
    }

    /// Returns a configuration that is installed on a node with the node configuration `node`.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub fn installed(installed: &InstalledText, node: Option<&NodeConf>) -> Result<Self, Error> {
        let InstalledText { path, text, for_every_pod } = installed;
        let (place, path) = (path.to_string(), path.as_path());
        let applied = Self::parse(path, text.as_bytes())?;
        let as_attachment = applied.as_attachment && !*for_every_pod;
        let source = ConfigurationSource::Node;
        let origin = ConfigurationOrigin { source, places: vec![place], ..ConfigurationOrigin::default() };
        Ok(Self { as_attachment, conf: effective(node, path, text)?, origin, ..applied })
    }
}

/// A configuration without a source, which applies to every pod.
impl From<NetConf> for AppliedConf {
    fn from(conf: NetConf) -> Self {
        Self { conf, as_attachment: false, origin: ConfigurationOrigin::default(), text: None }
    }
}

/// Returns one configuration in place of several: that of every pod, and a primary plugin that runs the attachments.
///
/// # Errors
/// The built-in configuration is invalid, which is a bug.
pub(super) fn combined(all: &[AppliedConf]) -> Result<NetConf, Error> {
    let mut multus = NetConf::parse(MULTUS.as_bytes(), CniCommand::Add, PROGRAM)?;
    let mut for_every_pod = all.iter().filter(|applied| !applied.as_attachment).map(|applied| applied.conf.clone());
    if let Some(mut first) = for_every_pod.next() {
        first.chain.extend(for_every_pod.flat_map(|other| other.chain));
        first.primary = first.primary.or(multus.primary);
        return Ok(first);
    }
    if let Some(AppliedConf { conf: first, .. }) = all.first() {
        multus.kubernetes.clone_from(&first.kubernetes);
        multus.bounds.clone_from(&first.bounds);
        multus.auto_format = first.auto_format;
        // The namespaces that one attachment skips do not concern the others.
        multus.kubernetes.exclude_namespaces.clear();
    }
    Ok(multus)
}

/// The files of attachments, as a source of definitions. As for Multus, a definition without a configuration has that of
/// the file with its name. Without `source`, the configuration of every other definition is unknown.
pub(super) struct Files<'a> {
    /// The files by the names of their networks.
    by_name: BTreeMap<&'a str, &'a AppliedConf>,
    source: Option<&'a dyn Definitions>,
}

/// The configuration of a network whose configuration is unknown.
const UNKNOWN: &str = r#"{"cniVersion": "1.1.0", "type": "unseen"}"#;

impl<'a> Files<'a> {
    pub(super) fn of(all: &'a [AppliedConf], source: Option<&'a dyn Definitions>) -> Self {
        let attachments = all.iter().filter(|applied| applied.as_attachment);
        Self { by_name: attachments.map(|applied| (&*applied.conf.name, applied)).collect(), source }
    }
}

impl Definitions for Files<'_> {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let text = |query: &DefinitionQuery| self.by_name.get(&*query.object.name)?.text.clone();
        let found = |query: &DefinitionQuery, config| {
            Lookup::Found(Definition { object: query.object.clone(), config, ..Definition::default() })
        };
        let of_file = |query: &DefinitionQuery| found(query, text(query).unwrap_or_else(|| UNKNOWN.to_owned()));
        let is_empty = |lookup: &Lookup| matches!(lookup, Lookup::Found(one) if one.config.trim().is_empty());
        let or_of_file = |(query, lookup)| if is_empty(&lookup) { of_file(query) } else { lookup };
        match self.source.map(|source| source.definitions(wanted)) {
            None => Ok(wanted.iter().map(of_file).collect()),
            Some(Ok(lookups)) => Ok(wanted.iter().zip(lookups).map(or_of_file).collect()),
            // The user may lack the permission to read definitions.
            Some(Err(error)) => {
                wanted.iter().map(|query| Ok(found(query, text(query).ok_or_else(|| error.clone())?))).collect()
            }
        }
    }
}

/// A network that a pod selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectedNetwork {
    /// `NAMESPACE/NAME` of its definition.
    pub name: String,
    /// What it leads to.
    pub leads_to: NetworkLead,
}

/// What a network that a pod selects leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkLead {
    /// To this file, which has the definition's name.
    File(String),
    /// To the configuration of its definition, with plugins of these types.
    Definition(Vec<String>),
    /// To a file on the node: its definition has no configuration.
    OnNode,
    /// To nothing: its definition does not exist.
    Missing,
    /// Its definition is not known; with the name of a known one that resembles it.
    Unknown(Option<String>),
}

impl NetworkLead {
    pub(super) fn text(&self) -> String {
        match self {
            Self::File(place) => place.clone(),
            Self::Definition(types) if types.is_empty() => "its definition".to_owned(),
            Self::Definition(types) => format!("its definition ({})", types.join(", ")),
            Self::OnNode => "a file on the node with its name".to_owned(),
            Self::Missing => "nothing: its definition does not exist".to_owned(),
            Self::Unknown(None) => "unknown: no file and no definition with its name is given".to_owned(),
            Self::Unknown(Some(similar)) => {
                format!("nothing: no file and no definition has its name; did you mean {similar:?}?")
            }
        }
    }

    /// Whether Multus finds no configuration, and therefore fails the pod.
    pub(super) const fn is_missing(&self) -> bool {
        matches!(self, Self::Missing | Self::Unknown(Some(_)))
    }
}

/// Returns the networks that the pod selects, and what each leads to; none if the annotation is malformed. `files` has
/// the known files by name; without `definitions`, definitions can't be looked up.
pub(super) fn selected_networks(
    pod: &Pod,
    definitions: Option<&BTreeMap<ObjectRef, Lookup>>,
    Files { by_name: files, .. }: &Files<'_>,
) -> Vec<SelectedNetwork> {
    let selected = networks(pod).map(|selections| selections.elements).unwrap_or_default();
    // With several files, the missing one is a typo. A name that the pod selects too is another network.
    let unselected = || files.keys().filter(|name| selected.iter().all(|one| one.object.name != ***name));
    let is_guessed = definitions.is_none() && files.len() > 1;
    let lead = |object: &ObjectRef| match (definitions.and_then(|known| known.get(object)), files.get(&*object.name)) {
        (Some(Lookup::Found(definition)), _) if !definition.config.trim().is_empty() => {
            NetworkLead::Definition(plugin_types(definition))
        }
        (Some(Lookup::Found(_)) | None, Some(file)) => NetworkLead::File(file.origin.places.join(", ")),
        (Some(Lookup::Found(_)), None) => NetworkLead::OnNode,
        (Some(Lookup::Missing(_)), _) => NetworkLead::Missing,
        (None, None) => {
            let similar = closest(&object.name, unselected().copied()).filter(|_| is_guessed);
            NetworkLead::Unknown(similar.map(str::to_owned))
        }
    };
    let network =
        |Selection { object, .. }: &Selection| SelectedNetwork { name: object.to_string(), leads_to: lead(object) };
    selected.iter().map(network).collect()
}

/// Returns the error for a network that leads to nothing: Multus adds no network if it can't find one of them. Multus has
/// added the networks of a pod with an address.
pub(super) fn missing_network(pod: &Pod, selected: &[SelectedNetwork]) -> Option<Error> {
    let missing = selected.iter().filter(|_| pod.addresses.is_empty()).find(|one| one.leads_to.is_missing())?;
    let (object, name) = (&missing.name, missing.name.rsplit('/').next().unwrap_or_default());
    let (cause, next) = match &missing.leads_to {
        NetworkLead::Unknown(Some(similar)) => {
            ("for which no file and no definition is given", format!("did you mean {similar:?}?"))
        }
        _ => ("which does not exist", format!("select {GLOBAL_NAMESPACE}/{name}, or create {object}")),
    };
    let msg = format!(
        "pod {}/{}: annotation {NETWORKS:?} selects NetworkAttachmentDefinition {object}, {cause}, so Multus can't add the \
         pod's networks; {next}",
        pod.namespace, pod.name
    );
    Some(Error::new(Code::InvalidConfig, msg))
}

/// Looks up the definitions that the pod selects; none if an annotation is malformed, or if the source refuses.
pub(super) fn selected_definitions(pod: &Pod, cluster: &dyn Definitions) -> BTreeMap<ObjectRef, Lookup> {
    let (selected, default) = (networks(pod), default_network(pod, SYSTEM_NAMESPACE));
    let elements = [selected, default].into_iter().flatten().flat_map(|selections| selections.elements);
    let queries: Vec<_> = elements.map(|one| DefinitionQuery { object: one.object, awaited: false }).collect();
    let found = if queries.is_empty() { Ok(Vec::new()) } else { cluster.definitions(&queries) };
    queries.into_iter().map(|query| query.object).zip(found.unwrap_or_default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects;
    use crate::inspect::{Subject, explain};
    use crate::pod::Facts;
    use std::path::Path;

    const SOURCE: &str = r#""kubernetes": {"kubeconfig": "/k", "exclude_namespaces": ["kube-system"]}"#;

    /// Explains a pod that selects these networks; each has a definition without a configuration.
    fn explained(networks: &str, texts: &[(&str, String)]) -> Result<crate::inspect::Explanation, String> {
        let mut manifest = format!(
            "kind: Pod\nmetadata: {{name: web, namespace: shop, annotations: {{sidecar.istio.io/status: '{{}}', \
             k8s.v1.cni.cncf.io/networks: '{networks}'}}}}\nspec: {{containers: [{{name: app}}, {{name: istio-proxy}}]}}\n"
        );
        for name in ["istio-cni", "excludedns"] {
            manifest += &format!(
                "---\napiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {{name: {name}, namespace: default}}\n"
            );
        }
        let objects = objects(Path::new("m"), &manifest, "default").expect("objects");
        let facts = Facts { pod: objects.pods[0].pod.clone(), namespace: None };
        let installed = |(place, text): &(&str, String)| {
            let path = format!("/etc/cni/multus/net.d/{place}").parse().expect("a path");
            AppliedConf::installed(&InstalledText { path, text: text.clone(), for_every_pod: false }, None)
        };
        let applied = texts.iter().map(installed);
        let applied = applied.collect::<Result<Vec<_>, _>>().map_err(|error| error.msg)?;
        let subject = Subject::given(&applied, facts, Some(&objects)).map_err(|error| error.msg)?;
        explain(&subject).map_err(|error| error.msg)
    }

    fn attachment(name: &str, chain: &str) -> String {
        format!(r#"{{"cniVersion": "0.3.1", "name": "{name}", "type": "detour", "chain": [{chain}], {SOURCE}}}"#)
    }

    fn list(chain: &str) -> String {
        format!(
            r#"{{"cniVersion": "0.3.1", "name": "ovn", "plugins": [{{"type": "detour", "chain": [{chain}], {SOURCE}}}]}}"#
        )
    }

    const REDIRECT: &str = r#"{"type": "istio-redirect"}"#;
    const EXCLUDE: &str = r#"{"type": "uid-exclude", "uids": ["4711"]}"#;

    #[test]
    fn each_attachment_that_the_pod_selects_applies() {
        let both = [("a.conf", attachment("istio-cni", REDIRECT)), ("b.conf", attachment("excludedns", EXCLUDE))];
        let of = |networks: &str, texts: &[(&str, String)]| {
            let report = explained(networks, texts).expect("explained");
            (report.redirected, report.exclusions.iter().any(|one| one.who.contains("4711")))
        };
        assert_eq!(of("default/istio-cni, default/excludedns", &both), (true, true));
        assert_eq!(of("default/istio-cni", &both), (true, false));
        assert_eq!(of("default/excludedns", &both), (false, true));
        assert_eq!(of("default/istio-cni", &both[..1]), (true, false));
        let chained = [("l.conflist", list(REDIRECT)), both[1].clone()];
        assert_eq!(of("default/excludedns", &chained), (true, true));
        assert_eq!(of("", &chained), (true, false));
        assert_eq!(of("", &[("l.conflist", list(EXCLUDE))]), (false, true));
    }

    #[test]
    fn the_report_names_the_source_of_the_configuration() {
        let texts = [("istio-cni.conf", attachment("istio-cni", REDIRECT))];
        let report = explained("default/istio-cni", &texts).expect("explained");
        let text = crate::inspect::render(&report, crate::inspect::Format::Table, crate::inspect::Screen::plain())
            .expect("text");
        let line = "Configuration: installed on the node: /etc/cni/multus/net.d/istio-cni.conf\n";
        assert!(text.as_str().contains(line), "{text}");
        let json = serde_json::to_value(&report).expect("JSON");
        assert_eq!(json["configuration"]["source"], "node");
    }
}
