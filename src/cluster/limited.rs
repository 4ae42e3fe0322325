//! An API client that reads no more of a response than a Kubernetes API sends.
//!
//! The API server takes objects of at most 1.5 MiB, as etcd stores them (`--max-request-bytes`); as JSON
//! one can have six times that, if all of it needs escapes. Responses are not compressed.

use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::{Request, Response};
use kube::client::ClientBuilder;
use kube::{Client, Config};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tower::{BoxError, Layer, Service};

/// The most bytes of an object, or of an unpaged list, and of an event of a watch.
const OBJECT: u64 = 16 << 20;
/// The most bytes of a page of a list. The agent asks for [`PAGE`] objects each.
const LIST: u64 = 64 << 20;
/// How many objects a page has: objects of ordinary size stay below the limit together.
pub(crate) const PAGE: u32 = 40;

/// A client of the API that `config` describes.
pub(super) fn client(config: Config) -> kube::Result<Client> {
    Ok(ClientBuilder::try_from(config)?.with_layer(&Limited(())).build())
}

/// A response that is too large.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{request}: expected {part} of at most {limit} bytes, got more")]
pub(super) struct TooLarge {
    request: String,
    part: &'static str,
    limit: u64,
}

impl TooLarge {
    /// The reason for a failed request, if it is this one.
    pub(super) fn of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Self> {
        let mut errors = std::iter::successors(Some(error), |error| error.source());
        errors.find_map(|error| error.downcast_ref())
    }
}

/// Limits the responses of a service; the value is the service, or nothing in a layer.
#[derive(Debug, Clone)]
struct Limited<S>(S);

impl<S> Layer<S> for Limited<()> {
    type Service = Limited<S>;

    fn layer(&self, service: S) -> Self::Service {
        Limited(service)
    }
}

impl<S, B, R> Service<Request<R>> for Limited<S>
where
    S: Service<Request<R>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<LimitedBody<B>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        let has = |parameter: &str| {
            let query = request.uri().query().unwrap_or_default();
            query.split('&').any(|pair| pair.split('=').next() == Some(parameter))
        };
        let (part, limit, by_line) = match (has("watch"), has("limit")) {
            (true, _) => ("an event", OBJECT, true),
            (_, true) => ("a page", LIST, false),
            _ => ("a response", OBJECT, false),
        };
        let request_line = format!("{} {}", request.method(), request.uri().path());
        let response = self.0.call(request);
        Box::pin(async move {
            let too_large = TooLarge { request: request_line, part, limit };
            Ok(response.await?.map(|body| LimitedBody { body, by_line, read: 0, too_large }))
        })
    }
}

/// A body that ends with an error at its limit.
struct LimitedBody<B> {
    body: B,
    /// Whether the limit is that of a line, not of the whole.
    by_line: bool,
    /// As many bytes of the whole, or of a line, were read.
    read: u64,
    too_large: TooLarge,
}

impl<B> LimitedBody<B> {
    /// Whether the limit holds with this piece.
    fn admits(&mut self, piece: &[u8]) -> bool {
        let by_line = self.by_line;
        for part in piece.split_inclusive(|byte| by_line && *byte == b'\n') {
            self.read += part.len() as u64;
            if self.read > self.too_large.limit {
                return false;
            }
            if by_line && part.ends_with(b"\n") {
                self.read = 0;
            }
        }
        true
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for LimitedBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let announced = if self.by_line { 0 } else { self.body.size_hint().lower() };
        if self.read + announced > self.too_large.limit {
            return Poll::Ready(Some(Err(self.too_large.clone().into())));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame.map(|frame| {
            let frame = frame.map_err(Into::into)?;
            let admitted = frame.data_ref().is_none_or(|data| self.admits(data));
            if admitted { Ok(frame) } else { Err(self.too_large.clone().into()) }
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(limit: u64, by_line: bool) -> LimitedBody<String> {
        let too_large = TooLarge { request: "GET /a".into(), part: "a page", limit };
        LimitedBody { body: String::new(), by_line, read: 0, too_large }
    }

    #[test]
    fn the_whole_is_limited_or_each_line() {
        let mut whole = body(6, false);
        assert!(whole.admits(b"ab\n") && whole.admits(b"cd\n") && !whole.admits(b"e"));
        let mut lines = body(3, true);
        assert!(lines.admits(b"ab\ncd\nef") && lines.admits(b"\nab\n") && lines.admits(b"abc") && !lines.admits(b"d"));
        assert!(!body(3, true).admits(b"a\nbcde\n"));
    }

    #[test]
    fn the_reason_is_found_behind_other_errors() {
        let reason = body(1, false).too_large;
        let error = kube::Error::Service(Box::new(reason.clone()));
        assert_eq!(TooLarge::of(&error), Some(&reason));
        assert_eq!(reason.to_string(), "GET /a: expected a page of at most 1 bytes, got more");
        assert_eq!(TooLarge::of(&kube::Error::Service("other".into())), None);
    }
}
