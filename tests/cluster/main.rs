//! The public API of `detour_cni::cluster` with real sockets and files: facts of pods from an API server and from
//! manifests, and reports to the cluster.

use support::server;

mod agent;
mod definitions;
mod failures;
mod fetch;
mod kubeconfig;
mod manifests;
mod networks;
mod own;
mod scene;
#[path = "../support/mod.rs"]
mod support;
