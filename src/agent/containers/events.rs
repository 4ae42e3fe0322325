//! Events of pods whose containers are excluded, and the thread that creates them.

use crate::cluster::{Event, ServiceAccount};
use crate::cni::Code;
use crate::pod::{Pod, PodRef};
use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

/// The limit of Events that wait for the API server.
const MAX_WAITING: usize = 256;
/// The pause after an Event that the API server did not accept.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// Returns the Event for a container whose traffic is captured from its start on.
pub(super) fn captured(container: &str, why: &str) -> Event {
    let message = format!("container {container} started captured: {why}");
    Event { warning: true, reason: "DetourContainerCaptured".into(), message }
}

/// Returns the Event for a container whose bypass has ended.
pub(super) fn bypass_ended(container: &str) -> Event {
    let message = format!(
        "container {container}: the proxy accepts connections, so the bypass has ended; new connections are redirected to \
         the sidecar, established ones continue"
    );
    Event { warning: false, reason: "DetourBypassEnded".into(), message }
}

/// The Events that wait for the API server. The thread ends with the last clone.
#[derive(Clone)]
pub(super) struct EventQueue(Option<SyncSender<(PodRef, Event)>>);

impl EventQueue {
    /// Starts the thread; without an account, Events are only logged.
    ///
    /// # Errors
    /// The thread can't be created.
    pub(super) fn start(account: Option<ServiceAccount>) -> io::Result<Self> {
        let Some(account) = account else { return Ok(Self(None)) };
        let (sender, events) = sync_channel(MAX_WAITING);
        let create = move || {
            create_events(&events, |pod, event| {
                account.tell(pod, event).map_err(|error| (error.code, error.to_string()))
            })
        };
        thread::Builder::new().name("pod-events".into()).spawn(create)?;
        Ok(Self(Some(sender)))
    }

    /// Adds an Event without waiting; drops it if the queue is full.
    pub(super) fn push(&self, pod: &PodRef, event: Event) {
        let Some(sender) = &self.0 else { return };
        if let Err(TrySendError::Full(_)) = sender.try_send((pod.clone(), event)) {
            tracing::warn!("Event dropped: {MAX_WAITING} Events wait for the API server");
        }
    }
}

/// Creates Events in order. While the API server does not answer, they wait.
fn create_events(events: &Receiver<(PodRef, Event)>, tell: impl Fn(&Pod, &Event) -> Result<(), (Code, String)>) {
    let (mut waiting, mut logged) = (VecDeque::new(), String::new());
    loop {
        let next = match waiting.len() {
            0 => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            _ => events.recv_timeout(RETRY_DELAY),
        };
        match next {
            Ok(event) => waiting.push_back(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        waiting.extend(events.try_iter().take(MAX_WAITING.saturating_sub(waiting.len())));
        while let Some((pod, event)) = waiting.front() {
            let PodRef { namespace, name, uid } = pod.clone();
            let result = tell(&Pod { namespace, name, uid, ..Pod::default() }, event);
            let Err((code, error)) = result else {
                logged.clear();
                waiting.pop_front();
                continue;
            };
            if logged != error {
                tracing::warn!("{error}");
                logged = error;
            }
            if code == Code::TryAgain {
                break;
            }
            waiting.pop_front();
        }
        while waiting.len() > MAX_WAITING {
            waiting.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn pod(name: &str) -> PodRef {
        PodRef { namespace: "shop".into(), name: name.into(), uid: Some("u".into()) }
    }

    #[test]
    fn events_wait_in_order_while_the_api_server_does_not_answer() {
        let (sender, events) = sync_channel(MAX_WAITING);
        let (told, sender) = (RefCell::new(Vec::new()), RefCell::new(Some(sender)));
        for name in ["a", "b"] {
            sender.borrow().as_ref().expect("open").send((pod(name), bypass_ended("vault"))).expect("received");
        }
        create_events(&events, |pod, event| {
            let mut told = told.borrow_mut();
            told.push(format!("{} {}", pod.name, event.reason));
            match told.len() {
                1 => {
                    // The next Event ends the pause.
                    let last = sender.borrow_mut().take().expect("open");
                    last.send((self::pod("c"), captured("vault", "why"))).expect("received");
                    Err((Code::TryAgain, "no answer".into()))
                }
                3 => Err((Code::Forbidden, "refused".into())),
                _ => Ok(()),
            }
        });
        let ended = |name: &str| format!("{name} DetourBypassEnded");
        assert_eq!(told.into_inner(), [ended("a"), ended("a"), ended("b"), "c DetourContainerCaptured".to_owned()]);
    }

    #[test]
    fn an_event_that_does_not_fit_is_dropped_without_waiting() {
        let (sender, events) = sync_channel(1);
        let queue = EventQueue(Some(sender));
        for name in ["a", "b"] {
            queue.push(&pod(name), bypass_ended("vault"));
        }
        assert_eq!(events.try_iter().map(|(pod, _)| pod.name).collect::<Vec<_>>(), ["a"]);
    }
}
