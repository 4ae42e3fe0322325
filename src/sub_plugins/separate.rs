//! The policy of a running pod some of whose sub-plugins fail, for example because of an invalid annotation. Each
//! sub-plugin that fails keeps its part of the pod's policy; the parts of the others follow the configuration.

use super::context::ListAuthor;
use super::dns_exclude::DnsExclude;
use super::parsed_chain::{ChainInput, ParsedChain};
use super::sub_plugin::SubPlugin;
use crate::cni::Error;
use crate::policy::{Exclusion, Policy};

/// The sub-plugins that failed, with their errors, in the order of evaluation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Failures(Vec<(SubPlugin, Error)>);

impl Failures {
    /// Returns the contribution of a sub-plugin; none if it failed.
    pub(super) fn or_default<T: Default>(&mut self, sub_plugin: SubPlugin, result: Result<T, Error>) -> T {
        result.unwrap_or_else(|error| {
            self.0.push((sub_plugin, error));
            T::default()
        })
    }

    /// Returns the first error.
    pub(super) fn into_first(self) -> Option<Error> {
        self.0.into_iter().next().map(|(_, error)| error)
    }
}

/// The policy of a chain whose sub-plugins were evaluated separately.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeparatePolicy {
    /// Why no sub-plugin could be evaluated: a block is invalid, or facts are missing.
    invalid: Option<Error>,
    /// Lacks the contributions of the sub-plugins that failed.
    policy: Policy,
    failures: Failures,
    /// The blocks of `dns-exclude`, and its block in `args.cni`.
    dns_excludes: Vec<DnsExclude>,
}

impl SeparatePolicy {
    pub(super) fn new(policy: Policy, failures: Failures, chain: ParsedChain, input: &ChainInput<'_>) -> Self {
        let argument = || input.parsed_argument(SubPlugin::DnsExclude, |r| DnsExclude::parse(r, ListAuthor::Pod));
        let is_overridable = chain.dns_excludes.iter().any(|block| block.pod_overrides);
        let argument = is_overridable.then(argument).and_then(Result::ok).flatten();
        let dns_excludes = chain.dns_excludes.into_iter().map(|block| block.parsed).chain(argument).collect();
        Self { invalid: None, policy, failures, dns_excludes }
    }

    pub(super) fn invalid(error: Error) -> Self {
        Self { invalid: Some(error), ..Self::default() }
    }

    /// Returns the errors of the sub-plugins that failed.
    pub fn errors(&self) -> impl Iterator<Item = &Error> {
        self.invalid.iter().chain(self.failures.0.iter().map(|(_, error)| error))
    }

    /// Returns the policy of a pod that has the policy `applied`: a sub-plugin that failed keeps its part of that.
    ///
    /// The applied exclusions do not name their sub-plugin. Those remain that the failed sub-plugin could request for
    /// this pod, so that a pod's author gains nothing by an invalid annotation.
    #[must_use]
    pub fn or_applied(&self, applied: &Policy) -> Policy {
        if self.invalid.is_some() {
            return applied.clone();
        }
        let mut policy = self.policy.clone();
        let of_uids = |exclusion: &&Exclusion| exclusion.destination.is_none();
        let of_dns = |exclusion: &&Exclusion| self.dns_excludes.iter().any(|block| block.may_request(exclusion));
        for (sub_plugin, _) in &self.failures.0 {
            match sub_plugin {
                SubPlugin::IstioRedirect => policy.interception.clone_from(&applied.interception),
                SubPlugin::UidExclude => policy.exclusions.extend(applied.exclusions.iter().filter(of_uids).cloned()),
                SubPlugin::DnsExclude => policy.exclusions.extend(applied.exclusions.iter().filter(of_dns).cloned()),
                SubPlugin::ContainerExclude => policy.containers.extend(applied.containers.iter().cloned()),
            }
        }
        // As the result of a chain, so that it compares with an applied policy.
        policy.union(&Policy::default()).unwrap_or(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::scenario::{Scenario, chain};
    use crate::pod::well_known::{
        EXCLUDE_CONTAINERS, EXCLUDE_DNS, EXCLUDE_OUTBOUND_PORTS, EXCLUDE_PORTS_FOR_UIDS, EXCLUDE_UIDS,
    };
    use serde_json::json;

    fn scenario(pinned: &str) -> Scenario {
        let block = |kind: &str| json!({"type": kind, "pod_overrides": kind != pinned});
        chain(["istio-redirect", "uid-exclude", "dns-exclude", "container-exclude"].map(block).to_vec().into())
    }

    /// A valid value and an invalid one of an annotation of each sub-plugin.
    const ANNOTATIONS: [(&str, &str, &str, &str); 4] = [
        ("istio-redirect", EXCLUDE_OUTBOUND_PORTS, "25", "x"),
        ("uid-exclude", EXCLUDE_UIDS, "7", "x"),
        ("dns-exclude", EXCLUDE_DNS, "10.0.0.1", "x"),
        ("container-exclude", EXCLUDE_CONTAINERS, "app", "X"),
    ];

    /// With every annotation of [`ANNOTATIONS`].
    fn annotated(pinned: &str) -> Scenario {
        ANNOTATIONS.iter().fold(scenario(pinned), |scenario, (_, key, valid, _)| scenario.annotated(key, valid))
    }

    #[test]
    fn an_invalid_annotation_does_not_keep_what_is_pinned_for_another_sub_plugin() {
        let applied = annotated("").output().policy;
        for (pinned, ..) in ANNOTATIONS {
            let expected = annotated(pinned).output().policy;
            assert_ne!(expected, applied, "{pinned}");
            for (_, key, _, invalid) in ANNOTATIONS.iter().filter(|(kind, ..)| *kind != pinned) {
                let broken = annotated(pinned).annotated(key, invalid);
                let separate = broken.run_separately();
                assert_eq!(separate.errors().map(|error| error.msg.clone()).collect::<Vec<_>>(), [broken.error()]);
                assert_eq!(separate.or_applied(&applied), expected, "{pinned} {key}");
            }
        }
    }

    #[test]
    fn without_an_error_nothing_of_the_applied_policy_remains() {
        let separate = scenario("").run_separately();
        assert_eq!(separate.errors().next(), None);
        assert_eq!(separate.or_applied(&annotated("").output().policy), scenario("").output().policy);
    }

    #[test]
    fn dns_exclude_keeps_only_its_own_ports() {
        let rules = |rules| scenario("").annotated(EXCLUDE_PORTS_FOR_UIDS, rules);
        let applied = rules("tcp:443:1000; udp:53:1000").output().policy;
        let broken = scenario("uid-exclude").annotated(EXCLUDE_DNS, "x").run_separately().or_applied(&applied);
        assert_eq!(broken.exclusions, rules("udp:53:1000").output().policy.exclusions);
        let with_port = json!({"dns-exclude": {"ports": [443]}});
        let broken = scenario("uid-exclude").args(with_port).annotated(EXCLUDE_DNS, "x").run_separately();
        assert_eq!(broken.or_applied(&applied).exclusions, applied.exclusions);
    }
}
