//! Objects from manifests that the user passes to a command: YAML with one or more documents, JSON, lists. Pod
//! templates of workloads count as pods.

use super::fact_source::Definitions;
use super::resources::{Definition, DefinitionQuery, Lookup};
use super::{manifests, wire};
use crate::cni::Error;
use crate::pod::{Namespace, Pod};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// A pod, or a workload's pod template as a pod. `Display` gives the object's kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// The object's kind: `Pod`, or the kind of a workload.
    pub kind: String,
    /// The object's name.
    pub name: String,
    /// The pod; for a template, its name ends with `*`.
    pub pod: Pod,
}

impl Given {
    /// Returns whether it is a workload's pod template.
    #[must_use]
    pub fn is_template(&self) -> bool {
        self.kind != manifests::POD.1
    }

    /// Returns whether `name` selects it: the object's name, or `KIND/NAME` as in kubectl.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        match name.split_once('/') {
            Some((kind, name)) => kind.eq_ignore_ascii_case(&self.kind) && name == self.name,
            None => name == self.name,
        }
    }
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.pod.namespace, self.name)
    }
}

/// The objects in a text, each kind in its order.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Pods and pod templates.
    pub pods: Vec<Given>,
    /// Namespaces.
    pub namespaces: Vec<Namespace>,
    /// NetworkAttachmentDefinitions.
    pub definitions: Vec<Definition>,
    /// Kind, namespace and name of objects of other kinds.
    pub others: Vec<String>,
}

impl Objects {
    /// Adds the objects of `other`.
    pub fn extend(&mut self, other: Self) {
        self.pods.extend(other.pods);
        self.namespaces.extend(other.namespaces);
        self.definitions.extend(other.definitions);
        self.others.extend(other.others);
    }
}

/// A source with only these definitions.
impl Definitions for Objects {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        let look_up = |DefinitionQuery { object, .. }: &DefinitionQuery| {
            let found = self.definitions.iter().find(|definition| definition.object == *object);
            found.cloned().map_or_else(|| Lookup::Missing("not found in the given objects".to_owned()), Lookup::Found)
        };
        Ok(wanted.iter().map(look_up).collect())
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        let named = self.definitions.iter().filter(|definition| definition.object.name == name);
        let namespaces: BTreeSet<String> = named.map(|definition| definition.object.namespace.clone()).collect();
        Some(namespaces.into_iter().collect())
    }
}

/// Parses the objects in `text`. `place` is where it comes from, for errors; `namespace` is the namespace of objects
/// without one.
///
/// # Errors
/// The text is not YAML, or a Pod, a pod template, a Namespace or a definition in it is invalid.
pub fn objects(place: &Path, text: &str, namespace: &str) -> Result<Objects, Error> {
    let mut all = Vec::new();
    manifests::documents(place, text, &mut all)?;
    let mut objects = Objects::default();
    for mut manifest in all {
        let title = manifest.title();
        manifest.default_namespace(namespace);
        let given = |pod: wire::PodObject| Given {
            kind: manifest.kind().to_owned(),
            name: manifest.name().to_owned(),
            pod: pod.into(),
        };
        if manifest.is_a(manifests::POD) {
            objects.pods.push(given(manifest.read()?));
        } else if let Some(template) = manifest.template() {
            objects.pods.push(given(template.read_part_of(&title)?));
        } else if manifest.is_a(manifests::NAMESPACE) {
            objects.namespaces.push(manifest.read::<wire::NamespaceObject>()?.into());
        } else if manifest.is_a(manifests::DEFINITION) {
            objects.definitions.push(manifest.read::<wire::DefinitionObject>()?.into());
        } else {
            objects.others.push(title);
        }
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Code;

    #[test]
    fn pods_and_namespaces_are_found_among_other_objects() {
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
        let found = objects(Path::new("-"), text, "default").expect("readable");
        let names: Vec<_> = found.pods.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["Pod shop/web-0", "Pod default/alone"]);
        assert_eq!(found.namespaces[0].name, "shop");
        assert_eq!(found.others, ["Service s"]);
        let of_api = r#"{"kind": "PodList", "items": [{"metadata": {"name": "a"}}]}"#;
        let found = objects(Path::new("-"), of_api, "elsewhere").expect("readable");
        assert_eq!(found.pods[0].to_string(), "Pod elsewhere/a");
    }

    #[test]
    fn a_template_is_a_pod_in_its_workloads_namespace() {
        let spec = "{template: {metadata: {labels: {a: b}}, spec: {hostNetwork: true, containers: [{name: c}]}}}";
        for (kind, rest) in [
            ("Deployment", format!("spec: {spec}")),
            ("StatefulSet", format!("spec: {spec}")),
            ("DaemonSet", format!("spec: {spec}")),
            ("ReplicaSet", format!("spec: {spec}")),
            ("ReplicationController", format!("spec: {spec}")),
            ("DeploymentConfig", format!("spec: {spec}")),
            ("Job", format!("spec: {spec}")),
            ("CronJob", format!("spec: {{jobTemplate: {{spec: {spec}}}}}")),
            ("PodTemplate", spec[1..spec.len() - 1].to_owned()),
        ] {
            let text = format!("kind: {kind}\nmetadata: {{name: web, namespace: shop}}\n{rest}\n");
            let found = objects(Path::new("-"), &text, "default").expect("readable");
            let [given] = &found.pods[..] else { panic!("{kind}: {found:?}") };
            assert_eq!((given.to_string(), given.is_template()), (format!("{kind} shop/web"), true));
            assert_eq!((given.pod.namespace.as_str(), given.pod.name.as_str()), ("shop", "web-*"));
            assert!(given.pod.host_network && given.pod.labels["a"] == "b", "{given:?}");
            assert!(given.is_named("web") && given.is_named(&format!("{}/web", kind.to_lowercase())));
            assert!(!given.is_named("pod/web") && !given.is_named("we"));
        }
        let bare = "kind: Job\nmetadata: {name: j}\nspec: {template: {spec: {containers: [{name: c}]}}}";
        assert_eq!(objects(Path::new("-"), bare, "default").expect("readable").pods[0].pod.namespace, "default");
        for wrong in ["metadata: 7, ", ""] {
            let text = format!(
                "kind: Job\nmetadata: {{name: j}}\nspec: {{template: {{{wrong}spec: {{containers: [{{name: [c]}}]}}}}}}"
            );
            let error = objects(Path::new("f"), &text, "default").expect_err("refused");
            assert!(error.msg.starts_with("manifest f: Job j: "), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_file() {
        let error = objects(Path::new("pod.yaml"), "kind: Pod\nmetadata: {name: [1]}", "default").expect_err("no name");
        assert!(error.msg.starts_with("manifest pod.yaml: "), "{error}");
        assert!(objects(Path::new("-"), "a: [", "default").is_err());
    }

    /// Nested aliases, an alias of a long text, many values, many levels.
    #[test]
    fn a_short_text_can_not_expand_without_limit() {
        let started = std::time::Instant::now();
        let levels =
            (1..12).map(|level| format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 10].join(",")));
        let multiplied = format!("a0: &a0 [1]\n{}", levels.collect::<String>());
        let long = format!("x: &a {}\ny: [{}]\n", "z".repeat(65536), vec!["*a"; 40_000].join(","));
        for bomb in [multiplied, long, format!("y: [{}]\n", "[],".repeat(300_000)), "[".repeat(100_000)] {
            let error = objects(Path::new("-"), &bomb, "default").expect_err("a bomb");
            assert_eq!(error.code, Code::InvalidConfig);
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
    }
}
