//! What is redirected and who is exempt, for one pod: values that every sub-plugin adds to and
//! that [`crate::firewall`] turns into rules. Nothing here knows of Kubernetes or of the kernel.

mod exclusion;
mod owners;
mod redirect;
mod union;

pub use exclusion::{Exclusion, IdRange, Protocol, TrafficOwner};
pub use redirect::{DnsCapture, Groups, InterceptionMode, Ipv6, PortRange, Ports, Ranges, Redirect};
pub use union::{Conflict, Unite};

use owners::ByTraffic;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What one attachment asks for, or several together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// The redirection to the sidecar. Saved state always has it: a default would hide damage.
    pub interception: Interception,
    /// What leaves untouched although the pod is redirected.
    #[serde(default)]
    pub exclusions: BTreeSet<Exclusion>,
    /// Whether somebody else's redirection captures this pod's DNS, as far as its rules or the
    /// pod's facts tell; `None` where there are neither (yet).
    #[serde(default)]
    pub dns_captured_elsewhere: Option<bool>,
}

/// Whether a redirection is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Interception {
    /// Nothing is said: whoever redirects this pod, if anyone, is somebody else.
    #[default]
    Unsaid,
    /// `interceptionMode: NONE`: there are no rules at all, exclusions included.
    Off,
    /// This redirection.
    On(Box<Redirect>),
}

impl Policy {
    /// Whether there is nothing to write into the kernel.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self.interception {
            Interception::Off => true,
            Interception::Unsaid => self.exclusions.is_empty(),
            Interception::On(_) => false,
        }
    }

    /// Returns the exclusions that no other one covers: those that need a rule.
    #[must_use]
    pub fn exclusions_in_effect(&self) -> BTreeSet<Exclusion> {
        ByTraffic::of(self.exclusions.iter()).uncovered()
    }

    /// The redirection, where one is asked for.
    #[must_use]
    pub fn redirect(&self) -> Option<&Redirect> {
        match &self.interception {
            Interception::On(redirect) => Some(redirect),
            Interception::Unsaid | Interception::Off => None,
        }
    }
}
