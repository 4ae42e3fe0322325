//! The list of checks in their order: what each one proves, which other checks it needs, and the function that makes it.
//! Also what the checks have found.

use super::report::{CheckOutcome, CheckTarget, CheckVerdict, ReportLine};
use super::{configuration, containers, node, pod, probe, rules};
use crate::cluster::agent::PoliciesReport;
use crate::cluster::{self, Api, Cluster, Lookup, ObjectRef};
use crate::cni::{Error, Kubernetes, NetConf};
use crate::host_path::HostPath;
use crate::inspect::explain::Explanation;
use crate::inspect::rules::{LiveRules, RulesReport};
use crate::inspect::subject::{AppliedConf, Subject};
use crate::netns::find::FoundNetns;
use crate::policy::Policy;
use crate::state::{ROOT, Store};
use configuration::ConfigurationFiles;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// A check: its name, subject and condition, and how it is made.
pub(super) struct Check {
    /// The name; stable across releases.
    pub(super) id: &'static str,
    /// The subject.
    pub(super) group: &'static str,
    /// The condition that is met if the check passes.
    pub(super) holds: &'static str,
    /// The checks without which this one has no meaning: it is not made if one of them failed or was not made.
    pub(super) needs: &'static [&'static Check],
    /// Makes the check; `None` if it does not apply to this node or pod.
    pub(super) examine: fn(&mut Findings<'_>) -> Option<CheckVerdict>,
}

macro_rules! checks {
    ($($group:literal {
        $($name:ident $id:literal $holds:literal [$($needed:ident),*] $examine:path;)*
    })*) => {
        $($(pub(super) const $name: &Check = &Check {
            id: $id,
            group: $group,
            holds: $holds,
            needs: &[$($needed),*],
            examine: |findings| $examine(findings).into(),
        };)*)*

        /// All checks.
        const ALL: &[&Check] = &[$($($name),*),*];
    };
}

checks! {
    "node" {
        CONFIGURATION_PRESENT "configuration-present" "a configuration calls the plugin" [] configuration::present;
        CONFIGURATION_VALID "configuration-valid" "the plugin accepts the configuration"
            [CONFIGURATION_PRESENT] configuration::valid;
        CONFIGURATION_PICKED "configuration-picked" "runtimes use the configuration"
            [CONFIGURATION_PRESENT, CONFIGURATION_VALID] configuration::picked;
        OWN_LIST "own-list" "the own configuration list is a copy of the cluster network's list"
            [] configuration::own_list;
        MULTUS_CHAIN "multus-chain" "Multus runs the plugins of its auxiliary chain" [] configuration::multus_chain;
        NODE_CONFIGURATION "node-configuration" "the node configuration is valid, and only root can change it"
            [] configuration::node_configuration;
        PROGRAM_TRUSTED "program-trusted" "only root can change the plugin directories" [] node::program_trusted;
        PROGRAM_PRESENT "program-present" "the program is in the runtimes' plugin directory, in this version"
            [PROGRAM_TRUSTED] node::program_present;
        KUBECONFIG_VALID "kubeconfig-valid" "the plugin's kubeconfig is private and usable, and its token has not expired"
            [] node::kubeconfig;
        INSTALLATION "installation" "the installation is unchanged" [] node::installation;
    }

    "cluster" {
        API_REACHABLE "api-reachable" "the API server answers" [KUBECONFIG_VALID] node::api_reachable;
        PERMISSIONS "permissions" "the plugin has the permissions that its configuration needs"
            [API_REACHABLE] node::permissions;
        AGENT_REACHABLE "agent-reachable" "the node agent answers, and has current facts" [] node::agent;
    }

    "policies" {
        POLICIES "policies" "the node's pods have the rules of their policies" [AGENT_REACHABLE] node::policies;
    }

    "kernel" {
        KERNEL_RULES "kernel-rules" "the kernel accepts the rules of a pod" [] node::kernel;
        SOCKET_LB "socket-load-balancing" "no eBPF program replaces Service addresses before netfilter"
            [] node::socket_lb;
    }

    "pod" {
        POD_KNOWN "pod-known" "the cluster knows the pod" [] pod::known;
        ANNOTATION_VALID "annotation-valid" "the pod's networks annotation is valid" [POD_KNOWN] pod::annotation;
        DEFINITION_FOUND "definition-found" "the definition in the annotation exists" [] pod::definition_found;
        DEFINITION_LEADS "definition-leads" "the definition leads to a configuration"
            [DEFINITION_FOUND] pod::definition_leads;
        PLUGIN_ATTACHED "plugin-attached" "the plugin runs for this pod"
            [POD_KNOWN, CONFIGURATION_PRESENT, CONFIGURATION_VALID] pod::attached;
        REDIRECTED "redirected" "the pod's traffic is redirected to its sidecar"
            [POD_KNOWN, CONFIGURATION_PRESENT, CONFIGURATION_VALID] pod::redirected;
        EVENTS "events" "no Event reports a failed start" [POD_KNOWN] pod::events;
    }

    "sandbox" {
        NETNS_FOUND "netns-found" "the pod runs on this node, and its network namespace is found" [] rules::netns;
        RULES_EQUAL "rules-equal" "the live rules, addresses and routes equal the desired ones"
            [NETNS_FOUND] rules::equal;
        RULES_FIRST "rules-first" "no foreign rule precedes detour's rules" [NETNS_FOUND] rules::first;
        DEFAULT_ROUTE_CAPTURED "default-route-captured" "the interface with the pod's default route is captured"
            [] rules::default_route;
        PROXY_LISTENING "proxy-listening" "the proxy listens on the ports that rules redirect to, as the excluded user"
            [NETNS_FOUND] rules::listeners;
    }

    "probe" {
        PROBE_CAPTURED "probe-captured" "an application's connection and DNS query reach the proxy"
            [NETNS_FOUND, RULES_EQUAL] probe::captured;
        PROBE_EXCLUDED "probe-excluded" "excluded traffic bypasses the proxy"
            [NETNS_FOUND, RULES_EQUAL] probe::excluded;
    }

    "policies" {
        POD_POLICY "pod-policy" "the pod has the rules of its policy" [POD_KNOWN, AGENT_REACHABLE] node::pod_policy;
    }

    "logs" {
        RUNTIME_LOG "runtime-log" "the runtime logged no error about the pod" [] pod::runtime_log;
        PLUGIN_LOG "plugin-log" "the plugin logged no error about the pod" [] pod::plugin_log;
    }

    "containers" {
        CONTAINERS_READY "containers-ready" "kernel, control groups, runtime and agent support excluded containers"
            [] containers::ready;
        CONTAINERS_BYPASS "containers-bypass" "exactly the running excluded containers bypass the sidecar"
            [] containers::bypass;
    }
}

