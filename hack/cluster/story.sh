# The functions of the stories in hack/cluster/stories. A story sources it; hack/e2e.sh cluster runs the stories.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "$0")/../../.."
# shellcheck source-path=SCRIPTDIR source=../machine.sh
source hack/machine.sh
# shellcheck source-path=SCRIPTDIR source=functions.sh
source hack/cluster/functions.sh
need_root
# hack/e2e.sh counts the lines of this file.
: "${RESULTS:?run the story with hack/e2e.sh cluster}" "${RUNTIME:?}"
trap '[[ $? -eq 0 ]] || echo "this command failed: $BASH_COMMAND" >&2' EXIT
use_cluster "${CLUSTER:-$(target_directory)/cluster-e2e}"

k() {
    enter 1 kubectl "$@"
}
helm() {
    enter 1 helm "$@"
}
# expect DESCRIPTION EXPECTED ACTUAL: a check. EXPECTED is a pattern of the shell.
expect() {
    # shellcheck disable=SC2053
    if [[ $3 == $2 ]]; then
        printf '  %sok%s      %s: %s\n' "$green" "$plain" "$1" "$3"
        echo ok >>"$RESULTS"
    else
        printf '  %sFAILED%s  %s: expected %s, got %s\n' "$red" "$plain" "$1" "$2" "$3"
        echo failed >>"$RESULTS"
    fi
}
# eventually SECONDS COMMAND…: waits until the command succeeds. PAUSE: the seconds between two tries.
eventually() {
    local end=$((SECONDS + $1))
    shift
    until "$@" &>/dev/null; do
        if ((SECONDS > end)); then
            echo "timeout: $*" >&2
            return 1
        fi
        sleep "${PAUSE:-0.3}"
    done
}
# prints PATTERN COMMAND…: whether the output of a command matches.
prints() {
    local pattern=$1
    shift
    # shellcheck disable=SC2053
    [[ $("$@" 2>/dev/null) == $pattern ]]
}
# expect_within SECONDS DESCRIPTION EXPECTED COMMAND…: a check that waits until the command prints what is expected.
expect_within() {
    local seconds=$1 description=$2 expected=$3
    shift 3
    eventually "$seconds" prints "$expected" "$@" 2>/dev/null || true
    expect "$description" "$expected" "$("$@" 2>/dev/null)"
}
# install_detour ARGUMENT…: installs or upgrades detour with arguments of helm, and waits for the agents.
install_detour() {
    helm upgrade --install detour manifests/chart --namespace kube-system --reset-values --set hub=localhost "$@" >/dev/null
    k --namespace kube-system rollout status daemonset/detour-agent --timeout 300s >/dev/null
}
# The chart's test: detour doctor in a pod. Prints what failed.
run_chart_test() {
    expect "helm test: checks that failed" "" "$(helm test detour --namespace kube-system 2>&1 | grep -A 2 -E '^ *(FAIL|Error)' || true)"
}
# in_outside COMMAND…: runs a command in the network outside of the cluster. It ends with the cluster.
in_outside() {
    nsenter --target "$(<"$cluster/outside.pid")" --net --pid "$@"
}
record_packets() {
    in_outside tcpdump --immediate-mode -U -n -i lan -w "$cluster/packets.pcap" 'port 53 or port 443' &>/dev/null &
    eventually 30 test -s "$cluster/packets.pcap"
}
# packets ADDRESS: prints the first packets of this address that arrived outside: queries and new connections.
packets() {
    tcpdump -n -t -q -r "$cluster/packets.pcap" "src host $1 and (port 53 or tcp[tcpflags] & tcp-syn != 0)" 2>/dev/null |
        sed 's/^/          /' | head -4
}
address_of() {
    k get pod --namespace "$1" "$2" -o jsonpath='{.status.podIP}'
}
# in_pod POD COMMAND…: runs a command of the first node in the network namespace of a pod.
in_pod() {
    local container
    container=$(enter 1 crictl ps --label "io.kubernetes.pod.name=$1" --state Running --quiet | head -1)
    enter 1 nsenter --target "$(enter 1 crictl inspect "$container" | jq .info.pid)" --net -- "${@:2}"
}
# connections ADDRESS: how many connections from this address the server outside of the cluster accepted.
connections() {
    grep -cF " tcp $1 connected" "$cluster/outside.log" || true
}
# logs NAMESPACE POD CONTAINER: the last report of a container.
logs() {
    k logs --namespace "$1" "$2" --container "$3" --tail 9 2>&1 | grep ^uid | tail -1
}
# reports NAMESPACE SELECTOR CONTAINER: how many pods reported what, for example "3 uid 2000: tcp lost, dns lost".
reports() {
    local pod report
    for pod in $(k get pods --namespace "$1" --selector "$2" -o name); do
        report=$(k logs --namespace "$1" "$pod" --container "$3" 2>&1 | grep ^uid || echo "no report")
        head -1 <<<"$report"
    done | sort | uniq -c | sed 's/^ *//' | paste -sd ';'
}
ready() {
    eventually "$1" k wait --namespace "$2" --for condition=Ready pod --all --timeout 5s
}
# The types of Multus and of OpenShift, and Multus itself as a plugin (thin), with OpenShift's directories.
# install_multus CNI-VERSION
install_multus() {
    local token n
    k apply --server-side -f tests/apiserver/crds.yaml >/dev/null
    k apply -f tests/runtimes/multus/rbac.yaml >/dev/null
    token=$(k create token --namespace kube-system multus --duration 24h)
    for ((n = 1; n <= $(nodes); n++)); do
        enter "$n" mkdir -p /etc/cni/multus/net.d /etc/cni/cluster /etc/cni/net.d/multus.d /var/lib/cni/bin
        enter "$n" cp "$tools/runtimes/multus" "$tools/runtimes/passthru" /opt/cni/bin/
        enter "$n" kubectl config view --flatten --raw -o json | jq --arg token "$token" '.users[0].user = {$token}' |
            enter "$n" tee /etc/cni/net.d/multus.d/multus.kubeconfig >/dev/null
        # A single plugin: Multus 4.2.3 does not save the key ranges of host-local of a configuration list, and every
        # DEL fails. The reference plugins of Debian 12 know versions up to 1.0.0.
        # shellcheck disable=SC2016
        enter "$n" jq --arg version "${1/1.1/1.0}" '.name as $name | .plugins[0] + {$name, cniVersion: $version}' /etc/cni/net.d/10-net.conflist |
            enter "$n" tee /etc/cni/cluster/10-net.conf >/dev/null
        jq --null-input --arg version "$1" '{
            cniVersion: $version, name: "multus-cni-network", type: "multus", binDir: "/var/lib/cni/bin",
            kubeconfig: "/etc/cni/net.d/multus.d/multus.kubeconfig", confDir: "/etc/cni/multus/net.d",
            namespaceIsolation: true, globalNamespaces: "default,kube-system", logToStderr: true, logLevel: "verbose",
            clusterNetwork: "/etc/cni/cluster/10-net.conf", auxiliaryCNIChainName: "vendor-cni-chain",
            capabilities: { portMappings: true, "io.kubernetes.cri.pod-annotations": true }
        }' | enter "$n" tee /etc/cni/net.d/00-multus.conf >/dev/null
    done
}
nodes() {
    find "$cluster" -maxdepth 1 -name 'node*' | wc -l
}
# install_istio ARGUMENT…: installs istiod by its charts, with arguments of helm. Envoy from PyPI lacks Istio's own
# filters; these settings keep istiod from using them.
install_istio() {
    local charts
    need_istio_charts
    make_images pilot proxyv2
    load pilot proxyv2
    charts=$(istio_charts)
    helm upgrade --install istio-base "$charts/base" --namespace istio-system --create-namespace >/dev/null
    helm upgrade --install istiod "$charts/istio-control/istio-discovery" --namespace istio-system \
        --set global.hub=localhost,global.tag=1,image=localhost/pilot:1,global.proxy.image=localhost/proxyv2:1 \
        --set autoscaleEnabled=false,global.defaultPodDisruptionBudget.enabled=false,telemetry.enabled=false \
        --set resources.requests.cpu=10m,resources.requests.memory=64Mi \
        --set global.proxy.resources.requests.cpu=5m,global.proxy.resources.requests.memory=32Mi \
        --set-string env.PILOT_ENABLE_METADATA_EXCHANGE=false,env.PILOT_ENABLE_ALPN_FILTER=false,env.PILOT_DISABLE_MX_ALPN=true \
        --set-string env.PILOT_ENABLE_TELEMETRY_LABEL=false,env.PILOT_ENDPOINT_TELEMETRY_LABEL=false \
        --set meshConfig.accessLogFile=/dev/stdout --set-string meshConfig.defaultConfig.proxyMetadata.ISTIO_META_DNS_CAPTURE=true \
        "$@" >/dev/null
    k --namespace istio-system rollout status deployment/istiod --timeout 300s >/dev/null
}
# meshed KIND NAME [FILTER]: creates a Pod, or an object with a template of pods, in the namespace mesh. FILTER is a jq
# filter for the object. A Job, and a Pod with the filter native, has a native sidecar, so that it completes.
meshed() {
    sed "s/NAME/$2/" hack/cluster/pods/meshed.yaml | k create --dry-run=client -o json -f - |
        jq --arg kind "$1" --arg name "$2" '
            def native: (.spec.containers[1] + { restartPolicy: "Always" }) as $sidecar
                | .spec.initContainers |= [$sidecar] + . | .spec.containers |= [.[0]];
            def completes: native | .spec += { restartPolicy: "Never" } | .spec.containers[0].command = ["report"];
            def labels: { matchLabels: { app: $name } };
            def object($version; $spec): { apiVersion: $version, kind: $kind, metadata: { $name, namespace: "mesh" }, spec: $spec };
            { metadata: (.metadata | { labels, annotations }), spec } as $template |
            if $kind == "Pod" then .
            elif $kind == "Job" then object("batch/v1"; { template: ($template | completes) })
            elif $kind == "CronJob" then object("batch/v1";
                { schedule: "* * * * *", jobTemplate: { spec: { template: ($template | completes) } } })
            elif $kind == "StatefulSet" then object("apps/v1"; { selector: labels, template: $template, serviceName: $name })
            else object("apps/v1"; { selector: labels, template: $template }) end | '"${3:-.}" |
        k apply -f - >/dev/null
}
# expect_captured WHEN APP COUNT [SEEN]: the first containers of COUNT pods with this label were captured.
expect_captured() {
    expect_within 30 "$1: first containers" "$3 uid 2000: ${4:-tcp lost, dns lost}" reports mesh "app=$2" first
}
# expect_none_outside WHEN: no pod has reached the server outside of the cluster; it logs each connection and each query.
expect_none_outside() {
    expect "$1: connections of pods and queries that arrived outside" 0 "$(grep -cE ' (tcp|dns udp|dns tcp) 10\.85\.' "$cluster/outside.log" || true)"
}
# pods APP: how many pods have this label.
pods() {
    k get pods --namespace mesh --selector "app=$1" -o name | wc -l
}
# rollout KIND/NAME
rollout() {
    k rollout status --namespace mesh "$1" --timeout 240s >/dev/null
}
# The records of the plugin and what the cluster network keeps on each node, for example "2 records, 2 addresses".
leftovers() {
    local n
    for ((n = 1; n <= $(nodes); n++)); do
        # shellcheck disable=SC2016
        enter "$n" sh -c 'echo "$(find /run/detour/attachments -type f 2>/dev/null | wc -l) files of records, $(ls /var/lib/cni/networks/net 2>/dev/null | grep -c "^10") addresses"'
    done | paste -sd ';'
}
# install_thick_multus CNI-VERSION: Multus as a daemon of each node, as OpenShift's network operator configures it. It runs
# as a process of the node, not as a DaemonSet.
install_thick_multus() {
    local n
    need_thick_multus
    install_multus "$1"
    for ((n = 1; n <= $(nodes); n++)); do
        enter "$n" sh -c "rm -f /etc/cni/net.d/00-multus.conf; mkdir -p /run/multus/cni/net.d /run/multus/socket
            cp /etc/cni/cluster/10-net.conf /run/multus/cni/net.d/
            cp /opt/cni/bin/bridge /opt/cni/bin/host-local /opt/cni/bin/loopback /opt/cni/bin/portmap /opt/cni/bin/passthru /var/lib/cni/bin/
            cp '$tools/runtimes/multus-shim' /opt/cni/bin/"
        jq --null-input --arg version "$1" '{
            cniVersion: $version, logToStderr: true, logLevel: "verbose", binDir: "/var/lib/cni/bin",
            cniConfigDir: "/etc/cni/net.d", multusConfigFile: "auto", multusAutoconfigDir: "/run/multus/cni/net.d",
            readinessindicatorfile: "/run/multus/cni/net.d/10-net.conf", daemonSocketDir: "/run/multus/socket",
            socketDir: "/run/multus/socket", namespaceIsolation: true, globalNamespaces: "default,kube-system",
            auxiliaryCNIChainName: "vendor-cni-chain"
        }' | enter "$n" tee /etc/cni/multus-daemon.json >/dev/null
        enter "$n" bash hack/cluster/node.sh stop multus-daemon
        enter "$n" bash hack/cluster/node.sh start multus-daemon
        eventually 60 enter "$n" test -e /etc/cni/net.d/00-multus.conf
    done
}
# left_on NODE: runs the program that stayed on the node, if any, as docs/migrate.md states, and lists what is left.
left_on() {
    # shellcheck disable=SC2016
    enter "$1" sh -c '
        for program in /var/lib/cni/bin/detour /opt/cni/bin/detour; do [ ! -e $program ] || $program uninstall >/dev/null; done
        find /var/lib/cni/bin /opt/cni/bin /var/lib/cni/detour /etc/cni -name "*detour*" -type f; ls /var/lib/cni/detour | grep -v lock'
}
# expect_no_files WHEN: after the pods' end, `detour uninstall` removes everything. The runtime needs the program until the
# agent's own pod is gone.
expect_no_files() {
    local n
    for ((n = 1; n <= $(nodes); n++)); do
        expect_within 120 "$1: files on node $n" "" left_on "$n"
    done
}
# calls VERB: how many calls for pods in the namespace mesh the agent of the first node logged as succeeded.
calls() {
    k logs --namespace kube-system daemonset/detour-agent --tail -1 | grep -c "plugin call succeeded.*command=$1 pod=mesh/"
}
# multus_stories INSTALL CNI-VERSIONS: pods with the attachment default/istio-cni, then pods that Multus's auxiliary chain
# redirects, with each version.
multus_stories() {
    local version mode empty chain=/etc/cni/cluster/vendor-cni-chain filter values
    [[ $1 == install_multus ]] || chain=/run/multus/cni/net.d/vendor-cni-chain
    for version in $2; do
        "$1" "$version"
        for mode in attachment chain; do
            values=global.platform=openshift filter='.metadata.annotations["k8s.v1.cni.cncf.io/networks"] = "default/istio-cni"'
            if [[ $mode == chain ]]; then
                values+=,cni.multusChain=$chain filter=.
            fi
            install_detour --set "$values"
            # An excluded UID, which the chart's configuration names.
            empty=$(leftovers)
            meshed Deployment web ".spec.replicas = 3 | .spec.template |= ($filter
                | .spec.containers[1].securityContext = { runAsUser: 1000659999, runAsGroup: 1000659999 }
                | .spec.initContainers += [.spec.initContainers[0] + { name: \"excluded\", securityContext: { runAsUser: 1337 } }])"
            rollout deployment/web
            expect_captured "$version, $mode" web 3
            expect "$version, $mode: excluded containers" "3 uid 1337: tcp direct, dns direct" "$(reports mesh app=web excluded)"
            # With this version, CRI-O calls CHECK after each ADD; Multus 4.2 calls CHECK only of networks in "delegates".
            [[ ! -e $cluster/node1/logs/multus-daemon.log || $RUNTIME != crio || $version != 1.1.0 ]] ||
                expect "$version, $mode: CHECK of Multus succeeded" '[1-9]*' "$(grep -c 'CHECK finished.* err: <nil>' "$cluster/node1/logs/multus-daemon.log")"
            k delete deployment --namespace mesh web --wait >/dev/null
            eventually 120 prints "" k get pods --namespace mesh -o name
            expect_within 30 "$version, $mode: after the pods' end" "$empty" leftovers
        done
        install_detour --set global.platform=openshift
        expect_within 60 "$version: the chain's directory after an upgrade without cni.multusChain" "" enter 1 ls "$chain"
        helm uninstall detour --namespace kube-system --wait >/dev/null
        expect_no_files "$version, after uninstall"
    done
}
