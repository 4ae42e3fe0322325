//! The answers to the plugin's requests, and its call reports. Facts come from the caches; from the API server if a cache
//! does not have them.

use super::cache::{Cache, SharedFacts};
use super::objects::{ObservedPod, WatchedKind};
use crate::agent::containers::ExcludedContainers;
use crate::agent::metrics::Metrics;
use crate::cluster::agent::{AgentAnswer, CallReport, ContainersStatus, PoliciesReport, RequestKind};
use crate::cluster::{Api, DefinitionQuery, Event, Lookup, ObjectRef};
use crate::cni::{CniCommand, Code, Error};
use crate::pod::{Facts as PodFacts, Namespace, PodRef};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// How long the watch may take to report a missing object: the runtime may be faster.
const WATCH_TIMEOUT: Duration = Duration::from_millis(300);
/// How long the API server may take if the cache has an answer too.
const FIRST_TIMEOUT: Duration = Duration::from_millis(900);
/// The same for a pod that does not wait.
const MEMORY_TIMEOUT: Duration = Duration::from_millis(100);
/// How long before the plugin's deadline the answer is sent.
const MARGIN: Duration = Duration::from_millis(100);

/// Answers the plugin's requests. Clones share their state.
#[derive(Clone)]
pub(in crate::agent) struct Answers {
    /// The watched objects.
    pub(in crate::agent) facts: SharedFacts,
    /// The account for requests to the API server.
    pub(in crate::agent) account: Arc<Api>,
    /// The metrics of calls and requests.
    pub(in crate::agent) metrics: Metrics,
    /// The running containers, if the agent excludes containers.
    pub(in crate::agent) containers: Option<ExcludedContainers>,
    /// The policies of running pods.
    pub(in crate::agent) policies: watch::Receiver<PoliciesReport>,
}

impl Answers {
    /// Returns the answer to a request before the plugin's `deadline`; with `from_memory`, without a request to the API
    /// server.
    pub(in crate::agent) async fn answer(
        &self,
        request: RequestKind,
        from_memory: bool,
        deadline: Instant,
    ) -> AgentAnswer {
        let deadline = deadline - MARGIN;
        let answer = match request {
            RequestKind::Facts { pod, with_namespace } if from_memory => self.known_facts(&pod, with_namespace).await,
            RequestKind::Definitions { wanted } if from_memory => self
                .cached_definitions(&wanted, true)
                .map(|found| AgentAnswer::Definitions { found })
                .ok_or_else(|| not_in_memory("a definition")),
            RequestKind::Facts { pod, with_namespace } => self.facts(pod, with_namespace, deadline).await,
            RequestKind::Namespace { pod } => {
                self.namespace(&pod, deadline).await.map(|namespace| AgentAnswer::Namespace { namespace })
            }
            RequestKind::Definitions { wanted } => {
                self.definitions(wanted, deadline).await.map(|found| AgentAnswer::Definitions { found })
            }
            RequestKind::Report { pod, status, events } => self.report(pod, status, events, deadline).await,
            RequestKind::Probe => self.probe(deadline).await,
            RequestKind::Containers { container } => Ok(AgentAnswer::Containers(self.containers(container).await)),
            RequestKind::Policies => Ok(AgentAnswer::Policies(self.policies.borrow().clone())),
            RequestKind::Watches => {
                Ok(AgentAnswer::Watches { broken: self.facts.lasting_problems(std::time::Instant::now()) })
            }
            RequestKind::Called(_) | RequestKind::Unknown => Ok(AgentAnswer::Unknown),
        };
        answer.unwrap_or_else(AgentAnswer::from)
    }

    async fn containers(&self, sandbox_id: String) -> ContainersStatus {
        let error = "the agent does not use NRI: the flag --nri-socket is not set".to_owned();
        match &self.containers {
            Some(containers) => containers.status(sandbox_id).await,
            None => ContainersStatus { error, ..ContainersStatus::default() },
        }
    }

    /// Returns the facts that are in memory, or that the watch reports a moment later.
    async fn known_facts(&self, pod: &PodRef, with_namespace: bool) -> Result<AgentAnswer, Error> {
        let found = || self.cached_facts(pod, with_namespace);
        let facts = self.facts.pods.find_within(MEMORY_TIMEOUT, found).await;
        let PodFacts { pod, namespace } = facts.ok_or_else(|| not_in_memory("the pod"))?;
        Ok(AgentAnswer::Facts { pod: pod.into(), namespace })
    }

