//! Facts from the Kubernetes API.

mod probe;
mod requests;

use super::kubeconfig::{Kubeconfig, KubeconfigOwner};
use super::query::{Object, Query};
use super::retry::{AttemptError, RetriesExhausted, retry};
use super::{Cluster, DefinitionQuery, Event, Lookup, ObjectRef, about, another_uid, body, wire};
use crate::cni::{Code, Error, is_dns_subdomain};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions, Request};
use kube::client::Body;
pub use probe::ApiProbe;
use probe::Session;
use probe::all;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub(super) use requests::WRITE;

/// The API server that a kubeconfig or a service account names.
pub(super) struct Api {
    /// Or the directory of a service account.
    kubeconfig: PathBuf,
    /// Where the file system is mounted to which absolute paths in it belong.
    root: PathBuf,
    /// Who names the kubeconfig.
    access: KubeconfigOwner,
    /// A service account's server; a kubeconfig names its own.
    server: Option<String>,
    /// How long facts may take, all tries together.
    timeout: Duration,
    /// Whether facts are asked for again after a failure of the server.
    persists: bool,
    /// Opened by the first request; a handshake costs more than a request.
    session: OnceLock<Session>,
}

impl Cluster for Api {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.facts_since(Instant::now(), wanted, with_namespace)
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        self.namespace_since(Instant::now(), wanted)
    }

    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        self.look_up(Instant::now(), wanted)
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        self.list_namespaces(name).inspect_err(|error| tracing::debug!("{error}")).ok()
    }

    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        self.report_since(Instant::now(), pod, status, events)
    }

    fn probe(&self) -> Result<(), Error> {
        let nobody = PodRef { namespace: "default".to_owned(), name: "detour-status-probe".to_owned(), uid: None };
        let session = self.session()?;
        session.run(async {
            let query = self.query(session, Object::Pod(&nobody));
            let attempt = async || match get::<wire::PodObject>(session, &query).await {
                // That there is no such pod is an answer, and shows the right to ask.
                Ok(_) | Err(AttemptError::Missing(_)) => Ok(()),
                Err(failure) => Err(failure),
            };
            retry(Instant::now(), PROBE, attempt).await.map_err(|end| query.gave_up(end))
        })
    }
}

/// How long a probe may take; short enough for a runtime that asks every few seconds.
const PROBE: Duration = Duration::from_secs(1);

/// The same with the moment from which the wait counts: somebody else may have been asked before.
impl Api {
    pub(super) fn facts_since(&self, started: Instant, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        check_names("CNI_ARGS", [&wanted.namespace, &wanted.name])?;
        let session = self.session().map_err(|error| about(wanted, error))?;
        session.run(self.fetch(started, session, wanted, with_namespace))
    }

    pub(super) fn namespace_since(&self, started: Instant, wanted: &PodRef) -> Result<Namespace, Error> {
        check_names("CNI_ARGS", [&wanted.namespace])?;
        let session = self.session()?;
        session.run(self.namespace_of(started, session, Object::PodNamespace(wanted)))
    }

    pub(super) fn report_since(
        &self,
        started: Instant,
        pod: &Pod,
        status: Option<&str>,
        events: &[Event],
    ) -> Result<(), Error> {
        let status = status.map(|status| Object::NetworkStatus(pod, status));
        self.write(started, pod, status.into_iter().chain(events.iter().map(|event| Object::Event(pod, event))))
    }
}

impl Api {
    /// The server that the kubeconfig names; facts may take `timeout`, all tries together.
    pub(super) fn new(kubeconfig: PathBuf, timeout: Duration) -> Self {
        Self {
            kubeconfig,
            root: "/".into(),
            access: KubeconfigOwner::Node,
            server: None,
            timeout,
            persists: true,
            session: OnceLock::new(),
        }
    }

    /// This server, asked as the service account whose files are in `directory`.
    pub(super) fn as_account(server: String, directory: PathBuf, timeout: Duration) -> Self {
        Self { server: Some(server), ..Self::new(directory, timeout) }
    }

    /// The same without a second try where the server fails.
    pub(super) fn once(self) -> Self {
        Self { persists: false, ..self }
    }

    /// The same, where the absolute paths in the kubeconfig are those of the file system mounted at `root`.
    pub(super) fn within(self, root: &Path) -> Self {
        Self { root: root.to_owned(), ..self }
    }

    /// The same, with a kubeconfig that the user of the command line names.
    pub(super) fn of_user(self) -> Self {
        Self { access: KubeconfigOwner::User, ..self }
    }

