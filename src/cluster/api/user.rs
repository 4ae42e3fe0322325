//! The API server as a user of kubectl reaches it: the requests of the command line about agents, and those of `doctor`
//! and `audit` besides those for facts, with one attempt each.

use super::request::{ApiRequest, Page};
use super::server::Api;
use super::service_account::ServiceAccount;
use super::session::Session;
use crate::cluster::agent_pod::{AgentDaemonSet, AgentPod, NodeLabels};
use crate::cluster::fact_source::Cluster;
use crate::cluster::kubeconfig::UserKubeconfig;
use crate::cluster::resources::{ObjectRef, Permission, ReportedEvent, ScheduledPod, Workload};
use crate::cluster::wire::{NamespaceObject, PodObject};
use crate::cni::{Code, Error};
use crate::pod::{Namespace, PodRef};
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The API server with a user's credentials.
pub struct UserApi {
    pub(super) api: Api,
    namespace: String,
}

impl UserApi {
    /// The timeout of a request of `doctor` and `audit`.
    pub const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

    /// Opens the API server of a kubeconfig as kubectl does: `kubeconfig`, or the files in `KUBECONFIG` merged, or
    /// `~/.kube/config`, or the service account of the pod in which this process runs. The user's credential plugin
    /// runs, and proxy variables apply.
    ///
    /// # Errors
    /// No kubeconfig is found, it is invalid, or it has no context of that name.
    pub fn open(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Self, Error> {
        let (source, files) = kubeconfig_files(kubeconfig);
        let invalid = |why: String| {
            Error::new(Code::InvalidConfig, format!("kubeconfig {}: can't be used", source.display())).with_details(why)
        };
        let session = Session::open_as_user(UserKubeconfig::read(&files, context), invalid)?;
        let namespace = session.namespace().to_owned();
        Ok(Self::new(Api::with_session(source, session, TIMEOUT), namespace))
    }

    /// Returns the API server of a kubeconfig that may belong to any user, without running its credential plugins:
    /// for root on a node.
    #[must_use]
    pub fn of_file(kubeconfig: PathBuf, timeout: Duration) -> Self {
        Self::new(Api::new(kubeconfig, timeout).of_any_owner(), "default".to_owned())
    }

    /// Returns the API server of the plugin's kubeconfig on a node, whose file system is mounted at `root`.
    #[must_use]
    pub fn of_node(root: &Path, kubeconfig: PathBuf, timeout: Duration) -> Self {
        Self::new(Api::new(kubeconfig, timeout).with_root(root), "default".to_owned())
    }

    /// Returns the API as the service account of the pod in which this process runs; `None` outside of pods.
    #[must_use]
    pub fn in_cluster(timeout: Duration) -> Option<Self> {
        ServiceAccount::of_environment().map(|account| Self::new(account.api(timeout), "default".to_owned()))
    }

    /// Without retries: the user sees at once why a request fails, and can repeat the command.
    fn new(api: Api, namespace: String) -> Self {
        Self { api: api.without_retries(), namespace }
    }

    /// Returns the namespace of the context.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the server as a source of facts.
    #[must_use]
    pub fn cluster(&self) -> &dyn Cluster {
        &self.api
    }

    /// Returns the agents' pods in one or all namespaces, on one or all nodes, sorted by node, namespace and name.
    ///
    /// # Errors
    /// The request failed.
    pub fn agents(&self, namespace: Option<&str>, node: Option<&str>) -> Result<Vec<AgentPod>, Error> {
        let mut agents = self.list(|page| ApiRequest::agents(namespace, node, page), |pod| AgentPod::of(&pod))?;
        agents.sort_unstable_by(|a, b| (&a.node, &a.object).cmp(&(&b.node, &b.object)));
        Ok(agents)
    }

    /// Returns the agents' DaemonSets in one or all namespaces.
    ///
    /// # Errors
    /// The request failed.
    pub fn agent_daemon_sets(&self, namespace: Option<&str>) -> Result<Vec<AgentDaemonSet>, Error> {
        self.list(|page| ApiRequest::agent_daemon_sets(namespace, page), |object| AgentDaemonSet::of(&object))
    }

    /// Returns the nodes that a label selector selects, sorted by name.
    ///
    /// # Errors
    /// The request failed.
    pub fn nodes(&self, selector: Option<&str>) -> Result<Vec<NodeLabels>, Error> {
        let mut nodes = self.list(|page| ApiRequest::nodes(selector, page), |node| NodeLabels::of(&node))?;
        nodes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(nodes)
    }

    /// Returns the pods with a container `istio-proxy` on a node that have not ended, in one or all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_with_sidecar(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ObjectRef>, Error> {
        let with_sidecar = |scheduled: ScheduledPod| {
            let is_running = scheduled.pod.proxy().is_some() && !scheduled.has_ended();
            let ScheduledPod { pod, .. } = scheduled;
            is_running.then_some(ObjectRef { namespace: pod.namespace, name: pod.name })
        };
        Ok(self.pods_of_node(node, namespace)?.into_iter().filter_map(with_sidecar).collect())
    }

