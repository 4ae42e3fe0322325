//! A network: the configuration that each plugin gets on stdin (SPEC.md, "Deriving execution configuration from plugin
//! configuration"), and the order in which its plugins run, with their previous results and the undoing of a failed ADD.

use super::call::{Call, Runner};
use crate::cni::{Block, CniCommand, Error, ValidAttachment, version, wrong_type};
use crate::networks::RunnableConfiguration;
use serde_json::{Map, Value, json};

impl RunnableConfiguration {
    /// Returns the version in which the plugins are called.
    #[must_use]
    pub fn version(&self) -> &str {
        if self.cni_version.is_empty() { version::UNSTATED } else { &self.cni_version }
    }

    /// Returns whether the network's version has `command`.
    pub(super) fn allows(&self, command: CniCommand) -> bool {
        version::check(self.version(), command).is_ok()
    }

    /// Returns the configuration of `plugin` for ADD, DEL and CHECK: its own keys, the network's name and version,
    /// the previous result, `args`, and the keys of `runtimeConfig` that its `capabilities` list.
    ///
    /// # Errors
    /// `capabilities` is not an object of booleans, or `args` is not an object although the call passes values.
    pub(super) fn attachment_conf(
        &self,
        plugin: &Block,
        previous: Option<&Value>,
    ) -> Result<Map<String, Value>, Error> {
        let mut conf = self.node_conf(plugin);
        conf.extend(previous.map(|previous| ("prevResult".to_owned(), previous.clone())));
        let capabilities = capabilities(plugin)?;
        let is_capable = |(key, _): &(&String, &Value)| capabilities.contains(&key.as_str());
        let keys = self.runtime_config.iter().filter(is_capable);
        let runtime_config: Map<_, _> = keys.map(|(key, value)| (key.clone(), value.clone())).collect();
        if !runtime_config.is_empty() {
            conf.insert("runtimeConfig".to_owned(), runtime_config.into());
        }
        if !self.args.is_empty() {
            let args = plugin.keys.get("args").unwrap_or(&Value::Null);
            let invalid = || invalid(plugin, "args", args, "an object whose cni is an object");
            let mut args = match args {
                Value::Null => Map::new(),
                args => args.as_object().cloned().ok_or_else(invalid)?,
            };
            let cni = args.entry("cni").or_insert_with(|| json!({}));
            cni.as_object_mut().ok_or_else(invalid)?.extend(self.args.clone());
            conf.insert("args".to_owned(), args.into());
        }
        Ok(conf)
    }

    /// Returns the configuration of `plugin` for STATUS, which concerns no attachment.
    #[must_use]
    pub fn node_conf(&self, plugin: &Block) -> Map<String, Value> {
        let mut conf = plugin.keys.clone();
        // It describes the plugin to the runtime; the plugin must not get it.
        conf.shift_remove("capabilities");
        conf.insert("name".to_owned(), self.name.as_str().into());
        conf.insert("cniVersion".to_owned(), self.cni_version.as_str().into());
        conf
    }

    /// Returns the configuration of `plugin` for GC. The list of valid attachments has two keys: the reference
    /// library used the second one before the specification defined the first (`libcni/api.go`).
    pub(super) fn gc_conf(&self, plugin: &Block, valid: Option<&[ValidAttachment]>) -> Map<String, Value> {
        let mut conf = self.node_conf(plugin);
        if let Some(valid) = valid {
            let list: Value =
                valid.iter().map(|a| json!({"containerID": a.container_id, "ifname": a.ifname})).collect();
            conf.insert("cni.dev/valid-attachments".to_owned(), list.clone());
            conf.insert("cni.dev/attachments".to_owned(), list);
        }
        conf
    }

    /// Checks that all plugins can be run, before anything is changed.
    ///
    /// # Errors
    /// The first plugin that is missing or not trusted.
    pub fn find(&self, runner: &dyn Runner, call: &Call) -> Result<(), Error> {
        self.plugins.iter().try_for_each(|plugin| runner.find(call, plugin.kind()))
    }

