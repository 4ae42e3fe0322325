//! Events of the agent's own pod, which report a configuration that can't be used.

use crate::cluster::{Event, ServiceAccount};
use crate::cni::Code;
use crate::pod::{Pod, PodRef};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use std::{io, thread};

/// The pause after an Event that the API server did not accept.
const RETRY_DELAY: Duration = Duration::from_secs(30);

/// The agent's own pod, and the account that creates its Events (`create events`).
#[derive(Debug, Clone)]
pub struct OwnPod {
    /// The account.
    pub account: ServiceAccount,
    /// The pod; `kubectl describe` finds Events by its UID.
    pub pod: PodRef,
}

/// A handle of the thread that creates the Events, so that an unavailable API server delays nothing else. Dropping it
/// ends the thread.
pub(super) struct Events {
    sender: Sender<Option<Event>>,
    latest: Option<Event>,
}

impl OwnPod {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread can't be created.
    pub(super) fn events(&self) -> io::Result<Events> {
        let ((sender, events), own) = (channel(), self.clone());
        thread::Builder::new().name("events".into()).spawn(move || own.create_events(&events))?;
        Ok(Events { sender, latest: None })
    }

    /// Creates the latest Event, with retries until the API server accepts it or it is outdated.
    fn create_events(&self, events: &Receiver<Option<Event>>) {
        let PodRef { namespace, name, uid } = self.pod.clone();
        let pod = Pod { namespace, name, uid, ..Pod::default() };
        let mut pending = None;
        loop {
            let next = match &pending {
                Some(_) => events.recv_timeout(RETRY_DELAY),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                Ok(event) => pending = event,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let Some(event) = &pending else { continue };
            match self.account.tell(&pod, event) {
                Ok(()) => pending = None,
                Err(error) if error.code == Code::TryAgain => tracing::debug!("{error}"),
                Err(error) => {
                    tracing::warn!("{error}");
                    pending = None;
                }
            }
        }
    }
}

impl Events {
    /// Reports the current problem, once until it changes; `None` if there is no problem.
    pub(super) fn report(&mut self, event: Option<Event>) {
        if self.latest == event {
            return;
        }
        self.latest.clone_from(&event);
        // The thread ends only when this value is dropped.
        let _ = self.sender.send(event);
    }
}
