//! A protocol and a socket address, written `tcp:10.0.0.1:80` or `udp:[fd00::1]:53`.

use anyhow::{Context, bail};
use serde::Serialize;
use std::net::SocketAddr;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) protocol: Protocol,
    pub(crate) address: SocketAddr,
}

impl FromStr for Endpoint {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (protocol, address) = text.split_once(':').context("expected tcp:ADDR:PORT or udp:ADDR:PORT")?;
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            other => bail!("protocol {other:?}: expected tcp or udp"),
        };
        Ok(Self { protocol, address: address.parse().with_context(|| format!("address {address:?}"))? })
    }
}
