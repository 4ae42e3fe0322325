//! An API server with the credentials of a kubeconfig or a service account, as a source of facts.

use super::failure::Failure;
use super::request::{ApiRequest, Kind, check_names};
use super::retry::Deadline;
use super::session::{Collection, Session};
use crate::cluster::fact_source::{Cluster, Definitions, Reports, uid_mismatch, with_pod};
use crate::cluster::kubeconfig::Kubeconfig;
use crate::cluster::resources::{DefinitionQuery, Event, Lookup};
use crate::cluster::wire::{DefinitionObject, NamespaceObject, PodObject};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use futures_util::future::{join_all, try_join_all};
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;

/// The timeout of a write, including retries: the pod's start waits for it.
pub(in crate::cluster) const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout of a probe: short enough for a runtime that sends STATUS every few seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout of a page of a list that only improves an error message.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);
/// The limit for the pages of a list, so that a server can't keep a command busy forever.
const MAX_PAGES: usize = 1000;

/// An API server. The files with the credentials are read by the first request.
#[derive(Clone)]
pub(in crate::cluster) struct Api {
    /// The kubeconfig, or the directory of a service account.
    pub(super) kubeconfig: PathBuf,
    /// The mount point of the file system that absolute paths in the kubeconfig refer to.
    pub(super) root: PathBuf,
    /// The server for a service account; a kubeconfig contains its server.
    pub(super) server: Option<String>,
    /// The timeout for facts, including retries.
    pub(super) timeout: Duration,
    /// The deadline of a lookup that has asked another source before; `None` for one that starts with the request.
    pub(super) deadline: Option<Deadline>,
    /// Whether requests for facts are retried after transient errors.
    pub(super) retries: bool,
    /// Opened by the first request, because a TLS handshake costs more than a request.
    pub(super) session: Arc<OnceLock<Session>>,
    /// The event loop of a session that lives as long as this process; `None` for one of its own.
    pub(super) runtime: Option<Handle>,
}

impl Cluster for Api {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        let deadline = self.deadline();
        let namespace = async {
            if !with_namespace {
                return Ok(Ok(None));
            }
            match self.get_namespace(session, deadline, wanted).await {
                // The pod is probably missing too, which is the better error.
                Err(error) if error.code == Code::PodUnknown => Ok(Err(error)),
                other => other.map(|namespace| Ok(Some(namespace))),
            }
        };
        session.run(async {
            let (pod, namespace) = tokio::try_join!(self.get_pod(session, deadline, wanted), namespace)?;
            Ok(Facts { pod, namespace: namespace? })
        })
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        session.run(self.get_namespace(session, self.deadline(), wanted))
    }

    fn probe(&self) -> Result<(), Error> {
        let request = ApiRequest::get(Kind::POD, Some("default"), "detour-status-probe")?;
        let session = self.session()?;
        let deadline = Deadline::after(PROBE_TIMEOUT).awaiting(false);
        match session.run(session.send(&request, deadline, |_: PodObject| Ok(()))) {
            // "Not found" shows that the server answers and grants the permission to get pods.
            Err(error) if error.code == Code::PodUnknown => Ok(()),
            result => result,
        }
    }
}

impl Definitions for Api {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let (session, deadline) = (self.session()?, self.deadline());
        let look_up = async |DefinitionQuery { object, awaited }: &DefinitionQuery| {
            let request = ApiRequest::get(Kind::DEFINITION, Some(&object.namespace), &object.name)?;
            let accept = |found: DefinitionObject| {
                found.metadata.is_of(Some(&object.namespace), &object.name).map_err(Failure::unexpected)?;
                Ok(Lookup::Found(found.into()))
            };
            match session.send(&request, deadline.awaiting(*awaited), accept).await {
                Err(error) if error.code == Code::PodUnknown => Ok(Lookup::Missing(error.to_string())),
                result => result,
            }
        };
        session.run(try_join_all(wanted.iter().map(look_up)))
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        let list = || -> Result<Vec<String>, Error> {
            check_names("NetworkAttachmentDefinition", [name])?;
            let (subject, fields) =
                (format!("NetworkAttachmentDefinitions named {name}"), format!("metadata.name={name}"));
            let found: Vec<DefinitionObject> =
                self.list(Kind::DEFINITION, None, (subject, Some(fields)), LIST_TIMEOUT.min(self.timeout))?;
            let named = found.into_iter().map(|found| found.metadata).filter(|metadata| metadata.name == name);
            Ok(named.filter_map(|metadata| metadata.namespace).collect::<BTreeSet<_>>().into_iter().collect())
        };
        list().inspect_err(|error| tracing::debug!("{error}")).ok()
    }
}

