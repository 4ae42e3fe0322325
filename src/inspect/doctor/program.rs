//! Checks of the plugin's program on the node: present, executable, trusted, for this architecture, static, of this
//! version; and of the installation as a whole. The ELF header is read here, because a library for four fields is not
//! worth a dependency.

use super::checks::{self, Check, CheckGroup};
use super::kernel;
use super::report::{CheckTarget, CheckVerdict, Installation, Results};
use crate::host_path::HostPath;
use crate::inspect::terminal::{first_of, joined};
use crate::trusted_file::{self, FileError, names_in, read, read_nofollow};
use serde_json::Value;
use std::collections::BTreeSet;
use std::env::consts::ARCH;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The number of untrusted files and of differences that a finding names; the rest is counted.
const NAMED: usize = 3;

/// The maximum size of a program, in bytes: this one has 7 MB, and 120 MB with debug information.
const MAX_PROGRAM: u64 = 256 << 20;
const REINSTALL: &str =
    "run detour install from a static binary for this machine, or check why the agent on this node does not install it";

/// A program on the node.
struct Program {
    path: HostPath,
    reached: PathBuf,
    bytes: Vec<u8>,
    mode: u32,
}

/// Checks the programs named `kinds` in each plugin directory, and the installed ones.
pub(super) fn examine(target: &CheckTarget, kinds: &BTreeSet<String>, results: &mut Results) {
    let in_dirs = target.bin_dirs.iter().flat_map(|dir| kinds.iter().map(|kind| dir.join(kind)));
    let wanted: BTreeSet<HostPath> = in_dirs.chain(target.installation.programs.iter().cloned()).collect();
    let directories = target.bin_dirs.iter().cloned().chain(wanted.iter().map(HostPath::parent)).collect();
    results.add(checks::PROGRAM_TRUSTED, trusted(target, &directories));
    let (mut there, mut absent) = (Vec::new(), Vec::new());
    for path in wanted {
        match open(target, &path) {
            Ok(program) => there.push(program),
            Err(why) => absent.push(format!("{path}: {why}")),
        }
    }
    if there.is_empty() && absent.is_empty() {
        let why = "no configuration and no installation names the program";
        results.add(checks::PROGRAM_PRESENT, CheckVerdict::not_checked(why));
        results.skip([
            checks::PROGRAM_EXECUTABLE,
            checks::PROGRAM_ARCHITECTURE,
            checks::PROGRAM_STATIC,
            checks::PROGRAM_VERSION,
        ]);
        return;
    }
    let shown = |programs: &[Program]| joined(programs.iter().map(|program| &program.path));
    results.add(checks::PROGRAM_PRESENT, verdict(absent, || shown(&there), REINSTALL));
    each(results, checks::PROGRAM_EXECUTABLE, &there, |program| match program.mode & 0o111 {
        0 => Err(format!("expected an executable file, got mode {:04o}", program.mode)),
        _ => Ok(format!("mode {:04o}", program.mode)),
    });
    each(results, checks::PROGRAM_ARCHITECTURE, &there, |program| match read_elf(&program.bytes) {
        None => Err("expected a program, got no ELF header".to_owned()),
        Some(elf) if elf.machine == ARCH => Ok(elf.machine),
        Some(elf) => Err(format!("built for {}, this machine is {ARCH}", elf.machine)),
    });
    each(results, checks::PROGRAM_STATIC, &there, |program| {
        match read_elf(&program.bytes).and_then(|elf| elf.interpreter) {
            None => Ok("static".to_owned()),
            Some(loader) => Err(format!("dynamically linked: needs {loader} and libraries of the right version")),
        }
    });
    // Only a program that can be executed reports its version.
    let own = read(Path::new("/proc/self/exe"), MAX_PROGRAM).unwrap_or_default();
    each(results, checks::PROGRAM_VERSION, &there, |program| version(program, &own));
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

fn open(target: &CheckTarget, path: &HostPath) -> Result<Program, String> {
    let reached = target.reach(path).map_err(|why| why.to_string())?;
    let metadata = fs::metadata(&reached).map_err(|why| why.to_string())?;
    let bytes = read_nofollow(&reached, MAX_PROGRAM).map_err(|why| why.to_string())?;
    Ok(Program { path: path.clone(), reached, bytes, mode: metadata.permissions().mode() & 0o7777 })
}

fn each(results: &mut Results, check: &Check, programs: &[Program], look: impl Fn(&Program) -> Result<String, String>) {
    results.run(check, || {
        let (mut fine, mut wrong) = (BTreeSet::new(), Vec::new());
        for program in programs {
            match look(program) {
                Ok(found) => drop(fine.insert(found)),
                Err(why) => wrong.push(format!("{}: {why}", program.path)),
            }
        }
        verdict(wrong, || joined(fine), REINSTALL)
    });
}

fn verdict(wrong: Vec<String>, fine: impl FnOnce() -> String, next: &str) -> CheckVerdict {
    if wrong.is_empty() { CheckVerdict::pass(fine()) } else { CheckVerdict::fail(wrong.join("; "), next) }
}

/// Returns the program's version: equal bytes are this version; any other program is run, as the runtime would.
fn version(program: &Program, own: &[u8]) -> Result<String, String> {
    let ours = env!("CARGO_PKG_VERSION");
    if program.bytes == own {
        return Ok(format!("{ours}, identical to this program"));
    }
    let reported = kernel::output(Command::new(&program.reached).args(["version", "-o", "json"]).env_clear());
    let reported = reported.ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    match reported.as_ref().and_then(|reported| reported["version"].as_str()) {
        Some(theirs) if theirs == ours => Ok(format!("{ours}, but another build than this program")),
        Some(theirs) => Err(format!("expected version {ours}, got {theirs}")),
        None => Err(format!("expected detour {ours}, got another program, or a version that does not report itself")),
    }
}

const MAGIC: &[u8] = b"\x7fELF";
const LITTLE_ENDIAN: u8 = 1;
/// `PT_INTERP`: the program that loads a dynamic one.
const INTERPRETER: u64 = 3;

/// The fields of an ELF header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Elf {
    /// The architecture as in [`std::env::consts::ARCH`], or else the number `e_machine`.
    pub(super) machine: String,
    /// The dynamic loader; `None` for a static program.
    pub(super) interpreter: Option<String>,
}

