//! Warnings for unknown keys, which a plugin must ignore (SPEC.md); a misspelled `chain` or `allow` is an error.

use crate::cni::error::{Code, Error};
use crate::cni::list::excerpt;
use crate::suggest::{closest, did_you_mean};
use serde_json::{Map, Value};

/// The keys of this plugin at the top level.
const OWN: &[&str] = &[
    "allow",
    "attachments_may_exclude_namespaces",
    "auto_dialect",
    "chain",
    "chain_types",
    "cni_conf_dir",
    "delegate_timeout_seconds",
    "dialect",
    "in_process_types",
    "kubernetes",
    "log_file",
    "log_level",
    "merge_addresses",
    "network_status",
    "node_bounds",
    "outside_bounds",
    "readiness_timeout_seconds",
];
/// The keys of istio-cni (`cni/pkg/plugin/plugin.go`), earlier versions included.
const ISTIO: &[&str] = &[
    "ambient_enabled",
    "cni_agent_run_dir",
    "cni_event_address",
    "ebpf_enabled",
    "enable_ambient_detection_retry",
    "enablement_selectors",
    "hostNSEnterExec",
    "exclude_namespaces",
    "log_uds_address",
    "native_nftables",
    "plugin_log_level",
    "pod_namespace",
];
/// The keys of Multus (`docs/configuration.md`), without those of its daemon's own file.
const MULTUS: &[&str] = &[
    "auxiliaryCNIChainName",
    "binDir",
    "clusterNetwork",
    "cniDir",
    "confDir",
    "daemonSocketDir",
    "defaultNetworks",
    "delegates",
    "globalNamespaces",
    "kubeconfig",
    "logFile",
    "logLevel",
    "logOptions",
    "logToStderr",
    "multusNamespace",
    "namespaceIsolation",
    "readinessindicatorfile",
    "retryDeleteOnError",
    "systemNamespaces",
];
/// The keys of the CNI specification, of libcni, and of all plugins of the CNI project.
const CNI: &[&str] = &[
    "args",
    "capabilities",
    "cniVersion",
    "cniVersions",
    "disableCheck",
    "disableGC",
    "dns",
    "ipMasq",
    "ipam",
    "loadOnlyInlinedPlugins",
    "name",
    "plugins",
    "prevResult",
    "runtimeConfig",
    "type",
];
/// The prefix of the specification's keys for runtimes.
const CNI_PREFIX: &str = "cni.dev/";
/// The keys in `kubernetes` of maistra's plugin and of earlier versions of istio-cni, which have no effect here.
const MAISTRA: [&str; 4] = ["intercept_type", "iptables_script", "k8s_api_root", "node_name"];
/// The maximum number of unknown keys with a suggestion: the author of an attachment controls their number.
const MAX_SUGGESTIONS: usize = 8;

/// Returns a warning for each key at the top level that is unknown to this plugin and to the others above.
pub(super) fn at_the_top(keys: &Map<String, Value>) -> Vec<String> {
    warnings("", unknown_at_the_top(keys), || names([OWN, ISTIO, MULTUS]))
}

/// Checks that no unknown key at the top level is a misspelled `chain` or `allow`: an ADD would succeed without the
/// exclusions, or pods could exclude more than the bounds permit. Keys of other plugins with other values than lists and
/// objects are ignored.
///
/// # Errors
/// [`Code::InvalidConfig`] with the first such key.
pub(super) fn check_misspelled(keys: &Map<String, Value>) -> Result<(), Error> {
    let meant = |key: &str| {
        let is_block = keys[key].is_array() || keys[key].is_object();
        let meant = is_block.then(|| closest(key, ["chain", "chain_types", "allow"])).flatten();
        meant.filter(|meant| *meant != "chain_types")
    };
    match unknown_at_the_top(keys).find_map(|key| Some((key, meant(key)?))) {
        Some((key, meant)) => {
            let msg = format!("{}: unknown key; did you mean {meant:?}?", excerpt(key));
            Err(Error::new(Code::InvalidConfig, msg))
        }
        None => Ok(()),
    }
}

