//! detour

pub mod chain;
pub mod cluster;
pub mod cni;
pub mod pod;
pub mod policy;
