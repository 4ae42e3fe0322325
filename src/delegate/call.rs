//! The environment of a plugin (SPEC.md, "Parameters").
//!
//! What goes to a plugin's stdin (SPEC.md, "Deriving execution configuration from plugin
//! configuration").

use super::{NetworkConfiguration, Plugin};
use crate::cni::{CniCommand, Error, NetConf, Request, ValidAttachment, wrong_type};
use serde_json::{Map, Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// One call of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `CNI_COMMAND`.
    pub command: CniCommand,
    /// `CNI_CONTAINERID`; empty for GC and STATUS.
    pub container_id: String,
    /// `CNI_NETNS`; empty where there is none.
    pub netns: PathBuf,
    /// `CNI_IFNAME`; empty for GC and STATUS.
    pub ifname: String,
    /// `CNI_ARGS`; `None` is what this process was given itself.
    pub args: Option<String>,
    /// `kubernetes.cni_bin_dir`: searched before `path` for the executable.
    pub bin_dir: Option<PathBuf>,
    /// `CNI_PATH` of this process's own call.
    pub path: Vec<PathBuf>,
    /// How long it may take.
    pub timeout: Duration,
}

impl Call {
    /// The call that this process was started with, handed on.
    #[must_use]
    pub fn handed_on(request: &Request, conf: &NetConf) -> Self {
        Self {
            command: request.command,
            container_id: request.container_id.clone(),
            netns: request.netns.clone().unwrap_or_default(),
            ifname: request.ifname.clone(),
            args: None,
            path: request
                .path
                .iter()
                .filter(|path| conf.kubernetes.cni_bin_dir.as_ref() != Some(path))
                .cloned()
                .collect(),
            bin_dir: conf.kubernetes.cni_bin_dir.clone(),
            timeout: conf.delegate_timeout,
        }
    }

    /// The same with another command.
    #[must_use]
    pub fn with_command(&self, command: CniCommand) -> Self {
        Self { command, ..self.clone() }
    }

    /// The directories in which the executable is searched for.
    pub(super) fn directories(&self) -> impl Iterator<Item = &Path> {
        self.bin_dir.iter().chain(&self.path).map(PathBuf::as_path)
    }

    /// What is set in the plugin's environment; `bin_dir` is in front of `CNI_PATH`. All else that is in
    /// this process's own passes on, as the reference library does it (`pkg/invoke/args.go`).
    pub(super) fn variables(&self, bin_dir: Option<&Path>) -> Vec<(&'static str, OsString)> {
        let directories: Vec<_> =
            bin_dir.into_iter().chain(self.path.iter().map(PathBuf::as_path)).map(Path::as_os_str).collect();
        let mut variables = vec![
            ("CNI_COMMAND", self.command.to_string().into()),
            ("CNI_CONTAINERID", self.container_id.clone().into()),
            ("CNI_NETNS", self.netns.clone().into()),
            ("CNI_IFNAME", self.ifname.clone().into()),
            ("CNI_PATH", directories.join(":".as_ref())),
        ];
        variables.extend(self.args.as_ref().map(|args| ("CNI_ARGS", args.into())));
        variables
    }
}

/// The configuration of `plugin` in `network` for ADD, DEL and CHECK: its own keys, with the
/// network's name and version, the previous result, and of what the runtime offers what the
/// plugin's `capabilities` ask for.
///
/// # Errors
/// `capabilities` is no object of booleans, or `args` no object where the call has some.
pub(super) fn for_attachment(
    network: &NetworkConfiguration,
    plugin: &Plugin,
    previous: Option<&Value>,
) -> Result<Map<String, Value>, Error> {
    let mut conf = for_node(network, plugin);
    if let Some(previous) = previous {
        conf.insert("prevResult".to_owned(), previous.clone());
    }
    let mut offered = Map::new();
    for capability in capabilities(plugin)? {
        if let Some(value) = network.runtime_config.get(capability) {
            offered.insert(capability.to_owned(), value.clone());
        }
    }
    if !offered.is_empty() {
        conf.insert("runtimeConfig".to_owned(), offered.into());
    }
    if !network.args.is_empty() {
        let wrong = || {
            wrong(plugin, "args", plugin.conf.get("args").unwrap_or(&Value::Null), "an object whose cni is an object")
        };
        let args = plugin.conf.get("args").filter(|args| !args.is_null());
        let mut args = args.map_or_else(|| Some(Map::new()), |args| args.as_object().cloned()).ok_or_else(wrong)?;
        let cni = args.entry("cni").or_insert_with(|| json!({}));
        cni.as_object_mut().ok_or_else(wrong)?.extend(network.args.clone());
        conf.insert("args".to_owned(), args.into());
    }
    Ok(conf)
}

