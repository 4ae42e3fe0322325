//! The agent of a node: it keeps the plugin installed, answers the plugin's requests about the node's pods, and repairs
//! pods that bypass the mesh.
//!
//! | file | content |
//! |---|---|
//! | [`install`] | desired and found state of the node, and the plan that makes them equal |
//! | `reconcile_loop` | installs again whenever something changes ([`run`]) |
//! | `watch`, `stability` | waiting for changes of directories and for signals; whether an installation lasts |
//! | `plugin_token`, `daemon_set` | the plugin's credentials; whether the agent's DaemonSet was deleted |
//! | [`nri`] | the container runtime's reports of started and stopped containers |
//! | `own_pod` | Events of the agent's own pod, for a refused configuration |
//! | `pod_reports` | Events and conditions of the node's pods |
//! | `services` | starts the threads that need the node's name |
//! | `facts` | the watched pods, namespaces and definitions, and the answers to the plugin |
//! | `socket` | the Unix socket for the plugin's requests |
//! | `containers` | excluded containers of running pods |
//! | [`repair`] | repairs pods that bypass the mesh |
//! | `live_policy` | running pods follow changes of their policy |
//! | [`taint`] | keeps pods off a node that is not ready |
//! | `health` | `/healthz`, `/readyz`, `/metrics`, the watchdog, and the limit of connections |
//! | `metrics` | the Prometheus metrics |

mod containers;
mod daemon_set;
mod facts;
mod health;
pub mod install;
mod live_policy;
mod metrics;
pub mod nri;
mod own_pod;
mod plugin_token;
mod pod_reports;
mod reconcile_loop;
pub mod repair;
mod services;
mod socket;
mod stability;
pub mod taint;
mod token_bucket;
mod watch;

pub use containers::ContainerSettings;
pub use daemon_set::DaemonSet;
pub use facts::{EndedContainer, ObservedPod};
pub use metrics::Metrics;
pub use own_pod::OwnPod;
pub use plugin_token::PluginToken;
pub use pod_reports::PodReports;
pub use reconcile_loop::{DesiredInstallation, Job, OnExit, run};
pub use services::Services;
