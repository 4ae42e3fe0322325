//! Why a client can't be created.

/// Why a client can't be created.
#[derive(Debug, thiserror::Error)]
pub(in crate::cluster) enum ClientError {
    /// The certificates that verify the server.
    #[error("CA certificates: {0}")]
    Authority(String),
    /// The name in the server's certificate.
    #[error("tls-server-name: {0}")]
    ServerName(String),
    /// The client's certificate.
    #[error("client certificate: {0}")]
    Certificate(String),
    /// The key of the client's certificate.
    #[error("client key: {0}")]
    Key(String),
    /// Other credentials, or the certificate does not match its key.
    #[error("{0}")]
    Credentials(String),
}
