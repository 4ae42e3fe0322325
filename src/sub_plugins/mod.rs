//! Sub-plugins: they turn facts of a pod and the configuration into one traffic policy.
//!
//! All functions are pure: they use no file, no socket and not the kernel. Therefore the order of the blocks does not
//! matter, and `explain` predicts the result without access to the pod.
//!
//! Files, from the lowest to the highest:
//!
//! | file | contents |
//! |---|---|
//! | `note` | notes for the log and for `explain` |
//! | `sub_plugin` | the sub-plugins by name, sources of settings and exclusions |
//! | `context` | what a sub-plugin evaluates against: facts, resolvers, annotations |
//! | `values` | parsers of values: ports, ranges, IDs, groups, interfaces, booleans |
//! | `ids` | lists of UIDs and GIDs, which may refer to the pod's containers or namespace |
//! | `settings` | the table of settings of `istio-redirect` |
//! | `uid_exclude`, `dns_exclude`, `container_exclude` | the exclusions |
//! | `decision` | whether a pod is redirected or skipped, and why |
//! | `parsed_chain` | the blocks of a sub-plugin chain, parsed |
//! | `pod_networks` | interfaces and addresses of a pod's networks |
//! | `istio_redirect` | the redirection, from four layers of settings |
//! | `ignored` | annotations and arguments without effect |
//! | `separate` | the policy of a running pod if a sub-plugin fails |
//! | `chain` | the evaluation of a sub-plugin chain |

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