/// Returns an error message for the first key of an attachment of `--attachments` that is unknown at the top level, with
/// the suggestion of a key of this plugin: those of Multus that resemble `namespace` have no effect in an attachment.
#[must_use]
pub fn unknown_key(keys: &Map<String, Value>) -> Option<String> {
    let key = unknown_at_the_top(keys).next()?;
    let suggestion = did_you_mean(key, OWN.iter().copied());
    let next = if suggestion.is_empty() { "; remove it" } else { suggestion.as_str() };
    Some(format!("{}: unknown key{next}", excerpt(key)))
}

/// Returns whether the key at the top level is one of this plugin, of istio-cni or of Multus that this plugin may read.
pub(in crate::cni) fn is_of_this_plugin(key: &str) -> bool {
    let aliases = ["cni_agent_run_dir", "exclude_namespaces", "pod_namespace"];
    names([OWN, MULTUS]).chain(aliases).any(|known| known == key)
}

fn names<const N: usize>(lists: [&'static [&'static str]; N]) -> impl Iterator<Item = &'static str> {
    lists.into_iter().flatten().copied()
}

fn unknown_at_the_top(keys: &Map<String, Value>) -> impl Iterator<Item = &str> {
    // The lists of the most frequent keys first.
    let is_known =
        |key: &&str| key.starts_with(CNI_PREFIX) || [CNI, OWN, ISTIO, MULTUS].iter().any(|names| names.contains(key));
    keys.keys().map(String::as_str).filter(move |key| !is_known(key))
}

/// Returns a warning for each of the `unknown` keys in `kubernetes` that is not one of maistra's. `known` are the
/// keys that are read there.
pub(super) fn in_kubernetes(unknown: &[&str], known: impl Fn() -> Vec<&'static str>) -> Vec<String> {
    let unknown = unknown.iter().copied().filter(|key| !MAISTRA.contains(key));
    warnings("kubernetes.", unknown, || known().into_iter())
}

