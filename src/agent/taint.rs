//! The taint that keeps new pods off a node on which the plugin is not ready.

use crate::cluster::Api;
use crate::cni::Code;
use crate::wait::Backoff;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{sleep, timeout};

/// New pods are not scheduled onto the node; running ones stay (k8s.io/api, `core/v1`: `TaintEffectNoSchedule`).
const EFFECT: &str = "NoSchedule";
/// The pauses after failures. Kubelets and controllers change a node that joins at the same time, so conflicts are usual.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// How long an agent that ends waits for its last change.
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// A handle of the task that adds and removes the taint.
#[derive(Debug)]
pub struct TaintController {
    /// Whether the node has the taint; `None` while that is not known.
    desired: watch::Sender<Option<bool>>,
    task: JoinHandle<()>,
}

/// Adds and removes the taint `key` of `node`, until the controller is dropped and its last state is applied.
async fn run(account: Api, node: String, key: String, mut updates: watch::Receiver<Option<bool>>) {
    let (mut backoff, mut logged) = (BACKOFF, String::new());
    loop {
        let desired = updates.wait_for(Option::is_some).await.map(|desired| *desired == Some(true));
        let Ok(is_tainted) = desired else { return };
        match account.change_taints(&node, |taints| changed(taints, &key, is_tainted)).await {
            Ok(has_changed) => {
                if has_changed {
                    let change = if is_tainted { "added to" } else { "removed from" };
                    tracing::info!("taint {key} was {change} node {node}");
                }
                backoff.reset();
                logged.clear();
                if updates.changed().await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let is_conflict = error.code == Code::PodUnknown;
                if !is_conflict && logged != error.to_string() {
                    let change = if is_tainted { "add" } else { "remove" };
                    tracing::warn!("can't {change} taint {key} of node {node}: {error}");
                    logged = error.to_string();
                }
                let pause = backoff.pause(Instant::now());
                if let Ok(Err(_)) = timeout(pause, updates.changed()).await {
                    // The last state is applied before the task ends.
                    sleep(pause).await;
                }
            }
        }
    }
}

impl TaintController {
    /// Starts the task for a taint of `node`. The node does not change until the first call of [`Self::set_ready`].
    #[must_use]
    pub fn start(account: Api, node: String, key: String) -> Self {
        let (desired, updates) = watch::channel(None);
        Self { desired, task: spawn_local(run(account, node, key, updates)) }
    }

    /// Sets whether the plugin is ready: the taint is removed then, and added otherwise.
    pub fn set_ready(&self, is_ready: bool) {
        self.desired.send_if_modified(|desired| desired.replace(!is_ready) != Some(!is_ready));
    }

    /// Removes the taint, and waits for it: the plugin is removed from the node, and no other process would remove the
    /// taint later.
    pub async fn remove(self) {
        self.set_ready(true);
        drop(self.desired);
        if timeout(END_TIMEOUT, self.task).await.is_err() {
            tracing::warn!(
                "can't remove the node's taint within {} s; remove it with kubectl taint",
                END_TIMEOUT.as_secs()
            );
        }
    }
}

/// Returns the taints with or without ours; `None` if that changes nothing. The other taints stay in their order.
fn changed(taints: &[Value], key: &str, is_tainted: bool) -> Option<Vec<Value>> {
    let is_ours = |taint: &&Value| taint["key"] == key && taint["effect"] == EFFECT;
    match (taints.iter().any(|taint| is_ours(&taint)), is_tainted) {
        (false, true) => Some(taints.iter().cloned().chain([json!({"key": key, "effect": EFFECT})]).collect()),
        (true, false) => Some(taints.iter().filter(|taint| !is_ours(taint)).cloned().collect()),
        (true, true) | (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_taint_is_added_and_removed() {
        let key = "cni.istio.io/not-ready";
        let foreign = [
            json!({"key": "a", "effect": EFFECT, "value": "1", "timeAdded": "2026-01-01T00:00:00Z"}),
            json!({"key": key, "effect": "NoExecute"}),
        ];
        let with = changed(&foreign, key, true).expect("a change");
        assert_eq!(with[..2], foreign);
        assert_eq!(with[2], json!({"key": key, "effect": "NoSchedule"}));
        assert_eq!(changed(&with, key, true), None);
        assert_eq!(changed(&with, key, false).expect("a change"), foreign);
        assert_eq!(changed(&foreign, key, false), None);
        let valued = [json!({"key": key, "effect": EFFECT, "value": "kubelet"}), foreign[0].clone()];
        assert_eq!(changed(&valued, key, false).expect("a change"), foreign[..1], "a taint with a value is ours too");
    }
}
