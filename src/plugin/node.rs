//! The node configuration file: what it states applies to every attachment that a call is for.

use crate::cni::{Code, CniCommand, Document, Error, NODE_CONFIGURATION, NODE_CONFIGURATION_LIMIT, NodeConf, Request};
use crate::trusted_file;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Puts the node's keys into the configuration of a call, in place of the attachment's own. Returns what is
/// ignored of those, one line each. The runtime's own configuration of a primary plugin stays as it is.
///
/// # Errors
/// The file is wrong or not trusted, or an attachment's configuration would make this the primary plugin.
/// DEL and GC go on with a warning instead: they must not keep a pod from being deleted.
pub(super) fn apply(request: &Request, document: &mut Document, program: &str) -> Result<Vec<String>, Error> {
    let is_cleanup = matches!(request.command, CniCommand::Del | CniCommand::Gc);
    let read = read(NODE_CONFIGURATION, Path::new(NODE_CONFIGURATION)).and_then(|found| {
        let Some((node, warnings)) = found else { return Ok(None) };
        if document.is_primary() && node.is_attached() && !is_cleanup {
            return Err(not_primary());
        }
        Ok(Some((node, warnings)))
    });
    let (node, mut warnings) = match read {
        Ok(None) => return Ok(Vec::new()),
        Ok(Some(found)) => found,
        Err(error) if is_cleanup => return Ok(vec![format!("the node's keys are not applied: {}", error.msg)]),
        Err(error) if request.command == CniCommand::Status => {
            return Err(Error { code: Code::NotAvailable, ..error });
        }
        Err(error) => return Err(error),
    };
    if document.is_primary() && node.is_attached() {
        // Only DEL and GC get here. ADD is refused, so there is no network to remove, and nothing is executed.
        document.remove_networks();
        warnings.push(format!("the networks are ignored: {}", not_primary().msg));
    }
    if !document.is_primary() {
        warnings.extend(document.govern(&node, program));
    }
    Ok(warnings)
}

/// Reads the node configuration, with its warnings; `None` if there is no such file. `place` names it in
/// messages, and `path` is where this process finds it.
///
/// # Errors
/// [`Code::InvalidConfig`]: another user can change it, it can't be read, or it is wrong.
pub fn read(place: &str, path: &Path) -> Result<Option<(NodeConf, Vec<String>)>, Error> {
    // On a node without it, nothing else is examined.
    if matches!(fs::symlink_metadata(path), Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    {
        return Ok(None);
    }
    match trusted_file::read_trusted(path, NODE_CONFIGURATION_LIMIT) {
        Ok(text) => NodeConf::parse(place, &text).map(Some),
        Err(error) => Err(Error::new(Code::InvalidConfig, format!("node configuration {place} is not used: {error}"))),
    }
}

fn not_primary() -> Error {
    let msg = format!(
        "clusterNetwork and delegates are for the runtime's own configuration, and {NODE_CONFIGURATION} states that \
         this is not the node's primary plugin; if it is, install with --primary=true (primaryPlugin.enabled)"
    );
    Error::new(Code::InvalidConfig, msg)
}
