//! What happens to a pod's traffic, for people and programs: reports as values, and how they are
//! shown. Nothing here changes anything.
//!
//! | file | what it knows |
//! |---|---|
//! | `subject` | which pod, under which configuration |
//! | `process` | its containers as rules see them |
//! | `explain`, `heard`, `network`, `settings`, `exemption`, `surprise` | what the configuration makes of the pod, why, and what of it will surprise |
//! | `packet`, `rulebook`, `conditions`, `walk`, `trace` | one packet's way through the rules |
//! | `elsewhere` | where to ask, if not here |
//! | `rules` | a namespace's live rules beside those that it should hold |
//! | `restore` | rules as text that `iptables-restore` reads |
//! | `picture`, `svg` | an explanation as a drawing |
//! | `validated` | whether the plugin accepts the configurations in a file |
//! | [`doctor`] | what is wrong with a node, or with a pod on it |
//! | `page`, `format` | how a report is shown |

mod conditions;
pub mod doctor;
mod elsewhere;
mod exemption;
mod explain;
mod format;
mod heard;
mod network;
mod packet;
mod page;
mod picture;
mod process;
mod restore;
mod rulebook;
mod rules;
mod settings;
mod subject;
mod surprise;
mod svg;
mod trace;
mod validated;
mod walk;

pub use crate::cni::configuration;
pub use elsewhere::elsewhere;
pub use exemption::Exemption;
pub use explain::{Explained, Explanation, Explanations, Proxy, explain};
pub use format::{Format, render};
pub use network::Network;
pub use packet::{Destination, Named, Origin, Sender};
pub use page::{Cell, Page, Sheet, Tone};
pub use picture::picture;
pub use restore::restore_text;
pub use rulebook::Rulebook;
pub use rules::{LeftOut, LiveRules, Mark, RuleLine, RulesReport, RulesView};
pub use settings::Setting;
pub use subject::{Applied, Choice, Manifest, Subject, Texts};
pub use surprise::Warning;
pub use trace::{Place, Trace, trace};
pub use validated::{Checked, Validated, validated};
pub use walk::Hop;
