//! Faults of the API server, the agent and delegates.
