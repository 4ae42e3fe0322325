//! Events and conditions of the node's pods, and the thread that writes them to the API server. `queue` decides which
//! one is next.

mod queue;

use crate::cluster::{Event, PodWriter, PolicyCondition, ServiceAccount};
use crate::cni::{Code, Error};
use crate::pod::PodRef;
use queue::{Queue, Report};
use rustix::process::setpriority_process;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The niceness of the thread (sched(7)).
const NICENESS: i32 = 10;
/// The pause after a report that the API server did not accept: of all reports if it did not answer, of conditions if it
/// refused one. It refuses everything while it loads its roles.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// The reports that wait for the API server. The thread ends with the last clone.
#[derive(Debug, Clone)]
pub struct PodReports(Option<Arc<Handle>>);

/// Ends the thread when it is dropped.
#[derive(Debug)]
struct Handle(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl PodReports {
    /// Starts the thread; without an account, reports are dropped.
    ///
    /// # Errors
    /// The thread can't be created.
    pub fn start(account: Option<ServiceAccount>) -> io::Result<Self> {
        let Some(account) = account else { return Ok(Self::none()) };
        let reports = Self::new();
        let shared = reports.0.as_ref().map(|handle| Arc::clone(&handle.0)).unwrap_or_default();
        // Reports that follow one another share a connection; the credentials are read again for the next ones.
        let mut writer: Option<PodWriter> = None;
        let mut write = move |report: Option<&Report>| {
            let Some(report) = report else {
                writer = None;
                return Ok(());
            };
            let open = writer.get_or_insert_with(|| account.pod_writer());
            match report {
                Report::Event(pod, event) => open.tell(pod, event),
                Report::Condition(pod, condition, has_changed) => open.set_condition(pod, condition, *has_changed),
            }
        };
        let work = move || {
            // Of this thread (setpriority(2)). Reports about many pods must not delay the changes that they report.
            if let Err(error) = setpriority_process(None, NICENESS) {
                tracing::debug!("can't lower the priority of the thread for reports: {error}");
            }
            shared.write_all(&mut write, RETRY_DELAY);
        };
        thread::Builder::new().name("pod-reports".into()).spawn(work)?;
        Ok(reports)
    }

    /// Returns reports that are dropped.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    pub(super) fn new() -> Self {
        Self(Some(Arc::new(Handle(Arc::default()))))
    }

    /// Returns the reasons of the Events that wait.
    #[cfg(test)]
    pub(super) fn waiting_events(&self) -> Vec<String> {
        let Some(Handle(shared)) = self.0.as_deref() else { return Vec::new() };
        shared.queue().waiting_events().map(|event| event.reason.to_string()).collect()
    }

    /// Adds an Event without waiting; drops it if too many wait.
    pub(super) fn event(&self, pod: &PodRef, event: Event) {
        let Some(Handle(shared)) = self.0.as_deref() else { return };
        shared.queue().add_event(pod, event);
        shared.changed.notify_all();
    }

    /// Sets a pod's condition without waiting. It replaces one that still waits. `has_changed_status` is whether its
    /// status differs from that in the cluster. Drops it if too many wait.
    pub(super) fn condition(&self, pod: &PodRef, condition: PolicyCondition, has_changed_status: bool) {
        let Some(Handle(shared)) = self.0.as_deref() else { return };
        shared.queue().add_condition(pod, condition, has_changed_status);
        shared.changed.notify_all();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.queue().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes reports until the queue ends. While the API server does not answer, they wait. `write` gets `None` when no
    /// report follows at once.
    fn write_all(&self, write: &mut dyn FnMut(Option<&Report>) -> Result<(), Error>, retry_delay: Duration) {
        let mut logged = [None, None];
        loop {
            let Some(report) = self.wait() else { return };
            let result = write(Some(&report));
            log(&report, result.as_ref().err(), &mut logged);
            let code = result.err().map(|error| error.code);
            let is_unavailable = code == Some(Code::TryAgain);
            let mut queue = self.queue();
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
            let is_idle = is_unavailable || !queue.has_next(Instant::now());
            drop(queue);
            if is_idle {
                // Can't fail.
                let _ = write(None);
            }
            if is_unavailable {
                drop(self.changed.wait_timeout_while(self.queue(), retry_delay, |queue| !queue.has_ended));
            }
        }
    }

    /// Waits for the next report; `None` if the queue has ended.
    fn wait(&self) -> Option<Report> {
        let mut queue = self.queue();
        loop {
            let now = Instant::now();
            if queue.has_ended {
                return None;
            }
            let later = match queue.next(now) {
                Ok(report) => return Some(report),
                Err(later) => later,
            };
            queue = match later {
                Some(due) => {
                    let waited = self.changed.wait_timeout(queue, due.saturating_duration_since(now));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
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
    fn written(reports: PodReports, mut answer: impl FnMut(usize, &PodReports) -> Result<(), Error>) -> Vec<String> {
        let shared = Arc::clone(&reports.0.as_ref().expect("started").0);
        let (mut written, mut handle) = (Vec::new(), Some(reports));
        shared.write_all(
            &mut |report| {
                let Some(report) = report else {
                    // Nothing else waits.
                    if shared.queue().is_empty() {
                        handle = None;
                    }
                    return Ok(());
                };
                written.push(text(report));
                handle.as_ref().map_or(Ok(()), |reports| answer(written.len(), reports))
            },
            Duration::from_millis(1),
        );
        written
    }

    #[test]
    fn reports_wait_in_order_while_the_api_server_does_not_answer() {
        let reports = PodReports::new();
        for name in ["a", "b"] {
            reports.event(&pod(name), event("E"));
        }
        let written = written(reports, |number, reports| match number {
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
        let written = written(reports, |number, reports| {
            if number == 1 {
                // The condition that is being written is outdated.
                reports.condition(&pod("a"), condition("Refused"), true);
                return Err(Error::new(Code::TryAgain, "no answer"));
            }
            Ok(())
        });
        assert_eq!(written, ["a = Current", "b = Older", "a = Refused"], "the pods take turns");
    }

    #[test]
    fn refused_conditions_take_turns_until_they_are_accepted() {
        let reports = PodReports::new();
        for name in ["a", "b", "c"] {
            reports.condition(&pod(name), condition("Older"), true);
        }
        let written = written(reports, |number, reports| {
            if number == 3 {
                // It replaces the refused one, and its status still differs from that in the cluster.
                reports.condition(&pod("b"), condition("Refused"), false);
            }
            if number <= 5 { Err(Error::new(Code::Forbidden, "refused")) } else { Ok(()) }
        });
        let expected = [
            "a = Older",
            "b = Older",
            "c = Older",
            "a = Older",
            "b = Refused",
            "c = Older",
            "a = Older",
            "b = Refused",
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
