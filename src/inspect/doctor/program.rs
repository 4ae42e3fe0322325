//! The program that the configuration names, where the runtime looks for it.
//!
//! For which machine a program is, and whether it needs anything of it: the ELF header (elf(5)).
//!
//! Whether the node still has what was installed.

use super::report::CheckGroup;
use super::report::{Check, CheckVerdict, Results};
use super::report::{CheckTarget, Installation};
use super::{configuration, credentials, kernel};
use crate::host_path::HostPath;
use crate::trusted_file;
use crate::trusted_file::{read, read_nofollow};
use serde_json::Value;
use std::collections::BTreeSet;
use std::env::consts::ARCH;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(super) const TRUSTED: Check =
    Check::of(CheckGroup::Node, "program-trusted", "only root can change what is executed");
pub(super) const PRESENT: Check =
    Check::of(CheckGroup::Node, "program-present", "the program is where runtimes look for it");
pub(super) const EXECUTABLE: Check = Check::of(CheckGroup::Node, "program-executable", "it may be executed");
pub(super) const ARCHITECTURE: Check = Check::of(CheckGroup::Node, "program-architecture", "it is for this machine");
pub(super) const STATIC: Check = Check::of(CheckGroup::Node, "program-static", "it needs no library of the node");
pub(super) const VERSION: Check = Check::of(CheckGroup::Node, "program-version", "it is of this version");
/// All of them.
pub(super) const ALL: [&Check; 6] = [&TRUSTED, &PRESENT, &EXECUTABLE, &ARCHITECTURE, &STATIC, &VERSION];
/// How many files that are not trusted are named; the rest is counted.
const NAMED: usize = 3;

/// A program is larger only by mistake: this one has 10 MB, and 100 MB with debugging information.
const LARGEST: u64 = 256 << 20;
const REINSTALL: &str = "install it again: detour install, or see why the agent on this node does not";

/// A program that is there.
struct Program {
    path: HostPath,
    reached: PathBuf,
    bytes: Vec<u8>,
    mode: u32,
}

/// Looks at the programs called `kinds` in each directory, and at those that were installed.
pub(super) fn examine(case: &CheckTarget, kinds: &BTreeSet<String>, checkup: &mut Results) {
    let in_dirs = case.bin_dirs.iter().flat_map(|dir| kinds.iter().map(|kind| dir.join(kind)));
    let wanted: BTreeSet<HostPath> = in_dirs.chain(case.installation.programs.iter().cloned()).collect();
    let directories = case.bin_dirs.iter().cloned().chain(wanted.iter().map(HostPath::parent)).collect();
    checkup.add(&TRUSTED, trusted(case, &directories));
    let (mut there, mut absent) = (Vec::new(), Vec::new());
    for path in wanted {
        match open(case, &path) {
            Ok(program) => there.push(program),
            Err(why) => absent.push(format!("{path}: {why}")),
        }
    }
    if there.is_empty() && absent.is_empty() {
        let why = "no configuration says how it is called, and no installation was logged";
        checkup.add(&PRESENT, CheckVerdict::not_checked(why));
        for check in &ALL[2..] {
            checkup.after(&[&PRESENT], check, || CheckVerdict::not_checked(why));
        }
        return;
    }
    let shown = |programs: &[Program]| programs.iter().map(|p| p.path.to_string()).collect::<Vec<_>>().join(", ");
    checkup.add(&PRESENT, verdict(absent, || shown(&there), REINSTALL));
    each(checkup, &[&PRESENT], &EXECUTABLE, &there, |program| match program.mode & 0o111 {
        0 => Err(format!("mode {:04o}", program.mode)),
        _ => Ok(format!("mode {:04o}", program.mode)),
    });
    each(checkup, &[&PRESENT], &ARCHITECTURE, &there, |program| match read_elf(&program.bytes) {
        None => Err("it is no program (no ELF header)".to_owned()),
        Some(elf) if elf.machine == ARCH => Ok(elf.machine),
        Some(elf) => Err(format!("it is for {}, this machine is {ARCH}", elf.machine)),
    });
    each(checkup, &[&PRESENT, &ARCHITECTURE], &STATIC, &there, |program| {
        match read_elf(&program.bytes).and_then(|elf| elf.interpreter) {
            None => Ok("static".to_owned()),
            Some(loader) => Err(format!("it is dynamic, and needs {loader} and libraries of the right version")),
        }
    });
    // One that can't be run can't say what it is.
    let own = read(Path::new("/proc/self/exe"), LARGEST).unwrap_or_default();
    each(checkup, &[&TRUSTED, &PRESENT, &EXECUTABLE, &ARCHITECTURE], &VERSION, &there, |program| {
        version(program, &own)
    });
}

/// The plugin executes what is in these directories, its own and others' plugins, as root.
fn trusted(case: &CheckTarget, directories: &BTreeSet<HostPath>) -> CheckVerdict {
    let (mut fine, mut wrong) = (Vec::new(), Vec::new());
    for directory in directories {
        match all_trusted(case, directory) {
            Ok(()) => fine.push(directory.to_string()),
            Err(why) => wrong.push((directory.to_string(), why)),
        }
    }
    if wrong.is_empty() {
        return CheckVerdict::pass(fine.join(", "));
    }
    let (directories, why): (Vec<_>, Vec<_>) = wrong.into_iter().unzip();
    let directories = directories.join(" ");
    let next =
        format!("plugins there are not executed until: chown -R root:root {directories}; chmod -R go-w {directories}");
    CheckVerdict::fail(why.join("; "), next)
}

