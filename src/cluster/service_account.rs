//! The API as a pod's own service account reaches it.

use super::Cluster;
use super::api::Api;
use super::kubeconfig::{CONNECT, Kubeconfig};
use crate::cni::Error;
use kube::Client;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A service account: where the API is, and where the kubelet puts what proves who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceAccount {
    /// The API's URL.
    pub server: String,
    /// The directory of `ca.crt` and `token`.
    pub directory: PathBuf,
}

impl ServiceAccount {
    /// How long [`Self::client`] waits for a connection; a request that has not failed by then was sent.
    pub const CONNECT: Duration = CONNECT;
    /// Where the kubelet mounts it.
    pub const DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

    /// That of the pod that this process runs in; `None` outside of pods (kubernetes.io, "Accessing the
    /// Kubernetes API from a Pod").
    #[must_use]
    pub fn of_environment() -> Option<Self> {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Some(Self { server: format!("https://{host}:{port}"), directory: Self::DIRECTORY.into() })
    }

    /// A source of facts for one question: the files are read when it is asked. They may take `timeout`.
    #[must_use]
    pub fn source(&self, timeout: Duration) -> Box<dyn Cluster> {
        Box::new(self.api(timeout))
    }

    /// The same without a second try where the API server fails: for those who have another source.
    #[must_use]
    pub fn source_once(&self, timeout: Duration) -> Box<dyn Cluster> {
        Box::new(self.api(timeout).once())
    }

    pub(super) fn api(&self, timeout: Duration) -> Api {
        Api::as_account(self.server.clone(), self.directory.clone(), timeout)
    }

    /// A client for a process that stays: the files are read again when they change. Needs a runtime
    /// around it.
    ///
    /// # Errors
    /// A file can't be read, or is wrong.
    pub fn client(&self) -> Result<Client, Error> {
        Kubeconfig::of_renewed_account(&self.server, Path::new(&self.directory))?.client()
    }
}
