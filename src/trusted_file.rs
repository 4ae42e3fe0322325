//! Files of the node that this process reads or writes as root, opened so that their owner can't harm it.
//!
//! | function | for |
//! |---|---|
//! | [`read`], [`read_text`], [`follow`] | a file whose contents are checked elsewhere: regular, never waited for, of limited size. The files of proc(5) are such files too |
//! | [`open`], [`read_nofollow`] | the same where a symbolic link has no business: state, and paths that [`crate::host_path`] has resolved |
//! | [`read_trusted`] | a file that decides what root does: credentials, configuration |
//! | [`read_with_owner`] | a file that may name only files of its owner |
//! | [`check`] | a path that root is about to execute or to use: only trusted users can change it |
//! | [`create_new`], [`overwrite`], [`append_below`] | a file that is written: never through a link that another user made |
//! | [`open_lock`], [`open_directory`], [`create_directories`] | a file that is locked, a directory that is flushed, or made |
//!
//! A trusted user is root or the user of this process. Group root counts as root, as in sudo's
//! `sudo_secure_path`: the archives of the CNI plugins up to 1.4 make `/opt/cni/bin` writable for it.
//!
//! Everything else in `src` is forbidden to open files (`clippy.toml`, `disallowed-methods`).
#![allow(clippy::disallowed_methods, reason = "the one place that opens files")]

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::geteuid;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

/// As many symbolic links as the kernel follows (path_resolution(7)).
const MAX_LINKS: usize = 40;
/// The sticky bit: only the owner of an entry and of the directory can replace the entry (inode(7)).
const STICKY: u32 = 0o1000;
const GROUP_WRITABLE: u32 = 0o020;
const OTHER_WRITABLE: u32 = 0o002;

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refuses it.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A user who is not trusted owns a part of the path, and can replace what it leads to.
    #[error("{0} is owned by UID {uid}; expected root: chown root:root {0}", path.display())]
    Owner {
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Users who are not trusted can write to a part of the path.
    #[error("{0} has mode {mode:04o}; expected one that only root can write to: chmod go-w {0}", path.display())]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

impl FileError {
    /// Whether nothing exists at the path.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    }
}

/// What keeps an open from waiting for the other end of a FIFO, and from becoming the process's terminal.
const NEVER_WAIT: OFlag = OFlag::O_NONBLOCK.union(OFlag::O_NOCTTY);

/// Opens the regular file at `path` as `options` say. It never follows a symbolic link in the last
/// part of the path, and never waits for the other end of a FIFO.
///
/// # Errors
/// The file can't be opened; [`ErrorKind::InvalidInput`] if it is not a regular file.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let opened = options.custom_flags((NEVER_WAIT | OFlag::O_NOFOLLOW).bits()).open(path);
    regular(opened.map_err(|error| match error.raw_os_error() {
        Some(errno) if errno == Errno::ELOOP as i32 && path.is_symlink() => not_regular("a symbolic link"),
        _ => error,
    })?)
}

/// Opens the regular file at `path` for reading; follows symbolic links, also those of proc(5) whose
/// target has no name any more, such as `/proc/self/exe`.
///
/// # Errors
/// The file can't be opened, or is not a regular file.
pub fn follow(path: &Path) -> io::Result<File> {
    regular(OpenOptions::new().read(true).custom_flags(NEVER_WAIT.bits()).open(path)?)
}

/// Reads the regular file at `path`, of at most `limit` bytes; follows symbolic links.
///
/// # Errors
/// The file can't be read, is not a regular file, or is larger.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_up_to(&follow(path)?, limit)
}

/// Reads the text of a file as [`read`] does.
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
    read_up_to(&open(path, OpenOptions::new().read(true))?, limit)
}

/// Reads a file as [`read`] does, and returns the UID of its owner with the contents.
///
/// # Errors
/// As [`read`].
pub fn read_with_owner(path: &Path, limit: u64) -> io::Result<(Vec<u8>, u32)> {
    let file = follow(path)?;
    Ok((read_up_to(&file, limit)?, file.metadata()?.uid()))
}

