//! What a kubeconfig says, for people and for checks: without its secrets, but for the token, which
//! must be known to be kept out of what is shown.

use super::{KubeconfigOwner, current, shown, token};
use crate::cni::Error;
use std::path::{Path, PathBuf};

/// What a kubeconfig's current context says.
pub struct KubeconfigSummary {
    /// The API server's address, without a slash at its end.
    pub server: String,
    /// How it is known to be the right one.
    pub authority: Authority,
    /// Who asks.
    pub credentials: CredentialsSummary,
    /// The token that is sent, from wherever it comes.
    pub token: Option<String>,
    /// Until when the token is valid, in seconds since 1970, where it says so: a service account's does.
    pub expires: Option<i64>,
}

/// By what a server's certificate is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authority {
    /// `certificate-authority-data`.
    Embedded,
    /// `certificate-authority`.
    File(PathBuf),
    /// Nothing is said: the system's authorities.
    System,
    /// `insecure-skip-tls-verify`.
    Nobody,
}

/// How whoever asks shows who it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialsSummary {
    /// `token`.
    Token,
    /// `tokenFile`.
    TokenFile(PathBuf),
    /// `client-certificate(-data)`.
    Certificate,
    /// It doesn't.
    Nothing,
}

impl KubeconfigSummary {
    /// Reads the kubeconfig at `path`, as this process sees it, and the files that it names; absolute
    /// paths in it are those of the file system mounted at `root`.
    ///
    /// # Errors
    /// 11 where there is no such file yet, 5 where it can't be read, 7 where it is wrong or not trusted.
    pub fn read(root: &Path, path: &Path) -> Result<Self, Error> {
        let (cluster, of_cluster, user, of_user) = current(root, path, KubeconfigOwner::Node)?;
        let server = shown(&cluster.config(&of_cluster)?);
        let (credentials, token) = user.kind(&of_user)?;
        let expires = token.as_deref().and_then(token::expiry);
        Ok(Self { server, authority: cluster.authority(), credentials, token, expires })
    }
}
