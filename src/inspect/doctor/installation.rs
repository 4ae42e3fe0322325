//! Whether the node still has what was installed.

use super::target::{CheckTarget, Installation};
use super::check::{Check, Results, CheckVerdict};
use super::report::CheckGroup;
use super::{configuration, kubeconfig, node_configuration, program};

pub(super) const INSTALLATION: Check = Check::of(CheckGroup::Node, "installation", "all is as it was installed");

/// How many differences are named; the rest is counted.
const INSTALLATION_NAMED: usize = 3;

/// Compares. What another line says already is not said again.
pub(super) fn examine_installation(case: &CheckTarget, checkup: &mut Results) {
    let all =
        program::ALL.into_iter().chain(configuration::ALL).chain(kubeconfig::ALL).chain([&node_configuration::NODE_CONFIGURATION_VALID]);
    let failed = all.into_iter().find(|check| checkup.has_failed(check));
    let verdict = match failed {
        Some(check) => CheckVerdict::not_checked(format!("because {} failed", check.id)),
        None => installation_verdict(&case.installation),
    };
    checkup.add(&INSTALLATION, verdict);
}

fn installation_verdict(Installation { log, changed, .. }: &Installation) -> CheckVerdict {
    match changed {
        Ok(None) => CheckVerdict::not_checked(format!("{log} is not there: this was put here by other means")),
        Ok(Some(changed)) if changed.is_empty() => {
            CheckVerdict::pass(format!("nothing has changed since {log} was written"))
        }
        Ok(Some(changed)) => {
            let more = changed.len().saturating_sub(INSTALLATION_NAMED);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            let named = changed.iter().take(INSTALLATION_NAMED).cloned().collect::<Vec<_>>().join("; ");
            CheckVerdict::fail(format!("{named}{more}"), "detour install --dry-run shows what it would put right")
        }
        Err(why) => CheckVerdict::fail(why.clone(), "install again: detour install writes a new log"),
    }
}
