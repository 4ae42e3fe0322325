//! Objects from a text that somebody hands over: YAML of one or more documents, JSON, lists.

use super::{manifests, wire};
use crate::cni::Error;
use crate::pod::{Namespace, Pod};
use std::path::Path;

/// What is found in a text; objects of other kinds are passed over.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Its pods, in their order.
    pub pods: Vec<Pod>,
    /// Its namespaces, in their order.
    pub namespaces: Vec<Namespace>,
}

/// Reads `text`, which comes from `place`.
///
/// # Errors
/// It is no YAML, or a Pod or Namespace in it is none that the API would take.
pub fn objects(place: &Path, text: &str) -> Result<Objects, Error> {
    let mut all = Vec::new();
    manifests::documents(place, text, &mut all)?;
    let mut objects = Objects::default();
    for manifest in all {
        if manifest.is_a(manifests::POD) {
            objects.pods.push(manifest.read::<wire::Pod>()?.into());
        } else if manifest.is_a(manifests::NAMESPACE) {
            objects.namespaces.push(manifest.read::<wire::Namespace>()?.into());
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
}
