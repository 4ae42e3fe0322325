//! Writes, renames and removes the files of an installation, each change flushed to the disk.

use crate::trusted_file::{Durability, replace_file, sync_directory};
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

const PREFIX: &str = ".detour-";
const SUFFIX: &str = ".tmp";

/// Returns whether `name` is the name of a temporary file, whose writer is at work or was killed. Runtimes
/// load such a file neither as a configuration nor as a plugin.
pub(super) fn is_leftover(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// The owner of a file that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileOwner {
    /// The user of this process: the plugin uses its own files only if root owns them.
    Own,
    /// The owner of the file that is replaced.
    Kept,
}

/// Replaces the file at `path` with what `fill` writes, with the permission bits `mode`.
pub(super) fn write(
    path: &Path,
    mode: u32,
    owner: FileOwner,
    fill: impl Fn(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let replaced = (owner == FileOwner::Kept).then(|| fs::symlink_metadata(path).ok()).flatten();
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    replace_file(path, &format!("{PREFIX}{name}{SUFFIX}"), Durability::OldOrNew, |file| {
        fill(file)?;
        if let Some(replaced) = &replaced {
            let own = file.metadata()?;
            if (own.uid(), own.gid()) != (replaced.uid(), replaced.gid()) {
                fchown(&*file, Some(replaced.uid()), Some(replaced.gid()))?;
            }
        }
        file.set_permissions(Permissions::from_mode(mode))
    })?;
    sync_parent(path)
}

/// Removes the file at `path`, if it exists.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => sync_parent(path),
    }
}

fn sync_parent(path: &Path) -> io::Result<()> {
    sync_directory(path.parent().unwrap_or(Path::new("/")))
}
