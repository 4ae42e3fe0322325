//! The protocol between plugin and agent: one connection per request. The agent sends [`Hello`], the plugin an
//! [`AgentRequest`], the agent an [`AgentAnswer`]; each is a line of JSON.
//!
//! An upgrade replaces plugin and agent one after the other, so each must understand earlier and later versions of the
//! other: unknown fields are ignored, later ones have defaults, and a request of an unknown kind gets the answer
//! [`AgentAnswer::Unknown`]. For facts without a sensible default there is the number [`FACTS`].

use crate::cluster::resources::{DefinitionQuery, Event, Lookup};
use crate::cni::Error;
use crate::pod::{Namespace, Pod, PodRef};
use crate::policy::ContainerScope;
use serde::{Deserialize, Serialize};

/// The version of the fields of [`Pod`], [`Namespace`] and definitions. A plugin that needs a field which an older
/// agent does not send asks the API instead.
pub const FACTS: u32 = 3;

/// The maximum length of a request in bytes.
pub const MAX_REQUEST: u64 = 256 << 10;
/// The maximum length of an answer in bytes: several objects of the maximum size.
pub(super) const MAX_ANSWER: u64 = 16 << 20;

/// The agent's first line, which shows that it is not stuck.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// The agent's version, for messages.
    pub version: String,
    /// The agent's [`FACTS`].
    pub facts: u32,
}

impl Hello {
    /// Returns the greeting of this program.
    #[must_use]
    pub fn own() -> Self {
        Self { version: env!("CARGO_PKG_VERSION").to_owned(), facts: FACTS }
    }
}

/// The plugin's line: a request with its timeout.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentRequest {
    /// The timeout for the answer, in milliseconds.
    pub wait_ms: u64,
    /// Whether the agent answers only with what it has in memory, without a request to the API server.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub from_memory: bool,
    /// The request.
    pub ask: RequestKind,
}

/// A request to the agent; most are methods of [`crate::cluster::Cluster`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "about", rename_all = "snake_case")]
pub enum RequestKind {
    /// [`crate::cluster::Cluster::facts`].
    Facts {
        /// The pod.
        pod: PodRef,
        /// Whether to return the namespace too.
        with_namespace: bool,
    },
    /// [`crate::cluster::Cluster::namespace`].
    Namespace {
        /// The pod.
        pod: PodRef,
    },
    /// [`crate::cluster::Cluster::definitions`].
    Definitions {
        /// The definitions to look up.
        wanted: Vec<DefinitionQuery>,
    },
    /// [`crate::cluster::Cluster::report`].
    Report {
        /// The pod: namespace, name and UID.
        pod: PodRef,
        /// The network status to set.
        status: Option<String>,
        /// The Events to record.
        events: Vec<Event>,
    },
    /// [`crate::cluster::Cluster::probe`].
    Probe,
    /// [`super::excluded_containers`].
    Containers {
        /// The ID of the pod sandbox (`CNI_CONTAINERID`).
        container: String,
    },
    /// [`super::pod_policies`].
    Policies,
    /// [`super::broken_watches`].
    Watches,
    /// A report that a call of the plugin has ended; without an answer.
    Called(CallReport),
    /// A request of a later version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// The outcome of a call of the plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CallReport {
    /// `CNI_COMMAND`.
    pub command: String,
    /// `NAMESPACE/NAME`; empty if the pod is unknown.
    pub pod: String,
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// The configuration's `name`.
    pub network: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// The error code; `None` for success.
    pub code: Option<u32>,
    /// The error message.
    pub error: String,
    /// The source of the facts: `agent`, `api`, `files`; empty if the call needed none.
    pub facts: String,
    /// The time from the first byte of the configuration to the result, in microseconds.
    pub wall_us: u64,
    /// The processor time, including that of executables, in microseconds.
    pub cpu_us: u64,
    /// The warnings that the call logged.
    pub warnings: Vec<String>,
}

/// The excluded containers of a pod sandbox as the agent knows them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainersStatus {
    /// Name and version of the runtime at which the agent is registered as an NRI plugin; `None` if it is not.
    pub runtime: Option<String>,
    /// Why the agent is not registered, or could not exclude a container of this sandbox; may be empty.
    pub error: String,
    /// The elements that the sets must have now; `None` if the agent does not know them.
    pub expected: Option<Vec<BypassingContainer>>,
}

