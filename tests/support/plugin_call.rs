//! Calls of the plugin.

use super::attachment::Attachment;
use super::netns_pod::Pod;
use super::program::program;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Child, Command, Output, Stdio};

/// The outcome of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// The error's code, and its text with details.
    Refused(u64, String),
}

impl Answer {
    #[track_caller]
    pub(crate) fn done(self) {
        assert_eq!(self, Self::Done);
    }

    /// Returns the text of an error, which must have this code.
    #[track_caller]
    pub(crate) fn refused(self, expected: u64) -> String {
        match self {
            Self::Refused(code, text) if code == expected => text,
            other => panic!("not refused with {expected}: {other:?}"),
        }
    }

    /// Returns the outcome of a call that has ended with an answer.
    pub(crate) fn of(output: &Output) -> Self {
        if output.status.success() {
            return Self::Done;
        }
        let error: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
        let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
        Self::Refused(error["code"].as_u64().expect("a code"), format!("{}: {}", text("msg"), text("details")))
    }
}

impl Pod {
    pub(crate) fn add(&self, attachment: Attachment) -> Answer {
        self.call("ADD", attachment)
    }

    pub(crate) fn del(&self, attachment: Attachment) -> Answer {
        self.call("DEL", attachment)
    }

    pub(crate) fn check(&self, attachment: Attachment) -> Answer {
        self.call("CHECK", attachment)
    }

    fn call(&self, verb: &str, attachment: Attachment) -> Answer {
        Answer::of(&self.start(verb, attachment).wait_with_output().expect("it ends"))
    }

    /// Runs a call with this rule format.
    pub(crate) fn call_in(&self, dialect: &str, verb: &str, attachment: Attachment) -> Answer {
        let mut configuration = attachment.configuration();
        configuration["dialect"] = dialect.into();
        self.call_with(verb, attachment.slot.ifname(), &configuration, &self.netns().display().to_string())
    }

    /// Starts a call.
    pub(crate) fn start(&self, verb: &str, attachment: Attachment) -> Child {
        self.start_with(
            verb,
            attachment.slot.ifname(),
            &attachment.configuration(),
            &self.netns().display().to_string(),
        )
    }

    /// Starts a call with these parameters.
    pub(crate) fn start_with(&self, verb: &str, ifname: &str, configuration: &Value, netns: &str) -> Child {
        self.start_under(&[], verb, ifname, configuration, netns)
    }

    /// The same, with another program that runs the plugin, such as `strace`.
    pub(crate) fn start_under(
        &self,
        runner: &[&str],
        verb: &str,
        ifname: &str,
        configuration: &Value,
        netns: &str,
    ) -> Child {
        let mut words = runner.iter().map(OsStr::new).chain([program().as_os_str()]);
        let mut command = Command::new(words.next().expect("the plugin"));
        command.args(words).env_clear().envs([
            ("CNI_COMMAND", verb),
            ("CNI_CONTAINERID", &self.container_id),
            ("CNI_NETNS", netns),
            ("CNI_IFNAME", ifname),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0"),
        ]);
        let mut configuration = configuration.clone();
        configuration["log_level"] = "none".into();
        if verb == "CHECK" {
            configuration["prevResult"] = json!({});
        }
        // A file instead of a pipe: writing to a process that is killed early would fail.
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        writer.write_all(configuration.to_string().as_bytes()).expect("it fits into the pipe");
        drop(writer);
        command.stdin(reader).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    }

    /// Runs a call with these parameters.
    pub(crate) fn call_with(&self, verb: &str, ifname: &str, configuration: &Value, netns: &str) -> Answer {
        let child = self.start_with(verb, ifname, configuration, netns);
        Answer::of(&child.wait_with_output().expect("it ends"))
    }
}
