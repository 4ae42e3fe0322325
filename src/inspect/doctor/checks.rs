//! The list of checks: what each one proves, and which other checks it needs.

use serde::Serialize;

/// The subject of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckGroup {
    /// Files on the node's disk.
    Node,
    /// The API server, the plugin's permissions there, and the agent.
    Cluster,
    /// The policies of running pods.
    Policies,
    /// The kernel's features.
    Kernel,
    /// The pod's annotation, definitions and decision.
    Pod,
    /// The pod's network namespace.
    Sandbox,
    /// Real packets.
    Probe,
    /// The logs of runtime and plugin.
    Logs,
    /// Excluded containers, from the kernel and the runtime to the sets in the pod's network namespace.
    Containers,
}

impl CheckGroup {
    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Cluster => "Cluster",
            Self::Policies => "Policies of running pods",
            Self::Kernel => "Kernel",
            Self::Pod => "Pod",
            Self::Sandbox => "Sandbox",
            Self::Probe => "Probe",
            Self::Logs => "Logs",
            Self::Containers => "Excluded containers",
        }
    }
}

/// A check: its name, subject and condition.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Check {
    /// The name; stable across releases.
    pub(super) id: &'static str,
    pub(super) group: CheckGroup,
    /// The condition that is met if the check passes.
    pub(super) holds: &'static str,
    /// The checks without which this one has no meaning: it is not made if one of them failed or was not made.
    pub(super) needs: &'static [&'static Check],
}

macro_rules! checks {
    ($($group:ident { $($name:ident $id:literal $holds:literal [$($needed:ident),*];)* })*) => {$($(
        pub(super) const $name: &Check =
            &Check { id: $id, group: CheckGroup::$group, holds: $holds, needs: &[$($needed),*] };
    )*)*};
}

