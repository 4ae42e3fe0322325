//! The own configuration list, `00-detour.conflist`, beside the cluster CNIs of real clusters: what a container runtime
//! reads at each moment while another process rewrites its list.

mod chain_directory;
mod cluster_cni;
mod golden;
mod runtime;
mod simulated;

use crate::support::{agent_process, install_scene as scene};
