#!/usr/bin/env bash
# Multus as a plugin (thin), with cniVersion 0.3.1 and 1.1.0: attachments, and its auxiliary chain.
# shellcheck source-path=SCRIPTDIR source=../story.sh
source "$(dirname "$0")/../story.sh"

up "$RUNTIME" 1
k create namespace mesh >/dev/null
multus_stories install_multus "0.3.1 1.1.0"
