//! Files that are there whole or not at all, whatever kills the writer.

use crate::trusted_file::{create_directories, create_new, open_directory};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

const PREFIX: &str = ".detour-";
const SUFFIX: &str = ".tmp";

/// Whether a file of that name is one that is being written, or was when its writer was killed.
/// No runtime takes it for a configuration, and none for a plugin.
pub(super) fn is_leftover(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// Whose a file is that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileOwner {
    /// This process's user: the plugin uses its own files only if root owns them.
    Own,
    /// That of the file that is replaced.
    Kept,
}

/// Writes `path` anew: a file beside it, flushed to the disk and closed (one that is still open for
/// writing can't be executed: ETXTBSY), takes its place. Runtimes see that (containerd overlooks a
/// rename from another directory). The permission bits become `mode`.
pub(super) fn write(
    path: &Path,
    mode: u32,
    owner: FileOwner,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    create_directories(directory)?;
    let temporary = beside(path);
    let of = (owner == FileOwner::Kept).then(|| fs::symlink_metadata(path).ok()).flatten();
    let written = fill_file(&temporary, of.as_ref(), mode, fill).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written?;
    flush(directory)
}

fn fill_file(
    temporary: &Path,
    owner: Option<&Metadata>,
    mode: u32,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = create_new(temporary)?;
    fill(&mut file)?;
    if let Some(owner) = owner {
        let own = file.metadata()?;
        if (own.uid(), own.gid()) != (owner.uid(), owner.gid()) {
            fchown(&file, Some(owner.uid()), Some(owner.gid()))?;
        }
    }
    file.set_permissions(Permissions::from_mode(mode))?;
    file.sync_all()
}

/// Gives `from` the name `to`, in the place of what has it.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    flush(to.parent().unwrap_or(Path::new("/")))
}

/// Gives `path` a second name; one that it, or another, has already is kept.
pub(super) fn second_name(path: &Path, name: &Path) -> io::Result<()> {
    match fs::hard_link(path, name) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => flush(path.parent().unwrap_or(Path::new("/"))),
    }
}

/// Removes a file; that it is gone is no error.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => flush(path.parent().unwrap_or(Path::new("/"))),
    }
}

fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    path.with_file_name(format!("{PREFIX}{name}{SUFFIX}"))
}

/// A name lasts when its directory is on the disk.
fn flush(directory: &Path) -> io::Result<()> {
    open_directory(directory)?.sync_all()
}