    /// Runs ADD in order: each plugin's result is the `prevResult` of the next; the first gets `previous`. Returns
    /// the last result in the network's version. A plugin that prints nothing leaves the result unchanged; `None`
    /// if no plugin prints one and there is no `previous`.
    ///
    /// # Errors
    /// The first plugin that fails. Before returning, DEL is run for it and, in reverse order, for those before it.
    pub fn add(&self, runner: &dyn Runner, call: &Call, previous: Option<Value>) -> Result<Option<Value>, Error> {
        let mut latest = previous;
        for (index, plugin) in self.plugins.iter().enumerate() {
            let conf = self.attachment_conf(plugin, latest.as_ref());
            let convert = |result| super::convert(result, self.version()).map_err(|error| failed(call, plugin, error));
            match run(runner, call, plugin, conf).and_then(|result| result.map(convert).transpose()) {
                Ok(result) => latest = result.or(latest),
                Err(error) => {
                    let del = Call { command: CniCommand::Del, ..call.clone() };
                    let called = Self { plugins: self.plugins[..=index].to_vec(), ..self.clone() };
                    called.del(runner, &del, latest.as_ref()).unwrap_or_else(|error| {
                        tracing::warn!("can't undo the failed ADD of network {:?}: {error}", self.name)
                    });
                    return Err(error);
                }
            }
        }
        Ok(latest)
    }

    /// Runs DEL in reverse order, with the result of ADD if the network's version passes it to DEL. All plugins are
    /// run even if one fails.
    ///
    /// # Errors
    /// The first plugin that failed, with the others in its details.
    pub fn del(&self, runner: &dyn Runner, call: &Call, result: Option<&Value>) -> Result<(), Error> {
        // The version that added CHECK also added the result for DEL (SPEC.md, 0.4.0).
        let result = result.filter(|_| self.allows(CniCommand::Check));
        let del = |plugin: &Block| run(runner, call, plugin, self.attachment_conf(plugin, result)).map(drop);
        Error::all(self.plugins.iter().rev().map(del))
    }

    /// Runs CHECK in order, with the result of ADD. Does nothing if the network's version has no CHECK or the
    /// network sets `disableCheck`.
    ///
    /// # Errors
    /// The first plugin that fails.
    pub fn check(&self, runner: &dyn Runner, call: &Call, result: Option<&Value>) -> Result<(), Error> {
        if self.disable_check || !self.allows(CniCommand::Check) {
            return Ok(());
        }
        let check = |plugin: &Block| run(runner, call, plugin, self.attachment_conf(plugin, result)).map(drop);
        self.plugins.iter().try_for_each(check)
    }

    /// Runs GC in order, with the runtime's valid attachments if it passes them. All plugins are run even if one
    /// fails. Does nothing if the network's version has no GC or the network sets `disableGC`.
    ///
    /// # Errors
    /// The first plugin that failed, with the others in its details.
    pub fn gc(&self, runner: &dyn Runner, call: &Call, valid: Option<&[ValidAttachment]>) -> Result<(), Error> {
        if self.disable_gc || !self.allows(CniCommand::Gc) {
            return Ok(());
        }
        let gc = |plugin: &Block| run(runner, call, plugin, Ok(self.gc_conf(plugin, valid))).map(drop);
        Error::all(self.plugins.iter().map(gc))
    }

    /// Runs STATUS in order. Does nothing if the network's version has no STATUS.
    ///
    /// # Errors
    /// The first plugin that fails.
    pub fn status(&self, runner: &dyn Runner, call: &Call) -> Result<(), Error> {
        if !self.allows(CniCommand::Status) {
            return Ok(());
        }
        let status = |plugin: &Block| run(runner, call, plugin, Ok(self.node_conf(plugin))).map(drop);
        self.plugins.iter().try_for_each(status)
    }
}

fn capabilities(plugin: &Block) -> Result<Vec<&str>, Error> {
    let invalid = |key: &str, value| invalid(plugin, key, value, "true or false, by name");
    let mut supported = Vec::new();
    let Some(capabilities) = plugin.keys.get("capabilities").filter(|value| !value.is_null()) else {
        return Ok(supported);
    };
    for (name, value) in capabilities.as_object().ok_or_else(|| invalid("capabilities", capabilities))? {
        if value.as_bool().ok_or_else(|| invalid(&format!("capabilities.{name}"), value))? {
            supported.push(name.as_str());
        }
    }
    Ok(supported)
}

fn invalid(plugin: &Block, key: &str, value: &Value, expected: &str) -> Error {
    wrong_type(&format!("{}.{key}", plugin.path), value, expected)
}

