//! detour

pub mod cluster;
pub mod cni;
pub mod logging;
pub mod plugin;
pub mod pod;
pub mod policy;
