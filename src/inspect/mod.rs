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
mod node_hint;
mod exemption;
mod explain;
mod format;
mod evaluation;
mod network;
mod packet;
mod terminal;
mod picture;
mod process;
mod restore;
mod rule_listing;
mod rules;
mod settings;
mod subject;
mod warnings;
mod svg;
mod trace;
mod validated;
mod walk;

pub use crate::cni::configuration;
pub use node_hint::elsewhere;
pub use exemption::Exemption;
pub use explain::{Explained, Explanation, Explanations, Proxy, explain};
pub use format::{Format, render};
pub use network::NetworkReport;
pub use packet::{Destination, Named, Origin, Sender};
pub use terminal::{Cell, Screen, TextReport, Tone};
pub use picture::picture;
pub use restore::restore_text;
pub use rule_listing::Rulebook;
pub use rules::{LeftOut, LiveRules, Mark, RuleLine, RulesReport, RulesView};
pub use settings::Setting;
pub use subject::{Applied, Choice, PodManifest, Subject, Texts};
pub use warnings::Warning;
pub use trace::{RulePlace, Trace, trace};
pub use validated::{Checked, Validated, validated};
pub use walk::Hop;
