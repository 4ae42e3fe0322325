//! What rules need of the namespace besides themselves: set before the rules, harmless without
//! them, taken away when nothing needs it any more.

use super::addresses::{OwnFamilies, add_proxy_loopback, own_families, remove_proxy_loopback};
use super::routing::Routing;
use crate::cni::Error;
use std::collections::BTreeSet;

/// What is needed, or was added.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Fixtures {
    /// The address [`super::PROXY_LOOPBACK`] on lo.
    pub proxy_loopback: bool,
    /// TPROXY's routing.
    pub routing: BTreeSet<Routing>,
}

impl Fixtures {
    /// Adds what `other` holds.
    pub fn extend(&mut self, other: &Self) {
        self.proxy_loopback |= other.proxy_loopback;
        self.routing.extend(&other.routing);
    }

    /// Forgets all but what `needed` names.
    pub fn retain(&mut self, needed: &Self) {
        self.proxy_loopback &= needed.proxy_loopback;
        self.routing.retain(|routing| needed.routing.contains(routing));
    }

    /// What of this is not in the namespace.
    ///
    /// # Errors
    /// The kernel does not list what there is.
    pub fn missing(&self, addresses: OwnFamilies) -> Result<Self, Error> {
        let mut routing = BTreeSet::new();
        for needed in &self.routing {
            if !needed.missing()?.is_empty() {
                routing.insert(*needed);
            }
        }
        Ok(Self { proxy_loopback: self.proxy_loopback && !addresses.proxy_loopback, routing })
    }

    /// Adds all of it.
    ///
    /// # Errors
    /// The kernel refuses something. Where the pod has no IPv6 address, IPv6 may be off on lo and
    /// then nothing needs an address there: that is logged.
    pub fn add(&self, addresses: OwnFamilies) -> Result<(), Error> {
        if self.proxy_loopback {
            match add_proxy_loopback() {
                Err(error) if !addresses.ip6 => tracing::warn!("{error}"),
                other => other?,
            }
        }
        self.routing.iter().try_for_each(|routing| routing.add())
    }

    /// Removes all of it but what `needed` names.
    ///
    /// # Errors
    /// The kernel refuses something.
    pub fn remove_but(&self, needed: &Self) -> Result<(), Error> {
        if self.proxy_loopback && !needed.proxy_loopback {
            remove_proxy_loopback()?;
        }
        self.routing.difference(&needed.routing).try_for_each(|routing| routing.remove_but(&needed.routing))
    }

    /// What of this is not there, one line each.
    ///
    /// # Errors
    /// The kernel does not list what there is.
    pub fn drift(&self) -> Result<Vec<String>, Error> {
        if self == &Self::default() {
            return Ok(Vec::new());
        }
        let addresses = own_families()?;
        let missing = self.missing(addresses)?;
        let mut lines = Vec::new();
        // Where the pod has no IPv6 address, lo may not have been able to take one.
        if missing.proxy_loopback && addresses.ip6 {
            lines.push("missing: address ::6/128 on lo".to_owned());
        }
        for routing in missing.routing {
            lines.extend(routing.missing()?.iter().map(|what| format!("missing: {what}")));
        }
        Ok(lines)
    }
}
