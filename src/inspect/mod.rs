//! Read-only reports for people and programs: as values, and rendered as tables, JSON, YAML or SVG.

pub mod audit;
mod child;
mod configurations;
pub mod doctor;
mod elements;
mod explain;
mod nodes;
mod rules;
pub mod socket_lb;
mod subject;
mod terminal;
mod trace;
mod validate;

pub use crate::cni::configuration;
pub use child::run_program;
pub use configurations::{NetworkLead, SelectedNetwork};
pub use elements::{ContainerSender, ContainerSets, ElementLine};
pub use explain::{
    ExcludedContainer, ExcludedPart, ExcludedTraffic, ExplainedGuard, Explanation, InitContainer, NetworkReport, Proxy,
    Setting, Warning, explain, explained, picture,
};
pub use nodes::{AgentPod, NodeCheck, NodeResult, NodesCheck, has_sidecar, missing_agent, node_hint, report_of};
pub use rules::{LiveRules, Mark, RuleLine, RulesReport};
pub use subject::{
    AppliedConf, ConfigurationOrigin, ConfigurationSource, ManifestTexts, PlannedFormat, PodManifest, PodSelector,
    Subject, planned_format,
};
pub use terminal::{Cell, Format, Screen, TextReport, Tone, render};
pub use trace::{Origin, SenderArgument, Trace, trace};
pub use validate::{CheckedConf, ValidationReport, is_program, kubeconfig_warning, validate_text};

/// Why a command can't read objects of the cluster.
pub const NO_CREDENTIALS: &str = "no credentials for the API server on this node: neither the service account of an agent's pod nor the plugin's \
     kubeconfig; from another machine, use kubectl detour";
