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

pub mod doctor;
mod evaluation;
mod explain;
mod packet;
mod picture;
mod restore;
mod rules;
mod settings;
mod subject;
mod terminal;
mod trace;
mod validated;
mod warnings;

pub use crate::cni::configuration;
pub use evaluation::Exemption;
pub use explain::NetworkReport;
pub use explain::{Explained, Explanation, Explanations, Proxy, explain};
pub use packet::{Destination, Named, Origin, Sender};
pub use picture::picture;
pub use restore::elsewhere;
pub use restore::restore_text;
pub use rules::Rulebook;
pub use rules::{LeftOut, LiveRules, Mark, RuleLine, RulesReport, RulesView};
pub use settings::Setting;
pub use subject::{Applied, Choice, PodManifest, Subject, Texts};
pub use terminal::{Cell, Screen, TextReport, Tone};
pub use terminal::{Format, render};
pub use trace::Hop;
pub use trace::{RulePlace, Trace, trace};
pub use validated::{Checked, Validated, validated};
pub use warnings::Warning;
