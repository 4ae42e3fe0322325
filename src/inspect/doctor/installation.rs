//! Whether the node still has what was installed.

use super::case::{Case, Installation};
use super::check::{Check, Checkup, Verdict};
use super::report::Group;
use super::{configuration, kubeconfig, node_configuration, program};

pub(super) const INSTALLATION: Check = Check::of(Group::Node, "installation", "all is as it was installed");

/// How many differences are named; the rest is counted.
const NAMED: usize = 3;

/// Compares. What another line says already is not said again.
pub(super) fn examine(case: &Case, checkup: &mut Checkup) {
    let all =
        program::ALL.into_iter().chain(configuration::ALL).chain(kubeconfig::ALL).chain([&node_configuration::VALID]);
    let failed = all.into_iter().find(|check| checkup.has_failed(check));
    let verdict = match failed {
        Some(check) => Verdict::not_checked(format!("because {} failed", check.id)),
        None => verdict(&case.installation),
    };
    checkup.add(&INSTALLATION, verdict);
}

fn verdict(Installation { log, changed, .. }: &Installation) -> Verdict {
    match changed {
        Ok(None) => Verdict::not_checked(format!("{log} is not there: this was put here by other means")),
        Ok(Some(changed)) if changed.is_empty() => {
            Verdict::pass(format!("nothing has changed since {log} was written"))
        }
        Ok(Some(changed)) => {
            let more = changed.len().saturating_sub(NAMED);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            let named = changed.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
            Verdict::fail(format!("{named}{more}"), "detour install --dry-run shows what it would put right")
        }
        Err(why) => Verdict::fail(why.clone(), "install again: detour install writes a new log"),
    }
}