/// What the checks have found, for those that follow.
pub(in crate::inspect) struct Findings<'a> {
    pub(super) target: &'a CheckTarget,
    /// The results so far, in the order of the checks.
    pub(super) lines: Vec<ReportLine>,
    pub(super) files: ConfigurationFiles,
    /// The valid configurations, and to which pods each applies.
    pub(in crate::inspect) configurations: Vec<AppliedConf>,
    /// The path in this process of the plugin's kubeconfig.
    pub(super) kubeconfig: Option<PathBuf>,
    /// The policies of the node's pods, or why they are unknown; `None` if the agent was not asked.
    pub(super) policies: Option<Result<PoliciesReport, String>>,
    /// The pod, with the first configuration that applies to it.
    pub(super) subject: Option<Subject>,
    /// The definitions that the pod selects, as far as they can be read.
    pub(super) definitions: BTreeMap<ObjectRef, Lookup>,
    /// What an ADD of the pod would do now.
    pub(super) explained: Option<Result<Explanation, Error>>,
    /// Where the pod is on this node; see [`Self::place`].
    place: OnceCell<Result<Option<FoundNetns>, Error>>,
    pub(super) live: Option<(LiveRules, RulesReport)>,
}

impl<'a> Findings<'a> {
    /// Reads the configurations of a node, without any request.
    pub(super) fn new(target: &'a CheckTarget) -> Self {
        let (files, configurations) = ConfigurationFiles::read(target);
        Self {
            target,
            lines: Vec::new(),
            files,
            configurations,
            kubeconfig: None,
            policies: None,
            subject: None,
            definitions: BTreeMap::new(),
            explained: None,
            place: OnceCell::new(),
            live: None,
        }
    }

    /// Makes all checks of the node and, if one is named, of the pod.
    pub(super) fn run_all(&mut self) {
        let CheckTarget { pod, probe, .. } = self.target;
        for check in ALL {
            let applies = match check.group {
                "node" | "cluster" | "kernel" | "containers" => true,
                "policies" => (check.id == POLICIES.id) == pod.is_none(),
                "probe" => *probe,
                _ => pod.is_some(),
            };
            if applies {
                self.run(check);
            }
        }
    }

    /// Makes a check if all that it needs were made and did not fail; otherwise adds it as not checked.
    pub(super) fn run(&mut self, check: &Check) {
        let verdict = match self.obstacle(check.needs) {
            Some(why) => Some(CheckVerdict::not_checked(why)),
            None => (check.examine)(self),
        };
        self.lines.extend(verdict.map(|verdict| ReportLine::of(check, verdict)));
    }

    /// Returns why the first of `needed` that failed or was not checked prevents other checks.
    pub(super) fn obstacle(&self, needed: &[&Check]) -> Option<String> {
        let line = |check: &&Check| self.lines.iter().find(|line| line.id == check.id);
        let reason = |line: &ReportLine| match line.verdict.outcome {
            CheckOutcome::Pass | CheckOutcome::Warn => None,
            CheckOutcome::Fail => Some(format!("because {} failed", line.id)),
            CheckOutcome::NotChecked => Some(format!("because {} was not checked", line.id)),
        };
        needed.iter().filter_map(line).find_map(reason)
    }

