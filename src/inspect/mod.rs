//! Read-only reports for people and programs: as values, and rendered as tables, JSON, YAML or SVG.
//!
//! | file | contents |
//! |---|---|
//! | `subject` | the pod and the configuration of a report |
//! | `installed` | the configurations that are installed on a node, applied to a pod |
//! | `explain` | the report of `explain`, built from the next four files |
//! | `evaluation` | the results of the sub-plugin chains that apply to the pod |
//! | `settings` | the settings of the redirection with their sources |
//! | `exemptions` | the traffic that bypasses the sidecar |
//! | `warnings` | warnings about valid, but hardly ever intended configurations |
//! | `picture` | the report of `explain` as SVG |
//! | `container_bypass` | the bypass of an excluded container in words |
//! | `container_sender` | excluded containers as senders of packets |
//! | `packet` | a packet, and whether it matches a rule |
//! | `trace` | the evaluation of a packet in all tables |
//! | `rules` | live rules compared with desired ones |
//! | `elements` | the elements of the sets of excluded containers |
//! | `rulebook` | rules for `trace` and for `iptables-restore` |
//! | `node_hint` | hints to run a command on a pod's node |
//! | `validate` | the checks of the configurations in a file |
//! | `nodes` | reports of all nodes' agents, merged |
//! | [`audit`] | the pods of a node that bypass the mesh |
//! | [`doctor`] | the checks of a node and a pod |
//! | `terminal` | the output formats |

pub mod audit;
mod container_bypass;
mod container_sender;
pub mod doctor;
mod elements;
mod evaluation;
mod exemptions;
mod explain;
mod installed;
mod node_hint;
mod nodes;
mod packet;
mod picture;
mod rulebook;
mod rules;
mod settings;
mod subject;
mod terminal;
mod trace;
mod validate;
mod warnings;

pub use crate::cni::configuration;
pub use container_bypass::ContainerSender;
pub use container_sender::ExcludedSenders;
pub use elements::{ContainerSets, ElementLine};
pub use exemptions::{ExcludedContainer, Exemption};
pub use explain::{Explained, Explanation, Explanations, NetworkReport, Proxy, explain};
pub use installed::InstalledText;
pub use node_hint::node_hint;
pub use nodes::{FailedCheck, NodeCheck, NodeResult, NodesAudit, NodesCheck, PodOfNode};
pub use packet::{Destination, Origin, Sender, SenderArgument};
pub use picture::picture;
pub use rulebook::{Rulebook, restore_text};
pub use rules::{LiveRules, Mark, OmittedRules, RuleLine, RulesReport, RulesView};
pub use settings::Setting;
pub use subject::{
    AppliedConf, ConfigurationOrigin, ConfigurationSource, ManifestTexts, PodManifest, PodSelector, Subject,
};
pub use terminal::{Cell, Format, Screen, TextReport, Tone, render};
pub use trace::{Hop, RulePlace, Trace, trace};
pub use validate::{CheckedConf, ValidationReport, validate_text};
pub use warnings::Warning;
