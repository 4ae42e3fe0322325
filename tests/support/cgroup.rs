//! Control groups in the machine's unified hierarchy, with processes in them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A control group. Dropping it kills its processes and removes it; drop its children first.
#[derive(Debug)]
pub(crate) struct Cgroup {
    directory: PathBuf,
}

impl Cgroup {
    /// Creates a control group directly below the root of the hierarchy, with a name that is unique on this machine.
    pub(crate) fn new() -> Self {
        Self::with_suffix("")
    }

    /// Creates the control group of a container. As those of runtimes, its name ends with the container's ID.
    pub(crate) fn of_container(id: &str) -> Self {
        Self::with_suffix(&format!("-{id}"))
    }

    fn with_suffix(suffix: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self::create(hierarchy().join(format!("detour-test-{}-{number}{suffix}", std::process::id())))
    }

    /// Creates a control group below this one.
    pub(crate) fn child(&self, name: &str) -> Self {
        Self::create(self.directory.join(name))
    }

    fn create(directory: PathBuf) -> Self {
        fs::create_dir(&directory).unwrap_or_else(|e| panic!("create {} (are you root?): {e}", directory.display()));
        Self { directory }
    }

    /// Returns the ID: the number that the kernel compares in `socket cgroupv2`.
    pub(crate) fn id(&self) -> u64 {
        fs::metadata(&self.directory).expect("it exists").ino()
    }

    /// Returns the directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path below the root of the hierarchy, with a leading slash, as in `/proc/PID/cgroup`.
    pub(crate) fn path(&self) -> String {
        let below = self.directory.strip_prefix(hierarchy()).expect("below the hierarchy");
        format!("/{}", below.to_str().expect("text"))
    }

    /// Returns a command that runs `program` in the control group from its first instruction.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        command_in(&self.directory, program)
    }

    /// Moves a running process into the control group. Its sockets keep theirs.
    pub(crate) fn take(&self, pid: u32) {
        fs::write(self.directory.join("cgroup.procs"), pid.to_string()).expect("the process exists");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.directory.join("cgroup.kill"), "1");
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(error) = fs::remove_dir(&self.directory) {
            if error.kind() == std::io::ErrorKind::NotFound {
                return;
            }
            if Instant::now() > deadline {
                eprintln!("remove {}: {error}", self.directory.display());
                return;
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

/// Returns a command that runs `program` in the control group `directory` from its first instruction.
pub(crate) fn command_in(directory: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"echo $$ > "$0/cgroup.procs" && exec "$@""#]).arg(directory).arg(program);
    command
}

/// Returns the mount point of the unified hierarchy.
pub(crate) fn hierarchy() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let is_unified = |line: &&str| line.split(" - ").nth(1).is_some_and(|rest| rest.starts_with("cgroup2 "));
    let mount = mounts.lines().find(is_unified).expect("a mount of cgroup2 is needed");
    mount.split(' ').nth(4).expect("a mount point").into()
}
