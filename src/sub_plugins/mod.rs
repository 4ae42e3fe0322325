//! Sub-plugins: they turn facts of a pod and the configuration into one traffic policy.
//!
//! All functions are pure: they use no file, no socket and not the kernel. Therefore the order of the blocks does not
//! matter, and `explain` predicts the result without access to the pod.

mod ambient;
mod bounds;
mod chain;
mod container_exclude;
mod context;
mod decision;
mod destination_exclude;
mod dns_exclude;
mod exclude;
mod grants;
mod guarded;
mod ids;
mod ignored;
mod istio_redirect;
mod mesh_guard;
mod pod_networks;
mod run;
mod settings;
mod sub_plugin;
#[cfg(test)]
mod tests;
mod uid_exclude;
mod values;

pub use ambient::{EnrolledBy, bypasses_inbound, enrolled_by, is_meshed, labeled_by};
pub use chain::{ChainInput, NeededFacts, executables, wants};
pub use context::{Resolvers, StartedWith};
pub use decision::{
    ConsideredRule, Decision, SkipReason, considered, pod_skip_reason, requested_injection, skip_reason,
};
pub use guarded::{UNGUARDED, guards};
pub use ids::{namespace_uids, trusts_namespaces};
pub use ignored::{Warning, ignored, missing_sub_plugin};
pub use pod_networks::{default_interface, own_addresses};

pub use run::{ChainOutput, RepeatedOutput, check, explain, run_again};
pub use settings::{setting_annotations, setting_values};
pub use sub_plugin::{DecidedRequest, Note, Origins, SettingSource, Severity, SubPlugin};
