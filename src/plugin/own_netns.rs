//! The network namespace of a pod is never the plugin's own.

use crate::cni::{Code, Error, Request};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Refuses a call whose `CNI_NETNS` is the network namespace that the plugin runs in, the host's
/// as a rule, before anything is done there. The reference library (`pkg/skel`) looks only
/// afterwards.
pub(super) fn refuse_own_netns(request: &Request) -> Result<(), Error> {
    request.netns.as_deref().filter(|_| !request.netns_override).map_or(Ok(()), check_own_netns)
}

/// Refuses a path of the network namespace that this process runs in.
///
/// # Errors
/// [`Code::InvalidNetns`]: it is, or that can't be known.
pub(super) fn check_own_netns(netns: &Path) -> Result<(), Error> {
    let own = identity(Path::new("/proc/self/ns/net"))?;
    if own.is_some() && own == identity(netns)? {
        let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
        return Err(Error::new(Code::InvalidNetns, msg));
    }
    Ok(())
}

/// A namespace is known by device and inode, not by its path (namespaces(7)). `None` where nothing is at
/// that path.
fn identity(path: &Path) -> Result<Option<(u64, u64)>, Error> {
    match fs::metadata(path) {
        Ok(file) => Ok(Some((file.dev(), file.ino()))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => {
            let msg = format!("network namespace {}: can't be examined: {error}", path.display());
            Err(Error::new(Code::InvalidNetns, msg))
        }
    }
}
