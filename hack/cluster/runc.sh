#!/usr/bin/env bash
# runc, for CRI-O on machines without the capability CAP_SYS_RESOURCE or without the hugetlb controller, which CRI-O can't
# be configured for: containers keep the OOM score of their parent and have no limits for huge pages.
set -euo pipefail
bundle='' previous=''
for argument in "$@"; do
    case $previous in
        --bundle | -b) bundle=$argument ;;
    esac
    [[ $argument != --bundle=* ]] || bundle=${argument#*=}
    previous=$argument
done
if [[ -e $bundle/config.json ]]; then
    jq -c 'del(.process.oomScoreAdj, .linux.resources.hugepageLimits)' "$bundle/config.json" >"$bundle/config.new"
    # The runtime may watch the file: keep its inode.
    cat "$bundle/config.new" >"$bundle/config.json"
    rm "$bundle/config.new"
fi
exec /usr/sbin/runc "$@"
