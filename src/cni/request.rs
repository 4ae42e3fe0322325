//! The request of a call: its environment variables, including `CNI_ARGS`.

use super::error::{Code, Error};
use super::names::{check_interface_name, is_dns_label, is_dns_subdomain, is_identifier};
use crate::pod::PodRef;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// A `CNI_COMMAND` that has a configuration on stdin. `VERSION` has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CniCommand {
    /// `ADD`
    Add,
    /// `DEL`
    Del,
    /// `CHECK`
    Check,
    /// `GC`
    Gc,
    /// `STATUS`
    Status,
}

impl CniCommand {
    /// Returns the command with this name in `CNI_COMMAND`, in upper case.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Add, Self::Del, Self::Check, Self::Gc, Self::Status].into_iter().find(|c| c.name() == name)
    }

    /// Returns the name in `CNI_COMMAND`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
        }
    }

    /// Returns whether the command is for one container, not for the node.
    fn is_for_a_container(self) -> bool {
        matches!(self, Self::Add | Self::Del | Self::Check)
    }
}

impl fmt::Display for CniCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The parameters of a call (SPEC.md, "Parameters").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// `CNI_COMMAND`.
    pub command: CniCommand,
    /// `CNI_CONTAINERID`; empty for GC and STATUS.
    pub container_id: String,
    /// `CNI_NETNS`; optional for DEL.
    pub netns: Option<PathBuf>,
    /// `CNI_IFNAME`; empty for GC and STATUS.
    pub ifname: String,
    /// `CNI_ARGS` for ADD and CHECK; empty for DEL, which must succeed even if the arguments are invalid.
    pub args: Args,
    /// The unparsed `CNI_ARGS`, for all commands.
    pub args_text: String,
    /// The pod as `NAMESPACE/NAME` for messages, also for commands that do not use `args`; empty if `CNI_ARGS` names no
    /// pod.
    pub about: String,
    /// `CNI_PATH`: the directories that are searched for executables, in order.
    pub path: Vec<PathBuf>,
    /// `CNI_NETNS_OVERRIDE`: `CNI_NETNS` may be the plugin's own network namespace.
    pub netns_override: bool,
}

/// The variables of the specification.
const VARIABLES: [&str; 7] =
    ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH", "CNI_NETNS_OVERRIDE"];

/// Returns the variables of the specification that an environment has, by name.
///
/// # Errors
/// [`Code::Environment`]: the value of one is not UTF-8.
pub fn variables(environment: impl Fn(&str) -> Option<OsString>) -> Result<Vec<(&'static str, String)>, Error> {
    let mut variables = Vec::with_capacity(VARIABLES.len());
    for name in VARIABLES {
        let Some(value) = environment(name) else { continue };
        let Ok(value) = value.into_string() else { return Err(refuse(format!("{name}: expected UTF-8"))) };
        variables.push((name, value));
    }
    Ok(variables)
}

impl Request {
    /// Reads and checks the variables that the command requires, in the order and with the messages of the reference
    /// library (`pkg/skel`). An empty variable counts as missing.
    ///
    /// # Errors
    /// [`Code::Environment`]: the command is unknown, variables are missing or malformed.
    pub fn parse(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let mut variables = Variables { read: variable, missing: Vec::new() };
        let name = variables.optional("CNI_COMMAND").unwrap_or_default();
        let command = CniCommand::named(&name).ok_or_else(|| refuse(format!("unknown CNI_COMMAND: {name}")))?;
        let (mut container_id, mut netns, mut ifname) = (String::new(), None, String::new());
        if command.is_for_a_container() {
            container_id = variables.required("CNI_CONTAINERID");
            if !container_id.is_empty() && !is_identifier(&container_id) {
                return Err(refuse("invalid characters in containerID").with_details(container_id));
            }
            netns = match command {
                CniCommand::Del => variables.optional("CNI_NETNS"),
                _ => Some(variables.required("CNI_NETNS")),
            };
            ifname = variables.required("CNI_IFNAME");
            if !ifname.is_empty() {
                check_interface_name(&ifname)?;
            }
        }
        let path = variables.required("CNI_PATH");
        if !variables.missing.is_empty() {
            return Err(refuse(format!("required env variables [{}] missing", variables.missing.join(","))));
        }
        let args_text = variables.optional("CNI_ARGS").unwrap_or_default();
        let args = Args::parse(&args_text);
        let pod = args.as_ref().ok().and_then(|args| args.pod.as_ref());
        let about = pod.map(|pod| format!("{}/{}", pod.namespace, pod.name)).unwrap_or_default();
        let args = match command {
            CniCommand::Add | CniCommand::Check => args?,
            CniCommand::Del | CniCommand::Gc | CniCommand::Status => Args::default(),
        };
        let netns_override = variables.optional("CNI_NETNS_OVERRIDE");
        Ok(Self {
            command,
            container_id,
            netns: netns.map(PathBuf::from),
            ifname,
            args,
            args_text,
            about,
            path: std::env::split_paths(&path).filter(|dir| !dir.as_os_str().is_empty()).collect(),
            netns_override: netns_override.is_some_and(|v| v == "1" || v.eq_ignore_ascii_case("true")),
        })
    }
}

