//! `clusters[].cluster`: where the API server is, and how it is known to be the right one.
//!
//! Which files a kubeconfig may consist of: it depends on who names it.
//!
//! One entry of a kubeconfig, for what is wrong in it and for the files that it names.

use super::{Authority, pem};
use crate::cluster::wire::null_is_empty;
use crate::cni::{Code, Error};
use crate::host_path::{HostPath, HostRoot};
use crate::trusted_file;
use crate::trusted_file::{FileError, is_trusted};
use kube::Config;
use serde::Deserialize;
use std::fmt::Display;
use std::io;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub(super) struct ClusterEntry {
    #[serde(deserialize_with = "null_is_empty")]
    server: String,
    #[serde(deserialize_with = "null_is_empty")]
    certificate_authority: String,
    #[serde(deserialize_with = "null_is_empty")]
    certificate_authority_data: String,
    #[serde(deserialize_with = "null_is_empty")]
    insecure_skip_tls_verify: bool,
    #[serde(deserialize_with = "null_is_empty")]
    tls_server_name: String,
    #[serde(deserialize_with = "null_is_empty")]
    proxy_url: String,
}

impl ClusterEntry {
    /// A server whose certificate is signed by the authority in a file.
    pub(super) fn with_authority(server: &str, authority: &Path) -> Self {
        Self { server: server.to_owned(), certificate_authority: authority.display().to_string(), ..Self::default() }
    }

    /// How the server is known to be the right one, as far as that is written down.
    pub(super) fn authority(&self) -> Authority {
        if self.insecure_skip_tls_verify {
            Authority::Nobody
        } else if present(&self.certificate_authority_data).is_some() {
            Authority::Embedded
        } else {
            present(&self.certificate_authority).map_or(Authority::System, |file| Authority::File(file.into()))
        }
    }

    /// The configuration of a client that has no credentials yet.
    ///
    /// # Errors
    /// A value is not accepted, a file can't be read.
    pub(super) fn config(&self, entry: &KeyPath<'_>) -> Result<Config, Error> {
        const ACCEPTED: &str = "is not accepted; accepted: https://HOST:PORT or http://HOST:PORT";
        let is_http = |scheme: Option<&str>| matches!(scheme, Some("http" | "https"));
        let refused = || entry.wrong("server", format!("{:?} {ACCEPTED}", without_userinfo(&self.server)));
        let mut config = Config::new(self.server.parse().map_err(|_| refused())?);
        if !is_http(config.cluster_url.scheme_str()) {
            return Err(refused());
        }
        if let Some(proxy) = present(&self.proxy_url) {
            let refused = || entry.wrong("proxy-url", format!("{:?} {ACCEPTED}", without_userinfo(proxy)));
            config.proxy_url = Some(proxy.parse().map_err(|_| refused())?);
            if !is_http(config.proxy_url.as_ref().and_then(|url| url.scheme_str())) {
                return Err(refused());
            }
        }
        config.root_cert = self.authorities(entry)?;
        config.accept_invalid_certs = self.insecure_skip_tls_verify;
        config.tls_server_name = present(&self.tls_server_name).map(Into::into);
        let checked = [Some(&config.cluster_url), config.proxy_url.as_ref()];
        let checked = checked.into_iter().flatten().any(|url| url.scheme_str() == Some("https"));
        if self.insecure_skip_tls_verify || !checked {
            // Nobody rather than the system's authorities, whose 150 files would be read for nothing.
            config.root_cert.get_or_insert_default();
        }
        Ok(config)
    }

    /// The DER of the authorities that are trusted; `None` for the system's.
    fn authorities(&self, entry: &KeyPath<'_>) -> Result<Option<Vec<Vec<u8>>>, Error> {
        let (key, pem) = match (present(&self.certificate_authority_data), present(&self.certificate_authority)) {
            (Some(data), _) => {
                let key = "certificate-authority-data";
                let pem = pem::base64(data);
                let pem = pem.map_err(|e| entry.wrong(key, "is not base64").with_details(e.to_string()))?;
                (key, String::from_utf8_lossy(&pem).into_owned())
            }
            (None, Some(file)) => ("certificate-authority", entry.read("certificate-authority", file, pem::LARGEST)?),
            (None, None) => return Ok(None),
        };
        if self.insecure_skip_tls_verify {
            return Err(entry.wrong(key, "contradicts insecure-skip-tls-verify: true; leave one of the two out"));
        }
        let ders = pem::certificates(&pem);
        let ders = ders.map_err(|e| entry.wrong(key, "is not PEM").with_details(e.to_string()))?;
        if ders.is_empty() { Err(entry.wrong(key, "holds no PEM certificate")) } else { Ok(Some(ders)) }
    }
}

/// A URL less its user and password, which are not for messages: all before the last `@` of the authority
/// (RFC 3986, section 3.2), also in what is not quite a URL.
pub(super) fn without_userinfo(url: &str) -> String {
    let start = url.find("//").map_or(0, |slashes| slashes + "//".len());
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |length| start + length);
    // An unescaped separator in a password ends the authority too early.
    let end = if url[start..end].contains('@') { end } else { url.len() };
    match url[start..end].rfind('@') {
        Some(at) => format!("{}{}", &url[..start], &url[start + at + 1..]),
        None => url.to_owned(),
    }
}

