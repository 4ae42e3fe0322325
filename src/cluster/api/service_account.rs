//! The API as a pod's own service account: the agent's requests. They share a connection if there is one
//! ([`ServiceAccount::through`]); otherwise, each method connects and reads the credentials anew.

use super::server::{Api, ApiConnection};
use crate::cluster::fact_source::Cluster;
use crate::cni::Error;
use kube::Client;
use std::path::PathBuf;
use std::time::Duration;

/// The timeout for creating a token and for starting a watch, including retries.
pub(super) const WATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// A service account: the API's address, and the directory where the kubelet mounts the credentials.
#[derive(Debug, Clone)]
pub struct ServiceAccount {
    server: String,
    /// The directory of `ca.crt` and `token`.
    pub directory: PathBuf,
    /// The node of the pod whose account it is.
    pub(super) node: Option<String>,
    connection: Option<ApiConnection>,
}

impl ServiceAccount {
    /// The directory where the kubelet mounts the credentials.
    pub const DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

    /// Returns the account of the API at the URL `server` whose files `ca.crt` and `token` are in `directory`.
    #[must_use]
    pub const fn new(server: String, directory: PathBuf) -> Self {
        Self { server, directory, node: None, connection: None }
    }

    /// Returns the account of a pod on this node: its Events name the node, and the tokens that it requests are bound to it.
    #[must_use]
    pub fn on_node(self, node: Option<String>) -> Self {
        Self { node, ..self }
    }

    /// Sends all requests through a connection that other accounts of the same server and directory share.
    #[must_use]
    pub fn through(self, connection: &ApiConnection) -> Self {
        Self { connection: Some(connection.clone()), ..self }
    }

    /// Returns the service account of the pod that this process runs in; `None` outside of pods (kubernetes.io,
    /// "Accessing the Kubernetes API from a Pod").
    #[must_use]
    pub fn of_environment() -> Option<Self> {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let (host, port) = (variable("KUBERNETES_SERVICE_HOST")?, variable("KUBERNETES_SERVICE_PORT")?);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Some(Self::new(format!("https://{host}:{port}"), Self::DIRECTORY.into()))
    }

    /// Returns a source of facts for one lookup, which takes at most `timeout`.
    #[must_use]
    pub fn source(&self, timeout: Duration) -> Box<dyn Cluster> {
        Box::new(self.api(timeout))
    }

    /// Like [`Self::source`], without retries after transient errors: for callers with another source.
    #[must_use]
    pub fn source_once(&self, timeout: Duration) -> Box<dyn Cluster> {
        Box::new(self.api(timeout).without_retries())
    }

    /// Returns a client for watches.
    ///
    /// # Errors
    /// A file can't be read, or its contents are invalid.
    pub(super) fn client(&self) -> Result<Client, Error> {
        let api = self.api(WATCH_TIMEOUT);
        Ok(api.session()?.client())
    }

    /// Returns the API server of this account.
    pub(in crate::cluster) fn api(&self, timeout: Duration) -> Api {
        let api = Api::as_account(self.server.clone(), self.directory.clone(), timeout);
        match &self.connection {
            Some(connection) => api.through(connection.clone()),
            None => api,
        }
    }
}
