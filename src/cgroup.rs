//! Control groups (cgroups(7)) of the node: their IDs in the unified hierarchy (v2), and the cgroup namespace of this
//! thread.

mod search;

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
/// The default parent of a scope (systemd.special(7)).
const DEFAULT_SLICE: &str = "system.slice";

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

    /// Returns the ID of a container's control group, by the runtime's `cgroups_path` or, if that does not exist, by
    /// one of its processes. `pid` is 0 if no process is known.
    ///
    /// # Errors
    /// [`Code::Io`]: neither leads to a control group.
    pub fn container_id(&self, cgroups_path: &str, pid: u32) -> Result<u64, Error> {
        let by_path = path_of(cgroups_path).map(|path| self.find_id(&path));
        match by_path {
            Some(Ok(id)) => Ok(id),
            // A runtime with the driver cgroupfs puts SLICE:PREFIX:NAME below its own control group.
            _ if pid != 0 => self.process_id(pid),
            Some(Err(error)) => Err(self.unknown(cgroups_path, &error)),
            None => Err(self.unknown(cgroups_path, &"expected an absolute path without \"..\", or SLICE:PREFIX:NAME")),
        }
    }

    /// Returns the ID of the control group of a process.
    ///
    /// # Errors
    /// [`Code::Io`]: the process does not exist, or this process can't see its control group.
    pub fn process_id(&self, pid: u32) -> Result<u64, Error> {
        let file = self.proc.join(pid.to_string()).join("cgroup");
        let failed = |why: &dyn Display| {
            Error::new(Code::Io, format!("can't find the control group of process {pid}: {}: {why}", file.display()))
        };
        let text = read_text(&file, MAX_PROC_FILE).map_err(|error| failed(&error))?;
        let path = path_of_process(&text).ok_or_else(|| failed(&"expected a line 0::PATH"))?;
        self.id(path)
    }

    /// Returns whether a process has exited; false if this is unknown.
    #[must_use]
    pub fn has_exited(&self, pid: u32) -> bool {
        let exists = |name: &str| self.proc.join(name).try_exists();
        pid != 0 && exists("1").unwrap_or(false) && !exists(&pid.to_string()).unwrap_or(true)
    }

    /// Returns whether a process is in the control group of a runtime's `cgroups_path` or below it; `None` if the group
    /// does not exist.
    #[must_use]
    pub fn is_populated(&self, cgroups_path: &str) -> Option<bool> {
        let events = self.mount.join(path_of(cgroups_path)?.trim_start_matches('/')).join("cgroup.events");
        let text = read_text(&events, MAX_PROC_FILE).ok()?;
        text.lines().find_map(|line| line.strip_prefix("populated ")).map(|value| value != "0")
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

/// Returns the path below the hierarchy's root of a runtime's `cgroups_path` (OCI runtime specification,
/// config-linux.md): a path, or `SLICE:PREFIX:NAME` of the systemd driver; `None` if it is neither.
#[must_use]
pub fn path_of(cgroups_path: &str) -> Option<String> {
    if cgroups_path.starts_with('/') {
        return HostPath::new(cgroups_path).map(|path| path.to_string());
    }
    let [slice, prefix, name] = <[&str; 3]>::try_from(cgroups_path.split(':').collect::<Vec<_>>()).ok()?;
    let is_part = |part: &str| !part.contains('/') && part != "..";
    if name.is_empty() || !is_part(name) || !is_part(prefix) {
        return None;
    }
    let parent = slice_path(if slice.is_empty() { DEFAULT_SLICE } else { slice })?;
    Some(match name.ends_with(".slice") {
        true => format!("{parent}/{name}"),
        false => format!("{parent}/{prefix}-{name}.scope"),
    })
}

/// Returns the path of a slice: systemd puts `a-b.slice` below `a.slice` (systemd.slice(5)); `None` for an invalid name.
fn slice_path(slice: &str) -> Option<String> {
    let name = slice.strip_suffix(".slice")?;
    if name == "-" {
        return Some(String::new());
    }
    if name.contains('/') || name.split('-').any(str::is_empty) {
        return None;
    }
    let ends = name.match_indices('-').map(|(at, _)| at).chain([name.len()]);
    Some(ends.map(|end| format!("/{}.slice", &name[..end])).collect())
}

/// Returns the path of a process in the unified hierarchy, from `/proc/PID/cgroup`.
fn path_of_process(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::"))
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

    const ID: &str = "6f1b1e3a0f4f7c1c6c1d1b0a7a6d3f5e8b9c0d1e2f3a4b5c6d7e8f9a0b1c2d3e";
    const POD: &str = "8e5bd6a4_9a35_4f0e_9d2b_1c33a5b0a001";

    #[test]
    fn paths_of_both_drivers_and_runtimes_are_translated() {
        let slices = "/kubepods.slice/kubepods-burstable.slice";
        for (cgroups_path, expected) in [
            (format!("/kubepods/burstable/pod{POD}/{ID}"), format!("/kubepods/burstable/pod{POD}/{ID}")),
            (format!("/kubepods/pod{POD}/crio-{ID}"), format!("/kubepods/pod{POD}/crio-{ID}")),
            (
                format!("kubepods-burstable-pod{POD}.slice:cri-containerd:{ID}"),
                format!("{slices}/kubepods-burstable-pod{POD}.slice/cri-containerd-{ID}.scope"),
            ),
            (
                format!("kubepods-pod{POD}.slice:crio:{ID}"),
                format!("/kubepods.slice/kubepods-pod{POD}.slice/crio-{ID}.scope"),
            ),
            // A kubelet with its own control group (kind).
            (
                format!("kubelet-kubepods-burstable-pod{POD}.slice:cri-containerd:{ID}"),
                format!(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/\
                     kubelet-kubepods-burstable-pod{POD}.slice/cri-containerd-{ID}.scope"
                ),
            ),
            (format!(":runc:{ID}"), format!("/system.slice/runc-{ID}.scope")),
            (format!("-.slice:runc:{ID}"), format!("/runc-{ID}.scope")),
            ("a.slice::own.slice".to_owned(), "/a.slice/own.slice".to_owned()),
        ] {
            assert_eq!(path_of(&cgroups_path), Some(expected), "{cgroups_path}");
        }
    }

    #[test]
    fn a_path_that_leaves_the_hierarchy_or_has_another_form_is_refused() {
        for cgroups_path in [
            "",
            "kubepods/pod",
            "/kubepods/../../etc",
            "a/b.slice:crio:id",
            "a.slice:crio:../id",
            "a.slice:../crio:id",
            "a--b.slice:crio:id",
            "-a.slice:crio:id",
            "a:crio:id",
            ".slice:crio:id",
            "a.slice:crio:",
            "a.slice:crio:id:more",
        ] {
            assert_eq!(path_of(cgroups_path), None, "{cgroups_path}");
        }
    }

    #[test]
    fn the_path_of_a_process_is_that_of_the_unified_hierarchy() {
        let hybrid = "9:name=systemd:/other\n1:cpu:/other\n0::/kubepods/a:b\n";
        assert_eq!(path_of_process(hybrid), Some("/kubepods/a:b"));
        assert_eq!(path_of_process("1:cpu:/other\n"), None);
    }

    /// A control group below the root of the real hierarchy, removed when dropped.
    struct Group(PathBuf);

    impl Group {
        fn new(hierarchy: &CgroupHierarchy, name: &str) -> Self {
            let path = hierarchy.mount.join(format!("detour-{name}-{}", std::process::id()));
            fs::create_dir(&path).expect("needs root");
            Self(path)
        }

        fn path(&self) -> String {
            format!("/{}", self.0.file_name().and_then(|name| name.to_str()).expect("a name"))
        }
    }

    impl Drop for Group {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }

    fn real() -> CgroupHierarchy {
        CgroupHierarchy::find(&HostRoot::new("/")).expect("mounted")
    }

    #[test]
    fn the_id_of_a_group_is_its_inode() {
        let hierarchy = real();
        let group = Group::new(&hierarchy, "id");
        let expected = fs::metadata(&group.0).expect("exists").ino();
        assert_eq!(hierarchy.id(&group.path()).expect("found"), expected);
        assert_eq!(hierarchy.container_id(&group.path(), 0).expect("found"), expected);
        let path = group.path();
        drop(group);
        for path in [path.as_str(), "/..", "/", "", "/cgroup.procs"] {
            let error = hierarchy.id(path).expect_err("no group");
            assert!(error.msg.starts_with(&format!("control group {path:?}: not found in ")), "{error}");
        }
    }

    #[test]
    fn a_container_whose_path_does_not_exist_is_found_by_its_process() {
        let hierarchy = real();
        let group = Group::new(&hierarchy, "process");
        let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        fs::write(group.0.join("cgroup.procs"), process.id().to_string()).expect("moved");
        let found = hierarchy.container_id("kubepods-pod1.slice:cri-containerd:none", process.id());
        assert_eq!(hierarchy.is_populated(&group.path()), Some(true));
        let missing = hierarchy.container_id("kubepods-pod1.slice:cri-containerd:none", 0).expect_err("not found");
        process.kill().and_then(|()| process.wait()).expect("ended");
        assert_eq!(found.expect("found"), fs::metadata(&group.0).expect("exists").ino());
        assert_eq!(hierarchy.is_populated(&group.path()), Some(false));
        assert_eq!(hierarchy.is_populated("/none"), None);
        assert!(missing.msg.contains("kubepods-pod1.slice:cri-containerd:none"), "{missing}");
        let ended = hierarchy.process_id(process.id()).expect_err("it has ended");
        assert!(ended.msg.starts_with("can't find the control group of process"), "{ended}");
        assert!(hierarchy.has_exited(process.id()) && !hierarchy.has_exited(1) && !hierarchy.has_exited(0));
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
