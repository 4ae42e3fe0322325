//! The node's agent: what puts the plugin on a node, keeps it there, and looks after the node's pods.
//!
//! | file | what it knows |
//! |---|---|
//! | [`install`] | what is wanted on a node, what is found, and the difference |
//! | `keep` (`watch`, `stability`) | doing that again whenever something changes |
//! | `plugin_token`, `daemon_set` | the plugin's credentials; whether it stays when the agent ends |
//! | `services` | what runs beside, where the node's name is known |
//! | `facts` (`known`), `socket`, `calls` | what is known of the node's pods, who asks for it, and what came of their calls |
//! | [`repair`] | pods that bypass the mesh |
//! | [`taint`] | pods that are to wait |
//! | `own_pod` | Events of the agent's own pod: a configuration that is refused |
//! | `health`, `metrics` | what a kubelet and Prometheus ask |
//! | `connections` | how many clients `health` and `socket` serve, and which of them make room for others |

mod daemon_set;
mod facts;
mod health;
pub mod install;
mod metrics;
mod own_pod;
mod plugin_token;
mod reconcile_loop;
pub mod repair;
mod services;
mod socket;
mod stability;
pub mod taint;
mod watch;

pub use daemon_set::DaemonSet;
pub use metrics::Metrics;
pub use own_pod::OwnPod;
pub use plugin_token::PluginToken;
pub use reconcile_loop::{DesiredInstallation, Job, OnExit, keep};
pub use services::Services;
pub use services::{EndedContainer, ObservedPod};
