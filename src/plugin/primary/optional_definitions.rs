//! A source of definitions for a pod that needs only the networks of the configuration: while the source is
//! unavailable, the files of these networks are used.

use crate::cluster::{DefinitionQuery, Definitions, Lookup};
use crate::cni::Error;
use std::cell::OnceCell;

/// A source that reports definitions as missing if it can't look them up.
pub(super) struct OptionalDefinitions<'a> {
    source: &'a dyn Definitions,
    failure: OnceCell<Error>,
}

impl<'a> OptionalDefinitions<'a> {
    pub(super) fn of(source: &'a dyn Definitions) -> Self {
        Self { source, failure: OnceCell::new() }
    }

    /// Returns why definitions could not be looked up.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }
}

impl Definitions for OptionalDefinitions<'_> {
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
}
