//! The subject of a report: a pod with its namespace, from manifests or the cluster, and a configuration.

pub use super::configurations::{AppliedConf, ConfigurationOrigin, ConfigurationSource};
use super::configurations::{
    Files, SelectedNetwork, combined, missing_network, selected_definitions, selected_networks,
};
use super::socket_lb::Product;
use crate::cluster::{self, Definitions, Given, Lookup, ObjectRef, Objects};
use crate::cni::{Code, Error, NetConf};
use crate::firewall::RuleFormat;
use crate::inspect::terminal::first_of;
use crate::networks::{InstalledNetwork, installed_network, runs_own_type};
use crate::plugin::primary::{Preview, preview};
use crate::pod::Facts;
use crate::pod::well_known::RESOURCE_NAME;
use crate::sub_plugins::executables;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Limit for the objects that a message lists.
const MAX_LISTED: usize = 10;

/// A pod, and the configuration that is applied to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The configuration.
    pub conf: NetConf,
    /// How the pod uses the configuration's network, if it applies only to pods that select that, because Multus runs it.
    pub attachment: Option<InstalledNetwork>,
    /// The pod, and its namespace if it is known.
    pub facts: Facts,
    /// The kind, namespace and name of the object with the pod template; `None` for a pod.
    pub template_of: Option<String>,
    /// The pod's networks, if the configuration is a primary plugin's.
    pub networks: Option<Preview>,
    /// The networks that the pod's annotation selects, and what each leads to.
    pub selected: Vec<SelectedNetwork>,
    /// Why an ADD of the pod fails before its sub-plugins are evaluated.
    pub failure: Option<Error>,
    /// Where the configuration comes from.
    pub origin: ConfigurationOrigin,
    /// The products whose programs replace Service addresses on the pod's node, if this is known.
    pub socket_lb: Vec<&'static Product>,
}

/// The texts of manifests, each with the path that messages contain.
#[derive(Debug)]
pub struct ManifestTexts {
    /// Pods, their namespaces, and the definitions of their networks.
    pub pods: (PathBuf, String),
    /// Namespaces of the pods; they take precedence.
    pub namespace: Option<(PathBuf, String)>,
    /// Definitions of the pods' networks; they take precedence.
    pub definitions: Vec<(PathBuf, String)>,
}

/// Selects pods of manifests; by default all.
#[derive(Debug, Default)]
pub struct PodSelector<'a> {
    /// Objects in this namespace; it is also the namespace of objects that do not set one.
    pub namespace: Option<&'a str>,
    /// The object with this name, or `KIND/NAME`.
    pub name: Option<&'a str>,
}

/// The selected pods and pod templates of manifests, with the other objects.
#[derive(Debug)]
pub struct PodManifest {
    /// The selected pods; at least one.
    pub pods: Vec<Given>,
    place: PathBuf,
    objects: Objects,
}

impl PodManifest {
    /// Parses manifests and selects pods.
    ///
    /// # Errors
    /// A text is malformed, no pod is selected, or the text for namespaces lacks the namespace of a selected pod.
    pub fn read(texts: &ManifestTexts, selector: &PodSelector<'_>) -> Result<Self, Error> {
        let namespace = selector.namespace.unwrap_or("default");
        let read = |(place, text): &(PathBuf, String)| cluster::objects(place, text, namespace);
        let mut objects = Objects::default();
        for text in &texts.definitions {
            objects.extend(Objects { pods: Vec::new(), others: Vec::new(), ..read(text)? });
        }
        let found = read(&texts.pods)?;
        let is_selected = |given: &&Given| {
            selector.namespace.is_none_or(|namespace| given.pod.namespace == namespace)
                && selector.name.is_none_or(|name| given.is_named(name))
        };
        let pods: Vec<Given> = found.pods.iter().filter(is_selected).cloned().collect();
        let place = texts.pods.0.clone();
        if pods.is_empty() {
            return Err(none_selected(&place, selector, &found));
        }
        if let Some(text) = &texts.namespace {
            let namespaces = read(text)?;
            check_namespaces(&text.0, &namespaces, &pods)?;
            objects.extend(Objects { pods: Vec::new(), others: Vec::new(), ..namespaces });
        }
        objects.extend(found);
        Ok(Self { pods, place, objects })
    }

