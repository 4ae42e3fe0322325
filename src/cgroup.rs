//! Control groups (cgroups(7)) of the node: their IDs in the unified hierarchy (v2), and the cgroup namespace of this
//! thread.

mod container;

pub use container::ContainerGroup;

use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::enter_cgroup_namespace;
use crate::trusted_file::{FileId, read_text};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use std::cell::RefCell;
use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Where the unified hierarchy is mounted: alone, or beside hierarchies of version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// The inode of the initial cgroup namespace (`PROC_CGROUP_INIT_INO` in linux/proc_ns.h).
const INITIAL_NAMESPACE: u64 = 0xEFFF_FFFB;
/// The cgroup namespace of the calling thread.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/cgroup";
/// The mounts that the calling thread sees.
const MOUNTINFO: &str = "/proc/thread-self/mountinfo";
/// The limit for reading [`MOUNTINFO`]: the kernel allows 100,000 mounts by default.
const MAX_MOUNTINFO: u64 = 64 << 20;
/// The limit for reading `/proc/PID/cgroup`: one path of at most 4 KiB for each hierarchy.
const MAX_PROC_FILE: u64 = 256 << 10;

thread_local! {
    /// The node's file system, through which this thread reaches the node's cgroup namespace; `None` on the node itself.
    static NODE: RefCell<Option<HostRoot>> = const { RefCell::new(None) };
}

/// The node's unified hierarchy of control groups.
#[derive(Debug, Clone)]
pub struct CgroupHierarchy {
    mount: PathBuf,
    proc: PathBuf,
}

impl CgroupHierarchy {
    /// Finds the mount of the unified hierarchy on the node: `/sys/fs/cgroup`, or `/sys/fs/cgroup/unified` beside
    /// version 1.
    ///
    /// # Errors
    /// [`Code::KernelRefused`]: the node has no unified hierarchy, or it is not mounted there.
    pub fn find(root: &HostRoot) -> Result<Self, Error> {
        let reach = |path| HostPath::new(path).and_then(|path| root.reach(&path).ok());
        let is_unified =
            |path: &PathBuf| statfs(path).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC);
        // Without a mount below `root`, this process may see the node's own mount. In a private cgroup namespace, that
        // mount does not contain the groups of other pods, so their paths are not found.
        let own = MOUNTS.into_iter().map(PathBuf::from).filter(|_| !root.mount().join("sys/fs/cgroup").exists());
        if let Some(mount) = MOUNTS.into_iter().filter_map(reach).chain(own).find(is_unified) {
            return Ok(Self { mount, proc: root.mount().join("proc") });
        }
        let first = root.mount().join("sys/fs/cgroup");
        let why = match fs::read_dir(&first).map(|mut entries| entries.next().is_some()) {
            Ok(true) => "only cgroup v1; boot the node with cgroup v2 (systemd.unified_cgroup_hierarchy=1)".to_owned(),
            Ok(false) => "empty; mount the node's /sys/fs/cgroup there".to_owned(),
            Err(error) => format!("{error}; mount the node's /sys/fs/cgroup there"),
        };
        let msg = format!(
            "container-exclude: no unified hierarchy of control groups (cgroup v2) in {}: {why}, or remove \
             container-exclude",
            first.display()
        );
        Err(Error::new(Code::KernelRefused, msg))
    }

    /// Returns where the hierarchy is mounted.
    #[must_use]
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// Returns the ID of the control group at `path` below the hierarchy's root: the number that the kernel compares
    /// in `socket cgroupv2`.
    ///
    /// # Errors
    /// [`Code::Io`]: the control group does not exist, or `path` contains `..`.
    pub fn id(&self, path: &str) -> Result<u64, Error> {
        self.find_id(path).map_err(|error| self.unknown(path, &error))
    }

    /// Returns whether a process has exited; false if this is unknown.
    #[must_use]
    pub fn has_exited(&self, pid: u32) -> bool {
        let exists = |name: &str| self.proc.join(name).try_exists();
        pid != 0 && exists("1").unwrap_or(false) && !exists(&pid.to_string()).unwrap_or(true)
    }

    fn find_id(&self, path: &str) -> io::Result<u64> {
        let parts: Vec<Component<'_>> =
            Path::new(path).components().filter(|part| *part != Component::RootDir).collect();
        if parts.is_empty() || parts.iter().any(|part| !matches!(part, Component::Normal(_))) {
            return Err(io::Error::new(ErrorKind::InvalidInput, "expected the path of a group without \"..\""));
        }
        let path = self.mount.join(parts.into_iter().collect::<PathBuf>());
        // The hierarchy has no symbolic links, but another file system may be mounted in it.
        let metadata = fs::symlink_metadata(&path)?;
        let is_group = metadata.is_dir() && statfs(&path)?.filesystem_type() == CGROUP2_SUPER_MAGIC;
        is_group.then(|| metadata.ino()).ok_or_else(|| ErrorKind::NotADirectory.into())
    }

    /// Checks that the hierarchy's root is the root of this thread's cgroup namespace. The initial namespace needs no
    /// check. In another one, process 1 may be that of a container, with the same namespace as this thread.
    fn require_same_root(&self) -> Result<(), Error> {
        if own_namespace()?.inode == INITIAL_NAMESPACE {
            return Ok(());
        }
        let failed =
            |why: &dyn Display| unreachable(Path::new(MOUNTINFO), why, "run detour in the node's cgroup namespace");
        let text = read_text(Path::new(MOUNTINFO), MAX_MOUNTINFO).map_err(|error| failed(&error))?;
        let mount = self.mount.canonicalize().map_err(|error| failed(&error))?;
        match mounted_root(&text, &mount) {
            Some("/") => Ok(()),
            Some(root) => Err(failed(&format!("expected root / of the mount {}, got {root:?}", mount.display()))),
            None => Err(failed(&format!("expected a mount at {}, got none", mount.display()))),
        }
    }

    fn unknown(&self, path: &str, why: &dyn Display) -> Error {
        Error::new(Code::Io, format!("control group {path:?}: not found in {}: {why}", self.mount.display()))
    }
}