fn run(
    runner: &dyn Runner,
    call: &Call,
    plugin: &Block,
    conf: Result<Map<String, Value>, Error>,
) -> Result<Option<Value>, Error> {
    let result = conf.and_then(|conf| runner.run(call, plugin.kind(), &conf));
    result.map_err(|error| failed(call, plugin, error))
}

/// Returns the error of a plugin with the wording of the reference library (`libcni/api.go`).
fn failed(call: &Call, plugin: &Block, mut error: Error) -> Error {
    let command = match call.command {
        CniCommand::Add => "add",
        CniCommand::Check => "check",
        CniCommand::Del => "delete",
        CniCommand::Gc => "gc",
        CniCommand::Status => "status",
    };
    error.msg = format!("plugin type={:?} failed ({command}): {}", plugin.kind(), error.msg);
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Code;

    fn plugin(conf: &Value) -> Block {
        Block::new("chain[1]", conf).expect("an object")
    }

    fn network() -> RunnableConfiguration {
        let runtime_config = json!({"portMappings": [1], "dns": {"servers": []}, "mac": "m"});
        RunnableConfiguration {
            name: "n".into(),
            cni_version: "1.1.0".into(),
            runtime_config: runtime_config.as_object().expect("an object").clone(),
            ..RunnableConfiguration::default()
        }
    }

    #[test]
    fn a_plugin_gets_the_name_the_version_and_the_previous_result() {
        let own = plugin(&json!({"type": "x", "name": "other", "cniVersion": "0.1.0", "a": {"b": [1, null]}}));
        let previous = json!({"cniVersion": "1.1.0", "ips": []});
        let conf = network().attachment_conf(&own, Some(&previous)).expect("a configuration");
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0", "a": {"b": [1, null]}, "prevResult": previous,
        });
        assert_eq!(Value::Object(conf), wanted);
        let conf = network().attachment_conf(&own, None).expect("a configuration");
        assert!(!conf.contains_key("prevResult"));
    }

    #[test]
    fn runtime_config_has_the_keys_that_capabilities_list() {
        let able = json!({"type": "x", "capabilities": {"portMappings": true, "mac": false, "ips": true}});
        let conf = network().attachment_conf(&plugin(&able), None).expect("a configuration");
        assert_eq!(conf["runtimeConfig"], json!({"portMappings": [1]}));
        assert!(!conf.contains_key("capabilities"));
        let unable = json!({"type": "x", "capabilities": {"ips": true}});
        let conf = network().attachment_conf(&plugin(&unable), None).expect("a configuration");
        assert!(!conf.contains_key("runtimeConfig"));
    }

    #[test]
    fn capabilities_that_are_not_booleans_are_refused() {
        for (wrong, place) in [(json!([]), "chain[1].capabilities: "), (json!({"a": 1}), "chain[1].capabilities.a: ")] {
            let own = plugin(&json!({"type": "x", "capabilities": wrong}));
            let error = network().attachment_conf(&own, None).expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(place), "{error}");
        }
    }

    #[test]
    fn args_of_the_network_override_those_of_the_plugin() {
        let args = json!({"a": 1, "b": 2});
        let network = RunnableConfiguration { args: args.as_object().expect("an object").clone(), ..network() };
        for (own, wanted) in [
            (json!({"type": "x"}), json!({"cni": {"a": 1, "b": 2}})),
            (
                json!({"args": {"other": 0, "cni": {"b": 9, "c": 3}}}),
                json!({"other": 0, "cni": {"b": 2, "c": 3, "a": 1}}),
            ),
        ] {
            assert_eq!(network.attachment_conf(&plugin(&own), None).expect("a configuration")["args"], wanted);
        }
        for wrong in [json!([]), json!({"cni": 1})] {
            let error = network.attachment_conf(&plugin(&json!({"args": wrong})), None).expect_err("refused");
            assert!(error.msg.starts_with("chain[1].args: "), "{error}");
        }
    }

    #[test]
    fn gc_has_the_list_under_both_keys_and_no_attachment_keys() {
        let own = plugin(&json!({"type": "x", "capabilities": {"mac": true}}));
        let valid = [ValidAttachment { container_id: "c".into(), ifname: "eth0".into() }];
        let list = json!([{"containerID": "c", "ifname": "eth0"}]);
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0",
            "cni.dev/valid-attachments": list, "cni.dev/attachments": list,
        });
        assert_eq!(Value::Object(network().gc_conf(&own, Some(&valid))), wanted);
        assert!(!network().gc_conf(&own, None).contains_key("cni.dev/valid-attachments"));
    }
}

