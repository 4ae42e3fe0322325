//! The API server as a source of facts.

use super::request::ApiRequest;
use super::retry::{AttemptError, Deadline, RetriesExhausted};
use super::server::Api;
use super::session::Session;
use super::writes::WRITE_TIMEOUT;
use crate::cluster::fact_source::{Cluster, Definitions, Reports, uid_mismatch, with_pod};
use crate::cluster::resources::{DefinitionQuery, Event, Lookup};
use crate::cluster::wire;
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use futures_util::future::try_join_all;
use serde_json::Value;
use std::time::Duration;

/// The timeout of a probe: short enough for a runtime that sends STATUS every few seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout of a list that only improves an error message.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);

impl Cluster for Api {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        self.facts_by(Deadline::after(self.timeout), wanted, with_namespace)
    }

    fn namespace(&self, wanted: &PodRef) -> Result<Namespace, Error> {
        self.namespace_by(Deadline::after(self.timeout), wanted)
    }

    fn probe(&self) -> Result<(), Error> {
        let absent = PodRef { namespace: "default".to_owned(), name: "detour-status-probe".to_owned(), uid: None };
        let request = ApiRequest::pod(&absent)?;
        let session = self.session()?;
        let call = self.call(session, &request);
        let attempt = async || match call.get::<wire::PodObject>().await {
            // "Not found" shows that the server answers and grants the permission to get pods.
            Ok(_) | Err(AttemptError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        };
        session.run(call.run(Deadline::after(PROBE_TIMEOUT), attempt))
    }
}

impl Definitions for Api {
    fn definitions(&self, wanted: &[DefinitionQuery]) -> Result<Vec<Lookup>, Error> {
        self.definitions_by(Deadline::after(self.timeout), wanted)
    }

    fn namespaces_with_definition(&self, name: &str) -> Option<Vec<String>> {
        self.list_namespaces(name).inspect_err(|error| tracing::debug!("{error}")).ok()
    }
}

impl Reports for Api {
    fn report(&self, pod: &Pod, status: Option<&str>, events: &[Event]) -> Result<(), Error> {
        self.report_by(Deadline::after(WRITE_TIMEOUT.min(self.timeout)), pod, status, events)
    }
}

/// The methods of [`Cluster`] with the deadline of a lookup that may have asked another source before.
impl Api {
    pub(in crate::cluster) fn facts_by(
        &self,
        deadline: Deadline,
        wanted: &PodRef,
        with_namespace: bool,
    ) -> Result<Facts, Error> {
        let pod = ApiRequest::pod(wanted)?;
        let namespace = with_namespace.then(|| ApiRequest::namespace(wanted)).transpose()?;
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        let get_namespace = async || match &namespace {
            Some(request) => self.get_namespace(deadline, session, request, wanted).await.map(Some),
            None => Ok(None),
        };
        session
            .run(async {
                let namespace = async {
                    match get_namespace().await {
                        // The pod is probably missing too, which is the better error.
                        Err(error) if error.code == Code::PodUnknown => Ok(Err(error)),
                        other => other.map(Ok),
                    }
                };
                let (pod, namespace) = tokio::try_join!(self.get_pod(deadline, session, &pod, wanted), namespace)?;
                Ok(Facts { pod, namespace: namespace? })
            })
            .map_err(Error::naming_pod)
    }

    pub(in crate::cluster) fn namespace_by(&self, deadline: Deadline, wanted: &PodRef) -> Result<Namespace, Error> {
        let request = ApiRequest::namespace(wanted)?;
        let session = self.session().map_err(|error| with_pod(wanted, error))?;
        session.run(self.get_namespace(deadline, session, &request, wanted)).map_err(Error::naming_pod)
    }

    pub(in crate::cluster) fn definitions_by(
        &self,
        deadline: Deadline,
        wanted: &[DefinitionQuery],
    ) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let requests = wanted.iter().map(|query| Ok((ApiRequest::definition(&query.object)?, query)));
        let requests: Vec<_> = requests.collect::<Result<_, Error>>()?;
        let session = self.session()?;
        let lookups = requests.iter().map(|(request, query)| self.look_up(deadline, session, request, query));
        session.run(try_join_all(lookups))
    }

    async fn get_pod(
        &self,
        deadline: Deadline,
        session: &Session,
        request: &ApiRequest,
        wanted: &PodRef,
    ) -> Result<Pod, Error> {
        let call = self.facts_call(session, request);
        let attempt = async || {
            let object: wire::PodObject = call.get().await?;
            let is_requested = object.metadata.is_of(Some(&wanted.namespace), &wanted.name);
            is_requested.map_err(|why| call.unexpected(&why))?;
            let pod = Pod::from(object);
            if pod.matches(wanted) { Ok(pod) } else { Err(AttemptError::NotFound(uid_mismatch(&pod, wanted))) }
        };
        call.run(deadline, attempt).await
    }

    async fn get_namespace(
        &self,
        deadline: Deadline,
        session: &Session,
        request: &ApiRequest,
        wanted: &PodRef,
    ) -> Result<Namespace, Error> {
        let call = self.facts_call(session, request);
        let attempt = async || {
            let object: wire::NamespaceObject = call.get().await?;
            object.metadata.is_of(None, &wanted.namespace).map_err(|why| call.unexpected(&why))?;
            Ok(object.into())
        };
        call.run(deadline, attempt).await
    }

    async fn look_up(
        &self,
        deadline: Deadline,
        session: &Session,
        request: &ApiRequest,
        DefinitionQuery { object, awaited }: &DefinitionQuery,
    ) -> Result<Lookup, Error> {
        let call = self.facts_call(session, request);
        let attempt = async || match call.get::<wire::DefinitionObject>().await {
            Ok(definition) => match definition.metadata.is_of(Some(&object.namespace), &object.name) {
                Ok(()) => Ok(Lookup::Found(definition.into())),
                Err(why) => Err(call.unexpected(&why)),
            },
            Err(AttemptError::NotFound(cause)) if !awaited => Ok(Lookup::Missing(format!("{call}: {cause}"))),
            Err(error) => Err(error),
        };
        match call.retry(deadline, attempt).await {
            Ok(lookup) => Ok(lookup),
            Err(exhausted @ RetriesExhausted { last: AttemptError::NotFound(_), .. }) => {
                Ok(Lookup::Missing(call.not_found(exhausted)))
            }
            Err(exhausted) => Err(call.exhausted(exhausted)),
        }
    }

    /// Lists the namespaces that have a definition called `name`, sorted, with one attempt.
    fn list_namespaces(&self, name: &str) -> Result<Vec<String>, Error> {
        let namespace = |object: Value| {
            let metadata = &object["metadata"];
            (metadata["name"] == name).then(|| metadata["namespace"].as_str().map(str::to_owned)).flatten()
        };
        let timeout = LIST_TIMEOUT.min(self.timeout);
        let mut namespaces = self.list(timeout, |page| ApiRequest::definitions_named(name, page), namespace)?;
        namespaces.sort();
        Ok(namespaces)
    }
}