/// Moves the calling thread into the node's cgroup namespace, unless it is already there. The kernel counts levels of
/// control groups from the namespace of the process that writes a rule. Afterwards, [`require`] in this thread refers
/// to the node at `root`.
///
/// # Errors
/// [`Code::KernelRefused`]: the node's namespace is not reachable.
pub fn enter_host_namespace(root: &HostRoot) -> Result<(), Error> {
    NODE.set(Some(root.clone()));
    enter(root)
}

/// Makes sure that the calling thread can write rules about control groups: the node has the unified hierarchy, and the
/// thread is in the node's cgroup namespace.
///
/// # Errors
/// [`Code::KernelRefused`]: one of these is missing.
pub fn require() -> Result<(), Error> {
    let root = NODE.with_borrow(Clone::clone).unwrap_or_else(|| HostRoot::new("/"));
    let hierarchy = CgroupHierarchy::find(&root)?;
    enter(&root)?;
    hierarchy.require_same_root()
}

fn enter(root: &HostRoot) -> Result<(), Error> {
    let of_node = root.mount().join("proc/1/ns/cgroup");
    let failed = |error| {
        unreachable(
            &of_node,
            &error,
            "make the node's processes visible there, and run with \
         CAP_SYS_ADMIN and CAP_SYS_PTRACE",
        )
    };
    let own = own_namespace()?;
    if own.inode == INITIAL_NAMESPACE || own == FileId::of(&fs::metadata(&of_node).map_err(failed)?) {
        return Ok(());
    }
    enter_cgroup_namespace(&of_node).map_err(failed)
}

fn own_namespace() -> Result<FileId, Error> {
    let found = fs::metadata(OWN_NAMESPACE).map(|metadata| FileId::of(&metadata));
    found.map_err(|error| unreachable(Path::new(OWN_NAMESPACE), &error, "mount proc(5) there"))
}

fn unreachable(path: &Path, why: &dyn Display, next_step: &str) -> Error {
    let msg =
        format!("container-exclude: can't enter the node's cgroup namespace: {}: {why}; {next_step}", path.display());
    Error::new(Code::KernelRefused, msg)
}