    /// Returns the same without the requests of definitions for devices: Multus fulfills them, and the primary plugin
    /// rejects them.
    #[must_use]
    pub fn without_devices(mut self) -> Self {
        for definition in &mut self.objects.definitions {
            definition.annotations.remove(RESOURCE_NAME);
        }
        self
    }

    /// Returns the only pod.
    ///
    /// # Errors
    /// Several pods are selected.
    pub fn one(&self) -> Result<&Given, Error> {
        match &self.pods[..] {
            [one] => Ok(one),
            several => {
                let msg = format!(
                    "{}: expected one pod or pod template, got {}; select one by name",
                    self.place.display(),
                    listed(several.iter().map(ToString::to_string).collect())
                );
                Err(Error::new(Code::InvalidConfig, msg))
            }
        }
    }

    /// Lists the objects that are neither pods nor contain a pod template, `None` if there are none.
    #[must_use]
    pub fn skipped(&self) -> Option<String> {
        (!self.objects.others.is_empty()).then(|| listed(self.objects.others.clone()))
    }

    /// Returns one of the pods with configurations: several as for Multus.
    ///
    /// # Errors
    /// As [`Subject::given`].
    pub fn subject(&self, given: &Given, configurations: &[AppliedConf]) -> Result<Subject, Error> {
        let pod = given.pod.clone();
        let namespace = self.objects.namespaces.iter().find(|namespace| namespace.name == pod.namespace).cloned();
        // Manifests without any definition don't show which ones the cluster has.
        let is_primary = configurations.iter().any(|applied| applied.conf.primary.is_some());
        let is_known = is_primary || !self.objects.definitions.is_empty();
        let cluster = is_known.then_some(&self.objects as &dyn Definitions);
        let subject = Subject::given(configurations, Facts { pod, namespace }, cluster)?;
        Ok(Subject { template_of: given.is_template().then(|| given.to_string()), ..subject })
    }
}

fn none_selected(place: &Path, PodSelector { namespace, name }: &PodSelector<'_>, found: &Objects) -> Error {
    let name = name.map(|name| format!(" named {name:?}")).unwrap_or_default();
    let namespace = namespace.map(|namespace| format!(" in namespace {namespace:?}")).unwrap_or_default();
    let expected = format!("expected a pod or an object with a pod template{name}{namespace}");
    Error::new(Code::InvalidConfig, format!("{}: {expected}, got {}", place.display(), listed(titles(found))))
}

/// Checks that the text for namespaces contains the namespace of each pod.
fn check_namespaces(place: &Path, text: &Objects, pods: &[Given]) -> Result<(), Error> {
    let is_missing = |given: &&Given| text.namespaces.iter().all(|namespace| namespace.name != given.pod.namespace);
    let Some(given) = pods.iter().find(is_missing) else { return Ok(()) };
    let expected = format!("expected Namespace {} of {given}", given.pod.namespace);
    Err(Error::new(Code::InvalidConfig, format!("{}: {expected}, got {}", place.display(), listed(titles(text)))))
}

/// Returns the kind, namespace and name of every object.
fn titles(found: &Objects) -> Vec<String> {
    let pods = found.pods.iter().map(ToString::to_string);
    let namespaces = found.namespaces.iter().map(|namespace| format!("Namespace {}", namespace.name));
    let definitions =
        found.definitions.iter().map(|definition| format!("NetworkAttachmentDefinition {}", definition.object));
    pods.chain(namespaces).chain(definitions).chain(found.others.iter().cloned()).collect()
}

/// Lists the first objects that were found, and counts the others.
pub(super) fn listed(titles: Vec<String>) -> String {
    if titles.is_empty() { "no object".to_owned() } else { first_of(titles, MAX_LISTED, ", ") }
}

