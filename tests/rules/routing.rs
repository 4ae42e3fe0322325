//! TPROXY's routing in a real kernel: what detour adds is what the library rtnetlink reads.

use crate::support::new_netns as scratch;
use detour_cni::netns::{Fixtures, OwnFamilies, Routing, add_fixtures};
use futures_util::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::route::{RouteAttribute, RouteMessage, RouteScope, RouteType};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion, RouteMessageBuilder, new_connection};
use scratch::{in_new_netns, tool};
use std::net::{Ipv4Addr, Ipv6Addr};

const MARK: u32 = 1337;
/// Greater than 255, so that it does not fit into the header's field.
const TABLE: u32 = 1330;

/// Returns the policy rules with the mark and the routes of the table, in both families.
fn found() -> (Vec<RuleMessage>, Vec<RouteMessage>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    runtime.block_on(async {
        let (connection, handle, _) = new_connection().expect("a socket");
        tokio::spawn(connection);
        let (mut rules, mut routes) = (Vec::new(), Vec::new());
        for version in [IpVersion::V4, IpVersion::V6] {
            let all: Vec<_> = handle.rule().get(version).execute().try_collect().await.expect("listed");
            rules.extend(all.into_iter().filter(|rule| rule.attributes.contains(&RuleAttribute::FwMark(MARK))));
        }
        for message in [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()]
        {
            routes.extend(in_table(&handle, message).await);
        }
        (rules, routes)
    })
}

async fn in_table(handle: &Handle, message: RouteMessage) -> Vec<RouteMessage> {
    let all: Vec<_> = handle.route().get(message).execute().try_collect().await.expect("listed");
    all.into_iter().filter(|route| route.attributes.contains(&RouteAttribute::Table(TABLE))).collect()
}

#[test]
fn rules_and_routes_are_what_the_library_would_make() {
    in_new_netns(|| {
        tool("ip", &["link", "set", "lo", "up"], "");
        let routing = [Routing { mark: MARK, table: TABLE, ip6: true }].into();
        let fixtures = Fixtures { proxy_loopback: false, routing };
        let both = OwnFamilies { ip: true, ip6: true, proxy_loopback: false, lo_was_up: true };
        let add = || add_fixtures(&fixtures.missing(both)?, both);
        add().expect("added");
        add().expect("a second time changes nothing");
        let (rules, routes) = found();
        let families: Vec<_> = rules.iter().map(|rule| rule.header.family).collect();
        assert_eq!(families, [AddressFamily::Inet, AddressFamily::Inet6]);
        for rule in &rules {
            assert_eq!(rule.header.action, RuleAction::ToTable);
            assert!(rule.attributes.contains(&RuleAttribute::Table(TABLE)), "{rule:?}");
        }
        assert_eq!(routes.len(), 2, "{routes:?}");
        for route in &routes {
            assert_eq!((route.header.kind, route.header.destination_prefix_length), (RouteType::Local, 0));
            assert!(route.attributes.contains(&RouteAttribute::Oif(1)), "{route:?}");
        }
        assert_eq!(routes[0].header.scope, RouteScope::Host);
        fixtures.clone().reduce(&Fixtures::default()).expect("removed");
        fixtures.clone().reduce(&Fixtures::default()).expect("a second time changes nothing");
        assert_eq!(found(), (vec![], vec![]));
    });
}
