//! The executables in a sub-plugin chain. They run for every pod after this plugin's own work, and are undone before
//! it.

use crate::cni::{Block, Code, Error, NetConf, Request};
use crate::delegate::{Call, Executables, NetworkConfiguration, Plugin};
use crate::sub_plugins;
use serde_json::Value;

/// The executables of one call.
pub(super) struct ChainExecutables {
    network: NetworkConfiguration,
    call: Call,
}

impl ChainExecutables {
    /// Returns the executables in the chain of `conf`.
    pub(super) fn new(request: &Request, conf: &NetConf) -> Self {
        let plugin = |(kind, block): (&str, &Block)| Plugin {
            kind: kind.to_owned(),
            path: block.path.clone(),
            conf: block.keys.clone(),
        };
        let network = NetworkConfiguration {
            name: conf.name.clone(),
            cni_version: conf.cni_version.clone(),
            plugins: sub_plugins::executables(&conf.chain).map(plugin).collect(),
            runtime_config: conf.runtime_config.clone(),
            args: conf.args.clone(),
            ..NetworkConfiguration::default()
        };
        Self { network, call: Call::forward(request, conf) }
    }

    /// Checks that all can be run, before an ADD changes anything.
    ///
    /// # Errors
    /// The first executable that is missing or not trusted.
    pub(super) fn find(&self) -> Result<(), Error> {
        self.network.find(&Executables, &self.call)
    }

    /// Runs ADD. Returns the last result, or `result` if no executable prints one.
    ///
    /// # Errors
    /// The first executable that fails; it and those before it are undone.
    pub(super) fn add(&self, conf: &NetConf, result: Option<Value>) -> Result<Option<Value>, Error> {
        let previous = result.clone().filter(|_| conf.prev_result.is_some());
        Ok(self.network.add(&Executables, &self.call, previous)?.or(result))
    }

    /// Runs DEL for all, even if one fails.
    ///
    /// # Errors
    /// The executables that failed.
    pub(super) fn del(&self, conf: &NetConf) -> Result<(), Error> {
        self.network.del(&Executables, &self.call, conf.prev_result.as_ref())
    }

    /// Runs CHECK.
    ///
    /// # Errors
    /// The first executable that fails.
    pub(super) fn check(&self, conf: &NetConf) -> Result<(), Error> {
        self.network.check(&Executables, &self.call, conf.prev_result.as_ref())
    }

    /// Runs GC for all, even if one fails.
    ///
    /// # Errors
    /// The executables that failed.
    pub(super) fn gc(&self, conf: &NetConf) -> Result<(), Error> {
        self.network.gc(&Executables, &self.call, conf.valid_attachments.as_deref())
    }

    /// Runs STATUS.
    ///
    /// # Errors
    /// The first executable that fails or is missing; [`Code::NotAvailable`] unless it has its own code.
    pub(super) fn status(&self) -> Result<(), Error> {
        let outcome = self.find().and_then(|()| self.network.status(&Executables, &self.call));
        outcome.map_err(|error| Error { code: Code::NotAvailable, ..error })
    }
}