/// Reads the file at `path`, of at most `limit` bytes, if only trusted users can change it or the path
/// that leads to it.
///
/// # Errors
/// The file can't be read, is larger, or [`check`] refuses it.
pub fn read_trusted(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let file = open(&check(path)?, OpenOptions::new().read(true))?;
    // The path may have been changed by a trusted user meanwhile; what counts is the file that is read.
    verify(path, &file.metadata()?)?;
    Ok(read_up_to(&file, limit)?)
}

/// Resolves `path` and returns the path without symbolic links, if only trusted users can change what it
/// leads to: they own each directory, each link and the file itself, and no one else can write to them.
/// A directory on the way may be writable for others if it is sticky, such as `/tmp`.
///
/// # Errors
/// A part of the path is not trusted or can't be examined.
pub fn check(path: &Path) -> Result<PathBuf, FileError> {
    let mut resolved = PathBuf::from("/");
    let mut left = parts(&std::path::absolute(path)?);
    let mut links = 0;
    let mut here = fs::symlink_metadata(&resolved)?;
    verify_parent(&resolved, &here)?;
    while let Some(part) = left.pop() {
        if part.as_os_str() == ".." {
            resolved.pop();
            continue;
        }
        let next = resolved.join(&part);
        here = fs::symlink_metadata(&next)?;
        if here.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(io::Error::from(Errno::ELOOP).into());
            }
            verify_owner(&next, &here)?;
            let target = fs::read_link(&next)?;
            if target.is_absolute() {
                resolved = PathBuf::from("/");
            }
            left.extend(parts(&target));
            continue;
        }
        if left.is_empty() {
            verify(&next, &here)?
        } else {
            verify_parent(&next, &here)?
        }
        resolved = next;
    }
    Ok(resolved)
}

/// Creates the file at `path` for writing, readable for its owner only. A file, link or FIFO of that name
/// is removed first: the name is that of a temporary file, whose writer was killed.
///
/// # Errors
/// The file can't be created; the name is taken by a directory, or again by another process.
pub fn create_new(path: &Path) -> io::Result<File> {
    // O_EXCL follows no symbolic link (open(2)).
    let create = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match create() {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            create()
        }
        created => created,
    }
}

/// Opens the file at `path` to write it anew, readable for its owner only.
///
/// # Errors
/// The file can't be written; it exists and is a symbolic link, not a regular file, of a user who is not
/// trusted, or has another name, which may be the one that counts.
pub fn overwrite(path: &Path) -> io::Result<File> {
    let file = own(open(path, OpenOptions::new().write(true).create(true).truncate(false).mode(0o600))?)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(0)?;
    Ok(file)
}

/// Opens the file at `path` to lock it (flock(2)); creates it where it is missing. Only its owner can open
/// it then, since a user who can open a file can also hold its lock.
///
/// # Errors
/// As [`open`].
pub fn open_lock(path: &Path) -> io::Result<File> {
    // Opening it for writing wakes a process that watches the directory.
    let file = match open(path, OpenOptions::new().read(true)) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            open(path, OpenOptions::new().write(true).create(true).truncate(false).mode(0o600))?
        }
        opened => opened?,
    };
    if file.metadata()?.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// Opens the file at `path`, which is below `directory`, to append to it; creates it where it is missing.
