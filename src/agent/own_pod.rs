//! Events of the agent's own pod: what is wrong with what the agent is asked for.

use crate::cluster::{Event, ServiceAccount};
use crate::cni::Code;
use crate::pod::{Pod, PodRef};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use std::{io, thread};

/// The pause after an Event that the API did not take.
const RETRY: Duration = Duration::from_secs(30);

/// The agent's own pod, and the account that creates its Events (`create events`).
#[derive(Debug, Clone)]
pub struct OwnPod {
    /// Who creates them.
    pub account: ServiceAccount,
    /// The pod; `kubectl describe` finds Events by its UID.
    pub pod: PodRef,
}

/// A thread that creates the Events: an API that does not answer delays nothing else. It ends with this value.
pub(super) struct Events {
    sender: Sender<Option<Event>>,
    latest: Option<Event>,
}

impl OwnPod {
    /// Starts the thread.
    ///
    /// # Errors
    /// There can't be another thread.
    pub(super) fn events(&self) -> io::Result<Events> {
        let ((sender, events), own) = (channel(), self.clone());
        thread::Builder::new().name("events".into()).spawn(move || own.report(&events))?;
        Ok(Events { sender, latest: None })
    }

    /// Creates the latest Event, again until the API takes it or it is out of date.
    fn report(&self, events: &Receiver<Option<Event>>) {
        let PodRef { namespace, name, uid } = self.pod.clone();
        let pod = Pod { namespace, name, uid, ..Pod::default() };
        let mut waiting = None;
        loop {
            let next = match &waiting {
                Some(_) => events.recv_timeout(RETRY),
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match next {
                Ok(event) => waiting = event,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let Some(event) = &waiting else { continue };
            match self.account.tell(&pod, event) {
                Ok(()) => waiting = None,
                Err(error) if error.code == Code::TryAgain => tracing::debug!("{error}"),
                Err(error) => {
                    tracing::warn!("{error}");
                    waiting = None;
                }
            }
        }
    }
}

impl Events {
    /// Reports what is wrong now, once until that changes; `None`: nothing.
    pub(super) fn tell(&mut self, event: Option<Event>) {
        if self.latest == event {
            return;
        }
        self.latest.clone_from(&event);
        // The thread ends only with this value.
        let _ = self.sender.send(event);
    }
}
