//! Code that several test programs share: nodes, pods and servers to test with. Each test program includes this
//! module and uses a part of it.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub(crate) mod agent_node;
pub(crate) mod agent_process;
pub(crate) mod api;
pub(crate) mod attachment;
pub(crate) mod background;
pub(crate) mod called;
pub(crate) mod cgroup;
pub(crate) mod chart;
pub(crate) mod control_groups;
pub(crate) mod delegate_pod;
pub(crate) mod directory;
pub(crate) mod golden;
pub(crate) mod health;
pub(crate) mod install_scene;
pub(crate) mod kernel;
pub(crate) mod listener;
pub(crate) mod netns_pod;
pub(crate) mod new_netns;
pub(crate) mod node_pod;
pub(crate) mod plugin_call;
pub(crate) mod policies;
pub(crate) mod private_node;
pub(crate) mod program;
pub(crate) mod recorders;
pub(crate) mod server;
pub(crate) mod simulated_node;
pub(crate) mod wait;