impl Subject {
    /// Returns a pod with configurations of the command line or of its node, as the runtime and Multus apply them. `source`
    /// has the definitions of its networks, if they are known.
    ///
    /// # Errors
    /// A built-in configuration is invalid, which is a bug.
    pub fn given(all: &[AppliedConf], facts: Facts, source: Option<&dyn Definitions>) -> Result<Self, Error> {
        let is_built_in = matches!(all, [one] if one.origin.source == ConfigurationSource::BuiltIn);
        let files = Files::of(all, source);
        let definitions = source.filter(|_| !is_built_in).map(|source| selected_definitions(&facts.pod, source));
        let selected = match is_built_in {
            true => Vec::new(),
            false => selected_networks(&facts.pod, definitions.as_ref(), &files),
        };
        let runs_own = |lookup: &Lookup| matches!(lookup, Lookup::Found(definition) if runs_own_type(definition));
        let has_own = definitions.iter().flat_map(BTreeMap::values).any(runs_own);
        let alone = match all {
            [one] if is_built_in || one.conf.primary.is_some() || !has_own => Some(one),
            _ => None,
        };
        let conf = alone.map_or_else(|| combined(all), |one| Ok(one.conf.clone()))?;
        let as_attachment = alone.is_some_and(|one| one.as_attachment);
        let look_up = |object: &ObjectRef| definitions.as_ref()?.get(object).cloned();
        let attachment = as_attachment.then(|| installed_network(&facts.pod, &conf.name, &look_up)).transpose();
        let source = if alone.is_some() { source } else { Some(&files as &dyn Definitions) };
        let networks = conf.primary.as_ref().map(|primary| preview(&conf, primary, source, &facts.pod)).transpose();
        let missing = missing_network(&facts.pod, &selected).filter(|_| as_attachment || alone.is_none());
        let failure = missing.or_else(|| networks.as_ref().err().or(attachment.as_ref().err()).cloned());
        Ok(Self {
            networks: networks.ok().flatten(),
            attachment: attachment.ok().flatten(),
            conf,
            selected,
            failure,
            facts,
            template_of: None,
            origin: ConfigurationOrigin::of(all),
            socket_lb: Vec::new(),
        })
    }

    /// Returns `NAMESPACE/NAME` of the pod.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.facts.pod.namespace, self.facts.pod.name)
    }
}

/// A rule format, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedFormat {
    /// The format.
    #[serde(serialize_with = "by_name")]
    pub format: RuleFormat,
    /// Where it comes from.
    pub source: String,
}

fn by_name<S: Serializer>(format: &RuleFormat, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(format.name())
}

