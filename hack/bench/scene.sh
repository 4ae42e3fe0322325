# Functions for hack/bench.sh and hack/instructions.sh: a pod, its facts in files, an API and an agent, and calls of the
# plugin. Source it; do not run it. Paths and names have the same length in each run, so that counts can be compared.
# shellcheck shell=bash

# The name of the network namespace and of the container.
netns=$(printf 'detour-%07d' $$)
# The bridge that a call of the plugin may make.
bridge=''
work=''
api='' tls_api='' agent=''
# The programs; the script sets them.
detour='' probe=''

clean_up() {
    local status=$? process pod
    trap - EXIT
    trap '' INT TERM
    for process in $agent $api $tls_api; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    for pod in /run/netns/"$netns"*; do
        if [[ -e $pod ]]; then
            ip netns delete "${pod##*/}" || true
        fi
    done
    if [[ -n $bridge ]]; then
        ip link delete "$bridge" 2>/dev/null || true
    fi
    if [[ -n $work ]]; then
        rm -rf "$work"
    fi
    exit "$status"
}

# make_pods NAME…: makes network namespaces, each with the interface and the addresses of a pod.
make_pods() {
    printf 'netns add %s\n' "$@" | ip -batch -
    local pod
    for pod in "$@"; do
        ip -n "$pod" -batch - <<EOF
link set lo up
link add eth0 type veth peer name peer0
link set peer0 up
link set eth0 up
addr add 10.88.0.2/24 dev eth0
addr add fd88::2/64 dev eth0 nodad
EOF
    done
}

# delete_pods NAME…
delete_pods() {
    printf 'netns delete %s\n' "$@" | ip -batch -
}

pod_uid=8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001
pod='{
  "apiVersion": "v1", "kind": "Pod",
  "metadata": {
    "name": "web-0", "namespace": "shop", "uid": "'$pod_uid'",
    "annotations": { "sidecar.istio.io/status": "{}", "k8s.v1.cni.cncf.io/networks": "default/istio-cni" }
  },
  "spec": {
    "nodeName": "node-1",
    "initContainers": [ { "name": "vault-agent-init", "image": "vault", "securityContext": { "runAsUser": 1337 } } ],
    "containers": [
      { "name": "web", "image": "web", "securityContext": { "runAsUser": 1000650000 } },
      {
        "name": "istio-proxy", "image": "proxyv2", "args": [ "proxy", "sidecar" ],
        "env": [ { "name": "ISTIO_META_DNS_CAPTURE", "value": "true" } ],
        "securityContext": { "runAsUser": 1000659999, "runAsGroup": 1000659999 }
      }
    ]
  }
}'
namespace='{
  "apiVersion": "v1", "kind": "Namespace",
  "metadata": { "name": "shop", "annotations": { "openshift.io/sa.scc.uid-range": "1000650000/10000" } }
}'

# configure FILE SOURCE DIALECT [FILTER]: writes a configuration of the plugin. SOURCE is the source of facts: agent,
# files, api or tls. FILTER is a program of jq that changes it.
configure() {
    jq -n --arg work "$work" --arg source "$2" --arg dialect "$3" '{
        cniVersion: "1.0.0", name: "istio-cni", type: "detour", log_level: "error", dialect: $dialect,
        kubernetes: ({
            agent: { kubeconfig: "\($work)/kubeconfig", agent_socket: "\($work)/node/run/detour/agent.sock" },
            files: { manifests_dir: "\($work)/manifests" },
            api: { kubeconfig: "\($work)/kubeconfig" },
            tls: { kubeconfig: "\($work)/kubeconfig-tls" }
        }[$source] + { exclude_namespaces: ["kube-system"] }),
        chain: [
            { type: "istio-redirect" },
            { type: "uid-exclude", uids: ["1337"] },
            { type: "dns-exclude", uids: ["1337"] }
        ]
    } | '"${4:-.}" >"$work/$1.conf"
}

# Writes the pod's facts as files and as answers of the API.
write_facts() {
    local objects=$work/api/api/v1/namespaces definitions=$work/api/apis/k8s.cni.cncf.io/v1/namespaces/default
    mkdir -p "$work/manifests" "$objects/shop/pods/web-0" "$definitions/network-attachment-definitions"
    tee "$work/manifests/pod.json" >"$objects/shop/pods/web-0.json" <<<"$pod"
    tee "$work/manifests/namespace.json" >"$objects/shop.json" <<<"$namespace"
    # The second pod has no sidecar.
    jq '{ metadata: { resourceVersion: "1" }, items: [ ., (.metadata.name = "plain" | .metadata.annotations = {}
        | .metadata.uid |= sub(".$"; "2") | del(.spec.initContainers, .spec.containers[1])) ] }' \
        <<<"$pod" >"$work/api/api/v1/pods.json"
    jq '{ metadata: { resourceVersion: "1" }, items: [ . ] }' <<<"$namespace" >"$work/api/api/v1/namespaces.json"
    tee "$objects/shop/pods/web-0/status.json" >"$objects/shop/events.json" <<<'{}'
    jq -n '{ apiVersion: "k8s.cni.cncf.io/v1", kind: "NetworkAttachmentDefinition",
        metadata: { name: "istio-cni", namespace: "default" },
        spec: { config: "{\"cniVersion\":\"0.3.1\",\"name\":\"istio-cni\",\"type\":\"istio-cni\"}" } }' \
        >"$definitions/network-attachment-definitions/istio-cni.json"
}