    fn session(&self) -> Result<&Session, Error> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let session = Session::open(match &self.server {
            None => Kubeconfig::load(&self.root, &self.kubeconfig, self.access)?,
            Some(server) => Kubeconfig::of_service_account(server, &self.kubeconfig)?,
        })?;
        Ok(self.session.get_or_init(|| session))
    }

    fn query<'a>(&'a self, session: &'a Session, object: Object<'a>) -> Query<'a> {
        Query { object, server: &session.server, kubeconfig: &self.kubeconfig }
    }

    async fn fetch(
        &self,
        started: Instant,
        session: &Session,
        wanted: &PodRef,
        with_namespace: bool,
    ) -> Result<Facts, Error> {
        enum Fact {
            Pod(Box<Pod>),
            Namespace(Namespace),
        }
        let fact = async |object| match object {
            Object::PodNamespace(_) => self.namespace_of(started, session, object).await.map(Fact::Namespace),
            _ => self.pod(started, session, wanted).await.map(|pod| Fact::Pod(Box::new(pod))),
        };
        let mut facts = Facts::default();
        let namespace = with_namespace.then_some(Object::PodNamespace(wanted));
        for fact in all([Some(Object::Pod(wanted)), namespace].into_iter().flatten().map(fact)).await? {
            match fact {
                Fact::Pod(pod) => facts.pod = *pod,
                Fact::Namespace(namespace) => facts.namespace = Some(namespace),
            }
        }
        Ok(facts)
    }

    async fn pod(&self, started: Instant, session: &Session, wanted: &PodRef) -> Result<Pod, Error> {
        let query = self.query(session, Object::Pod(wanted));
        let attempt = async || {
            let pod = Pod::from(get::<wire::PodObject>(session, &query).await?);
            if pod.is(wanted) { Ok(pod) } else { Err(AttemptError::Missing(another_uid(&pod, wanted))) }
        };
        self.retry(started, &query, attempt).await.map_err(|end| query.gave_up(end))
    }

    async fn namespace_of(&self, started: Instant, session: &Session, object: Object<'_>) -> Result<Namespace, Error> {
        let query = self.query(session, object);
        let attempt = async || Ok(get::<wire::NamespaceObject>(session, &query).await?.into());
        self.retry(started, &query, attempt).await.map_err(|end| query.gave_up(end))
    }

    /// Tries to get facts.
    async fn retry<T>(
        &self,
        started: Instant,
        query: &Query<'_>,
        attempt: impl AsyncFn() -> Result<T, AttemptError>,
    ) -> Result<T, RetriesExhausted> {
        let attempt = async || match attempt().await {
            Err(AttemptError::Trouble { cause, .. }) if !self.persists => Err(query.not_again(&cause)),
            other => other,
        };
        retry(started, self.timeout, attempt).await
    }
}

/// One try to get what is asked for.
async fn get<T: DeserializeOwned>(session: &Session, query: &Query<'_>) -> Result<T, AttemptError> {
    let body = send(session, query).await?;
    serde_json::from_slice(&body).map_err(|e| query.garbled(&e))
}

/// One try: the body of a successful response.
async fn send(session: &Session, query: &Query<'_>) -> Result<Vec<u8>, AttemptError> {
    let collection = Request::new(query.object.collection());
    let request = match query.object {
        Object::Pod(PodRef { name, .. })
        | Object::Definition(ObjectRef { name, .. })
        | Object::DaemonSet(ObjectRef { name, .. }) => collection.get(name, &GetParams::default()),
        Object::PodNamespace(pod) => collection.get(&pod.namespace, &GetParams::default()),
        Object::DefinitionsNamed(name) => {
            collection.list(&ListParams::default().fields(&format!("metadata.name={name}")))
        }
        Object::NetworkStatus(pod, status) => {
            let patch = Patch::Merge(body::network_status(pod, status));
            collection.patch_subresource("status", &pod.name, &PatchParams::default(), &patch)
        }
        Object::Deletion(pod, resource_version) => {
            let preconditions =
                Preconditions { uid: pod.uid.clone(), resource_version: Some(resource_version.to_owned()) };
            collection.delete(&pod.name, &DeleteParams::default().preconditions(preconditions))
        }
        Object::Label(pod, resource_version, label) => {
            let patch = Patch::Merge(body::label(pod, resource_version, label));
            collection.patch_subresource("status", &pod.name, &PatchParams::default(), &patch)
        }
        Object::Node(name) => collection.get(name, &GetParams::default()),
        Object::Taints(node) => {
            collection.patch(&node.name, &PatchParams::default(), &Patch::Merge(body::taints(node)))
        }
        Object::Event(pod, event) => {
            collection.create(&PostParams::default(), body::event(pod, event).to_string().into())
        }
        Object::Token(account, lifetime) => {
            let body = body::token_request(lifetime).to_string().into();
            collection.create_subresource("token", &account.name, &PostParams::default(), body)
        }
        Object::Version => collection.list(&ListParams::default()),
        Object::Review(right) => collection.create(&PostParams::default(), body::review(right).to_string().into()),
        Object::EventsOf(PodRef { name, .. }) => {
            let fields = format!("involvedObject.kind=Pod,involvedObject.name={name}");
            collection.list(&ListParams::default().fields(&fields))
        }
        Object::PodsOn { node, .. } => collection.list(&ListParams::default().fields(&format!("spec.nodeName={node}"))),
    };
    let request = request.map_err(|e| AttemptError::Hopeless(Error::new(Code::Internal, e.to_string())))?;
    let response = session.client.send(request.map(Body::from)).await.map_err(|e| query.failed(&e))?;
    let status = response.status();
    let after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = response.into_body().collect_bytes().await.map_err(|e| query.failed(&e))?;
    if status.is_success() { Ok(body.into()) } else { Err(query.refused(status.as_u16(), after.as_deref(), &body)) }
}

/// Names become part of a URL, so they must be what an object's name can be. Where they come from
/// is for the message.
fn check_names<'a>(source: &str, names: impl IntoIterator<Item = &'a String>) -> Result<(), Error> {
    let Some(wrong) = names.into_iter().find(|name| !is_dns_subdomain(name)) else { return Ok(()) };
    let accepted = "accepted: lower-case letters, digits, '-' and '.', a letter or digit at both ends";
    Err(Error::new(Code::Environment, format!("{source}: {wrong:?} is no object's name; {accepted}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_an_object_can_have_become_part_of_a_url() {
        let check = |name: &str| check_names("CNI_ARGS", [&name.to_owned()]);
        for name in ["a", "web-0", "coredns-5d78c9869d-x2x7p", "static.node1.example.com"] {
            check(name).expect("a name");
        }
        for name in ["", ".", "..", "a/b", "a?watch=1", "a%2f", "A", "a b", "-a", "a.", "ä"] {
            let error = check(name).expect_err("no name");
            assert_eq!(error.code, Code::Environment);
            assert!(error.msg.starts_with("CNI_ARGS: "), "{error}");
        }
    }
}
