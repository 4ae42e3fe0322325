//! The convention of the Network Plumbing Working Group (`k8s.v1.cni.cncf.io`), as Multus
//! understands it: the networks that a pod's annotations select, the definitions they refer to,
//! and what is told of the outcome.

mod comma_form;
mod configuration;
mod default_route;
mod definition;
mod events;
mod files;
mod hardware_address;
mod interfaces;
mod isolation;
mod json_form;
mod json_text;
mod resolve;
mod selection;
mod status;

pub use configuration::Configuration;
pub use default_route::{DefaultRouteChange, check_default_routes, move_default_route, moves_default_route};
pub use definition::configuration;
pub use events::{added_interface, no_network_found};
pub use interfaces::interface_names;
pub use isolation::check_isolation;
pub use resolve::{PodNetwork, PodNetworks, resolve};
pub use selection::{NETWORKS, Selection, Selections, default_network, networks};
pub use status::{Added, network_status};
