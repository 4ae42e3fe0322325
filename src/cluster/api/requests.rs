//! What the node's agent asks for itself: a token for the plugin, and its own DaemonSet.
//!
//! What the agent does to a pod or its node.
//!
//! NetworkAttachmentDefinitions from the API.
//!
//! What the cluster is told.

use super::{Api, Request, Session, all, check_names, get, send};
use crate::cluster::query::{Object, Query};
use crate::cluster::retry::{AttemptError, RetriesExhausted, retry};
use crate::cluster::{DefinitionQuery, Lookup, NodeTaints, ObjectRef, Token, wire};
use crate::cni::{Code, Error};
use crate::pod::Pod;
use futures_util::TryStreamExt;
use kube::api::{WatchEvent, WatchParams};
use std::iter;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// How long a watch lasts, so that the credentials in use are never much older than their file's.
const WATCH_SECONDS: u32 = 240;
/// A server that has not ended a watch so long after its time is gone.
const SLACK: Duration = Duration::from_secs(10);
/// Whatever the API server has, and all changes from there on (kubernetes.io, "API Concepts", "Get State and
/// Start at Any"). The server must not wait for anything: a watch without a version waits for etcd's latest,
/// and both forms, if bookmarks are asked for, are refused with 500 where etcd reports no progress on request
/// (kube-apiserver 1.35 with etcd 3.4.23).
const ANY: &str = "0";
/// How long a watch may take to begin with the object, before a request tells whether there is one.
const BEGINNING: Duration = Duration::from_secs(3);

impl Api {
    /// A new token of a service account.
    pub(in crate::cluster) fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        check_names("ServiceAccount", [&of.namespace, &of.name])?;
        let session = self.session()?;
        let query = self.query(session, Object::Token(of, lifetime));
        session.run(async {
            let attempt = async || get::<wire::TokenGranted>(session, &query).await;
            let granted = retry(Instant::now(), self.timeout, attempt).await.map_err(|end| query.gave_up(end))?;
            Ok(granted.into())
        })
    }

    /// Whether it is there to stay.
    pub(in crate::cluster) fn has(&self, daemon_set: &ObjectRef) -> Result<bool, Error> {
        check_names("DaemonSet", [&daemon_set.namespace, &daemon_set.name])?;
        let session = self.session()?;
        let query = self.query(session, Object::DaemonSet(daemon_set));
        session.run(self.is_staying(session, &query))
    }

    /// Follows whether it is.
    ///
    /// The watch begins at [`ANY`] version: the object's own may be older than the API server's watch
    /// cache, which begins anew with each start of the server. Such a watch begins with the object, so no
    /// change is missed. Where it does not, a request tells whether there is one.
    pub(in crate::cluster) fn watch(&self, daemon_set: &ObjectRef, mut tell: impl FnMut(bool)) -> Result<(), Error> {
        check_names("DaemonSet", [&daemon_set.namespace, &daemon_set.name])?;
        let session = self.session()?;
        let query = self.query(session, Object::DaemonSet(daemon_set));
        session.run(async {
            let params =
                WatchParams::default().disable_bookmarks().fields(&format!("metadata.name={}", daemon_set.name));
            let request = Request::new(query.object.collection())
                .watch_metadata(&params.timeout(WATCH_SECONDS), ANY)
                .map_err(|e| Error::new(Code::Internal, e.to_string()))?;
            let started = Instant::now();
            let ended = |last| query.gave_up(RetriesExhausted { last, tries: 1, waited: started.elapsed() });
            let broken = |e| ended(query.failed(&e));
            let events = timeout(self.timeout, session.client.request_events::<wire::OwnedObject>(request));
            let events = events.await.map_err(|_| ended(silent()))?.map_err(broken)?;
            let mut events = pin!(events);
            let longest = Duration::from_secs(WATCH_SECONDS.into()) + SLACK;
            let mut known = false;
            loop {
                let event = match timeout(if known { longest } else { BEGINNING }, events.try_next()).await {
                    Ok(event) => event.map_err(broken)?,
                    Err(_) if known => return Err(ended(silent())),
                    Err(_) => {
                        let there = self.is_staying(session, &query).await?;
                        tell(there);
                        known = !there;
                        continue;
                    }
                };
                match event {
                    Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => tell(object.stays()),
                    Some(WatchEvent::Deleted(_)) => tell(false),
                    Some(WatchEvent::Bookmark(_)) => continue,
                    Some(WatchEvent::Error(status)) => {
                        let cause = format!("the watch ended: {}, {}", status.code, status.message);
                        return Err(ended(query.not_again(&cause)));
                    }
                    None => return Ok(()),
                }
                known = true;
            }
        })
    }

    /// Whether the DaemonSet is there to stay.
    async fn is_staying(&self, session: &Session, query: &Query<'_>) -> Result<bool, Error> {
        let attempt = async || match get::<wire::OwnedObject>(session, query).await {
            Ok(object) => Ok(object.stays()),
            Err(AttemptError::Missing(_)) => Ok(false),
            Err(failure) => Err(failure),
        };
        retry(Instant::now(), self.timeout, attempt).await.map_err(|end| query.gave_up(end))
    }
}

