//! The node agent's socket.

use super::case::Case;
use super::check::{Check, Checkup, Verdict};
use super::report::Group;
use crate::cni::NetConf;
use std::os::unix::net::UnixStream;

const AGENT: Check = Check { id: "agent-reachable", group: Group::Cluster, holds: "the node agent answers" };

/// Connects.
pub(super) fn examine(case: &Case, conf: Option<&NetConf>, checkup: &mut Checkup) {
    let socket = conf.and_then(|conf| conf.kubernetes.agent_socket.as_deref());
    let verdict = match socket {
        None => Verdict::not_checked("the configuration names no agent_socket"),
        Some(path) => match case.reach_named(path).and_then(UnixStream::connect) {
            Ok(_) => Verdict::pass(path.display().to_string()),
            Err(why) => Verdict::fail(
                format!("{}: {why}; the plugin asks the API itself until it does", path.display()),
                "see whether the agent runs on this node: kubectl get pods -A -o wide -l app.kubernetes.io/component=agent",
            ),
        },
    };
    checkup.add(&AGENT, verdict);
}
