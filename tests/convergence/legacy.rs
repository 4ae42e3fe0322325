//! Rules of `iptables-legacy` in the pod, which apply in addition to those of nf_tables.

use crate::attachment::{Facts, Slot};
use crate::expect::from_scratch;
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;

const REDIRECTION: &str = "*nat
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
";
const FILTER: &str = "*filter\n-A OUTPUT -p tcp -m tcp --dport 25 -j DROP\nCOMMIT\n";

fn load(pod: &Pod, rules: &str) {
    pod.tool("iptables-legacy-restore", &["--noflush"], rules);
    pod.tool("ip6tables-legacy-restore", &["--noflush"], rules);
}

fn saved(pod: &Pod) -> Vec<String> {
    let text = pod.tool("sh", &["-c", "iptables-legacy-save; ip6tables-legacy-save"], "");
    text.lines().filter(|line| line.starts_with('-')).map(str::to_owned).collect()
}

/// tests/netns checks them with packets.
#[test]
fn exclusions_from_a_legacy_redirection_change_none_of_its_rules() {
    on_a_node(|| {
        for attachment in [Slot::ExcludeDns.with(Facts::Plain), Slot::Exclusions.with(Facts::DnsCaptured)] {
            let pod = Pod::new();
            load(&pod, REDIRECTION);
            let before = (Kernel::of(&pod), saved(&pod));
            pod.add(attachment).done();
            pod.check(attachment).done();
            let tables = pod.tool("nft", &["list", "tables"], "");
            assert!(tables.contains("table inet detour-exclusions"), "{tables}");
            assert_eq!(saved(&pod), before.1);
            pod.del(attachment).done();
            Kernel::of(&pod).assert_is(&before.0, "after DEL");
            assert_eq!(saved(&pod), before.1);
        }
    });
}

/// Exclusions from a redirection in nf_tables work; an empty legacy table has no effect.
#[test]
fn legacy_rules_remain_beside_a_redirection_in_nf_tables() {
    on_a_node(|| {
        let (redirect, exclude) = (Slot::Detour.with(Facts::DnsCaptured), Slot::ExcludeDns.with(Facts::Plain));
        let pod = Pod::new();
        load(&pod, FILTER);
        pod.tool("iptables-legacy", &["-t", "nat", "-L"], "");
        let theirs = saved(&pod);
        pod.add(redirect).done();
        pod.add(exclude).done();
        pod.check(exclude).done();
        let both = [redirect, exclude].into();
        Kernel::of(&pod).assert_is(&from_scratch(None, &both).expect("accepted"), "beside legacy rules");
        assert_eq!(saved(&pod), theirs);
        pod.del(exclude).done();
        pod.del(redirect).done();
        assert!(!Kernel::of(&pod).has_rules());
        assert_eq!(saved(&pod), theirs);
    });
}
