//! Well-known names of pods in a mesh: annotations, labels, containers and environment variables of Istio, of this
//! plugin, of OpenShift and of the Network Plumbing Working Group. Each name is defined here and nowhere else.

/// Container of the sidecar proxy. Istio's injector fixes the name.
pub const PROXY_CONTAINER: &str = "istio-proxy";
/// Init container of Istio that writes the redirection rules without a CNI plugin.
pub const INIT_CONTAINER: &str = "istio-init";
/// Init container of Istio that fails if a CNI plugin has not written the rules.
pub const VALIDATION_CONTAINER: &str = "istio-validation";
/// All containers that Istio's injector adds.
pub const ISTIO_CONTAINERS: [&str; 3] = [INIT_CONTAINER, VALIDATION_CONTAINER, PROXY_CONTAINER];

/// Variable of the proxy's container: the proxy does not start Envoy.
pub const DISABLE_ENVOY: &str = "DISABLE_ENVOY";
/// Variable of the proxy's container: the proxy resolves DNS itself.
pub const DNS_CAPTURE: &str = "ISTIO_META_DNS_CAPTURE";
/// Variable of the proxy's container: the rules drop packets that connection tracking considers invalid.
pub const INVALID_DROP: &str = "INVALID_DROP";

/// Label, or annotation if the label is missing: whether a pod gets a sidecar.
pub const INJECT: &str = "sidecar.istio.io/inject";
/// Annotation that Istio's injector sets on every pod with a sidecar.
pub const INJECTION_STATUS: &str = "sidecar.istio.io/status";

/// Label of a pod or, if it is missing, of its namespace: which data plane of Istio captures the pod's traffic.
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";
/// Value of [`DATAPLANE_MODE`]: the ambient mesh.
pub const AMBIENT: &str = "ambient";
/// Value of [`DATAPLANE_MODE`]: no mesh.
pub const NOT_IN_MESH: &str = "none";
/// Annotation that istio-cni sets on a pod after it has redirected the pod to ztunnel.
pub const AMBIENT_REDIRECTION: &str = "ambient.istio.io/redirection";
/// Annotation of a pod in the ambient mesh: whether ztunnel resolves its DNS.
pub const AMBIENT_DNS_CAPTURE: &str = "ambient.istio.io/dns-capture";
/// Annotation of a pod in the ambient mesh: whether inbound connections bypass ztunnel.
pub const AMBIENT_BYPASS_INBOUND: &str = "ambient.istio.io/bypass-inbound-capture";

/// How inbound connections reach the proxy.
pub const INTERCEPTION_MODE: &str = "sidecar.istio.io/interceptionMode";
/// Inbound ports to capture.
pub const INCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeInboundPorts";
/// Inbound ports not to capture.
pub const EXCLUDE_INBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeInboundPorts";
/// Outbound ports to capture for every destination.
pub const INCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/includeOutboundPorts";
/// Outbound ports not to capture.
pub const EXCLUDE_OUTBOUND_PORTS: &str = "traffic.sidecar.istio.io/excludeOutboundPorts";
/// Destinations to capture.
pub const INCLUDE_OUTBOUND_RANGES: &str = "traffic.sidecar.istio.io/includeOutboundIPRanges";
/// Destinations not to capture.
pub const EXCLUDE_OUTBOUND_RANGES: &str = "traffic.sidecar.istio.io/excludeOutboundIPRanges";
/// Interfaces whose traffic is not captured.
pub const EXCLUDE_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";
/// Interfaces of virtual machines, whose inbound traffic is captured as outbound.
pub const REROUTE_INTERFACES: &str = "istio.io/reroute-virtual-interfaces";
/// Former name of [`REROUTE_INTERFACES`], which takes precedence.
pub const KUBEVIRT_INTERFACES: &str = "traffic.sidecar.istio.io/kubevirtInterfaces";

/// Prefix with names of many purposes: `istio.io`.
pub const ISTIO_PREFIX: &str = "istio.io";

