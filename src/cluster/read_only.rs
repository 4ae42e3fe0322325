//! A source of facts that nothing is told to.

use super::{Cluster, Event, Lookup, DefinitionQuery};
use crate::cni::Error;
use crate::pod::{Facts, Namespace, Pod, PodRef};

/// Another source, for whoever only wants to know.
pub struct ReadOnly<'a>(pub &'a dyn Cluster);

impl Cluster for ReadOnly<'_> {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.0.facts(wanted, with_namespace)
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        self.0.namespace(wanted)
    }

    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        self.0.definitions(wanted)
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        self.0.namespaces_with_definition(name)
    }

    fn report(&self, _: &Pod, _: Option<&str>, _: &[Event]) -> Result<(), Error> {
        Ok(())
    }

    fn probe(&self) -> Result<(), Error> {
        self.0.probe()
    }
}
