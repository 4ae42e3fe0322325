//! The HTTP client for API servers. `kube` has one too, but it contains a connector for each kind of proxy, a trace of
//! each request, and the JSONPath of credential providers that Kubernetes 1.26 removed: a tenth of the binary.

use connector::Connector;
use credentials::Credentials;
pub(super) use error::ClientError;
use hyper::http::uri::{Parts, PathAndQuery};
use hyper::{HeaderMap, Request, Response, Uri, header};
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use kube::client::Body;
use kube::{Client, Config};
pub(super) use limit::TooLarge;
use limit::{Limit, LimitedBody};
use std::sync::Arc;
use std::task::{Context, Poll};
use tower::{BoxError, Service};

mod connector;
mod credentials;
mod error;
mod limit;
mod tls;

/// Returns a client for the API server that `config` describes, which limits the size of responses. Its credential
/// plugin runs. Call it inside a Tokio runtime.
///
/// # Errors
/// A certificate, a key, a name or other credentials can't be used.
pub(super) fn client(config: &Config) -> Result<Client, ClientError> {
    let (credentials, identity) = Credentials::new(&config.auth_info)?;
    let tls = tls::client_config(config, identity)?;
    let mut headers = credentials::impersonation(&config.auth_info)?;
    headers.extend(config.headers.iter().map(|(name, value)| (Some(name.clone()), value.clone())));
    let service = ApiService {
        http: legacy::Builder::new(TokioExecutor::new()).build(connector::connector(config, tls)?),
        server: Arc::new(config.cluster_url.clone()),
        headers: Arc::new(headers),
        credentials: Arc::new(credentials),
    };
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// Sends requests to one API server.
#[derive(Clone)]
struct ApiService {
    http: legacy::Client<Connector, Body>,
    server: Arc<Uri>,
    /// The headers of each request.
    headers: Arc<HeaderMap>,
    credentials: Arc<Credentials>,
}

impl Service<Request<Body>> for ApiService {
    type Response = Response<LimitedBody>;
    type Error = BoxError;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        // The pool of connections has no limit.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Self { http, server, headers, credentials } = self.clone();
        Box::pin(async move {
            let limit = Limit::of(&request);
            *request.uri_mut() = on_server(&server, request.uri())?;
            request.headers_mut().extend((*headers).clone());
            if let Some(value) = credentials.authorization()? {
                request.headers_mut().insert(header::AUTHORIZATION, value);
            }
            Ok(http.request(request).await?.map(|body| limit.apply(body)))
        })
    }
}

/// Returns the URI of a path below the server's: a proxy in front of several servers selects one by a path.
fn on_server(server: &Uri, request: &Uri) -> Result<Uri, BoxError> {
    let path = request.path_and_query().map_or("/", PathAndQuery::as_str);
    let mut parts: Parts = server.clone().into_parts();
    parts.path_and_query = Some(format!("{}{path}", server.path().trim_end_matches('/')).parse()?);
    Ok(Uri::from_parts(parts)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_below_the_path_of_the_server() {
        let request = Uri::from_static("/api/v1/pods?limit=1");
        for (server, uri) in [
            ("https://127.0.0.1:6443", "https://127.0.0.1:6443/api/v1/pods?limit=1"),
            ("https://[fd00::1]/", "https://[fd00::1]/api/v1/pods?limit=1"),
            ("http://rancher/k8s/clusters/c-1/", "http://rancher/k8s/clusters/c-1/api/v1/pods?limit=1"),
        ] {
            assert_eq!(on_server(&Uri::from_static(server), &request).expect("a URI"), uri);
        }
    }
}
