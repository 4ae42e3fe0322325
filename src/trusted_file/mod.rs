//! Opens, reads and writes the node's files as root, so that the owner of a file cannot harm this process.
//!
//! | function | for |
//! |---|---|
//! | [`read`], [`read_text`] | a file whose contents are checked by the caller: a regular file of limited size, opened without blocking; also files of proc(5) |
//! | [`open()`], [`read_nofollow`] | the same for paths that must not end in a symbolic link: state, and paths that [`crate::host_path`] has resolved |
//! | [`open_of_any_kind`] | a directory, a namespace, or this program, whose kind the caller knows or checks |
//! | [`read_trusted`] | a file that decides what root does: credentials, configuration |
//! | [`check()`] | a path that root executes or uses: only trusted users can change it |
//! | [`create_new`], [`append_below`] | a file that is written: never through a link that another user made |
//! | [`replace_file`], [`exchange_file`] | a file that is replaced as a whole |
//! | [`create_directories`], [`names_in`], [`sync_directory`] | a directory that is created, listed or flushed to the disk |
//! | [`FileId`] | whether two paths or open files are the same file |
//!
//! A trusted user is root or the user of this process. Group root counts as root, as in sudo's
//! `sudo_secure_path`: archives of the CNI plugins up to 1.4 make `/opt/cni/bin` writable for it.

#![allow(clippy::disallowed_methods, reason = "the only file that opens files")]

use crate::links;
use nix::unistd::geteuid;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, ResolveFlags, openat, openat2, renameat_with};
use rustix::io::{Errno, retry_on_intr};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The sticky bit: only the owners of an entry and of its directory can replace the entry (inode(7)).
const STICKY: u32 = 0o1000;
const GROUP_WRITABLE: u32 = 0o020;
const OTHER_WRITABLE: u32 = 0o002;

/// The reason why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An untrusted user owns a part of the path, and can therefore replace the file.
    #[error("{0} is owned by UID {uid}; expected root; run chown root:root {0}", path.display())]
    Owner {
        /// The file or directory.
        path: PathBuf,
        /// The UID of its owner.
        uid: u32,
    },
    /// Untrusted users can write to a part of the path.
    #[error("{0} has mode {mode:04o}; expected one that only root can write to; run chmod go-w {0}", path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

impl FileError {
    /// Returns the error with the path on the node whose file system is mounted at `mount`.
    #[must_use]
    pub fn below(mut self, mount: &Path) -> Self {
        if let Self::Owner { path, .. } | Self::Writable { path, .. } = &mut self
            && let Ok(below) = path.strip_prefix(mount)
        {
            *path = Path::new("/").join(below);
        }
        self
    }

    /// Returns whether the path does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    }
}

/// Resolves the symbolic links of `path` and checks that only trusted users can change the result.
///
/// Trusted users must own each directory, each link and the file itself, and no other user may write to
/// them. A directory on the path may be writable for others if it is sticky, such as `/tmp`.
///
/// # Errors
/// A part of the path is not trusted, or its metadata can't be read.
pub fn check(path: &Path) -> Result<PathBuf, FileError> {
    let root = Path::new("/");
    verify(root, &fs::symlink_metadata(root)?, false)?;
    links::resolve(root, &std::path::absolute(path)?, |part, is_last| {
        let metadata = fs::symlink_metadata(part)?;
        verify(part, &metadata, is_last)?;
        Ok(if metadata.is_symlink() { Some(fs::read_link(part)?) } else { None })
    })
}

/// Returns whether the user is root or the user of this process.
#[must_use]
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// Checks that only trusted users can write to the file or directory. In a sticky directory on the way to it, others can
/// replace only their own entries; a symbolic link has no mode.
fn verify(path: &Path, metadata: &Metadata, is_last: bool) -> Result<(), FileError> {
    let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if !is_trusted(uid) {
        return Err(FileError::Owner { path: path.to_owned(), uid });
    }
    if metadata.is_symlink() || (!is_last && mode & STICKY != 0) {
        return Ok(());
    }
    let group_writable = mode & GROUP_WRITABLE != 0 && (metadata.gid() != 0 || has_acl(path));
    let writable = mode & OTHER_WRITABLE != 0 || group_writable;
    if writable { Err(FileError::Writable { path: path.to_owned(), mode }) } else { Ok(()) }
}

/// Returns whether the file has an access control list. The group permission bits are then the maximum that
/// the list grants to any other user (acl(5), "Correspondence between ACL entries and file permission bits").
fn has_acl(path: &Path) -> bool {
    let mut buffer: [u8; 0] = [];
    let found = rustix::fs::getxattr(path, "system.posix_acl_access", &mut buffer);
    !matches!(found, Err(Errno::NODATA | Errno::OPNOTSUPP))
}

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
/// The mode of a file that is created: accessible only to its owner.
const OWNER_ONLY: Mode = Mode::RUSR.union(Mode::WUSR);

/// Opens the regular file at `path`; a file that `flags` create is accessible only to its owner. It does not follow a
/// symbolic link in the last part of the path, and does not wait for the other end of a FIFO.
///
/// # Errors
/// The file can't be opened; [`ErrorKind::InvalidInput`] if it is not a regular file.
pub fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    open_regular(path, flags | OFlags::NOFOLLOW).map(|(file, _)| file)
}

/// Opens the file or directory of any kind at `path` for reading; follows symbolic links, also those of
/// proc(5) whose target has been removed, such as `/proc/self/exe`. It does not wait for the other end of a FIFO.
///
/// # Errors
/// The file can't be opened.
pub fn open_of_any_kind(path: &Path) -> io::Result<File> {
    Ok(open_any(path, OFlags::RDONLY | NON_BLOCKING)?)
}

fn open_regular(path: &Path, flags: OFlags) -> io::Result<(File, Metadata)> {
    regular(open_any(path, flags | NON_BLOCKING))
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
    let (file, metadata) = regular(opened.map(File::from))?;
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

/// Returns the opened file if it is a regular one. A link that is not followed, or too many of them, give ELOOP.
fn regular(opened: Result<File, Errno>) -> io::Result<(File, Metadata)> {
    let not_regular = |kind| io::Error::new(ErrorKind::InvalidInput, format!("expected a regular file, got {kind}"));
    let file =
        opened.map_err(|errno| if errno == Errno::LOOP { not_regular("a symbolic link") } else { errno.into() })?;
    let metadata = file.metadata()?;
    match metadata.file_type() {
        kind if kind.is_file() => Ok((file, metadata)),
        kind if kind.is_dir() => Err(not_regular("a directory")),
        kind if kind.is_fifo() => Err(not_regular("a FIFO")),
        _ => Err(not_regular("a device")),
    }
}

/// How many times a file is written again if another process removed it or its directory meanwhile.
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

#[cfg(test)]
mod tests;