    async fn facts(&self, pod: PodRef, with_namespace: bool, deadline: Instant) -> Result<AgentAnswer, Error> {
        let (pod, namespace) = if let Some(cached) = self.current_pod(&pod).await {
            let namespace = match with_namespace {
                true => Some(self.namespace(&pod, deadline).await?),
                false => None,
            };
            (cached.pod.clone(), namespace)
        } else {
            let namespace = with_namespace.then(|| self.current_namespace(&pod.namespace)).flatten();
            let needs_namespace = with_namespace && namespace.is_none();
            let reason = if pod.uid.is_some() { "unknown-pod" } else { "pod-without-uid" };
            self.count_fallback(&self.facts.pods, reason);
            let fallback = self.cached_facts(&pod, needs_namespace);
            let facts = self.ask(fallback, deadline, async |api| api.find_facts(&pod, needs_namespace).await).await?;
            (facts.pod, namespace.or(facts.namespace))
        };
        Ok(AgentAnswer::Facts { pod: pod.into(), namespace })
    }

    /// Returns the cached pod if the cache is synced; otherwise its annotations may have changed.
    async fn current_pod(&self, pod: &PodRef) -> Option<Arc<ObservedPod>> {
        let pods = &self.facts.pods;
        let object = ObjectRef { namespace: pod.namespace.clone(), name: pod.name.clone() };
        if pod.uid.is_none() || !pods.is_synced() || pods.is_too_large(&object) {
            return None;
        }
        pods.find_within(WATCH_TIMEOUT, || self.cached_pod(pod)).await
    }

    /// Returns the cached pod if it has the UID of the request: a pod of the same name may have been replaced.
    fn cached_pod(&self, pod: &PodRef) -> Option<Arc<ObservedPod>> {
        pod.uid.as_ref()?;
        let object = ObjectRef { namespace: pod.namespace.clone(), name: pod.name.clone() };
        self.facts.pods.get(&object).filter(|cached| cached.pod.uid.is_some() && cached.pod.matches(pod))
    }

    /// Returns the cached pod and, if `with_namespace`, its namespace.
    fn cached_facts(&self, pod: &PodRef, with_namespace: bool) -> Option<PodFacts> {
        let cached = self.cached_pod(pod)?.pod.clone();
        let namespace = match with_namespace {
            true => Some(cached_object(&self.facts.namespaces, "", &pod.namespace)?),
            false => None,
        };
        Some(PodFacts { pod: cached, namespace })
    }

    /// Returns the cached namespace if the cache is synced.
    fn current_namespace(&self, name: &str) -> Option<Namespace> {
        let namespaces = &self.facts.namespaces;
        namespaces.is_synced().then(|| cached_object(namespaces, "", name)).flatten()
    }

    async fn namespace(&self, pod: &PodRef, deadline: Instant) -> Result<Namespace, Error> {
        if let Some(namespace) = self.current_namespace(&pod.namespace) {
            return Ok(namespace);
        }
        let fallback = cached_object(&self.facts.namespaces, "", &pod.namespace);
        self.count_fallback(&self.facts.namespaces, "unknown-namespace");
        self.ask(fallback, deadline, async |api| api.find_namespace(pod).await).await
    }

    async fn definitions(&self, queries: Vec<DefinitionQuery>, deadline: Instant) -> Result<Vec<Lookup>, Error> {
        let cache = &self.facts.definitions;
        if cache.is_synced()
            && let Some(found) = cache.find_within(WATCH_TIMEOUT, || self.cached_definitions(&queries, false)).await
        {
            return Ok(found);
        }
        let fallback = queries.iter().map(|query| self.cached_definition(query)).collect::<Option<Vec<_>>>();
        self.count_fallback(cache, "unknown-definition");
        self.ask(fallback, deadline, async |api| api.find_definitions(&queries).await).await
    }

    /// Returns what the cache knows about definitions, if that is final. `now`: also for one that the watch may report a
    /// moment later.
    fn cached_definitions(&self, queries: &[DefinitionQuery], now: bool) -> Option<Vec<Lookup>> {
        let cache = &self.facts.definitions;
        let missing = || Lookup::Missing(format!("not among the {} that the node's agent watches", cache.len().0));
        let is_final = |query: &DefinitionQuery| {
            cache.is_synced() && (now || !query.awaited) && !cache.is_too_large(&query.object)
        };
        let look_up = |query| self.cached_definition(query).or_else(|| is_final(query).then(missing));
        queries.iter().map(look_up).collect()
    }

    fn cached_definition(&self, DefinitionQuery { object, .. }: &DefinitionQuery) -> Option<Lookup> {
        cached_object(&self.facts.definitions, &object.namespace, &object.name).map(Lookup::Found)
    }

    async fn report(
        &self,
        pod: PodRef,
        status: Option<String>,
        events: Vec<Event>,
        deadline: Instant,
    ) -> Result<AgentAnswer, Error> {
        let pod = self.account.own(pod);
        let report = async |api: Api| api.send_report(&pod, status.as_deref(), &events).await;
        self.ask(None, deadline, report).await.map(|()| AgentAnswer::Done)
    }

