//! Replaces files atomically: readers find the old or the new contents, never a part.

use super::open::{create_directories, create_new, open_of_any_kind};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

/// How often a file is written again because another process removed it or its directory meanwhile.
const ATTEMPTS: usize = 100;

/// What a crash of the node may leave of a file that was just replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Anything: the file is useless after a reboot. Nothing is flushed to the disk.
    Volatile,
    /// The old or the new contents, but never no file.
    OldOrNew,
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
    let (temporary, directory) = (path.with_file_name(temporary), path.parent().unwrap_or(Path::new("/")));
    let is_durable = durability == Durability::OldOrNew;
    let is_new = is_durable && !path.exists();
    let replace = || {
        let mut file = create_new(&temporary)?;
        fill(&mut file)?;
        if is_durable {
            file.sync_all()?;
        }
        drop(file);
        fs::rename(&temporary, path)?;
        if is_new { sync_directory(directory) } else { Ok(()) }
    };
    let mut replaced = replace();
    for _ in 0..ATTEMPTS {
        // Another process removes empty directories, and the files of killed processes.
        if !matches!(&replaced, Err(error) if error.kind() == ErrorKind::NotFound) {
            break;
        }
        create_directories(directory)?;
        replaced = replace();
    }
    if replaced.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    replaced
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

/// Flushes a directory to the disk, so that new names and removals in it survive a crash (fsync(2)).
///
/// # Errors
/// The directory can't be opened or flushed.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    open_of_any_kind(directory)?.sync_all()
}
