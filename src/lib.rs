//! `detour` is a CNI meta-plugin in one static binary. It redirects a pod's traffic to its Istio sidecar and lets
//! excluded traffic (by UID, by container, or DNS) bypass it. The same binary installs itself on nodes, keeps pods
//! redirected, and explains what it does.
//!
//! `docs/architecture.md` describes the data flow, the agent's threads, the state files and the netfilter tables. The
//! comment at the top of each file says what it contains.
//!
//! # Map
//!
//! A module imports only from rows below its own, except for values (`tests/layers.rs` enforces this).
//!
//! | row | modules | responsibility |
//! |---|---|---|
//! | tests | `fuzzing` | targets of coverage-guided fuzzing; not part of the product |
//! | the program | `main` with `cli` | plugin or command line |
//! | entry points | [`agent`], [`inspect`] | the node agent: install, keep installed, serve facts, repair; explain, trace, rules, doctor, audit, validate |
//! | CNI calls | [`plugin`] | ADD, DEL, CHECK, GC, STATUS: the order of steps |
//! | policy and other plugins | [`sub_plugins`], [`delegate`] | pod facts and configuration → traffic policy (pure functions); other CNI plugins as child processes |
//! | networks | [`networks`] | the annotation `k8s.v1.cni.cncf.io/networks`: selected networks, their definitions, network-status |
//! | facts | [`cluster`] | pods and namespaces from the agent's socket, the API server, or a directory of manifests |
//! | control groups | [`cgroup`] | IDs of control groups; the node's cgroup namespace |
//! | kernel and state | [`netns`], [`firewall`], [`state`], [`logging`] | the pod's network namespace; policy → rules → netlink and back; saved state of each attachment; log lines |
//! | the node | [`host_path`], [`trusted_file`], [`netlink`] | paths as the node sees them; safe opening of files; netlink sockets |
//! | streams | [`streams`] | stdin, stdout and stderr with deadlines |
//! | values | [`policy`], [`pod`], [`cni`], [`printable`], [`wait`], [`links`] | redirections and exclusions; pod facts; the CNI protocol and its error codes ([`cni::Code`]); text that is safe to print; waiting with a deadline, and pauses between attempts; the walk of symbolic links |

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod agent;
pub mod cgroup;
pub mod cluster;
pub mod cni;
pub mod delegate;
pub mod firewall;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod host_path;
pub mod inspect;
pub mod links;
pub mod logging;
pub mod netlink;
pub mod netns;
pub mod networks;
pub mod plugin;
pub mod pod;
pub mod policy;
pub mod printable;
#[cfg(test)]
#[path = "../tests/support/directory.rs"]
mod scratch;
pub mod state;
pub mod streams;
pub mod sub_plugins;
pub mod trusted_file;
pub mod wait;
