//! Repair of pods that bypass the mesh, and the taint of a node that is not ready. Every test has its own simulated
//! node: a file system, a `/run/detour`, pods' network namespaces with processes in control groups, and an API server
//! that records its requests. Needs root, `ip`,
//! `nft`, `iptables`, `unshare` and control groups that can be made.

mod in_place;
mod modes;
mod older;
mod scene;
