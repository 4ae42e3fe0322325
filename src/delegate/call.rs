//! The environment of a plugin (SPEC.md, "Parameters").

use crate::cni::{Command, NetConf, Request};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// One call of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `CNI_COMMAND`.
    pub command: Command,
    /// `CNI_CONTAINERID`; empty for GC and STATUS.
    pub container_id: String,
    /// `CNI_NETNS`; empty where there is none.
    pub netns: PathBuf,
    /// `CNI_IFNAME`; empty for GC and STATUS.
    pub ifname: String,
    /// `CNI_ARGS`; `None` is what this process was given itself.
    pub args: Option<String>,
    /// `CNI_PATH`, and where the executable is looked for.
    pub path: Vec<PathBuf>,
    /// How long it may take.
    pub timeout: Duration,
}

impl Call {
    /// The call that this process was started with, handed on: `cni_bin_dir` stands in front of
    /// `CNI_PATH`.
    #[must_use]
    pub fn handed_on(request: &Request, conf: &NetConf) -> Self {
        Self {
            command: request.command,
            container_id: request.container_id.clone(),
            netns: request.netns.clone().unwrap_or_default(),
            ifname: request.ifname.clone(),
            args: None,
            path: conf.kubernetes.cni_bin_dir.iter().chain(&request.path).cloned().collect(),
            timeout: conf.delegate_timeout,
        }
    }

    /// The same with another command.
    #[must_use]
    pub fn with_command(&self, command: Command) -> Self {
        Self { command, ..self.clone() }
    }

    /// What is set in the plugin's environment. All else that is in this process's own passes on,
    /// as the reference library does it (`pkg/invoke/args.go`).
    pub(super) fn variables(&self) -> Vec<(&'static str, OsString)> {
        let directories: Vec<_> = self.path.iter().map(|directory| directory.as_os_str()).collect();
        let mut variables = vec![
            ("CNI_COMMAND", self.command.to_string().into()),
            ("CNI_CONTAINERID", self.container_id.clone().into()),
            ("CNI_NETNS", self.netns.clone().into()),
            ("CNI_IFNAME", self.ifname.clone().into()),
            ("CNI_PATH", directories.join(":".as_ref())),
        ];
        variables.extend(self.args.as_ref().map(|args| ("CNI_ARGS", args.into())));
        variables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn a_call_is_handed_on_with_the_bin_dir_in_front() {
        let request = Request::parse(|name| {
            let value = match name {
                "CNI_COMMAND" => "DEL",
                "CNI_CONTAINERID" => "c1",
                "CNI_IFNAME" => "eth0",
                "CNI_PATH" => "/a:/b",
                _ => return None,
            };
            Some(value.to_owned())
        })
        .expect("a request");
        let conf = br#"{"name": "n", "type": "detour", "kubernetes": {"cni_bin_dir": "/x"}}"#;
        let conf = NetConf::parse(conf, Command::Del, "detour").expect("a configuration");
        let call = Call::handed_on(&request, &conf);
        let variables: HashMap<_, _> = call.variables().into_iter().collect();
        let wanted = [
            ("CNI_COMMAND", "DEL"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", ""),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/x:/a:/b"),
        ];
        assert_eq!(variables, wanted.map(|(name, value)| (name, OsString::from(value))).into());
        assert_eq!(call.timeout, Duration::from_secs(60));
    }
}
