//! Netlink, the kernel's socket protocol (netlink(7)): attributes, messages, and a socket that talks to
//! the kernel alone. It knows neither rules nor routes.

pub mod attributes;
mod message;
mod socket;

pub use attributes::Attributes;
pub use message::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NLMSG_ERROR, Received, put, split,
};
pub use socket::{Allowance, TOO_MANY};
pub use socket::{NetlinkSocket, again};
