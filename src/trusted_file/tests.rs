use super::*;
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, chown, mkfifo};
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};

const LIMIT: u64 = 100;

/// A temporary directory, removed when it is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("detour-trusted-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("created");
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().expect("a directory")).expect("created");
        fs::write(&path, "text").expect("written");
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn opening_a_fifo_directory_or_device_fails_at_once() {
    let directory = Directory::new("kinds");
    let file = directory.file("file");
    assert_eq!(read(&file, LIMIT).expect("read"), b"text");
    assert_eq!(read(&file, 4).expect("read"), b"text");
    assert_eq!(read(&file, 3).expect_err("larger").kind(), ErrorKind::FileTooLarge);
    let (fifo, link) = (directory.0.join("fifo"), directory.0.join("link"));
    mkfifo(&fifo, Mode::S_IRWXU).expect("made");
    symlink(&file, &link).expect("linked");
    for (path, wanted) in [(&fifo, "a FIFO"), (&directory.0, "a directory"), (&"/dev/null".into(), "a device")] {
        let error = read(path, LIMIT).expect_err("refused").to_string();
        assert_eq!(error, format!("expected a regular file, got {wanted}"));
    }
    let refused = open(&link, OFlags::RDONLY).expect_err("a link");
    assert_eq!(refused.to_string(), "expected a regular file, got a symbolic link");
    assert_eq!(read(&link, LIMIT).expect("followed"), b"text");
}

#[test]
fn a_file_below_directories_of_root_is_trusted() {
    let directory = Directory::new("trusted");
    let file = directory.file("a/file");
    symlink("a/file", directory.0.join("link")).expect("linked");
    assert_eq!(check(&directory.0.join("link")).expect("trusted"), fs::canonicalize(&file).expect("resolved"));
    assert_eq!(read_trusted(&file, LIMIT).expect("read"), b"text");
    assert!(check(&directory.0.join("missing")).expect_err("missing").is_not_found());
}

/// An access control list that lets UID 12345 write (linux/posix_acl_xattr.h: version, then tag, permissions and
/// ID of each entry).
const ACL: [(u16, u16, u32); 5] =
    [(1, 7, u32::MAX), (2, 7, 12345), (4, 5, u32::MAX), (0x10, 7, u32::MAX), (0x20, 5, u32::MAX)];

