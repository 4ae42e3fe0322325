//! Opens, reads and creates files without following links or waiting for FIFOs of untrusted users.
#![allow(clippy::disallowed_methods, reason = "the only file that opens files")]

use super::check::{FileError, check, is_trusted, verify};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, ResolveFlags, openat, openat2, renameat_with};
use rustix::io::{Errno, retry_on_intr};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::Path;

/// Identifies a file independently of the path or descriptor that leads to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// The device of the file system.
    pub device: u64,
    /// The inode in that file system.
    pub inode: u64,
}

impl FileId {
    /// Returns the identity of the file with this metadata.
    #[must_use]
    pub fn of(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Open flags so that opening a FIFO does not wait for its other end, and a terminal does not become the
/// controlling terminal of the process.
const NON_BLOCKING: OFlags = OFlags::NONBLOCK.union(OFlags::NOCTTY);
/// The mode of a file that is created: accessible for its owner only.
const OWNER_ONLY: Mode = Mode::RUSR.union(Mode::WUSR);

/// Opens the regular file at `path`; a file that `flags` create is accessible for its owner only. It does not follow a
/// symbolic link in the last part of the path, and does not wait for the other end of a FIFO.
///
/// # Errors
/// The file can't be opened; [`ErrorKind::InvalidInput`] if it is not a regular file.
pub fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    open_regular(path, flags | OFlags::NOFOLLOW).map(|(file, _)| file)
}

/// Opens the regular file at `path` for reading; follows symbolic links, also those of proc(5) whose
/// target has been removed, such as `/proc/self/exe`.
///
/// # Errors
/// The file can't be opened, or is not a regular file.
pub fn follow(path: &Path) -> io::Result<File> {
    open_regular(path, OFlags::RDONLY).map(|(file, _)| file)
}

/// Opens the file or directory at `path` for reading, whatever its kind; follows symbolic links. It does not wait for
/// the other end of a FIFO.
///
/// # Errors
/// The file can't be opened.
pub fn open_of_any_kind(path: &Path) -> io::Result<File> {
    Ok(open_any(path, OFlags::RDONLY | NON_BLOCKING)?)
}

fn open_regular(path: &Path, flags: OFlags) -> io::Result<(File, Metadata)> {
    match open_any(path, flags | NON_BLOCKING) {
        Err(Errno::LOOP) if flags.contains(OFlags::NOFOLLOW) && path.is_symlink() => {
            Err(not_regular("a symbolic link"))
        }
        opened => regular(opened?),
    }
}

/// Opens a file that may be of any kind. `std` makes a second system call in static builds, because musl does.
fn open_any(path: &Path, flags: OFlags) -> Result<File, Errno> {
    retry_on_intr(|| openat(CWD, path, flags | OFlags::CLOEXEC, OWNER_ONLY)).map(File::from)
}

/// Reads the regular file at `path`, of at most `limit` bytes; follows symbolic links.
///
/// # Errors
/// The file can't be read, is not a regular file, or is larger.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    contents(open_regular(path, OFlags::RDONLY)?, limit)
}

/// Reads a text file as [`read`] does.
///
/// # Errors
/// As [`read`]; [`ErrorKind::InvalidData`] if it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?).map_err(|_| io::Error::new(ErrorKind::InvalidData, "expected UTF-8"))
}

/// Reads the regular file at `path`, of at most `limit` bytes, unless its last part is a symbolic link.
///
/// # Errors
/// As [`open`]; the file is larger.
pub fn read_nofollow(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    contents(open_regular(path, OFlags::RDONLY | OFlags::NOFOLLOW)?, limit)
}

/// Reads the file at `path`, of at most `limit` bytes, if only trusted users can change it or the path
/// that leads to it.
///
/// # Errors
/// The file can't be read, is larger, or [`check`] refuses it.
pub fn read_trusted(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let (file, metadata) = open_regular(&check(path)?, OFlags::RDONLY | OFlags::NOFOLLOW)?;
    // A trusted user may have changed the path meanwhile, so check the file that is read.
    verify(path, &metadata, true)?;
    Ok(contents((file, metadata), limit)?)
}

/// Creates the file at `path` for writing, readable for its owner only. An existing file, link or FIFO is removed
/// first: the path is that of a temporary file whose writer was killed.
///
/// # Errors
/// The file can't be created; the path is a directory, or another process created it again.
pub fn create_new(path: &Path) -> io::Result<File> {
    // O_EXCL follows no symbolic link (open(2)).
    let create = || open_any(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL);
    match create() {
        Err(Errno::EXIST) => {
            fs::remove_file(path)?;
            Ok(create()?)
        }
        created => Ok(created?),
    }
}

/// Opens the file at `path`, which is below `directory`, for appending; creates it if it is missing.
///
/// It follows no symbolic link below `directory`, so that a user who can write to a directory on the path cannot
/// redirect the writer (`/var/log` belongs to group syslog on some systems).
///
/// # Errors
/// `path` is not below `directory`; the file can't be opened, or the kernel is older than 5.6; it is not a regular file,
/// belongs to an untrusted user, or has a second name (hard link).
pub fn append_below(directory: &Path, path: &Path) -> io::Result<File> {
    let refused = |_| io::Error::new(ErrorKind::InvalidInput, format!("expected a path below {}", directory.display()));
    let (directory, path) = (open_of_any_kind(directory)?, path.strip_prefix(directory).map_err(refused)?);
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC | NON_BLOCKING;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let opened = retry_on_intr(|| openat2(&directory, path, flags, OWNER_ONLY | Mode::RGRP, within));
    let opened =
        opened.map_err(|errno| if errno == Errno::LOOP { not_regular("a symbolic link") } else { errno.into() })?;
    let (file, metadata) = regular(opened.into())?;
    let denied = |reason: String| Err(io::Error::new(ErrorKind::PermissionDenied, reason));
    match (metadata.uid(), metadata.nlink()) {
        (uid, _) if !is_trusted(uid) => denied(format!("owned by UID {uid}; expected root; remove the file first")),
        (_, 0 | 1) => Ok(file),
        (_, names) => denied(format!("expected one name, got {names} (hard links); remove the file first")),
    }
}

/// Creates the directory at `path` and its missing parents, writable for this process's user only. It does not
/// rely on the umask: that of a runtime may be 0.
///
/// # Errors
/// A directory can't be created.
pub fn create_directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Returns the names in the directory at `path` that are UTF-8, sorted.
///
/// # Errors
/// The directory can't be opened or read. One unreadable entry fails the call, since the list would be incomplete
/// without it.
pub fn names_in(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

fn contents((file, metadata): (File, Metadata), limit: u64) -> io::Result<Vec<u8>> {
    // Files of proc(5) report size 0.
    let expected = metadata.len().min(limit) + 1;
    let mut contents = Vec::with_capacity(usize::try_from(expected).unwrap_or_default());
    file.take(limit + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > limit {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("expected at most {limit} bytes, got more")));
    }
    Ok(contents)
}

fn regular(file: File) -> io::Result<(File, Metadata)> {
    let metadata = file.metadata()?;
    match metadata.file_type() {
        kind if kind.is_file() => Ok((file, metadata)),
        kind if kind.is_dir() => Err(not_regular("a directory")),
        kind if kind.is_fifo() => Err(not_regular("a FIFO")),
        _ => Err(not_regular("a device")),
    }
}

fn not_regular(kind: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, format!("expected a regular file, got {kind}"))
}

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
