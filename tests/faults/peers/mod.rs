//! Faults of the peers of the plugin: the API server, the agent and delegates; and faults of the peers of the agent.

mod agent;
mod api;
mod case;
mod credentials;
mod delegates;
mod healthy;
mod listener;
mod program;
mod scene;
mod server;
