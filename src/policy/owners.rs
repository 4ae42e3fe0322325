//! Exclusions grouped by traffic, each group with merged ranges of owners, so that many UIDs cost no more than
//! sorting them.

use super::exclusion::{Exclusion, IdRange, Protocol, TrafficOwner, ports_cover};
use super::redirect::PortRange;
use ipnet::IpNet;
use std::collections::{BTreeMap, BTreeSet};

/// The destination, protocol and ports of excluded traffic.
type Traffic<'a> = (Option<IpNet>, Option<Protocol>, &'a [PortRange]);

/// Exclusions grouped by their traffic.
#[derive(Default)]
pub(super) struct ByTraffic<'a>(BTreeMap<Traffic<'a>, Owners>);

/// The owners of one group. Ranges are sorted and do not overlap.
#[derive(Default)]
struct Owners {
    any: bool,
    uids: Vec<IdRange>,
    gids: Vec<IdRange>,
}

impl<'a> ByTraffic<'a> {
    /// Groups `exclusions` and merges the owners of each group.
    pub(super) fn group(exclusions: impl Iterator<Item = &'a Exclusion>) -> Self {
        let mut groups = Self::default();
        for Exclusion { owner, destination, protocol, ports } in exclusions {
            let owners = groups.0.entry((*destination, *protocol, ports)).or_default();
            match owner {
                TrafficOwner::Any => owners.any = true,
                TrafficOwner::Uid(range) => owners.uids.push(*range),
                TrafficOwner::Gid(range) => owners.gids.push(*range),
            }
        }
        for owners in groups.0.values_mut() {
            merge(&mut owners.uids);
            merge(&mut owners.gids);
        }
        groups
    }

    /// Returns all exclusions.
    pub(super) fn exclusions(&self) -> BTreeSet<Exclusion> {
        self.iter().collect()
    }

    /// Returns the exclusions that no other one covers.
    pub(super) fn uncovered(&self) -> BTreeSet<Exclusion> {
        let enclosing = enclosing(self.0.keys().filter_map(|(destination, ..)| *destination));
        self.iter().filter(|exclusion| !self.cover(exclusion, &enclosing)).collect()
    }

    /// Returns the exclusions that these cover.
    pub(super) fn covered(&self, exclusions: &BTreeSet<Exclusion>) -> BTreeSet<Exclusion> {
        let destinations = self.0.keys().map(|(destination, ..)| *destination);
        let destinations: BTreeSet<IpNet> =
            destinations.chain(exclusions.iter().map(|it| it.destination)).flatten().collect();
        let enclosing = enclosing(destinations.into_iter());
        let is_covered = |exclusion: &&Exclusion| {
            let mut groups = self.wider_groups(exclusion, &enclosing);
            groups.any(|((.., ports), owners)| ports_cover(ports, &exclusion.ports) && owners.cover(exclusion.owner))
        };
        exclusions.iter().filter(is_covered).cloned().collect()
    }

    fn iter(&self) -> impl Iterator<Item = Exclusion> {
        self.0.iter().flat_map(|((destination, protocol, ports), owners)| {
            let of = |owner| Exclusion { owner, destination: *destination, protocol: *protocol, ports: ports.to_vec() };
            owners.iter().map(of)
        })
    }

    /// Returns whether another exclusion covers this one.
    fn cover(&self, exclusion: &Exclusion, enclosing: &BTreeMap<IpNet, Option<IpNet>>) -> bool {
        self.wider_groups(exclusion, enclosing).any(|((destination, protocol, ports), owners)| {
            let is_own = (*destination, *protocol) == (exclusion.destination, exclusion.protocol);
            if is_own && *ports == exclusion.ports {
                owners.any && exclusion.owner != TrafficOwner::Any
            } else {
                ports_cover(ports, &exclusion.ports) && owners.cover(exclusion.owner)
            }
        })
    }

    /// Returns the groups that can cover an exclusion: those with the same or a wider destination and protocol.
    fn wider_groups(
        &self,
        exclusion: &Exclusion,
        enclosing: &BTreeMap<IpNet, Option<IpNet>>,
    ) -> impl Iterator<Item = (&Traffic<'a>, &Owners)> {
        let wider = |net: &Option<IpNet>| net.map(|net| enclosing.get(&net).copied().flatten());
        let destinations = std::iter::successors(Some(exclusion.destination), wider);
        let count = if exclusion.protocol.is_some() { 2 } else { 1 };
        let protocols = [exclusion.protocol, None].into_iter().take(count);
        let keys = destinations.flat_map(move |net| protocols.clone().map(move |protocol| (net, protocol)));
        keys.flat_map(|to| {
            let group = self.0.range((to.0, to.1, &[][..])..);
            group.take_while(move |((destination, protocol, _), _)| (*destination, *protocol) == to)
        })
    }
}

