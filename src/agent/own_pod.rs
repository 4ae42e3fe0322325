//! Events of the agent's own pod, which report a configuration that can't be used.

use super::runtime::Tasks;
use crate::backoff::Backoff;
use crate::cluster::{Event, ServiceAccount};
use crate::cni::Code;
use crate::pod::PodRef;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// The pauses after an Event that the API server did not accept.
const BACKOFF: Backoff = Backoff::new(Duration::from_secs(20), Duration::from_secs(60));

/// The agent's own pod, and the account that creates its Events (`create events`).
#[derive(Debug, Clone)]
pub struct OwnPod {
    /// The account.
    pub account: ServiceAccount,
    /// The pod; `kubectl describe` finds Events by its UID.
    pub pod: PodRef,
}

/// A handle of the task that creates the Events, so that an unavailable API server delays nothing else. Dropping it ends
/// the task.
pub(super) struct Events(watch::Sender<Option<Event>>);

impl OwnPod {
    /// Starts the task.
    pub(super) fn events(&self, tasks: &Tasks) -> Events {
        let (sender, latest) = watch::channel(None);
        let own = self.clone();
        tasks.start(|| own.create_events(latest));
        Events(sender)
    }

    /// Creates the latest Event, with retries until the API server accepts it or it is outdated.
    async fn create_events(self, mut latest: watch::Receiver<Option<Event>>) {
        let mut backoff = BACKOFF;
        while latest.changed().await.is_ok() {
            backoff.reset();
            loop {
                let event = latest.borrow_and_update().clone();
                let Some(event) = event else { break };
                let own = self.clone();
                let created = spawn_blocking(move || own.account.pod_writer().tell(&own.pod, &event)).await;
                match created {
                    Ok(Err(error)) if error.code == Code::TryAgain => tracing::debug!("{error}"),
                    Ok(Err(error)) => {
                        tracing::warn!("{error}");
                        break;
                    }
                    Ok(Ok(())) | Err(_) => break,
                }
                let pause = backoff.pause(Instant::now());
                if matches!(timeout(pause, latest.changed()).await, Ok(Err(_))) {
                    return;
                }
            }
        }
    }
}

impl Events {
    /// Reports the current problem, once until it changes; `None` if there is no problem.
    pub(super) fn report(&self, event: Option<Event>) {
        self.0.send_if_modified(|latest| {
            let has_changed = *latest != event;
            *latest = event;
            has_changed
        });
    }
}
