//! `detour doctor`: a list of checks of a node, and of a pod on it. Each check reports what it found and, if it fails,
//! what to do next. Nothing is changed. With `--probe`, a few packets are sent to addresses that are reserved for
//! documentation.
//!
//! Each check is implemented in the file of its subject and returns a verdict. A check that depends on another one is
//! reported as not checked if that one did not pass.

mod checks;
mod configuration;
mod containers;
mod node;
mod pod;
mod probe;
mod report;
mod rules;

pub use report::{CheckOutcome, CheckTarget, CheckVerdict, Checklist, OwnList, ReportLine};

use super::needless_exclusions;
use crate::plugin::FormatCounts;
use checks::Findings;

/// Runs the checks of the node and, if a pod is named, of the pod.
#[must_use]
pub fn examine(target: &CheckTarget) -> Checklist {
    let mut findings = Findings::new(target);
    findings.run_all();
    let needless = || {
        let api = findings.api().ok()?;
        needless_exclusions::find(target.node_name.as_deref()?, &api, &findings.configurations)
    };
    Checklist {
        pod: target.pod.as_ref().map(|pod| format!("{}/{}", pod.namespace, pod.name)),
        node: target.node_name.clone(),
        platform: target.platform.clone(),
        rule_formats: FormatCounts::read(&findings.store()).ok(),
        needless_exclusions: target.pod.is_none().then(needless).flatten(),
        policies: findings.policies.and_then(Result::ok),
        ..Checklist::of(findings.lines)
    }
}

/// Reads the plugin's configurations on a node, and finds its API server, without any request.
pub(super) fn node_setup(target: &CheckTarget) -> Findings<'_> {
    let mut findings = Findings::new(target);
    findings.run(checks::KUBECONFIG_VALID);
    findings
}
