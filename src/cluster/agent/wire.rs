//! What plugin and agent say to each other: a connection for each question, on which the agent says
//! [`Hello`], the plugin a [`Question`] and the agent an [`Answer`], each a line of JSON.
//!
//! Both are replaced one after the other, so each must understand the versions before and after its
//! own: what is not known is passed over, what is missing has a default, a question of a kind that is
//! not known is answered as such. What no default can stand for is in [`FACTS`].

use crate::cluster::{DefinitionQuery, Event, Lookup};
use crate::cni::{Code, Error};
use crate::pod::{Namespace, Pod, PodRef};
use serde::{Deserialize, Serialize};

/// Counts what [`Pod`], [`Namespace`] and a definition say. A plugin that goes by a field which an
/// older agent does not tell asks the API instead.
pub const FACTS: u32 = 1;

/// No question is longer, in bytes.
pub const LONGEST_QUESTION: u64 = 256 << 10;
/// No answer is longer: some objects as large as the API takes them.
pub(super) const LONGEST_ANSWER: u64 = 16 << 20;

/// The agent's first line, which shows that it is not stuck.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// Its version, for people.
    pub version: String,
    /// Its [`FACTS`].
    pub facts: u32,
}

impl Hello {
    /// That of this program.
    #[must_use]
    pub fn own() -> Self {
        Self { version: env!("CARGO_PKG_VERSION").to_owned(), facts: FACTS }
    }
}

/// The plugin's line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AgentRequest {
    /// How long the answer is waited for, in milliseconds.
    pub wait_ms: u64,
    /// What is asked or told.
    pub ask: RequestKind,
}

/// What is asked or told; as the methods of [`crate::cluster::Cluster`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "about", rename_all = "snake_case")]
pub enum RequestKind {
    /// A pod, and its namespace.
    Facts {
        /// Which pod.
        #[serde(default)]
        pod: PodRef,
        /// Whether the namespace is asked for as well.
        #[serde(default)]
        with_namespace: bool,
    },
    /// A pod's namespace.
    Namespace {
        /// Which pod.
        #[serde(default)]
        pod: PodRef,
    },
    /// Definitions.
    Definitions {
        /// Which.
        #[serde(default)]
        wanted: Vec<DefinitionQuery>,
    },
    /// The namespaces that have a definition of this name.
    NamespacesWithDefinition {
        /// Its name.
        #[serde(default)]
        name: String,
    },
    /// The cluster is to be told of a pod.
    Report {
        /// Which pod: namespace, name and UID count.
        #[serde(default)]
        pod: PodRef,
        /// Its network status.
        #[serde(default)]
        status: Option<String>,
        /// Its events.
        #[serde(default)]
        events: Vec<Event>,
    },
    /// Whether facts could be had.
    Probe,
    /// A call of the plugin has ended. There is no answer.
    Called(CallReport),
    /// Something that only a later version asks.
    #[default]
    #[serde(other)]
    Unknown,
}

/// What a call of the plugin came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CallReport {
    /// `CNI_COMMAND`.
    pub command: String,
    /// `NAMESPACE/NAME`, where a pod is known.
    pub pod: String,
    /// `CNI_CONTAINERID`.
    pub container: String,
    /// The configuration's `name`.
    pub network: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// The error's number; `None` where it went well.
    pub code: Option<u32>,
    /// The error's text.
    pub error: String,
    /// Who gave facts: `agent`, `api`, `files`; empty where none were needed.
    pub facts: String,
    /// From the first byte of its configuration to its answer, in microseconds.
    pub wall_us: u64,
    /// Its processor time, that of executables included, in microseconds.
    pub cpu_us: u64,
    /// What it warned of.
    pub warnings: Vec<String>,
}

/// The agent's second line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum AgentAnswer {
    /// To [`Ask::Facts`].
    Facts {
        /// The pod.
        #[serde(default)]
        pod: Box<Pod>,
        /// Its namespace, where it was asked for.
        #[serde(default)]
        namespace: Option<Namespace>,
    },
    /// To [`Ask::Namespace`].
    Namespace {
        /// The namespace.
        #[serde(default)]
        namespace: Namespace,
    },
    /// To [`Ask::Definitions`].
    Definitions {
        /// In the order of the question.
        #[serde(default)]
        found: Vec<Lookup>,
    },
    /// To [`Ask::NamespacesWithDefinition`].
    Namespaces {
        /// Sorted.
        #[serde(default)]
        names: Vec<String>,
    },
    /// To [`Ask::Report`] and [`Ask::Probe`]: it is done.
    Done,
    /// It can't be answered.
    Failed {
        /// A [`Code`]'s number.
        #[serde(default)]
        code: u32,
        /// What failed, on what, and the next step.
        #[serde(default)]
        msg: String,
        /// More, where there is more.
        #[serde(default)]
        details: String,
    },
    /// Something that only a later version answers, or an answer to a question of that kind.
    #[default]
    #[serde(other)]
    Unknown,
}

