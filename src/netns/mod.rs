//! A pod's network namespace (netns): found on the node, opened, locked and entered; and the parts of it besides
//! firewall rules: addresses, routes, connections.
//!
//! * `namespace`: a netns as an open file; the only place that enters one
//! * `lock`: the lock of a netns, so that calls for the same netns run one after another
//! * `rtnetlink`: the routing socket and its errors
//! * `addresses`: addresses and interfaces
//! * `fixtures`: the address and the policy routing that firewall rules need
//! * `routes`: default routes, which move to other interfaces; the interface through which packets to an address leave
//! * `connections`: established TCP connections, and whether a port listens
//! * `find`: finds the netns of a pod or container

mod addresses;
pub(crate) mod connections;
pub mod find;
mod fixtures;
mod lock;
mod namespace;
pub(crate) mod routes;
mod rtnetlink;

pub use addresses::{
    OwnFamilies, PROXY_LOOPBACK, interface_with, own_addresses, own_families, own_ip6_addresses, secondary_interfaces,
    wait_for_lo,
};
pub use connections::{OpenConnection, listening_ports, listens, open_connections};
pub use fixtures::{Fixture, Fixtures, Routing, add_fixtures, remove_fixtures};
pub use lock::{NetnsId, remove_stale_locks};
pub use namespace::{LockMode, NetNs, enter_cgroup_namespace};
pub use routes::{outgoing_interface, public_route_interfaces, replace_default_routes};
