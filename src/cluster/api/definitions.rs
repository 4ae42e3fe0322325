//! NetworkAttachmentDefinitions from the API.

use super::{Api, all, check_names, get};
use crate::cluster::query::Object;
use crate::cluster::retry::{AttemptError, RetriesExhausted, retry};
use crate::cluster::{Lookup, DefinitionQuery, wire};
use crate::cni::Error;
use std::time::{Duration, Instant};

/// How long a list may take that only makes an error's message better.
const LIST: Duration = Duration::from_secs(2);

impl Api {
    /// All at the same time.
    pub(in crate::cluster) fn look_up(&self, started: Instant, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let names = wanted.iter().flat_map(|DefinitionQuery { object, .. }| [&object.namespace, &object.name]);
        check_names("NetworkAttachmentDefinition", names)?;
        let session = self.session()?;
        let one = async |sought: &DefinitionQuery| {
            let query = self.query(session, Object::Definition(&sought.object));
            let attempt = async || match get::<wire::DefinitionObject>(session, &query).await {
                Ok(definition) => Ok(Lookup::Found(definition.into())),
                Err(AttemptError::Missing(cause)) if !sought.awaited => Ok(Lookup::Missing(format!("{query}: {cause}"))),
                Err(failure) => Err(failure),
            };
            match self.retry(started, &query, attempt).await {
                Ok(lookup) => Ok(lookup),
                Err(end @ RetriesExhausted { last: AttemptError::Missing(_), .. }) => Ok(Lookup::Missing(query.missing(end))),
                Err(end) => Err(query.gave_up(end)),
            }
        };
        session.run(all(wanted.iter().map(one)))
    }

    /// The namespaces that have a definition of this name, sorted; one try.
    pub(super) fn list_namespaces(&self, name: &str) -> Result<Vec<String>, Error> {
        check_names("NetworkAttachmentDefinition", [&name.to_owned()])?;
        let session = self.session()?;
        let query = self.query(session, Object::DefinitionsNamed(name));
        let list: wire::Definitions = session.run(async {
            let attempt = async || match get(session, &query).await {
                Err(AttemptError::Trouble { cause, .. } | AttemptError::Missing(cause)) => Err(query.not_again(&cause)),
                other => other,
            };
            retry(Instant::now(), LIST.min(self.timeout), attempt).await.map_err(|end| query.gave_up(end))
        })?;
        Ok(list.namespaces_with(name))
    }
}
