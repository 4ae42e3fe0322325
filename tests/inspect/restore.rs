//! iptables-restore, ip6tables-restore and nft load the output of `explain --rules`, and create the rules that the plugin
//! creates. Needs root and these tools.

use crate::run::{detour, file};
use crate::support::new_netns::{in_new_netns, tool};
use detour_cni::firewall::native::NativeLiveTables;
use detour_cni::firewall::nfnetlink::NfSocket;
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{CreatedTables, LiveRuleset, RuleFormat, Ruleset, TableId};
use detour_cni::inspect::{ManifestTexts, PodManifest, PodSelector, configuration, explain};
use std::path::Path;

const POD: &str = "
kind: Pod
metadata:
  name: web
  namespace: shop
  annotations:
    sidecar.istio.io/status: '{}'
    k8s.v1.cni.cncf.io/networks: default/mesh
    sidecar.istio.io/interceptionMode: MODE
    traffic.sidecar.istio.io/excludeOutboundIPRanges: 10.1.0.0/16,10.2.0.0/16,fd00::/64
spec:
  containers:
  - {name: app}
  - name: istio-proxy
    env: [{name: ISTIO_META_DNS_CAPTURE, value: 'true'}]
";
const CONF: &str = r#"{"name": "mesh", "type": "detour", "kubernetes": {"kubeconfig": "/k"}, "chain": [
    {"type": "istio-redirect", "dns_servers_v4": "10.96.0.10"},
    {"type": "uid-exclude", "uids": "5", "rules": "tcp:80-81,443:6-9"}
]}"#;

/// Returns all rules as text, without handles and counters.
fn rules(live: &LiveRuleset) -> Vec<String> {
    let chains = live.chains().flat_map(|(family, table, name, chain)| {
        let id = TableId::Iptables(family, table);
        chain.rules.iter().map(move |rule| format!("{} -A {name} {}", id.place(), rule.text(id)))
    });
    chains.collect()
}

/// Returns detour's native tables, without the handles of their rules.
fn native(mut live: LiveRuleset) -> NativeLiveTables {
    let rules = live.native.values_mut().flat_map(|chains| chains.values_mut()).flat_map(|chain| &mut chain.rules);
    rules.for_each(|rule| rule.handle = 0);
    live.native
}

fn live() -> LiveRuleset {
    LiveRuleset::read(&mut NfSocket::open().expect("nfnetlink")).expect("readable")
}

/// Returns the rules after the plugin's commit for the pod, in a new network namespace.
fn committed(pod: &str, dialect: RuleFormat) -> LiveRuleset {
    let conf = configuration(Path::new("c"), CONF.as_bytes()).expect("a configuration");
    let texts = ManifestTexts { pods: ("p".into(), pod.to_owned()), namespace: None, definitions: Vec::new() };
    let found = PodManifest::read(&texts, &PodSelector::default()).expect("a pod");
    let subject = found.subject(&found.pods[0], &[conf.into()]).expect("a subject");
    let desired = Ruleset::of(&explain(&subject).expect("explained").policy, &Family::ALL);
    in_new_netns(|| {
        let mut socket = NfSocket::open().expect("nfnetlink");
        let before = live();
        let plan = dialect.plan(&before, &Ruleset::default(), &desired, &CreatedTables::default());
        plan.commit(&mut socket, &before).expect("accepted");
        live()
    })
}

fn rules_text(pod: &str, dialect: &str) -> String {
    let conf = file("restore.conf", CONF);
    detour(&["explain", "-f", "-", "--config", &conf, "--rules", dialect], pod, &[]).stdout
}

#[test]
fn the_reason_for_missing_rules_is_printed() {
    let conf = file("restore.conf", CONF);
    for dialect in ["iptables", "nft"] {
        let pod = POD.replace("networks: default/mesh", "networks: other");
        let run = detour(&["explain", "-f", "-", "--config", &conf, "--rules", dialect], &pod, &[]);
        let said = "note: pod shop/web: no rules: not redirected: the pod does not select network mesh: ";
        assert!(run.code == 0 && run.stderr.starts_with(said), "{run:?}");
    }
}

#[test]
fn iptables_tools_load_the_rules_that_the_plugin_commits() {
    for mode in ["REDIRECT", "TPROXY"] {
        let pod = POD.replace("MODE", mode);
        let text = rules_text(&pod, "iptables");
        let loaded = in_new_netns(|| {
            tool("iptables-restore", &[], &text);
            tool("ip6tables-restore", &[], &text);
            live()
        });
        let committed = rules(&committed(&pod, RuleFormat::Iptables));
        assert!(committed.len() > 40, "{committed:#?}");
        assert_eq!(rules(&loaded), committed, "{mode}");
    }
}

#[test]
fn nft_loads_the_rules_that_the_plugin_commits() {
    for mode in ["REDIRECT", "TPROXY"] {
        let pod = POD.replace("MODE", mode);
        let text = rules_text(&pod, "nft");
        let loaded = in_new_netns(|| {
            tool("nft", &["-f", "-"], &text);
            native(live())
        });
        assert!(loaded.len() > 1, "{loaded:#?}");
        assert_eq!(loaded, native(committed(&pod, RuleFormat::Nftables)), "{mode}");
    }
}
