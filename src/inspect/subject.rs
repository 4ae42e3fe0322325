//! The subject of a question: a pod, its namespace where that is known, and the configuration.

use crate::cluster::{self, Cluster, Given, Objects};
use crate::cni::{Code, Error, NetConf, configuration};
use crate::plugin::primary::{Preview, preview};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The most objects that a message lists.
const LISTED: usize = 10;

/// A pod under a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The configuration.
    pub conf: NetConf,
    /// Whether the configuration applies only to pods that select its network, as Multus runs it.
    pub as_attachment: bool,
    /// The pod, and its namespace where that is known.
    pub facts: Facts,
    /// The object whose pod template the pod is: its kind, namespace and name.
    pub template_of: Option<String>,
    /// Its networks, where the configuration is a primary plugin's.
    pub networks: Option<Preview>,
}

/// A configuration, and which pods it applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// The configuration.
    pub conf: NetConf,
    /// Whether it applies only to pods that select its network.
    pub as_attachment: bool,
}

impl Applied {
    /// Parses a file as [`configuration`] does. A plugin list, a primary plugin and the stdin of a plugin in a list
    /// (it has `prevResult`) apply to every pod; Multus runs every other plugin for the pods that select its network.
    ///
    /// # Errors
    /// As [`configuration`].
    pub fn read(place: &Path, text: &[u8]) -> Result<Self, Error> {
        let conf = configuration(place, text)?;
        let is_list = serde_json::from_slice::<Value>(text).is_ok_and(|value| value.get("plugins").is_some());
        let as_attachment = !is_list && conf.primary.is_none() && conf.prev_result.is_none();
        Ok(Self { conf, as_attachment })
    }
}

/// A configuration that applies to every pod.
impl From<NetConf> for Applied {
    fn from(conf: NetConf) -> Self {
        Self { conf, as_attachment: false }
    }
}

/// The texts that describe pods, each with its place.
#[derive(Debug)]
pub struct Texts<'a> {
    /// The pods, their namespaces, and the definitions of their networks.
    pub pods: (&'a Path, &'a str),
    /// Namespaces of the pods; they take precedence.
    pub namespace: Option<(&'a Path, &'a str)>,
    /// Definitions of the pods' networks; they take precedence.
    pub definitions: Vec<(&'a Path, &'a str)>,
}

/// Which of the pods are meant; by default all.
#[derive(Debug, Default)]
pub struct Choice<'a> {
    /// Those of this namespace; objects that name none are in it.
    pub namespace: Option<&'a str>,
    /// The object of this name, or `KIND/NAME`.
    pub name: Option<&'a str>,
}

/// Pods and pod templates as manifests describe them, with the other objects that they hold.
#[derive(Debug)]
pub struct PodManifest {
    /// The pods that are meant; at least one.
    pub pods: Vec<Given>,
    place: PathBuf,
    objects: Objects,
}

impl PodManifest {
    /// Reads the texts.
    ///
    /// # Errors
    /// A text can't be understood, none of the pods is meant, or the text for namespaces holds none of theirs.
    pub fn read(texts: &Texts<'_>, choice: &Choice<'_>) -> Result<Self, Error> {
        let namespace = choice.namespace.unwrap_or("default");
        let read = |(place, text): (&Path, &str)| cluster::objects(place, text, namespace);
        let mut objects = Objects::default();
        for text in &texts.definitions {
            objects.extend(Objects { pods: Vec::new(), others: Vec::new(), ..read(*text)? });
        }
        let named = texts.namespace.map(|text| Ok((text.0, read(text)?))).transpose()?;
        let found = read(texts.pods)?;
        let is_meant = |given: &&Given| {
            choice.namespace.is_none_or(|namespace| given.pod.namespace == namespace)
                && choice.name.is_none_or(|name| given.is_named(name))
        };
        let pods: Vec<Given> = found.pods.iter().filter(is_meant).cloned().collect();
        let place = texts.pods.0.to_owned();
        if pods.is_empty() {
            return Err(none_is_meant(&place, choice, &found));
        }
        if let Some((place, named)) = named {
            check_namespaces(place, &named, &pods, &found.namespaces)?;
            objects.extend(Objects { pods: Vec::new(), others: Vec::new(), ..named });
        }
        objects.extend(found);
        Ok(Self { pods, place, objects })
    }