/// A running container whose traffic bypasses the sidecar.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BypassingContainer {
    /// Its name in the pod.
    pub name: String,
    /// Its ID.
    pub id: String,
    /// The ID of its control group.
    pub cgroup: u64,
    /// The traffic that bypasses the sidecar.
    pub scope: ContainerScope,
}

/// How many pods of the node have the rules of their policies, and what is wrong with the others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoliciesReport {
    /// Whether running pods follow changes of their policies; `None` if the agent does not read them.
    pub follows: Option<bool>,
    /// The pods by their state.
    #[serde(flatten)]
    pub counts: PolicyCounts,
    /// The pods that are not current, at most [`MAX_FINDINGS`].
    pub findings: Vec<PodFinding>,
}

/// How many pods are in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyCounts {
    /// The pods whose rules are those of their policies.
    pub current: u32,
    /// The pods with requests that are invalid or outside the bounds, which are without effect.
    pub rejected: u32,
    /// The pods whose rules could not be checked or changed.
    pub failed: u32,
    /// The pods with a sidecar that the node's configuration would redirect, and without rules.
    pub none: u32,
    /// The pods that are enrolled in the ambient mesh, and whose traffic does not reach ztunnel.
    pub outside: u32,
}

/// What is wrong with the rules of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodFinding {
    /// The pod.
    pub pod: PodRef,
    /// `rejected`, `failed`, `none` or `outside`.
    pub state: String,
    /// Why.
    pub reason: String,
}

/// The limit of [`PoliciesReport::findings`].
pub const MAX_FINDINGS: usize = 100;

/// The agent's second line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum AgentAnswer {
    /// To [`RequestKind::Facts`].
    Facts {
        /// The pod.
        pod: Box<Pod>,
        /// Its namespace, if requested.
        namespace: Option<Namespace>,
    },
    /// To [`RequestKind::Namespace`].
    Namespace {
        /// The namespace.
        namespace: Namespace,
    },
    /// To [`RequestKind::Definitions`].
    Definitions {
        /// The results in the order of the request.
        found: Vec<Lookup>,
    },
    /// To [`RequestKind::Containers`].
    Containers(ContainersStatus),
    /// To [`RequestKind::Policies`].
    Policies(PoliciesReport),
    /// To [`RequestKind::Watches`].
    Watches {
        /// The watches that have not been synchronized for a while, each with its cause; none if all are.
        broken: Vec<String>,
    },
    /// To [`RequestKind::Report`] and [`RequestKind::Probe`]: success.
    Done,
    /// The request failed.
    Failed {
        /// The number of a [`Code`](crate::cni::Code).
        code: u32,
        /// The error message.
        msg: String,
        /// The error's details; may be empty.
        #[serde(default)]
        details: String,
    },
    /// An answer of a later version, or the answer to a request of an unknown kind.
    #[default]
    #[serde(other)]
    Unknown,
}