/// Reads an ELF header; `None` if the bytes are not an ELF program.
pub(super) fn read_elf(bytes: &[u8]) -> Option<Elf> {
    if bytes.get(..4)? != MAGIC {
        return None;
    }
    let (wide, little) = (*bytes.get(4)? == 2, *bytes.get(5)? == LITTLE_ENDIAN);
    let number = |at: usize, size: usize| {
        let mut field: Vec<u8> = bytes.get(at..at.checked_add(size)?)?.to_vec();
        if little {
            field.reverse();
        }
        Some(field.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    let place = |at: usize, size: usize| usize::try_from(number(at, size)?).ok();
    let machine = number(18, 2)?;
    let (table, entry, count) = if wide {
        (place(32, 8)?, place(54, 2)?, place(56, 2)?)
    } else {
        (place(28, 4)?, place(42, 2)?, place(44, 2)?)
    };
    let (offset, size, word) = if wide { (8, 32, 8) } else { (4, 16, 4) };
    let interpreter = (0..count).find_map(|index| {
        let header = table.checked_add(index.checked_mul(entry)?)?;
        if number(header, 4)? != INTERPRETER {
            return None;
        }
        let (start, length) = (place(header + offset, word)?, place(header + size, word)?);
        let name = bytes.get(start..start.checked_add(length)?).unwrap_or_default();
        Some(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
    });
    Some(Elf { machine: machine_name(machine, wide, little), interpreter })
}

/// `EM_…` (elf.h).
fn machine_name(machine: u64, wide: bool, little: bool) -> String {
    match (machine, wide, little) {
        (62, ..) => "x86_64".to_owned(),
        (183, ..) => "aarch64".to_owned(),
        (3, ..) => "x86".to_owned(),
        (40, ..) => "arm".to_owned(),
        (22, ..) => "s390x".to_owned(),
        (21, _, true) => "powerpc64le".to_owned(),
        (21, _, false) => "powerpc64".to_owned(),
        (243, true, _) => "riscv64".to_owned(),
        (other, ..) => format!("machine {other}"),
    }
}

/// Compares the node with the installation's record. Differences that another check reports are not repeated.
pub(super) fn examine_installation(target: &CheckTarget, results: &mut Results) {
    let failed = results.failed_in(CheckGroup::Node);
    let verdict = match failed {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A 64-bit header with one program header.
    fn elf(little: bool, machine: u16, kind: u32, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, if little { 1 } else { 2 }]);
        let mut put = |at: usize, value: u64, size: usize| {
            let mut field = value.to_be_bytes()[8 - size..].to_vec();
            if little {
                field.reverse();
            }
            bytes[at..at + size].copy_from_slice(&field);
        };
        put(18, machine.into(), 2);
        put(32, 64, 8);
        put(54, 56, 2);
        put(56, 1, 2);
        put(64, kind.into(), 4);
        put(72, 120, 8);
        put(96, name.len() as u64, 8);
        [bytes, name.as_bytes().to_vec()].concat()
    }

    #[test]
    fn machine_and_loader_are_found_in_either_byte_order() {
        let of = |bytes: &[u8]| read_elf(bytes).expect("an ELF program");
        let loader = Some("/lib/ld.so".to_owned());
        assert_eq!(
            of(&elf(true, 62, 3, "/lib/ld.so\0")),
            Elf { machine: "x86_64".into(), interpreter: loader.clone() }
        );
        assert_eq!(of(&elf(false, 22, 3, "/lib/ld.so\0")), Elf { machine: "s390x".into(), interpreter: loader });
        assert_eq!(of(&elf(true, 183, 1, "")), Elf { machine: "aarch64".into(), interpreter: None });
        assert_eq!(of(&elf(true, 999, 1, "")).machine, "machine 999");
    }

    #[test]
    fn this_very_program_is_for_this_machine() {
        let own = fs::read("/proc/self/exe").expect("readable");
        assert_eq!(read_elf(&own).expect("an ELF program").machine, ARCH);
    }

    #[test]
    fn what_is_cut_short_or_none_is_survived() {
        let whole = elf(true, 62, 3, "/lib/ld.so\0");
        for length in 0..whole.len() {
            let _ = read_elf(&whole[..length]);
        }
        assert_eq!(read_elf(b"#!/bin/sh\n"), None);
    }
}