    /// The only pod.
    ///
    /// # Errors
    /// There are several.
    pub fn one(&self) -> Result<&Given, Error> {
        match &self.pods[..] {
            [one] => Ok(one),
            several => {
                let msg = format!(
                    "{}: expected one pod or pod template, got {}; add the name of one to the command",
                    self.place.display(),
                    listed(several.iter().map(ToString::to_string).collect())
                );
                Err(Error::new(Code::InvalidConfig, msg))
            }
        }
    }

    /// The objects that have no pod and describe none: kind, namespace and name.
    #[must_use]
    pub fn skipped(&self) -> Option<String> {
        (!self.objects.others.is_empty()).then(|| listed(self.objects.others.clone()))
    }

    /// A pod of it under a configuration.
    ///
    /// # Errors
    /// For a primary plugin, those of an ADD about the pod's networks.
    pub fn subject(&self, given: &Given, conf: impl Into<Applied>) -> Result<Subject, Error> {
        let pod = given.pod.clone();
        let namespace = self.objects.namespaces.iter().find(|namespace| namespace.name == pod.namespace).cloned();
        let subject = Subject::of(conf, Facts { pod, namespace }, Some(&self.objects))?;
        Ok(Subject { template_of: given.is_template().then(|| given.to_string()), ..subject })
    }
}

fn none_is_meant(place: &Path, Choice { namespace, name }: &Choice<'_>, found: &Objects) -> Error {
    let pods: Vec<String> = found.pods.iter().map(ToString::to_string).collect();
    let msg = if pods.is_empty() {
        format!("expected a pod or an object with a pod template, got {}", listed(titles(found)))
    } else {
        let name = name.map(|name| format!(" named {name:?}")).unwrap_or_default();
        let namespace = namespace.map(|namespace| format!(" in namespace {namespace:?}")).unwrap_or_default();
        format!("expected a pod or an object with a pod template{name}{namespace}, got {}", listed(pods))
    };
    Error::new(Code::InvalidConfig, format!("{}: {msg}", place.display()))
}

/// The text for namespaces has that of a pod, and each pod's namespace is in it if it is in no other text.
fn check_namespaces(place: &Path, named: &Objects, pods: &[Given], others: &[Namespace]) -> Result<(), Error> {
    let has = |namespaces: &[Namespace], pod: &Pod| namespaces.iter().any(|namespace| namespace.name == pod.namespace);
    let is_used = pods.iter().any(|given| has(&named.namespaces, &given.pod));
    let is_there = |given: &Given| has(&named.namespaces, &given.pod) || (is_used && has(others, &given.pod));
    let Some(given) = pods.iter().find(|given| !is_there(given)) else { return Ok(()) };
    let msg = format!(
        "{}: expected Namespace {}, which is that of {given}, got {}",
        place.display(),
        given.pod.namespace,
        listed(titles(named))
    );
    Err(Error::new(Code::InvalidConfig, msg))
}

/// Every object that was found.
fn titles(found: &Objects) -> Vec<String> {
    let pods = found.pods.iter().map(ToString::to_string);
    let namespaces = found.namespaces.iter().map(|namespace| format!("Namespace {}", namespace.name));
    let definitions =
        found.definitions.iter().map(|definition| format!("NetworkAttachmentDefinition {}", definition.object));
    pods.chain(namespaces).chain(definitions).chain(found.others.iter().cloned()).collect()
}