/// The configuration for STATUS, which is about no attachment.
pub(super) fn for_node(network: &NetworkConfiguration, plugin: &Plugin) -> Map<String, Value> {
    let mut conf = plugin.conf.clone();
    // A description of the plugin for the runtime; the plugin must not see it.
    conf.shift_remove("capabilities");
    conf.insert("name".to_owned(), network.name.as_str().into());
    conf.insert("cniVersion".to_owned(), network.cni_version.as_str().into());
    conf
}

/// The configuration for GC. The list goes under two names: the reference library sent it under
/// the second before the first was in the specification (`libcni/api.go`).
pub(super) fn for_gc(
    network: &NetworkConfiguration,
    plugin: &Plugin,
    valid: Option<&[ValidAttachment]>,
) -> Map<String, Value> {
    let mut conf = for_node(network, plugin);
    if let Some(valid) = valid {
        let list: Value = valid.iter().map(|a| json!({"containerID": a.container_id, "ifname": a.ifname})).collect();
        conf.insert("cni.dev/valid-attachments".to_owned(), list.clone());
        conf.insert("cni.dev/attachments".to_owned(), list);
    }
    conf
}

fn capabilities(plugin: &Plugin) -> Result<Vec<&str>, Error> {
    let accepted = "true or false, by name";
    match plugin.conf.get("capabilities") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Object(named)) => {
            let mut wanted = Vec::new();
            for (name, value) in named {
                if value.as_bool().ok_or_else(|| wrong(plugin, &format!("capabilities.{name}"), value, accepted))? {
                    wanted.push(name.as_str());
                }
            }
            Ok(wanted)
        }
        Some(other) => Err(wrong(plugin, "capabilities", other, accepted)),
    }
}

