//! Checks without a pod, with the parsers of a call, whether an ADD would succeed: what a configuration says
//! ([`validate`]), and for STATUS (SPEC.md, "STATUS") also what the node has now.
//!
//! If STATUS fails, the node becomes NotReady and its kubelet starts only pods with `hostNetwork`. So STATUS never
//! fails because of something that the node's agent repairs: the agent's pod needs a network, and the node would stay
//! NotReady.

use super::evaluation::source_of;
use super::inputs::group_ids;
use super::probe;
use crate::cni::{
    CniCommand, Code, DefaultNetwork, Error, Kubernetes, NetConf, OWN_LIST, Primary, SUB_PLUGINS, did_you_mean,
    is_configuration_file, result,
};
use crate::firewall::nfnetlink::NfSocket;
use crate::networks::RunnableConfiguration;
use crate::state::{ROOT, Store};
use crate::{cluster, logging, sub_plugins, trusted_file};
use serde_json::Value;
use std::path::Path;
use std::{fs, io};

/// The maximum size of a configuration of the loopback interface; a larger file configures another network.
const MAX_LOOPBACK_SIZE: u64 = 16 << 10;

/// Checks everything that an ADD needs. Returns whether facts can be fetched now; otherwise the agent repairs their
/// source.
///
/// # Errors
/// [`Code::NotAvailable`], with all causes in its details.
pub(super) fn check_availability(conf: &NetConf) -> Result<bool, Error> {
    let facts = check_facts(conf);
    let has_facts = matches!(facts, Ok(true));
    let outcomes = [
        check_chain(conf),
        check_ambient(conf),
        check_cluster_network(conf),
        facts.map(drop),
        check_kernel(),
        check_guard(conf),
        Store::new(ROOT).probe(),
    ];
    let causes: Vec<String> = outcomes.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    if causes.is_empty() {
        return Ok(has_facts);
    }
    let msg = format!("network {}: an ADD would fail now", conf.name);
    Err(Error::new(Code::NotAvailable, msg).with_details(causes.join("; ")))
}

/// Checks the sub-plugins as an ADD does. No agent repairs them: it validates a configuration before it writes it.
///
/// # Errors
/// The first setting that an ADD would reject.
pub(super) fn check_chain(conf: &NetConf) -> Result<(), Error> {
    check_sub_plugins(conf, Some(&conf.group_file), source_of(conf).is_some())
}

fn check_ambient(conf: &NetConf) -> Result<(), Error> {
    let msg = "ambient_enabled: detour does not redirect pods of the ambient mesh; run istio-cni for them, and remove \
               ambient_enabled or istio-redirect";
    if conf.redirects_ambient { Err(Error::new(Code::InvalidConfig, msg)) } else { Ok(()) }
}

/// Checks that the cluster network has not withdrawn its configuration list, of which this one is a copy: without the
/// copy, the runtime would report no network.
fn check_cluster_network(conf: &NetConf) -> Result<(), Error> {
    let Some(directory) = &conf.cni_conf_dir else { return Ok(()) };
    let entries = match fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>) {
        Ok(entries) => entries,
        Err(error) => {
            tracing::warn!("can't read cni_conf_dir: {}: {error}", directory.display());
            return Ok(());
        }
    };
    let is_other = |name: &str| name != OWN_LIST && is_configuration_file(name);
    let mut others = entries.iter().filter(|entry| entry.file_name().to_str().is_some_and(is_other));
    if others.any(|entry| !is_loopback(&entry.path())) {
        return Ok(());
    }
    let directory = directory.display();
    let msg = format!(
        "cni_conf_dir: {directory} has no configuration of the cluster network: {OWN_LIST} is a copy of one that was \
         removed; check the pods of the cluster network on this node"
    );
    Err(Error::new(Code::NotAvailable, msg))
}

/// Whether a file configures only the loopback interface. A file that can't be read may be the cluster network's.
fn is_loopback(path: &Path) -> bool {
    let text = trusted_file::read(path, MAX_LOOPBACK_SIZE).ok();
    let value: Option<Value> = text.and_then(|text| serde_json::from_slice(&text).ok());
    let has_type = |plugin: &Value| plugin["type"] == "loopback";
    value.is_some_and(|value| match value["plugins"].as_array() {
        Some(plugins) => !plugins.is_empty() && plugins.iter().all(has_type),
        None => has_type(&value),
    })
}

