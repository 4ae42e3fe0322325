//! The name of a release, and the names of its files.

use crate::cni::is_dns_subdomain;
use std::fmt;
use std::str::FromStr;

/// The name of a release: one of several independent installations of the plugin on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release(String);

const DEFAULT: &str = "detour";
/// Names of objects that Helm creates have at most 63 characters.
const MAX_NAME: usize = 63;

impl Default for Release {
    fn default() -> Self {
        Self(DEFAULT.to_owned())
    }
}

impl FromStr for Release {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_valid = text.len() <= MAX_NAME && is_dns_subdomain(text);
        is_valid.then(|| Self(text.to_owned())).ok_or_else(|| {
            format!("expected up to {MAX_NAME} lowercase letters, digits, \"-\" and \".\", as in a Kubernetes name")
        })
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Release {
    /// Returns the name of its installation record in the state directory. That of the default release is the one that
    /// version 0.1.0 reads.
    #[must_use]
    pub fn record_name(&self) -> String {
        if self.0 == DEFAULT { "install.json".to_owned() } else { format!("install.{}.json", self.0) }
    }

    /// Returns the name of its kubeconfig in the state directory.
    #[must_use]
    pub fn kubeconfig_name(&self) -> String {
        if self.0 == DEFAULT { "kubeconfig".to_owned() } else { format!("kubeconfig.{}", self.0) }
    }

    /// Returns the prefix of the names of its agent's pods, if it is not the default one.
    #[must_use]
    pub fn agent_pod_prefix(&self) -> Option<String> {
        (self.0 != DEFAULT).then(|| format!("{}-agent-", self.0))
    }

    /// Returns the release whose installation record has this file name.
    pub(super) fn of_record(name: &str) -> Option<Self> {
        let named = name.strip_prefix("install.").and_then(|name| name.strip_suffix(".json"));
        let release = named.map_or_else(|| Ok(Self::default()), str::parse).ok()?;
        (release.record_name() == name).then_some(release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_release_has_its_own_file_names_and_the_default_one_those_of_0_1_0() {
        let release: Release = "my-detour.2".parse().expect("valid");
        assert_eq!(
            (release.record_name().as_str(), release.kubeconfig_name().as_str()),
            ("install.my-detour.2.json", "kubeconfig.my-detour.2")
        );
        assert_eq!(Release::of_record("install.my-detour.2.json"), Some(release));
        assert_eq!(Release::default().record_name(), "install.json");
        assert_eq!(Release::of_record("install.json"), Some(Release::default()));
        for other in ["install.lock", "install.detour.json", "install..json", "install.A.json", "x.json", "install."] {
            assert_eq!(Release::of_record(other), None, "{other}");
        }
        for invalid in ["", "A", "a/b", "..", "a_b", "-a", &"a".repeat(64)] {
            invalid.parse::<Release>().expect_err(invalid);
        }
    }
}
