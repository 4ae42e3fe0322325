//! The node configuration, which the plugin reads at every call, and what it makes of other configurations.

use super::target::CheckTarget;
use super::check::{Check, Results, CheckVerdict};
use super::report::CheckGroup;
use crate::cni::{Error, NODE_CONFIGURATION, NetConf, NodeConf, OWN_TYPES, configuration};
use crate::plugin::node;
use std::path::Path;

pub(super) const NODE_CONFIGURATION_VALID: Check =
    Check::of(CheckGroup::Node, "node-configuration", "only root can change it, and it is valid");

/// Reads it as the plugin does.
pub(super) fn examine_node_configuration(case: &CheckTarget, checkup: &mut Results) {
    let verdict = match read_node_configuration(case) {
        Ok(Some((node, warnings))) => {
            let stated = format!("{NODE_CONFIGURATION} states {}", node.summary());
            CheckVerdict::pass([vec![stated], warnings].concat().join("; "))
        }
        Ok(None) => CheckVerdict::NotChecked(
            format!("{NODE_CONFIGURATION} does not exist: attachments set the node's keys themselves"),
            Some("detour install writes it".to_owned()),
        ),
        Err(why) => CheckVerdict::fail(why, "correct it, or remove it and install again: detour install"),
    };
    checkup.add(&NODE_CONFIGURATION_VALID, verdict);
}

fn read_node_configuration(case: &CheckTarget) -> Result<Option<(NodeConf, Vec<String>)>, String> {
    let path =
        case.reach_named(NODE_CONFIGURATION.as_ref()).map_err(|error| format!("{NODE_CONFIGURATION}: {error}"))?;
    node::read(NODE_CONFIGURATION, &path).map_err(|error| error.msg)
}

/// An attachment's configuration as the plugin understands it on this node.
///
/// # Errors
/// As [`configuration`].
pub(super) fn effective(case: &CheckTarget, place: &Path, text: &str) -> Result<NetConf, Error> {
    let govern = || {
        let (node, _) = read_node_configuration(case).ok()??;
        let value = serde_json::from_str(text).ok()?;
        // The runtime's own configuration of a primary plugin stays as it is.
        let (value, _) = node.govern_all(&value, &|kind| OWN_TYPES.contains(&kind)).ok()??;
        Some(value.to_string())
    };
    configuration(place, govern().as_deref().unwrap_or(text).as_bytes())
}
