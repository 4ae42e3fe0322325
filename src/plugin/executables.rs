//! The executables in a chain: they run for every pod, after what this plugin does itself, and are
//! undone before it.

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
    pub(super) fn of(request: &Request, conf: &NetConf) -> Self {
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

    /// Whether all can be found, before anything is changed for an ADD.
    ///
    /// # Errors
    /// Which can't.
    pub(super) fn find(&self) -> Result<(), Error> {
        self.network.find(&Executables, &self.call)
    }

    /// The result of the last one, or `result` where none has one.
    ///
    /// # Errors
    /// The first that failed; it and those before it are undone.
    pub(super) fn add(&self, conf: &NetConf, result: Option<Value>) -> Result<Option<Value>, Error> {
        let previous = result.clone().filter(|_| conf.prev_result.is_some());
        Ok(self.network.add(&Executables, &self.call, previous)?.or(result))
    }

    /// # Errors
    /// The first that failed; all are tried.
    pub(super) fn del(&self, conf: &NetConf) -> Result<(), Error> {
        self.network.del(&Executables, &self.call, conf.prev_result.as_ref())
    }

    /// # Errors
    /// The first that failed.
    pub(super) fn check(&self, conf: &NetConf) -> Result<(), Error> {
        self.network.check(&Executables, &self.call, conf.prev_result.as_ref())
    }

    /// # Errors
    /// The first that failed; all are tried.
    pub(super) fn gc(&self, conf: &NetConf) -> Result<(), Error> {
        self.network.gc(&Executables, &self.call, conf.valid_attachments.as_deref())
    }

    /// # Errors
    /// The first that failed; [`Code::NotAvailable`] where it has no code of its own or is not
    /// there at all.
    pub(super) fn status(&self) -> Result<(), Error> {
        let answer = self.find().and_then(|()| self.network.status(&Executables, &self.call));
        answer.map_err(|error| Error { code: Code::NotAvailable, ..error })
    }
}
