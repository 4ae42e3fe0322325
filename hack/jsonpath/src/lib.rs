//! Replaces the JSONPath library of kube (`[patch.crates-io]` in Cargo.toml).
//!
//! kube calls it only for the `auth-provider` plugins of kubeconfigs, which Kubernetes 1.26 removed and which detour
//! refuses. With its regular expressions, the library would be a tenth of the binary.

use serde_json::Value;
use std::fmt;

/// The error of each query.
#[derive(Debug)]
pub struct Unsupported;

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("auth-provider is not supported; use exec")
    }
}

/// A value in which a path can be looked up.
pub trait JsonPath {
    /// Looks up a path.
    ///
    /// # Errors
    /// Always.
    fn query(&self, path: &str) -> Result<Vec<&Value>, Unsupported>;
}

impl JsonPath for Value {
    fn query(&self, _: &str) -> Result<Vec<&Value>, Unsupported> {
        Err(Unsupported)
    }
}
