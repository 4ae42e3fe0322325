//! Read-only reports for people and programs: as values, and rendered as tables, JSON, YAML or SVG.
//!
//! | file | contents |
//! |---|---|
//! | `subject` | the pod and the configuration of a report |
//! | `installed` | the configurations that are installed on a node, applied to a pod |
//! | `explain` | what a configuration does with a pod's traffic, and why |
//! | `container_bypass` | the bypass of an excluded container in words |
//! | `trace` | the way of a packet through rules |
//! | `rules` | live rules compared with desired ones |
//! | `elements` | the elements of the sets of excluded containers |
//! | `node_hint` | hints to run a command on a pod's node |
//! | `validate` | the checks of the configurations in a file |
//! | `nodes` | reports of all nodes' agents, merged |
//! | [`audit`] | the pods of a node that bypass the mesh |
//! | [`doctor`] | the checks of a node and a pod |
//! | `terminal` | the output formats |

pub mod audit;
mod container_bypass;
pub mod doctor;
mod elements;
mod explain;
mod installed;
mod node_hint;
mod nodes;
mod rules;
mod subject;
mod terminal;
mod trace;
mod validate;

pub use crate::cni::configuration;
pub use container_bypass::ContainerSender;
pub use elements::{ContainerSets, ElementLine};
pub use explain::{
    ExcludedContainer, Exemption, Explained, Explanation, Explanations, InitContainer, NetworkReport, Proxy, Setting,
    Warning, explain, picture,
};
pub use installed::InstalledText;
pub use node_hint::node_hint;
pub use nodes::{FailedCheck, NodeCheck, NodeResult, NodesAudit, NodesCheck, PodOfNode, PolicyCounts};
pub use rules::{LiveRules, Mark, OmittedRules, RuleLine, RulesReport, RulesView};
pub use subject::{
    AppliedConf, ConfigurationOrigin, ConfigurationSource, ManifestTexts, PodManifest, PodSelector, Subject,
};
pub use terminal::{Cell, Format, Screen, TextReport, Tone, render};
pub use trace::{
    Destination, ExcludedSenders, Hop, InSet, Origin, RulePlace, Rulebook, Sender, SenderArgument, Trace, restore_text,
    trace,
};
pub use validate::{CheckedConf, ValidationReport, is_program, validate_text};
