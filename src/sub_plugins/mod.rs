//! Sub-plugins: they turn facts of a pod and the configuration into one traffic policy.
//!
//! All functions are pure: they use no file, no socket and not the kernel. Therefore the order of the blocks does not
//! matter, and `explain` predicts the result without access to the pod.
//!
//! Files, from the lowest to the highest:

mod chain;
mod container_exclude;
mod context;
mod decision;
mod dns_exclude;
mod ids;
mod ignored;
mod istio_redirect;
mod note;
mod parsed_chain;
mod pod_networks;
mod separate;
mod settings;
mod sub_plugin;
#[cfg(test)]
mod tests;
mod uid_exclude;
mod values;

pub use chain::{ChainOutput, NeededFacts, check, executables, run, run_separately, wants};
pub use context::Resolvers;
pub use decision::{
    ConsideredRule, Decision, SkipReason, considered, pod_skip_reason, requested_injection, skip_reason,
};
pub use ids::namespace_uids;
pub use ignored::{Ignored, ignored};
pub use note::{Note, Severity};
pub use parsed_chain::ChainInput;
pub use pod_networks::own_addresses;
pub use separate::SeparatePolicy;
pub use settings::{setting_annotations, setting_values};
pub use sub_plugin::{Origins, SettingSource, SubPlugin};