/// Returns the rule format of a new pod's redirection.
#[must_use]
pub fn planned_format(subject: &Subject) -> PlannedFormat {
    let of_attachments = subject.networks.iter().flat_map(|preview| &preview.evaluated).map(|one| &one.conf);
    let all = || of_attachments.clone().chain([&subject.conf]);
    let runs_executables = all().any(|conf| executables(&conf.chain).next().is_some());
    let (format, source) = match (all().find_map(|conf| conf.rule_format), subject.conf.auto_format) {
        (Some(format), _) => (format, "set by dialect"),
        (None, _) if subject.facts.pod.has_own_users => {
            (RuleFormat::Nftables, "because the pod has its own user namespace (hostUsers: false)")
        }
        (None, _) if runs_executables => (RuleFormat::Iptables, "because the chain runs executables"),
        (None, Some(format)) => (format, "set by auto_dialect of the node"),
        (None, None) => (RuleFormat::default(), "the default"),
    };
    let is_tried = subject.origin.source != ConfigurationSource::Node && all().all(|conf| conf.rule_format.is_none());
    let condition = if is_tried { ", if the kernel has it" } else { "" };
    PlannedFormat { format, source: format!("{source}{condition}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::configuration;

    fn read<'a>(text: &'a str, namespace: Option<&'a str>, selector: &PodSelector<'_>) -> Result<PodManifest, String> {
        let namespace = namespace.map(|text| ("ns".into(), text.to_owned()));
        let texts = ManifestTexts { pods: ("f".into(), text.to_owned()), namespace, definitions: Vec::new() };
        PodManifest::read(&texts, selector).map_err(|error| error.msg)
    }

    fn names(found: &Result<PodManifest, String>) -> Vec<String> {
        found.as_ref().expect("pods").pods.iter().map(ToString::to_string).collect()
    }

    const POD: &str = "kind: Pod\nmetadata: {name: a, namespace: s}\n";
    const NAMESPACE: &str = "kind: Namespace\nmetadata: {name: s, annotations: {k: v}}\n";
    const WEB: &str = "kind: Deployment\nmetadata: {name: web}\nspec: {template: {spec: {containers: [{name: c}]}}}\n";

    #[test]
    fn namespaces_are_read_from_both_texts() {
        let conf = || configuration(Path::new("c"), br#"{"name": "n", "type": "detour"}"#).expect("a configuration");
        let subject = |text: &str, namespace| {
            let found = read(text, namespace, &PodSelector::default()).expect("a pod");
            found.subject(found.one().expect("one"), &[conf().into()]).expect("a subject")
        };
        for subject in [subject(POD, Some(NAMESPACE)), subject(&format!("{POD}---\n{NAMESPACE}"), None)] {
            assert_eq!((subject.name().as_str(), subject.template_of), ("s/a", None));
            assert_eq!(subject.facts.namespace.expect("a namespace").annotations["k"], "v");
        }
        assert_eq!(subject(POD, None).facts.namespace, None);
        assert_eq!(subject(WEB, None).template_of.as_deref(), Some("Deployment default/web"));
    }

    #[test]
    fn pods_are_selected_by_name_and_namespace() {
        let text =
            format!("{POD}---\n{WEB}---\n{}---\nkind: Service\nmetadata: {{name: x}}\n", POD.replace(": a", ": web"));
        let select = |namespace, name| read(&text, None, &PodSelector { namespace, name });
        assert_eq!(names(&select(None, None)), ["Pod s/a", "Deployment default/web", "Pod s/web"]);
        assert_eq!(names(&select(Some("s"), None)), ["Pod s/a", "Deployment s/web", "Pod s/web"]);
        assert_eq!(names(&select(Some("default"), None)), ["Deployment default/web"]);
        assert_eq!(names(&select(None, Some("web"))), ["Deployment default/web", "Pod s/web"]);
        assert_eq!(names(&select(None, Some("deployment/web"))), ["Deployment default/web"]);
        let all = select(None, None).expect("pods");
        assert_eq!(all.skipped().as_deref(), Some("Service x"));
        let message = "f: expected one pod or pod template, got Pod s/a, Deployment default/web, Pod s/web; ";
        assert!(all.one().expect_err("several").msg.starts_with(message));
        let message =
            "f: expected a pod or an object with a pod template named \"b\" in namespace \"s\", got Pod s/a, ";
        assert!(select(Some("s"), Some("b")).expect_err("none").starts_with(message));
        let message = "f: expected a pod or an object with a pod template, got Namespace s, Service x";
        let text = format!("{NAMESPACE}---\nkind: Service\nmetadata: {{name: x}}\n---\n");
        assert_eq!(read(&text, None, &PodSelector::default()).expect_err("none"), message);
        assert!(read("", None, &PodSelector::default()).expect_err("none").ends_with("got no object"));
    }

    #[test]
    fn a_namespace_text_without_the_pods_namespace_is_refused() {
        let both = format!("{POD}---\n{WEB}");
        let other = NAMESPACE.replace("name: s", "name: other");
        let list = format!("{other}---\n{NAMESPACE}");
        let of = |text: &str, namespace: &str| read(text, Some(namespace), &PodSelector::default());
        assert!(of(POD, &list).is_ok());
        for (text, namespace, message) in [
            (POD, POD, "ns: expected Namespace s of Pod s/a, got Pod s/a"),
            (POD, &other, "ns: expected Namespace s of Pod s/a, got Namespace other"),
            (&both, NAMESPACE, "ns: expected Namespace default of Deployment default/web, got Namespace s"),
            (&format!("{POD}---\n{NAMESPACE}"), &other, "ns: expected Namespace s of Pod s/a, got Namespace other"),
            (POD, "", "ns: expected Namespace s of Pod s/a, got no object"),
        ] {
            assert_eq!(of(text, namespace).expect_err("refused"), message);
        }
    }

    #[test]
    fn only_a_single_plugin_applies_as_an_attachment() {
        for (text, expected) in [
            (r#"{"name": "n", "type": "detour"}"#, true),
            (r#"{"name": "n", "type": "detour", "prevResult": {}}"#, false),
            (r#"{"name": "n", "plugins": [{"type": "bridge"}, {"type": "detour"}]}"#, false),
            (r#"{"name": "n", "type": "detour", "clusterNetwork": "a"}"#, false),
        ] {
            let applied = AppliedConf::parse(Path::new("c"), text.as_bytes()).expect(text);
            assert_eq!(applied.as_attachment, expected, "{text}");
        }
    }
}
