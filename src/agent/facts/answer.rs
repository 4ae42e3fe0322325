//! What the plugin is answered: from what is known, and where that is not enough, from the API.

use super::SharedFacts;
use super::cache::Cache;
use super::objects::WatchedKind;
use crate::agent::{Metrics, ObservedPod, socket};
use crate::cluster::agent::{AgentAnswer, CallReport, RequestKind};
use crate::cluster::{Cluster, DefinitionQuery, Event, Lookup, ObjectRef, ServiceAccount};
use crate::cni::{Code, Error};
use crate::pod::{Facts as PodFacts, Namespace, Pod, PodRef};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};

/// How long the watch is waited for with what it does not know: the runtime may be ahead of it.
const BRIEFLY: Duration = Duration::from_millis(300);
/// How long the API may take where what was known last would serve as well.
const SHORTLY: Duration = Duration::from_secs(1);
/// For so long after the API was silent all that time it is not asked again where what was known last
/// serves.
const SILENT: Duration = Duration::from_secs(5);
/// So long before the plugin stops waiting, the answer is on its way.
const MARGIN: Duration = Duration::from_millis(100);

/// Who answers.
#[derive(Clone)]
pub(in crate::agent) struct Answers {
    facts: SharedFacts,
    account: Arc<ServiceAccount>,
    metrics: Metrics,
    /// Until when the API counts as silent.
    silent: Arc<Mutex<Option<Instant>>>,
}

impl Answers {
    /// Where `facts` are not enough, the API is asked as `account`.
    pub(in crate::agent) fn new(facts: SharedFacts, account: ServiceAccount, metrics: Metrics) -> Self {
        Self { facts, account: Arc::new(account), metrics, silent: Arc::default() }
    }

    /// Takes note of a call that has ended.
    pub(in crate::agent) fn told(&self, called: &CallReport) {
        socket::record(called, &self.metrics);
    }

    /// The answer, while the plugin waits for it.
    pub(in crate::agent) async fn answer(&self, ask: RequestKind, until: Instant) -> AgentAnswer {
        let until = until - MARGIN;
        let answer = match ask {
            RequestKind::Facts { pod, with_namespace } => self.pod(pod, with_namespace, until).await,
            RequestKind::Namespace { pod } => {
                self.namespace(&pod, until).await.map(|namespace| AgentAnswer::Namespace { namespace })
            }
            RequestKind::Definitions { wanted } => {
                self.definitions(wanted, until).await.map(|found| AgentAnswer::Definitions { found })
            }
            RequestKind::NamespacesWithDefinition { name } => self.namespaces(name, until).await,
            RequestKind::Report { pod, status, events } => self.report(pod, status, events, until).await,
            RequestKind::Probe => self.probe(until).await,
            RequestKind::Called(_) | RequestKind::Unknown => Ok(AgentAnswer::Unknown),
        };
        answer.unwrap_or_else(AgentAnswer::from)
    }

    async fn pod(&self, wanted: PodRef, with_namespace: bool, until: Instant) -> Result<AgentAnswer, Error> {
        let known = self.known_pod(&wanted).await;
        let namespace = with_namespace.then(|| self.known_namespace(&wanted.namespace)).flatten();
        let (pod, namespace) = match (known, with_namespace, namespace) {
            (Some(known), true, None) => (known.pod.clone(), Some(self.namespace(&wanted, until).await?)),
            (Some(known), _, namespace) => (known.pod.clone(), namespace),
            (None, _, namespace) => {
                let more = with_namespace && namespace.is_none();
                let unknown = if wanted.uid.is_some() { "unknown-pod" } else { "pod-without-uid" };
                self.count_fallback(&self.facts.0.pods, unknown);
                let last = self.last_facts(&wanted, more);
                let asked = self.ask_or(last, until, move |api| api.facts(&wanted, more)).await?;
                (asked.pod, namespace.or(asked.namespace))
            }
        };
        Ok(AgentAnswer::Facts { pod: pod.into(), namespace })
    }

    /// The pod, where the watch works. Where that is broken, its annotations may have changed since.
    async fn known_pod(&self, wanted: &PodRef) -> Option<Arc<ObservedPod>> {
        wanted.uid.as_ref()?;
        let pods = &self.facts.0.pods;
        if !pods.is_whole() {
            return None;
        }
        match self.last_pod(wanted) {
            Some(known) => Some(known),
            None => pods.find_within(BRIEFLY, || self.last_pod(wanted)).await,
        }
    }

    /// The pod as it was known last, where the caller's UID tells that it is the one that is meant: a name
    /// alone may be that of one that is gone.
    fn last_pod(&self, wanted: &PodRef) -> Option<Arc<ObservedPod>> {
        wanted.uid.as_ref()?;
        let object = ObjectRef { namespace: wanted.namespace.clone(), name: wanted.name.clone() };
        self.facts.0.pods.get(&object).filter(|known| known.pod.uid.is_some() && known.pod.is(wanted))
    }

    /// What was known last of the pod and, where `with_namespace`, of its namespace.
    fn last_facts(&self, wanted: &PodRef, with_namespace: bool) -> Option<PodFacts> {
        let pod = self.last_pod(wanted)?.pod.clone();
        let namespace = match with_namespace {
            true => Some(last_known(&self.facts.0.namespaces, "", &wanted.namespace)?),
            false => None,
        };
        Some(PodFacts { pod, namespace })
    }

    fn known_namespace(&self, name: &str) -> Option<Namespace> {
        let namespaces = &self.facts.0.namespaces;
        namespaces.is_whole().then(|| last_known(namespaces, "", name)).flatten()
    }

