//! The node's agent answers the plugin: real processes on a socket, an API of the tests' own. Needs
//! root, `ip` and `iptables-save`.

#[path = "../install/agent_process.rs"]
#[expect(dead_code, reason = "what it answers about itself is for tests/install")]
mod agent_process;
mod answers;
mod api;
mod fallback;
mod listener;
#[path = "../convergence/node.rs"]
#[expect(dead_code, reason = "who leaves state is for tests/convergence")]
mod node;
#[path = "../convergence/pod.rs"]
#[expect(dead_code, reason = "user namespaces are for tests/convergence")]
mod pod;
mod primary;
#[path = "../install/program.rs"]
mod program;
mod scene;
mod told;
mod upgrade;
