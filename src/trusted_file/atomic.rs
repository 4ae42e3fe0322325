//! Replaces files atomically: readers find the old or the new contents, never a part.

use super::open::{create_directories, create_new, open_directory};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

/// What a crash of the node may leave of a file that was just replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Anything: the file is useless after a reboot. Nothing is flushed to the disk.
    Volatile,
    /// The old or the new contents, but never no file.
    OldOrNew,
    /// The new contents.
    New,
}

/// Replaces the file at `path` with what `fill` writes, and creates missing directories.
///
/// The contents are written to the file `temporary` in the same directory, since containerd does not notice a
/// rename from another directory. It is closed before the rename, since a file that is open for writing can't
/// be executed (ETXTBSY). Its mode is 0600 unless `fill` changes it: the contents may include secrets.
///
/// # Errors
/// The file or a directory can't be written. `path` is unchanged, unless only flushing its directory failed.
pub fn replace_file(
    path: &Path,
    temporary: &str,
    durability: Durability,
    fill: impl Fn(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = path.with_file_name(temporary);
    let is_new = durability == Durability::OldOrNew && !path.exists();
    let replaced = loop {
        let written = create_with_parents(&temporary).and_then(|mut file| {
            fill(&mut file)?;
            if durability == Durability::Volatile { Ok(()) } else { file.sync_all() }
        });
        if written.is_err() {
            break written;
        }
        match fs::rename(&temporary, path) {
            // Another process removed the directory, or the file as a leftover of a killed process.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            renamed => break renamed,
        }
    };
    if replaced.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    replaced?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    match durability {
        Durability::New => sync_directory(directory),
        Durability::OldOrNew if is_new => match sync_directory(directory) {
            // Another process removed the file together with its directory.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            synced => synced,
        },
        Durability::OldOrNew | Durability::Volatile => Ok(()),
    }
}

/// Replaces the contents of the existing file at `path` atomically, through a new file of this name in the same
/// directory. A crash of the node may lose them.
///
/// # Errors
/// [`ErrorKind::NotFound`]: the file does not exist, or another process removes it meanwhile; it is not created. The
/// file can't be written.
pub fn exchange_file(path: &Path, temporary: &str, fill: impl Fn(&mut File) -> io::Result<()>) -> io::Result<()> {
    let temporary = path.with_file_name(temporary);
    let exchanged = create_new(&temporary).and_then(|mut file| {
        fill(&mut file)?;
        Ok(renameat_with(CWD, &temporary, CWD, path, RenameFlags::EXCHANGE)?)
    });
    let _ = fs::remove_file(&temporary);
    exchanged
}

/// Creates the file at `path` as [`create_new`] does, and the directories that contain it.
///
/// # Errors
/// The file or a directory can't be created.
pub fn create_with_parents(path: &Path) -> io::Result<File> {
    let Some(directory) = path.parent() else { return Err(ErrorKind::InvalidInput.into()) };
    // Another process may remove the directory just after it was created.
    loop {
        match create_new(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => create_directories(directory)?,
            created => return created,
        }
    }
}

/// Flushes a directory to the disk, so that new names and removals in it survive a crash (fsync(2)).
///
/// # Errors
/// The directory can't be opened or flushed.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    open_directory(directory)?.sync_all()
}
