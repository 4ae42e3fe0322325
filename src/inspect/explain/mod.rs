//! `explain`: what a configuration does with a pod's traffic, and why.

mod evaluation;
mod exclusions;
mod picture;
mod report;
mod settings;
mod warnings;

pub use crate::sub_plugins::Warning;
pub(super) use exclusions::application_containers;
pub use exclusions::{ExcludedContainer, ExcludedPart, ExcludedTraffic, InitContainer};
pub use picture::picture;
pub use report::{Explanation, NetworkReport, Proxy, explain, explained};
pub use settings::{ExplainedGuard, Setting};
