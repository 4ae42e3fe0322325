//! The node agent behind its socket.

use super::target::CheckTarget;
use super::check::{Check, Results, CheckVerdict};
use super::report::CheckGroup;
use crate::cluster;
use crate::cni::{Error, NetConf};
use std::path::Path;

const AGENT: Check = Check::of(CheckGroup::Cluster, "agent-reachable", "the node agent answers, and knows");

/// Asks it whether it could tell facts now, as STATUS does.
pub(super) fn examine_agent(case: &CheckTarget, conf: Option<&NetConf>, checkup: &mut Results) {
    let socket = conf.and_then(|conf| Some((conf, conf.kubernetes.agent_socket.as_deref()?)));
    checkup.add(
        &AGENT,
        match socket {
            None => CheckVerdict::not_checked("the configuration names no agent_socket"),
            Some((conf, path)) => match case.reach_named(path).map(|reached| ask(conf, &reached)) {
                Ok(Ok(())) => CheckVerdict::pass(path.display().to_string()),
                Ok(Err(error)) => fail(path, &error.to_string()),
                Err(error) => fail(path, &error.to_string()),
            },
        },
    );
}

fn ask(conf: &NetConf, socket: &Path) -> Result<(), Error> {
    let mut alone = conf.kubernetes.clone();
    (alone.manifests_dir, alone.kubeconfig, alone.agent_socket) = (None, None, Some(socket.to_owned()));
    cluster::source(&alone).map_or(Ok(()), |agent| agent.probe())
}

fn fail(path: &Path, why: &str) -> CheckVerdict {
    CheckVerdict::fail(
        format!("{}: {why}", path.display()),
        "the plugin asks the API itself until it does; see whether the agent runs on this node: kubectl get pods -A -o wide \
         -l app.kubernetes.io/component=agent",
    )
}
