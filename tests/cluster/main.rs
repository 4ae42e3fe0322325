//! Facts of pods through the front door of `detour_cni::cluster`: real sockets, real files.

mod environment;
mod failures;
mod fetch;
mod kubeconfig;
mod manifests;
mod scene;
mod server;
mod tls;
