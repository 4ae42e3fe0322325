//! Whom a question is about: a pod, its namespace where that is known, and the configuration.

use crate::cluster::{self, Cluster, Objects};
use crate::cni::{Code, Command, Error, NetConf};
use crate::plugin::primary::{Together, together};
use crate::pod::{Facts, PodRef};
use serde_json::Value;
use std::path::Path;

/// The types of a configuration that are ours.
pub(super) const OWN_TYPES: [&str; 3] = ["detour", "istio-cni", "excludedns"];

/// A pod under a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The configuration.
    pub conf: NetConf,
    /// The pod, and its namespace where that is known.
    pub facts: Facts,
    /// Its networks, where the configuration is a primary plugin's.
    pub networks: Option<Together>,
}

impl Subject {
    /// From the text of a manifest that holds one pod. Its namespace and the definitions of its networks
    /// may stand there too, or in `others`, which win.
    ///
    /// # Errors
    /// There is no pod in it or more than one, or the texts can't be understood; for a primary plugin, those
    /// of an ADD about the pod's networks.
    pub fn of_manifest<'a>(
        conf: NetConf,
        (place, text): (&Path, &str),
        others: impl IntoIterator<Item = (&'a Path, &'a str)>,
    ) -> Result<Self, Error> {
        let mut objects = Objects::default();
        for (place, text) in others {
            objects.extend(Objects { pods: Vec::new(), ..cluster::objects(place, text)? });
        }
        objects.extend(cluster::objects(place, text)?);
        let found = objects.pods.len();
        let (Some(pod), 1) = (objects.pods.pop(), found) else {
            let msg = format!(
                "{}: {found} objects of kind Pod; give one, as kubectl get pod NAME -o yaml prints it after injection",
                place.display()
            );
            return Err(Error::new(Code::InvalidConfig, msg));
        };
        let namespace = objects.namespaces.iter().find(|namespace| namespace.name == pod.namespace).cloned();
        Self::of(conf, Facts { pod, namespace }, Some(&objects))
    }

    /// Of these facts; `cluster` has the definitions of the pod's networks.
    ///
    /// # Errors
    /// For a primary plugin, those of an ADD about the pod's networks.
    pub(super) fn of(conf: NetConf, facts: Facts, cluster: Option<&dyn Cluster>) -> Result<Self, Error> {
        let networks = conf.primary.as_ref().map(|primary| together(&conf, primary, cluster, &facts.pod));
        Ok(Self { networks: networks.transpose()?, conf, facts })
    }

    /// From the source of facts that the configuration names, else as a pod of the cluster asks.
    ///
    /// # Errors
    /// There is neither, or the pod can't be had from it.
    pub fn of_cluster(conf: NetConf, namespace: &str, name: &str) -> Result<Self, Error> {
        let source = cluster::source_or_in_cluster(&conf.kubernetes).ok_or_else(|| {
            let msg = "no kubeconfig: give --kubeconfig or set KUBECONFIG";
            Error::new(Code::InvalidConfig, msg)
        })?;
        let wanted = PodRef { namespace: namespace.to_owned(), name: name.to_owned(), uid: None };
        let facts = source.facts(&wanted, true)?;
        Self::of(conf, facts, Some(source.as_ref()))
    }

    /// The pod's name with its namespace's.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.facts.pod.namespace, self.facts.pod.name)
    }
}

/// Understands a plugin's configuration, or a plugin list by that of its members which is ours.
///
/// # Errors
/// It is no JSON, holds no plugin of ours or more than one, or what it says is wrong.
pub fn configuration(place: &Path, text: &[u8]) -> Result<NetConf, Error> {
    let about = |error: Error| Error { msg: format!("{}: {}", place.display(), error.msg), ..error };
    let value: Value = serde_json::from_slice(text)
        .map_err(|error| about(Error::new(Code::Decode, format!("it is not JSON: {error}"))))?;
    let Some(plugins) = value.get("plugins").and_then(Value::as_array) else {
        return NetConf::parse(text, Command::Add, "detour").map_err(about);
    };
    let kind = |plugin: &&Value| plugin["type"].as_str().unwrap_or_default().to_owned();
    let ours: Vec<&Value> = plugins.iter().filter(|plugin| OWN_TYPES.contains(&kind(plugin).as_str())).collect();
    let [one] = ours[..] else {
        let types: Vec<String> = plugins.iter().map(|plugin| kind(&plugin)).collect();
        let own = OWN_TYPES.join(", ");
        let msg = format!(
            "plugins: {} of type {own}, wanted is one; the list has {}; give a file with that plugin alone",
            ours.len(),
            types.join(", ")
        );
        return Err(about(Error::new(Code::InvalidConfig, msg)));
    };
    let mut plugin = one.clone();
    for key in ["name", "cniVersion"] {
        plugin[key] = value[key].clone();
    }
    NetConf::parse(plugin.to_string().as_bytes(), Command::Add, "detour").map_err(about)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(value: &Value) -> Result<NetConf, Error> {
        configuration(Path::new("c"), value.to_string().as_bytes())
    }

    #[test]
    fn a_plugin_or_the_one_of_a_list_that_is_ours() {
        let plugin = of(&json!({"name": "n", "type": "istio-cni", "prevResult": {}})).expect("a plugin");
        assert_eq!((plugin.name.as_str(), plugin.kind.as_str()), ("n", "istio-cni"));
        let list = json!({"name": "l", "cniVersion": "1.0.0", "plugins": [{"type": "bridge"}, {"type": "detour"}]});
        let list = of(&list).expect("a list");
        assert_eq!((list.name.as_str(), list.cni_version.as_str(), list.chain.len()), ("l", "1.0.0", 3));
    }

    #[test]
    fn a_list_without_ours_or_with_two_is_refused_by_what_it_has() {
        for (plugins, start) in [
            (json!([{"type": "bridge"}]), "c: plugins: 0 of type detour, istio-cni, excludedns"),
            (json!([{"type": "detour"}, {"type": "istio-cni"}]), "c: plugins: 2 of type "),
        ] {
            let error = of(&json!({"name": "l", "plugins": plugins})).expect_err("refused");
            assert!(error.msg.starts_with(start) && error.msg.contains("the list has "), "{error}");
        }
        assert!(configuration(Path::new("c"), b"x").expect_err("no JSON").msg.starts_with("c: it is not JSON"));
    }

    #[test]
    fn a_text_must_hold_one_pod() {
        let conf = || of(&json!({"name": "n", "type": "detour"})).expect("a configuration");
        let pod = "kind: Pod\nmetadata: {name: a, namespace: s}";
        let namespace = "kind: Namespace\nmetadata: {name: s, annotations: {k: v}}";
        let place = Path::new("-");
        let subject = Subject::of_manifest(conf(), (place, pod), Some((place, namespace))).expect("a pod");
        assert_eq!(subject.name(), "s/a");
        assert_eq!(subject.facts.namespace.expect("a namespace").annotations["k"], "v");
        let alone = Subject::of_manifest(conf(), (place, pod), None).expect("a pod");
        assert_eq!(alone.facts.namespace, None);
        for (text, count) in [(namespace, "0 objects"), (&format!("{pod}\n---\n{pod}"), "2 objects")] {
            let error = Subject::of_manifest(conf(), (place, text), None).expect_err("refused");
            assert!(error.msg.contains(count), "{error}");
        }
    }
}
