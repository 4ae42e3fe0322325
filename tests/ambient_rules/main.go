// Program ambient-rules redirects the network namespace in which it runs to ztunnel, with the code of Istio's node agent.
//
// Usage: ambient-rules iptables|nftables [delete]
package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"istio.io/istio/cni/pkg/config"
	"istio.io/istio/cni/pkg/iptables"
	"istio.io/istio/cni/pkg/trafficmanager"
	"istio.io/istio/pkg/log"
	dep "istio.io/istio/tools/istio-iptables/pkg/dependencies"
)

func run(arguments []string) error {
	if len(arguments) == 0 || (arguments[0] != "iptables" && arguments[0] != "nftables") {
		return errors.New("usage: ambient-rules iptables|nftables [delete]")
	}
	// The defaults of cni/pkg/nodeagent, with IPv6 and DNS capture.
	pod := &config.AmbientConfig{
		EnableIPv6:             true,
		RedirectDNS:            os.Getenv("AMBIENT_DNS_CAPTURE") != "false",
		HostProbeSNATAddress:   netip.MustParseAddr("169.254.7.127"),
		HostProbeV6SNATAddress: netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
		Reconcile:              true,
	}
	deps := &dep.RealDependencies{}
	_, manager, err := trafficmanager.NewTrafficRuleManager(&trafficmanager.TrafficRuleManagerConfig{
		NativeNftables: arguments[0] == "nftables",
		HostConfig:     pod,
		PodConfig:      pod,
		HostDeps:       deps,
		PodDeps:        deps,
		NlDeps:         iptables.RealNlDeps(),
	})
	if err != nil {
		return err
	}
	if len(arguments) > 1 {
		return manager.DeleteInpodRules(log.FindScope(log.DefaultScopeName))
	}
	return manager.CreateInpodRules(log.FindScope(log.DefaultScopeName), config.PodLevelOverrides{})
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "ambient-rules:", err)
		os.Exit(1)
	}
}