/// What is not trusted of a directory and the files in it. A missing one is another check's.
fn all_trusted(case: &CheckTarget, directory: &HostPath) -> Result<(), String> {
    let Ok(reached) = case.reach(directory) else { return Ok(()) };
    match trusted_file::check(&reached) {
        Err(error) if error.is_not_found() => return Ok(()),
        Err(error) => return Err(on_node(case, &error)),
        Ok(_) => {}
    }
    let entries = fs::read_dir(&reached).map_err(|why| format!("{directory}: {why}"))?;
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let files = names.iter().filter_map(|name| case.reach(&directory.join(name)).ok()).filter(|file| file.is_file());
    let wrong: Vec<_> = files.filter_map(|file| trusted_file::check(&file).err()).collect();
    if wrong.is_empty() {
        return Ok(());
    }
    let named = wrong.iter().take(NAMED).map(|error| on_node(case, error)).collect::<Vec<_>>().join("; ");
    let more = wrong.len().saturating_sub(NAMED);
    Err(if more > 0 { format!("{named}; and {more} more in {directory}") } else { named })
}

/// The error with the path that the node has for the file.
fn on_node(case: &CheckTarget, error: &trusted_file::FileError) -> String {
    let path = |path: &Path| match path.strip_prefix(&case.mount) {
        Ok(below) => Path::new("/").join(below).display().to_string(),
        Err(_) => path.display().to_string(),
    };
    match error {
        trusted_file::FileError::Owner { path: file, uid } => format!("{} is owned by UID {uid}", path(file)),
        trusted_file::FileError::Writable { path: file, mode } => format!("{} has mode {mode:04o}", path(file)),
        trusted_file::FileError::Io(error) => error.to_string(),
    }
}

fn open(case: &CheckTarget, path: &HostPath) -> Result<Program, String> {
    let reached = case.reach(path).map_err(|why| why.to_string())?;
    let metadata = fs::metadata(&reached).map_err(|why| why.to_string())?;
    let bytes = read_nofollow(&reached, LARGEST).map_err(|why| why.to_string())?;
    Ok(Program { path: path.clone(), reached, bytes, mode: metadata.permissions().mode() & 0o7777 })
}

fn each(
    checkup: &mut Results,
    needed: &[&Check],
    check: &Check,
    programs: &[Program],
    look: impl Fn(&Program) -> Result<String, String>,
) {
    checkup.after(needed, check, || {
        let (mut fine, mut wrong) = (BTreeSet::new(), Vec::new());
        for program in programs {
            match look(program) {
                Ok(found) => drop(fine.insert(found)),
                Err(why) => wrong.push(format!("{}: {why}", program.path)),
            }
        }
        verdict(wrong, || fine.into_iter().collect::<Vec<_>>().join(", "), REINSTALL)
    });
}

fn verdict(wrong: Vec<String>, fine: impl FnOnce() -> String, next: &str) -> CheckVerdict {
    if wrong.is_empty() { CheckVerdict::pass(fine()) } else { CheckVerdict::fail(wrong.join("; "), next) }
}

/// The same bytes are the same version; others are asked, as they are what the runtime runs.
fn version(program: &Program, own: &[u8]) -> Result<String, String> {
    let ours = env!("CARGO_PKG_VERSION");
    if program.bytes == own {
        return Ok(format!("{ours}, the same as this program"));
    }
    let said = kernel::output(Command::new(&program.reached).args(["version", "-o", "json"]).env_clear());
    let said = said.ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    match said.as_ref().and_then(|said| said["version"].as_str()) {
        Some(theirs) if theirs == ours => Ok(format!("{ours}, another build of it than this program")),
        Some(theirs) => Err(format!("it is version {theirs}, this program is {ours}")),
        None => Err(format!("it is not detour, or too old to say its version; this program is {ours}")),
    }
}

const MAGIC: &[u8] = b"\x7fELF";
const LITTLE_ENDIAN: u8 = 1;
/// `PT_INTERP`: the program that loads a dynamic one.
const INTERPRETER: u64 = 3;

/// What a program's header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Elf {
    /// As [`std::env::consts::ARCH`] has it, else `e_machine` as a number.
    pub(super) machine: String,
    /// The loader that it needs; none where it is static.
    pub(super) interpreter: Option<String>,
}

/// Reads a header; `None` where the bytes are no ELF program.
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

pub(super) const INSTALLATION: Check = Check::of(CheckGroup::Node, "installation", "all is as it was installed");

/// How many differences are named; the rest is counted.
const INSTALLATION_NAMED: usize = 3;

/// Compares. What another line says already is not said again.
pub(super) fn examine_installation(case: &CheckTarget, checkup: &mut Results) {
    let all = ALL
        .into_iter()
        .chain(configuration::ALL)
        .chain(credentials::ALL)
        .chain([&configuration::NODE_CONFIGURATION_VALID]);
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
