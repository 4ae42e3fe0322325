//! What is shipped, against a real API server: it is accepted, the rights are those that are needed,
//! and agent and plugin do their work with them.

mod accepted;
mod certificates;
mod client;
mod control_plane;
mod facts;
mod mounts;
mod node;
mod removal;
mod repairs;
mod rights;
mod sandbox;
mod shipped;
mod tokens;
