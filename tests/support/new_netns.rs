//! Network namespaces for a moment, and work and tools that run in network namespaces.

use super::called::start;
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Runs `work` in a network namespace that goes with the thread.
pub(crate) fn in_new_netns<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
        work()
    };
    std::thread::scope(|scope| scope.spawn(run).join().expect("the work in the namespace succeeds"))
}

/// Returns a network namespace without processes, which goes with the file.
pub(crate) fn new_netns() -> File {
    in_new_netns(|| File::open("/proc/thread-self/ns/net").expect("the namespace of this thread"))
}

/// Returns the path of an open network namespace.
pub(crate) fn path_of(netns: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), netns.as_raw_fd()).into()
}

/// Runs `work` in a network namespace: a socket that it creates stays there.
pub(crate) fn in_netns<T: Send>(netns: &Path, work: impl FnOnce() -> T + Send) -> T {
    let netns = File::open(netns).unwrap_or_else(|error| panic!("{}: {error}", netns.display()));
    let run = || {
        setns(&netns, CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
        work()
    };
    std::thread::scope(|scope| scope.spawn(run).join().expect("the work in the namespace succeeds"))
}

/// Returns a network namespace that belongs to its own user namespace, whose `count` users and groups are the node's from
/// `first` on.
pub(crate) fn netns_with_users(first: u32, count: u32) -> File {
    let mut owner = Command::new("unshare")
        .args(["--user", "--net", "sh", "-c", "echo ready; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("unshare is needed");
    let mut ready = [0; 6];
    owner.stdout.as_mut().expect("it is piped").read_exact(&mut ready).expect("it enters a user namespace");
    for map in ["uid_map", "gid_map"] {
        std::fs::write(format!("/proc/{}/{map}", owner.id()), format!("0 {first} {count}")).expect("mapped");
    }
    let netns = File::open(format!("/proc/{}/ns/net", owner.id())).expect("it lives");
    drop(owner.stdin.take());
    owner.wait().expect("it ends with its stdin");
    netns
}

/// Runs a tool with `input` in a network namespace. It must succeed; returns its stdout.
#[track_caller]
pub(crate) fn tool_in(netns: &Path, name: &str, args: &[&str], input: &str) -> String {
    let netns = format!("--net={}", netns.display());
    tool("nsenter", &[&[netns.as_str(), name], args].concat(), input)
}

/// Runs a tool with `input`. It must succeed; returns its stdout.
#[track_caller]
pub(crate) fn tool(name: &str, args: &[&str], input: &str) -> String {
    let output = start(Command::new(name).args(args), input).wait_with_output().expect("it ends");
    assert!(output.status.success(), "{name} {args:?}: {}\n{input}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