#[test]
fn a_file_that_an_access_control_list_makes_writable_is_refused() {
    let directory = Directory::new("acl");
    let file = directory.file("a/file");
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in ACL {
        list.extend([&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(directory.0.join("a"), "system.posix_acl_access", &list, flags)
        .expect("a file system with ACLs");
    assert!(matches!(check(&file), Err(FileError::Writable { mode: 0o775, .. })));
}

#[test]
fn owner_and_mode_of_each_directory_on_the_path_are_checked() {
    type Change = fn(&Path) -> io::Result<()>;
    let mode = |mode| move |path: &Path| fs::set_permissions(path, Permissions::from_mode(mode));
    let (own, group): (Change, Change) = (
        |path| Ok(chown(path, Some(Uid::from_raw(12345)), None)?),
        |path| Ok(chown(path, None, Some(Gid::from_raw(12345)))?),
    );
    for part in ["a/file", "a", ""] {
        let directory = Directory::new("parts");
        let file = directory.file("a/file");
        let changed = if part.is_empty() { directory.0.clone() } else { directory.0.join(part) };
        own(&changed).expect("needs root");
        let error = check(&file).expect_err("refused").to_string();
        let shown = changed.display();
        assert_eq!(error, format!("{shown} is owned by UID 12345; expected root; run chown root:root {shown}"));
        chown(&changed, Some(Uid::from_raw(0)), None).expect("changed");
        mode(0o775)(&changed).expect("changed");
        check(&file).expect("group root counts as root");
        group(&changed).expect("changed");
        assert!(matches!(check(&file), Err(FileError::Writable { mode: 0o775, .. })));
        mode(0o757)(&changed).expect("changed");
        assert!(matches!(check(&file), Err(FileError::Writable { mode: 0o757, .. })));
        mode(0o1777)(&changed).expect("changed");
        assert_eq!(check(&file).is_ok(), part != "a/file", "sticky directories are fine, on the way");
    }
}

#[test]
fn writers_do_not_follow_links_or_write_to_files_of_other_users() {
    let directory = Directory::new("written");
    let other = directory.file("other");
    let path = directory.0.join("link");
    let append = |path: &Path| append_below(path.parent().expect("a directory"), path);
    for write in [|path: &Path| open(path, OFlags::RDONLY | OFlags::CREATE), append] {
        let _ = fs::remove_file(&path);
        symlink(&other, &path).expect("linked");
        let error = write(&path).expect_err("a link").to_string();
        assert_eq!(error, "expected a regular file, got a symbolic link");
        fs::remove_file(&path).expect("removed");
        mkfifo(&path, Mode::S_IRWXU).expect("made");
        write(&path).expect_err("a FIFO");
    }
    fs::remove_file(&path).expect("removed");
    fs::hard_link(&other, &path).expect("linked");
    let error = append(&path).expect_err("a hard link").to_string();
    assert_eq!(error, "expected one name, got 2 (hard links); remove the file first");
    fs::remove_file(&path).expect("removed");
    fs::write(&path, "text").expect("written");
    chown(&path, Some(Uid::from_raw(12345)), None).expect("needs root");
    let error = append(&path).expect_err("another user's").to_string();
    assert_eq!(error, "owned by UID 12345; expected root; remove the file first");
    assert_eq!(fs::read(&path).expect("read"), b"text", "it is as it was");
    for found in [|from: &Path, to: &Path| symlink(from, to), |from: &Path, to: &Path| fs::hard_link(from, to)] {
        fs::remove_file(&path).expect("removed");
        found(&other, &path).expect("linked");
        create_new(&path).expect("created in place of the link");
        assert!(!path.is_symlink());
    }
    assert_eq!(fs::read(&other).expect("read"), b"text", "nothing was written there");
}

#[test]
fn append_below_accepts_only_paths_without_links_below_the_directory() {
    let directory = Directory::new("below");
    let log = directory.0.join("log");
    fs::create_dir_all(log.join("deep")).expect("created");
    for _ in 0..2 {
        append_below(&log, &log.join("deep/a.log")).expect("opened").write_all(b"line\n").expect("written");
    }
    assert_eq!(fs::read(log.join("deep/a.log")).expect("read"), b"line\nline\n");
    symlink(&directory.0, log.join("up")).expect("linked");
    for path in ["up/a.log", "missing/a.log", "../a.log", "deep/../../a.log", ""] {
        append_below(&log, &log.join(path)).expect_err(path);
    }
    append_below(&log, &directory.0.join("a.log")).expect_err("elsewhere");
    assert!(!directory.0.join("a.log").exists());
}

#[test]
fn locks_are_accessible_for_the_owner_only() {
    let directory = Directory::new("modes");
    let path = directory.0.join("lock");
    open(&path, OFlags::RDONLY | OFlags::CREATE).expect("opened");
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
}

#[test]
fn removed_files_and_files_of_proc_can_be_read() {
    open_of_any_kind(Path::new("/proc/self/exe")).expect("opened");
    let pid = std::process::id().to_string();
    assert!(read_text(Path::new("/proc/self/stat"), 4096).expect("read").starts_with(&pid));
    let directory = Directory::new("text");
    let file = directory.file("file");
    fs::write(&file, [0xff]).expect("written");
    assert_eq!(read_text(&file, LIMIT).expect_err("no text").kind(), ErrorKind::InvalidData);
}

#[test]
fn a_failed_replacement_leaves_the_old_file_and_no_temporary_file() {
    let directory = Directory::new("atomic");
    let path = directory.0.join("a/b/file");
    for durability in [Durability::Volatile, Durability::OldOrNew] {
        replace_file(&path, ".temporary", durability, |file| file.write_all(b"old")).expect("written");
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        let fail = |file: &mut File| file.write_all(b"new").and(Err(ErrorKind::StorageFull.into()));
        let error = replace_file(&path, ".temporary", durability, fail).expect_err("a full disk");
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).expect("read"), b"old");
        assert_eq!(fs::read_dir(directory.0.join("a/b")).expect("read").count(), 1);
    }
}
