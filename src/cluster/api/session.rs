//! A connection to the API server, kept from one request to the next.

use crate::cluster::kubeconfig::Kubeconfig;
use crate::cni::{Code, Error};
use kube::Client;
use tokio::runtime::{Builder, Runtime};

/// An event loop of this thread alone, and a client on it.
pub(super) struct Session {
    /// There until the session ends.
    runtime: Option<Runtime>,
    /// Where the server is, for messages.
    pub(super) server: String,
    /// Who asks it.
    pub(super) client: Client,
}

impl Session {
    /// Nothing is connected to yet.
    ///
    /// # Errors
    /// As [`Kubeconfig::client`].
    pub(super) fn open(kubeconfig: Kubeconfig<'_>) -> Result<Self, Error> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(|e| Error::new(Code::Internal, "no event loop").with_details(e.to_string()))?;
        let server = kubeconfig.server();
        let client = {
            // The client has tasks of its own on the loop.
            let _inside = runtime.enter();
            kubeconfig.client()?
        };
        Ok(Self { runtime: Some(runtime), server, client })
    }

    /// Does `work` to its end.
    pub(super) fn run<T>(&self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(work),
            None => Err(Error::new(Code::Internal, "the event loop has ended")),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Otherwise it would wait for a name that is still being resolved.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
