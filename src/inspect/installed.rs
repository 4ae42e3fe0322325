//! Several configurations, applied to a pod as the runtime and Multus do.

use super::subject::{AppliedConf, ConfigurationOrigin, ConfigurationSource, Subject};
use crate::cluster::{Definition, DefinitionQuery, Definitions, Lookup};
use crate::cni::{CniCommand, Error, NetConf, NodeConf, PROGRAM};
use crate::plugin::node::{InstalledText, effective};
use crate::pod::Facts;
use std::collections::BTreeMap;

/// A node where Multus runs the plugin: only the pod's attachments count.
const MULTUS: &str = r#"{"cniVersion": "1.1.0", "name": "cluster", "type": "detour", "clusterNetwork": "cluster"}"#;

impl AppliedConf {
    /// Returns a configuration that is installed on a node with the configuration `node`.
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

impl Subject {
    /// Returns a pod with configurations of the command line or of its node. `source` has the definitions of its networks,
    /// if they are known.
    ///
    /// # Errors
    /// A built-in configuration is invalid, which is a bug.
    pub fn given(all: &[AppliedConf], facts: Facts, source: Option<&dyn Definitions>) -> Result<Self, Error> {
        if let [one] = all {
            return Self::of(one.clone(), facts, source);
        }
        let mut places: Vec<String> = all.iter().flat_map(|applied| applied.origin.places.clone()).collect();
        places.dedup();
        let applies = "each applies as the runtime or Multus runs it".to_owned();
        let is_of_node = all.iter().any(|applied| applied.origin.source == ConfigurationSource::Node);
        let kind = if is_of_node { ConfigurationSource::Node } else { ConfigurationSource::File };
        let origin = ConfigurationOrigin { source: kind, places, reason: None, applies };
        Self::combined(all, origin, facts, source)
    }

    /// Returns a pod with all configurations that apply to it: those of `all`, and those of the definitions that it
    /// selects.
    ///
    /// # Errors
    /// A built-in configuration is invalid, which is a bug.
    pub(super) fn combined(
        all: &[AppliedConf],
        origin: ConfigurationOrigin,
        facts: Facts,
        source: Option<&dyn Definitions>,
    ) -> Result<Self, Error> {
        let attachments = || all.iter().filter(|applied| applied.as_attachment);
        let text = |applied: &AppliedConf| Some((applied.conf.name.clone(), applied.text.clone()?));
        let place = |applied: &AppliedConf| (applied.conf.name.clone(), applied.origin.places.join(", "));
        let places: BTreeMap<String, String> = attachments().map(place).collect();
        let files = Files { texts: attachments().filter_map(text).collect(), source };
        let mut for_every_pod = all.iter().filter(|applied| !applied.as_attachment).map(|applied| applied.conf.clone());
        let mut multus = NetConf::parse(MULTUS.as_bytes(), CniCommand::Add, PROGRAM)?;
        let conf = match for_every_pod.next() {
            Some(mut first) => {
                first.chain.extend(for_every_pod.flat_map(|other| other.chain));
                first.primary = first.primary.or(multus.primary);
                first
            }
            None => {
                if let Some(first) = all.first() {
                    multus.kubernetes.clone_from(&first.conf.kubernetes);
                    multus.bounds.clone_from(&first.conf.bounds);
                    multus.auto_format = first.conf.auto_format;
                    // The namespaces that one attachment skips do not concern the others.
                    multus.kubernetes.exclude_namespaces.clear();
                }
                multus
            }
        };
        let applied = AppliedConf { conf, as_attachment: false, origin, text: None };
        Self::with_files(applied, facts, (source, Some(&files)), &places)
    }
}

/// A source of definitions in which those without a configuration have the one of the file with their name, as for
/// Multus. Without a source, every other definition has a configuration that is not known.
struct Files<'a> {
    texts: BTreeMap<String, String>,
    source: Option<&'a dyn Definitions>,
}

/// The configuration of a network that is not known.
const UNKNOWN: &str = r#"{"cniVersion": "1.1.0", "type": "unseen"}"#;

impl Definitions for Files<'_> {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let text = |query: &DefinitionQuery| self.texts.get(&query.object.name).cloned();
        let found = |query: &DefinitionQuery, config| {
            Lookup::Found(Definition { object: query.object.clone(), config, ..Definition::default() })
        };
        let unknown = || UNKNOWN.to_owned();
        match self.source.map(|source| source.definitions(wanted)) {
            None => Ok(wanted.iter().map(|query| found(query, text(query).unwrap_or_else(unknown))).collect()),
            Some(Ok(lookups)) => Ok(wanted
                .iter()
                .zip(lookups)
                .map(|(query, lookup)| match &lookup {
                    Lookup::Found(definition) if definition.config.trim().is_empty() => {
                        found(query, text(query).unwrap_or_else(unknown))
                    }
                    _ => lookup,
                })
                .collect()),
            // The user may lack the permission to read definitions.
            Some(Err(error)) => wanted
                .iter()
                .map(|query| text(query).map(|text| found(query, text)).ok_or_else(|| error.clone()))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects;
    use crate::inspect::explain;
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
        explain(&subject).map(|explained| explained.explanation).map_err(|error| error.msg)
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
