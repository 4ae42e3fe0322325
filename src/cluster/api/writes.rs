//! What the cluster is told.

use super::{Api, check_names, send};
use crate::cluster::query::Object;
use crate::cluster::retry::{Failure, retry};
use crate::cni::Error;
use crate::pod::Pod;
use std::time::{Duration, Instant};

/// How long a write may take, all tries together: the pod waits for it.
const WRITE: Duration = Duration::from_secs(2);

impl Api {
    /// Sends what `object` says of a pod. One that is gone is not waited for.
    pub(super) fn write(&self, pod: &Pod, object: Object<'_>) -> Result<(), Error> {
        check_names("pod", [&pod.namespace, &pod.name])?;
        let session = self.session()?;
        let query = self.query(session, object);
        session.run(async {
            let attempt = async || match send(session, &query).await {
                Ok(_) => Ok(()),
                Err(Failure::Missing(cause)) => Err(query.gone(&cause)),
                Err(failure) => Err(failure),
            };
            retry(Instant::now(), WRITE.min(self.timeout), attempt).await.map_err(|end| query.gave_up(end))
        })
    }
}
