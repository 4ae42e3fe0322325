//! The text of `--rules` is what both tools load, each its own part. Needs root, `iptables-restore`
//! and `ip6tables-restore`.

use crate::run::{detour, file};
use detour_cni::firewall::nfnetlink::Socket;
use detour_cni::firewall::rule::Family;
use detour_cni::firewall::{Live, Made, Ruleset, changes, commit};
use detour_cni::inspect::{Subject, configuration, explain};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const POD: &str = "
kind: Pod
metadata:
  name: web
  namespace: shop
  annotations:
    sidecar.istio.io/status: '{}'
    sidecar.istio.io/interceptionMode: MODE
    traffic.sidecar.istio.io/excludeOutboundIPRanges: 10.1.0.0/16,10.2.0.0/16,fd00::/64
spec:
  containers:
  - {name: app}
  - name: istio-proxy
    env: [{name: ISTIO_META_DNS_CAPTURE, value: 'true'}]
";
const CONF: &str = r#"{"name": "n", "type": "detour", "chain": [
    {"type": "istio-redirect", "dns_servers_v4": "10.96.0.10"},
    {"type": "uid-exclude", "uids": "5", "rules": "tcp:80-81,443:6-9"}
]}"#;

fn in_new_netns<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("needs CAP_SYS_ADMIN");
            work()
        });
        thread.join().expect("the work in the namespace succeeds")
    })
}

fn restore(program: &str, text: &str) {
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("writable");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{program}: {}\n{text}", String::from_utf8_lossy(&output.stderr));
}

/// Chains with rules in them, as text, without handles and counters.
fn rules(live: &Live) -> Vec<String> {
    let chains = live.chains().flat_map(|(family, table, name, chain)| {
        chain.rules.iter().map(move |rule| format!("{} {} -A {name} {rule}", family.name(), table.name()))
    });
    chains.collect()
}

fn live() -> Live {
    Live::read(&mut Socket::open().expect("nfnetlink")).expect("readable")
}

#[test]
fn both_tools_load_what_the_plugin_would_have_committed() {
    for mode in ["REDIRECT", "TPROXY"] {
        let pod = POD.replace("MODE", mode);
        let conf = file(&format!("restore-{mode}.conf"), CONF);
        let text = detour(&["explain", "-f", "-", "--config", &conf, "--rules", "iptables"], &pod, &[]).stdout;
        let loaded = in_new_netns(|| {
            restore("iptables-restore", &text);
            restore("ip6tables-restore", &text);
            rules(&live())
        });
        let conf = configuration(Path::new("c"), CONF.as_bytes()).expect("a configuration");
        let subject = Subject::of_manifest(conf, (Path::new("p"), &pod), None).expect("a pod");
        let desired = Ruleset::of(&explain(&subject).expect("explained").policy, &Family::ALL);
        let committed = in_new_netns(|| {
            let mut socket = Socket::open().expect("nfnetlink");
            let before = live();
            let steps = changes(&before, &Ruleset::default(), &desired, &Made::default());
            commit(&mut socket, &before, &steps).expect("accepted");
            rules(&live())
        });
        assert!(committed.len() > 40, "{committed:#?}");
        assert_eq!(loaded, committed, "{mode}");
    }
}
