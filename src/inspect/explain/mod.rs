//! `explain`: what a configuration does with a pod's traffic, and why.
//!
//! | file | contents |
//! |---|---|
//! | `report` | the report, built from the next four files |
//! | `evaluation` | the results of the sub-plugin chains that apply to the pod |
//! | `settings` | the settings of the redirection with their sources |
//! | `exemptions` | the traffic that bypasses the sidecar |
//! | `warnings` | warnings about valid, but hardly ever intended configurations |
//! | `picture` | the report as SVG |

mod evaluation;
mod exemptions;
mod picture;
mod report;
mod settings;
mod warnings;

pub(super) use evaluation::{evaluate, has_redirect};
pub(super) use exemptions::application_containers;
pub use exemptions::{ExcludedContainer, Exemption};
pub use picture::picture;
pub use report::{Explained, Explanation, Explanations, NetworkReport, Proxy, explain};
pub use settings::Setting;
pub use warnings::Warning;