impl Owners {
    fn iter(&self) -> impl Iterator<Item = TrafficOwner> {
        let any = self.any.then_some(TrafficOwner::Any).into_iter();
        any.chain(self.uids.iter().copied().map(TrafficOwner::Uid))
            .chain(self.gids.iter().copied().map(TrafficOwner::Gid))
    }

    fn cover(&self, owner: TrafficOwner) -> bool {
        let within = |ranges: &[IdRange], range: IdRange| {
            let at = ranges.partition_point(|own| own.last < range.first);
            ranges.get(at).is_some_and(|own| own.covers(range))
        };
        self.any
            || match owner {
                TrafficOwner::Any => false,
                TrafficOwner::Uid(range) => within(&self.uids, range),
                TrafficOwner::Gid(range) => within(&self.gids, range),
            }
    }
}

/// Sorts ranges and merges those that overlap. Adjacent ranges remain separate, so that each range of the
/// configuration has its own rule.
fn merge(ranges: &mut Vec<IdRange>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, range| {
        let overlaps = next.first <= range.last;
        if overlaps {
            range.last = range.last.max(next.last);
        }
        overlaps
    });
}

/// Returns the narrowest other network that contains it for each of `nets`, which must be sorted.
fn enclosing(nets: impl Iterator<Item = IpNet>) -> BTreeMap<IpNet, Option<IpNet>> {
    let mut found = BTreeMap::new();
    let mut open: Vec<IpNet> = Vec::new();
    for net in nets {
        while open.last().is_some_and(|outer| !outer.contains(&net) || *outer == net) {
            open.pop();
        }
        found.insert(net, open.last().copied());
        open.push(net);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::IpAddr;

    /// A packet with the properties that exclusions match: UID, GID, destination, protocol, port.
    type Packet = (u32, u32, IpAddr, Protocol, u16);

    fn excludes(exclusions: &BTreeSet<Exclusion>, (uid, gid, to, protocol, port): Packet) -> bool {
        exclusions.iter().any(|e| {
            let owner = match e.owner {
                TrafficOwner::Any => true,
                TrafficOwner::Uid(range) => range.covers(IdRange::one(uid)),
                TrafficOwner::Gid(range) => range.covers(IdRange::one(gid)),
            };
            let ports = e.ports.is_empty() || e.ports.iter().any(|p| (p.first..=p.last).contains(&port));
            owner
                && ports
                && e.destination.is_none_or(|net| net.contains(&to))
                && e.protocol.is_none_or(|p| p == protocol)
        })
    }

    /// Returns the exclusions that no other one covers, by comparing all pairs.
    fn naive(exclusions: &BTreeSet<Exclusion>) -> BTreeSet<Exclusion> {
        exclusions.iter().filter(|e| !exclusions.iter().any(|by| by != *e && by.covers(e))).cloned().collect()
    }

    fn range() -> impl Strategy<Value = IdRange> {
        let near_the_end = (u32::MAX - 6..=u32::MAX, 0..3u32).prop_map(|(first, more)| (first, more));
        prop_oneof![(0..12u32, 0..4u32), near_the_end]
            .prop_map(|(first, more)| IdRange { first, last: first.saturating_add(more) })
    }

    fn exclusion() -> impl Strategy<Value = Exclusion> {
        let owner = prop_oneof![
            1 => Just(TrafficOwner::Any),
            6 => range().prop_map(TrafficOwner::Uid),
            3 => range().prop_map(TrafficOwner::Gid),
        ];
        let nets = ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32", "11.0.0.0/8", "0.0.0.0/0", "fd00::/8", "fd00::1/128"];
        let net = prop::sample::select(nets.map(|net| net.parse::<IpNet>().expect(net)).to_vec());
        let protocol = prop::option::of(prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]));
        let ports = prop::sample::select(vec![vec![], vec![(53, 53)], vec![(50, 60)], vec![(22, 22), (53, 53)]]);
        (owner, prop::option::of(net), protocol, ports).prop_map(|(owner, destination, protocol, ports)| {
            let ports = ports.into_iter().map(|(first, last)| PortRange { first, last }).collect();
            Exclusion { owner, destination, protocol, ports }
        })
    }

    fn packet() -> impl Strategy<Value = Packet> {
        let id = || prop_oneof![0..16u32, u32::MAX - 6..=u32::MAX];
        let to =
            prop::sample::select(vec!["10.1.2.3", "10.1.9.9", "10.9.9.9", "11.1.1.1", "9.9.9.9", "fd00::1", "fe80::1"]);
        let protocol = prop::sample::select(vec![Protocol::Tcp, Protocol::Udp]);
        let port = prop::sample::select(vec![22, 53, 55, 61]);
        (id(), id(), to, protocol, port).prop_map(|(uid, gid, to, p, port)| (uid, gid, to.parse().expect(to), p, port))
    }

    proptest! {
        #[test]
        fn merging_excludes_the_same_packets(
            all in prop::collection::btree_set(exclusion(), 0..14),
            packets in prop::collection::vec(packet(), 40),
        ) {
            let groups = ByTraffic::group(all.iter());
            for set in [groups.exclusions(), groups.uncovered()] {
                for &packet in &packets {
                    prop_assert_eq!(excludes(&set, packet), excludes(&all, packet), "{:?}", packet);
                }
            }
        }

        #[test]
        fn uncovered_exclusions_are_those_that_no_other_one_covers(all in prop::collection::btree_set(exclusion(), 0..14)) {
            let groups = ByTraffic::group(all.iter());
            prop_assert_eq!(groups.uncovered(), naive(&groups.exclusions()));
            let again = groups.exclusions();
            prop_assert_eq!(ByTraffic::group(again.iter()).exclusions(), again.clone());
        }

        #[test]
        fn covered_exclusions_are_those_that_one_of_the_others_covers(
            all in prop::collection::btree_set(exclusion(), 0..14), own in prop::collection::btree_set(exclusion(), 0..14),
        ) {
            let groups = ByTraffic::group(all.iter());
            let merged = groups.exclusions();
            let naive: BTreeSet<_> = own.iter().filter(|e| merged.iter().any(|by| by.covers(e))).cloned().collect();
            prop_assert_eq!(groups.covered(&own), naive);
        }

        #[test]
        fn merging_in_parts_gives_the_same_result(
            all in prop::collection::vec(exclusion(), 0..14), cut in 0..14usize,
        ) {
            let (a, b) = all.split_at(cut.min(all.len()));
            let (a, b) = (ByTraffic::group(a.iter()).exclusions(), ByTraffic::group(b.iter()).exclusions());
            prop_assert_eq!(ByTraffic::group(a.iter().chain(&b)).exclusions(), ByTraffic::group(all.iter()).exclusions());
        }
    }

    #[test]
    fn overlapping_ranges_are_merged_and_adjacent_ones_are_not() {
        let mut ranges = [7, 1, 2, u32::MAX, 5, 2, u32::MAX - 1].map(IdRange::one).to_vec();
        ranges.extend([IdRange { first: 10, last: 20 }, IdRange { first: 20, last: 30 }]);
        merge(&mut ranges);
        let texts: Vec<String> = ranges.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["1", "2", "5", "7", "10-30", "4294967294", "4294967295"]);
    }

    /// The comparison of all pairs took 18 s for 36,000 exclusions, so it would take 140 s for these.
    #[test]
    fn many_exclusions_are_merged_fast() {
        let one = |id: u32| Exclusion {
            owner: TrafficOwner::Uid(IdRange::one(2 * id)),
            destination: Some(IpNet::from(IpAddr::from((10 << 24 | id).to_be_bytes()))),
            protocol: Some(Protocol::Udp),
            ports: vec![PortRange::one(53)],
        };
        let all: BTreeSet<Exclusion> = (0..100_000).map(one).collect();
        let started = std::time::Instant::now();
        assert_eq!(ByTraffic::group(all.iter()).uncovered().len(), all.len());
        let owners: BTreeSet<Exclusion> = all.iter().map(|e| Exclusion { destination: None, ..e.clone() }).collect();
        assert_eq!(ByTraffic::group(owners.iter()).uncovered().len(), owners.len());
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "{:?}", started.elapsed());
    }
}
