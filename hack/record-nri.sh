#!/usr/bin/env bash
# Records sessions of the NRI plugin with containerd and CRI-O in tests/golden/nri: the runtime lists a running
# container, and starts, stops and removes another one. Tests compare the plugin's answers with the record. Run this
# script only after a change of the plugin's answers or of a runtime's version. It needs root and Go.
#
# Usage: hack/record-nri.sh
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=machine.sh
source hack/machine.sh

need_root
need_commands gcc=build-essential runc=runc conmon=conmon skopeo=skopeo /usr/lib/cni/bridge=containernetworking-plugins
need_rust
need_crictl
need_runtimes cri-o
work=$(mktemp -d)
# The node ends when its standard input ends.
trap 'exec 3>&-; wait; rm -rf "$work"' EXIT
mkdir -p tests/golden/nri
test=$(cargo test --locked --test containers --no-run --message-format=json </dev/null |
    sed -n 's/.*"executable":"\([^"]*\/containers-[^"]*\)".*/\1/p' | tail -n 1)
cat >"$work/pod.json" <<'POD'
{
  "metadata": { "name": "web-0", "namespace": "shop", "uid": "11111111-2222-4333-8444-555555555555" },
  "labels": {
    "app": "web", "io.kubernetes.pod.name": "web-0", "io.kubernetes.pod.namespace": "shop",
    "io.kubernetes.pod.uid": "11111111-2222-4333-8444-555555555555"
  },
  "annotations": { "detour.io/exclude-containers": "db-migrate" },
  "log_directory": "/tmp",
  "linux": { "security_context": { "namespace_options": { "pid": 1 } } }
}
POD
for name in app db-migrate; do
    cat >"$work/$name.json" <<CONTAINER
{
  "metadata": { "name": "$name" }, "image": { "image": "detour.invalid/test:1" },
  "labels": { "io.kubernetes.container.name": "$name", "io.kubernetes.pod.name": "web-0" },
  "annotations": { "io.kubernetes.container.restartCount": "0" },
  "log_path": "$name.log", "linux": { "security_context": { "namespace_options": { "pid": 1 } } }
}
CONTAINER
done

# start NAME: starts a container of the pod, and prints its ID.
start() {
    local id
    id=$("$work/node/enter" crictl create "$pod" "$work/$1.json" "$work/pod.json")
    "$work/node/enter" crictl start "$id" >&2
    echo "$id"
}

for runtime in containerd cri-o; do
    say "recording $runtime"
    rm -rf "$work/node"
    mkfifo "$work/$runtime.input"
    tests/runtimes/node.sh "$runtime" "$work/node" <"$work/$runtime.input" >"$work/$runtime.ready" &
    node=$!
    exec 3>"$work/$runtime.input"
    until grep -q . "$work/$runtime.ready"; do sleep 0.1; done
    pod=$("$work/node/enter" crictl runp "$work/pod.json")
    start app >/dev/null
    "$work/node/enter" env NRI_SOCKET=/var/run/nri/nri.sock NRI_NAME="$runtime" \
        "$test" --exact nri::recorded::records_a_session --nocapture >"$work/record" &
    record=$!
    until grep -q ready "$work/record"; do sleep 0.1; done
    id=$(start db-migrate)
    "$work/node/enter" crictl stop "$id"
    "$work/node/enter" crictl rm "$id"
    wait "$record"
    "$work/node/enter" crictl rmp --force "$pod"
    exec 3>&-
    wait "$node" || true
done
