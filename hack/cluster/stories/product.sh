#!/usr/bin/env bash
# The life of detour on two nodes: install, upgrades, rollback, changed directories, killed agents, uninstall.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

# during DESCRIPTION COMMAND…: creates pods one after another while the command runs.
during() {
    local description=$1 creator count
    shift
    touch "$cluster/creating"
    (
        # Ends with the story, even if that is killed.
        for ((i = 1; ; i++)); do
            [[ -e $cluster/creating ]] && kill -0 $$ 2>/dev/null || exit 0
            meshed Pod "pod-$i" '.metadata.labels.app = "churn"' || true
            sleep 1
        done
    ) &
    creator=$!
    sleep 2
    "$@"
    sleep 2
    rm "$cluster/creating"
    wait "$creator"
    count=$(pods churn)
    eventually 240 k wait --namespace mesh --for condition=Ready pod --selector app=churn --timeout 5s || true
    expect_captured "$description" churn "$count"
    k delete pods --namespace mesh --selector app=churn --wait=false >/dev/null
    eventually 180 prints 0 pods churn
}
agents() {
    k --namespace kube-system rollout status daemonset/detour-agent --timeout 240s >/dev/null
}
rolled_out() {
    local n
    for ((n = 1; n <= 2; n++)); do
        eventually 60 enter "$n" test -e "$1" || true
    done
    rollout deployment/web
    expect "$2" "$1 $1" "$(for n in 1 2; do enter "$n" sh -c "ls $1" 2>/dev/null; done | paste -sd ' ')"
}

up "$RUNTIME" 2
k create namespace mesh >/dev/null
make_images detour:next
load detour:next
install_detour --set global.platform=kubernetes
run_chart_test
record_packets
meshed Deployment web '.spec.replicas = 20'
rollout deployment/web
expect_captured "20 pods" web 20
say "upgrade during a rollout of 20 pods"
k rollout restart --namespace mesh deployment/web >/dev/null
install_detour --set global.platform=kubernetes,tag=next
rollout deployment/web
eventually 120 prints 20 pods web
expect_captured "upgrade" web 20
say "rollback, changed directories and modes, while pods start"
during rollback eval 'helm rollback detour --namespace kube-system >/dev/null; agents'
# detour refuses a directory without the plugins of the cluster network.
for n in 1 2; do
    enter "$n" sh -c 'mkdir -p /home/kubernetes/bin; cp /opt/cni/bin/bridge /opt/cni/bin/portmap /home/kubernetes/bin/'
done
during "cniBinDir" eval 'install_detour --set global.platform=kubernetes,cniBinDir=/home/kubernetes/bin; agents'
rolled_out /home/kubernetes/bin/detour "the program"
# CRI-O deletes running pods with the list with which they started: the old program stays.
[[ $RUNTIME == crio ]] || expect "the old program" "" "$(for n in 1 2; do enter "$n" ls /opt/cni/bin | grep -x detour || true; done)"
during "cni.ownList=false" eval 'install_detour --set global.platform=kubernetes,cni.ownList=false; agents'
during "chained, own list" eval 'install_detour --set global.platform=kubernetes; agents'
say "the agents are killed 20 times"
kill_agents() {
    local i n container killed=0
    for ((i = 0; i < 40 && killed < 20; i++)); do
        for n in 1 2; do
            # The kubelet waits longer after each restart; a deleted pod has a new container at once.
            k delete pod --namespace kube-system --selector app.kubernetes.io/name=detour \
                --field-selector "spec.nodeName=node$n" --wait=false >/dev/null
            container=$(enter "$n" crictl ps --name '^agent$' --state Running --quiet 2>/dev/null | head -1 || true)
            [[ -n $container ]] || continue
            enter "$n" kill -KILL "$(enter "$n" crictl inspect "$container" 2>/dev/null | jq .info.pid)" 2>/dev/null && killed=$((killed + 1))
        done
        sleep 1
    done
    expect "killed agents" '2[01]' "$killed"
    agents
}
during "killed agents" kill_agents
expect_none_outside "all, before uninstall"
say "uninstall with running pods"
before=$(pods web)
k logs --namespace kube-system --selector app.kubernetes.io/name=detour --follow --tail 1 >"$cluster/agents.log" 2>&1 &
sleep 1
helm uninstall detour --namespace kube-system --wait >/dev/null
sed 's/^/          /' "$cluster/agents.log" | tail -4
for n in 1 2; do
    expect_within 60 "configuration lists of node $n" 10-net.conflist enter "$n" ls /etc/cni/net.d
done
pod=$(k get pods --namespace mesh --selector app=web -o jsonpath='{.items[0].metadata.name}')
expect "a running pod ($before run)" "uid 2000: tcp sidecar, dns sidecar" "$(k exec --namespace mesh "$pod" --container app -- sh -c 'setuidgid 2000 report 2>/dev/null || report')"
k delete deployment --namespace mesh web --wait >/dev/null
expect_within 120 "pods that can't be deleted" "" k get pods --namespace mesh -o name
expect "warnings about pods that could not be stopped" 0 "$(k get events --namespace mesh --field-selector reason=FailedKillPod -o name | wc -l)"
expect_no_files "after the pods' end"
