//! The thread that ends bypasses, removes the elements of exited containers and adds lost ones.

use super::reconciler::{Reconciler, captured};
use super::registry::Capture;
use crate::cni::Code;
use crate::state::ROOT;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant, SystemTime};

/// The interval in which the saved state is searched for pods that exclude containers.
const SCAN_INTERVAL: Duration = Duration::from_millis(500);
/// How long the kernel may take for the changes of one pod before the next one is checked.
const CHANGE_TIMEOUT: Duration = Duration::from_millis(200);
/// The pause after saved state that can't be read.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// The state of the thread.
pub(super) struct Watcher {
    reconciler: Reconciler,
    /// What is known about the saved state of each sandbox.
    scanned: BTreeMap<String, Scanned>,
    logged: String,
}

struct Scanned {
    modified: Option<SystemTime>,
    /// When to read it again after a failure.
    retry: Option<Instant>,
    failure: String,
}

impl Watcher {
    pub(super) fn new(reconciler: Reconciler) -> Self {
        Self { reconciler, scanned: BTreeMap::new(), logged: String::new() }
    }

    /// Runs until the registry ends.
    pub(super) fn run(mut self) {
        let mut next_scan = Instant::now();
        loop {
            if Instant::now() >= next_scan {
                self.scan();
                next_scan = Instant::now() + SCAN_INTERVAL;
            }
            let Some(due) = self.reconciler.registry.wait(next_scan.saturating_duration_since(Instant::now())) else {
                return;
            };
            due.iter().for_each(|sandbox_id| self.reconcile(sandbox_id));
            self.report_disconnection();
        }
    }

    /// Finds the sandboxes whose saved state has changed.
    fn scan(&mut self) {
        let directories = match sandbox_directories() {
            Ok(directories) => directories,
            Err(error) => {
                let error = format!("{ROOT}: can't read the saved state: {error}");
                if self.logged != error {
                    tracing::warn!("{error}");
                    self.logged = error;
                }
                return;
            }
        };
        self.logged.clear();
        // Only sandboxes of an earlier scan: the saved state of others may be newer than the list of directories.
        for id in self.scanned.keys().filter(|id| !directories.contains_key(*id)) {
            self.reconciler.registry.set_policy(id, None);
        }
        self.scanned.retain(|id, _| directories.contains_key(id));
        for (id, modified) in directories {
            let known = self.scanned.get(&id);
            let is_due = known.is_none_or(|known| {
                known.modified != modified || known.retry.is_some_and(|retry| retry <= Instant::now())
            });
            if !is_due {
                continue;
            }
            let failure = match self.reconciler.find(&id) {
                Ok(_) => String::new(),
                // `reconcile` reports it if an excluded container runs.
                Err(error) if error.code == Code::InvalidNetns => String::new(),
                Err(error) => error.to_string(),
            };
            if !failure.is_empty() && known.is_none_or(|known| known.failure != failure) {
                tracing::warn!(sandbox = id, "can't read which containers are excluded: {failure}");
            }
            let retry = (!failure.is_empty()).then(|| Instant::now() + RETRY_DELAY);
            self.scanned.insert(id, Scanned { modified, retry, failure });
        }
    }

    fn reconcile(&self, sandbox_id: &str) {
        let registry = &self.reconciler.registry;
        let Err(error) = self.reconciler.reconcile(sandbox_id, None, CHANGE_TIMEOUT) else { return };
        let is_slow = error.code == Code::TryAgain;
        let error = error.to_string();
        self.reconciler.report_failure(sandbox_id, &error);
        if is_slow {
            // The change continues.
            return;
        }
        for container in registry.observe(sandbox_id).into_iter().flat_map(|observed| observed.named) {
            if !registry.is_bypassing(sandbox_id, &container.id) {
                self.reconciler.report_capture(sandbox_id, &container.name, &error);
            }
        }
    }

    /// Reports the excluded containers that start captured because the runtime does not report them.
    fn report_disconnection(&self) {
        for Capture { sandbox_id, container, why } in self.reconciler.registry.captured_by_disconnection() {
            let pod = self.reconciler.pod(&sandbox_id);
            let why = format!("the agent is not registered at the container runtime: {why}");
            self.reconciler.report_event(pod.as_ref(), &sandbox_id, captured(&container, &why));
        }
    }
}

/// Returns the sandboxes with saved state, each with the time of its last change.
fn sandbox_directories() -> io::Result<BTreeMap<String, Option<SystemTime>>> {
    let entries = match fs::read_dir(ROOT) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let mut found = BTreeMap::new();
    for entry in entries {
        let entry = entry?;
        if let Some(id) = entry.file_name().to_str().filter(|name| !name.starts_with('.')) {
            found.insert(id.to_owned(), entry.metadata().and_then(|metadata| metadata.modified()).ok());
        }
    }
    Ok(found)
}