fn listed(mut titles: Vec<String>) -> String {
    let more = titles.len().saturating_sub(LISTED);
    titles.truncate(LISTED);
    match (titles.is_empty(), more) {
        (true, _) => "no object".to_owned(),
        (_, 0) => titles.join(", "),
        _ => format!("{} and {more} more", titles.join(", ")),
    }
}

impl Subject {
    /// Of these facts; `cluster` has the definitions of the pod's networks.
    ///
    /// # Errors
    /// For a primary plugin, those of an ADD about the pod's networks.
    pub(super) fn of(conf: impl Into<Applied>, facts: Facts, cluster: Option<&dyn Cluster>) -> Result<Self, Error> {
        let Applied { conf, as_attachment } = conf.into();
        let networks = conf.primary.as_ref().map(|primary| preview(&conf, primary, cluster, &facts.pod));
        Ok(Self { networks: networks.transpose()?, conf, as_attachment, facts, template_of: None })
    }

    /// From the API server of `kubeconfig`, which the user names; else from the source of facts that the
    /// configuration names; else as a pod of the cluster asks.
    ///
    /// # Errors
    /// No source of facts is configured, or it does not know the pod.
    pub fn of_cluster(
        conf: impl Into<Applied>,
        kubeconfig: Option<PathBuf>,
        (namespace, name): (&str, &str),
    ) -> Result<Self, Error> {
        let Applied { mut conf, as_attachment } = conf.into();
        let source = match kubeconfig {
            Some(path) => {
                conf.kubernetes.kubeconfig = Some(path.clone());
                conf.kubernetes.manifests_dir = None;
                cluster::source_of_user(path, conf.kubernetes.timeout)
            }
            None => cluster::source_or_in_cluster(&conf.kubernetes).ok_or_else(|| {
                let msg = "no kubeconfig: give --kubeconfig, set KUBECONFIG or write ~/.kube/config";
                Error::new(Code::InvalidConfig, msg)
            })?,
        };
        let wanted = PodRef { namespace: namespace.to_owned(), name: name.to_owned(), uid: None };
        let facts = source.facts(&wanted, true)?;
        Self::of(Applied { conf, as_attachment }, facts, Some(source.as_ref()))
    }

