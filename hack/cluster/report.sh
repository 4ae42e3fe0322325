#!/bin/sh
# Reports where a container's traffic arrives, in the image "tools" of hack/cluster.sh: a TCP connection to the server
# outside of the cluster and a DNS query arrive there (direct), at the sidecar, or nowhere (lost).
# Usage: report [SECONDS]   repeats it with this pause
once() {
    answer=$(timeout 3 nc 198.51.100.20 443 </dev/null 2>/dev/null)
    case $answer in
        direct*) tcp=direct ;;
        sidecar*) tcp=sidecar ;;
        *) tcp=lost ;;
    esac
    case $(timeout 3 nslookup -type=a vault.example.com 10.96.0.10 2>/dev/null) in
        *198.51.100.20*) dns=direct ;;
        *192.0.2.53*) dns=sidecar ;;
        *) dns=lost ;;
    esac
    echo "uid $(id -u): tcp $tcp, dns $dns"
}
trap exit TERM
once
while [ -n "${1:-}" ]; do
    sleep "$1" &
    wait $!
    once
done
