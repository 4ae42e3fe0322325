//! The convention of the Network Plumbing Working Group (`k8s.v1.cni.cncf.io`) as Multus implements it: the networks that a
//! pod's annotations select, their definitions, and reports about the result.

mod annotations;
mod configuration;
mod files;
mod interfaces;
mod resolve;
mod status;
#[cfg(test)]
mod tests;

pub use annotations::{Selection, Selections, default_network, networks};
pub use configuration::RunnableConfiguration;
pub use files::{auxiliary_chain, beside, check_chained_plugin};
pub use interfaces::{
    DefaultRouteChange, check_default_routes, interface_names, move_default_route, moves_default_route,
};
pub use resolve::{
    InstalledNetwork, PodNetwork, PodNetworks, configuration, installed_network, plugin_types, resolve, runs_own_type,
};
pub use status::{AddedNetwork, added_interface, network_status, no_network_found};
