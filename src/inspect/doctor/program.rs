//! Checks of the plugin's program on the node: trusted, present, executable, of this version; and of the installation as
//! a whole.

use super::checks;
use super::kernel;
use super::report::{CheckTarget, CheckVerdict, Installation, Results};
use crate::host_path::HostPath;
use crate::inspect::terminal::first_of;
use crate::trusted_file::{self, FileError, names_in};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// The number of untrusted files and of differences that a finding names; the rest is counted.
const NAMED: usize = 3;

const REINSTALL: &str =
    "run detour install from a static binary for this machine, or check why the agent on this node does not install it";

/// Checks the programs named `kinds` in each plugin directory, and the installed ones.
pub(super) fn examine(target: &CheckTarget, kinds: &BTreeSet<String>, results: &mut Results) {
    let in_dirs = target.bin_dirs.iter().flat_map(|dir| kinds.iter().map(|kind| dir.join(kind)));
    let wanted: BTreeSet<HostPath> = in_dirs.chain(target.installation.programs.iter().cloned()).collect();
    let directories = target.bin_dirs.iter().cloned().chain(wanted.iter().map(HostPath::parent)).collect();
    results.add(checks::PROGRAM_TRUSTED, trusted(target, &directories));
    results.run(checks::PROGRAM_PRESENT, || match wanted.is_empty() {
        true => CheckVerdict::not_checked("no configuration and no installation names the program"),
        false => CheckVerdict::merged(wanted.iter().map(|path| match version(target, path) {
            Ok(version) => CheckVerdict::pass(format!("{path}: {version}")),
            Err(why) => CheckVerdict::fail(format!("{path}: {why}"), REINSTALL),
        })),
    });
}

/// Checks who can change the plugin directories: the plugin runs programs from there as root.
fn trusted(target: &CheckTarget, directories: &BTreeSet<HostPath>) -> CheckVerdict {
    let (mut fine, mut wrong) = (Vec::new(), Vec::new());
    for directory in directories {
        match all_trusted(target, directory) {
            Ok(()) => fine.push(directory.to_string()),
            Err(why) => wrong.push((directory.to_string(), why)),
        }
    }
    if wrong.is_empty() {
        return CheckVerdict::pass(fine.join(", "));
    }
    let (directories, why): (Vec<_>, Vec<_>) = wrong.into_iter().unzip();
    let directories = directories.join(" ");
    let next = format!(
        "run chown -R root:root {directories} && chmod -R go-w {directories}; until then, plugins there are not executed"
    );
    CheckVerdict::fail(why.join("; "), next)
}

/// Checks a directory and its files. A missing directory is reported by another check.
fn all_trusted(target: &CheckTarget, directory: &HostPath) -> Result<(), String> {
    let Ok(reached) = target.reach(directory) else { return Ok(()) };
    match trusted_file::check(&reached) {
        Err(error) if error.is_not_found() => return Ok(()),
        Err(error) => return Err(on_node(target, error)),
        Ok(_) => {}
    }
    let names = names_in(&reached).map_err(|why| format!("{directory}: {why}"))?;
    let files = names.iter().filter_map(|name| target.reach(&directory.join(name)).ok()).filter(|file| file.is_file());
    let wrong: Vec<_> = files.filter_map(|file| trusted_file::check(&file).err()).collect();
    let count = wrong.len();
    if count == 0 {
        return Ok(());
    }
    let named = first_of(wrong.into_iter().map(|error| on_node(target, error)), NAMED, "; ");
    Err(if count > NAMED { format!("{named} in {directory}") } else { named })
}

/// Returns the error with the file's path on the node.
fn on_node(target: &CheckTarget, error: FileError) -> String {
    match error.below(&target.mount) {
        FileError::Owner { path, uid } => format!("{} is owned by UID {uid}; expected root", path.display()),
        FileError::Writable { path, mode } => format!("{} has mode {mode:04o}", path.display()),
        FileError::Io(error) => error.to_string(),
    }
}

/// Returns the version that a program reports; it is run, as the runtime would.
fn version(target: &CheckTarget, path: &HostPath) -> Result<String, String> {
    let ours = env!("CARGO_PKG_VERSION");
    let reached = target.reach(path).map_err(|why| why.to_string())?;
    let metadata = fs::metadata(&reached).map_err(|why| why.to_string())?;
    let mode = metadata.permissions().mode() & 0o7777;
    if !metadata.is_file() || mode & 0o111 == 0 {
        let got = if metadata.is_dir() { "a directory".to_owned() } else { format!("mode {mode:04o}") };
        return Err(format!("expected an executable file, got {got}"));
    }
    let reported = kernel::output(Command::new(reached).args(["version", "-o", "json"]).env_clear());
    let reported = reported.map_err(|why| format!("expected detour {ours} for this machine: {why}"))?;
    let reported: Value = serde_json::from_str(&reported).unwrap_or_default();
    match reported["version"].as_str() {
        Some(theirs) if theirs == ours => Ok(theirs.to_owned()),
        Some(theirs) => Err(format!("expected version {ours}, got {theirs}")),
        None => Err(format!("expected detour {ours}, got another program, or a version that does not report itself")),
    }
}

/// Compares the node with the installation's record. Differences that another check reports are not repeated.
pub(super) fn examine_installation(target: &CheckTarget, results: &mut Results) {
    let verdict = match results.failed_in("node") {
        Some(id) => CheckVerdict::not_checked(format!("because {id} failed")),
        None => installation_verdict(&target.installation),
    };
    results.add(checks::INSTALLATION, verdict);
}

fn installation_verdict(Installation { changed, .. }: &Installation) -> CheckVerdict {
    const RECORD: &str = "/var/lib/cni/detour/install.json";
    match changed {
        Ok(None) => {
            CheckVerdict::not_checked(format!("{RECORD} not found: detour was not installed by detour install"))
        }
        Ok(Some(changed)) if changed.is_empty() => {
            CheckVerdict::pass(format!("nothing has changed since {RECORD} was written"))
        }
        Ok(Some(changed)) => {
            let named = first_of(changed.iter().cloned(), NAMED, "; ");
            CheckVerdict::fail(named, "run detour install --dry-run to see the corrections")
        }
        Err(why) => CheckVerdict::fail(why.clone(), "run detour install again, which writes a new record"),
    }
}
