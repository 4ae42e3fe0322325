//! Connections to an API server, directly or through an HTTP proxy.

use super::error::ClientError;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::Uri;
use hyper::header::HeaderValue;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::rt::TokioIo;
use kube::Config;
use rustls::ClientConfig;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::net::TcpStream;
use tower::{BoxError, Service};

/// Connects to an API server.
pub(super) type Connector = TimeoutConnector<HttpsConnector<Route>>;

/// Returns the connector for the server and the proxy of `config`; TLS is used if their URLs say so.
pub(super) fn connector(config: &Config, tls: ClientConfig) -> Result<Connector, ClientError> {
    let route = Route::new(config.proxy_url.as_ref(), &tls)?;
    let mut builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
    if let Some(name) = &config.tls_server_name {
        let name = name.clone().try_into();
        let name = name.map_err(|error| ClientError::ServerName(format!("{error}")))?;
        builder = builder.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    let mut connector = TimeoutConnector::new(builder.enable_http1().wrap_connector(route));
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    Ok(connector)
}

/// How TCP connections reach the server. One type for all routes: each type of connector would add another copy of the
/// HTTP client to the binary.
#[derive(Clone)]
pub(super) enum Route {
    Direct(HttpConnector),
    HttpProxy(Tunnel<HttpConnector>),
    HttpsProxy(Tunnel<HttpsConnector<HttpConnector>>),
}

impl Route {
    fn new(proxy: Option<&Uri>, tls: &ClientConfig) -> Result<Self, ClientError> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        let Some(proxy) = proxy else { return Ok(Self::Direct(tcp)) };
        match proxy.scheme_str() {
            Some("http") => Ok(Self::HttpProxy(with_password(proxy, Tunnel::new(proxy.clone(), tcp)))),
            Some("https") => {
                let tls = HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_or_http();
                let tls = tls.enable_http1().wrap_connector(tcp);
                Ok(Self::HttpsProxy(with_password(proxy, Tunnel::new(proxy.clone(), tls))))
            }
            _ => Err(ClientError::Credentials("proxy-url: expected http://HOST:PORT or https://HOST:PORT".to_owned())),
        }
    }
}

/// Sends the user and the password in the proxy's URL, whose special characters are percent-encoded there.
fn with_password<C>(proxy: &Uri, tunnel: Tunnel<C>) -> Tunnel<C> {
    let authority = proxy.authority().map_or("", |authority| authority.as_str());
    let Some((user, _)) = authority.rsplit_once('@') else { return tunnel };
    let value = format!("Basic {}", BASE64_STANDARD.encode(percent_decoded(user)));
    match HeaderValue::try_from(value) {
        Ok(value) => tunnel.with_auth(value),
        Err(_) => tunnel,
    }
}

/// Decodes `%XX` (RFC 3986, section 2.1); other text remains as it is.
fn percent_decoded(text: &str) -> Vec<u8> {
    let hex = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (mut rest, mut decoded) = (text.as_bytes(), Vec::new());
    while let [first, after @ ..] = rest {
        let escaped = match after {
            [high, low, after @ ..] if *first == b'%' => {
                hex(*high).zip(hex(*low)).map(|(high, low)| (high << 4 | low, after))
            }
            _ => None,
        };
        let (byte, after) = escaped.unwrap_or((*first, after));
        decoded.push(byte);
        rest = after;
    }
    decoded
}

impl Service<Uri> for Route {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self {
            Self::Direct(connector) => connector.poll_ready(context).map_err(Into::into),
            Self::HttpProxy(connector) => connector.poll_ready(context).map_err(Into::into),
            Self::HttpsProxy(connector) => connector.poll_ready(context).map_err(Into::into),
        }
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        match self {
            Self::Direct(connector) => {
                let connecting = connector.call(server);
                Box::pin(async { Ok(MaybeHttpsStream::Http(connecting.await?)) })
            }
            Self::HttpProxy(connector) => {
                let connecting = connector.call(server);
                Box::pin(async { Ok(MaybeHttpsStream::Http(connecting.await?)) })
            }
            Self::HttpsProxy(connector) => {
                let connecting = connector.call(server);
                Box::pin(async { Ok(connecting.await?) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::percent_decoded;

    #[test]
    fn the_password_of_a_proxy_is_decoded() {
        for (text, decoded) in [("user:pa%40ss%3aw", "user:pa@ss:w"), ("u:%", "u:%"), ("u:%+A%4", "u:%+A%4"), ("", "")]
        {
            assert_eq!(percent_decoded(text), decoded.as_bytes(), "{text}");
        }
    }
}
