//! Several plugins one after another: order, previous results, undoing what failed.

use super::{Call, Runner, conf, result, verb};
use crate::cni::{Command, Error, ValidAttachment, version};
use serde_json::{Map, Value};

/// One plugin of a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plugin {
    /// Its `type`.
    pub kind: String,
    /// Where its configuration stands, for messages: `chain[3]`, `plugins[0]`.
    pub path: String,
    /// Its configuration as written, `type` included.
    pub conf: Map<String, Value>,
}

/// A network configuration in the specification's sense: a list of plugins under one name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Network {
    /// `name`.
    pub name: String,
    /// `cniVersion`: all its plugins are called in this version. Empty is `0.1.0` (SPEC.md).
    pub cni_version: String,
    /// Its plugins, in the order of ADD.
    pub plugins: Vec<Plugin>,
    /// What the runtime offers in `runtimeConfig`.
    pub runtime_config: Map<String, Value>,
    /// What a pod's reference passes in `args.cni` (Multus's `cni-args`); it wins over what a plugin
    /// has there itself.
    pub args: Map<String, Value>,
    /// `disableCheck`.
    pub disable_check: bool,
    /// `disableGC`.
    pub disable_gc: bool,
}

impl Network {
    /// ADD, in order: each plugin's result is the next one's `prevResult`, and `previous` the
    /// first one's. The last one's is returned, labelled with the network's version. A plugin that
    /// prints nothing leaves the result as it is; `None` where there never was one.
    ///
    /// # Errors
    /// The first that failed. Then DEL went to it and, in reverse, to those before it.
    pub fn add(&self, runner: &dyn Runner, call: &Call, previous: Option<Value>) -> Result<Option<Value>, Error> {
        let mut latest = previous;
        for (index, plugin) in self.plugins.iter().enumerate() {
            let answer = self.attach(runner, call, plugin, latest.as_ref());
            match answer.and_then(|answer| answer.map(|answer| result::accept(answer, self.version())).transpose()) {
                Ok(None) => {}
                Ok(Some(result)) => latest = Some(result),
                Err(error) => {
                    self.undo(runner, call, &self.plugins[..=index], latest.as_ref());
                    return Err(failed(call, plugin, error));
                }
            }
        }
        Ok(latest)
    }

    fn undo(&self, runner: &dyn Runner, call: &Call, plugins: &[Plugin], latest: Option<&Value>) {
        if let Err(error) = self.detach(runner, &call.with_command(Command::Del), plugins, latest) {
            tracing::warn!("undoing a failed ADD: {error}");
        }
    }

    /// DEL, in reverse, with the result of ADD where the version knows that. All are tried.
    ///
    /// # Errors
    /// The first that failed; the others are in its details.
    pub fn del(&self, runner: &dyn Runner, call: &Call, result: Option<&Value>) -> Result<(), Error> {
        self.detach(runner, call, &self.plugins, result)
    }

    fn detach(
        &self,
        runner: &dyn Runner,
        call: &Call,
        plugins: &[Plugin],
        result: Option<&Value>,
    ) -> Result<(), Error> {
        // The version that brought CHECK brought the result for DEL (SPEC.md, 0.4.0).
        let result = result.filter(|_| self.allows(Command::Check));
        let one = |plugin: &Plugin| self.attach(runner, call, plugin, result).map(drop);
        all(plugins.iter().rev().map(|plugin| one(plugin).map_err(|error| failed(call, plugin, error))))
    }

    /// CHECK, in order, with the result of ADD. A network whose version does not know CHECK, or
    /// that has `disableCheck`, has nothing to be checked.
    ///
    /// # Errors
    /// The first that failed.
    pub fn check(&self, runner: &dyn Runner, call: &Call, result: Option<&Value>) -> Result<(), Error> {
        if self.disable_check || !self.allows(Command::Check) {
            return Ok(());
        }
        self.plugins.iter().try_for_each(|plugin| {
            self.attach(runner, call, plugin, result).map(drop).map_err(|error| failed(call, plugin, error))
        })
    }

    /// GC, in order, with the attachments that the runtime still has, where it says so. All are
    /// tried. A network whose version does not know GC, or that has `disableGC`, has none.
    ///
    /// # Errors
    /// The first that failed; the others are in its details.
    pub fn gc(&self, runner: &dyn Runner, call: &Call, valid: Option<&[ValidAttachment]>) -> Result<(), Error> {
        if self.disable_gc || !self.allows(Command::Gc) {
            return Ok(());
        }
        all(self.plugins.iter().map(|plugin| {
            let conf = conf::for_gc(self, plugin, valid);
            runner.run(call, &plugin.kind, &conf).map(drop).map_err(|error| failed(call, plugin, error))
        }))
    }

    /// STATUS, in order. A network whose version does not know it is available.
    ///
    /// # Errors
    /// The first that failed.
    pub fn status(&self, runner: &dyn Runner, call: &Call) -> Result<(), Error> {
        if !self.allows(Command::Status) {
            return Ok(());
        }
        self.plugins.iter().try_for_each(|plugin| {
            let conf = conf::for_node(self, plugin);
            runner.run(call, &plugin.kind, &conf).map(drop).map_err(|error| failed(call, plugin, error))
        })
    }

    fn attach(
        &self,
        runner: &dyn Runner,
        call: &Call,
        plugin: &Plugin,
        previous: Option<&Value>,
    ) -> Result<Option<Value>, Error> {
        runner.run(call, &plugin.kind, &conf::for_attachment(self, plugin, previous)?)
    }

    fn version(&self) -> &str {
        if self.cni_version.is_empty() { version::UNSTATED } else { &self.cni_version }
    }

    fn allows(&self, command: Command) -> bool {
        version::check(self.version(), command).is_ok()
    }
}

/// Tries all, in order.
fn all(results: impl Iterator<Item = Result<(), Error>>) -> Result<(), Error> {
    let mut errors: Vec<Error> = results.filter_map(Result::err).collect();
    if errors.is_empty() {
        return Ok(());
    }
    let mut first = errors.remove(0);
    for other in errors {
        let separator = if first.details.is_empty() { "" } else { "; " };
        first.details += &format!("{separator}{other}");
    }
    Err(first)
}

/// The error of a plugin, in the reference library's words (`libcni/api.go`).
fn failed(call: &Call, plugin: &Plugin, mut error: Error) -> Error {
    error.msg = format!("plugin type={:?} failed ({}): {}", plugin.kind, verb(call.command), error.msg);
    error
}