#[cfg(test)]
mod sequence_tests {
    use super::*;
    use crate::cni::Code;
    use serde_json::json;
    use std::cell::RefCell;

    /// Records the calls: command, plugin type, and `from` of the previous result.
    #[derive(Default)]
    struct Recorder(RefCell<Vec<String>>);

    impl Runner for Recorder {
        /// A plugin of type `a` returns a result from `a`, one of type `silent` returns nothing, and one of type
        /// `ADD`, `DEL`, … fails for that command.
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

    fn network(version: &str, kinds: &[&str]) -> RunnableConfiguration {
        let plugin = |kind: &&str| Block::new("", &json!({"type": kind})).expect("an object");
        let plugins = kinds.iter().map(plugin).collect();
        RunnableConfiguration {
            name: "n".into(),
            cni_version: version.into(),
            plugins,
            ..RunnableConfiguration::default()
        }
    }

    fn call(command: CniCommand) -> Call {
        Call { command, netns: "/run/netns/c".into(), ..Call::example() }
    }

    /// Returns the outcome of `work` and the calls that it made.
    fn calls<T>(work: impl FnOnce(&dyn Runner) -> T) -> (T, Vec<String>) {
        let recorder = Recorder::default();
        let outcome = work(&recorder);
        (outcome, recorder.0.take())
    }

    #[test]
    fn add_passes_each_result_to_the_next_plugin() {
        let network = network("1.0.0", &["a", "silent", "b"]);
        let (result, made) = calls(|runner| network.add(runner, &call(CniCommand::Add), None));
        assert_eq!(made, ["ADD a -", "ADD silent a", "ADD b a"]);
        assert_eq!(result, Ok(Some(json!({"from": "b", "cniVersion": "1.0.0"}))));
        let silent = self::network("", &["silent"]);
        assert_eq!(calls(|runner| silent.add(runner, &call(CniCommand::Add), None)).0, Ok(None));
    }

    #[test]
    fn a_failed_add_is_undone_in_reverse_order() {
        let network = network("1.0.0", &["a", "b", "ADD", "c"]);
        let (result, made) = calls(|runner| network.add(runner, &call(CniCommand::Add), None));
        assert_eq!(made, ["ADD a -", "ADD b a", "ADD ADD b", "DEL ADD b", "DEL b b", "DEL a b"]);
        let error = result.expect_err("it failed");
        assert_eq!((error.number(), error.msg.as_str()), (11, r#"plugin type="ADD" failed (add): ADD refused"#));
    }

    #[test]
    fn del_runs_all_plugins_in_reverse_order() {
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
    fn versions_and_flags_decide_which_commands_run() {
        let check =
            |network: RunnableConfiguration| calls(|runner| network.check(runner, &call(CniCommand::Check), None)).1;
        assert_eq!(check(network("0.4.0", &["a"])), ["CHECK a -"]);
        assert_eq!(check(network("0.3.1", &["a"])), [""; 0]);
        assert_eq!(check(network("", &["a"])), [""; 0]);
        assert_eq!(check(RunnableConfiguration { disable_check: true, ..network("1.0.0", &["a"]) }), [""; 0]);
        let gc = |network: RunnableConfiguration| calls(|runner| network.gc(runner, &call(CniCommand::Gc), None)).1;
        assert_eq!(gc(network("1.1.0", &["GC", "a"])), ["GC GC -", "GC a -"]);
        assert_eq!(gc(network("1.0.0", &["a"])), [""; 0]);
        assert_eq!(gc(RunnableConfiguration { disable_gc: true, ..network("1.1.0", &["a"]) }), [""; 0]);
        let status =
            |network: RunnableConfiguration| calls(|runner| network.status(runner, &call(CniCommand::Status))).1;
        assert_eq!(status(network("1.1.0", &["a", "b"])), ["STATUS a -", "STATUS b -"]);
        assert_eq!(status(network("1.0.0", &["a"])), [""; 0]);
    }

    #[test]
    fn find_checks_all_plugins() {
        let found = |kinds: &[&str]| calls(|runner| network("1.0.0", kinds).find(runner, &call(CniCommand::Add))).0;
        assert_eq!(found(&["a", "b"]), Ok(()));
        assert_eq!(found(&["a", "none"]).map_err(|error| error.msg), Err("none".to_owned()));
    }
}
