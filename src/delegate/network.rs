//! Several plugins one after another: order, previous results, undoing what failed.

use super::{Call, Runner, answer, call, verb};
use crate::cni::{Block, CniCommand, Error, ValidAttachment, version};
use crate::networks::RunnableConfiguration;
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
pub struct NetworkConfiguration {
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

impl From<&RunnableConfiguration> for NetworkConfiguration {
    fn from(written: &RunnableConfiguration) -> Self {
        let plugin = |(kind, Block { path, keys }): (&str, &Block)| Plugin {
            kind: kind.to_owned(),
            path: path.clone(),
            conf: keys.clone(),
        };
        Self {
            name: written.name.clone(),
            cni_version: written.cni_version.clone(),
            plugins: written.types().zip(&written.plugins).map(plugin).collect(),
            disable_check: written.disable_check,
            disable_gc: written.disable_gc,
            ..Self::default()
        }
    }
}

impl NetworkConfiguration {
    /// Whether all its plugins can be found, before anything is changed.
    ///
    /// # Errors
    /// The first that can't.
    pub fn find(&self, runner: &dyn Runner, call: &Call) -> Result<(), Error> {
        self.plugins.iter().try_for_each(|plugin| runner.find(call, &plugin.kind))
    }

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
            match answer.and_then(|answer| answer.map(|answer| answer::accept(answer, self.version())).transpose()) {
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
        if let Err(error) = self.detach(runner, &call.with_command(CniCommand::Del), plugins, latest) {
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
        let result = result.filter(|_| self.allows(CniCommand::Check));
        let one = |plugin: &Plugin| self.attach(runner, call, plugin, result).map(drop);
        Error::all(plugins.iter().rev().map(|plugin| one(plugin).map_err(|error| failed(call, plugin, error))))
    }

    /// CHECK, in order, with the result of ADD. A network whose version does not know CHECK, or
    /// that has `disableCheck`, has nothing to be checked.
    ///
    /// # Errors
    /// The first that failed.
    pub fn check(&self, runner: &dyn Runner, call: &Call, result: Option<&Value>) -> Result<(), Error> {
        if self.disable_check || !self.allows(CniCommand::Check) {
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
        if self.disable_gc || !self.allows(CniCommand::Gc) {
            return Ok(());
        }
        Error::all(self.plugins.iter().map(|plugin| {
            let conf = call::for_gc(self, plugin, valid);
            runner.run(call, &plugin.kind, &conf).map(drop).map_err(|error| failed(call, plugin, error))
        }))
    }

    /// STATUS, in order. A network whose version does not know it is available.
    ///
    /// # Errors
    /// The first that failed.
    pub fn status(&self, runner: &dyn Runner, call: &Call) -> Result<(), Error> {
        if !self.allows(CniCommand::Status) {
            return Ok(());
        }
        self.plugins.iter().try_for_each(|plugin| {
            let conf = call::for_node(self, plugin);
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
        runner.run(call, &plugin.kind, &call::for_attachment(self, plugin, previous)?)
    }

    /// The version that its plugins are called in.
    #[must_use]
    pub fn version(&self) -> &str {
        if self.cni_version.is_empty() { version::UNSTATED } else { &self.cni_version }
    }

    fn allows(&self, command: CniCommand) -> bool {
        version::check(self.version(), command).is_ok()
    }
}

/// The error of a plugin, in the reference library's words (`libcni/api.go`).
fn failed(call: &Call, plugin: &Plugin, mut error: Error) -> Error {
    error.msg = format!("plugin type={:?} failed ({}): {}", plugin.kind, verb(call.command), error.msg);
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Code;
    use serde_json::json;
    use std::cell::RefCell;

    /// Calls of plugins that were made in this process: the command, the type, and the previous
    /// result's `from`.
    #[derive(Default)]
    struct Made(RefCell<Vec<String>>);

    impl Runner for Made {
        /// Makes a call. What a plugin of type `a` returns is from `a`; one of type `silent` returns
        /// nothing, and one of type `ADD`, `DEL`, … fails with that command.
        fn run(&self, call: &Call, kind: &str, conf: &Map<String, Value>) -> Result<Option<Value>, Error> {
            let from = conf.get("prevResult").map_or("-", |previous| previous["from"].as_str().unwrap_or("?"));
            self.0.borrow_mut().push(format!("{} {kind} {from}", call.command));
            if kind == call.command.to_string() {
                return Err(Error::new(Code::Delegate, format!("{kind} refused")).answered_with(11));
            }
            Ok((call.command == CniCommand::Add && kind != "silent").then(|| json!({"from": kind})))
        }

        fn find(&self, _: &Call, kind: &str) -> Result<(), Error> {
            if kind == "none" { Err(Error::new(Code::InvalidConfig, kind)) } else { Ok(()) }
        }
    }

    fn network(version: &str, kinds: &[&str]) -> NetworkConfiguration {
        let plugin = |kind: &&str| Plugin { kind: (*kind).into(), path: String::new(), conf: Map::new() };
        let plugins = kinds.iter().map(plugin).collect();
        NetworkConfiguration {
            name: "n".into(),
            cni_version: version.into(),
            plugins,
            ..NetworkConfiguration::default()
        }
    }

    fn call(command: CniCommand) -> Call {
        Call { netns: "/run/netns/c".into(), ..call::tests::call() }.with_command(command)
    }

    /// Does something; which calls were made.
    fn calls<T>(work: impl FnOnce(&dyn Runner) -> T) -> (T, Vec<String>) {
        let made = Made::default();
        let answer = work(&made);
        (answer, made.0.take())
    }

    #[test]
    fn results_go_down_the_list() {
        let network = network("1.0.0", &["a", "silent", "b"]);
        let (result, made) = calls(|runner| network.add(runner, &call(CniCommand::Add), None));
        assert_eq!(made, ["ADD a -", "ADD silent a", "ADD b a"]);
        assert_eq!(result, Ok(Some(json!({"from": "b", "cniVersion": "1.0.0"}))));
        let silent = self::network("", &["silent"]);
        assert_eq!(calls(|runner| silent.add(runner, &call(CniCommand::Add), None)).0, Ok(None));
    }

    #[test]
    fn a_failed_add_is_undone_from_there_upwards() {
        let network = network("1.0.0", &["a", "b", "ADD", "c"]);
        let (result, made) = calls(|runner| network.add(runner, &call(CniCommand::Add), None));
        assert_eq!(made, ["ADD a -", "ADD b a", "ADD ADD b", "DEL ADD b", "DEL b b", "DEL a b"]);
        let error = result.expect_err("it failed");
        assert_eq!((error.number(), error.msg.as_str()), (11, r#"plugin type="ADD" failed (add): ADD refused"#));
    }

    #[test]
    fn del_goes_up_the_list_and_tries_all() {
        let network = network("0.4.0", &["a", "DEL", "DEL"]);
        let result = json!({"from": "final"});
        let (answer, made) = calls(|runner| network.del(runner, &call(CniCommand::Del), Some(&result)));
        assert_eq!(made, ["DEL DEL final", "DEL DEL final", "DEL a final"]);
        let error = answer.expect_err("two failed");
        assert_eq!((error.number(), error.details.as_str()), (11, r#"plugin type="DEL" failed (delete): DEL refused"#));
        let older = self::network("0.3.1", &["a"]);
        assert_eq!(calls(|runner| older.del(runner, &call(CniCommand::Del), Some(&result))).1, ["DEL a -"]);
    }

    #[test]
    fn versions_and_flags_say_what_there_is_to_do() {
        let check =
            |network: NetworkConfiguration| calls(|runner| network.check(runner, &call(CniCommand::Check), None)).1;
        assert_eq!(check(network("0.4.0", &["a"])), ["CHECK a -"]);
        assert_eq!(check(network("0.3.1", &["a"])), [""; 0]);
        assert_eq!(check(network("", &["a"])), [""; 0]);
        assert_eq!(check(NetworkConfiguration { disable_check: true, ..network("1.0.0", &["a"]) }), [""; 0]);
        let gc = |network: NetworkConfiguration| calls(|runner| network.gc(runner, &call(CniCommand::Gc), None)).1;
        assert_eq!(gc(network("1.1.0", &["GC", "a"])), ["GC GC -", "GC a -"]);
        assert_eq!(gc(network("1.0.0", &["a"])), [""; 0]);
        assert_eq!(gc(NetworkConfiguration { disable_gc: true, ..network("1.1.0", &["a"]) }), [""; 0]);
        let status =
            |network: NetworkConfiguration| calls(|runner| network.status(runner, &call(CniCommand::Status))).1;
        assert_eq!(status(network("1.1.0", &["a", "b"])), ["STATUS a -", "STATUS b -"]);
        assert_eq!(status(network("1.0.0", &["a"])), [""; 0]);
    }

    #[test]
    fn all_are_looked_for() {
        let found = |kinds: &[&str]| calls(|runner| network("1.0.0", kinds).find(runner, &call(CniCommand::Add))).0;
        assert_eq!(found(&["a", "b"]), Ok(()));
        assert_eq!(found(&["a", "none"]).map_err(|error| error.msg), Err("none".to_owned()));
    }

    #[test]
    fn a_configuration_becomes_a_network() {
        let text = json!({"cniVersion": "1.0.0", "name": "n", "disableGC": true, "plugins": [{"type": "a"}, {"type": "b", "x": 1}]});
        let configuration = RunnableConfiguration::parse("here", &text.to_string(), None).expect("accepted");
        let network = NetworkConfiguration::from(&configuration);
        assert_eq!((network.name.as_str(), network.version(), network.disable_check), ("n", "1.0.0", false));
        assert!(network.disable_gc);
        let second = &network.plugins[1];
        assert_eq!((second.kind.as_str(), second.path.as_str()), ("b", "here.plugins[1]"));
        assert_eq!(Value::Object(second.conf.clone()), text["plugins"][1]);
    }
}
