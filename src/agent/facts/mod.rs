//! The node's pods, all namespaces and, for a primary plugin, all attachment definitions, cached by watches, and the answers
//! to the plugin.
//!
//! Measured memory of an agent (6.5 MB with empty caches): a thousand pods of an ordinary mesh (two containers, forty
//! variables) add 13 MB, a thousand definitions 1 MB, 500 pods with 5,000 definitions 10 MB. The objects of a kind take at
//! most 24 MiB; of an object that is too large, only a part is cached. Lists are read in pages of at most 8 MiB,
//! of which one is in memory at a time.

mod answer;
mod cache;
mod objects;
mod watching;

pub(super) use answer::{Answers, record};
pub(super) use cache::SharedFacts;
pub use objects::ObservedPod;
