//! Whom a question is about: a pod, its namespace where that is known, and the configuration.

use crate::cluster::{self, Cluster, Objects};
use crate::cni::{Code, Error, NetConf};
use crate::plugin::primary::{Together, together};
use crate::pod::{Facts, PodRef};
use std::path::{Path, PathBuf};

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

/// A pod as manifests describe it, with the other objects that they hold.
#[derive(Debug)]
pub struct Manifest {
    facts: Facts,
    objects: Objects,
}

impl Manifest {
    /// Reads the text of a manifest that holds one pod. Its namespace and the definitions of its networks
    /// may be in the same text, or in `others`, which take precedence.
    ///
    /// # Errors
    /// There is no pod in it or more than one, or the texts can't be understood.
    pub fn read<'a>(
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
        Ok(Self { facts: Facts { pod, namespace }, objects })
    }

    /// The pod under a configuration.
    ///
    /// # Errors
    /// For a primary plugin, those of an ADD about the pod's networks.
    pub fn subject(self, conf: NetConf) -> Result<Subject, Error> {
        Subject::of(conf, self.facts, Some(&self.objects))
    }
}

impl Subject {
    /// Of these facts; `cluster` has the definitions of the pod's networks.
    ///
    /// # Errors
    /// For a primary plugin, those of an ADD about the pod's networks.
    pub(super) fn of(conf: NetConf, facts: Facts, cluster: Option<&dyn Cluster>) -> Result<Self, Error> {
        let networks = conf.primary.as_ref().map(|primary| together(&conf, primary, cluster, &facts.pod));
        Ok(Self { networks: networks.transpose()?, conf, facts })
    }

    /// From the API server of `kubeconfig`, which the user names; else from the source of facts that the
    /// configuration names; else as a pod of the cluster asks.
    ///
    /// # Errors
    /// No source of facts is configured, or it does not know the pod.
    pub fn of_cluster(
        mut conf: NetConf,
        kubeconfig: Option<PathBuf>,
        (namespace, name): (&str, &str),
    ) -> Result<Self, Error> {
        let source = match kubeconfig {
            Some(path) => {
                conf.kubernetes.kubeconfig = Some(path.clone());
                conf.kubernetes.manifests_dir = None;
                cluster::source_of_user(path, conf.kubernetes.timeout)
            }
            None => cluster::source_or_in_cluster(&conf.kubernetes).ok_or_else(|| {
                let msg = "no kubeconfig: give --kubeconfig or set KUBECONFIG";
                Error::new(Code::InvalidConfig, msg)
            })?,
        };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::configuration;

    #[test]
    fn a_text_must_hold_one_pod() {
        let conf = || configuration(Path::new("c"), br#"{"name": "n", "type": "detour"}"#).expect("a configuration");
        let of_manifest = |manifest, others: Option<(&Path, &str)>| Manifest::read(manifest, others)?.subject(conf());
        let pod = "kind: Pod\nmetadata: {name: a, namespace: s}";
        let namespace = "kind: Namespace\nmetadata: {name: s, annotations: {k: v}}";
        let place = Path::new("-");
        let subject = of_manifest((place, pod), Some((place, namespace))).expect("a pod");
        assert_eq!(subject.name(), "s/a");
        assert_eq!(subject.facts.namespace.expect("a namespace").annotations["k"], "v");
        let alone = of_manifest((place, pod), None).expect("a pod");
        assert_eq!(alone.facts.namespace, None);
        for (text, count) in [(namespace, "0 objects"), (&format!("{pod}\n---\n{pod}"), "2 objects")] {
            let error = of_manifest((place, text), None).expect_err("refused");
            assert!(error.msg.contains(count), "{error}");
        }
    }
}
