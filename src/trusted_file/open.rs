//! Opens, reads and creates files without following links or waiting for FIFOs of untrusted users.
#![allow(clippy::disallowed_methods, reason = "the only file that opens files")]

use super::check::{FileError, check, is_trusted, verify};
use rustix::fs::{CWD, Mode, OFlags, RawDir, openat};
use rustix::io::{Errno, retry_on_intr};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path};

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

/// Opens the file at `path` for reading, whatever its kind; follows symbolic links. It does not wait for the other end
/// of a FIFO.
///
/// # Errors
/// The file can't be opened.
pub fn open_of_any_kind(path: &Path) -> io::Result<File> {
    Ok(open_any(CWD, path, OFlags::RDONLY | NON_BLOCKING, Mode::empty())?)
}

fn open_regular(path: &Path, flags: OFlags) -> io::Result<(File, Metadata)> {
    match open_any(CWD, path, flags | NON_BLOCKING, OWNER_ONLY) {
        Err(Errno::LOOP) if flags.contains(OFlags::NOFOLLOW) && path.is_symlink() => {
            Err(not_regular("a symbolic link"))
        }
        opened => regular(opened?),
    }
}

/// Opens a file that may be of any kind. `std` makes a second system call in static builds, because musl does.
fn open_any(directory: impl AsFd, path: &Path, flags: OFlags, mode: Mode) -> Result<File, Errno> {
    retry_on_intr(|| openat(&directory, path, flags | OFlags::CLOEXEC, mode)).map(File::from)
}

/// Reads the regular file at `path`, of at most `limit` bytes; follows symbolic links.
///
/// # Errors
/// The file can't be read, is not a regular file, or is larger.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, metadata) = open_regular(path, OFlags::RDONLY)?;
    read_up_to(&file, &metadata, limit)
}

/// Reads a text file as [`read`] does.
///
/// # Errors
/// As [`read`]; [`ErrorKind::InvalidData`] if it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    text(read(path, limit)?)
}

/// Reads the regular file at `path`, of at most `limit` bytes, unless its last part is a symbolic link.
///
/// # Errors
/// As [`open`]; the file is larger.
pub fn read_nofollow(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, metadata) = open_regular(path, OFlags::RDONLY | OFlags::NOFOLLOW)?;
    read_up_to(&file, &metadata, limit)
}

/// Reads the file at `path`, of at most `limit` bytes, if only trusted users can change it or the path
/// that leads to it.
///
/// # Errors
/// The file can't be read, is larger, or [`check`] refuses it.
pub fn read_trusted(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let (file, metadata) = open_regular(&check(path)?, OFlags::RDONLY | OFlags::NOFOLLOW)?;
    // A trusted user may have changed the path meanwhile, so check the file that is read.
    verify(path, &metadata)?;
    Ok(read_up_to(&file, &metadata, limit)?)
}

/// Creates the file at `path` for writing, readable for its owner only. An existing file, link or FIFO is removed
/// first: the path is that of a temporary file whose writer was killed.
///
/// # Errors
/// The file can't be created; the path is a directory, or another process created it again.
pub fn create_new(path: &Path) -> io::Result<File> {
    // O_EXCL follows no symbolic link (open(2)).
    let create = || open_any(CWD, path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, OWNER_ONLY);
    match create() {
        Err(Errno::EXIST) => {
            fs::remove_file(path)?;
            Ok(create()?)
        }
        created => Ok(created?),
    }
}

/// Opens the file at `path` to lock it (flock(2)); creates it if it is missing. Makes it accessible for its owner
/// only, since a user who can open a file can also hold its lock.
///
/// # Errors
/// As [`open`].
pub fn open_lock(path: &Path) -> io::Result<File> {
    // Opening an existing file for writing would wake processes that watch the directory.
    let (file, metadata) = match open_regular(path, OFlags::RDONLY | OFlags::NOFOLLOW) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            open_regular(path, OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW)?
        }
        opened => opened?,
    };
    if metadata.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// Opens the file at `path`, which is below `directory`, for appending; creates it if it is missing.
///
/// It follows no symbolic link below `directory`, so that a user who can write to a directory on the path cannot
/// redirect the writer (`/var/log` belongs to group syslog on some systems).
///
/// # Errors
/// `path` is not below `directory` or contains `..`; the file can't be opened; it is not a regular file, belongs to
/// an untrusted user, or has a second name (hard link).
pub fn append_below(directory: &Path, path: &Path) -> io::Result<File> {
    let refused = || io::Error::new(ErrorKind::InvalidInput, format!("expected a path below {}", directory.display()));
    let mut names = path.strip_prefix(directory).map_err(|_| refused())?.components().peekable();
    let mut parent = open_directory(directory)?;
    while let Some(Component::Normal(name)) = names.next() {
        let last = names.peek().is_none();
        let flags = match last {
            true => OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE,
            false => OFlags::RDONLY | OFlags::DIRECTORY,
        };
        let mode = OWNER_ONLY | Mode::RGRP;
        let file = open_any(&parent, Path::new(name), flags | NON_BLOCKING | OFlags::NOFOLLOW, mode)
            .map_err(|errno| if errno == Errno::LOOP { not_regular("a symbolic link") } else { errno.into() })?;
        if last {
            return verify_not_shared(regular(file)?);
        }
        parent = file;
    }
    Err(refused())
}

/// Creates the directory at `path` and its missing parents, writable for this process's user only. It does not
/// rely on the umask: that of a runtime may be 0.
///
/// # Errors
/// A directory can't be created.
pub fn create_directories(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Opens the directory at `path`; follows symbolic links.
///
/// # Errors
/// The directory can't be opened.
pub fn open_directory(path: &Path) -> io::Result<File> {
    Ok(open_any(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?)
}

/// Returns the names in the directory at `path` that are UTF-8, sorted.
///
/// # Errors
/// The directory can't be opened or read. One unreadable entry fails the call, since the list would be incomplete
/// without it.
pub fn names_in(path: &Path) -> io::Result<Vec<String>> {
    let directory = open_directory(path)?;
    // On the stack: `std` allocates the buffer with musl's allocator, which needs system calls for it.
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let (mut entries, mut names) = (RawDir::new(&directory, &mut buffer), Vec::new());
    while let Some(entry) = entries.next() {
        let name = entry?.file_name().to_str().map(str::to_owned);
        names.extend(name.ok().filter(|name| name != "." && name != ".."));
    }
    names.sort();
    Ok(names)
}

/// Returns `file` if a trusted user owns it and it has no second name.
fn verify_not_shared((file, metadata): (File, Metadata)) -> io::Result<File> {
    if !is_trusted(metadata.uid()) {
        return Err(denied(format!("owned by UID {}; expected root; remove the file first", metadata.uid())));
    }
    match metadata.nlink() {
        0 | 1 => Ok(file),
        names => Err(denied(format!("expected one name, got {names} (hard links); remove the file first"))),
    }
}

fn denied(reason: String) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, reason)
}

fn text(contents: Vec<u8>) -> io::Result<String> {
    String::from_utf8(contents).map_err(|_| io::Error::new(ErrorKind::InvalidData, "expected UTF-8"))
}

fn read_up_to(file: &File, metadata: &Metadata, limit: u64) -> io::Result<Vec<u8>> {
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
    let kind = metadata.file_type();
    Err(not_regular(if kind.is_file() {
        return Ok((file, metadata));
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }))
}

fn not_regular(kind: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, format!("expected a regular file, got {kind}"))
}