impl Reports for Api {
    /// Sets the network status and records the Events concurrently.
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        let status = status.map(|status| ApiRequest::network_status(pod, status));
        let requests = status.into_iter().chain(events.iter().map(|event| ApiRequest::event(pod, event)));
        let deadline = self.deadline.unwrap_or_else(|| Deadline::after(WRITE_TIMEOUT.min(self.timeout)));
        self.write(deadline, &requests.collect::<Result<Vec<_>, _>>()?)
    }
}

impl Api {
    /// Returns the server of a kubeconfig; `timeout` limits each lookup of facts, including retries.
    pub(in crate::cluster) fn new(kubeconfig: PathBuf, timeout: Duration) -> Self {
        let (root, session) = ("/".into(), Arc::default());
        Self { kubeconfig, root, server: None, timeout, deadline: None, retries: true, session, runtime: None }
    }

    /// Returns the session, which the first call opens.
    pub(super) fn session(&self) -> Result<&Session, Error> {
        if let Some(session) = self.session.get() {
            return Ok(session);
        }
        let kubeconfig = match &self.server {
            None => Kubeconfig::load(&self.root, &self.kubeconfig)?,
            Some(server) => Kubeconfig::of_service_account(server, &self.kubeconfig, self.runtime.is_some())?,
        };
        let session = Session::open(kubeconfig, self.kubeconfig.clone(), self.runtime.clone())?;
        Ok(self.session.get_or_init(|| session))
    }

    /// Returns the server for a lookup that has asked another source before.
    pub(in crate::cluster) fn by(&self, deadline: Deadline) -> Self {
        Self { deadline: Some(deadline), ..self.clone() }
    }

    /// Returns the deadline of a lookup that starts now.
    fn deadline(&self) -> Deadline {
        self.deadline.unwrap_or_else(|| Deadline::after(self.timeout)).with_retries(self.retries)
    }

    /// Sends all requests concurrently and waits for all of them. "Not found" is not retried: the object existed.
    pub(super) fn write(&self, deadline: Deadline, requests: &[ApiRequest]) -> Result<(), Error> {
        let session = self.session()?;
        let send = |request| session.send(request, deadline.awaiting(false), |_: IgnoredAny| Ok(()));
        Error::all(session.run(join_all(requests.iter().map(send))))
    }

    async fn get_pod(&self, session: &Session, deadline: Deadline, wanted: &PodRef) -> Result<Pod, Error> {
        let accept = |found: PodObject| {
            found.metadata.is_of(Some(&wanted.namespace), &wanted.name).map_err(Failure::unexpected)?;
            let pod = Pod::from(found);
            if pod.matches(wanted) { Ok(pod) } else { Err(Failure::not_found(uid_mismatch(&pod, wanted))) }
        };
        let request = ApiRequest::get(Kind::POD, Some(&wanted.namespace), &wanted.name)?;
        session.send(&request, deadline, accept).await.map_err(Error::naming_pod)
    }

    async fn get_namespace(&self, session: &Session, deadline: Deadline, wanted: &PodRef) -> Result<Namespace, Error> {
        let accept = |found: NamespaceObject| {
            found.metadata.is_of(None, &wanted.namespace).map_err(Failure::unexpected)?;
            Ok(found.into())
        };
        let request = ApiRequest::get(Kind::NAMESPACE, None, &wanted.namespace)?;
        session.send(&request, deadline, accept).await.map_err(|error| with_pod(wanted, error))
    }

    /// Returns the objects of a list, with one attempt per page. `subject` describes them in messages.
    ///
    /// # Errors
    /// A request failed, an object is too large, or the list has more pages than the limit.
    pub(super) fn list<T: DeserializeOwned>(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        (subject, fields): (String, Option<String>),
        timeout: Duration,
    ) -> Result<Vec<T>, Error> {
        let (session, mut objects) = (self.session()?, Vec::new());
        let request = ApiRequest::list(kind, namespace, subject)?;
        let collection = Collection { kind, namespace: namespace.map(str::to_owned), fields, metadata_only: false };
        match session.run(session.list(&collection, false, (MAX_PAGES, timeout), |object| objects.push(object))) {
            Ok(Some(_)) => Ok(objects),
            Ok(None) => {
                let next = "select one namespace or node";
                let msg = format!("{}: expected at most {MAX_PAGES} pages, got more; {next}", request.subject);
                Err(Error::new(Code::TryAgain, msg))
            }
            Err(last) => Err(session.error(&request, last.into())),
        }
    }
}