    /// Returns that the first failed check of those that `matches` prevents other checks.
    pub(super) fn failure(&self, matches: impl Fn(&ReportLine) -> bool) -> Option<CheckVerdict> {
        let failed = self.lines.iter().find(|line| line.verdict.outcome == CheckOutcome::Fail && matches(line))?;
        Some(CheckVerdict::not_checked(format!("because {} failed", failed.id)))
    }

    /// Returns the configuration that stands for the node.
    pub(super) fn conf(&self) -> Option<&NetConf> {
        configuration::foremost(&self.configurations)
    }

    /// Returns the path in this process of the agent's socket.
    pub(super) fn agent_socket(&self) -> Option<PathBuf> {
        self.target.reach_named(self.conf()?.kubernetes.agent_socket.as_deref()?).ok()
    }

    /// Returns the saved state of attachments.
    pub(in crate::inspect) fn store(&self) -> Store {
        HostPath::new(ROOT).and_then(|root| self.target.reach(&root).ok()).map_or_else(|| Store::new(ROOT), Store::new)
    }

    /// Returns the API server with the plugin's credentials.
    pub(super) fn plugin_api(&self) -> Option<Api> {
        let api = Api::of_kubeconfig(&self.target.mount, self.kubeconfig.clone()?);
        Some(api.within(Api::PROBE_TIMEOUT).once())
    }

    /// Returns the API server of the pod that this process runs in, or else the plugin's, unless that can't be reached.
    pub(in crate::inspect) fn api(&self) -> Result<Api, String> {
        if let Some(api) = Api::in_cluster() {
            return Ok(api.within(Api::PROBE_TIMEOUT).once());
        }
        let api = self.plugin_api().ok_or_else(|| crate::inspect::NO_CREDENTIALS.to_owned())?;
        self.obstacle(&[API_REACHABLE]).map_or(Ok(api), Err)
    }

    /// Returns the source of facts about pods: the manifests directory of the configuration, or the API server.
    pub(super) fn source(&self) -> Result<Box<dyn Cluster>, String> {
        let manifests = || {
            let kubernetes = &self.conf()?.kubernetes;
            let manifests_dir = Some(self.target.reach_named(kubernetes.manifests_dir.as_ref()?).ok()?);
            cluster::source(&Kubernetes { manifests_dir, ..kubernetes.clone() })
        };
        manifests().map_or_else(|| Ok(Box::new(self.api()?) as Box<dyn Cluster>), Ok)
    }

    /// Returns where the pod is on this node, found once.
    pub(super) fn place(&self) -> &Result<Option<FoundNetns>, Error> {
        self.place.get_or_init(|| rules::find(self.target, self.subject.as_ref().map(|subject| &subject.facts.pod)))
    }

    /// Returns the pod's network namespace on this node.
    pub(super) fn found(&self) -> Option<&FoundNetns> {
        self.place().as_ref().ok()?.as_ref()
    }

    /// Returns the policy of the pod's attachments, from the saved state.
    pub(super) fn policy(&self) -> Option<&Policy> {
        let (live, _) = self.live.as_ref()?;
        live.desired.as_ref().map(|desired| &desired.policy)
    }

    /// Returns the policy that an ADD would have now.
    pub(super) fn wanted(&self) -> Option<&Policy> {
        self.explained.as_ref()?.as_ref().ok().map(|explanation| &explanation.policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::doctor::report::tests::target;

    const fn check(
        id: &'static str,
        needs: &'static [&'static Check],
        examine: fn(&mut Findings<'_>) -> Option<CheckVerdict>,
    ) -> Check {
        Check { id, group: "node", holds: id, needs, examine }
    }

    const A: &Check = &check("a", &[], |_| Some(CheckVerdict::pass("fine")));
    const B: &Check = &check("b", &[A], |_| Some(CheckVerdict::fail("broken", "mend it")));
    const C: &Check = &check("c", &[A, B], |_| unreachable!("b failed"));
    const SECRET: &Check =
        &check("s", &[], |_| Some(CheckVerdict::fail("https://u:s3cr3t@a failed", "ask http://s3cr3t@b")));

    #[test]
    fn user_names_and_passwords_are_removed_from_urls() {
        let target = target();
        let mut findings = Findings::new(&target);
        findings.run(SECRET);
        let CheckVerdict { found, next, .. } = &findings.lines[0].verdict;
        let shown = (found.as_str(), next.as_deref());
        assert_eq!(shown, ("https://(redacted)@a failed", Some("ask http://(redacted)@b")));
    }

    #[test]
    fn a_check_that_depends_on_a_failed_one_is_not_run() {
        let target = target();
        let mut findings = Findings::new(&target);
        [A, B, C].map(|check| findings.run(check));
        let outcomes: Vec<_> =
            findings.lines.iter().map(|line| (line.verdict.outcome, line.verdict.found.as_str())).collect();
        let wanted = [
            (CheckOutcome::Pass, "fine"),
            (CheckOutcome::Fail, "broken"),
            (CheckOutcome::NotChecked, "because b failed"),
        ];
        assert_eq!(outcomes, wanted);
        assert_eq!(findings.obstacle(&[C]), Some("because c was not checked".to_owned()));
        assert_eq!(findings.obstacle(&[A]), None);
    }
}
