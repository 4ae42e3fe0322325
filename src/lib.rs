//! `detour`: one static binary that sends a meshed pod's traffic to its Istio sidecar, and around
//! it what must not go there.
//!
//! # The map
//!
//! Data flows down on the way in and up on the way out; a module imports only from rows below its
//! own (`tests/layers.rs` holds that).
//!
//! | row | modules | what they know |
//! |---|---|---|
//! | front doors | `main`, [`agent`], [`inspect`] | plugin or command line; what puts the plugin on a node and keeps it there; explain, trace, rules, doctor: reports as values, and how they are shown |
//! | calls | [`plugin`] | one verb a file: what happens in which order |
//! | policy making, other plugins | [`chain`], [`delegate`] | sub-plugins: pod facts + configuration → one traffic policy (pure); executables as child processes |
//! | references | [`networks`] | what `k8s.v1.cni.cncf.io` means: the networks that a pod selects, their definitions, what is told of the outcome |
//! | facts | [`cluster`] | the node's agent behind its socket, the API, or a directory of manifests |
//! | edges | [`sandbox`], [`firewall`], [`state`], [`logging`] | the pod's netns, and how it is found; policy → rules → netlink and back; what each attachment asked for |
//! | the node | [`host_path`], [`trusted_file`], [`netlink`] | a path as the node knows it, and where it is reached from here; files opened so that their owner can't harm this process; the kernel's socket protocol |
//! | the process's streams | [`streams`] | stdin, stdout and stderr of a call, none of which blocks it forever |
//! | values | [`policy`], [`pod`], [`cni`], [`printable`], [`suggest`] | what is redirected and who is exempt; facts of a pod; the CNI protocol; text that terminals display and do not act on; which name a misspelled one means |
//!
//! # One ADD
//!
//! [`cni`] checks environment and stdin; [`plugin`] asks [`cluster`] for the pod and, where the chain
//! can use it, its namespace; [`chain`] turns both into a [`policy::Policy`]; in the pod's namespace,
//! under a lock, that is united with what other attachments on the container asked for, written down
//! as intent in [`state`], turned into rules by [`firewall`], compared with what the kernel holds, and
//! the difference is sent as one netlink transaction. No process is started, but for executables in the
//! chain: [`delegate`] runs them afterwards.
//!
//! As the primary plugin it asks [`networks`] for all that the pod is to have, keeps the intent, has
//! [`delegate`] run the networks one after another, does the above on the default network's result, and
//! then the executables.
//!
//! # On a node
//!
//! [`agent::install`] compares what is wanted with what is found; the difference is a plan, which is
//! shown (`--dry-run`), applied, and taken back by its log. [`agent::keep`] does that again whenever
//! something changes; it is the process's first thread, and has one beside it for each of these, where it is
//! wanted:
//!
//! | thread | what it does |
//! |---|---|
//! | `services` | watches the node's pods, namespaces and definitions, and answers the plugin ([`agent::Services`]) |
//! | `repair` | looks after the same pods ([`agent::repair`]) |
//! | `taint` | keeps pods off a node that isn't ready ([`agent::taint`]) |
//! | `daemonset` | watches whether the agent is to come back ([`agent::DaemonSet`]) |
//! | `health` | answers `/healthz`, `/readyz` and `/metrics` ([`agent::Metrics`]) |
//!
//! The plugin's [`cluster::agent::Question`]s come by a socket: a line of JSON each way, a connection each.
//! Where nobody answers, the plugin asks the API within the same wait, by [`agent::PluginToken`]'s
//! credentials. At the end of a call it tells the agent what came of it.
//!
//! Pods that bypass the mesh are found by what the cluster says, [`plugin::standing`] and [`sandbox::find`],
//! and get their rules by the plugin's own ADD, or by [`plugin::restore`] from [`state`].
//!
//! [`inspect::doctor`] asks all of them, and the kernel, whether a node and a pod are as they should be.
//!
//! # Ports
//!
//! | port | who listens | what arrives |
//! |---|---|---|
//! | 15001 | sidecar | outbound TCP |
//! | 15006 | sidecar | inbound TCP |
//! | 15008 | sidecar | HBONE; never captured |
//! | 15053 | sidecar | captured DNS, UDP and TCP |
//! | 15020, 15021, 15090 | sidecar | status, health, metrics; never captured inbound |
//!
//! # Tables, priorities, zones, marks
//!
//! | table (`ip`, `ip6`) | priority | chains |
//! |---|---|---|
//! | `raw` | -300 | `DETOUR_OUTPUT` (exempt queries: zone 1), `ISTIO_OUTPUT_DNS`, `ISTIO_INBOUND` |
//! | `mangle` | -150 | `ISTIO_INBOUND`, `ISTIO_TPROXY`, `ISTIO_DIVERT`, `ISTIO_DROP` |
//! | `nat` | -100 | `DETOUR_OUTPUT` (accepts what is exempt), `ISTIO_OUTPUT`, `ISTIO_OUTPUT_DNS`, `ISTIO_INBOUND`, `ISTIO_REDIRECT`, `ISTIO_IN_REDIRECT` |
//!
//! In dialect `nftables` the same chains stand in the tables `detour-raw`, `detour-mangle` and
//! `detour-nat` of family `inet`, raw and nat one priority earlier; `DETOUR_DIRECT` there keeps the
//! destination of what is exempt by a NAT of its own, which holds for other tools' tables too. Why,
//! stands in `src/firewall/native`; who gets which dialect, in `src/plugin/dialect.rs`.
//!
//! Connection tracking zone 1 is the proxy's own DNS and resolvers' answers, zone 2 captured
//! queries. Marks 1337 and 1338 are TPROXY's. What deviates from Istio's own rules, and why, stands
//! in `src/firewall/istio.rs`.
//!
//! # State
//!
//! | path | what |
//! |---|---|
//! | `/run/detour/attachments/CONTAINER/NETWORK@IFNAME.json` | what an attachment asked for; it goes with a reboot, as the namespaces do |
//! | `/run/detour/locks/DEVICE-INODE` | the lock of a network namespace that a call works in now; for root alone, removed with the call |
//! | `/run/detour/agent.sock` | where the agent answers; for root alone; beside it its lock, `agent.lock` |
//! | `/var/lib/cni/detour/CONTAINER/NETWORK@IFNAME.json` (`cniDir`) | what the primary plugin ran for a pod; DEL must find it after a reboot |
//! | `/var/lib/cni/detour/install.json` | what was put on the node; beside it locks: `install.lock`, and of each agent that runs `NAME.present` |
//! | `/var/lib/cni/detour/node.json` | the node configuration: the keys that no attachment can set ([`cni::NodeConf`]) |
//! | `/var/lib/cni/detour/kubeconfig` | by which the plugin reaches the API, where the agent or `detour install` wrote it |
//!
//! Records have a version ([`state::format`]): a missing field has its default, and a newer version's record
//! is refused, except to remove what it describes. `tests/records` holds those of each release.
//!
//! Error codes: [`cni::Code`].

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod agent;
pub mod cluster;
pub mod cni;
pub mod delegate;
pub mod firewall;
pub mod host_path;
pub mod inspect;
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
pub mod suggest;
pub mod trusted_file;
