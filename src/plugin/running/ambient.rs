//! Whether a pod that is enrolled in Istio's ambient mesh is in it: istio-cni's redirection, and ztunnel's listeners in the
//! pod. Both are Istio's, so they are only read.

use crate::cni::Error;
use crate::firewall::{AmbientRedirection, LiveRuleset};
use crate::netns::listens;
use crate::plugin::open_netns;
use std::path::Path;
use std::time::Duration;

/// The ports on which ztunnel listens in each pod: outbound, inbound, HBONE (istio/ztunnel, `ARCHITECTURE.md`).
const PORTS: [u16; 3] = [15001, 15006, 15008];

/// Returns what the pod in the network namespace at `netns` lacks, in words; `None` if its traffic reaches ztunnel.
///
/// # Errors
/// [`Code::TryAgain`](crate::cni::Code::TryAgain): another call locks the network namespace longer than `timeout`. The
/// network namespace is gone, or its rules or listeners can't be read.
pub fn lacks_of_ambient(netns: &Path, timeout: Duration) -> Result<Option<String>, Error> {
    open_netns::at(netns)?.enter(timeout, || {
        let mut lacking = Vec::new();
        if AmbientRedirection::of(&LiveRuleset::now()?).is_none() {
            lacking.push("istio-cni's redirection".to_owned());
        }
        for port in PORTS {
            if !listens(port)? {
                lacking.push(format!("ztunnel's listener on port {port}"));
            }
        }
        Ok((!lacking.is_empty()).then(|| lacking.join(", ")))
    })
}
