//! The public API of `detour_cni::cluster` with real sockets and files: facts of pods from an API server and from
//! manifests, and reports to the cluster.

mod agent;
mod definitions;
mod environment;
mod failures;
mod fetch;
mod kubeconfig;
mod lists;
mod manifests;
mod networks;
mod own;
mod scene;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod writes;

use support::server;