/// Returns the root of the last mount at `path` as seen from the cgroup namespace of the reader, from
/// `/proc/PID/mountinfo` (proc_pid_mountinfo(5)).
fn mounted_root<'a>(mountinfo: &'a str, path: &Path) -> Option<&'a str> {
    let mounts = mountinfo.lines().rev().map(|line| line.split(' ').skip(3));
    mounts
        .filter_map(|mut fields| fields.next().zip(fields.next()))
        .find_map(|(root, at)| (Path::new(at) == path).then_some(root))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Directory;
    use nix::sched::{CloneFlags, unshare};
    use std::os::unix::fs::symlink;
    use std::thread;

    /// A control group below the root of the real hierarchy, removed when dropped.
    pub(super) struct Group(PathBuf);

    impl Group {
        pub(super) fn new(hierarchy: &CgroupHierarchy, name: &str) -> Self {
            let path = hierarchy.mount.join(format!("detour-{name}-{}", std::process::id()));
            fs::create_dir(&path).expect("needs root");
            Self(path)
        }

        pub(super) fn id(&self) -> u64 {
            fs::metadata(&self.0).expect("exists").ino()
        }

        /// Moves a process into the group.
        pub(super) fn take(&self, pid: u32) {
            fs::write(self.0.join("cgroup.procs"), pid.to_string()).expect("moved");
        }

        pub(super) fn path(&self) -> String {
            format!("/{}", self.0.file_name().and_then(|name| name.to_str()).expect("a name"))
        }
    }

    impl Drop for Group {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }

    pub(super) fn real() -> CgroupHierarchy {
        CgroupHierarchy::find(&HostRoot::new("/")).expect("mounted")
    }

    #[test]
    fn the_id_of_a_group_is_its_inode() {
        let hierarchy = real();
        let group = Group::new(&hierarchy, "id");
        let expected = group.id();
        assert_eq!(hierarchy.id(&group.path()).expect("found"), expected);
        let path = group.path();
        drop(group);
        for path in [path.as_str(), "/..", "/", "", "/cgroup.procs"] {
            let error = hierarchy.id(path).expect_err("no group");
            assert!(error.msg.starts_with(&format!("control group {path:?}: not found in ")), "{error}");
        }
    }

    #[test]
    fn a_node_with_version_1_only_is_refused_with_the_next_step() {
        let directory = Directory::new("cgroup-v1");
        let root = HostRoot::new(directory.join("root"));
        let own = CgroupHierarchy::find(&root).expect("that of this mount namespace").mount;
        assert_eq!(own, CgroupHierarchy::find(&HostRoot::new("/")).expect("mounted").mount);
        fs::create_dir_all(root.mount().join("sys/fs/cgroup")).expect("made");
        let error = CgroupHierarchy::find(&root).expect_err("nothing is mounted");
        assert!(error.msg.contains("mount the node's /sys/fs/cgroup there"), "{error}");
        fs::create_dir_all(root.mount().join("sys/fs/cgroup/memory")).expect("made");
        let error = CgroupHierarchy::find(&root).expect_err("version 1");
        assert_eq!(error.code, Code::KernelRefused);
        assert!(error.msg.contains("only cgroup v1; boot the node with cgroup v2"), "{error}");
    }

    fn namespace() -> u64 {
        fs::metadata(OWN_NAMESPACE).expect("readable").ino()
    }

    /// Runs `work` on a thread in a new cgroup namespace, with a node whose first process is in this one.
    fn in_private_namespace(name: &str, work: impl FnOnce(&HostRoot) + Send + 'static) {
        let directory = Directory::new(name);
        let root = HostRoot::new(directory.join("root"));
        let namespaces = root.mount().join("proc/1/ns");
        fs::create_dir_all(&namespaces).expect("made");
        symlink(format!("/proc/{}/ns/cgroup", std::process::id()), namespaces.join("cgroup")).expect("linked");
        let run = move || {
            unshare(CloneFlags::CLONE_NEWCGROUP).expect("needs root");
            work(&root);
        };
        thread::spawn(run).join().expect("no panic");
    }

    #[test]
    fn a_thread_in_a_private_namespace_enters_that_of_the_node() {
        let outside = namespace();
        in_private_namespace("cgroup-enter", move |root| {
            assert_ne!(namespace(), outside);
            enter_host_namespace(root).expect("entered");
            assert_eq!(namespace(), outside);
            enter_host_namespace(root).expect("it is there already");
        });
    }

    #[test]
    fn a_namespace_whose_root_is_not_that_of_the_hierarchy_is_refused() {
        let hierarchy = real();
        let group = Group::new(&hierarchy, "root");
        let (path, mount) = (group.path(), hierarchy.mount.clone());
        let run = move || {
            let threads = mount.join(path.trim_start_matches('/'));
            fs::write(threads.join("cgroup.type"), "threaded").expect("written");
            fs::write(threads.join("cgroup.threads"), "0").expect("moved");
            unshare(CloneFlags::CLONE_NEWCGROUP).expect("needs root");
            let refused = hierarchy.require_same_root();
            fs::write(mount.join("cgroup.threads"), "0").expect("moved back");
            refused
        };
        let error = thread::spawn(run).join().expect("no panic").expect_err("another root");
        assert!(error.msg.ends_with("got \"/..\"; run detour in the node's cgroup namespace"), "{error}");
        real().require_same_root().expect("the initial namespace");
    }

    #[test]
    fn the_last_mount_at_a_path_counts() {
        let text =
            "41 31 0:38 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n42 41 0:39 /.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mounted_root(text, Path::new("/sys/fs/cgroup")), Some("/.."));
        assert_eq!(mounted_root(text, Path::new("/sys/fs")), None);
    }

    #[test]
    fn a_thread_whose_node_is_not_reachable_is_refused() {
        in_private_namespace("cgroup-refused", |root| {
            fs::remove_file(root.mount().join("proc/1/ns/cgroup")).expect("removed");
            let error = enter_host_namespace(root).expect_err("not reachable");
            assert_eq!(error.code, Code::KernelRefused);
            assert!(error.msg.starts_with("container-exclude: can't enter the node's cgroup namespace: "), "{error}");
            // `require` refers to the same node, not for the process 1 that this thread sees.
            let missing = require().expect_err("no hierarchy");
            assert!(missing.msg.contains(&root.mount().display().to_string()), "{missing}");
        });
        require().expect("this thread is in the initial namespace");
    }
}
