//! The convention of the Network Plumbing Working Group (`k8s.v1.cni.cncf.io`), as Multus
//! understands it: the networks that a pod's annotations select, the definitions they refer to,
//! and what is told of the outcome.

mod configuration;
mod definition;
mod files;
mod interfaces;
mod json_form;
mod json_text;
mod resolve;
mod selection;
mod shorthand;
mod status;

pub use configuration::RunnableConfiguration;
pub use definition::configuration;
pub use interfaces::interface_names;
pub use interfaces::{DefaultRouteChange, check_default_routes, move_default_route, moves_default_route};
pub use resolve::check_isolation;
pub use resolve::{PodNetwork, PodNetworks, resolve};
pub use selection::{NETWORKS, Selection, Selections, default_network, networks};
pub use status::{AddedNetwork, network_status};
pub use status::{added_interface, no_network_found};
