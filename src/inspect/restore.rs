//! Text for the user's next command: rules as input for `iptables-restore` and `ip6tables-restore`, and hints to run
//! detour on a pod's node.

use crate::firewall::Ruleset;
use crate::firewall::rule::{Family, Hook, Rule, Table};
use crate::pod::Pod;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Returns the rules as text that `iptables-restore` and `ip6tables-restore` both accept.
///
/// A rule for only one of them starts with `-4` or `-6`, and the other tool skips it (iptables(8)). A rule for both is
/// listed once.
#[must_use]
pub fn restore_text(ruleset: &Ruleset) -> String {
    let tables: BTreeSet<Table> = ruleset.tables.keys().map(|(_, table)| *table).collect();
    let mut text = String::new();
    for table in tables {
        let mut chains: Vec<(String, bool)> = Vec::new();
        let mut add = |name: &str, built_in| {
            if !chains.iter().any(|(known, _)| known == name) {
                chains.push((name.to_owned(), built_in));
            }
        };
        let both = || Family::ALL.into_iter().filter_map(|family| ruleset.tables.get(&(family, table)));
        both().for_each(|rules| rules.hooks.keys().for_each(|hook| add(hook.chain(), true)));
        both().for_each(|rules| rules.chains.iter().for_each(|(name, _)| add(name, false)));
        let _ = writeln!(text, "*{}", table.name());
        for (name, built_in) in &chains {
            let _ = writeln!(text, ":{name} {} [0:0]", if *built_in { "ACCEPT" } else { "-" });
        }
        for (name, _) in &chains {
            let rules = |family| chain_rules(ruleset, family, table, name);
            chain_text(&mut text, name, rules(Family::Ip), rules(Family::Ip6));
        }
        text += "COMMIT\n";
    }
    text
}

fn chain_rules<'a>(ruleset: &'a Ruleset, family: Family, table: Table, chain: &str) -> &'a [Rule] {
    let Some(rules) = ruleset.tables.get(&(family, table)) else { return &[] };
    let hook = Hook::ALL.into_iter().find(|hook| hook.chain() == chain).and_then(|hook| rules.hooks.get(&hook));
    let own = || rules.chains.iter().find(|(name, _)| name == chain).map(|(_, rules)| rules);
    hook.or_else(own).map_or(&[], Vec::as_slice)
}

/// Writes a chain: rule by rule if both families have the same number of rules, otherwise family by family.
fn chain_text(text: &mut String, chain: &str, v4: &[Rule], v6: &[Rule]) {
    let mut line = |prefix: &str, rule: &Rule| {
        let _ = writeln!(text, "{prefix}-A {chain} {rule}");
    };
    if v4.len() != v6.len() {
        v4.iter().for_each(|rule| line("-4 ", rule));
        v6.iter().for_each(|rule| line("-6 ", rule));
        return;
    }
    for (four, six) in v4.iter().zip(v6) {
        if four == six {
            line("", four);
        } else {
            line("-4 ", four);
            line("-6 ", six);
        }
    }
}

/// The namespace of the agent in the project's manifests.
pub(super) const AGENT_NAMESPACE: &str = "kube-system";

/// Returns a hint with the commands that run detour with `arguments` on the pod's node: in the agent's pod, and on the
/// node itself.
///
/// `agent_namespace` is the namespace of the agent's pods, and `agent` the name of the one on that node, if known.
#[must_use]
pub fn elsewhere(pod: &Pod, agent_namespace: Option<&str>, agent: Option<&str>, arguments: &str) -> String {
    let Some(node) = &pod.node_name else {
        return "the pod is not scheduled to a node (spec.nodeName)".to_owned();
    };
    let agent_namespace = agent_namespace.unwrap_or(AGENT_NAMESPACE);
    let agents = format!(
        "kubectl get pods -n {agent_namespace} -l app.kubernetes.io/name=detour,app.kubernetes.io/component=agent \
         --field-selector spec.nodeName={node} -o name | head -n 1"
    );
    let agent = agent.map_or_else(|| format!("\"$({agents})\""), str::to_owned);
    format!(
        "the pod is on node {node}; run there:\n  \
         kubectl exec -n {agent_namespace} {agent} -- /detour {arguments} --root /host\n\
         or, with DIR being the plugin's directory on the node (/var/lib/cni/bin on OpenShift):\n  \
         oc debug node/{node} -- chroot /host DIR/detour {arguments}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Interception, Policy};

    #[test]
    fn rules_of_both_families_are_listed_once() {
        let on = Policy { interception: Interception::On(Box::default()), ..Policy::default() };
        let text = restore_text(&Ruleset::of(&on, &Family::ALL));
        let lines = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(lines("-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN"), 1);
        assert_eq!((lines("-4 -A ISTIO_OUTPUT -d 127.0.0.1/32"), lines("-6 -A ISTIO_OUTPUT -d ::1/128")), (1, 1));
        assert_eq!(lines("-4"), lines("-6"));
        assert!(text.starts_with("*nat\n:PREROUTING ACCEPT [0:0]\n") && text.ends_with("COMMIT\n"), "{text}");
        let one = restore_text(&Ruleset::of(&on, &[Family::Ip]));
        assert!(one.lines().all(|line| !line.starts_with("-6") && !line.starts_with("-A")), "{one}");
    }

    #[test]
    fn hints_contain_the_node_and_the_arguments() {
        let pod = Pod { node_name: Some("worker-1".into()), ..Pod::default() };
        let text = elsewhere(&pod, Some("mesh"), None, "rules --pod-uid u");
        let commands: Vec<&str> = text.lines().filter(|line| line.starts_with("  ")).collect();
        assert_eq!(commands.len(), 2, "{text}");
        assert!(commands[0].starts_with("  kubectl exec -n mesh ") && commands[0].contains("spec.nodeName=worker-1"));
        assert!(commands[0].ends_with("-- /detour rules --pod-uid u --root /host"), "{text}");
        assert!(commands[1].contains("node/worker-1") && commands[1].ends_with("/detour rules --pod-uid u"), "{text}");
        let known = elsewhere(&pod, Some("mesh"), Some("detour-agent-x"), "rules");
        assert!(known.contains("kubectl exec -n mesh detour-agent-x -- /detour rules --root /host"), "{known}");
        assert!(elsewhere(&pod, None, None, "rules").contains("kubectl exec -n kube-system "));
        assert!(elsewhere(&Pod::default(), None, None, "rules").contains("not scheduled"));
    }
}
