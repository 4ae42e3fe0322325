//! The Events of pods whose containers are excluded.

use crate::cluster::Event;

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
