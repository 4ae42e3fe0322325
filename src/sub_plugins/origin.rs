//! Where each value of a policy comes from: whose word it is.

use super::SubPlugin;
use super::settings::Settings;
use super::sub_plugin::ParsedBlock;
use super::{istio_annotations, proxy_container};
use crate::pod::Pod;
use crate::policy::Exclusion;
use std::fmt;

/// Whose word a setting or an exclusion is; from the farthest from the pod to the nearest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum SettingSource {
    /// Nobody's: Istio's own default.
    Default,
    /// The configuration's block at this path.
    Configuration(String),
    /// What the container istio-proxy says of itself: its ID's key or an environment variable.
    Container(&'static str),
    /// `args.cni`, the block of this sub-plugin.
    Argument(SubPlugin),
    /// This annotation of the pod's namespace.
    Namespace(&'static str),
    /// This annotation of the pod.
    Pod(&'static str),
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Configuration(path) => write!(f, "configuration, {path}"),
            Self::Container(key) => write!(f, "container istio-proxy, {key}"),
            Self::Argument(sub_plugin) => write!(f, "args.cni.{}", sub_plugin.name()),
            Self::Namespace(key) => write!(f, "namespace, {key}"),
            Self::Pod(key) => write!(f, "pod, {key}"),
        }
    }
}

/// Where everything in an [`super::Output`]'s policy comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins {
    /// Each key of `istio-redirect` with whose value counts; several where several blocks add to
    /// one list. Empty where nothing is redirected.
    pub settings: Vec<(&'static str, SettingSource)>,
    /// Each exclusion that was asked for, those too that another one covers.
    pub exclusions: Vec<(Exclusion, SettingSource)>,
}

/// The layers of the redirection, the nearest to the pod first.
pub(super) struct Layers<'a> {
    /// The blocks one by one, each with its path.
    pub blocks: &'a [ParsedBlock<Settings>],
    /// The pod.
    pub pod: &'a Pod,
    /// Its annotations.
    pub annotated: Settings,
    /// `args.cni`.
    pub args: Settings,
    /// The container istio-proxy.
    pub container: Settings,
    /// What the blocks set together.
    pub block: Settings,
}

impl Layers<'_> {
    /// Each key with whose value counts.
    pub(super) fn origins(&self) -> impl Iterator<Item = (&'static str, SettingSource)> {
        let layers = [&self.annotated, &self.args, &self.container, &self.block].map(Settings::says);
        Settings::KEYS.iter().enumerate().flat_map(move |(index, key)| {
            let sources = match layers.iter().position(|says| says[index]) {
                Some(0) => vec![SettingSource::Pod(istio_annotations::of_key(self.pod, key))],
                Some(1) => vec![SettingSource::Argument(SubPlugin::IstioRedirect)],
                Some(2) => vec![SettingSource::Container(proxy_container::said_by(key))],
                Some(_) => {
                    let says = self.blocks.iter().filter(|entry| entry.own.says()[index]);
                    says.map(|entry| SettingSource::Configuration(format!("{}.{key}", entry.path))).collect()
                }
                None => vec![SettingSource::Default],
            };
            sources.into_iter().map(|source| (*key, source))
        })
    }

    /// What all of them say together.
    pub(super) fn settings(self) -> Settings {
        self.annotated.over(self.args).over(self.container).over(self.block)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scenario::chain;
    use super::*;
    use serde_json::json;

    #[test]
    fn the_source_of_a_setting_is_the_nearest_layer_that_has_it() {
        let scenario =
            chain(json!([{"type": "istio-redirect", "proxy_uid": 1, "proxy_port": 2, "drop_invalid": true}]))
                .env("INVALID_DROP", "true")
                .args(json!({"istio-redirect": {"proxy_port": 3, "exclude_interfaces": "a"}}))
                .annotated("traffic.sidecar.istio.io/excludeInterfaces", "b")
                .annotated("traffic.sidecar.istio.io/kubevirtInterfaces", "c");
        let settings = scenario.output().origins.settings;
        assert_eq!(settings.len(), Settings::KEYS.len());
        for (key, source) in [
            ("proxy_uid", "container istio-proxy, runAsUser"),
            ("proxy_port", "args.cni.istio-redirect"),
            ("drop_invalid", "container istio-proxy, INVALID_DROP"),
            ("exclude_interfaces", "pod, traffic.sidecar.istio.io/excludeInterfaces"),
            ("reroute_virtual_interfaces", "pod, traffic.sidecar.istio.io/kubevirtInterfaces"),
            ("redirect_dns", "default"),
        ] {
            let found: Vec<String> =
                settings.iter().filter(|(k, _)| *k == key).map(|(_, source)| source.to_string()).collect();
            assert_eq!(found, [source], "{key}");
        }
        let plain = chain(json!([{"type": "istio-redirect", "proxy_port": 2}])).output().origins.settings;
        assert!(plain.contains(&("proxy_port", SettingSource::Configuration("chain[0].proxy_port".into()))));
    }

    #[test]
    fn every_exclusion_has_its_source() {
        let scenario = chain(json!([{"type": "uid-exclude", "uids": 1}, {"type": "dns-exclude", "uids": 2}]))
            .args(json!({"uid-exclude": {"uids": 3}}))
            .annotated("detour.io/exclude-uids", "4")
            .namespace("detour.io/exclude-gids", "5")
            .namespace("detour.io/exclude-dns", "all");
        let sources: std::collections::BTreeSet<String> =
            scenario.output().origins.exclusions.iter().map(|(_, source)| source.to_string()).collect();
        let expected = [
            "args.cni.uid-exclude",
            "configuration, chain[0]",
            "configuration, chain[1]",
            "namespace, detour.io/exclude-dns",
            "namespace, detour.io/exclude-gids",
            "pod, detour.io/exclude-uids",
        ];
        assert_eq!(sources.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }
}
