//! Files of the node that another user owns, or that are no regular files: the binary refuses them at once,
//! says why, and writes to none of them.

mod credentials;
mod fifos;
mod limits;
mod node;
mod written;
