//! A minimal Kubernetes API: `GET /PATH` returns `DIR/PATH.json`. A watch returns no events.

use anyhow::Context;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::json;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::thread;

#[derive(clap::Args)]
pub(crate) struct Api {
    /// Where to listen; port 0 picks a free one
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Serve over TLS, and write the certificate of the authority to this file
    #[arg(long)]
    tls: Option<PathBuf>,
    /// The directory of the files: api/v1/namespaces/NS.json, api/v1/namespaces/NS/pods/POD.json, …
    dir: PathBuf,
}

impl Api {
    /// Prints `ready ADDR:PORT` when it can answer, then serves until stdin ends.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let listener = TcpListener::bind(self.listen).with_context(|| format!("listen on {}", self.listen))?;
        let tls = self.tls.map(|authority| certified(self.listen.ip(), &authority)).transpose()?;
        println!("ready {}", listener.local_addr()?);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (dir, tls) = (self.dir.clone(), tls.clone());
                thread::spawn(move || {
                    let served = match tls {
                        None => serve(&dir, stream),
                        Some(tls) => ServerConnection::new(tls)
                            .map_err(Into::into)
                            .and_then(|connection| serve(&dir, StreamOwned::new(connection, stream))),
                    };
                    if let Err(error) = served {
                        eprintln!("probe: api: {error:#}");
                    }
                });
            }
        });
        crate::wait_for_end_of_stdin()
    }
}

/// Returns a configuration with a certificate for `address`, of a new authority. Writes the authority's certificate.
fn certified(address: IpAddr, authority: &Path) -> anyhow::Result<Arc<ServerConfig>> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    std::fs::write(authority, issuer.pem()).with_context(|| format!("write {}", authority.display()))?;
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new([address.to_string()])?.signed_by(&key, &issuer)?;
    let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(anyhow::Error::msg)?;
    let config = ServerConfig::builder().with_no_client_auth();
    Ok(Arc::new(config.with_single_cert(vec![certificate.der().clone()], key)?))
}

fn serve(dir: &Path, stream: impl Read + Write) -> anyhow::Result<()> {
    let mut reader = BufReader::new(stream);
    while let Some(Request { path, watches }) = read_request(&mut reader)? {
        if watches {
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
            reader.get_mut().write_all(head.as_bytes())?;
            reader.get_mut().flush()?;
            reader.read_to_end(&mut Vec::new())?;
            return Ok(());
        }
        let (status, body) = match find(dir, &path) {
            Some(body) => ("200 OK", body),
            None => ("404 Not Found", not_found(&path)),
        };
        let head =
            format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
        reader.get_mut().write_all((head + &body).as_bytes())?;
        reader.get_mut().flush()?;
    }
    Ok(())
}

struct Request {
    /// The path without the query.
    path: String,
    watches: bool,
}

/// The next request; `None` at the end of the connection. Bodies are discarded.
fn read_request(reader: &mut impl BufRead) -> anyhow::Result<Option<Request>> {
    let mut request = String::new();
    match reader.read_line(&mut request) {
        Ok(0) => return Ok(None),
        // A client that exits ends the connection without TLS's close_notify.
        Err(error) if request.is_empty() && error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    };
    let mut header = String::new();
    let mut length = 0;
    while reader.read_line(&mut header)? > 2 {
        if let Some(("content-length", value)) = header.to_lowercase().split_once(": ") {
            length = value.trim().parse().context("content-length")?;
        }
        header.clear();
    }
    reader.read_exact(&mut vec![0; length])?;
    let path = request.split(' ').nth(1).context("a request without a path")?;
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    Ok(Some(Request { path: path.to_owned(), watches: query.contains("watch=") }))
}

fn find(dir: &Path, path: &str) -> Option<String> {
    let relative = Path::new(path.trim_start_matches('/'));
    if !relative.components().all(|part| matches!(part, Component::Normal(_))) {
        return None;
    }
    std::fs::read_to_string(dir.join(format!("{}.json", relative.display()))).ok()
}

fn not_found(path: &str) -> String {
    json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404,
        "message": format!("{path} not found"),
    })
    .to_string()
}
