//! A node: a file system of its own, results as runtimes' library keeps them, and real processes in
//! real control groups and network namespaces.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::json;
use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

static COUNTER: AtomicU32 = AtomicU32::new(1);

/// A pod's UID that no other test has.
pub(crate) fn uid() -> String {
    format!("{:08x}-0000-4000-8000-{:012x}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// A container's ID that no other test has; it begins with `start`.
pub(crate) fn id(start: &str) -> String {
    let rest = format!("{:08x}{:08x}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
    format!("{start}{rest:0>width$}", width = 64 - start.len())
}

/// Where control groups are made: version 2, else one of version 1's hierarchies (cgroups(7)).
fn hierarchy() -> &'static Path {
    let unified = Path::new("/sys/fs/cgroup");
    if unified.join("cgroup.procs").exists() { unified } else { Path::new("/sys/fs/cgroup/pids") }
}

/// In which network namespace a process is to be.
#[derive(Clone, Copy)]
pub(crate) enum Where<'a> {
    /// One of its own.
    New,
    /// One that belongs to a user namespace of its own.
    OwnUsers,
    /// The node's.
    Node,
    /// Another process's.
    With(&'a Process),
}

/// A process that lives until its scene ends.
pub(crate) struct Process(Mutex<Child>);

impl Process {
    pub(crate) fn pid(&self) -> u32 {
        self.0.lock().expect("unpoisoned").id()
    }

    pub(crate) fn netns(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.pid()).into()
    }

    pub(crate) fn end(&self) {
        let mut child = self.0.lock().expect("unpoisoned");
        child.kill().and_then(|()| child.wait()).expect("it ends");
    }
}

/// The node, as long as `scene` runs.
pub(crate) struct Node {
    pub(crate) root: PathBuf,
    groups: RefCell<Vec<PathBuf>>,
}

/// Runs `work` with a node that goes with its end.
pub(crate) fn scene(work: impl FnOnce(&Node) + Send) {
    let root = std::env::temp_dir().join(format!("detour-find-{}", id("n")));
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS).expect("needs CAP_SYS_ADMIN");
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
                .expect("private");
            for directory in ["proc", "run/netns", "var/lib/cni/results", "var/lib/cni/multus/results"] {
                fs::create_dir_all(root.join(directory)).expect("made");
            }
            symlink("/run", root.join("var/run")).expect("linked");
            // The first process's own may be out of reach, where it has more rights than this one.
            fs::create_dir_all(root.join("proc/1/ns")).expect("made");
            symlink(format!("/proc/{}/ns/net", std::process::id()), root.join("proc/1/ns/net")).expect("linked");
            let node = Node { root: root.clone(), groups: RefCell::default() };
            work(&node);
        });
        let ended = thread.join();
        fs::remove_dir_all(&root).expect("removed");
        ended.expect("the scene ends well");
    });
}

pub(crate) fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mounted");
}

impl Node {
    /// A process with that name, in the control group `group`.
    pub(crate) fn process(&self, name: &str, group: &str, place: Where<'_>) -> Process {
        let program = self.root.join(name);
        if !program.exists() {
            symlink("/bin/cat", &program).expect("linked");
        }
        let mut command = match place {
            Where::OwnUsers => Command::new("unshare"),
            _ => Command::new(&program),
        };
        if let Where::OwnUsers = place {
            command.args(["--user", "--net"]).arg(&program);
        }
        command.stdin(Stdio::piped());
        let child = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                match place {
                    Where::New => unshare(CloneFlags::CLONE_NEWNET).expect("a new namespace"),
                    Where::With(other) => {
                        let netns = fs::File::open(other.netns()).expect("it is there");
                        nix::sched::setns(netns, CloneFlags::CLONE_NEWNET).expect("entered");
                    }
                    Where::Node | Where::OwnUsers => {}
                }
                command.spawn().expect("it starts")
            });
            thread.join().expect("started")
        });
        let process = Process(Mutex::new(child));
        let group = hierarchy().join(group.trim_start_matches('/'));
        fs::create_dir_all(&group).expect("a control group");
        fs::write(group.join("cgroup.procs"), process.pid().to_string()).expect("moved");
        self.groups.borrow_mut().push(group);
        let pid = process.pid().to_string();
        symlink(Path::new("/proc").join(&pid), self.root.join("proc").join(&pid)).expect("linked");
        process
    }

    /// Mounts a process's network namespace as runtimes do.
    pub(crate) fn pin(&self, name: &str, of: &Process) {
        let path = self.root.join("run/netns").join(name);
        fs::write(&path, "").expect("written");
        bind(&of.netns(), &path);
    }

    /// A file of the node's.
    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.root.join(name);
        fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    /// Has the plugin keep its state on this node.
    pub(crate) fn keep_state(&self) {
        let (own, here) = (Path::new("/run/detour"), self.root.join("run/detour"));
        for directory in [own, &here] {
            fs::create_dir_all(directory).expect("made");
        }
        bind(&here, own);
    }

    /// Keeps a result of an ADD in /var/run/netns/`netns`, as the runtime's library does. `pod` is the name in the
    /// namespace shop, and the UID.
    pub(crate) fn keep(
        &self,
        directory: &str,
        (network, ifname): (&str, &str),
        container: &str,
        (pod, uid): (&str, &str),
        netns: &str,
    ) {
        let netns = format!("/var/run/netns/{netns}");
        let text = json!({
            "kind": "cniCacheV1", "containerId": container, "config": "e30=", "ifName": ifname,
            "networkName": network, "cniArgs": [["K8S_POD_NAMESPACE", "shop"], ["K8S_POD_NAME", pod], ["K8S_POD_UID", uid]],
            "result": {"cniVersion": "1.0.0", "interfaces": [{"name": ifname, "sandbox": netns}]},
        });
        let file = format!("var/lib/cni/{directory}/{network}-{container}-{ifname}");
        fs::write(self.root.join(file), text.to_string()).expect("written");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for group in self.groups.take() {
            // Another process may have been of the same group, or of one below it.
            let mut directory = group.as_path();
            while directory != hierarchy() && fs::remove_dir(directory).is_ok() {
                directory = directory.parent().expect("it is below the hierarchy");
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}