fn wrong(plugin: &Plugin, key: &str, value: &Value, accepted: &str) -> Error {
    wrong_type(&format!("{}.{key}", plugin.path), value, accepted)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cni::Code;
    use std::collections::HashMap;

    /// A DEL without directories.
    pub(in crate::delegate) fn call() -> Call {
        Call {
            command: CniCommand::Del,
            container_id: "c".into(),
            netns: PathBuf::new(),
            ifname: "eth0".into(),
            args: None,
            bin_dir: None,
            path: Vec::new(),
            timeout: Duration::from_secs(1),
        }
    }

    #[test]
    fn a_call_is_handed_on_with_the_bin_dir_in_front() {
        let request = Request::parse(|name| {
            let value = match name {
                "CNI_COMMAND" => "DEL",
                "CNI_CONTAINERID" => "c1",
                "CNI_IFNAME" => "eth0",
                "CNI_PATH" => "/a:/x:/b",
                _ => return None,
            };
            Some(value.to_owned())
        })
        .expect("a request");
        let conf = br#"{"name": "n", "type": "detour", "kubernetes": {"cni_bin_dir": "/x"}}"#;
        let conf = NetConf::parse(conf, CniCommand::Del, "detour").expect("a configuration");
        let call = Call::handed_on(&request, &conf);
        let variables: HashMap<_, _> = call.variables(call.bin_dir.as_deref()).into_iter().collect();
        let wanted = [
            ("CNI_COMMAND", "DEL"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", ""),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/x:/a:/b"),
        ];
        assert_eq!(variables, wanted.map(|(name, value)| (name, OsString::from(value))).into());
        assert_eq!(call.timeout, Duration::from_secs(60));
    }

    fn plugin(conf: &Value) -> Plugin {
        Plugin { kind: "x".into(), path: "chain[1]".into(), conf: conf.as_object().expect("an object").clone() }
    }

    fn network() -> NetworkConfiguration {
        let runtime_config = json!({"portMappings": [1], "dns": {"servers": []}, "mac": "m"});
        NetworkConfiguration {
            name: "n".into(),
            cni_version: "1.1.0".into(),
            runtime_config: runtime_config.as_object().expect("an object").clone(),
            ..NetworkConfiguration::default()
        }
    }

    #[test]
    fn name_version_and_previous_result_are_put_in() {
        let own = plugin(&json!({"type": "x", "name": "other", "cniVersion": "0.1.0", "a": {"b": [1, null]}}));
        let previous = json!({"cniVersion": "1.1.0", "ips": []});
        let conf = for_attachment(&network(), &own, Some(&previous)).expect("a configuration");
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0", "a": {"b": [1, null]}, "prevResult": previous,
        });
        assert_eq!(Value::Object(conf), wanted);
        let conf = for_attachment(&network(), &own, None).expect("a configuration");
        assert!(!conf.contains_key("prevResult"));
    }

    #[test]
    fn of_the_runtimes_offer_what_the_plugin_can_take() {
        let able = json!({"type": "x", "capabilities": {"portMappings": true, "mac": false, "ips": true}});
        let conf = for_attachment(&network(), &plugin(&able), None).expect("a configuration");
        assert_eq!(conf["runtimeConfig"], json!({"portMappings": [1]}));
        assert!(!conf.contains_key("capabilities"));
        let unable = json!({"type": "x", "capabilities": {"ips": true}});
        let conf = for_attachment(&network(), &plugin(&unable), None).expect("a configuration");
        assert!(!conf.contains_key("runtimeConfig"));
    }

    #[test]
    fn capabilities_are_booleans_by_name() {
        for (wrong, place) in [(json!([]), "chain[1].capabilities: "), (json!({"a": 1}), "chain[1].capabilities.a: ")] {
            let own = plugin(&json!({"type": "x", "capabilities": wrong}));
            let error = for_attachment(&network(), &own, None).expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(place), "{error}");
        }
    }

    #[test]
    fn args_of_the_call_win_over_the_plugins_own() {
        let args = json!({"a": 1, "b": 2});
        let network = NetworkConfiguration { args: args.as_object().expect("an object").clone(), ..network() };
        for (own, wanted) in [
            (json!({"type": "x"}), json!({"cni": {"a": 1, "b": 2}})),
            (
                json!({"args": {"other": 0, "cni": {"b": 9, "c": 3}}}),
                json!({"other": 0, "cni": {"b": 2, "c": 3, "a": 1}}),
            ),
        ] {
            assert_eq!(for_attachment(&network, &plugin(&own), None).expect("a configuration")["args"], wanted);
        }
        for wrong in [json!([]), json!({"cni": 1})] {
            let error = for_attachment(&network, &plugin(&json!({"args": wrong})), None).expect_err("refused");
            assert!(error.msg.starts_with("chain[1].args: "), "{error}");
        }
    }

    #[test]
    fn gc_has_the_list_twice_and_nothing_of_an_attachment() {
        let own = plugin(&json!({"type": "x", "capabilities": {"mac": true}}));
        let valid = [ValidAttachment { container_id: "c".into(), ifname: "eth0".into() }];
        let list = json!([{"containerID": "c", "ifname": "eth0"}]);
        let wanted = json!({
            "type": "x", "name": "n", "cniVersion": "1.1.0",
            "cni.dev/valid-attachments": list, "cni.dev/attachments": list,
        });
        assert_eq!(Value::Object(for_gc(&network(), &own, Some(&valid))), wanted);
        assert!(!for_gc(&network(), &own, None).contains_key("cni.dev/valid-attachments"));
    }
}
