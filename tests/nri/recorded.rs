//! Recorded sessions.
