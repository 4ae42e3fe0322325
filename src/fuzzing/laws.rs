//! Laws of policies, and of the changes that lead from the rules of one policy to those of another.

use super::drawn;
use super::simulated_kernel::Rules;
use super::{Choices, check_printed};
use crate::firewall::rule::{Family, Table};
use crate::firewall::{
    CreatedTables, Destination, LiveRuleset, Packet, RuleFormat, Ruleset, RulesetView, Sender, max_rules, native,
    restore_text,
};
use crate::netlink::attributes::Attributes;
use crate::policy::{Interception, Policy};
use crate::printable;

/// The chains of other tools in the generated rules.
const FOREIGN_CHAINS: [&str; 3] = ["KUBE-MARK", "ISTIO_FOREIGN", "OTHER"];
/// The maximum number of foreign rules.
const MAX_FOREIGN: usize = 6;

/// One pod's rules in a format, and what its saved state knows of them.
struct Pod {
    format: RuleFormat,
    kernel: Rules,
    previous: Ruleset,
    made: CreatedTables,
}

impl Pod {
    fn new(format: RuleFormat, kernel: Rules) -> Self {
        Self { format, kernel, previous: Ruleset::default(), made: CreatedTables::default() }
    }

    fn live(self) -> (Self, LiveRuleset) {
        let (kernel, live) = self.kernel.with_socket(|socket| LiveRuleset::read(socket).expect("readable rules"));
        (Self { kernel, ..self }, live)
    }

    /// Makes the rules those of `desired`, as an ADD does; also returns the changes.
    fn change_to(self, desired: &Ruleset) -> (Self, Vec<String>) {
        let Self { format, kernel, previous, mut made } = self;
        let (kernel, changes) = kernel.with_socket(|socket| {
            let live = LiveRuleset::read(socket).expect("readable rules");
            if format == RuleFormat::Iptables {
                made.add(&CreatedTables::missing_in(desired, &live));
            }
            let transaction = format.plan(&live, &previous, desired, &made);
            let changes: Vec<_> = (0..transaction.len()).filter_map(|change| transaction.describe(change)).collect();
            let committed = transaction.commit(socket, &live);
            committed.unwrap_or_else(|error| panic!("the kernel refuses the changes: {error}: {changes:#?}"));
            changes
        });
        (Self { format, kernel, previous: desired.clone(), made }, changes)
    }

    /// Checks that the live rules are those of `desired`, and that nothing remains to be changed.
    fn check(self, desired: &Ruleset) -> Self {
        let (pod, live) = self.live();
        let drift = pod.format.drift(&live, desired);
        assert!(drift.is_empty(), "{drift:#?}");
        let left = pod.format.plan(&live, desired, desired, &pod.made);
        assert!(left.is_empty(), "{left:#?}");
        for (_, _, chain, rules) in live.chains().filter(|(_, _, chain, _)| !FOREIGN_CHAINS.contains(chain)) {
            let is_own = pod.previous.tables.values().any(|table| table.chains.iter().any(|(name, _)| name == chain));
            assert!(!is_own || rules.rules.iter().all(|rule| rule.rule.is_ok()), "{chain}: {rules:#?}");
        }
        pod
    }
}

/// Returns a ruleset for both families or for IPv4 alone.
fn ruleset(policy: &Policy, ip6: bool) -> Ruleset {
    Ruleset::of(policy, if ip6 { &Family::ALL } else { &[Family::Ip] })
}

/// Checks that the rules of a policy can be written, read back as the same and removed, in both formats, and that
/// packets arrive at the same place in both.
fn check_rules(policy: &Policy, packets: &[(Sender, Destination)]) {
    for ip6 in [true, false] {
        let desired = ruleset(policy, ip6);
        assert_eq!(ruleset(policy, ip6), desired);
        let count: usize = desired
            .tables
            .values()
            .map(|table| {
                let hooks: usize = table.hooks.values().map(Vec::len).sum();
                hooks + table.chains.iter().map(|(_, rules)| rules.len()).sum::<usize>()
            })
            .sum();
        let exclusions = RuleFormat::Iptables.native(&desired);
        let excluded: usize = exclusions.values().flat_map(|table| table.values()).map(|chain| chain.rules.len()).sum();
        let all = count + excluded;
        assert!(all <= max_rules(policy), "{all} rules, {} are the limit", max_rules(policy));
        check_printed(&printable::lines(&restore_text(&desired)));
        check_printed(&printable::lines(&native::text(&RuleFormat::Nftables.native(&desired))));
        let [iptables, native] = [RuleFormat::Iptables, RuleFormat::Nftables]
            .map(|format| RulesetView::live(&check_format(&desired, format)));
        for (from, to) in packets.iter().filter(|(_, to)| ip6 || to.address.is_ipv4()) {
            let arrival = |view: &RulesetView| {
                let packet = Packet::first(*from, *to, &["10.1.2.3".parse().expect("an address")], "eth0");
                let evaluation = view.evaluate(packet);
                (evaluation.arrival, evaluation.zone, evaluation.caveats)
            };
            assert_eq!(arrival(&iptables), arrival(&native), "{from:?} to {to:?}");
        }
    }
}

