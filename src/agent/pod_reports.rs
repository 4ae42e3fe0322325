//! Events of the node's pods, and the task that writes them to the API server. `queue` decides which one is
//! next.

mod queue;

use super::runtime::Tasks;
use crate::cluster::{Api, Event};
use crate::cni::{Code, Error};
use crate::pod::PodRef;
use queue::Queue;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::{timeout, timeout_at};

/// The pause after an Event to which the API server did not answer.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// The reports that wait for the API server. The task ends with the last clone.
#[derive(Debug, Clone)]
pub struct PodReports(Option<Arc<Handle>>);

/// Ends the task when it is dropped.
#[derive(Debug)]
struct Handle(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Notify,
}

impl PodReports {
    /// Starts the task; without an account, reports are dropped.
    #[must_use]
    pub fn start(account: Option<Api>, tasks: &Tasks) -> Self {
        let Some(account) = account else { return Self::none() };
        let reports = Self::new();
        let shared = reports.0.as_ref().map(|handle| Arc::clone(&handle.0)).unwrap_or_default();
        let write = move |(pod, event): &(PodRef, Event)| account.tell(pod, event);
        tasks.start(|| async move { shared.write_all(write, RETRY_DELAY).await });
        reports
    }

    /// Returns reports that are dropped.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    pub(super) fn new() -> Self {
        Self(Some(Arc::new(Handle(Arc::default()))))
    }

    /// Adds an Event without waiting; drops it if too many wait.
    pub(super) fn event(&self, pod: &PodRef, event: Event) {
        let Some(Handle(shared)) = self.0.as_deref() else { return };
        shared.queue().add_event(pod, event);
        shared.changed.notify_one();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.queue().has_ended = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes reports until the queue ends. While the API server does not answer, they wait.
    async fn write_all(
        &self,
        write: impl Fn(&(PodRef, Event)) -> Result<(), Error> + Clone + Send + 'static,
        retry_delay: Duration,
    ) {
        let mut logged = None;
        while let Some(report) = self.next().await {
            let write = write.clone();
            let written = spawn_blocking(move || {
                let result = write(&report);
                (report, result)
            });
            // Fails only if the write panics.
            let Ok((report, result)) = written.await else { continue };
            log(result.as_ref().err(), &mut logged);
            let code = result.err().map(|error| error.code);
            let is_unavailable = code == Some(Code::TryAgain);
            self.record(report, code);
            if is_unavailable {
                let ended = async {
                    while !self.queue().has_ended {
                        self.changed.notified().await;
                    }
                };
                // Reports that are added meanwhile wait too.
                let _ = timeout(retry_delay, ended).await;
            }
        }
    }

    /// Records the result of a report: it counts for the limits, or is written again later.
    fn record(&self, report: (PodRef, Event), code: Option<Code>) {
        let mut queue = self.queue();
        if code == Some(Code::TryAgain) {
            queue.put_back(report);
        } else {
            queue.record(&report.0, Instant::now());
        }
    }

    /// Waits for the next report; `None` if the queue has ended.
    async fn next(&self) -> Option<(PodRef, Event)> {
        loop {
            let later = {
                let mut queue = self.queue();
                if queue.has_ended {
                    return None;
                }
                match queue.next(Instant::now()) {
                    Ok(report) => return Some(report),
                    Err(later) => later,
                }
            };
            match later {
                Some(due) => drop(timeout_at(due.into(), self.changed.notified()).await),
                None => self.changed.notified().await,
            }
        }
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

    fn pod(name: &str) -> PodRef {
        PodRef { namespace: "shop".into(), name: name.into(), uid: Some("u".into()) }
    }

    fn event(reason: &'static str) -> Event {
        Event { warning: false, reason: reason.into(), message: String::new() }
    }

    fn text((pod, event): &(PodRef, Event)) -> String {
        format!("{} {}", pod.name, event.reason)
    }

    /// Writes everything that waits, with the results that `answer` returns by the number of earlier writes. Returns
    /// the reports in the order of the attempts.
    fn written(
        reports: PodReports,
        answer: impl Fn(usize, &PodReports) -> Result<(), Error> + Send + Sync + 'static,
    ) -> Vec<String> {
        let shared = Arc::clone(&reports.0.as_ref().expect("started").0);
        let (written, answer) = (Arc::new(Mutex::new(Vec::new())), Arc::new(answer));
        let (attempts, queue) = (Arc::clone(&written), Arc::clone(&shared));
        let write = move |report: &(PodRef, Event)| {
            let number = {
                let mut attempts = attempts.lock().expect("no panic");
                attempts.push(text(report));
                attempts.len()
            };
            let result = answer(number, &reports);
            // Nothing else waits.
            let mut queue = queue.queue();
            queue.has_ended = result.is_ok() && queue.is_empty();
            result
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("an event loop");
        runtime.block_on(shared.write_all(write, Duration::from_millis(1)));
        written.lock().expect("no panic").clone()
    }

    #[test]
    fn reports_wait_in_order_while_the_api_server_does_not_answer() {
        let reports = PodReports::new();
        for name in ["a", "b"] {
            reports.event(&pod(name), event("E"));
        }
        let written = written(reports, move |number, reports| match number {
            1 => {
                reports.event(&pod("c"), event("E"));
                Err(Error::new(Code::TryAgain, "no answer"))
            }
            3 => Err(Error::new(Code::Forbidden, "refused")),
            _ => Ok(()),
        });
        assert_eq!(written, ["a E", "a E", "b E", "c E"], "a refused Event is dropped");
    }
}
