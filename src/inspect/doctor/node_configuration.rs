//! The node configuration, which the plugin reads at every call.

use super::case::Case;
use super::check::{Check, Checkup, Verdict};
use super::report::Group;
use crate::cni::NODE_CONFIGURATION;
use crate::plugin::node;

pub(super) const VALID: Check =
    Check::of(Group::Node, "node-configuration", "only root can change it, and it is valid");

/// Reads it as the plugin does.
pub(super) fn examine(case: &Case, checkup: &mut Checkup) {
    let read = match case.reach_named(NODE_CONFIGURATION.as_ref()) {
        Ok(path) => node::read(NODE_CONFIGURATION, &path).map_err(|error| error.msg),
        Err(error) => Err(format!("{NODE_CONFIGURATION}: {error}")),
    };
    let verdict = match read {
        Ok(Some((node, warnings))) => Verdict::pass(
            [vec![format!("{NODE_CONFIGURATION} states {}", node.summary())], warnings].concat().join("; "),
        ),
        Ok(None) => Verdict::NotChecked(
            format!("{NODE_CONFIGURATION} does not exist: attachments set the node's keys themselves"),
            Some("detour install writes it".to_owned()),
        ),
        Err(why) => Verdict::fail(why, "correct it, or remove it and install again: detour install"),
    };
    checkup.add(&VALID, verdict);
}
