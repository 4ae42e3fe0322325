//! The executables in a sub-plugin chain. They run for every pod after this plugin's own work, and are undone before
//! it.

use super::del;
use crate::cni::{Block, Code, Error, NetConf, Request};
use crate::delegate::{Call, Executables, NetworkConfiguration};
use crate::state::Attachment;
use crate::sub_plugins;
use serde_json::Value;
use std::path::PathBuf;

/// The executables of one call; `None` if the chain has none, so that nothing is copied for them.
pub(super) struct ChainExecutables(Option<(NetworkConfiguration, Call)>);

impl ChainExecutables {
    /// Returns the executables in the chain of `conf`.
    pub(super) fn new(request: &Request, conf: &NetConf) -> Self {
        let plugins: Vec<Block> = sub_plugins::executables(&conf.chain).map(|(_, block)| block.clone()).collect();
        if plugins.is_empty() {
            return Self(None);
        }
        let network = NetworkConfiguration {
            name: conf.name.clone(),
            cni_version: conf.cni_version.clone(),
            plugins,
            runtime_config: conf.runtime_config.clone(),
            args: conf.args.clone(),
            ..NetworkConfiguration::default()
        };
        Self(Some((network, Call::forward(request, conf))))
    }

    /// Checks that all can be run, before an ADD changes anything.
    ///
    /// # Errors
    /// The first executable that is missing or not trusted.
    pub(super) fn find(&self) -> Result<(), Error> {
        self.run(|network, call| network.find(&Executables, call))
    }

    /// Runs ADD. Returns the last result, or `result` if no executable prints one.
    ///
    /// # Errors
    /// The first executable that fails; it and those before it are undone.
    pub(super) fn add(&self, conf: &NetConf, result: Option<Value>) -> Result<Option<Value>, Error> {
        let Some((network, call)) = &self.0 else { return Ok(result) };
        let previous = result.clone().filter(|_| conf.prev_result.is_some());
        Ok(network.add(&Executables, call, previous)?.or(result))
    }

    /// Runs DEL for all, even if one fails. They get no network namespace if that is another pod's by now.
    ///
    /// # Errors
    /// The executables that failed.
    pub(super) fn del(&self, conf: &NetConf) -> Result<(), Error> {
        self.run(|network, call| {
            let mut call = call.clone();
            let (container_id, ifname) = (call.container_id.clone(), call.ifname.clone());
            if del::is_late(&Attachment { container_id, network: network.name.clone(), ifname }, &call.netns) {
                call.netns = PathBuf::new();
            }
            network.del(&Executables, &call, conf.prev_result.as_ref())
        })
    }

    /// Runs CHECK.
    ///
    /// # Errors
    /// The first executable that fails.
    pub(super) fn check(&self, conf: &NetConf) -> Result<(), Error> {
        self.run(|network, call| network.check(&Executables, call, conf.prev_result.as_ref()))
    }

    /// Runs GC for all, even if one fails.
    ///
    /// # Errors
    /// The executables that failed.
    pub(super) fn gc(&self, conf: &NetConf) -> Result<(), Error> {
        self.run(|network, call| network.gc(&Executables, call, conf.valid_attachments.as_deref()))
    }

    /// Runs STATUS.
    ///
    /// # Errors
    /// The first executable that fails or is missing; [`Code::NotAvailable`] unless it has its own code.
    pub(super) fn status(&self) -> Result<(), Error> {
        let outcome = self.find().and_then(|()| self.run(|network, call| network.status(&Executables, call)));
        outcome.map_err(|error| Error { code: Code::NotAvailable, ..error })
    }

    fn run(&self, work: impl FnOnce(&NetworkConfiguration, &Call) -> Result<(), Error>) -> Result<(), Error> {
        self.0.as_ref().map_or(Ok(()), |(network, call)| work(network, call))
    }
}
