//! A container: a process in its own control group and in the pod's network namespace. It connects on command.

use crate::cgroup::Cgroup;
use crate::node;
use crate::scene::{DESTINATION, Pod, SLOW};
use crate::support::wait::until_within;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

/// `new`: connects and prints the greeting. `open`: the same, and leaves the connection open. `again`: sends a line
/// over the open connection, and prints the answer.
const SCRIPT: &str = r#"
while read -r command; do
  case $command in
    new) exec 3<>/dev/tcp/$0/80 && head -n 1 <&3 || echo failed; exec 3>&- ;;
    open) exec 4<>/dev/tcp/$0/80 && head -n 1 <&4 || echo failed ;;
    again) echo more >&4 && head -n 1 <&4 || echo failed ;;
  esac
done"#;

pub(crate) struct Container<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) name: &'static str,
    pub(crate) id: String,
    group: Cgroup,
    process: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl<'a> Container<'a> {
    /// Creates a container that waits for its first command.
    pub(crate) fn create(pod: &'a Pod, name: &'static str) -> Self {
        Self::create_in(pod, name, Cgroup::of_container)
    }

    /// The same in a control group that `group` creates for the container's ID.
    pub(crate) fn create_in(pod: &'a Pod, name: &'static str, group: impl FnOnce(&str) -> Cgroup) -> Self {
        // The beginning is unique, as in random IDs: comments of elements have only that.
        let id: String = node::id("c").chars().rev().collect();
        let group = group(&id);
        let mut process = group
            .command("nsenter")
            .arg(format!("--net={}", pod.netns().display()))
            .args(["bash", "-c", SCRIPT, DESTINATION])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("bash and nsenter are needed");
        let commands = process.stdin.take().expect("a pipe");
        let answers = BufReader::new(process.stdout.take().expect("a pipe"));
        // It enters the control group first.
        let netns = |path: &Path| std::fs::metadata(path).map(|file| file.ino()).ok();
        let (own, wanted) = (PathBuf::from(format!("/proc/{}/ns/net", process.id())), netns(&pod.netns()));
        until_within(SLOW, "the process is in the pod", || netns(&own) == wanted);
        Self { pod, name, id, group, process, commands, answers }
    }

    pub(crate) fn cgroups_path(&self) -> String {
        self.group.path()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn cgroup(&self) -> u64 {
        self.group.id()
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.commands, "{command}").expect("it runs");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("it runs");
        answer.trim_end().to_owned()
    }

    /// Returns where a new connection ends: `direct` or `sidecar`.
    pub(crate) fn connect(&mut self) -> String {
        self.ask("new")
    }

    /// Ends the processes and removes the control group.
    pub(crate) fn vanish(&mut self) {
        self.exit();
        std::fs::remove_dir(self.group.directory()).expect("it is empty");
    }

    /// Ends the processes. The control group stays until the value is dropped.
    pub(crate) fn exit(&mut self) {
        std::fs::write(self.group.directory().join("cgroup.kill"), "1").expect("killed");
        self.process.wait().expect("it ends");
    }
}