/// Istio's annotations of pods that this plugin does not read, by prefix (istio/api, `annotation/annotations.yaml`,
/// with those of earlier releases and of the injection template), and the prefix of this plugin.
pub const OTHER_ANNOTATIONS: [(&str, &[&str]); 4] = [
    (
        "sidecar.istio.io",
        &[
            "agentLogLevel",
            "bootstrapOverride",
            "capNetBindService",
            "componentLogLevel",
            "controlPlaneAuthPolicy",
            "discoveryAddress",
            "enableCoreDump",
            "extraStatTags",
            "inject",
            "logLevel",
            "nativeSidecar",
            "proxyCPU",
            "proxyCPULimit",
            "proxyImage",
            "proxyImageType",
            "proxyMemory",
            "proxyMemoryLimit",
            "rewriteAppHTTPProbers",
            "statsCompression",
            "statsEvictionInterval",
            "statsFlushInterval",
            "statsHistogramBuckets",
            "statsInclusionPrefixes",
            "statsInclusionRegexps",
            "statsInclusionSuffixes",
            "status",
            "userVolume",
            "userVolumeMount",
        ],
    ),
    ("traffic.sidecar.istio.io", &[]),
    (ISTIO_PREFIX, &["autoRegistrationGroup", "connectedAt", "disconnectedAt", "dry-run", "rev", "workloadController"]),
    ("detour.io", &[]),
];

/// UIDs whose outbound traffic bypasses the sidecar.
pub const EXCLUDE_UIDS: &str = "detour.io/exclude-uids";
/// GIDs whose outbound traffic bypasses the sidecar.
pub const EXCLUDE_GIDS: &str = "detour.io/exclude-gids";
/// Outbound traffic that bypasses the sidecar, by protocol, port and UID.
pub const EXCLUDE_PORTS_FOR_UIDS: &str = "detour.io/exclude-outbound-ports-for-uids";
/// Resolvers whose DNS bypasses the sidecar.
pub const EXCLUDE_DNS: &str = "detour.io/exclude-dns";
/// Outbound ports whose traffic bypasses the sidecar or ztunnel.
pub const EXCLUDE_DESTINATION_PORTS: &str = "detour.io/exclude-outbound-ports";
/// Destinations whose traffic bypasses the sidecar or ztunnel.
pub const EXCLUDE_DESTINATION_RANGES: &str = "detour.io/exclude-outbound-ip-ranges";
/// Annotation that is rejected with a reason: inbound traffic can't bypass ztunnel by port.
pub const REJECTED_INBOUND_PORTS: &str = "detour.io/exclude-inbound-ports";
/// Containers whose outbound traffic bypasses the sidecar.
pub const EXCLUDE_CONTAINERS: &str = "detour.io/exclude-containers";

/// Annotation of a namespace: the UIDs of its pods (`openshift/api`, `security/v1/consts.go`). Istio's injector takes
/// the proxy's UID from it.
pub const OPENSHIFT_UID_RANGE: &str = "openshift.io/sa.scc.uid-range";
/// Annotation of a namespace: the supplemental groups of its pods. Istio's injector takes the proxy's GID from it, or
/// from [`OPENSHIFT_UID_RANGE`] if it is missing.
pub const OPENSHIFT_GROUP_RANGE: &str = "openshift.io/sa.scc.supplemental-groups";

/// Annotation that selects a pod's further networks (Network Plumbing Working Group, "Network Custom Resource
/// Definition De-facto Standard", §4.1).
pub const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// Annotation with the outcome: one entry per interface of the pod.
pub const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";
/// Annotation of a definition that requests a device from a device plugin.
pub const RESOURCE_NAME: &str = "k8s.v1.cni.cncf.io/resourceName";
/// Annotation that selects another default network (multus-cni, `docs/configuration.md`).
pub const DEFAULT_NETWORK: &str = "v1.multus-cni.io/default-network";