    async fn namespace(&self, pod: &PodRef, until: Instant) -> Result<Namespace, Error> {
        if let Some(namespace) = self.known_namespace(&pod.namespace) {
            return Ok(namespace);
        }
        let last = last_known(&self.facts.0.namespaces, "", &pod.namespace);
        self.count_fallback(&self.facts.0.namespaces, "unknown-namespace");
        let pod = pod.clone();
        self.ask_or(last, until, move |api| api.namespace(&pod)).await
    }

    async fn definitions(&self, wanted: Vec<DefinitionQuery>, until: Instant) -> Result<Vec<Lookup>, Error> {
        let cache = &self.facts.0.definitions;
        let known = |sought: &DefinitionQuery| {
            last_known(cache, &sought.object.namespace, &sought.object.name).map(Lookup::Found)
        };
        let missing = || Lookup::Missing(format!("not among the {} that the node's agent watches", cache.len()));
        let look = || wanted.iter().map(|s| known(s).or_else(|| (!s.awaited).then(missing))).collect();
        if cache.is_whole() {
            let found: Option<Vec<Lookup>> = match look() {
                Some(found) => Some(found),
                None => cache.find_within(BRIEFLY, look).await,
            };
            if let Some(found) = found {
                return Ok(found);
            }
        }
        let last = wanted.iter().map(known).collect::<Option<Vec<_>>>();
        self.count_fallback(cache, "unknown-definition");
        self.ask_or(last, until, move |api| api.definitions(&wanted)).await
    }

    async fn namespaces(&self, name: String, until: Instant) -> Result<AgentAnswer, Error> {
        let cache = &self.facts.0.definitions;
        let names = if cache.is_whole() {
            let named = cache.all().into_iter().filter(|definition| definition.object.name == name);
            named.map(|definition| definition.object.namespace.clone()).collect()
        } else {
            self.count_fallback(cache, "unknown-definition");
            let unknown = || Error::new(Code::TryAgain, "the definitions of that name can't be listed");
            self.ask(until, move |api| api.namespaces_with_definition(&name).ok_or_else(unknown)).await?
        };
        Ok(AgentAnswer::Namespaces { names })
    }

    async fn report(
        &self,
        told: PodRef,
        status: Option<String>,
        events: Vec<Event>,
        until: Instant,
    ) -> Result<AgentAnswer, Error> {
        let pod = Pod { namespace: told.namespace, name: told.name, uid: told.uid, ..Pod::default() };
        self.ask(until, move |api| api.report(&pod, status.as_deref(), &events)).await.map(|()| AgentAnswer::Done)
    }

    async fn probe(&self, until: Instant) -> Result<AgentAnswer, Error> {
        if !self.facts.0.pods.is_whole() {
            self.ask(until, |api| api.probe()).await?;
        }
        Ok(AgentAnswer::Done)
    }

    /// What is not in `cache` is asked of the API.
    fn count_fallback<T: WatchedKind>(&self, cache: &Cache<T>, unknown: &'static str) {
        self.metrics.api_fallback(if cache.is_whole() { unknown } else { "broken-watch" });
    }

    /// What the API says, or what was known last where it gives no answer. It is tried once: one that is
    /// down costs no time, and one that is silent a second, once in a while.
    async fn ask_or<T: Send + 'static>(
        &self,
        last: Option<T>,
        until: Instant,
        question: impl FnOnce(&dyn Cluster) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let Some(last) = last else { return self.ask(until, question).await };
        let silent = || self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        if silent().is_some_and(|until| begun < until) {
            tracing::warn!("answers with what was known last: the API server does not answer");
            return Ok(last);
        }
        match self.ask_through(ServiceAccount::source_once, until.min(begun + SHORTLY), question).await {
            Err(error) if error.code == Code::TryAgain => {
                tracing::warn!(%error, "answers with what was known last");
                let now = Instant::now();
                *silent() = (now - begun >= SHORTLY).then_some(now + SILENT);
                Ok(last)
            }
            other => other,
        }
    }

    /// What the API says.
    async fn ask<T: Send + 'static>(
        &self,
        until: Instant,
        question: impl FnOnce(&dyn Cluster) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.ask_through(ServiceAccount::source, until, question).await
    }

    /// What the API says, on a thread that waits for it.
    async fn ask_through<T: Send + 'static>(
        &self,
        source: fn(&ServiceAccount, Duration) -> Box<dyn Cluster>,
        until: Instant,
        question: impl FnOnce(&dyn Cluster) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (account, asked) = (Arc::clone(&self.account), Instant::now());
        let late = |why: String| Error::new(Code::TryAgain, "the agent has no answer of the API").with_details(why);
        let too_late = move || late(format!("within {:.1} s", (until - asked).as_secs_f32()));
        let answer = spawn_blocking(move || {
            // It may have waited for a thread, while others waited for the API.
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() { Err(too_late()) } else { question(&*source(&account, left)) }
        });
        match timeout_at(until + MARGIN / 2, answer).await {
            Ok(answer) => answer.map_err(|error| late(error.to_string()))?,
            Err(_) => Err(too_late()),
        }
    }
}

/// The object of this name, whatever became of the watch.
fn last_known<T: WatchedKind + Clone>(cache: &Cache<T>, namespace: &str, name: &str) -> Option<T> {
    let object = ObjectRef { namespace: namespace.to_owned(), name: name.to_owned() };
    cache.get(&object).map(|kept| (*kept).clone())
}
