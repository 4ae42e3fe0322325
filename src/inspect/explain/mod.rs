//! `explain`: what a configuration does with a pod's traffic, and why.
//!
//! | file | contents |
//! |---|---|
//! | `report` | the report, built from the other files |
//! | `evaluation` | the results of the sub-plugin chains that apply to the pod |
//! | `settings` | the settings of the redirection with their sources |
//! | `exemptions` | the traffic that bypasses the sidecar by an exclusion |
//! | `uncaptured` | the traffic that bypasses the sidecar by settings of the redirection |
//! | `init_containers` | when init containers run, and whether they need an exclusion |
//! | `warnings` | warnings about valid, but hardly ever intended configurations |
//! | `picture` | the report as SVG |

mod evaluation;
mod exemptions;
mod init_containers;
mod picture;
mod report;
mod settings;
mod uncaptured;
mod warnings;

pub(super) use evaluation::{evaluate, has_redirect};
pub(super) use exemptions::application_containers;
pub use exemptions::{ExcludedContainer, Exemption};
pub use init_containers::InitContainer;
pub use picture::picture;
pub use report::{Explained, Explanation, Explanations, NetworkReport, Proxy, explain};
pub use settings::Setting;
pub use warnings::Warning;
