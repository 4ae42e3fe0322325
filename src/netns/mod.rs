//! A pod's network namespace (netns): found on the node, opened, locked and entered; and the parts of it besides
//! firewall rules: addresses, routes, connections.
//!
//! * `namespace`: a netns as an open file; the only place that enters one; its lock, so that calls for the same netns run
//!   one after another
//! * `rtnetlink`: the routing socket and its errors, addresses and interfaces
//! * `fixtures`: the address and the policy routing that firewall rules need
//! * `routes`: default routes, which move to other interfaces; the interface through which packets to an address leave
//! * `connections`: established TCP connections, and whether a port listens
//! * `find`: finds the netns of a pod or container

pub(crate) mod connections;
pub mod find;
mod fixtures;
mod namespace;
pub(crate) mod routes;
mod rtnetlink;

pub use connections::{OpenConnection, listening_ports, listens, open_connections};
pub use fixtures::{Fixture, Fixtures, Routing, add_fixtures, remove_fixtures};
pub use namespace::{LockMode, NetNs, NetnsId, enter_cgroup_namespace, remove_stale_locks};
pub use routes::{outgoing_interface, public_route_interfaces, replace_default_routes};
pub use rtnetlink::{
    OwnFamilies, PROXY_LOOPBACK, interface_with, own_addresses, own_families, own_ip6_addresses, secondary_interfaces,
    wait_for_lo,
};
