//! The taint that keeps pods off a node whose plugin isn't ready.

use crate::cluster::{NodeTaints, ServiceAccount};
use crate::cni::{Code, Error};
use serde_json::{Value, json};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// New pods are not scheduled onto the node; those that run are left alone (k8s.io/api, `core/v1`:
/// `TaintEffectNoSchedule`).
const EFFECT: &str = "NoSchedule";
/// The pause after a first failure.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The number of conflicts in a row that are no failure: another process changed the node at the same time,
/// as kubelets and controllers do on a node that joins.
const CONFLICTS: u32 = 10;
/// After so long the node is looked at again: one that is registered anew has what its kubelet gives it.
const AGAIN: Duration = Duration::from_secs(600);
/// How long an agent that ends waits for its last change.
const LAST: Duration = Duration::from_secs(3);

/// Which taint, on which node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    /// Its key, `cni.istio.io/not-ready` for one.
    pub key: String,
    /// The node's name.
    pub node: String,
    /// Whom the node is changed through.
    pub account: ServiceAccount,
}

/// Told of the plugin's state; a thread has the node show it.
#[derive(Debug)]
pub struct TaintController {
    wanted: Sender<bool>,
    /// Answers when the thread has ended, and then only.
    ended: Receiver<()>,
}

impl Taint {
    /// Keeps the taint from now on. Until the keeper is told something, the node stays as it is.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn keep(self) -> io::Result<TaintController> {
        let ((wanted, told), (end, ended)) = (channel(), channel::<()>());
        let work = move || {
            self.follow(&told);
            drop(end);
        };
        thread::Builder::new().name("taint".into()).spawn(work)?;
        Ok(TaintController { wanted, ended })
    }

    fn follow(&self, told: &Receiver<bool>) {
        let (mut wanted, mut shown, mut failures, mut said) = (None, None, 0, String::new());
        let mut looked = Instant::now();
        loop {
            let pause = pause(failures);
            let news = if wanted == shown {
                told.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                told.recv_timeout(pause)
            };
            match news {
                Ok(news) => wanted = Some(news),
                Err(RecvTimeoutError::Disconnected) if wanted == shown => return,
                Err(RecvTimeoutError::Disconnected) => thread::park_timeout(pause),
                Err(RecvTimeoutError::Timeout) => {}
            }
            // Only the last of what was told meanwhile counts.
            wanted = told.try_iter().last().or(wanted);
            if looked.elapsed() >= AGAIN {
                shown = None;
            }
            let Some(is_wanted) = wanted.filter(|_| wanted != shown) else { continue };
            match self.show(is_wanted) {
                Ok(changed) => {
                    (shown, failures, looked) = (wanted, 0, Instant::now());
                    said.clear();
                    if changed {
                        let what = if is_wanted { "put on" } else { "taken off" };
                        tracing::info!("taint {} is {what} node {}", self.key, self.node);
                    }
                }
                Err(error) => {
                    failures += 1;
                    if said != error.to_string() {
                        tracing::warn!("taint {}: {error}", self.key);
                        said = error.to_string();
                    }
                }
            }
        }
    }

    /// Has the node show it or not; gives whether that was a change.
    fn show(&self, wanted: bool) -> Result<bool, Error> {
        let mut conflicts = 0;
        loop {
            let node = self.account.node(&self.node)?;
            let Some(taints) = changed(&node.taints, &self.key, wanted) else { return Ok(false) };
            match self.account.taint(&NodeTaints { taints, ..node }) {
                Ok(()) => return Ok(true),
                Err(error) if error.code == Code::PodUnknown && conflicts < CONFLICTS => {
                    conflicts += 1;
                    thread::park_timeout(FIRST_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl TaintController {
    /// Whether the plugin is ready.
    pub fn tell(&self, is_ready: bool) {
        // Where the thread is gone, nobody is left to be told.
        let _ = self.wanted.send(!is_ready);
    }

    /// Takes the taint off for good: the plugin is taken off the node, and nobody would do it later.
    pub fn end(self) {
        self.tell(true);
        drop(self.wanted);
        if self.ended.recv_timeout(LAST) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the node's taint could not be taken off in {} s; see kubectl taint", LAST.as_secs());
        }
    }
}

/// The pause before the next try, after so many failures in a row.
fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LONGEST_PAUSE)
}

/// The taints with ours or without it; `None` where they are so already. All others stay, as and where they
/// are.
fn changed(taints: &[Value], key: &str, wanted: bool) -> Option<Vec<Value>> {
    let is_ours = |taint: &&Value| taint["key"] == key && taint["effect"] == EFFECT;
    match (taints.iter().any(|taint| is_ours(&taint)), wanted) {
        (false, true) => Some(taints.iter().cloned().chain([json!({"key": key, "effect": EFFECT})]).collect()),
        (true, false) => Some(taints.iter().filter(|taint| !is_ours(taint)).cloned().collect()),
        (true, true) | (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ours_comes_and_goes() {
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
        assert_eq!(changed(&valued, key, false).expect("a change"), foreign[..1], "one with a value is ours too");
    }
}