impl From<Error> for AgentAnswer {
    fn from(error: Error) -> Self {
        Self::Failed { code: error.number(), msg: error.msg, details: error.details }
    }
}

/// Whether a failure is the cluster's own answer, which the API would give as well: there is no such pod.
pub(super) fn is_final(code: u32) -> bool {
    code == Code::PodUnknown.number()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Definition, ObjectRef};
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
    fn what_is_sent_arrives_unchanged() {
        let definition = Definition { config: "{\n}".into(), ..Definition::default() };
        for answer in [
            AgentAnswer::Facts { pod: pod().into(), namespace: Some(Namespace::default()) },
            AgentAnswer::Facts { pod: Box::default(), namespace: None },
            AgentAnswer::Definitions { found: vec![Lookup::Found(definition), Lookup::Missing("no".into())] },
            AgentAnswer::Namespaces { names: vec!["a".into()] },
            AgentAnswer::Done,
            AgentAnswer::from(Error::new(Code::PodUnknown, "no").with_details("why")),
        ] {
            let text = serde_json::to_string(&answer).expect("JSON");
            assert!(!text.contains('\n'), "{text}");
            assert_eq!(serde_json::from_str::<AgentAnswer>(&text).expect("readable"), answer);
        }
        let sought = DefinitionQuery { object: ObjectRef { namespace: "n".into(), name: "d".into() }, awaited: true };
        for ask in [
            RequestKind::Facts { pod: PodRef { uid: Some("u".into()), ..PodRef::default() }, with_namespace: true },
            RequestKind::Definitions { wanted: vec![sought] },
            RequestKind::Report { pod: PodRef::default(), status: Some("[]".into()), events: vec![Event::default()] },
            RequestKind::Called(CallReport { code: Some(7), ..CallReport::default() }),
            RequestKind::Probe,
        ] {
            let question = AgentRequest { wait_ms: 7, ask };
            assert_eq!(from_value::<AgentRequest>(to_value(&question).expect("JSON")).expect("readable"), question);
        }
    }

    /// The form that other versions speak; where this fails, a plugin and an agent that are being
    /// upgraded don't understand each other.
    #[test]
    fn the_form_is_fixed() {
        let question =
            AgentRequest { wait_ms: 1, ask: RequestKind::Facts { pod: PodRef::default(), with_namespace: true } };
        let pod = json!({"namespace": "", "name": "", "uid": null});
        let expected = json!({"wait_ms": 1, "ask": {"about": "facts", "pod": pod, "with_namespace": true}});
        assert_eq!(to_value(question).expect("JSON"), expected);
        let keys = |value: &Value| value.as_object().map(|o| o.keys().cloned().collect::<Vec<_>>()).unwrap_or_default();
        let sent = to_value(AgentAnswer::Facts { pod: self::pod().into(), namespace: None }).expect("JSON");
        assert_eq!(sent["answer"], "facts");
        let of_pod = [
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
        assert_eq!(keys(&sent["pod"]), of_pod, "raise FACTS where a field is added");
        let of_container = ["name", "args", "env", "run_as_user", "run_as_group", "restarts_always"];
        assert_eq!(keys(&sent["pod"]["containers"][0]), of_container, "raise FACTS where a field is added");
        assert_eq!(to_value(AgentAnswer::Done).expect("JSON"), json!({"answer": "done"}));
    }

    #[test]
    fn other_versions_are_understood() {
        let read = |value: Value| from_value::<AgentRequest>(value).expect("readable");
        assert_eq!(read(json!({"ask": {"about": "weather", "where": 1}})).ask, RequestKind::Unknown);
        assert_eq!(read(json!({})).ask, RequestKind::Unknown);
        let facts = RequestKind::Facts { pod: PodRef { name: "p".into(), ..PodRef::default() }, with_namespace: false };
        assert_eq!(
            read(json!({"new": 1, "ask": {"about": "facts", "pod": {"name": "p", "new": {}}, "new": []}})).ask,
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
