//! `uid-exclude`: all outbound traffic of a UID or GID, or some of it, leaves untouched.

use super::Note;
use super::annotation::Annotation;
use super::ids::{Ids, Kind};
use super::rules::{self, Rule};
use super::scene::{Author, Scene};
use crate::cni::{Error, Reader};
use crate::pod::Facts;
use crate::policy::Exclusion;

const UIDS: &str = "detour.io/exclude-uids";
const GIDS: &str = "detour.io/exclude-gids";
const RULES: &str = "detour.io/exclude-outbound-ports-for-uids";

/// Every annotation that counts here.
pub(super) const ANNOTATIONS: [&str; 3] = [UIDS, GIDS, RULES];

/// What one place asks for: a block, or the annotations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UidExclude {
    uids: Option<Ids>,
    gids: Option<Ids>,
    rules: Vec<Rule>,
}

impl UidExclude {
    /// A block's keys.
    pub(super) fn parse(r: &Reader<'_>, author: Author) -> Result<Self, Error> {
        let ids = |key| r.list(key)?.map(|list| Ids::parse(&list, author)).transpose();
        let rules = rules::from_block(r, "rules", author)?.unwrap_or_default();
        Ok(Self { uids: ids("uids")?, gids: ids("gids")?, rules })
    }

    /// The pod's and its namespace's annotations.
    pub(super) fn annotated(facts: &Facts) -> Result<Self, Error> {
        let annotation = |key| Annotation::of_pod_or_namespace(facts, key);
        let ids = |key| annotation(key).map(|a| Ids::parse(&a.list(), a.author)).transpose();
        let rules =
            annotation(RULES).map(|a| rules::from_text(a.place, a.value, a.author)).transpose()?.unwrap_or_default();
        Ok(Self { uids: ids(UIDS)?, gids: ids(GIDS)?, rules })
    }

    /// What that exempts in one pod.
    pub(super) fn exclusions(&self, scene: &Scene<'_>, notes: &mut Vec<Note>) -> Result<Vec<Exclusion>, Error> {
        let mut exclusions = Vec::new();
        for (ids, kind) in [(&self.uids, Kind::User), (&self.gids, Kind::Group)] {
            let Some(ids) = ids else { continue };
            let all = |owner| Exclusion { owner, destination: None, protocol: None, ports: Vec::new() };
            exclusions.extend(ids.owners(kind, scene, notes)?.into_iter().map(all));
        }
        for rule in &self.rules {
            exclusions.extend(rule.exclusions(scene, notes)?);
        }
        Ok(exclusions)
    }
}
