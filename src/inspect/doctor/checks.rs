//! The list of checks: what each one proves, and which other checks it needs.

/// A check: its name, subject and condition.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Check {
    /// The name; stable across releases.
    pub(super) id: &'static str,
    /// The subject.
    pub(super) group: &'static str,
    /// The condition that is met if the check passes.
    pub(super) holds: &'static str,
    /// The checks without which this one has no meaning: it is not made if one of them failed or was not made.
    pub(super) needs: &'static [&'static Check],
}

macro_rules! checks {
    ($($group:literal { $($name:ident $id:literal $holds:literal [$($needed:ident),*];)* })*) => {$($(
        pub(super) const $name: &Check =
            &Check { id: $id, group: $group, holds: $holds, needs: &[$($needed),*] };
    )*)*};
}

checks! {
    "node" {
        CONFIGURATION_PRESENT "configuration-present" "a configuration calls the plugin" [];
        CONFIGURATION_VALID "configuration-valid" "the plugin accepts the configuration" [CONFIGURATION_PRESENT];
        CONFIGURATION_PICKED "configuration-picked" "runtimes use the configuration"
            [CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        OWN_LIST "own-list" "the own configuration list is a copy of the cluster network's list"
            [CONFIGURATION_PRESENT, CONFIGURATION_VALID, CONFIGURATION_PICKED];
        MULTUS_CHAIN "multus-chain" "Multus runs the plugins of its auxiliary chain" [];
        NODE_CONFIGURATION "node-configuration" "the node configuration is valid, and only root can change it" [];
        PROGRAM_TRUSTED "program-trusted" "only root can change the plugin directories" [];
        PROGRAM_PRESENT "program-present" "the program is in the runtimes' plugin directory, in this version"
            [PROGRAM_TRUSTED];
        KUBECONFIG_VALID "kubeconfig-valid" "the plugin's kubeconfig is private and usable, and its token has not expired"
            [CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        INSTALLATION "installation" "the installation is unchanged" [];
    }

    "cluster" {
        API_REACHABLE "api-reachable" "the API server answers" [KUBECONFIG_VALID];
        PERMISSIONS "permissions" "the plugin has the permissions that its configuration needs" [API_REACHABLE];
        AGENT_REACHABLE "agent-reachable" "the node agent answers, and has current facts" [];
    }

    "policies" {
        POLICIES "policies" "the node's pods have the rules of their policies" [AGENT_REACHABLE];
        POD_POLICY "pod-policy" "the pod has the rules of its policy" [POD_KNOWN, AGENT_REACHABLE];
    }

    "kernel" {
        KERNEL_RULES "kernel-rules" "the kernel accepts the rules of a pod" [];
        SOCKET_LB "socket-load-balancing" "no eBPF program replaces Service addresses before netfilter" [];
    }

    "pod" {
        POD_KNOWN "pod-known" "the cluster knows the pod" [];
        ANNOTATION_VALID "annotation-valid" "the pod's networks annotation is valid" [POD_KNOWN];
        DEFINITION_FOUND "definition-found" "the definition in the annotation exists" [];
        DEFINITION_LEADS "definition-leads" "the definition leads to a configuration" [DEFINITION_FOUND];
        REDIRECTED "redirected" "the pod's traffic is redirected to its sidecar"
            [POD_KNOWN, CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        PLUGIN_ATTACHED "plugin-attached" "the plugin runs for this pod"
            [POD_KNOWN, CONFIGURATION_PRESENT, CONFIGURATION_VALID];
        EVENTS "events" "no Event reports a failed start" [POD_KNOWN];
    }

    "sandbox" {
        NETNS_FOUND "netns-found" "the pod runs on this node, and its network namespace is found" [];
        RULES_EQUAL "rules-equal" "the live rules, addresses and routes equal the desired ones" [NETNS_FOUND];
        RULES_FIRST "rules-first" "no foreign rule precedes detour's rules" [NETNS_FOUND];
        DEFAULT_ROUTE_CAPTURED "default-route-captured" "the interface with the pod's default route is captured"
            [NETNS_FOUND, RULES_EQUAL];
        PROXY_LISTENING "proxy-listening" "the proxy listens on the ports that rules redirect to, as the excluded user"
            [NETNS_FOUND];
    }

    "probe" {
        PROBE_CAPTURED "probe-captured" "an application's connection and DNS query reach the proxy"
            [NETNS_FOUND, RULES_EQUAL];
        PROBE_EXCLUDED "probe-excluded" "excluded traffic bypasses the proxy" [NETNS_FOUND, RULES_EQUAL];
    }

    "logs" {
        RUNTIME_LOG "runtime-log" "the runtime logged no error about the pod" [];
        PLUGIN_LOG "plugin-log" "the plugin logged no error about the pod" [];
    }

    "containers" {
        CONTAINERS_READY "containers-ready" "kernel, control groups, runtime and agent support excluded containers" [];
        CONTAINERS_BYPASS "containers-bypass" "exactly the running excluded containers bypass the sidecar"
            [NETNS_FOUND, RULES_EQUAL];
    }
}