    /// The pod's name with its namespace's.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.facts.pod.namespace, self.facts.pod.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a>(text: &'a str, namespace: Option<&'a str>, choice: &Choice<'_>) -> Result<PodManifest, String> {
        let namespace = namespace.map(|text| (Path::new("ns"), text));
        let texts = Texts { pods: (Path::new("f"), text), namespace, definitions: Vec::new() };
        PodManifest::read(&texts, choice).map_err(|error| error.msg)
    }

    fn names(found: &Result<PodManifest, String>) -> Vec<String> {
        found.as_ref().expect("pods").pods.iter().map(ToString::to_string).collect()
    }

    const POD: &str = "kind: Pod\nmetadata: {name: a, namespace: s}\n";
    const NAMESPACE: &str = "kind: Namespace\nmetadata: {name: s, annotations: {k: v}}\n";
    const WEB: &str = "kind: Deployment\nmetadata: {name: web}\nspec: {template: {spec: {containers: [{name: c}]}}}\n";

    #[test]
    fn a_pod_has_its_namespace_from_either_text() {
        let conf = || configuration(Path::new("c"), br#"{"name": "n", "type": "detour"}"#).expect("a configuration");
        let subject = |text: &str, namespace| {
            let found = read(text, namespace, &Choice::default()).expect("a pod");
            found.subject(found.one().expect("one"), conf()).expect("a subject")
        };
        for subject in [subject(POD, Some(NAMESPACE)), subject(&format!("{POD}---\n{NAMESPACE}"), None)] {
            assert_eq!((subject.name().as_str(), subject.template_of), ("s/a", None));
            assert_eq!(subject.facts.namespace.expect("a namespace").annotations["k"], "v");
        }
        assert_eq!(subject(POD, None).facts.namespace, None);
        assert_eq!(subject(WEB, None).template_of.as_deref(), Some("Deployment default/web"));
    }

    #[test]
    fn several_are_chosen_by_name_and_namespace() {
        let text =
            format!("{POD}---\n{WEB}---\n{}---\nkind: Service\nmetadata: {{name: x}}\n", POD.replace(": a", ": web"));
        let choose = |namespace, name| read(&text, None, &Choice { namespace, name });
        assert_eq!(names(&choose(None, None)), ["Pod s/a", "Deployment default/web", "Pod s/web"]);
        assert_eq!(names(&choose(Some("s"), None)), ["Pod s/a", "Deployment s/web", "Pod s/web"]);
        assert_eq!(names(&choose(Some("default"), None)), ["Deployment default/web"]);
        assert_eq!(names(&choose(None, Some("web"))), ["Deployment default/web", "Pod s/web"]);
        assert_eq!(names(&choose(None, Some("deployment/web"))), ["Deployment default/web"]);
        let all = choose(None, None).expect("pods");
        assert_eq!(all.skipped().as_deref(), Some("Service x"));
        let said = "f: expected one pod or pod template, got Pod s/a, Deployment default/web, Pod s/web; ";
        assert!(all.one().expect_err("several").msg.starts_with(said));
        let said = "f: expected a pod or an object with a pod template named \"b\" in namespace \"s\", got Pod s/a, ";
        assert!(choose(Some("s"), Some("b")).expect_err("none").starts_with(said));
        let said = "f: expected a pod or an object with a pod template, got Namespace s, Service x";
        let text = format!("{NAMESPACE}---\nkind: Service\nmetadata: {{name: x}}\n---\n");
        assert_eq!(read(&text, None, &Choice::default()).expect_err("none"), said);
        assert!(read("", None, &Choice::default()).expect_err("none").ends_with("got no object"));
    }

    #[test]
    fn a_text_for_namespaces_without_the_pods_is_refused() {
        let both = format!("{POD}---\n{WEB}");
        let other = NAMESPACE.replace("name: s", "name: other");
        let list = format!("{other}---\n{NAMESPACE}");
        let with_its_own = format!("{POD}---\n{WEB}---\n{}", NAMESPACE.replace("name: s", "name: default"));
        let of = |text: &str, namespace: &str| read(text, Some(namespace), &Choice::default());
        assert!(of(POD, &list).is_ok() && of(&with_its_own, NAMESPACE).is_ok());
        for (text, namespace, said) in [
            (POD, POD, "ns: expected Namespace s, which is that of Pod s/a, got Pod s/a"),
            (POD, &other, "ns: expected Namespace s, which is that of Pod s/a, got Namespace other"),
            (
                &both,
                NAMESPACE,
                "ns: expected Namespace default, which is that of Deployment default/web, got Namespace s",
            ),
            (
                &format!("{POD}---\n{NAMESPACE}"),
                &other,
                "ns: expected Namespace s, which is that of Pod s/a, got Namespace other",
            ),
            (POD, "", "ns: expected Namespace s, which is that of Pod s/a, got no object"),
        ] {
            assert_eq!(of(text, namespace).expect_err("refused"), said);
        }
    }

    #[test]
    fn a_single_plugin_applies_as_an_attachment() {
        for (text, expected) in [
            (r#"{"name": "n", "type": "detour"}"#, true),
            (r#"{"name": "n", "type": "detour", "prevResult": {}}"#, false),
            (r#"{"name": "n", "plugins": [{"type": "bridge"}, {"type": "detour"}]}"#, false),
            (r#"{"name": "n", "type": "detour", "clusterNetwork": "a"}"#, false),
        ] {
            let applied = Applied::read(Path::new("c"), text.as_bytes()).expect(text);
            assert_eq!(applied.as_attachment, expected, "{text}");
        }
    }
}