/// No symbolic link is followed below `directory`, so a user who can write to one on the way (`/var/log`
/// belongs to group syslog on some systems) can't direct the writer elsewhere.
///
/// # Errors
/// `path` is not below `directory` or has `..`; the file can't be opened; it is not a regular file, of a
/// user who is not trusted, or has another name, which may be the one that counts.
pub fn append_below(directory: &Path, path: &Path) -> io::Result<File> {
    let refused = || io::Error::new(ErrorKind::InvalidInput, format!("expected a path below {}", directory.display()));
    let mut names = path.strip_prefix(directory).map_err(|_| refused())?.components().peekable();
    let mut parent = open_directory(directory)?;
    while let Some(Component::Normal(name)) = names.next() {
        let last = names.peek().is_none();
        let flags = match last {
            true => OFlag::O_WRONLY | OFlag::O_APPEND | OFlag::O_CREAT,
            false => OFlag::O_RDONLY | OFlag::O_DIRECTORY,
        };
        let flags = flags | NEVER_WAIT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = File::from(
            openat(&parent, name, flags, Mode::from_bits_truncate(0o640))
                .map_err(|errno| if errno == Errno::ELOOP { not_regular("a symbolic link") } else { errno.into() })?,
        );
        if last {
            return own(regular(file)?);
        }
        parent = file;
    }
    Err(refused())
}

/// Creates the directory at `path`, and those that it is in, writable for this process's user only,
/// whatever the umask is: a runtime's may be 0.
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
    OpenOptions::new().read(true).custom_flags(OFlag::O_DIRECTORY.bits()).open(path)
}

/// Names and `..`, the last one first.
fn parts(path: &Path) -> Vec<PathBuf> {
    let wanted = |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().rev().filter(wanted).map(|part| PathBuf::from(part.as_os_str())).collect()
}

fn verify(path: &Path, metadata: &Metadata) -> Result<(), FileError> {
    verify_owner(path, metadata)?;
    let mode = metadata.mode() & 0o7777;
    let group_writes = mode & GROUP_WRITABLE != 0 && (metadata.gid() != 0 || has_acl(path));
    let writable = mode & OTHER_WRITABLE != 0 || group_writes;
    if writable { Err(FileError::Writable { path: path.to_owned(), mode }) } else { Ok(()) }
}

/// Whether an access control list lets other users in. Then the permission bits of the group are the most that
/// any of them has (acl(5), "Correspondence between ACL entries and file permission bits").
fn has_acl(path: &Path) -> bool {
    let mut none: [u8; 0] = [];
    let found = rustix::fs::getxattr(path, "system.posix_acl_access", &mut none);
    !matches!(found, Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP))
}

fn verify_parent(path: &Path, metadata: &Metadata) -> Result<(), FileError> {
    if metadata.mode() & STICKY != 0 { verify_owner(path, metadata) } else { verify(path, metadata) }
}

fn verify_owner(path: &Path, metadata: &Metadata) -> Result<(), FileError> {
    let uid = metadata.uid();
    if is_trusted(uid) { Ok(()) } else { Err(FileError::Owner { path: path.to_owned(), uid }) }
}

/// Whether the user is root or the user of this process.
#[must_use]
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

/// The file, if what is written to it ends up nowhere else and belongs to no other user.
fn own(file: File) -> io::Result<File> {
    let metadata = file.metadata()?;
    if !is_trusted(metadata.uid()) {
        return Err(denied(format!("owned by UID {}; expected root: remove it first", metadata.uid())));
    }
    match metadata.nlink() {
        0 | 1 => Ok(file),
        names => Err(denied(format!("the file has {names} names (hard links), expected one: remove it first"))),
    }
}

fn denied(why: String) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, why)
}

fn text(contents: Vec<u8>) -> io::Result<String> {
    String::from_utf8(contents).map_err(|_| io::Error::new(ErrorKind::InvalidData, "not UTF-8"))
}

fn read_up_to(file: &File, limit: u64) -> io::Result<Vec<u8>> {
    // proc(5) states no sizes.
    let expected = file.metadata()?.len().min(limit) + 1;
    let mut contents = Vec::with_capacity(usize::try_from(expected).unwrap_or_default());
    file.take(limit + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > limit {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("larger than {limit} bytes")));
    }
    Ok(contents)
}

fn regular(file: File) -> io::Result<File> {
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    Err(not_regular(if kind.is_file() {
        return Ok(file);
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

#[cfg(test)]
mod tests;