/// Returns whether facts can be fetched. If the configuration names an agent on this node, an error is only logged: the
/// agent renews the kubeconfig, and its own pod is attached without facts.
fn check_facts(conf: &NetConf) -> Result<bool, Error> {
    match cluster::source(&conf.kubernetes).map_or(Ok(()), |source| source.probe()) {
        Ok(()) => Ok(true),
        Err(error) if has_agent(&conf.kubernetes) => {
            tracing::warn!(
                "an ADD of a pod with a sidecar would fail now; the agent on this node repairs this: {error}"
            );
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Returns whether the configuration names an agent on this node, which repairs what it installed.
pub(super) fn has_agent(kubernetes: &Kubernetes) -> bool {
    let Kubernetes { agent_socket, agent_namespace, manifests_dir, .. } = kubernetes;
    manifests_dir.is_none() && (agent_socket.is_some() || agent_namespace.is_some())
}

/// Checks that the kernel accepts the rules of the guard, if the chain has one.
fn check_guard(conf: &NetConf) -> Result<(), Error> {
    let Some(why) = probe::refused_guard(&conf.chain) else { return Ok(()) };
    let msg = format!(
        "mesh-guard: the kernel refuses its rules: {why}; check that the node's kernel has nft_reject_inet and \
         nft_fib_inet, or remove mesh-guard"
    );
    Err(Error::new(Code::KernelRefused, msg))
}

fn check_kernel() -> Result<(), Error> {
    let generation = NfSocket::open().and_then(|mut socket| socket.generation());
    let failed = |e| Error::new(Code::KernelRefused, format!("the kernel's nf_tables does not answer: {e}"));
    generation.map(drop).map_err(failed)
}

/// What is known about the node on which a configuration will be used.
#[derive(Clone, Copy)]
pub struct TargetNode<'a> {
    /// Returns whether an executable in the chain of a configuration is installed; `None` if that is unknown.
    pub is_installed: &'a dyn Fn(&NetConf, &str) -> Option<bool>,
    /// The file with the node's groups (group(5)); `None` if it is unknown: then every group exists.
    pub group_file: Option<&'a Path>,
    /// Whether a node configuration that is not known here may name a source of facts.
    pub may_name_source: bool,
}

/// Checks the blocks of the sub-plugins as an ADD does, as completely as possible without a pod. Without a
/// `group_file`, every group exists.
///
/// # Errors
/// The first setting that an ADD would reject, with the path of its key.
pub(super) fn check_sub_plugins(conf: &NetConf, group_file: Option<&Path>, has_facts: bool) -> Result<(), Error> {
    let known = group_file.map(group_ids);
    let group_id = |name: &str| known.as_ref().map_or(Some(0), |group_id| group_id(name));
    sub_plugins::check(&conf.chain, &conf.bounds, &conf.args, &group_id, has_facts)
}

/// Checks `conf`, the blocks of its sub-plugins and, for a primary plugin, those delegates that run in this process.
/// Returns the configuration's own warnings and what could not be checked, one line each.
///
/// # Errors
/// The first setting that an ADD would reject, with the path of its key; an executable that is not installed or, if
/// that is unknown, whose name looks like a misspelled sub-plugin.
pub fn validate(conf: &NetConf, node: TargetNode<'_>) -> Result<Vec<String>, Error> {
    let mut warnings = conf.warnings.clone();
    check_sub_plugins(conf, node.group_file, true)?;
    if cluster::source(&conf.kubernetes).is_none()
        && let Err(error) = check_sub_plugins(conf, node.group_file, false)
    {
        if !node.may_name_source {
            return Err(error);
        }
        warnings.push(format!("{}; or in the node configuration, which was not checked", error.msg));
    }
    result::passed_through(conf)?;
    warnings.extend(sub_plugins::trusts_namespaces(&conf.chain, &conf.bounds));
    for (kind, block) in sub_plugins::executables(&conf.chain) {
        let suggestion = did_you_mean(kind, SUB_PLUGINS);
        let refused =
            |what: &str| Error::new(Code::InvalidConfig, format!("{}.type: {kind:?} {what}{suggestion}", block.path));
        match (node.is_installed)(conf, kind) {
            Some(true) => {}
            Some(false) => {
                return Err(refused("is not a sub-plugin, and not an executable in the program directories"));
            }
            None if !suggestion.is_empty() => return Err(refused("is not a sub-plugin")),
            None => warnings.push(format!(
                "{}.type: {kind:?} is an executable; whether it is installed was not checked",
                block.path
            )),
        }
    }
    if let Some(path) = &conf.log_file {
        logging::check_log_file(path).map_err(|why| Error::new(Code::InvalidConfig, format!("log_file: {why}")))?;
    }
    if let Some(Primary { default: DefaultNetwork::Delegates(delegates), in_process_types, .. }) = &conf.primary {
        for (i, delegate) in delegates.iter().enumerate() {
            let place = format!("delegates[{i}]");
            let about = |error: Error| error.at(&place);
            let list = RunnableConfiguration::parse(&place, &delegate.to_string(), None)?;
            for plugin in &list.plugins {
                let kind = plugin.kind();
                if !in_process_types.iter().any(|own| own == kind) {
                    // It may be in another directory of `CNI_PATH`.
                    warnings.extend(((node.is_installed)(conf, kind) == Some(false)).then(|| {
                        format!("{place}: type {kind:?}: no executable in the program directories that were searched")
                    }));
                    continue;
                }
                let text = Value::Object(list.node_conf(plugin)).to_string();
                let mut own = NetConf::parse(text.as_bytes(), CniCommand::Add, "").map_err(about)?;
                own.kubernetes.clone_from(&conf.kubernetes);
                let of_delegate = validate(&own, node).map_err(about)?;
                warnings.extend(of_delegate.into_iter().map(|warning| format!("{place}: {warning}")));
            }
        }
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn validated(mut conf: Value, installed: Option<bool>) -> Result<Vec<String>, String> {
        conf["name"] = json!("n");
        conf["cniVersion"] = json!("1.0.0");
        conf["kubernetes"] = json!({"kubeconfig": "/k"});
        validated_as_written(&conf, installed, None)
    }

    fn validated_as_written(
        conf: &Value,
        installed: Option<bool>,
        group_file: Option<&Path>,
    ) -> Result<Vec<String>, String> {
        let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("understood");
        let node = TargetNode { is_installed: &|_, _| installed, group_file, may_name_source: false };
        validate(&conf, node).map_err(|error| error.msg)
    }

    /// Returns a configuration of the sub-plugin `kind` with `block` as the pod's arguments.
    fn args(kind: &str, block: Value) -> Value {
        json!({"chain": [{"type": kind}], "args": {"cni": {kind: block}}})
    }

    #[test]
    fn settings_that_depend_on_the_pod_are_accepted() {
        let same =
            json!([{"type": "istio-redirect", "drop_invalid": true}, {"type": "istio-redirect", "drop_invalid": true}]);
        let of_pod = json!([
            {"type": "uid-exclude", "uids": ["container:web", "init-containers", "namespace-range"]},
            {"type": "dns-exclude", "resolvers": ["resolv-conf", "excluded-ranges"]},
            {"type": "istio-redirect", "owner_groups_include": ["root", "no-such-group"]},
        ]);
        let pinned = json!([{"type": "uid-exclude", "uids": [1], "pod_overrides": false}]);
        // In a grant, as in a block, a namespace's range depends on who can update the namespace.
        let rule = json!([{"type": "uid-exclude", "rules": ["tcp:443:7", "tcp:80:namespace-range"]}]);
        let grants = json!([{"ports": 1}, {"gids": "7, namespace-range-last"}]);
        for (key, value) in [("chain", of_pod), ("chain", rule), ("allow", grants)] {
            let warnings = validated(json!({key: value}), None).expect("accepted");
            let trust = "trust it only where users can't update namespaces, as on OpenShift; elsewhere, list numbers";
            assert!(warnings.len() == 1 && warnings[0].ends_with(trust), "{warnings:?}");
        }
        let of_container = json!([{"type": "istio-redirect", "proxy_uid": [], "proxy_gid": []}]);
        for chain in [same, pinned, of_container] {
            let conf = json!({"chain": chain, "args": {"cni": {"uid-exclude": {"uids": ["container:web"]}}}, "prevResult": {}});
            assert_eq!(validated(conf, None), Ok(vec![]));
        }
        let mut ignored = args("uid-exclude", json!({"uids": ["x"]}));
        ignored["chain"][0]["pod_overrides"] = json!(false);
        assert_eq!(validated(ignored, None), Ok(vec![]), "an ADD does not read it");
    }

    #[test]
    fn settings_that_an_add_would_refuse_are_refused_with_their_path() {
        for (conf, part) in [
            (json!({"chain": [{"type": "uid-exclude", "uids": ["x"]}]}), "chain[0].uids: invalid value \"x\""),
            (json!({"chain": [{"type": "istio-redirect", "proxy_prot": 1}]}), "chain[0].proxy_prot: unknown key"),
            (json!({"chain": [{"type": "dns-exclude", "ports": [0]}]}), "chain[0].ports"),
            (
                json!({"chain": [
                    {"type": "istio-redirect", "drop_invalid": true}, {"type": "istio-redirect", "drop_invalid": false},
                ]}),
                "chain[0] and chain[1] contradict each other",
            ),
            (
                json!({"chain": [
                    {"type": "istio-redirect", "proxy_uid": [], "proxy_gid": [], "pod_overrides": false},
                ]}),
                "proxy_uid and proxy_gid are both empty",
            ),
            (args("istio-redirect", json!({"proxy_port": "x"})), "args.cni.istio-redirect.proxy_port"),
            (args("uid-exclude", json!({"uids": ["x"]})), "args.cni.uid-exclude.uids"),
            (args("dns-exclude", json!({"portz": []})), "args.cni.dns-exclude.portz"),
            (json!({"prevResult": 5}), "prevResult: expected an object"),
            (
                json!({"delegates": [
                    {"name": "a", "type": "ovn"},
                    {"name": "b", "type": "detour", "chain": [{"type": "uid-exclude", "uids": "x"}]},
                ]}),
                "delegates[1]: chain[0].uids",
            ),
            (json!({"delegates": [{"type": "ovn"}]}), "delegates[0].name: missing"),
            (json!({"delegates": [{"name": "a/b", "type": "ovn"}]}), "delegates[0].name: invalid value \"a/b\""),
            (json!({"delegates": [{"name": "a"}]}), "delegates[0]: neither type nor plugins is set"),
            (json!({"delegates": [{"name": "a", "type": "../x"}]}), "delegates[0].type"),
            (
                json!({"delegates": [{"name": "l", "plugins": [{"type": "a"}, {"type": "istio-cni", "log_level": "x"}]}]}),
                "delegates[0]: log_level",
            ),
        ] {
            let why = validated(conf.clone(), None).expect_err("refused");
            assert!(why.contains(part), "{conf}: {why}");
        }
    }

    #[test]
    fn sub_plugins_that_need_facts_are_refused_without_a_source() {
        let of = |chain: Value| validated_as_written(&json!({"name": "n", "chain": chain}), None, None);
        let needing = [
            json!({"type": "istio-redirect"}),
            json!({"type": "uid-exclude", "uids": ["container:web"]}),
            json!({"type": "container-exclude", "containers": ["vault-agent"]}),
        ];
        for block in needing {
            let why = of(json!([block.clone()])).expect_err("no source");
            assert!(why.starts_with("chain[0]") && why.contains("set kubernetes.kubeconfig"), "{block}: {why}");
        }
        let others = json!([
            {"type": "uid-exclude", "uids": [1337]}, {"type": "dns-exclude", "resolvers": ["resolv-conf"]},
            {"type": "container-exclude"},
        ]);
        assert_eq!(of(others), Ok(vec![]));
    }

    #[test]
    fn groups_are_those_of_the_node() {
        let of = |group: &str, file| {
            let chain = json!([{"type": "istio-redirect", "owner_groups_include": [group]}]);
            let kubernetes = json!({"kubeconfig": "/k"});
            validated_as_written(&json!({"name": "n", "kubernetes": kubernetes, "chain": chain}), None, file)
        };
        let file = Some(Path::new("/etc/group"));
        assert_eq!(of("root", file), Ok(vec![]));
        assert_eq!(of("no-such-group", None), Ok(vec![]));
        let why = of("no-such-group", file).expect_err("unknown");
        assert!(why.starts_with("chain[0].owner_groups_include: invalid value \"no-such-group\""), "{why}");
    }

    #[test]
    fn an_executable_is_refused_if_it_is_missing_or_looks_like_a_misspelled_sub_plugin() {
        let of = |kind: &str, installed| validated(json!({"chain": [{"type": kind}]}), installed);
        let why = of("uid-exclud", None).expect_err("a typing error");
        assert_eq!(why, "chain[0].type: \"uid-exclud\" is not a sub-plugin; did you mean \"uid-exclude\"?");
        let why = of("uid-exclud", Some(false)).expect_err("a typing error");
        assert!(why.ends_with("in the program directories; did you mean \"uid-exclude\"?"), "{why}");
        assert!(of("exclude-backup", Some(false)).is_err());
        assert_eq!(of("exclude-backup", Some(true)), Ok(vec![]));
        assert_eq!(of("uid-exclud", Some(true)), Ok(vec![]), "an executable of that name");
        assert!(of("exclude-backup", None).expect("accepted")[0].contains("was not checked"));
        let delegate = |installed| validated(json!({"delegates": [{"name": "a", "type": "ovn"}]}), installed);
        let missing = "delegates[0]: type \"ovn\": no executable in the program directories that were searched";
        assert_eq!(delegate(Some(false)), Ok(vec![missing.to_owned()]));
        assert_eq!((delegate(Some(true)), delegate(None)), (Ok(vec![]), Ok(vec![])));
    }
}