checks! {
    Node {
        CONFIGURATION_PRESENT "configuration-present" "a configuration calls the plugin" [];
        CONFIGURATION_VALID "configuration-valid" "the plugin accepts the configuration" [CONFIGURATION_PRESENT];
        CONFIGURATION_PICKED "configuration-picked" "runtimes use the configuration"
            [CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        AMBIENT "ambient" "no unsupported mode is configured" [CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        OWN_LIST "own-list" "the own configuration list is a copy of the cluster network's list"
            [CONFIGURATION_PRESENT, CONFIGURATION_VALID, CONFIGURATION_PICKED];
        MULTUS_CHAIN "multus-chain" "Multus runs the plugins of its auxiliary chain" [];
        NODE_CONFIGURATION "node-configuration" "the node configuration is valid, and only root can change it" [];
        PROGRAM_TRUSTED "program-trusted" "only root can change the plugin directories" [];
        PROGRAM_PRESENT "program-present" "the program is in the runtimes' plugin directory" [];
        PROGRAM_EXECUTABLE "program-executable" "the program is executable" [PROGRAM_PRESENT];
        PROGRAM_ARCHITECTURE "program-architecture" "the program is built for this architecture" [PROGRAM_PRESENT];
        PROGRAM_STATIC "program-static" "the program is statically linked" [PROGRAM_PRESENT, PROGRAM_ARCHITECTURE];
        PROGRAM_VERSION "program-version" "the program has this version"
            [PROGRAM_TRUSTED, PROGRAM_PRESENT, PROGRAM_EXECUTABLE, PROGRAM_ARCHITECTURE];
        KUBECONFIG_PRESENT "kubeconfig-present" "the plugin's kubeconfig exists"
            [CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        KUBECONFIG_PRIVATE "kubeconfig-private" "only root can read the kubeconfig" [KUBECONFIG_PRESENT];
        KUBECONFIG_VALID "kubeconfig-valid" "the kubeconfig is usable" [KUBECONFIG_PRESENT];
        TOKEN_VALID "token-valid" "the token has not expired" [KUBECONFIG_PRESENT, KUBECONFIG_VALID];
        INSTALLATION "installation" "the installation is unchanged" [];
    }

    Cluster {
        API_REACHABLE "api-reachable" "the API server answers" [KUBECONFIG_PRESENT, KUBECONFIG_VALID, TOKEN_VALID];
        PERMISSION_GET_PODS "permission-get-pods" "the plugin may get pods" [API_REACHABLE];
        PERMISSION_GET_NAMESPACES "permission-get-namespaces" "the plugin may get namespaces" [API_REACHABLE];
        PERMISSION_GET_DEFINITIONS "permission-get-definitions" "the plugin may get definitions" [API_REACHABLE];
        PERMISSION_PATCH_PODS_STATUS "permission-patch-pods-status" "the plugin may patch a pod's status" [API_REACHABLE];
        PERMISSION_CREATE_EVENTS "permission-create-events" "the plugin may create Events" [API_REACHABLE];
        AGENT_REACHABLE "agent-reachable" "the node agent answers, and has current facts" [];
    }

    Policies {
        POLICIES "policies" "the node's pods have the rules of their policies" [AGENT_REACHABLE];
        POD_POLICY "pod-policy" "the pod has the rules of its policy" [POD_KNOWN, AGENT_REACHABLE];
    }

    Kernel {
        KERNEL_NETNS "kernel-netns" "network namespaces can be created" [];
        KERNEL_NFTABLES "kernel-nftables" "nf_tables answers" [KERNEL_NETNS];
        KERNEL_IPTABLES_RULES "kernel-iptables-rules" "rules in format iptables are accepted" [KERNEL_NFTABLES];
        KERNEL_NATIVE_RULES "kernel-native-rules" "rules in format nftables are accepted" [KERNEL_NFTABLES];
        KERNEL_CONNTRACK "kernel-conntrack" "connections are tracked" [KERNEL_NFTABLES];
        SOCKET_LB "socket-load-balancing" "no eBPF program replaces Service addresses before netfilter" [];
    }

    Pod {
        POD_KNOWN "pod-known" "the cluster knows the pod" [];
        ANNOTATION_VALID "annotation-valid" "the pod's networks annotation is valid" [POD_KNOWN];
        DEFINITION_FOUND "definition-found" "the definition in the annotation exists" [];
        DEFINITION_LEADS "definition-leads" "the definition leads to a configuration" [DEFINITION_FOUND];
        REDIRECTED "redirected" "the pod's traffic is redirected to its sidecar"
            [POD_KNOWN, CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        PROXY_UID "proxy-uid" "the proxy's UID is in the namespace's range" [REDIRECTED];
        PLUGIN_ATTACHED "plugin-attached" "the plugin runs for this pod"
            [POD_KNOWN, CONFIGURATION_PRESENT, CONFIGURATION_VALID, ANNOTATION_VALID, DEFINITION_FOUND, DEFINITION_LEADS];
        EVENTS "events" "no Event reports a failed start" [POD_KNOWN];
    }

    Sandbox {
        POD_HERE "pod-here" "the pod runs on this node" [POD_KNOWN];
        NETNS_FOUND "netns-found" "the pod's network namespace is found" [POD_HERE];
        RULES_EQUAL "rules-equal" "the live rules equal the desired rules" [NETNS_FOUND];
        RULES_FIRST "rules-first" "no foreign rule precedes detour's rules" [NETNS_FOUND];
        FIXTURES "fixtures" "the required addresses and routes exist" [NETNS_FOUND];
        TRAFFIC "traffic" "packets match the rules" [NETNS_FOUND, RULES_EQUAL];
        DEFAULT_ROUTE_CAPTURED "default-route-captured" "the interface with the pod's default route is captured"
            [NETNS_FOUND, RULES_EQUAL];
        PROXY_LISTENING "proxy-listening" "the proxy listens on the ports that rules redirect to" [NETNS_FOUND];
        PROXY_USER "proxy-user" "the proxy runs as the UID that the rules exclude"
            [NETNS_FOUND, RULES_EQUAL, PROXY_LISTENING];
    }

    Probe {
        PROBE_OUTBOUND "probe-outbound" "an application's connection reaches the proxy" [NETNS_FOUND, RULES_EQUAL];
        PROBE_DNS "probe-dns" "an application's DNS query reaches the proxy" [NETNS_FOUND, RULES_EQUAL];
        PROBE_EXCLUDED "probe-excluded" "traffic of an excluded user bypasses the proxy" [NETNS_FOUND, RULES_EQUAL];
        PROBE_EXCLUDED_DNS "probe-excluded-dns" "an excluded DNS query bypasses the proxy" [NETNS_FOUND, RULES_EQUAL];
        PROBE_COUNTERS "probe-counters" "the rules' counters increase" [NETNS_FOUND, RULES_EQUAL];
    }

    Logs {
        RUNTIME_LOG "runtime-log" "the runtime logged no error about the pod" [];
        PLUGIN_LOG "plugin-log" "the plugin logged no error about the pod" [];
    }

    Containers {
        CONTAINERS_KERNEL "containers-kernel" "the kernel matches sockets by control group" [];
        CONTAINERS_CGROUP_V2 "containers-cgroup-v2" "the node has control groups of version 2" [];
        CONTAINERS_CGROUP_NAMESPACE "containers-cgroup-namespace" "rules can be written from the node's cgroup namespace"
            [CONTAINERS_CGROUP_V2];
        CONTAINERS_NRI_SOCKET "containers-nri-socket" "the runtime serves NRI" [];
        CONTAINERS_REGISTERED "containers-registered" "the agent is registered at the runtime"
            [AGENT_REACHABLE, CONTAINERS_NRI_SOCKET];
        CONTAINERS_REQUESTED "containers-requested" "the pod's rules exclude the requested containers"
            [NETNS_FOUND, RULES_EQUAL];
        CONTAINERS_ELEMENTS "containers-elements" "exactly the running excluded containers bypass the sidecar"
            [NETNS_FOUND, RULES_EQUAL];
        CONTAINERS_TRAFFIC "containers-traffic" "packets of excluded containers match their rules"
            [NETNS_FOUND, RULES_EQUAL];
    }
}
