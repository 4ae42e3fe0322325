//! CHECK.

use crate::cni::{Error, NetConf, Request};
use serde_json::Value;

/// There is nothing to do as long as ADD does nothing.
///
/// # Errors
/// None so far.
pub(super) fn run(_request: &Request, _conf: &NetConf) -> Result<Option<Value>, Error> {
    Ok(None)
}
