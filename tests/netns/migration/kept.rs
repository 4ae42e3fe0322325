//! A pod that keeps running while its node changes.

use crate::expectations::{inbound_is_captured, tcp_is_captured};
use crate::pod::APP_PROCESS;
use crate::world::*;
use std::net::SocketAddr;

/// A pod, its rules when it started, and an open connection of its application in each family through the sidecar.
pub(super) struct Kept {
    connections: Vec<(SocketAddr, Connection)>,
    rules: Vec<Ruleset>,
    pub(super) world: World,
}

impl Kept {
    pub(super) fn new(world: World) -> Self {
        let connect = |&family: &Family| {
            let to = SERVER.at(family, HTTPS);
            (to, world.pod_connects(APP_PROCESS, to))
        };
        let connections = world.families().iter().map(connect).collect();
        Self { connections, rules: rules(&world), world }
    }

    /// Asserts that its connections still work, new ones reach the sidecar, and its rules are unchanged.
    #[track_caller]
    pub(super) fn notices_nothing(&mut self) {
        for (to, connection) in &mut self.connections {
            assert_eq!(connection.send(), Arrival::captured(OUTBOUND, *to));
        }
        tcp_is_captured(&self.world, APP_PROCESS);
        inbound_is_captured(&self.world);
        assert_eq!(rules(&self.world), self.rules);
    }

    #[track_caller]
    pub(super) fn all_notice_nothing(pods: &mut [Self]) {
        for pod in pods {
            pod.notices_nothing();
        }
    }
}

fn rules(world: &World) -> Vec<Ruleset> {
    world.families().iter().map(|&family| world.iptables_save(family)).collect()
}