fn silent() -> AttemptError {
    AttemptError::Trouble { cause: "the connection is silent".into(), after: None }
}

impl Api {
    /// Ends the pod.
    pub(in crate::cluster) fn delete(&self, pod: &Pod, resource_version: &str) -> Result<(), Error> {
        self.write(Instant::now(), pod, iter::once(Object::Deletion(pod, resource_version)))
    }

    /// Labels the pod.
    pub(in crate::cluster) fn label(&self, pod: &Pod, version: &str, label: (&str, &str)) -> Result<(), Error> {
        self.write(Instant::now(), pod, iter::once(Object::Label(pod, version, label)))
    }

    /// The node of that name.
    pub(in crate::cluster) fn node(&self, name: &String) -> Result<NodeTaints, Error> {
        check_names("node", [name])?;
        let session = self.session()?;
        let query = self.query(session, Object::Node(name));
        session.run(async {
            let attempt = async || Ok(get::<wire::NodeObject>(session, &query).await?.into());
            retry(Instant::now(), self.timeout, attempt).await.map_err(|end| query.gave_up(end))
        })
    }

    /// Replaces the node's taints.
    pub(in crate::cluster) fn taint(&self, node: &NodeTaints) -> Result<(), Error> {
        self.write_to(Instant::now(), "node", &[&node.name], iter::once(Object::Taints(node)))
    }
}

/// How long a list may take that only makes an error's message better.
const LIST: Duration = Duration::from_secs(2);

impl Api {
    /// All at the same time.
    pub(in crate::cluster) fn look_up(
        &self,
        started: Instant,
        wanted: &[DefinitionQuery],
    ) -> Result<Vec<Lookup>, Error> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let names = wanted.iter().flat_map(|DefinitionQuery { object, .. }| [&object.namespace, &object.name]);
        check_names("NetworkAttachmentDefinition", names)?;
        let session = self.session()?;
        let one = async |sought: &DefinitionQuery| {
            let query = self.query(session, Object::Definition(&sought.object));
            let attempt = async || match get::<wire::DefinitionObject>(session, &query).await {
                Ok(definition) => Ok(Lookup::Found(definition.into())),
                Err(AttemptError::Missing(cause)) if !sought.awaited => {
                    Ok(Lookup::Missing(format!("{query}: {cause}")))
                }
                Err(failure) => Err(failure),
            };
            match self.retry(started, &query, attempt).await {
                Ok(lookup) => Ok(lookup),
                Err(end @ RetriesExhausted { last: AttemptError::Missing(_), .. }) => {
                    Ok(Lookup::Missing(query.missing(end)))
                }
                Err(end) => Err(query.gave_up(end)),
            }
        };
        session.run(all(wanted.iter().map(one)))
    }

    /// The namespaces that have a definition of this name, sorted; one try.
    pub(super) fn list_namespaces(&self, name: &str) -> Result<Vec<String>, Error> {
        check_names("NetworkAttachmentDefinition", [&name.to_owned()])?;
        let session = self.session()?;
        let query = self.query(session, Object::DefinitionsNamed(name));
        let list: wire::Definitions = session.run(async {
            let attempt = async || match get(session, &query).await {
                Err(AttemptError::Trouble { cause, .. } | AttemptError::Missing(cause)) => Err(query.not_again(&cause)),
                other => other,
            };
            retry(Instant::now(), LIST.min(self.timeout), attempt).await.map_err(|end| query.gave_up(end))
        })?;
        Ok(list.namespaces_with(name))
    }
}

/// How long a write may take, all tries together: the pod waits for it.
pub(in crate::cluster) const WRITE: Duration = Duration::from_secs(2);

impl Api {
    /// Sends what the objects say of a pod, all at the same time. One that is gone is not waited for.
    pub(super) fn write<'a>(
        &self,
        started: Instant,
        pod: &Pod,
        objects: impl Iterator<Item = Object<'a>>,
    ) -> Result<(), Error> {
        self.write_to(started, "pod", &[&pod.namespace, &pod.name], objects)
    }

    /// The same of anything that has these names.
    pub(super) fn write_to<'a>(
        &self,
        started: Instant,
        source: &str,
        names: &[&String],
        objects: impl Iterator<Item = Object<'a>>,
    ) -> Result<(), Error> {
        check_names(source, names.iter().copied())?;
        let session = self.session()?;
        let one = async |object| {
            let query = Query { object, server: &session.server, kubeconfig: &self.kubeconfig };
            let attempt = async || match send(session, &query).await {
                Ok(_) => Ok(()),
                Err(AttemptError::Missing(cause)) => Err(query.gone(&cause)),
                Err(failure) => Err(failure),
            };
            let end = retry(started, WRITE.min(self.timeout), attempt).await;
            Ok::<_, Error>(end.map_err(|end| query.gave_up(end)))
        };
        Error::all(session.run(all(objects.map(one)))?)
    }
}
