//! Limits of the size of responses, so that a server that is not an API server can't exhaust the memory of this
//! process.
//!
//! The API server accepts objects of at most 1.5 MiB, the limit of etcd (`--max-request-bytes`). As JSON, an object
//! can be six times as large if all of its text needs escapes. Responses are not compressed: kube is built without its
//! feature `gzip`, so it does not offer that to the server.

use futures_util::TryFutureExt;
use futures_util::future::MapOk;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::{Request, Response};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tower::{BoxError, Layer, Service};

/// The maximum size in bytes of an object, of a page of one object, of an unpaged list, and of one event of a watch.
const MAX_OBJECT: u64 = 16 << 20;
/// The maximum size in bytes of a page of several objects. A page of ordinary objects is smaller; a larger one is
/// requested again with fewer objects.
const MAX_PAGE: u64 = 8 << 20;

/// The error for a response that exceeds its limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{request}: expected {part} of at most {limit} bytes, got more")]
pub(super) struct TooLarge {
    request: String,
    part: &'static str,
    limit: u64,
}

impl TooLarge {
    /// Returns this error if it is `error` or one of its sources.
    pub(super) fn find_in<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Self> {
        let mut errors = std::iter::successors(Some(error), |error| error.source());
        errors.find_map(|error| error.downcast_ref())
    }
}

/// Limits the size of each response of a service.
pub(super) struct LimitLayer;

impl<S> Layer<S> for LimitLayer {
    type Service = LimitService<S>;

    fn layer(&self, service: S) -> LimitService<S> {
        LimitService(service)
    }
}

/// A service whose responses are limited.
#[derive(Clone)]
pub(super) struct LimitService<S>(S);

impl<S, R, B> Service<Request<R>> for LimitService<S>
where
    S: Service<Request<R>, Response = Response<B>>,
{
    type Response = Response<LimitedBody<B>>;
    type Error = S::Error;
    type Future = MapOk<S::Future, Box<dyn FnOnce(Response<B>) -> Self::Response + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<R>) -> Self::Future {
        let limit = Limit::of(&request);
        self.0.call(request).map_ok(Box::new(|response| response.map(|body| limit.apply(body))))
    }
}

/// The limit of the response to a request.
struct Limit {
    per_line: bool,
    too_large: TooLarge,
}

impl Limit {
    fn of<B>(request: &Request<B>) -> Self {
        let value = |parameter: &str| {
            let mut pairs = request.uri().query().unwrap_or_default().split('&').map(|pair| pair.split_once('='));
            pairs.find_map(|pair| pair.filter(|(key, _)| *key == parameter).map(|(_, value)| value))
        };
        let (part, limit, per_line) = match (value("watch"), value("limit")) {
            (Some(_), _) => ("an event", MAX_OBJECT, true),
            (None, Some("1")) => ("an object", MAX_OBJECT, false),
            (None, Some(_)) => ("a page", MAX_PAGE, false),
            (None, None) => ("a response", MAX_OBJECT, false),
        };
        let request = format!("{} {}", request.method(), request.uri().path());
        Self { per_line, too_large: TooLarge { request, part, limit } }
    }

    /// Returns the response's body with this limit.
    fn apply<B>(self, body: B) -> LimitedBody<B> {
        LimitedBody { body, per_line: self.per_line, read: 0, too_large: self.too_large }
    }
}

/// A response body that fails when it exceeds its limit.
pub(super) struct LimitedBody<B> {
    body: B,
    /// Whether the limit applies to each line instead of the whole body.
    per_line: bool,
    /// The number of bytes read, of the body or of the current line.
    read: u64,
    /// The error, with the limit.
    too_large: TooLarge,
}

impl<B> LimitedBody<B> {
    /// Counts the bytes of `chunk`; returns whether they are within the limit.
    fn admits(&mut self, chunk: &[u8]) -> bool {
        let per_line = self.per_line;
        for part in chunk.split_inclusive(|byte| per_line && *byte == b'\n') {
            self.read += part.len() as u64;
            if self.read > self.too_large.limit {
                return false;
            }
            if per_line && part.ends_with(b"\n") {
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
        let announced = if self.per_line { 0 } else { self.body.size_hint().lower() };
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

    fn body(limit: u64, per_line: bool) -> LimitedBody<String> {
        let too_large = TooLarge { request: "GET /a".into(), part: "a page", limit };
        LimitedBody { body: String::new(), per_line, read: 0, too_large }
    }

    #[test]
    fn the_limit_applies_to_the_body_or_to_each_line() {
        let mut whole = body(6, false);
        assert!(whole.admits(b"ab\n") && whole.admits(b"cd\n") && !whole.admits(b"e"));
        let mut lines = body(3, true);
        assert!(lines.admits(b"ab\ncd\nef") && lines.admits(b"\nab\n") && lines.admits(b"abc") && !lines.admits(b"d"));
        assert!(!body(3, true).admits(b"a\nbcde\n"));
    }

    #[test]
    fn a_page_of_one_object_has_the_limit_of_an_object() {
        let limit = |query: &str| {
            let request = Request::get(format!("/api/v1/pods?{query}")).body(()).expect("a request");
            Limit::of(&request).too_large.limit
        };
        assert_eq!(limit("&fieldSelector=a%3Db&limit=250"), MAX_PAGE);
        assert_eq!(limit("&limit=1&continue=x"), MAX_OBJECT);
        assert_eq!(limit("&watch=true&resourceVersion=1"), MAX_OBJECT);
        assert_eq!(limit(""), MAX_OBJECT);
    }

    #[test]
    fn the_error_is_found_among_the_sources_of_another() {
        let too_large = body(1, false).too_large;
        let error = kube::Error::Service(Box::new(too_large.clone()));
        assert_eq!(TooLarge::find_in(&error), Some(&too_large));
        assert_eq!(too_large.to_string(), "GET /a: expected a page of at most 1 bytes, got more");
        assert_eq!(TooLarge::find_in(&kube::Error::Service("other".into())), None);
    }
}
