//! Netlink, the kernel's socket protocol (netlink(7)): attributes, messages, and a synchronous socket that talks
//! only to the kernel. It knows neither firewall rules nor routes.
//!
//! * `attributes`: writes and reads attributes
//! * `message`: writes and reads messages
//! * `socket`: sends requests and dumps, and limits how much a dump may return

pub mod attributes;
mod message;
mod socket;

pub use attributes::Attributes;
pub use message::{
    Messages, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NLMSG_ERROR, Received, split,
};
pub use socket::{DumpLimit, EXCEEDED, NetlinkSocket, is_lack_of_resources, retry_interrupted};
