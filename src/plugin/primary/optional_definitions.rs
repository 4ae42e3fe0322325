//! A source of definitions for a pod that needs only the networks of the configuration: while the source is
//! unavailable, the files of these networks are used.

use crate::cluster::{Cluster, DefinitionQuery, Event, Lookup};
use crate::cni::Error;
use crate::pod::{Facts, Namespace, Pod, PodRef};
use std::cell::OnceCell;

/// A source that reports definitions as missing if it can't look them up.
pub(super) struct OptionalDefinitions<'a> {
    source: &'a dyn Cluster,
    failure: OnceCell<Error>,
}

impl<'a> OptionalDefinitions<'a> {
    pub(super) fn of(source: &'a dyn Cluster) -> Self {
        Self { source, failure: OnceCell::new() }
    }

    /// Returns why definitions could not be looked up.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }
}

impl Cluster for OptionalDefinitions<'_> {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.source.facts(wanted, with_namespace)
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        self.source.namespace(wanted)
    }

    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        self.source.definitions(wanted).or_else(|error| {
            tracing::info!("the networks of the configuration are read from files, without definitions: {error}");
            let missing = |_: &DefinitionQuery| Lookup::Missing(error.to_string());
            let all = wanted.iter().map(missing).collect();
            self.failure.get_or_init(|| error);
            Ok(all)
        })
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        self.source.namespaces_with_definition(name)
    }

    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        self.source.report(pod, status, events)
    }

    fn probe(&self) -> Result<(), Error> {
        self.source.probe()
    }
}
