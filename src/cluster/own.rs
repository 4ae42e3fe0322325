//! What the node's agent asks for its own sake: a token for the plugin, and whether it is to come back.

use super::{ObjectRef, ServiceAccount, Token};
use crate::cni::Error;
use std::time::Duration;

/// How long an answer may take that nobody else waits for, all tries together.
const WATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Credentials are read anew for each question: they change while the agent stays.
impl ServiceAccount {
    /// A new token of the service account `of`, for about `lifetime`: the API server may shorten that.
    /// It is bound to no pod (k8s.io/api, `authentication/v1`, `BoundObjectReference`).
    ///
    /// # Errors
    /// What the API refuses, or that it gives no answer within five seconds.
    pub fn token(&self, of: &ObjectRef, lifetime: Duration) -> Result<Token, Error> {
        self.api(WATCH_TIMEOUT).token(of, lifetime)
    }

    /// Whether a DaemonSet is there and nobody has deleted it; `within` that time.
    ///
    /// # Errors
    /// What the API refuses, or that it gives no answer.
    pub fn has(&self, daemon_set: &ObjectRef, within: Duration) -> Result<bool, Error> {
        self.api(within).has(daemon_set)
    }

    /// Tells whether that DaemonSet is there, at once and whenever that changes, until some minutes are
    /// over or it is not there any more.
    ///
    /// # Errors
    /// As [`Self::token`]; the connection ends.
    pub fn watch(&self, daemon_set: &ObjectRef, tell: impl FnMut(bool)) -> Result<(), Error> {
        self.api(WATCH_TIMEOUT).watch(daemon_set, tell)
    }
}