/// Checks that rules can be written, read back as the same and removed in one format; returns them as they are read.
pub(super) fn check_format(desired: &Ruleset, format: RuleFormat) -> LiveRuleset {
    let (pod, _) = Pod::new(format, Rules::default()).change_to(desired);
    let (pod, live) = pod.check(desired).live();
    let (pod, _) = pod.change_to(&Ruleset::default());
    let (_, left) = pod.live();
    assert!(left.tables.is_empty() && left.native.is_empty(), "{left:#?}");
    live
}

/// A policy, and packets: what is written for the policy is read back as the same, and packets arrive at the same place
/// in both formats.
pub(super) fn rules(input: &[u8]) {
    let mut from = Choices::new(input);
    let policy = drawn::policy(&mut from);
    let packets = from.many(12, drawn::packet);
    check_rules(&policy, &packets);
}

/// Rules of other tools, and several policies one after the other, between which another process damages detour's rules:
/// each policy has all of its rules, and foreign rules stay in their order.
pub(super) fn changes(input: &[u8]) {
    let mut from = Choices::new(input);
    let format = from.one(&[RuleFormat::Iptables, RuleFormat::Nftables]);
    let mut kernel = Rules::default();
    for _ in 0..from.below(MAX_FOREIGN + 1) {
        add_foreign(&mut kernel, &mut from);
    }
    let foreign = kernel.clone();
    let mut pod = Pod::new(format, kernel);
    for _ in 0..=from.below(4) {
        for _ in 0..from.below(4) {
            pod.kernel.damage(&foreign, &mut from);
        }
        let live;
        (pod, live) = pod.live();
        let drift = format.drift(&live, &pod.previous);
        let repair = format.plan(&live, &pod.previous, &pod.previous, &pod.made);
        assert_eq!(drift.is_empty(), repair.is_empty(), "CHECK finds what ADD repairs: {drift:#?}, {repair:#?}");
        let policy = drawn::policy(&mut from);
        let desired = ruleset(&policy, from.flag());
        (pod, _) = pod.change_to(&desired);
        pod = pod.check(&desired);
        assert_foreign(&foreign, &pod.kernel);
        let again;
        (pod, again) = pod.change_to(&desired);
        assert!(again.is_empty(), "{again:#?}");
    }
    let (pod, _) = pod.change_to(&Ruleset::default());
    assert_foreign(&foreign, &pod.kernel);
    let left: Vec<_> = pod.kernel.expressions().into_iter().filter(|(_, rules)| !rules.is_empty()).collect();
    let before: Vec<_> = foreign.expressions().into_iter().filter(|(_, rules)| !rules.is_empty()).collect();
    assert_eq!(left, before, "removal leaves the rules of other tools");
}

/// Checks that the rules of other tools are in the same order as before.
fn assert_foreign(before: &Rules, after: &Rules) {
    let after = after.expressions();
    for (chain, rules) in before.expressions() {
        let left: Vec<&[u8]> =
            after.get(&chain).into_iter().flatten().copied().filter(|rule| rules.contains(rule)).collect();
        assert_eq!(left, rules, "{chain:?}");
    }
}

