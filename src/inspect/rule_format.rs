//! The rule format that an ADD chooses for a pod's redirection, as far as it is known before.

use super::subject::{ConfigurationSource, Subject};
use crate::firewall::RuleFormat;
use crate::sub_plugins::executables;
use serde::{Serialize, Serializer};

/// A rule format, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedFormat {
    /// The format.
    #[serde(serialize_with = "by_name")]
    pub format: RuleFormat,
    /// Where it comes from.
    pub source: String,
}

fn by_name<S: Serializer>(format: &RuleFormat, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(format.name())
}

/// Returns the rule format of a new pod's redirection.
#[must_use]
pub fn planned_format(subject: &Subject) -> PlannedFormat {
    let of_attachments = subject.networks.iter().flat_map(|preview| &preview.evaluated).map(|one| &one.conf);
    let all = || of_attachments.clone().chain([&subject.conf]);
    let runs_executables = all().any(|conf| executables(&conf.chain).next().is_some());
    let (format, source) = match (all().find_map(|conf| conf.rule_format), subject.conf.auto_format) {
        (Some(format), _) => (format, "set by dialect"),
        (None, _) if subject.facts.pod.has_own_users => {
            (RuleFormat::Nftables, "because the pod has its own user namespace (hostUsers: false)")
        }
        (None, _) if runs_executables => (RuleFormat::Iptables, "because the chain runs executables"),
        (None, Some(format)) => (format, "set by auto_dialect of the node"),
        (None, None) => (RuleFormat::default(), "the default"),
    };
    let is_tried = subject.origin.source != ConfigurationSource::Node && all().all(|conf| conf.rule_format.is_none());
    let condition = if is_tried { ", if the kernel has it" } else { "" };
    PlannedFormat { format, source: format!("{source}{condition}") }
}
