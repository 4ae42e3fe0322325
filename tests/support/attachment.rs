//! The attachments of a pod and their configurations.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// An attachment, and the pod that it is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Attachment {
    pub(crate) slot: Slot,
    pub(crate) facts: Facts,
}

/// The identity of an attachment: network and interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Slot {
    /// The configuration of istio-cni.
    IstioCni,
    /// The same network with another interface.
    IstioCniAgain,
    /// The configuration of excludedns, without a source of facts.
    ExcludeDns,
    /// A configuration with all sub-plugins.
    Detour,
    /// A configuration with exclusions only.
    Exclusions,
}

/// The annotations and settings of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Facts {
    Plain,
    DnsCaptured,
    /// DNS capture, and annotations that exclude ports, ranges and interfaces.
    Annotated,
    /// Other values of these annotations, and excluded UIDs.
    AnnotatedOtherwise,
    /// DNS capture, and an annotation that excludes a container.
    ContainerExcluded,
    Tproxy,
    InterceptionNone,
    NoSidecar,
}

impl Slot {
    pub(crate) const ALL: [Self; 5] =
        [Self::IstioCni, Self::IstioCniAgain, Self::ExcludeDns, Self::Detour, Self::Exclusions];

    /// Returns the interface name, as the runtime numbers interfaces.
    pub(crate) fn ifname(self) -> &'static str {
        match self {
            Self::IstioCni => "net1",
            Self::IstioCniAgain => "net2",
            Self::ExcludeDns => "net3",
            Self::Detour => "net4",
            Self::Exclusions => "net5",
        }
    }

    /// Returns the configuration's `name`.
    pub(crate) fn network(self) -> &'static str {
        match self {
            Self::IstioCni | Self::IstioCniAgain => "istio-cni",
            Self::ExcludeDns => "excludedns",
            Self::Detour => "detour",
            Self::Exclusions => "exclusions",
        }
    }

    pub(crate) const fn with(self, facts: Facts) -> Attachment {
        Attachment { slot: self, facts }
    }
}

impl Facts {
    pub(crate) const ALL: [Self; 8] = [
        Self::Plain,
        Self::DnsCaptured,
        Self::Annotated,
        Self::AnnotatedOtherwise,
        Self::ContainerExcluded,
        Self::Tproxy,
        Self::InterceptionNone,
        Self::NoSidecar,
    ];

    /// Returns the manifest of the pod.
    pub(crate) fn manifest(self) -> String {
        let annotations = match self {
            Self::Plain | Self::DnsCaptured | Self::NoSidecar => "",
            Self::Annotated => {
                "    traffic.sidecar.istio.io/excludeOutboundPorts: \"9000,9443\"
    traffic.sidecar.istio.io/excludeOutboundIPRanges: 203.0.113.0/24
    traffic.sidecar.istio.io/excludeInterfaces: net1,net2\n"
            }
            Self::AnnotatedOtherwise => {
                "    traffic.sidecar.istio.io/excludeOutboundPorts: \"9443,9500\"
    traffic.sidecar.istio.io/excludeInterfaces: net2,net7
    detour.io/exclude-uids: \"2000-2999\"\n"
            }
            Self::ContainerExcluded => "    detour.io/exclude-containers: web\n",
            Self::Tproxy => "    sidecar.istio.io/interceptionMode: TPROXY\n",
            Self::InterceptionNone => "    sidecar.istio.io/interceptionMode: NONE\n",
        };
        let proxy = match self {
            Self::NoSidecar => "",
            _ => {
                "  - name: istio-proxy
    image: proxyv2
    args: [proxy, sidecar]
    env:
    - { name: ISTIO_META_DNS_CAPTURE, value: \"@\" }
    securityContext: { runAsUser: 1000659999, runAsGroup: 1000659999 }\n"
            }
        };
        let captured = [Self::DnsCaptured, Self::Annotated, Self::AnnotatedOtherwise, Self::ContainerExcluded];
        let captured = captured.contains(&self);
        let proxy = proxy.replace('@', if captured { "true" } else { "false" });
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web-0\n  namespace: shop\n  annotations:\n    \
             sidecar.istio.io/status: '{{\"revision\":\"default\"}}'\n{annotations}spec:\n  containers:\n  \
             - {{ name: web, image: web }}\n{proxy}"
        )
    }

    fn directory(self) -> PathBuf {
        static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
            let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("attachments");
            for facts in Facts::ALL {
                let directory = root.join(format!("{facts:?}"));
                std::fs::create_dir_all(&directory).expect("writable");
                write_atomically(&directory.join("pod.yaml"), &facts.manifest());
                write_atomically(&directory.join("namespace.yaml"), NAMESPACE);
            }
            root
        });
        DIRECTORY.join(format!("{self:?}"))
    }
}

const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n";

/// Writes a file atomically, because a concurrent run of these tests may read it.
fn write_atomically(path: &Path, text: &str) {
    let unfinished = path.with_extension(format!("{}", std::process::id()));
    std::fs::write(&unfinished, text).expect("writable");
    std::fs::rename(unfinished, path).expect("writable");
}

impl Attachment {
    /// Returns the plugin's configuration.
    pub(crate) fn configuration(self) -> Value {
        let kubernetes = json!({ "manifests_dir": self.facts.directory() });
        let exclusions = json!([{ "type": "uid-exclude", "uids": [1337] }, { "type": "dns-exclude", "uids": [1337] }]);
        let with = |first: Value| {
            let mut chain = vec![first];
            chain.extend(exclusions.as_array().expect("an array").iter().cloned());
            chain
        };
        let mut chain = with(json!({ "type": "istio-redirect" }));
        chain.push(json!({ "type": "container-exclude" }));
        let exclusions = with(json!({ "type": "container-exclude", "containers": ["web"], "scope": "dns" }));
        let name = self.slot.network();
        match self.slot {
            Slot::IstioCni | Slot::IstioCniAgain => {
                json!({ "cniVersion": "1.0.0", "name": name, "type": "istio-cni", "kubernetes": kubernetes })
            }
            Slot::ExcludeDns => json!({ "cniVersion": "0.4.0", "name": name, "type": "excludedns" }),
            Slot::Detour => {
                json!({ "cniVersion": "1.1.0", "name": name, "type": "detour", "kubernetes": kubernetes, "chain": chain })
            }
            Slot::Exclusions => json!({
                "cniVersion": "1.1.0", "name": name, "type": "detour", "kubernetes": kubernetes, "chain": exclusions,
            }),
        }
    }
}
