//! What the agent does when the runtime reports a container.

use super::reconciler::Reconciler;
use crate::agent::nri::{NriContainer, NriHandler, NriPod};
use std::time::Instant;

impl NriHandler for Reconciler {
    fn synchronize(&mut self, pods: Vec<NriPod>, containers: Vec<NriContainer>) {
        self.registry.synchronize(&pods, containers);
    }

    fn start(&mut self, pod: &NriPod, container: &NriContainer) {
        let started = Instant::now();
        self.registry.add(pod, container, true);
        if let Some(result) = self.exclude(pod, container) {
            self.metrics.container_start(result);
        }
        self.metrics.nri_request(started.elapsed());
    }

    fn started(&mut self, pod: &NriPod, container: &NriContainer) {
        self.registry.add(pod, container, false);
    }

    fn stopped(&mut self, pod: &NriPod, container: &NriContainer) {
        self.registry.stopped(pod, container);
    }

    fn removed(&mut self, pod: &NriPod, container: &NriContainer) {
        self.registry.removed(pod, container);
    }
}

impl Reconciler {
    /// Lets the container's traffic bypass the sidecar if it is excluded. Returns the result for the metric; `None` if
    /// it is not excluded, or has exited already.
    fn exclude(&self, pod: &NriPod, container: &NriContainer) -> Option<&'static str> {
        let name = &container.name;
        let result = match self.find(&pod.id) {
            Ok(None) => return None,
            Ok(Some(excluded)) => {
                excluded.policy().containers.iter().find(|exclusion| exclusion.name == *name)?;
                let began = Instant::now();
                let result = self.reconcile(&pod.id, excluded, self.registry.start_timeout(&pod.id));
                self.registry.waited(&pod.id, began.elapsed());
                result
            }
            Err(error) if self.registry.excludes(&pod.id, name) == Some(true) => Err(error),
            Err(error) => {
                self.registry.excludes(&pod.id, name).is_none().then_some(())?;
                let pod = format!("{}/{}", pod.namespace, pod.name);
                tracing::warn!(pod, container = name, "can't read which containers are excluded: {error}");
                return None;
            }
        };
        match result {
            // An error may be about another container of the pod.
            _ if self.registry.is_bypassing(&pod.id, &container.id) => Some("exempt"),
            _ if !self.registry.runs(&pod.id, &container.id) => None,
            Ok(()) => Some("captured"),
            Err(error) => {
                self.report_failure(&pod.id, &error.to_string());
                self.report_capture(&pod.id, name, &error.to_string());
                Some("error")
            }
        }
    }
}