fn warnings<'a, K: Iterator<Item = &'static str>>(
    prefix: &str,
    unknown: impl Iterator<Item = &'a str>,
    known: impl Fn() -> K,
) -> Vec<String> {
    let warning = |(i, key): (usize, &str)| {
        let suggestion = if i < MAX_SUGGESTIONS { did_you_mean(key, known()) } else { String::new() };
        format!("{prefix}{}: unknown key, ignored{suggestion}", excerpt(key))
    };
    unknown.enumerate().map(warning).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::time::{Duration, Instant};

    fn top(value: &Value) -> Vec<String> {
        at_the_top(value.as_object().expect("an object"))
    }

    #[test]
    fn the_warning_for_a_misspelled_key_suggests_the_right_one() {
        let keys = json!({"chian": [], "log_levle": "x", "Dialect": "auto", "something": 1, "chain": []});
        let wanted = [
            "chian: unknown key, ignored; did you mean \"chain\"?",
            "log_levle: unknown key, ignored; did you mean \"log_level\"?",
            "Dialect: unknown key, ignored; did you mean \"dialect\"?",
            "something: unknown key, ignored",
        ];
        assert_eq!(top(&keys), wanted);
        let others = json!({"binDir": "/b", "hostNSEnterExec": false, "readinessindicatorfile": "/f"});
        assert_eq!(top(&others), [""; 0], "keys of Multus and istio-cni");
        let known = ["kubeconfig", "agent_socket"];
        let wanted = ["kubernetes.kubeconfg: unknown key, ignored; did you mean \"kubeconfig\"?"];
        assert_eq!(
            in_kubernetes(&["kubeconfg", "iptables_script", "node_name", "k8s_api_root", "intercept_type"], || known
                .to_vec()),
            wanted
        );
    }

    #[test]
    fn a_misspelled_chain_or_allow_is_an_error() {
        let check = |keys: Value| check_misspelled(keys.as_object().expect("an object")).map_err(|error| error.msg);
        for key in ["chian", "Chain", "chains", "cain", "chain_"] {
            let wanted = format!("{key}: unknown key; did you mean \"chain\"?");
            assert_eq!(check(json!({key: [{"type": "uid-exclude"}]})), Err(wanted.clone()));
            assert_eq!(check(json!({key: {"type": "uid-exclude"}})), Err(wanted));
        }
        let wanted = Err("alow: unknown key; did you mean \"allow\"?".to_owned());
        assert_eq!(check(json!({"alow": [{"uids": "1000-1999"}]})), wanted);
        for other in [
            json!({"chain": [], "chain_type": [], "chain_types": [], "main": [], "plugins": []}),
            json!({"chaining-mode": "generic-veth", "chained": true, "chian": null, "allowed": "all", "flow": []}),
        ] {
            assert_eq!(check(other), Ok(()));
        }
    }

    #[test]
    fn the_schema_of_the_chart_has_every_key_that_the_chart_can_apply() {
        let text = include_str!("../../../manifests/chart/values.schema.json");
        let schema: Value = serde_json::from_str(text).expect("JSON");
        let properties = |definition: &str| {
            let keys = schema["definitions"][definition]["properties"].as_object().expect("an object");
            keys.keys().cloned().collect::<std::collections::BTreeSet<String>>()
        };
        let owned = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>();
        // The chart's logLevel sets log_level, the agent the next two, and no file contains the last one. kubernetes has a
        // list of its own.
        let elsewhere = ["log_level", "cni_conf_dir", "auto_dialect", "node_bounds"];
        let own = names([OWN]).filter(|key| !elsewhere.contains(key)).map(str::to_owned);
        // Of Multus's keys, those that have an effect, except those for which detour has keys of its own.
        let multus = owned(&[
            "auxiliaryCNIChainName",
            "binDir",
            "clusterNetwork",
            "cniDir",
            "confDir",
            "defaultNetworks",
            "delegates",
            "globalNamespaces",
            "multusNamespace",
            "namespaceIsolation",
            "readinessindicatorfile",
            "retryDeleteOnError",
            "systemNamespaces",
        ]);
        let wanted = own.chain(multus).chain(owned(&["capabilities"])).collect();
        assert_eq!(properties("config"), wanted);
        let of_attachment =
            owned(&["capabilities", "chain", "dialect", "log_level", "name", "namespace", "namespaces"]);
        assert_eq!(properties("attachment"), of_attachment.into_iter().collect());
    }

    #[test]
    fn keys_of_runtimes_and_other_plugins_cause_no_warnings() {
        for keys in [OWN, ISTIO, MULTUS, CNI, &["cni.dev/valid-attachments", "cni.dev/attachments"]] {
            let keys: Map<String, Value> = keys.iter().map(|key| ((*key).to_owned(), Value::Null)).collect();
            assert_eq!(at_the_top(&keys), [""; 0]);
        }
    }

    #[test]
    fn many_or_long_unknown_keys_are_handled_fast() {
        let started = Instant::now();
        let many: Map<String, Value> = (0..90_000).map(|i| (format!("chian{i}"), Value::Null)).collect();
        let suggested = at_the_top(&many).iter().filter(|warning| warning.contains("did you mean")).count();
        assert_eq!(suggested, MAX_SUGGESTIONS);
        let long = [("chian".repeat(800_000), Value::Null)].into_iter().collect();
        assert!(at_the_top(&long)[0].len() < 300);
        let lists: Map<String, Value> = (0..90_000).map(|i| (format!("list{i}"), json!([]))).collect();
        assert_eq!(check_misspelled(&lists), Ok(()));
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }
}
