#!/usr/bin/env bash
# The life of workloads on two nodes: scaling, jobs, static pods, debugging, a killed sandbox, eviction, drain, removal.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

up "$RUNTIME" 2
k create namespace mesh >/dev/null
install_detour --set global.platform=kubernetes
record_packets
say "a Deployment with 0, 10, 1, 10 and 0 replicas"
meshed Deployment web '.spec.replicas = 0'
empty=$(leftovers)
for replicas in 10 1 10 0; do
    began=$SECONDS
    k scale --namespace mesh deployment/web --replicas "$replicas" >/dev/null
    eventually 240 prints "$replicas" pods web
    rollout deployment/web
    echo "          $replicas replicas after $((SECONDS - began)) s"
    [[ $replicas == 0 ]] || expect_captured "$replicas replicas" web "$replicas"
done
expect_within 60 "after scaling down" "$empty" leftovers

say "Job, CronJob, StatefulSet, DaemonSet"
meshed Job job '.spec += { completions: 6, parallelism: 3 }'
meshed CronJob cron
meshed StatefulSet db '.spec.replicas = 3'
meshed DaemonSet agent
k wait --namespace mesh --for condition=Complete job/job --timeout 240s >/dev/null
expect_captured "Job" job 6 "tcp sidecar, dns sidecar"
rollout statefulset/db
k delete pod --namespace mesh db-1 --wait >/dev/null
rollout statefulset/db
expect_captured "StatefulSet, one pod recreated with its name" db 3
rollout daemonset/agent
expect_captured "DaemonSet" agent 2
eventually 150 prints 'pod/*' k get pods --namespace mesh --selector app=cron --field-selector status.phase=Succeeded -o name
expect "CronJob: first containers" "* uid 2000: tcp sidecar, dns sidecar" "$(reports mesh app=cron first)"
k delete cronjob,job,statefulset --namespace mesh --all --wait >/dev/null

say "native sidecar, hostNetwork, static pod, kubectl debug"
meshed Pod native native
meshed Pod host '.spec += { hostNetwork: true, initContainers: [] } | .spec.containers |= [.[0]]'
sed 's/NAME/static/' hack/cluster/pods/meshed.yaml | enter 1 tee /etc/kubernetes/manifests/static.yaml >/dev/null
for pod in native host static-node1; do
    eventually 120 k wait --namespace mesh --for condition=Ready "pod/$pod" --timeout 5s
done
expect_captured "native sidecar" native 1 "tcp sidecar, dns sidecar"
expect "hostNetwork: the application" "uid 2000: tcp direct, dns direct" "$(logs mesh host app)"
expect "hostNetwork: tables of detour on the node" 0 "$(enter 1 nft list tables | grep -c detour || true)"
expect_captured "static pod" static 1
k debug --namespace mesh native --image localhost/tools:1 --image-pull-policy Never --container debugger -- report >/dev/null 2>&1
expect_within 60 "kubectl debug: an ephemeral container" "uid 0: tcp sidecar, dns sidecar" logs mesh native debugger
enter 1 rm /etc/kubernetes/manifests/static.yaml

say "the sandbox ends: the kubelet makes a new one for the pod"
node=$(k get pod --namespace mesh native -o jsonpath='{.spec.nodeName}')
node=${node#node}
sandbox=$(enter "$node" crictl pods --name native --state Ready --quiet)
if [[ $RUNTIME == containerd ]]; then
    enter "$node" kill -KILL "$(enter "$node" crictl inspectp "$sandbox" | jq .info.pid)"
else
    # CRI-O starts no pause process.
    enter "$node" crictl stopp "$sandbox" >/dev/null
fi
is_new() {
    local now
    now=$(enter "$node" crictl pods --name native --state Ready --quiet)
    [[ -n $now && $now != "$sandbox" ]]
}
eventually 120 is_new
eventually 120 k wait --namespace mesh --for condition=Ready pod/native --timeout 5s
expect_captured "new sandbox" native 1 "tcp sidecar, dns sidecar"

say "eviction, drain, removal of a node"
k scale --namespace mesh deployment/web --replicas 4 >/dev/null
rollout deployment/web
pod=$(k get pods --namespace mesh --selector app=web -o jsonpath='{.items[0].metadata.name}')
k create --raw "/api/v1/namespaces/mesh/pods/$pod/eviction" -f - >/dev/null \
    <<<'{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "'"$pod"'", "namespace": "mesh"}}'
eventually 60 prints "" k get pod --namespace mesh "$pod" --ignore-not-found -o name
rollout deployment/web
k drain node2 --ignore-daemonsets --delete-emptydir-data --force --timeout 120s &>/dev/null
rollout deployment/web
expect "drain: nodes of the pods" node1 "$(k get pods --namespace mesh --selector app=web -o jsonpath='{.items[*].spec.nodeName}' | tr ' ' '\n' | sort -u)"
expect_captured "drain" web 4
k uncordon node2 >/dev/null
k delete node node2 >/dev/null
# The kubelet registers its node only when it starts.
enter 2 bash hack/cluster/node.sh stop kubelet
enter 2 bash hack/cluster/node.sh start kubelet
eventually 120 is_ready 2
k --namespace kube-system rollout status daemonset/detour-agent --timeout 120s >/dev/null
k rollout restart --namespace mesh daemonset/agent >/dev/null
rollout daemonset/agent
expect_captured "the node returns" agent 2
# The pod with hostNetwork sends from the node's address.
expect_none_outside "all"
