//! Facts of pods, and what is told of them, through the front door of `detour_cni::cluster`: real sockets, real files.

mod definitions;
mod environment;
mod failures;
mod fetch;
mod kubeconfig;
mod manifests;
mod own;
mod scene;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod writes;

use support::server;