# serve_api NAME ARGUMENT…: starts an API server with these arguments and sets `server` and `address`. NAME is that of
# its pipes.
serve_api() {
    local name=$1 ready='' alive
    shift
    mkfifo "$work/$name-alive" "$work/$name-ready"
    # It ends with this script: the script holds the other end of its stdin.
    exec {alive}<>"$work/$name-alive"
    "$probe" api "$@" "$work/api" <"$work/$name-alive" >"$work/$name-ready" {alive}>&- &
    server=$!
    read -r -t 10 ready address <"$work/$name-ready" || true
    [[ $ready == ready ]] || die "API server of the test: not ready within 10 s"
}

# write_kubeconfig FILE SERVER AUTHORITY: AUTHORITY is a file with certificates; empty: none.
write_kubeconfig() {
    jq -n --arg server "$2" --arg authority "$3" '{
        apiVersion: "v1", kind: "Config", "current-context": "bench",
        clusters: [{ name: "bench", cluster: ({ server: $server } +
            if $authority == "" then {} else { "certificate-authority-data": ($authority | @base64) } end) }],
        users: [{ name: "bench", user: { token: "bench" } }],
        contexts: [{ name: "bench", context: { cluster: "bench", user: "bench" } }]
    }' >"$work/$1"
}

# Starts the API server over HTTP.
start_api() {
    local server address
    serve_api http
    api=$server
    write_kubeconfig kubeconfig "http://$address" ''
}

# Starts the API server over TLS.
start_tls_api() {
    local server address
    serve_api tls --tls "$work/authority.pem"
    tls_api=$server
    write_kubeconfig kubeconfig-tls "https://$address" "$(<"$work/authority.pem")"
}

# Starts the node agent and waits until it has read the pod and its namespace.
start_agent() {
    local line server left=3
    mkdir -p "$work/node/etc/cni/net.d" "$work/account"
    printf bench >"$work/account/token"
    # A placeholder: the API server is reached by plain HTTP.
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout /dev/null \
        -subj /CN=bench -days 1 -out "$work/account/ca.crt" 2>/dev/null
    server=$(jq -r '.clusters[0].cluster.server' "$work/kubeconfig")
    mkfifo "$work/said"
    env -i "$detour" agent --platform openshift --root "$work/node" --node-name node-1 \
        --service-account "$work/account" --api-server "$server" 2>"$work/said" &
    agent=$!
    exec 4<"$work/said"
    while ((left > 0)); do
        read -r -t 10 line <&4 || die "agent: not ready within 10 s"
        case $line in *'watching pods'* | *'watching namespaces'* | *"serving the plugin's"*) left=$((left - 1)) ;; esac
    done
    # Keep reading, so that the agent never waits for a full pipe.
    cat <&4 >/dev/null &
    exec 4<&-
}

# cni COMMAND NAMESPACE PROGRAM…: runs a program with the environment in which Multus runs the plugin. NAMESPACE can be
# NAMESPACE/POD.
cni() {
    local command=$1 namespace=${2%/*} name=web-0 uid=$pod_uid arguments
    [[ $2 != */* ]] || name=${2#*/} uid="${pod_uid%?}2"
    arguments="K8S_POD_NAMESPACE=$namespace;K8S_POD_NAME=$name;K8S_POD_INFRA_CONTAINER_ID=$netns;K8S_POD_UID=$uid"
    shift 2
    env -i PATH= \
        CNI_COMMAND="$command" CNI_CONTAINERID="$netns" CNI_NETNS="/var/run/netns/$netns" \
        CNI_IFNAME="${CNI_IFNAME_OF_CALL:-net1}" CNI_PATH=/opt/cni/bin:/usr/lib/cni \
        CNI_ARGS="IgnoreUnknown=true;$arguments;IgnoreUnknown=1;$arguments" "$@"
}

# with_result CONF: writes the configuration of the calls after an ADD to CONF-added: it contains the ADD's result, which
# is in CONF.result.
with_result() {
    jq --slurpfile result "$work/$1.result" '.prevResult = $result[0]' "$work/$1.conf" >"$work/$1-added.conf"
}
