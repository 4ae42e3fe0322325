//! The pods that wait for the worker: each once, and no more than so many.

use std::collections::VecDeque;

/// As many are looked after before the node's pods are asked for anew. A kubelet's default for all pods of
/// a node is 110 (`maxPods`), OpenShift's 250, and 500 is the most that it is tested with.
pub(super) const LENGTH: usize = 512;

/// UIDs, first come first served.
#[derive(Debug)]
pub(super) struct RepairQueue {
    waiting: VecDeque<String>,
    length: usize,
}

impl RepairQueue {
    /// One that holds so many.
    pub(super) fn new(length: usize) -> Self {
        Self { waiting: VecDeque::new(), length }
    }

    /// Has a pod wait; one that waits already does so once. Gives whether there was room.
    pub(super) fn push(&mut self, uid: &str) -> bool {
        if self.waiting.iter().any(|other| other == uid) {
            return true;
        }
        let room = self.waiting.len() < self.length;
        if room {
            self.waiting.push_back(uid.to_owned());
        }
        room
    }

    /// Whether nobody waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The one that has waited longest.
    pub(super) fn pop(&mut self) -> Option<String> {
        self.waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_waits_once_and_in_its_turn() {
        let mut queue = RepairQueue::new(2);
        assert!(queue.push("a") && queue.push("b") && queue.push("a"));
        assert!(!queue.push("c"), "it is full");
        assert_eq!(queue.pop().as_deref(), Some("a"));
        assert!(queue.push("c"));
        assert_eq!((queue.pop().as_deref(), queue.pop().as_deref(), queue.pop()), (Some("b"), Some("c"), None));
    }
}
