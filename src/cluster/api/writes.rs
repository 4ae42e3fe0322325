//! What the cluster is told.

use super::{Api, all, check_names, send};
use crate::cluster::query::{Object, Query};
use crate::cluster::retry::{AttemptError, retry};
use crate::cni::Error;
use crate::pod::Pod;
use std::time::{Duration, Instant};

/// How long a write may take, all tries together: the pod waits for it.
pub(in crate::cluster) const WRITE: Duration = Duration::from_secs(2);

impl Api {
    /// Sends what the objects say of a pod, all at the same time. One that is gone is not waited for.
    pub(super) fn write<'a>(
        &self,
        started: Instant,
        pod: &Pod,
        objects: impl Iterator<Item = Object<'a>>,
    ) -> Result<(), Error> {
        self.write_to(started, "pod", &[&pod.namespace, &pod.name], objects)
    }

    /// The same of anything that has these names.
    pub(super) fn write_to<'a>(
        &self,
        started: Instant,
        source: &str,
        names: &[&String],
        objects: impl Iterator<Item = Object<'a>>,
    ) -> Result<(), Error> {
        check_names(source, names.iter().copied())?;
        let session = self.session()?;
        let one = async |object| {
            let query = Query { object, server: &session.server, kubeconfig: &self.kubeconfig };
            let attempt = async || match send(session, &query).await {
                Ok(_) => Ok(()),
                Err(AttemptError::Missing(cause)) => Err(query.gone(&cause)),
                Err(failure) => Err(failure),
            };
            let end = retry(started, WRITE.min(self.timeout), attempt).await;
            Ok::<_, Error>(end.map_err(|end| query.gave_up(end)))
        };
        Error::all(session.run(all(objects.map(one)))?)
    }
}
