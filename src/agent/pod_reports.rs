//! Events of the node's pods: one task writes them to the API server, one after the other. Each pod and each namespace has
//! a limited rate, so that a pod's author can neither silence other tenants nor keep the API server busy.

use super::token_bucket::TokenBucket;
use crate::cluster::{Api, Event};
use crate::cni::{Code, Error};
use crate::pod::PodRef;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::spawn_local;
use tokio::time::sleep;

/// The limit of Events that wait for the API server.
const MAX_WAITING: usize = 1024;
/// The Events of one pod: this many at once, then one in each refill time.
const POD_BURST: u32 = 10;
const POD_REFILL_TIME: Duration = Duration::from_secs(10);
/// The Events of one namespace: at once, one of each pod of a large node.
const NAMESPACE_BURST: u32 = 256;
const NAMESPACE_REFILL_TIME: Duration = Duration::from_secs(1);
/// The number of pods and namespaces whose rates are stored.
const MAX_RATES: usize = 2048;
/// The pause after an Event to which the API server did not answer.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// An Event and its pod.
type Report = (PodRef, Event);

/// The Events of the node's pods. The task ends with the last clone.
#[derive(Debug, Clone)]
pub struct PodReports(Option<Arc<Queue>>);

/// The Events that wait for the task. While the API server does not answer, no pod takes the room of all others.
#[derive(Debug)]
struct Queue {
    rates: Mutex<Rates>,
    sender: mpsc::Sender<Report>,
}

impl PodReports {
    /// Starts the task; without an account, Events are dropped.
    #[must_use]
    pub fn start(account: Option<Api>) -> Self {
        let Some(account) = account else { return Self(None) };
        let (queue, reports) = Self::queue();
        let write = move |(pod, event): Report| {
            let account = account.clone();
            async move { account.tell(&pod, &event).await }
        };
        spawn_local(write_all(reports, write, RETRY_DELAY));
        queue
    }

    /// Returns reports that the receiver gets.
    pub(super) fn queue() -> (Self, mpsc::Receiver<Report>) {
        let (sender, reports) = mpsc::channel(MAX_WAITING);
        (Self(Some(Arc::new(Queue { rates: Mutex::default(), sender }))), reports)
    }

    /// Logs an Event and adds it.
    pub(super) fn report(&self, pod: &PodRef, event: Event) {
        let name = format!("{}/{}", pod.namespace, pod.name);
        if event.warning {
            tracing::warn!(pod = name, "{}", event.message);
        } else {
            tracing::info!(pod = name, "{}", event.message);
        }
        self.event(pod, event);
    }

    /// Adds an Event without waiting. It is dropped if its pod or namespace has too many.
    pub(super) fn event(&self, pod: &PodRef, event: Event) {
        let Some(Queue { rates, sender }) = self.0.as_deref() else { return };
        let has_room = rates.lock().unwrap_or_else(PoisonError::into_inner).take(pod, Instant::now());
        if !has_room || sender.try_send((pod.clone(), event)).is_err() {
            tracing::debug!("Event dropped: too many of pod {}/{} or its namespace", pod.namespace, pod.name);
        }
    }
}

/// Writes the Events in their order until the last sender is dropped. While the API server does not answer, they wait.
async fn write_all<F: Future<Output = Result<(), Error>>>(
    mut reports: mpsc::Receiver<Report>,
    write: impl Fn(Report) -> F,
    retry_delay: Duration,
) {
    let mut logged = None;
    while let Some(report) = reports.recv().await {
        loop {
            let error = write(report.clone()).await.err();
            log(error.as_ref(), &mut logged);
            if error.is_none_or(|error| error.code != Code::TryAgain) {
                break;
            }
            sleep(retry_delay).await;
        }
    }
}

/// The rates of pods and namespaces that have had Events.
#[derive(Debug, Default)]
struct Rates {
    pods: BTreeMap<(String, String), TokenBucket>,
    namespaces: BTreeMap<String, TokenBucket>,
}

