//! Events and conditions of the node's pods, and the task that writes them to the API server. `queue` decides which one is
//! next.

mod queue;

use super::runtime::Tasks;
use crate::cluster::{Event, PolicyCondition, ServiceAccount};
use crate::cni::{Code, Error};
use crate::pod::PodRef;
use queue::{Queue, Report};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::task::spawn_blocking;
use tokio::time::{timeout, timeout_at};

/// The pause after a report that the API server did not accept: of all reports if it did not answer, of conditions if it
/// refused one. It refuses everything while it loads its roles.
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
    pub fn start(account: Option<ServiceAccount>, tasks: &Tasks) -> Self {
        let Some(account) = account else { return Self::none() };
        let reports = Self::new();
        let shared = reports.0.as_ref().map(|handle| Arc::clone(&handle.0)).unwrap_or_default();
        let write = move |report: &Report| match report {
            Report::Event(pod, event) => account.tell(pod, event),
            Report::Condition(pod, condition, has_changed) => account.set_condition(pod, condition, *has_changed),
        };
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

    /// Sets a pod's condition without waiting. It replaces one that still waits. `has_changed_status` is whether its
    /// status differs from that in the cluster. Drops it if too many wait.
    pub(super) fn condition(&self, pod: &PodRef, condition: PolicyCondition, has_changed_status: bool) {
        let Some(Handle(shared)) = self.0.as_deref() else { return };
        shared.queue().add_condition(pod, condition, has_changed_status);
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
        write: impl Fn(&Report) -> Result<(), Error> + Clone + Send + 'static,
        retry_delay: Duration,
    ) {
        let mut logged = [None, None];
        while let Some(report) = self.next().await {
            let write = write.clone();
            let written = spawn_blocking(move || {
                let result = write(&report);
                (report, result)
            });
            // Fails only if the write panics.
            let Ok((report, result)) = written.await else { continue };
            log(&report, result.as_ref().err(), &mut logged);
            let code = result.err().map(|error| error.code);
            let is_unavailable = code == Some(Code::TryAgain);
            self.record(report, code, retry_delay);
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
    fn record(&self, report: Report, code: Option<Code>, retry_delay: Duration) {
        let mut queue = self.queue();
        let is_unavailable = code == Some(Code::TryAgain);
        if !is_unavailable {
            queue.record(&report, Instant::now());
        }
        let is_refused = code == Some(Code::Forbidden) && matches!(report, Report::Condition(..));
        if is_refused {
            queue.pause_conditions(Instant::now() + retry_delay);
        }
        if is_refused || is_unavailable {
            queue.put_back(report);
        }
    }

    /// Waits for the next report; `None` if the queue has ended.
    async fn next(&self) -> Option<Report> {
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

/// Logs a failure, once until a report of this kind is accepted or fails for another reason. Messages contain the pod,
/// so only the code tells whether the reason is the same.
fn log(report: &Report, error: Option<&Error>, logged: &mut [Option<Code>; 2]) {
    let (what, logged) = match report {
        Report::Event(..) => ("Event not created", &mut logged[0]),
        Report::Condition(..) => ("condition detour.io/policy not set", &mut logged[1]),
    };
    match error {
        // The pod was deleted, which ends its reports.
        Some(error) if error.code == Code::PodUnknown => tracing::debug!("{what}: {error}"),
        Some(error) if *logged != Some(error.code) => {
            tracing::warn!("{what}: {error}");
            *logged = Some(error.code);
        }
        Some(error) => tracing::debug!("{what}: {error}"),
        None => *logged = None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl PodReports {
        /// Returns the reasons of the Events that wait.
        pub(in crate::agent) fn waiting_events(&self) -> Vec<String> {
            let Some(Handle(shared)) = self.0.as_deref() else { return Vec::new() };
            shared.queue().waiting_events().map(|event| event.reason.to_string()).collect()
        }
    }

    fn pod(name: &str) -> PodRef {
        PodRef { namespace: "shop".into(), name: name.into(), uid: Some("u".into()) }
    }

    fn event(reason: &'static str) -> Event {
        Event { warning: false, reason: reason.into(), message: String::new() }
    }

    fn condition(reason: &str) -> PolicyCondition {
        PolicyCondition { reason: reason.into(), ..PolicyCondition::default() }
    }

    fn text(report: &Report) -> String {
        match report {
            Report::Event(pod, event) => format!("{} {}", pod.name, event.reason),
            Report::Condition(pod, condition, _) => format!("{} = {}", pod.name, condition.reason),
        }
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
        let write = move |report: &Report| {
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

    #[test]
    fn only_the_latest_condition_of_a_pod_is_written() {
        let reports = PodReports::new();
        reports.condition(&pod("a"), condition("Older"), true);
        reports.condition(&pod("a"), condition("Current"), true);
        reports.condition(&pod("b"), condition("Older"), true);
        let written = written(reports, move |number, reports| {
            if number == 1 {
                // The condition that is being written is outdated.
                reports.condition(&pod("a"), condition("Rejected"), true);
                return Err(Error::new(Code::TryAgain, "no answer"));
            }
            Ok(())
        });
        assert_eq!(written, ["a = Current", "b = Older", "a = Rejected"], "the pods take turns");
    }

    #[test]
    fn refused_conditions_take_turns_until_they_are_accepted() {
        let reports = PodReports::new();
        for name in ["a", "b", "c"] {
            reports.condition(&pod(name), condition("Older"), true);
        }
        let written = written(reports, move |number, reports| {
            if number == 3 {
                // It replaces the refused one, and its status still differs from that in the cluster.
                reports.condition(&pod("b"), condition("Rejected"), false);
            }
            if number <= 5 { Err(Error::new(Code::Forbidden, "refused")) } else { Ok(()) }
        });
        let expected = [
            "a = Older",
            "b = Older",
            "c = Older",
            "a = Older",
            "b = Rejected",
            "c = Older",
            "a = Older",
            "b = Rejected",
        ];
        assert_eq!(written, expected);
    }

    #[test]
    fn events_and_conditions_alternate() {
        let reports = PodReports::new();
        for name in ["a", "b"] {
            reports.event(&pod(name), event("E"));
            reports.condition(&pod(name), condition("Current"), false);
        }
        assert_eq!(written(reports, |_, _| Ok(())), ["a E", "a = Current", "b E", "b = Current"]);
    }
}
