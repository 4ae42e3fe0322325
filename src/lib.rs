//! detour

pub mod chain;
pub mod cluster;
pub mod cni;
pub mod firewall;
pub mod logging;
pub mod plugin;
pub mod pod;
pub mod policy;
pub mod sandbox;
pub mod state;
