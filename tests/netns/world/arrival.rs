//! Where a message arrived.

use super::SIDECAR;
use serde::Deserialize;
use std::net::{IpAddr, SocketAddr};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// At the sidecar. UDP has no original destination.
    Sidecar { port: u16, original_destination: Option<SocketAddr> },
    /// At its destination, or at least not at the sidecar.
    Direct { at: SocketAddr, from: IpAddr },
    /// Nowhere: `timeout`, `refused`, …
    Lost(String),
}

/// The lines that `probe` prints.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Answer {
        label: String,
        listener: u16,
        local: SocketAddr,
        peer: SocketAddr,
        original_destination: Option<SocketAddr>,
    },
    Lost {
        error: String,
    },
}

impl Arrival {
    /// Returns the arrival of a TCP connection at the sidecar's `port`, with the original destination `to`.
    pub(crate) fn captured(port: u16, to: SocketAddr) -> Self {
        Self::Sidecar { port, original_destination: Some(to) }
    }

    /// Returns the arrival of a datagram at the sidecar's `port`.
    pub(crate) fn captured_datagram(port: u16) -> Self {
        Self::Sidecar { port, original_destination: None }
    }

    /// Returns the arrival at the destination `at`, from the address of `from`.
    pub(crate) fn direct(at: SocketAddr, from: IpAddr) -> Self {
        Self::Direct { at, from }
    }

    pub(crate) fn parse(answer: &[u8]) -> serde_json::Result<Self> {
        Ok(match serde_json::from_slice(answer)? {
            Line::Answer { label, listener, original_destination, .. }
                if label == "pod" && SIDECAR.contains(&listener) =>
            {
                Self::Sidecar { port: listener, original_destination }
            }
            Line::Answer { local, peer, .. } => Self::Direct { at: local, from: peer.ip() },
            Line::Lost { error } => Self::Lost(error),
        })
    }
}
