//! The taint that keeps new pods off a node on which the plugin is not ready.

use crate::cluster::{NodeTaints, ServiceAccount};
use crate::cni::{Code, Error};
use serde_json::{Value, json};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// New pods are not scheduled onto the node; running ones stay (k8s.io/api, `core/v1`: `TaintEffectNoSchedule`).
const EFFECT: &str = "NoSchedule";
/// The pause after a first failure, doubled after each further one.
const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The number of conflicts in a row that do not count as failures: kubelets and controllers change a node that joins
/// at the same time.
const MAX_CONFLICTS: u32 = 10;
/// The interval after which the node is read again: a node that registers again gets its taints from the kubelet.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);
/// How long an agent that ends waits for its last change.
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// A taint of a node.
#[derive(Debug, Clone)]
pub struct Taint {
    /// The key, for example `cni.istio.io/not-ready`.
    pub key: String,
    /// The name of the node.
    pub node: String,
    /// The account that changes the node.
    pub account: ServiceAccount,
}

/// A handle of the thread that adds and removes the taint.
#[derive(Debug)]
pub struct TaintController {
    /// Whether the node has the taint.
    desired: Sender<bool>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl Taint {
    /// Starts the thread. The node does not change until the first call of [`TaintController::set_ready`].
    ///
    /// # Errors
    /// The thread can't be created.
    pub fn start(self) -> io::Result<TaintController> {
        let ((sender, desired), (end, ended)) = (channel(), channel::<()>());
        let work = move || {
            self.reconcile_loop(&desired);
            drop(end);
        };
        thread::Builder::new().name("taint".into()).spawn(work)?;
        Ok(TaintController { desired: sender, ended })
    }

    fn reconcile_loop(&self, updates: &Receiver<bool>) {
        let (mut desired, mut applied, mut failures, mut logged) = (None, None, 0, String::new());
        let mut checked = Instant::now();
        loop {
            let pause = pause(failures);
            let update = if desired == applied {
                updates.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                updates.recv_timeout(pause)
            };
            match update {
                // Only the last update counts.
                Ok(update) => desired = updates.try_iter().last().or(Some(update)),
                Err(RecvTimeoutError::Disconnected) if desired == applied => return,
                Err(RecvTimeoutError::Disconnected) => thread::park_timeout(pause),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if checked.elapsed() >= RESYNC_INTERVAL {
                applied = None;
            }
            let Some(is_tainted) = desired.filter(|_| desired != applied) else { continue };
            match self.reconcile(is_tainted) {
                Ok(changed) => {
                    (applied, failures, checked) = (desired, 0, Instant::now());
                    logged.clear();
                    if changed {
                        let change = if is_tainted { "added to" } else { "removed from" };
                        tracing::info!("taint {} was {change} node {}", self.key, self.node);
                    }
                }
                Err(error) => {
                    failures += 1;
                    if logged != error.to_string() {
                        let change = if is_tainted { "add" } else { "remove" };
                        tracing::warn!("can't {change} taint {} of node {}: {error}", self.key, self.node);
                        logged = error.to_string();
                    }
                }
            }
        }
    }

    /// Adds or removes the taint. Returns whether that changed the node.
    fn reconcile(&self, is_tainted: bool) -> Result<bool, Error> {
        let mut conflicts = 0;
        loop {
            let node = self.account.node(&self.node)?;
            let Some(taints) = changed(&node.taints, &self.key, is_tainted) else { return Ok(false) };
            match self.account.taint(&NodeTaints { taints, ..node }) {
                Ok(()) => return Ok(true),
                Err(error) if error.code == Code::PodUnknown && conflicts < MAX_CONFLICTS => {
                    conflicts += 1;
                    thread::park_timeout(MIN_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl TaintController {
    /// Sets whether the plugin is ready: the taint is removed then, and added otherwise.
    pub fn set_ready(&self, is_ready: bool) {
        // Fails only if the thread has ended.
        let _ = self.desired.send(!is_ready);
    }

    /// Removes the taint, and waits for it: the plugin is removed from the node, and no other process would remove the
    /// taint later.
    pub fn remove(self) {
        self.set_ready(true);
        drop(self.desired);
        if self.ended.recv_timeout(END_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "can't remove the node's taint within {} s; remove it with kubectl taint",
                END_TIMEOUT.as_secs()
            );
        }
    }
}

/// Returns the pause before the next attempt after `failures` in a row.
fn pause(failures: u32) -> Duration {
    MIN_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MAX_PAUSE)
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
