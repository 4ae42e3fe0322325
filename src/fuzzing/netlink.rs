//! Targets for what the kernel lists, some of which processes in a pod decide: rules, sets, connections, routes and sockets.

use super::simulated_kernel::{Reply, dump, message, with_socket};
use super::{Choices, check_printed, drawn};
use crate::firewall::nfnetlink::{NfError, NfSocket};
use crate::firewall::rule::Family;
use crate::firewall::{
    CreatedTables, Destination, LiveRuleset, Packet, RuleFormat, Ruleset, RulesetView, Sender, foreign_rules,
};
use crate::netlink::Received;
use crate::netlink::attributes::Attributes;
use crate::netns::connections::connection;
use crate::netns::routes::{deletion, is_default_over, other_paths};
use crate::policy::Protocol;
use crate::printable;
use netlink_packet_core::{Emitable, Parseable};
use netlink_packet_route::route::RouteMessage;

/// The message types of listed objects: tables, chains, rules, sets, elements of sets, connections.
const KINDS: [u16; 6] = [10 << 8, 10 << 8 | 3, 10 << 8 | 6, 10 << 8 | 9, 10 << 8 | 12, 1 << 8];
/// The request for the generation of the rules, and its answer.
const GET_GENERATION: u16 = 10 << 8 | 16;
const GENERATION: u16 = 1;
const FAMILIES: [u8; 3] = [2, 10, 1];

/// The objects of an input: type, family, length and attributes of each; then the seed of a desired policy.
fn objects(from: &mut Choices<'_>) -> Vec<Reply> {
    let mut objects = Vec::new();
    while !from.is_empty() {
        let (kind, family) = (from.below(KINDS.len() + 1), from.one(&FAMILIES));
        let Some(kind) = KINDS.get(kind) else { break };
        let length = usize::from(from.byte()) << 8 | usize::from(from.byte());
        objects.push((*kind, [&[family, 0, 0, 0], from.take(length)].concat()));
    }
    objects
}

fn answer(objects: &[Reply], messages: &[Received<'_>]) -> Vec<Vec<u8>> {
    let Some(request) = messages.first() else { return Vec::new() };
    if request.kind == GET_GENERATION {
        let generation = Attributes::of(|list| list.be32(GENERATION, 7));
        return vec![message(request.kind - 1, request.sequence, &[0; 4], generation.as_bytes())];
    }
    let listed = objects.iter().filter(|(kind, _)| kind + 1 == request.kind);
    dump(request.sequence, listed.cloned())
}

/// A network namespace with arbitrary objects: it is read twice as the same, compared with desired rules, and traced.
pub(super) fn netfilter(input: &[u8]) {
    let mut from = Choices::new(input);
    let objects = objects(&mut from);
    let read =
        |socket: &mut NfSocket| (LiveRuleset::read(socket), LiveRuleset::read(socket), socket.connections(|_| true));
    let (objects, (live, again, connections)) =
        with_socket(objects, |objects, messages| answer(objects, messages), read);
    assert_eq!(live, again);
    assert!(connections.is_ok_and(|found| found.len() <= objects.len()));
    let live = match live {
        Ok(live) => live,
        Err(error @ (NfError::TooMany(_) | NfError::Changed)) => return check_printed(&error.to_string()),
        Err(error) => panic!("{error}"),
    };
    let desired = Ruleset::of(&drawn::policy(&mut from), &Family::ALL);
    for format in [RuleFormat::Iptables, RuleFormat::Nftables] {
        for drift in format.drift(&live, &desired) {
            check_printed(&printable::line(&drift.to_string()));
        }
        let made = CreatedTables::missing_in(&desired, &live);
        let plan = format.plan(&live, &desired, &desired, &made);
        assert_eq!(plan, format.plan(&live, &desired, &desired, &made));
        assert!((0..plan.len()).all(|step| plan.describe(step).is_some()));
    }
    assert!(foreign_rules(&live, &desired).len() <= objects.len());
    for recorded in [None, Some(RuleFormat::Iptables), Some(RuleFormat::Nftables)] {
        let _ = live.rule_format(recorded, &desired);
    }
    let _ = (live.redirects_natively(), live.foreign_redirection(&desired), live.native_tproxy_mark());
    let view = RulesetView::live(&live);
    for from in [Sender::Process { uid: 5, gid: Some(5), set: None }, Sender::Inbound(None)] {
        let to = Destination { address: ([192, 0, 2, 1], 80).into(), protocol: Protocol::Tcp };
        let _ = view.evaluate(Packet::first(from, to, &[], "eth0"));
    }
}

/// The number of an interface, then a route or a socket.
pub(super) fn routing(input: &[u8]) {
    let Some((interface, body)) = input.split_first() else { return };
    let _ = connection(body);
    let Ok(route) = RouteMessage::parse(body) else { return };
    let request = deletion(route.clone());
    assert_eq!(deletion(request.clone()), request);
    let mut written = vec![0; request.buffer_len()];
    request.emit(&mut written);
    // A route over other interfaces, which replaces this one, needs no change.
    let interface = (*interface).into();
    if let Some(rest) = other_paths(&route, interface).filter(|_| is_default_over(&route, interface)) {
        assert!(!is_default_over(&rest, interface), "{rest:?}");
        assert!(!rest.attributes.is_empty());
        rest.emit(&mut vec![0; rest.buffer_len()]);
    }
}
