//! `detour uninstall`.

use super::install::{self, Place};
use anyhow::Result;
use clap::Args;
use detour_cni::agent::install::undo::undo;
use std::path::Path;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  detour uninstall --dry-run         what would be taken away from this node, as a unified diff
  detour uninstall --root /host      from a pod that has the node's file system at /host

Pods keep their rules. The configuration is removed first, then the node configuration, the
kubeconfig and the program. Files that were edited after the installation stay, and so do the
files that they need; the output names them.

Exit codes: 0 all is gone, 1 something is left (stderr says what), 2 wrong usage or input.";

/// Takes away what `install` put on a node, as far as nobody changed it since.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Uninstall {
    #[command(flatten)]
    place: Place,
    /// Print what would change as a unified diff, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

impl Uninstall {
    pub(super) fn run(&self) -> ExitCode {
        super::ended(self.uninstall())
    }

    fn uninstall(&self) -> Result<ExitCode> {
        self.place.check_root()?;
        let node = self.place.node();
        if self.dry_run {
            let found = node.look(None)?;
            return Ok(install::shown(&undo(&found)));
        }
        let lock = node.lock()?;
        let found = node.look(None)?;
        let plan = undo(&found);
        node.apply(&plan, Path::new(install::PROGRAM_FILE), &lock)?;
        node.forget_absent();
        node.forget_lock(lock);
        let code = install::done(&plan);
        Ok(if plan.notes.is_empty() { code } else { ExitCode::FAILURE })
    }
}
