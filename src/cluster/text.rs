//! Objects from a text that somebody hands over: YAML of one or more documents, JSON, lists.

use super::{Cluster, Definition, Event, Lookup, Sought, manifests, wire};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use std::collections::BTreeSet;
use std::path::Path;

/// What is found in a text; objects of other kinds are passed over.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Its pods, in their order.
    pub pods: Vec<Pod>,
    /// Its namespaces, in their order.
    pub namespaces: Vec<Namespace>,
    /// Its NetworkAttachmentDefinitions, in their order.
    pub definitions: Vec<Definition>,
}

impl Objects {
    /// Adds what `other` holds.
    pub fn extend(&mut self, other: Self) {
        self.pods.extend(other.pods);
        self.namespaces.extend(other.namespaces);
        self.definitions.extend(other.definitions);
    }
}

/// A cluster that has these objects and no others. Nothing is told to it.
impl Cluster for Objects {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let is = |pod: &&Pod| pod.namespace == wanted.namespace && pod.name == wanted.name && pod.is(wanted);
        let pod = self.pods.iter().find(is).cloned().ok_or_else(|| unknown("Pod", &wanted.name))?;
        let namespace = if with_namespace { Some(self.namespace(wanted)?) } else { None };
        Ok(Facts { pod, namespace })
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let found = self.namespaces.iter().find(|namespace| namespace.name == wanted.namespace);
        found.cloned().ok_or_else(|| unknown("Namespace", &wanted.namespace))
    }

    fn definitions(&self, wanted: &[Sought]) -> Result<Vec<Lookup>, Error> {
        let look_up = |Sought { object, .. }: &Sought| {
            let found = self.definitions.iter().find(|definition| definition.object == *object);
            found.cloned().map_or_else(|| Lookup::Missing("it is not among the given ones".to_owned()), Lookup::Found)
        };
        Ok(wanted.iter().map(look_up).collect())
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        let named = self.definitions.iter().filter(|definition| definition.object.name == name);
        let namespaces: BTreeSet<String> = named.map(|definition| definition.object.namespace.clone()).collect();
        Some(namespaces.into_iter().collect())
    }

    fn report(&self, _: &Pod, _: Option<&str>, _: &[Event]) -> Result<(), Error> {
        Ok(())
    }

    fn probe(&self) -> Result<(), Error> {
        Ok(())
    }
}

fn unknown(kind: &str, name: &str) -> Error {
    Error::new(Code::PodUnknown, format!("{kind} {name} is not among the given objects"))
}

/// Reads `text`, which comes from `place`.
///
/// # Errors
/// It is no YAML, or a Pod, a Namespace or a definition in it is none that the API would take.
pub fn objects(place: &Path, text: &str) -> Result<Objects, Error> {
    let mut all = Vec::new();
    manifests::documents(place, text, &mut all)?;
    let mut objects = Objects::default();
    for manifest in all {
        if manifest.is_a(manifests::POD) {
            objects.pods.push(manifest.read::<wire::Pod>()?.into());
        } else if manifest.is_a(manifests::NAMESPACE) {
            objects.namespaces.push(manifest.read::<wire::Namespace>()?.into());
        } else if manifest.is_a(manifests::DEFINITION) {
            objects.definitions.push(manifest.read::<wire::Definition>()?.into());
        }
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_and_namespaces_are_found_among_whatever_else_there_is() {
        let text = "
kind: Service
metadata: {name: s}
---
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Namespace, metadata: {name: shop}}
- {apiVersion: v1, kind: Pod, metadata: {name: web-0, namespace: shop}, spec: {containers: [{name: web}]}}
---
kind: Pod
metadata: {name: alone}
";
        let found = objects(Path::new("-"), text).expect("readable");
        let names: Vec<_> = found.pods.iter().map(|p| format!("{}/{}", p.namespace, p.name)).collect();
        assert_eq!(names, ["shop/web-0", "default/alone"]);
        assert_eq!(found.namespaces[0].name, "shop");
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let error = objects(Path::new("pod.yaml"), "kind: Pod\nmetadata: {name: [1]}").expect_err("no name");
        assert!(error.msg.starts_with("manifest pod.yaml: "), "{error}");
        assert!(objects(Path::new("-"), "a: [").is_err());
    }
    /// Aliases that multiply, an alias of a long text, many values, many levels.
    #[test]
    fn a_short_text_can_not_become_large() {
        let started = std::time::Instant::now();
        let levels =
            (1..12).map(|level| format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 10].join(",")));
        let multiplied = format!("a0: &a0 [1]\n{}", levels.collect::<String>());
        let long = format!("x: &a {}\ny: [{}]\n", "z".repeat(65536), vec!["*a"; 40_000].join(","));
        for bomb in [multiplied, long, format!("y: [{}]\n", "[],".repeat(300_000)), "[".repeat(100_000)] {
            let error = objects(Path::new("-"), &bomb).expect_err("a bomb");
            assert_eq!(error.code, Code::InvalidConfig);
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(20), "{:?}", started.elapsed());
    }
}
