//! What an invalid request of a pod or its namespace means: an error for a new pod, and nothing for a running one. And what
//! such a running pod keeps.

use crate::cni::Error;

/// What a running pod has had since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StartedWith {
    /// Whether its traffic is redirected to the sidecar.
    pub redirection: bool,
    /// Whether it has a guard beside a redirection to the sidecar.
    pub guard: bool,
    /// Whether it has a guard of the ambient mesh.
    pub ambient_guard: bool,
}

/// The requests of one pod.
pub(super) enum Requests<'a> {
    /// Of a new pod: an invalid one is an error.
    Strict,
    /// Of a running pod: an invalid one counts as absent, and its error is added to this list.
    Lenient(&'a mut Vec<Error>),
    /// None counts.
    Ignored,
}

impl Requests<'_> {
    /// Returns what was requested; nothing if it is invalid and may be absent.
    pub(super) fn or_absent<T: Default>(&mut self, requested: Result<T, Error>) -> Result<T, Error> {
        match (self, requested) {
            (Self::Strict, requested) | (_, requested @ Ok(_)) => requested,
            (Self::Lenient(absent), Err(error)) => {
                absent.push(error);
                Ok(T::default())
            }
            (Self::Ignored, Err(_)) => Ok(T::default()),
        }
    }

    /// Returns whether requests count.
    pub(super) const fn count(&self) -> bool {
        !matches!(self, Self::Ignored)
    }
}