    pub(super) fn list<T>(
        &self,
        request: impl Fn(Page<'_>) -> Result<ApiRequest, Error>,
        read: impl Fn(Value) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        self.api.list(self.api.timeout, request, read)
    }

    pub(super) fn get(&self, request: &ApiRequest) -> Result<Value, Error> {
        let session = self.api.session()?;
        session.run(self.api.call(session, request).get_once(self.api.timeout))
    }
}

/// Returns the name of the kubeconfig in messages, and its files that exist.
fn kubeconfig_files(flag: Option<&Path>) -> (PathBuf, Vec<PathBuf>) {
    if let Some(path) = flag {
        return (path.to_owned(), vec![path.to_owned()]);
    }
    let variable = env::var_os("KUBECONFIG").filter(|value| !value.is_empty());
    let (name, files) = match variable {
        Some(value) => {
            let files = env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect();
            (PathBuf::from(value), files)
        }
        None => {
            let home = env::var_os("HOME").unwrap_or_default();
            (PathBuf::from("~/.kube/config"), vec![Path::new(&home).join(".kube/config")])
        }
    };
    // kubectl ignores missing files too.
    (name, files.into_iter().filter(|path| path.exists()).collect())
}

impl UserApi {
    /// Returns the server's version.
    ///
    /// # Errors
    /// The server is unreachable or rejects the credentials.
    pub fn version(&self) -> Result<String, Error> {
        let version = self.get(&ApiRequest::version()?)?;
        Ok(version["gitVersion"].as_str().unwrap_or("of an unknown version").to_owned())
    }

    /// Returns whether the client has a permission, with a `SelfSubjectAccessReview`: every authenticated client may
    /// create one (ClusterRole `system:basic-user`).
    ///
    /// # Errors
    /// The request failed.
    pub fn may(&self, permission: &Permission) -> Result<bool, Error> {
        let review = self.get(&ApiRequest::access_review(permission)?)?;
        Ok(review["status"]["allowed"] == true)
    }

    /// Returns the Events about the pods of that name, the latest last.
    ///
    /// # Errors
    /// The request failed.
    pub fn events(&self, pod: &PodRef) -> Result<Vec<ReportedEvent>, Error> {
        let mut events = self.list(|page| ApiRequest::events_of(pod, page), |event| Some(parse_event(&event)))?;
        events.sort_by_key(|event| event.last);
        Ok(events)
    }

    /// Returns the pods that are scheduled to a node, in `namespace` or in all namespaces.
    ///
    /// # Errors
    /// A request failed.
    pub fn pods_of_node(&self, node: &str, namespace: Option<&str>) -> Result<Vec<ScheduledPod>, Error> {
        self.list(|page| ApiRequest::pods_of_node(node, namespace, page), scheduled_pod)
    }

    /// Returns the namespaces: the one that is named, or all.
    ///
    /// # Errors
    /// A request failed.
    pub fn namespaces(&self, name: Option<&str>) -> Result<Vec<Namespace>, Error> {
        let Some(name) = name else { return self.list(ApiRequest::namespaces, parse_namespace) };
        let pod = PodRef { namespace: name.to_owned(), ..PodRef::default() };
        Ok(parse_namespace(self.get(&ApiRequest::namespace(&pod)?)?).into_iter().collect())
    }
}

/// Parses a pod of a list. An object that is not a pod is skipped.
fn scheduled_pod(object: Value) -> Option<ScheduledPod> {
    let object = PodObject::deserialize(object).ok()?;
    let metadata = &object.metadata;
    let template_hash = metadata.labels.get("pod-template-hash").map(String::as_str);
    let workload = metadata.controller().map(|owner| Workload::of(&owner.kind, &owner.name, template_hash));
    let (phase, is_ending) = (object.status.phase.clone(), metadata.is_deleting());
    Some(ScheduledPod { pod: object.into(), workload, phase, is_ending })
}

/// Parses a namespace. An object that is not a namespace is skipped.
fn parse_namespace(object: Value) -> Option<Namespace> {
    NamespaceObject::deserialize(object).ok().map(Namespace::from)
}

/// Parses an Event in either form: `core/v1`, or one that was created as `events.k8s.io/v1`.
fn parse_event(event: &Value) -> ReportedEvent {
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let time = ["lastTimestamp", "eventTime", "firstTimestamp"].iter().find_map(|key| text(&event[key]));
    let count = [&event["count"], &event["series"]["count"]].into_iter().find_map(Value::as_u64);
    ReportedEvent {
        warning: event["type"] == "Warning",
        reason: text(&event["reason"]).unwrap_or_default(),
        message: text(&event["message"]).unwrap_or_default(),
        by: text(&event["source"]["component"]).or_else(|| text(&event["reportingComponent"])).unwrap_or_default(),
        last: time.and_then(|time| time.parse::<Timestamp>().ok()).map_or(0, Timestamp::as_second),
        count: count.unwrap_or(1),
    }
}
