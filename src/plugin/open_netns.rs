//! Opens the pod's network namespace, which must never be the one that the plugin runs in.

use crate::cni::{Code, Error, Request};
use crate::host_path::{HostPath, HostRoot};
use crate::netns::{NetNs, NetnsId};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Opens the network namespace of a call.
///
/// # Errors
/// [`Code::InvalidNetns`]: `CNI_NETNS` is not the path of a network namespace.
pub(super) fn of_request(request: &Request) -> Result<NetNs, Error> {
    existing("CNI_NETNS ", request.netns.as_deref().unwrap_or_else(|| Path::new("")))
}

fn existing(variable: &str, path: &Path) -> Result<NetNs, Error> {
    let missing = || format!("{variable}{}: no network namespace at this path", path.display());
    NetNs::open(path)?.ok_or_else(|| Error::new(Code::InvalidNetns, missing()))
}

/// Returns the path of the network namespace of a call and its identity, without opening it; `None` without
/// `CNI_NETNS`, or if no file has this path.
///
/// # Errors
/// [`Code::InvalidNetns`]: the file can't be examined.
pub(super) fn identified(request: &Request) -> Result<Option<(PathBuf, NetnsId)>, Error> {
    let Some(path) = request.netns.as_deref() else { return Ok(None) };
    Ok(identity(path)?.map(|id| (path.to_owned(), id)))
}

/// Opens the network namespace `id` whose path in the runtime is `path`, on the node at `root`. If nothing is mounted
/// below `root`, the path may be visible in this mount namespace. Returns `None` if the network namespace is gone, not
/// visible here, or replaced by another one.
///
/// # Errors
/// As [`on_node`].
pub(super) fn recorded(root: &HostRoot, path: &Path, id: NetnsId) -> Result<Option<NetNs>, Error> {
    // The identity proves that the path leads to the same network namespace.
    let is_same = |netns: &NetNs| netns.id() == id;
    let found = on_node(root, path)?.filter(is_same);
    Ok(found.or_else(|| NetNs::open(path).ok().flatten().filter(is_same)))
}

/// Opens the network namespace at a path.
///
/// # Errors
/// [`Code::InvalidNetns`]: the path is not that of a network namespace, or it is this process's own.
pub(super) fn at(path: &Path) -> Result<NetNs, Error> {
    refuse_own(path)?;
    existing("", path)
}

/// Opens the network namespace at the runtime's path on the node at `root`; the path may already be below `root`.
/// Returns `None` if it does not exist, or is not visible here.
///
/// # Errors
/// [`Code::InvalidNetns`]: the file can't be opened or examined.
pub(super) fn on_node(root: &HostRoot, path: &Path) -> Result<Option<NetNs>, Error> {
    if path.starts_with(root.mount()) {
        return NetNs::open(path);
    }
    let Some(path) = HostPath::new(path) else { return Ok(None) };
    let reached = root.reach(&path).map_err(|error| {
        Error::new(Code::InvalidNetns, format!("network namespace {path}: can't be opened: {error}"))
    })?;
    NetNs::open(&reached)
}

/// Refuses a call whose `CNI_NETNS` is the network namespace that the plugin runs in, usually the host's, before
/// anything is done there. The reference library (`pkg/skel`) checks it only afterwards.
pub(super) fn refuse_own_of_request(request: &Request) -> Result<(), Error> {
    request.netns.as_deref().filter(|_| !request.netns_override).map_or(Ok(()), refuse_own)
}

/// Refuses the path of the network namespace that this process runs in.
pub(super) fn refuse_own(path: &Path) -> Result<(), Error> {
    let own = identity(Path::new("/proc/self/ns/net"))?;
    if own.is_some() && own == identity(path)? {
        // The wording of the reference library.
        let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
        return Err(Error::new(Code::InvalidNetns, msg));
    }
    Ok(())
}

/// Returns the file identity, which identifies a namespace (namespaces(7)); `None` if no file has this path.
fn identity(path: &Path) -> Result<Option<NetnsId>, Error> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(NetnsId::of(&metadata))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => {
            let msg = format!("network namespace {}: can't be examined: {error}", path.display());
            Err(Error::new(Code::InvalidNetns, msg))
        }
    }
}
