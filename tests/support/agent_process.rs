//! A running `detour agent`.

use super::background::Running;
use super::program::program;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use std::cell::RefCell;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// Logged when the node has the desired state.
pub(crate) const SETTLED: &str = "the node has the desired state";
/// Logged when the node becomes ready: the desired state has stayed.
pub(crate) const READY: &str = "the plugin is ready on this node";
const DEADLINE: Duration = Duration::from_secs(240);

/// The token of a service account.
pub(crate) const TOKEN: &str = "token-of-the-agent";

/// Writes the files of a service account unless they exist.
pub(crate) fn write_account(directory: &Path) {
    if !directory.exists() {
        fs::create_dir_all(directory).expect("made");
        // Not used for verification: simulated API servers speak plain HTTP.
        let authority = rcgen::generate_simple_self_signed(["api".to_owned()]).expect("a certificate");
        fs::write(directory.join("ca.crt"), authority.cert.pem()).expect("written");
        // As an editor would write it.
        fs::write(directory.join("token"), format!("{TOKEN}\n")).expect("written");
    }
}

/// Returns the arguments of an agent for the node `node-1` below `root`. Creates its service account.
pub(crate) fn arguments_on_node(root: &Path, api_server: &str, more: &[&str]) -> Vec<String> {
    write_account(&root.join("sa"));
    fs::create_dir_all(root.join("etc/cni/net.d")).expect("made");
    let root = root.display();
    let own = [format!("--root={root}"), format!("--service-account={root}/sa"), format!("--api-server={api_server}")];
    let flags = ["agent", "--node-name=node-1"].iter().chain(more).map(ToString::to_string);
    flags.chain(own).collect()
}

pub(crate) struct Agent {
    process: Running,
    lines: Receiver<String>,
    /// All lines that were received so far.
    log: RefCell<Vec<String>>,
}

impl Agent {
    /// Starts an agent with this host name.
    pub(crate) fn spawn(name: &str, arguments: &[String]) -> Self {
        Self::spawn_with(&[("HOSTNAME", name)], arguments)
    }

    /// Starts an agent with this host name and the arguments of [`arguments_on_node`].
    pub(crate) fn on_node(name: &str, root: &Path, api_server: &str, more: &[&str]) -> Self {
        let pod = [("HOSTNAME", name), ("POD_NAMESPACE", "mesh")];
        Self::spawn_with(&pod, &arguments_on_node(root, api_server, more))
    }

    /// Starts an agent with this environment.
    pub(crate) fn spawn_with(environment: &[(&str, &str)], arguments: &[String]) -> Self {
        Self::spawn_program(program(), environment, arguments)
    }

    /// Starts an agent of another program.
    pub(crate) fn spawn_program(program: &Path, environment: &[(&str, &str)], arguments: &[String]) -> Self {
        Self::of(Command::new(program).args(arguments).env_clear().envs(environment.iter().copied()))
    }

    /// Starts an agent with this command.
    pub(crate) fn of(command: &mut Command) -> Self {
        let mut process = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { process: Running(process), lines, log: RefCell::default() }
    }

    /// Waits for a log line that contains `part`. Returns it.
    #[track_caller]
    pub(crate) fn wait_for_log(&self, part: &str) -> String {
        self.wait_for_logs(&[part]).pop().expect("one")
    }

    /// Waits for log lines that contain these parts, in any order. Returns them in the order of arrival.
    #[track_caller]
    pub(crate) fn wait_for_logs(&self, parts: &[&str]) -> Vec<String> {
        let (mut left, mut found, mut others) = (parts.to_vec(), Vec::new(), Vec::new());
        while !left.is_empty() {
            let line = self.lines.recv_timeout(DEADLINE);
            let line = line.unwrap_or_else(|why| panic!("{left:?} was not logged ({why}), but {others:#?}"));
            self.log.borrow_mut().push(line.clone());
            match left.iter().position(|part| line.contains(part)) {
                Some(at) => {
                    left.remove(at);
                    found.push(line);
                }
                None => others.push(line),
            }
        }
        found
    }

    /// Returns the log lines since the last wait.
    pub(crate) fn logged(&self) -> Vec<String> {
        let lines: Vec<_> = self.lines.try_iter().collect();
        self.log.borrow_mut().extend(lines.iter().cloned());
        lines
    }

    /// Returns all log lines since the start.
    pub(crate) fn log(&self) -> Vec<String> {
        self.logged();
        self.log.borrow().clone()
    }

    /// Stops the process with SIGSTOP.
    pub(crate) fn freeze(&self) {
        kill(self.id(), Signal::SIGSTOP).expect("it is there");
        let status = waitpid(self.id(), Some(WaitPidFlag::WUNTRACED)).expect("it is there");
        assert_eq!(status, WaitStatus::Stopped(self.id(), Signal::SIGSTOP));
    }

    pub(crate) fn id(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.0.id()).expect("an id"))
    }

    /// Returns its health address.
    pub(crate) fn address(&self) -> String {
        let part = "serving /healthz, /readyz and /metrics";
        let logged = self.log().into_iter().find(|line| line.contains(part));
        let line = logged.unwrap_or_else(|| self.wait_for_log(part));
        line.split("address=").nth(1).expect("the address").trim().to_owned()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.0.try_wait().expect("a child").is_some()
    }

    /// Ends the agent with SIGTERM. Returns its exit status and its last log lines.
    pub(crate) fn ended(mut self) -> (ExitStatus, Vec<String>) {
        kill(self.id(), Signal::SIGTERM).expect("it is there");
        let status = self.process.0.wait().expect("it ends");
        (status, self.lines.iter().collect())
    }

    pub(crate) fn end(mut self, signal: Signal) -> ExitStatus {
        kill(self.id(), signal).expect("it is there");
        self.process.0.wait().expect("it ends")
    }
}
