//! What a check is, and what the checks have found.

use super::files::{ConfigurationFiles, foremost};
use super::report::{CheckOutcome, CheckTarget, CheckVerdict, ReportLine};
use crate::cluster::agent::PoliciesReport;
use crate::cluster::{self, Api, Cluster, Lookup, ObjectRef};
use crate::cni::{Error, Kubernetes, NetConf};
use crate::host_path::HostPath;
use crate::inspect::explain::Explanation;
use crate::inspect::rules::{LiveRules, RulesReport};
use crate::inspect::subject::{AppliedConf, Subject};
use crate::netns::find::{FoundNetns, NodeSnapshot};
use crate::pod::Pod;
use crate::policy::Policy;
use crate::printable::without_secrets;
use crate::state::{ROOT, Store};
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
    pub(super) needs: &'static [&'static str],
    /// Makes the check; `None` if it does not apply to this node or pod.
    pub(super) examine: fn(&mut Findings<'_>) -> Option<CheckVerdict>,
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

    /// Makes a check if all that it needs were made and did not fail; otherwise adds it as not checked. User names and
    /// passwords in URLs are removed, because users share these lists.
    pub(super) fn run(&mut self, Check { id, group, holds, needs, examine }: &Check) {
        let verdict = match self.obstacle(needs) {
            Some(why) => Some(CheckVerdict::not_checked(why)),
            None => examine(self),
        };
        let public = |text: String| without_secrets(&text);
        self.lines.extend(verdict.map(|CheckVerdict { outcome, found, next }| {
            let verdict = CheckVerdict { outcome, found: public(found), next: next.map(public) };
            ReportLine { id: (*id).into(), group: (*group).into(), checked: (*holds).into(), verdict }
        }));
    }

    /// Returns why the first of the checks `needed` that failed or was not checked prevents other checks.
    pub(super) fn obstacle(&self, needed: &[&str]) -> Option<String> {
        let reason = |id: &&str| {
            let line = self.lines.iter().find(|line| line.id == *id)?;
            match line.verdict.outcome {
                CheckOutcome::Pass | CheckOutcome::Warn => None,
                CheckOutcome::Fail => Some(format!("because {id} failed")),
                CheckOutcome::NotChecked => Some(format!("because {id} was not checked")),
            }
        };
        needed.iter().find_map(reason)
    }

    /// Returns that the first failed check of those that `matches` prevents other checks.
    pub(super) fn failure(&self, matches: impl Fn(&ReportLine) -> bool) -> Option<CheckVerdict> {
        let failed = self.lines.iter().find(|line| line.verdict.outcome == CheckOutcome::Fail && matches(line))?;
        Some(CheckVerdict::not_checked(format!("because {} failed", failed.id)))
    }

    /// Returns the configuration that stands for the node.
    pub(super) fn conf(&self) -> Option<&NetConf> {
        foremost(&self.configurations)
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
        self.obstacle(&["api-reachable"]).map_or(Ok(api), Err)
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

    /// Returns the pod, if the cluster knows it.
    pub(super) fn pod(&self) -> Option<&Pod> {
        self.subject.as_ref().map(|subject| &subject.facts.pod)
    }

    /// Returns where the pod is on this node, found once: by its UID or, if the UID is unknown, by its name.
    pub(super) fn place(&self) -> &Result<Option<FoundNetns>, Error> {
        self.place.get_or_init(|| match (self.pod(), &self.target.pod) {
            (Some(pod), _) if pod.host_network => Ok(None),
            (Some(pod), _) => NodeSnapshot::take(&self.target.mount)?.of_pod(pod),
            (None, Some(named)) => NodeSnapshot::take(&self.target.mount)?.of_name(&named.namespace, &named.name),
            (None, None) => Ok(None),
        })
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
    use std::collections::BTreeSet;

    /// A node without any file.
    fn target() -> CheckTarget {
        CheckTarget {
            mount: PathBuf::from("/no/such/directory"),
            node_name: None,
            platform: "k3s".into(),
            chained: false,
            bin_dirs: BTreeSet::new(),
            conf: HostPath::root(),
            programs: Vec::new(),
            installed: Vec::new(),
            own_lists: Vec::new(),
            multus_chain: None,
            changed: Ok(None),
            pod: None,
            probe: false,
        }
    }

    const fn check(
        id: &'static str,
        needs: &'static [&'static str],
        examine: fn(&mut Findings<'_>) -> Option<CheckVerdict>,
    ) -> Check {
        Check { id, group: "node", holds: id, needs, examine }
    }

    const A: &Check = &check("a", &[], |_| Some(CheckVerdict::pass("fine")));
    const B: &Check = &check("b", &["a"], |_| Some(CheckVerdict::fail("broken", "mend it")));
    const C: &Check = &check("c", &["a", "b"], |_| unreachable!("b failed"));
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
        [A, B, C].iter().for_each(|check| findings.run(check));
        let outcomes: Vec<_> =
            findings.lines.iter().map(|line| (line.verdict.outcome, line.verdict.found.as_str())).collect();
        let wanted = [
            (CheckOutcome::Pass, "fine"),
            (CheckOutcome::Fail, "broken"),
            (CheckOutcome::NotChecked, "because b failed"),
        ];
        assert_eq!(outcomes, wanted);
        assert_eq!(findings.obstacle(&["c"]), Some("because c was not checked".to_owned()));
        assert_eq!(findings.obstacle(&["a"]), None);
    }
}
