//! The exclusions that one place asks for, counted before they are made: owners, destinations,
//! protocols and ports multiply.

use crate::cni::{Error, at_most};
use crate::policy::{Exclusion, PortRange, Protocol, TrafficOwner};
use ipnet::IpNet;

/// The most exclusions of a pod, all places together; one with many ports counts for several.
pub(super) const MOST: usize = 10_000;
/// So many ports count as one exclusion: one rule has places for this many ranges.
const PORTS: usize = 7;

/// What one place asks for.
#[derive(Debug, Default)]
pub(super) struct RequestedExclusions {
    /// The exclusions.
    pub exclusions: Vec<Exclusion>,
    /// For how many they count.
    pub count: usize,
}

impl RequestedExclusions {
    /// Adds an exclusion for each owner, destination and protocol; `place` is for messages.
    ///
    /// # Errors
    /// They are too many for one pod.
    pub(super) fn add(
        &mut self,
        place: &str,
        owners: &[TrafficOwner],
        destinations: &[Option<IpNet>],
        protocols: &[Option<Protocol>],
        ports: &[PortRange],
    ) -> Result<(), Error> {
        let each = ports.len().div_ceil(PORTS).max(1);
        let factors = [owners.len(), destinations.len(), protocols.len(), each];
        let count = factors.into_iter().fold(1, usize::saturating_mul);
        self.count = self.count.saturating_add(count);
        at_most(MOST, "exclusions", place, self.count)?;
        for &owner in owners {
            for &destination in destinations {
                let of = |&protocol| Exclusion { owner, destination, protocol, ports: ports.to_vec() };
                self.exclusions.extend(protocols.iter().map(of));
            }
        }
        Ok(())
    }
}
