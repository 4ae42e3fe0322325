//! The Helm chart, rendered by helm: which values it accepts, which it refuses, and what it documents.

mod accepted;
mod helm;
mod istio_cni;
mod live_policy;
mod monitoring;
mod notes;
mod own_list;
mod platforms;
mod plugin_keys;
mod readme;
mod refused;
#[path = "../support/mod.rs"]
mod support;