/// Reads variables and collects the missing ones.
struct Variables<F> {
    read: F,
    missing: Vec<&'static str>,
}

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn optional(&self, name: &str) -> Option<String> {
        (self.read)(name).filter(|value| !value.is_empty())
    }

    fn required(&mut self, name: &'static str) -> String {
        self.optional(name).unwrap_or_else(|| {
            self.missing.push(name);
            String::new()
        })
    }
}

fn refuse(msg: impl Into<String>) -> Error {
    Error::new(Code::Environment, msg)
}

/// The keys of `CNI_ARGS` that container runtimes of Kubernetes pass. Others are ignored, even without
/// `IgnoreUnknown`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    /// The pod, if both its name and its namespace are present.
    pub pod: Option<PodRef>,
    /// `K8S_POD_INFRA_CONTAINER_ID`: the ID of the pod sandbox.
    pub infra_container_id: Option<String>,
}

impl Args {
    /// Parses `KEY=VALUE;…`. The last of repeated keys counts: Multus writes its own and then appends those that it
    /// received (multus-cni, `pkg/multus`). A value may contain `=`.
    ///
    /// # Errors
    /// An item has no `=`, or the name or namespace of the pod is invalid in Kubernetes: both become parts of URLs and
    /// paths.
    pub fn parse<'a>(text: &'a str) -> Result<Self, Error> {
        let items = text.split(';').filter(|item| !item.is_empty());
        let pair = |item: &'a str| {
            let invalid = || refuse(format!("CNI_ARGS: invalid item {item:?}; expected KEY=VALUE, separated by ;"));
            item.split_once('=').ok_or_else(invalid)
        };
        let pairs = items.map(pair).collect::<Result<Vec<_>, _>>()?;
        let value = |key: &str| {
            let (_, value) = pairs.iter().rev().find(|(other, _)| *other == key)?;
            (!value.is_empty()).then(|| (*value).to_owned())
        };
        let name = value("K8S_POD_NAME");
        let namespace = value("K8S_POD_NAMESPACE");
        if let Some(name) = name.as_ref().filter(|name| !is_dns_subdomain(name)) {
            let expected = "lower case letters, digits, - and ., at most 253 (an RFC 1123 subdomain)";
            return Err(refuse(format!("CNI_ARGS: K8S_POD_NAME: invalid value {name:?}; expected {expected}")));
        }
        if let Some(namespace) = namespace.as_ref().filter(|namespace| !is_dns_label(namespace)) {
            let expected = "lower case letters, digits and -, at most 63 (an RFC 1123 label)";
            return Err(refuse(format!(
                "CNI_ARGS: K8S_POD_NAMESPACE: invalid value {namespace:?}; expected {expected}"
            )));
        }
        let uid = value("K8S_POD_UID");
        let pod = namespace.zip(name).map(|(namespace, name)| PodRef { namespace, name, uid });
        Ok(Self { pod, infra_container_id: value("K8S_POD_INFRA_CONTAINER_ID") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    const WHOLE: [(&str, &str); 6] = [
        ("CNI_CONTAINERID", "c1"),
        ("CNI_NETNS", "/run/netns/x"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_ARGS", "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b"),
        ("CNI_PATH", "/a::/b"),
        ("CNI_NETNS_OVERRIDE", ""),
    ];

    /// Parses a request with all variables, some of them changed.
    fn call(command: &str, changed: &[(&str, &str)]) -> Result<Request, Error> {
        Request::parse(|name| {
            let value = |list: &[(&str, &str)]| list.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
            if name == "CNI_COMMAND" { Some(command.to_owned()) } else { value(changed).or_else(|| value(&WHOLE)) }
        })
    }

    #[test]
    fn a_request_with_all_variables_is_accepted() {
        let request = call("ADD", &[]).expect("accepted");
        assert_eq!(request.command, CniCommand::Add);
        assert_eq!(request.netns, Some(PathBuf::from("/run/netns/x")));
        assert_eq!((request.container_id.as_str(), request.ifname.as_str()), ("c1", "eth0"));
        assert_eq!(request.path, [PathBuf::from("/a"), PathBuf::from("/b")]);
        assert!(request.args.pod.is_some() && !request.netns_override);
        assert_eq!(request.about, "a/b");
    }

    #[test]
    fn each_command_requires_its_variables() {
        let none = WHOLE.map(|(name, _)| (name, ""));
        for (command, missing) in [
            ("ADD", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"),
            ("CHECK", "CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH"),
            ("DEL", "CNI_CONTAINERID,CNI_IFNAME,CNI_PATH"),
            ("GC", "CNI_PATH"),
            ("STATUS", "CNI_PATH"),
        ] {
            let error = call(command, &none).expect_err("nothing is there");
            assert_eq!(error, refuse(format!("required env variables [{missing}] missing")));
        }
        assert_eq!(call("DEL", &[("CNI_NETNS", "")]).expect("accepted").netns, None);
    }

    #[test]
    fn a_malformed_variable_is_reported_before_later_missing_ones() {
        let error = call("ADD", &[("CNI_CONTAINERID", "a/b"), ("CNI_IFNAME", "")]).expect_err("refused");
        assert_eq!(error, refuse("invalid characters in containerID").with_details("a/b"));
        let error = call("ADD", &[("CNI_CONTAINERID", ""), ("CNI_IFNAME", "..")]).expect_err("refused");
        assert_eq!(error, refuse("interface name is . or .."));
        let error = call("ADD", &[("CNI_PATH", ""), ("CNI_ARGS", "x")]).expect_err("refused");
        assert_eq!(error, refuse("required env variables [CNI_PATH] missing"));
    }

    #[test]
    fn variables_that_a_command_does_not_need_are_not_checked() {
        let odd = [("CNI_CONTAINERID", "a/b"), ("CNI_IFNAME", ".."), ("CNI_ARGS", "x")];
        assert_eq!(call("GC", &odd).expect("accepted").container_id, "");
        assert!(call("STATUS", &odd).is_ok());
        assert_eq!(call("DEL", &[("CNI_ARGS", "x")]).expect("accepted").args, Args::default());
        assert_eq!(call("DEL", &[("CNI_ARGS", "x")]).expect("accepted").about, "");
        assert_eq!(call("DEL", &[]).expect("accepted").about, "a/b");
        assert!(call("ADD", &[("CNI_ARGS", "x")]).is_err());
    }

    #[test]
    fn commands_are_in_upper_case() {
        assert_eq!(call("add", &[]).expect_err("refused").msg, "unknown CNI_COMMAND: add");
        assert_eq!(call("", &[]).expect_err("refused").msg, "unknown CNI_COMMAND: ");
    }

    #[test]
    fn the_netns_override_is_1_or_true() {
        for (value, wanted) in
            [("1", true), ("true", true), ("TRUE", true), ("True", true), ("yes", false), ("", false)]
        {
            let request = call("ADD", &[("CNI_NETNS_OVERRIDE", value)]).expect("accepted");
            assert_eq!(request.netns_override, wanted, "{value}");
        }
    }

    #[test]
    fn the_error_for_a_variable_that_is_not_utf_8_has_its_name() {
        let bad = || OsString::from_vec(vec![0xff]);
        let error = variables(|name| (name == "CNI_ARGS").then(bad)).expect_err("refused");
        assert_eq!(error, refuse("CNI_ARGS: expected UTF-8"));
        let accepted = variables(|name| (name == "CNI_PATH").then(|| "/".into()));
        assert_eq!(accepted, Ok([("CNI_PATH", "/".to_owned())].into()));
    }

    fn pod(text: &str) -> Option<PodRef> {
        Args::parse(text).expect("accepted").pod
    }

    #[test]
    fn arguments_of_kubernetes_runtimes_are_read() {
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns1;K8S_POD_NAME=p.q;K8S_POD_INFRA_CONTAINER_ID=c;K8S_POD_UID=u";
        let args = Args::parse(args).expect("accepted");
        assert_eq!(args.pod, Some(PodRef { namespace: "ns1".into(), name: "p.q".into(), uid: Some("u".into()) }));
        assert_eq!(args.infra_container_id.as_deref(), Some("c"));
    }

    #[test]
    fn a_pod_requires_name_and_namespace() {
        assert_eq!(pod(""), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=a"), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=;K8S_POD_NAME=b"), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=a;K8S_POD_NAME="), None);
        assert_eq!(pod("K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=;").expect("a pod").uid, None);
    }

    #[test]
    fn the_last_of_repeated_keys_counts_and_unknown_keys_are_ignored() {
        let pod = pod("K8S_POD_NAME=a;IgnoreUnknown=0;FOO=x=y=;K8S_POD_NAMESPACE=n;K8S_POD_NAME=b").expect("a pod");
        assert_eq!(pod.name, "b");
        assert_eq!(
            Args::parse("K8S_POD_UID=a=b;K8S_POD_NAME=n;K8S_POD_NAMESPACE=m")
                .expect("accepted")
                .pod
                .expect("a pod")
                .uid
                .as_deref(),
            Some("a=b")
        );
    }

    #[test]
    fn errors_have_the_invalid_item() {
        for (text, item) in [
            ("K8S_POD_NAME=a;FOO;B=c", r#""FOO""#),
            ("K8S_POD_NAME=../../x", "K8S_POD_NAME"),
            ("K8S_POD_NAME=a b", "K8S_POD_NAME"),
            ("K8S_POD_NAMESPACE=a.b", "K8S_POD_NAMESPACE"),
            ("K8S_POD_NAMESPACE=A", "K8S_POD_NAMESPACE"),
        ] {
            let error = Args::parse(text).expect_err("refused");
            assert_eq!(error.code, Code::Environment);
            assert!(error.msg.contains(item), "{error}");
        }
    }
}
