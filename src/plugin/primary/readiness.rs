//! The readiness file of the cluster's network: no ADD before it exists.

use crate::cni::{Code, Error, Primary};
use crate::networks::beside;
use crate::wait;
use std::path::Path;
use std::time::Duration;

const POLL_INTERVALS: wait::Intervals = [Duration::from_millis(5), Duration::from_millis(50)];

/// Waits until the readiness file exists, if one is configured.
///
/// # Errors
/// [`Code::TryAgain`]: timeout.
pub(super) fn wait(conf: &Primary) -> Result<(), Error> {
    let Some(file) = conf.readiness_file.as_deref().filter(|file| !file.exists()) else { return Ok(()) };
    tracing::info!("waiting for {}", file.display());
    let found = wait::until(conf.readiness_timeout, POLL_INTERVALS, || Ok::<_, Error>(file.exists().then_some(())))?;
    found.ok_or_else(|| missing(file, Some(conf.readiness_timeout)))
}

/// Checks that the readiness file exists, if one is configured.
///
/// # Errors
/// [`Code::TryAgain`]: file not found.
pub(super) fn check(conf: &Primary) -> Result<(), Error> {
    match conf.readiness_file.as_deref().filter(|file| !file.exists()) {
        Some(file) => Err(missing(file, None)),
        None => Ok(()),
    }
}

fn missing(file: &Path, waited: Option<Duration>) -> Error {
    let waited = waited.map(|waited| format!(" after {} s", waited.as_secs())).unwrap_or_default();
    let next = beside(file).map_or_else(
        || {
            "the agent of the cluster's network writes it when that network is ready; check that the agent's pod runs on \
             this node"
                .to_owned()
        },
        |list| format!("{} is beside it; set this file instead", list.display()),
    );
    let msg = format!("readinessindicatorfile: {} does not exist{waited}: {next}", file.display());
    Error::new(Code::TryAgain, msg)
}
