//! One call of the plugin under a fault.

use crate::support::program::program;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// After this time, a call counts as hung: the plugin's own limits end each wait earlier.
const LIMIT: Duration = Duration::from_secs(60);

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// The error's code, and its text with details.
    Refused(u64, String),
    /// This signal ended it.
    Signaled(i32),
    /// It failed with this exit code and printed no error object.
    Silent(i32),
    /// It did not end within the limit, and was killed.
    Hung,
}

/// A call that has ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) answer: Answer,
    pub(crate) stderr: String,
}

/// A call to make.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    environment: BTreeMap<String, String>,
    stdin: Vec<u8>,
    runner: Vec<String>,
    limit: Duration,
}

impl Call {
    /// Returns a call with this configuration on stdin.
    pub(crate) fn new(verb: &str, container_id: &str, netns: &str, ifname: &str, configuration: &Value) -> Self {
        let mut configuration = configuration.clone();
        if configuration.get("log_level").is_none() {
            configuration["log_level"] = "none".into();
        }
        if verb == "CHECK" && configuration.get("prevResult").is_none() {
            configuration["prevResult"] = serde_json::json!({});
        }
        let environment = [
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", container_id),
            ("CNI_NETNS", netns),
            ("CNI_IFNAME", ifname),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
            ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        ];
        Self {
            environment: environment.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            stdin: configuration.to_string().into_bytes(),
            runner: Vec::new(),
            limit: LIMIT,
        }
    }

    /// Sets a variable of the environment.
    pub(crate) fn with(mut self, variable: &str, value: &str) -> Self {
        self.environment.insert(variable.into(), value.into());
        self
    }

    /// Changes the configuration.
    pub(crate) fn configured(mut self, change: impl FnOnce(&mut Value)) -> Self {
        let mut configuration = serde_json::from_slice(&self.stdin).expect("JSON");
        change(&mut configuration);
        self.stdin = configuration.to_string().into_bytes();
        self
    }

    /// Has a program run the plugin: `strace …`, `prlimit …`.
    pub(crate) fn under(mut self, runner: &[&str]) -> Self {
        self.runner = runner.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Has `sh` run a script in which `"$@"` is the plugin: `ulimit -v 1000; exec "$@"`.
    pub(crate) fn in_shell(self, script: &str) -> Self {
        self.under(&["/bin/sh", "-c", script, "sh"])
    }

    /// Returns the command with its environment, without stdin, stdout and stderr.
    pub(crate) fn command(&self) -> Command {
        let mut command = match self.runner.split_first() {
            None => Command::new(program()),
            Some((runner, arguments)) => {
                let mut command = Command::new(runner);
                command.args(arguments).arg(program());
                command
            }
        };
        command.env_clear().envs(&self.environment).process_group(0);
        command
    }

    /// Starts the call with stdout and stderr as pipes.
    pub(crate) fn start(&self) -> Child {
        // A pipe that contains everything: writing to a process that is killed early would fail.
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        assert!(self.stdin.len() <= 65536, "stdin does not fit into a pipe");
        writer.write_all(&self.stdin).expect("it fits into the pipe");
        drop(writer);
        self.command().stdin(reader).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    }

    /// Runs the call, at most until the limit.
    pub(crate) fn run(&self) -> Ended {
        ended(self.start(), self.limit)
    }
}

/// Waits for a call that was started just now with stdout and stderr as pipes; kills it after `limit`.
pub(crate) fn ended(child: Child, limit: Duration) -> Ended {
    let group = i32::try_from(child.id()).expect("an ID");
    let (sender, end) = channel::<()>();
    let (output, is_hung) = std::thread::scope(|scope| {
        let watchdog = scope.spawn(move || {
            let is_hung = end.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
            if is_hung {
                let _ = nix::sys::signal::killpg(nix::unistd::Pid::from_raw(group), nix::sys::signal::SIGKILL);
            }
            is_hung
        });
        let output = child.wait_with_output().expect("it ends");
        drop(sender);
        (output, watchdog.join().expect("no panic"))
    });
    Ended::new(&output, is_hung)
}

impl Ended {
    fn new(output: &Output, is_hung: bool) -> Self {
        let error: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        let code = error.as_ref().and_then(|error| error["code"].as_u64());
        let text = |key: &str| error.as_ref().and_then(|error| error[key].as_str()).unwrap_or_default();
        let answer = match (is_hung, output.status.code(), code) {
            (true, ..) => Answer::Hung,
            (_, None, _) => Answer::Signaled(output.status.signal().expect("it ended by a signal")),
            (_, Some(0), None) => Answer::Done,
            (_, Some(_), Some(code)) => Answer::Refused(code, format!("{}: {}", text("msg"), text("details"))),
            (_, Some(exit), None) => Answer::Silent(exit),
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { answer, stderr: text(&output.stderr) }
    }

    /// Returns whether the program started: the loader of a debug build can fail, and the release build needs none.
    pub(crate) fn is_loaded(&self) -> bool {
        !(self.answer == Answer::Silent(127) && self.stderr.contains("error while loading shared libraries"))
    }

    /// Checks the form of an answer: success, or an error with a code of the contract and a text. A bug of the plugin
    /// (108) is no such code.
    pub(crate) fn is_answer(&self) -> Result<(), String> {
        match &self.answer {
            Answer::Done => Ok(()),
            Answer::Refused(1 | 4..=8 | 11 | 50 | 100..=107, text) if text.len() > 10 => Ok(()),
            Answer::Refused(..) => Err("the answer has no code or text of the contract".into()),
            Answer::Signaled(_) | Answer::Silent(_) => Err("the call ended without an answer".into()),
            Answer::Hung => Err("the call did not end".into()),
        }
    }

    /// Checks that the call was refused with one of these codes; 0 stands for success.
    pub(crate) fn is_refused(&self, codes: &[u64]) -> Result<(), String> {
        self.is_answer()?;
        match &self.answer {
            Answer::Refused(code, _) if codes.contains(code) => Ok(()),
            Answer::Done if codes.contains(&0) => Ok(()),
            _ => Err(format!("expected one of the codes {codes:?} (0: success)")),
        }
    }

    /// Checks that the call succeeded.
    pub(crate) fn is_done(&self) -> Result<(), String> {
        self.is_refused(&[0])
    }
}
