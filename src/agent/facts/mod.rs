//! What the agent knows of its node without asking: the node's pods, all namespaces and all attachment
//! definitions, each kept by a watch.
//!
//! Of each object that is kept which decides something. Seen of an agent's memory (6.5 MB without any):
//! a thousand pods of an ordinary mesh (two containers, forty variables) add 13 MB to it, a thousand
//! definitions 1 MB, 500 pods with 5,000 definitions 10 MB. A list is read a page at a time, so that the
//! API's own JSON adds little.

mod answer;
mod cache;
mod objects;
mod watching;

pub(super) use answer::Answers;

use super::ObservedPod;
use crate::cluster::Definition;
use crate::pod::Namespace;
use cache::Cache;
use std::sync::Arc;
use std::time::Duration;

/// What is known, shared by those who watch and those who answer.
#[derive(Clone)]
pub(super) struct SharedFacts(Arc<Caches>);

struct Caches {
    pods: Cache<ObservedPod>,
    namespaces: Cache<Namespace>,
    definitions: Cache<Definition>,
}

impl SharedFacts {
    /// Nothing is known yet.
    pub(super) fn new() -> Self {
        Self(Arc::new(Caches { pods: Cache::new(), namespaces: Cache::new(), definitions: Cache::new() }))
    }

    /// The pods of the node, as they were seen last.
    pub(super) fn pods(&self) -> Vec<Arc<ObservedPod>> {
        self.0.pods.all()
    }

    /// Blocks until there were more than `seen` changes of pods, `time` at the longest. Gives how many
    /// there were; 0 is before the first.
    pub(super) fn wait_for_pods(&self, seen: u64, time: Duration) -> u64 {
        self.0.pods.wait_for_change(seen, time)
    }
}