impl From<Error> for AgentAnswer {
    fn from(error: Error) -> Self {
        let code = error.number();
        let Error { msg, details, .. } = error;
        Self::Failed { code, msg, details }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::resources::{Definition, ObjectRef};
    use crate::cni::Code;
    use crate::pod::Container;
    use serde_json::{Value, from_value, json, to_value};

    fn pod() -> Pod {
        let env = vec![("B".into(), "2".into()), ("A".into(), "1".into()), ("B".into(), "3".into())];
        Pod {
            namespace: "shop".into(),
            name: "web-0".into(),
            uid: Some("u".into()),
            run_as_user: Some(0),
            containers: vec![Container { name: "c".into(), env, restarts_always: true, ..Container::default() }],
            ..Pod::default()
        }
    }

    #[test]
    fn messages_survive_serialization() {
        let definition = Definition { config: "{\n}".into(), ..Definition::default() };
        let (name, id) = ("vault".to_owned(), "7c".to_owned());
        let finding = PodFinding { state: "rejected".into(), ..PodFinding::default() };
        let bypassing = BypassingContainer { name, id, cgroup: u64::MAX, scope: ContainerScope::Dns };
        for answer in [
            AgentAnswer::Facts { pod: pod().into(), namespace: Some(Namespace::default()) },
            AgentAnswer::Facts { pod: Box::default(), namespace: None },
            AgentAnswer::Definitions { found: vec![Lookup::Found(definition), Lookup::Missing("no".into())] },
            AgentAnswer::Containers(ContainersStatus {
                expected: Some(vec![bypassing]),
                ..ContainersStatus::default()
            }),
            AgentAnswer::Containers(ContainersStatus { runtime: Some("r 1".into()), ..ContainersStatus::default() }),
            AgentAnswer::Policies(PoliciesReport {
                follows: Some(true),
                counts: PolicyCounts { rejected: 1, ..PolicyCounts::default() },
                findings: vec![finding],
            }),
            AgentAnswer::Done,
            AgentAnswer::from(Error::new(Code::PodUnknown, "no").with_details("why")),
        ] {
            let text = serde_json::to_string(&answer).expect("JSON");
            assert!(!text.contains('\n'), "{text}");
            assert_eq!(serde_json::from_str::<AgentAnswer>(&text).expect("readable"), answer);
        }
        let query = DefinitionQuery { object: ObjectRef { namespace: "n".into(), name: "d".into() }, awaited: true };
        for ask in [
            RequestKind::Facts { pod: PodRef { uid: Some("u".into()), ..PodRef::default() }, with_namespace: true },
            RequestKind::Definitions { wanted: vec![query] },
            RequestKind::Report { pod: PodRef::default(), status: Some("[]".into()), events: vec![Event::default()] },
            RequestKind::Called(CallReport { code: Some(7), ..CallReport::default() }),
            RequestKind::Containers { container: "c".into() },
            RequestKind::Policies,
            RequestKind::Probe,
        ] {
            let request = AgentRequest { wait_ms: 7, from_memory: true, ask };
            assert_eq!(from_value::<AgentRequest>(to_value(&request).expect("JSON")).expect("readable"), request);
        }
    }

    /// Other versions depend on this format: if the test fails, plugin and agent of different versions do not
    /// understand each other.
    #[test]
    fn the_format_is_stable() {
        let ask = RequestKind::Facts { pod: PodRef::default(), with_namespace: true };
        let request = AgentRequest { wait_ms: 1, from_memory: false, ask };
        let pod = json!({"namespace": "", "name": "", "uid": null});
        let expected = json!({"wait_ms": 1, "ask": {"about": "facts", "pod": pod, "with_namespace": true}});
        assert_eq!(to_value(request).expect("JSON"), expected);
        let keys = |value: &Value| value.as_object().map(|o| o.keys().cloned().collect::<Vec<_>>()).unwrap_or_default();
        let sent = to_value(AgentAnswer::Facts { pod: self::pod().into(), namespace: None }).expect("JSON");
        assert_eq!(sent["answer"], "facts");
        let pod_keys = [
            "namespace",
            "name",
            "uid",
            "labels",
            "annotations",
            "node_name",
            "host_network",
            "run_as_user",
            "run_as_group",
            "dns_nameservers",
            "init_containers",
            "containers",
        ];
        assert_eq!(keys(&sent["pod"]), pod_keys, "increase FACTS when a field is added");
        let container_keys = ["name", "args", "env", "run_as_user", "run_as_group", "restarts_always"];
        assert_eq!(keys(&sent["pod"]["containers"][0]), container_keys, "increase FACTS when a field is added");
        assert_eq!(to_value(AgentAnswer::Done).expect("JSON"), json!({"answer": "done"}));
    }

    #[test]
    fn messages_of_other_versions_are_understood() {
        let read = |value: Value| from_value::<AgentRequest>(value).expect("readable");
        assert_eq!(read(json!({"ask": {"about": "weather", "where": 1}})).ask, RequestKind::Unknown);
        assert_eq!(read(json!({})).ask, RequestKind::Unknown);
        let facts = RequestKind::Facts { pod: PodRef { name: "p".into(), ..PodRef::default() }, with_namespace: false };
        assert_eq!(
            read(json!({"new": 1, "ask": {"about": "facts", "pod": {"name": "p", "new": {}}, "with_namespace": false, "new": []}})).ask,
            facts
        );
        let answer = |value: Value| from_value::<AgentAnswer>(value).expect("readable");
        assert_eq!(answer(json!({"answer": "later", "x": 1})), AgentAnswer::Unknown);
        let facts = answer(json!({"answer": "facts", "pod": {"name": "p", "later": 1}, "later": 2}));
        assert_eq!(
            facts,
            AgentAnswer::Facts { pod: Pod { name: "p".into(), ..Pod::default() }.into(), namespace: None }
        );
        assert_eq!(from_value::<Hello>(json!({"later": 1})).expect("readable"), Hello::default());
    }
}