/// Adds a rule that detour would not write.
fn add_foreign(kernel: &mut Rules, from: &mut Choices<'_>) {
    let family = from.one(&[2_u8, 10]);
    let table = from.one(&[Table::Raw, Table::Mangle, Table::Nat]).name();
    let to = from.one(&FOREIGN_CHAINS);
    let chain = from.one(&["OUTPUT", "PREROUTING", "POSTROUTING", to]);
    let number = from.number();
    let is_jump = from.flag() && chain != to;
    // A comparison with a number makes each rule unique; then a jump or a verdict.
    let mut all = Attributes::new();
    all.nested(1, |compare| {
        let compare = compare.text(1, "cmp");
        compare.nested(2, |data| data.be32(1, 9).be32(2, 0).nested(3, |value| value.bytes(1, &number.to_be_bytes())))
    });
    all.nested(1, |immediate| {
        immediate.text(1, "immediate").nested(2, |data| {
            data.be32(1, 0).nested(2, |data| {
                data.nested(2, |verdict| match is_jump {
                    true => verdict.be32(1, -3_i32 as u32).text(2, to),
                    false => verdict.be32(1, 1),
                })
            })
        })
    });
    if chain != to {
        kernel.add_chain((family, table), to);
    }
    kernel.add_foreign((family, table), chain, from.below(4), &all);
}

/// Three policies: the laws of unions and of live changes, and the saved form.
pub(super) fn policies(input: &[u8]) {
    let mut from = Choices::new(input);
    let [a, b, c] = std::array::from_fn(|_| drawn::policy(&mut from));
    let text = serde_json::to_string(&a).expect("JSON");
    assert_eq!(serde_json::from_str::<Policy>(&text).expect("its own text"), a);

    assert_eq!(a.union(&b).ok(), b.union(&a).ok(), "a union does not depend on the order");
    let own = a.union(&a).expect("a policy does not contradict itself");
    assert_eq!(own.union(&a).expect("the same"), own, "a union is idempotent");
    assert_eq!(own.exclusions_in_effect(), a.exclusions_in_effect());
    assert_eq!(a.union(&Policy::default()).expect("nothing").exclusions, own.exclusions);
    let left = a.union(&b).and_then(|both| both.union(&c));
    let right = b.union(&c).and_then(|both| a.union(&both));
    assert_eq!(left.ok(), right.ok(), "a union does not depend on the grouping");
    let in_effect = a.exclusions_in_effect();
    let covered = |exclusion| in_effect.iter().any(|wide| wide.covers(exclusion));
    assert!(own.exclusions.iter().all(covered), "{:?} are not covered by {in_effect:?}", own.exclusions);

    let repeated = a.repeated(&b);
    assert_eq!(a.repeated(&a).redirect(), a.redirect(), "nothing changes without a change");
    assert_eq!(repeated.repeated(&b), repeated, "a change is complete");
    assert_eq!(repeated.redirect().is_some(), a.redirect().is_some(), "a redirection neither begins nor ends");
    assert_eq!(repeated.redirect().map(|redirect| redirect.ipv6), a.redirect().map(|redirect| redirect.ipv6));
    if a.interception != Interception::Off {
        assert_eq!(repeated.exclusions, b.exclusions, "no exclusion remains that is not desired");
    }
}

#[cfg(test)]
mod guard {
    use crate::firewall::{Arrival, Packet, RuleFormat, RulesetView};
    use crate::fuzzing::{Choices, drawn};
    use crate::policy::{Guard, Interception, Ipv6, Policy};
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

        /// While the redirection is in place, the guard changes nothing; without it, what was captured is rejected.
        #[test]
        fn the_guard_rejects_what_a_missing_redirection_would_capture(input in prop::collection::vec(any::<u8>(), 64..512)) {
            let mut from = Choices::new(&input);
            let policy = Policy { ambient: false, ..drawn::policy(&mut from) };
            let Interception::On(redirect) = &policy.interception else { return Ok(()) };
            // The view has both families.
            prop_assume!(redirect.ipv6 != Ipv6::Off);
            let guard = Some(Guard::Sidecar(redirect.clone()));
            let guarded = Policy { guard: guard.clone(), ..policy.clone() };
            let missing = Policy { guard, interception: Interception::Unset, ..policy.clone() };
            let (sender, to) = drawn::packet(&mut from);
            // The kernel drops packets to loopback addresses from outside.
            prop_assume!(!to.address.ip().is_loopback());
            for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
                let arrival = |policy: &Policy| {
                    RulesetView::of_policy(policy, format).evaluate(Packet::first(sender, to, &[], "eth0")).arrival
                };
                let expected = arrival(&policy);
                prop_assert_eq!(arrival(&guarded), expected);
                let without = arrival(&missing);
                match expected {
                    Arrival::Sidecar(_) => prop_assert_eq!(without, Arrival::Rejected, "{:?} {:?} {:?}", sender, to, redirect),
                    _ => prop_assert_ne!(without, Arrival::Rejected, "{:?} {:?} {:?}", sender, to, redirect),
                }
            }
        }
    }
}
