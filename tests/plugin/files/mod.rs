//! Files of the node that another user owns or that are not regular files: the binary refuses them at once with the
//! reason, and does not write to them.

mod credentials;
mod node;
