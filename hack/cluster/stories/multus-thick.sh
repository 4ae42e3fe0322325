#!/usr/bin/env bash
# Multus as a daemon (thick), with OpenShift's directories; under CRI-O with cniVersion 0.3.1 and 1.1.0.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

up "$RUNTIME" 1
k create namespace mesh >/dev/null
# Under containerd, Multus's program fails STATUS with cniVersion 1.1.0 (multus-cni 4.2.3: "invalid CNI_ARG").
versions="0.3.1 1.1.0"
[[ $RUNTIME == crio ]] || versions=1.0.0
multus_stories install_thick_multus "$versions"
