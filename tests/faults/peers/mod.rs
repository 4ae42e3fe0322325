//! Faults of the peers of the plugin: the API server, the agent and delegates; and faults of the peers of the agent.
//!
//! | file | content |
//! |---|---|
//! | `scene` | a node with one pod and failing peers; calls, and what they must answer and leave |
//! | `case` | runs the cases of a group, several at the same time |
//! | `server` | an API server whose connections are scripts |
//! | `healthy` | what a healthy API server and healthy plugins answer |
//! | `api` | faults of the API server in HTTP |
//! | `credentials` | TLS, names, and token files |
//! | `agent` | faults of the agent's socket |
//! | `listener` | other listeners at the path of the agent's socket |
//! | `delegates` | faults of executables |
//! | `program` | the agent as a program under faults of its API server and of its clients |

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
