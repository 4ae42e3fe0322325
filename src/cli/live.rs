//! Whose live rules are read: a namespace's, a process's, a container's, or a pod's of this node.

use super::CommandError;
use super::subject::present;
use clap::Args;
use detour_cni::cni::{Code, Error};
use detour_cni::inspect::{LiveRules, Subject, elsewhere};
use detour_cni::netns::find::{FoundNetns, of_container, of_pod};
use detour_cni::state::{ROOT, Store};
use std::path::{Path, PathBuf};

/// A namespace, by what is in it.
#[derive(Debug, Args)]
pub(super) struct LiveArguments {
    /// The network namespace of this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// The network namespace of this container: its ID, or the beginning of that
    #[arg(long, value_name = "ID")]
    container: Option<String>,
    /// The network namespace of the pod with this UID, without asking the cluster
    #[arg(long, value_name = "UID")]
    pod_uid: Option<String>,
    /// Where the node's file system is mounted: /host in the agent's container
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// What names a namespace.
pub(super) enum NetnsSelector {
    /// Its path, or its name in /run/netns.
    Netns(PathBuf),
    /// A process in it.
    Process(u32),
    /// A container in it.
    Container(String),
    /// A pod's UID as the node knows it.
    Uid(String),
    /// A pod as the cluster knows it.
    Pod(Box<Subject>),
}

/// Rules, and where they were found.
pub(super) struct NetnsRules {
    pub(super) rules: LiveRules,
    pub(super) netns: PathBuf,
    /// How the namespace is known, where that had to be found out.
    pub(super) evidence: Option<String>,
}

impl LiveArguments {
    /// What the arguments name.
    pub(super) fn named(&self) -> Option<NetnsSelector> {
        let process = self.pid.map(NetnsSelector::Process);
        let container = || self.container.clone().map(NetnsSelector::Container);
        process.or_else(container).or_else(|| self.pod_uid.clone().map(NetnsSelector::Uid))
    }

    /// Reads the rules. `question` is what is asked, as arguments of this program, without whose rules.
    ///
    /// # Errors
    /// There is no such namespace here (where the pod's node is known, with what to run there), or it
    /// can't be read.
    pub(super) fn read(&self, whose: &NetnsSelector, question: &str) -> Result<NetnsRules, CommandError> {
        present("--root", &self.root)?;
        let path = match whose {
            NetnsSelector::Netns(path) => self.netns(path),
            NetnsSelector::Process(pid) => self.root.join(format!("proc/{pid}/ns/net")),
            NetnsSelector::Container(id) => {
                return self.found(of_container(&self.root, id)?.ok_or_else(|| unknown(&format!("container {id}")))?);
            }
            NetnsSelector::Uid(uid) => {
                return self.found(of_pod(&self.root, uid)?.ok_or_else(|| unknown(&format!("pod {uid}")))?);
            }
            NetnsSelector::Pod(subject) => return self.found(self.of_subject(subject, question)?),
        };
        let rules = LiveRules::read(&path, &self.store()).map_err(|error| match whose {
            NetnsSelector::Netns(place) if is_name(place) && !path.exists() => {
                let name = place.display();
                let msg =
                    format!("{}; ip netns lists those that have names, and a pod is named as -n NS {name}", error.msg);
                CommandError::Input(Error { msg, ..error })
            }
            NetnsSelector::Netns(_) if !path.exists() => CommandError::Input(error),
            _ => error.into(),
        })?;
        Ok(NetnsRules { rules, netns: path, evidence: None })
    }

    fn found(&self, found: FoundNetns) -> Result<NetnsRules, CommandError> {
        let rules = LiveRules::of(&found.open()?, &self.store())?;
        Ok(NetnsRules { rules, netns: found.netns, evidence: Some(found.evidence) })
    }

    fn store(&self) -> Store {
        Store::new(self.root.join(ROOT.trim_start_matches('/')))
    }

    fn of_subject(&self, subject: &Subject, question: &str) -> Result<FoundNetns, Error> {
        let (pod, name) = (&subject.facts.pod, subject.name());
        let wrong = |why: &str| Error::new(Code::InvalidNetns, format!("pod {name}: {why}"));
        if pod.host_network {
            return Err(wrong("it is on its node's own network (spec.hostNetwork), where no rules are made for it"));
        }
        let uid =
            pod.uid_on_node().ok_or_else(|| wrong("it has no UID (metadata.uid), by which its node would know it"))?;
        let there = || {
            let agents = subject.conf.kubernetes.agent_namespace.as_deref();
            elsewhere(pod, agents, None, &format!("{question} --pod-uid {uid}"))
        };
        let error = match of_pod(&self.root, uid) {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => unknown(&format!("pod {name} ({uid})")),
            Err(error) => error,
        };
        Err(Error { msg: format!("{}; {}", error.msg, there()), ..error })
    }

    /// A bare name is one that `ip netns` knows.
    fn netns(&self, path: &Path) -> PathBuf {
        if is_name(path) { self.root.join("run/netns").join(path) } else { path.to_owned() }
    }
}

fn is_name(path: &Path) -> bool {
    path.components().count() == 1 && path.is_relative()
}

fn unknown(what: &str) -> Error {
    let msg = format!("{what}: neither a result that its runtime kept nor a process of it is on this node");
    Error::new(Code::InvalidNetns, msg)
}