/// A kubeconfig is larger only by mistake; client-go's own are a few KiB.
const LARGEST: u64 = 1 << 20;

/// Who names a kubeconfig.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cluster) enum KubeconfigOwner {
    /// The node's configuration: only trusted users may be able to change it, since it decides which files
    /// root reads and which server gets the token in them.
    Node,
    /// The user of the command line: it may belong to any user.
    User,
}

/// The files that a kubeconfig may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Files {
    /// Those that only trusted users can change.
    Trusted,
    /// All.
    Any,
    /// Those of the kubeconfig's own owner, who could otherwise have root send a token of root's.
    Of(u32),
}

impl KubeconfigOwner {
    /// Reads the kubeconfig at `path`: its contents, and which files it may name.
    ///
    /// # Errors
    /// It can't be read, or may not be used.
    pub(super) fn read(self, path: &Path) -> Result<(Vec<u8>, Files), FileError> {
        if self == Self::Node {
            return Ok((trusted_file::read_trusted(path, LARGEST)?, Files::Trusted));
        }
        let (contents, owner) = trusted_file::read_with_owner(path, LARGEST)?;
        Ok((contents, if is_trusted(owner) { Files::Any } else { Files::Of(owner) }))
    }
}

impl Files {
    /// Reads one of them, of at most `limit` bytes.
    ///
    /// # Errors
    /// It can't be read, or is none of them.
    pub(super) fn read(self, path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
        if self == Self::Trusted {
            return trusted_file::read_trusted(path, limit);
        }
        match (trusted_file::read_with_owner(path, limit)?, self) {
            ((_, owner), Self::Of(uid)) if owner != uid => {
                let why = format!("owned by UID {owner}; expected UID {uid}, the owner of the kubeconfig");
                Err(io::Error::new(ErrorKind::PermissionDenied, why).into())
            }
            ((contents, _), _) => Ok(contents),
        }
    }
}

/// Where keys stand.
#[derive(Debug, Clone)]
pub(super) struct KeyPath<'a> {
    /// The kubeconfig.
    pub(super) kubeconfig: &'a Path,
    /// Where the file system is mounted to which absolute paths in it belong.
    pub(super) root: &'a Path,
    /// The files that it may name.
    pub(super) files: Files,
    /// For example `clusters[local].cluster`; empty for the top level.
    pub(super) place: String,
}

impl KeyPath<'_> {
    /// The error for a key of this entry.
    pub(super) fn wrong(&self, key: &str, what: impl Display) -> Error {
        let (kubeconfig, place) = (self.kubeconfig.display(), &self.place);
        let dot = if place.is_empty() { "" } else { "." };
        Error::new(Code::InvalidConfig, format!("kubeconfig {kubeconfig}: {place}{dot}{key}: {what}"))
    }

    /// The path of a file that this entry names; a relative one is relative to the kubeconfig. Links below
    /// another root lead to where that file system's own processes find them; on the node itself, who owns
    /// them counts as well.
    fn near(&self, file: &str) -> io::Result<PathBuf> {
        if self.root == Path::new("/") || !file.starts_with('/') {
            return Ok(self.kubeconfig.parent().unwrap_or(Path::new("")).join(file));
        }
        let refused = || io::Error::new(ErrorKind::InvalidInput, "expected a path without \"..\"");
        HostRoot::new(self.root).reach(&HostPath::new(file).ok_or_else(refused)?)
    }

    /// The text of the file that `key` names, of at most `limit` bytes.
    ///
    /// # Errors
    /// It can't be read, or may not be used.
    pub(super) fn read(&self, key: &str, file: &str, limit: u64) -> Result<String, Error> {
        let unread =
            |path: &Path, why: String| self.wrong(key, format!("{} can't be read", path.display())).with_details(why);
        let path = self.near(file).map_err(|error| unread(Path::new(file), error.to_string()))?;
        let contents = self.files.read(&path, limit).map_err(|error| match error {
            FileError::Io(error) => unread(&path, error.to_string()),
            refused => self.wrong(key, format!("{} is not used: {refused}", path.display())),
        })?;
        String::from_utf8(contents).map_err(|_| unread(&path, "not UTF-8".to_owned()))
    }
}

/// Kubeconfigs leave a key out or leave it empty to the same effect.
pub(super) fn present(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::without_userinfo;

    #[test]
    fn a_shown_url_has_no_user_and_no_password() {
        for (url, shown) in [
            ("https://user:pw@host:6443/a@b", "https://host:6443/a@b"),
            ("https://user:p@w@host", "https://host"),
            ("user:pw@host", "host"),
            ("https://user:p/w@host:1", "https://host:1"),
            ("socks5://user:pw@[fd00::1]:1080", "socks5://[fd00::1]:1080"),
            ("https://host:6443", "https://host:6443"),
            ("", ""),
        ] {
            assert_eq!(without_userinfo(url), shown);
        }
    }
}
