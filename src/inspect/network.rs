//! The networks of a pod under a primary plugin, and what each contributes.

use super::evaluation::{Evaluation, redirects};
use super::terminal::{Cell, Tone};
use crate::plugin::primary::{NetworkRunner, PreviewedNetwork};
use serde::Serialize;

/// A network of the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetworkReport {
    /// `NAMESPACE/NAME` of its definition, else its configuration's name.
    pub name: String,
    /// `pod`, where the pod selects it, else `configuration`.
    pub selected_by: &'static str,
    /// Its interface; none where it has none of its own.
    pub interface: Option<String>,
    /// Its plugins' types; empty where its configuration is on the node only.
    pub types: Vec<String>,
    /// `delegate`: executables, with an interface of their own; `chain`: an executable on the default
    /// network's result; `in-process`: no executable.
    pub runs: &'static str,
    /// What it says of the redirection; none where it has no say.
    pub decision: Option<String>,
    /// How many exclusions it asks for.
    pub exclusions: usize,
}

impl NetworkReport {
    pub(super) fn of(used: &PreviewedNetwork, heard: &[Evaluation<'_>]) -> Self {
        let own = heard.iter().find(|one| one.attachment == Some(used.name.as_str()) && used.place == NetworkRunner::Here);
        Self {
            name: used.name.clone(),
            selected_by: if used.selected { "pod" } else { "configuration" },
            interface: used.interface.clone(),
            types: used.types.clone(),
            runs: match used.place {
                NetworkRunner::Delegate => "delegate",
                NetworkRunner::Chain => "chain",
                NetworkRunner::Here => "in-process",
            },
            decision: own.map(|own| match redirects(&own.conf.chain) {
                true => own.decision(),
                false => "istio-redirect is not in its chain".to_owned(),
            }),
            exclusions: own.map_or(0, |own| own.policy().exclusions_in_effect().len()),
        }
    }

    /// Its line of a table.
    pub(super) fn row(&self) -> Vec<Cell> {
        let says = match (&self.decision, self.exclusions) {
            (None, _) => String::new(),
            (Some(decision), 0) => decision.clone(),
            (Some(decision), 1) => format!("{decision}; 1 exclusion"),
            (Some(decision), n) => format!("{decision}; {n} exclusions"),
        };
        vec![
            Cell::of(&self.name).tone(Tone::Strong),
            Cell::of(self.interface.as_deref().unwrap_or("-")),
            Cell::of(if self.types.is_empty() { "not looked at".to_owned() } else { self.types.join(", ") }),
            Cell::of(self.runs),
            Cell::of(format!("by {}", self.selected_by)).tone(Tone::Faint),
            Cell::of(says),
        ]
    }
}