impl Rates {
    /// Returns whether the pod may have an Event, and counts it then.
    fn take(&mut self, PodRef { namespace, name, .. }: &PodRef, now: Instant) -> bool {
        if self.pods.len() > MAX_RATES {
            self.pods.retain(|_, rate| !rate.is_full(now));
            self.namespaces.retain(|_, rate| !rate.is_full(now));
        }
        let new = || TokenBucket::new(POD_BURST, POD_REFILL_TIME);
        let of_pod = self.pods.entry((namespace.clone(), name.clone())).or_insert_with(new);
        let new = || TokenBucket::new(NAMESPACE_BURST, NAMESPACE_REFILL_TIME);
        let of_namespace = self.namespaces.entry(namespace.clone()).or_insert_with(new);
        let is_free = of_pod.next(now).is_none() && of_namespace.next(now).is_none();
        if is_free {
            of_pod.take(now);
            of_namespace.take(now);
        }
        is_free
    }
}

/// Logs a failure, once until an Event is accepted or fails for another reason. Messages contain the pod, so only the code
/// tells whether the reason is the same.
fn log(error: Option<&Error>, logged: &mut Option<Code>) {
    match error {
        // The pod was deleted, which ends its reports.
        Some(error) if error.code == Code::PodUnknown => tracing::debug!("Event not created: {error}"),
        Some(error) if *logged != Some(error.code) => {
            tracing::warn!("Event not created: {error}");
            *logged = Some(error.code);
        }
        Some(error) => tracing::debug!("Event not created: {error}"),
        None => *logged = None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::ready;

    fn report(namespace: &str, name: &str, reason: &str) -> Report {
        let pod = PodRef { namespace: namespace.into(), name: name.into(), uid: Some("u".into()) };
        (pod, Event { warning: false, reason: reason.to_owned().into(), message: String::new() })
    }

    /// Writes these Events, with the results that `answer` returns by the number of earlier writes. Returns the pods in the
    /// order of the attempts, up to the first attempt for `last`.
    fn written(reports: Vec<Report>, last: &str, answer: fn(usize) -> Result<(), Error>) -> Vec<String> {
        let attempts = Arc::new(Mutex::new(Vec::new()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("an event loop");
        runtime.block_on(async {
            let (queue, received) = PodReports::queue();
            let (done, mut ended) = mpsc::channel(1);
            let (own, last) = (Arc::clone(&attempts), last.to_owned());
            let write = move |(pod, _): Report| {
                let mut attempts = own.lock().expect("no panic");
                attempts.push(format!("{}/{}", pod.namespace, pod.name));
                if attempts.last() == Some(&last) {
                    let _ = done.try_send(());
                }
                ready(answer(attempts.len()))
            };
            for (pod, event) in reports {
                queue.event(&pod, event);
            }
            tokio::select! {
                () = write_all(received, write, Duration::from_millis(1)) => {}
                done = ended.recv() => done.expect("written"),
            }
        });
        attempts.lock().expect("no panic").clone()
    }

    #[test]
    fn events_wait_in_order_while_the_api_server_does_not_answer() {
        let reports = ["a", "b", "c", "end"].map(|name| report("shop", name, "E"));
        let written = written(reports.into(), "shop/end", |number| match number {
            1 => Err(Error::new(Code::TryAgain, "no answer")),
            3 => Err(Error::new(Code::Forbidden, "refused")),
            _ => Ok(()),
        });
        assert_eq!(written, ["shop/a", "shop/a", "shop/b", "shop/c", "shop/end"], "a refused Event is dropped");
    }

    #[test]
    fn thirty_bad_pods_of_a_namespace_silence_no_other_tenant() {
        let mut reports = Vec::new();
        for pod in 0..30 {
            reports.extend((0..30).map(|_| report("attacker", &pod.to_string(), "E")));
        }
        reports.push(report("victim", "web-0", "E"));
        let written = written(reports, "victim/web-0", |_| Ok(()));
        assert_eq!(written.len(), NAMESPACE_BURST as usize + 1);
    }

    #[test]
    fn a_pod_that_changes_all_the_time_has_few_events() {
        let (mut rates, start) = (Rates::default(), Instant::now());
        let (pod, _) = report("shop", "web-0", "E");
        let allowed = (0..3000).filter(|tenth| rates.take(&pod, start + Duration::from_millis(100 * tenth)));
        let count = allowed.count();
        assert!((30..=41).contains(&count), "{count} Events in 5 minutes");
    }
}