    async fn probe(&self, deadline: Instant) -> Result<AgentAnswer, Error> {
        if !self.facts.pods.is_synced() {
            self.ask(None, deadline, async |api| api.check().await).await?;
        }
        Ok(AgentAnswer::Done)
    }

    /// Counts a request to the API server: for `reason` if the cache is synced.
    fn count_fallback<T: WatchedKind>(&self, cache: &Cache<T>, reason: &'static str) {
        self.metrics.count("api_fallbacks", [("reason", if cache.is_synced() { reason } else { "broken-watch" })]);
    }

    /// Returns the answer of the API server, or `fallback` if it gives none. With a fallback there is one attempt.
    async fn ask<T>(
        &self,
        fallback: Option<T>,
        deadline: Instant,
        request: impl AsyncFnOnce(Api) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let now = Instant::now();
        let deadline = if fallback.is_some() { deadline.min(now + FIRST_TIMEOUT) } else { deadline };
        let left = deadline.saturating_duration_since(now);
        let account = self.account.within(left);
        let account = if fallback.is_some() { account.once() } else { account };
        let answer = timeout_at(deadline + MARGIN / 2, request(account)).await.unwrap_or_else(|_| {
            let error = Error::new(Code::TryAgain, "the agent got no answer from the API server");
            Err(error.with_details(format!("no answer within {:.1} s", left.as_secs_f32())))
        });
        match (answer, fallback) {
            (Err(error), Some(fallback)) if error.code == Code::TryAgain => {
                tracing::warn!(%error, "answering from the cache");
                Ok(fallback)
            }
            (answer, _) => answer,
        }
    }
}

fn not_in_memory(what: &str) -> Error {
    Error::new(Code::TryAgain, format!("the agent does not have {what} in memory yet"))
}

/// Returns the cached object of this name, even if the cache is not synced.
fn cached_object<T: WatchedKind + Clone>(cache: &Cache<T>, namespace: &str, name: &str) -> Option<T> {
    let object = ObjectRef { namespace: namespace.to_owned(), name: name.to_owned() };
    cache.get(&object).map(|cached| (*cached).clone())
}

/// Logs a plugin call in one line and counts it.
pub(in crate::agent) fn record(report: &CallReport, metrics: &Metrics) {
    let milliseconds = |us: u64| format!("{:.1}", us as f64 / 1e3);
    let CallReport { command, pod, container, network, ifname, facts, .. } = report;
    let (wall_ms, cpu_ms) = (milliseconds(report.wall_us), milliseconds(report.cpu_us));
    let warnings = (!report.warnings.is_empty()).then(|| report.warnings.join("; "));
    let facts = (!facts.is_empty()).then_some(facts.as_str());
    // A GC call has no container.
    let [pod, container, ifname] = [pod, container, ifname].map(|text| (!text.is_empty()).then_some(text.as_str()));
    macro_rules! log {
        ($level:ident, $message:literal, $($own:tt)*) => {
            tracing::$level!(command, pod, network, ifname, container, $($own)* facts, wall_ms, cpu_ms, warnings, $message)
        };
    }
    match report.code {
        None => log!(info, "plugin call succeeded",),
        Some(code) => log!(error, "plugin call failed", code, error = report.error,),
    }
    if facts == Some("api") {
        metrics.count("api_fallbacks", [("reason", "agent-passed-over")]);
    }
    // A later version of the plugin may report other verbs.
    let Some(verb) = CniCommand::named(command) else { return };
    let (outcome, reason) = match report.code {
        None => ("done", ""),
        Some(code) => ("failed", Code::from_number(code).map_or("of-another-plugin", Code::name)),
    };
    metrics.call(verb.name(), outcome, reason, report.wall_us as f64 / 1e6);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_calls_are_counted_by_outcome() {
        let metrics = Metrics::default();
        let call = |command: &str, code, facts: &str| {
            let report = CallReport { command: command.into(), code, facts: facts.into(), ..CallReport::default() };
            record(&report, &metrics);
        };
        call("ADD", None, "agent");
        call("ADD", Some(Code::PodUnknown.number()), "api");
        call("ADD", Some(999), "");
        call("LATER", None, "");
        let text = metrics.text();
        for line in [
            r#"detour_plugin_calls_total{verb="ADD",outcome="done",reason=""} 1"#,
            r#"detour_plugin_calls_total{verb="ADD",outcome="failed",reason="pod-unknown"} 1"#,
            r#"detour_plugin_calls_total{verb="ADD",outcome="failed",reason="of-another-plugin"} 1"#,
            r#"detour_api_fallbacks_total{reason="agent-passed-over"} 1"#,
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("LATER"));
    }
}
