//! The token of a service account in a file that the kubelet replaces. kube reads such files again, too, but rejects a
//! line break at the end, which `kubectl create token` writes.

use crate::trusted_file;
use hyper::Request;
use hyper::header::{AUTHORIZATION, HeaderValue};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tower::{Layer, Service};

/// How often the file is read again.
const RELOAD_INTERVAL: Duration = Duration::from_secs(50);
/// The maximum size of a token file: a token is part of a request's header, which servers limit.
pub(super) const MAX_TOKEN: u64 = 64 << 10;

/// Adds the token to each request of a service.
#[derive(Clone)]
pub(super) struct TokenLayer {
    file: PathBuf,
    last: Arc<Mutex<Option<(HeaderValue, Instant)>>>,
}

impl TokenLayer {
    pub(super) fn new(file: PathBuf) -> Self {
        Self { file, last: Arc::default() }
    }

    /// Returns the header. The last token remains in use while the file can't be read, as in client-go (`transport`,
    /// `cachingTokenSource`).
    fn authorization(&self) -> Option<HeaderValue> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(_, read)| read.elapsed() >= RELOAD_INTERVAL) {
            let value = read(&self.file).or_else(|| last.take().map(|(value, _)| value));
            *last = value.map(|value| (value, Instant::now()));
        }
        last.as_ref().map(|(value, _)| value.clone())
    }
}

fn read(file: &Path) -> Option<HeaderValue> {
    let text = String::from_utf8(trusted_file::read(file, MAX_TOKEN).ok()?).ok()?;
    check_token(text.trim()).ok()?;
    let mut value = HeaderValue::try_from(format!("Bearer {}", text.trim())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

impl<S> Layer<S> for TokenLayer {
    type Service = TokenService<S>;

    fn layer(&self, service: S) -> TokenService<S> {
        TokenService { service, token: self.clone() }
    }
}

/// A service whose requests have the token.
pub(super) struct TokenService<S> {
    service: S,
    token: TokenLayer,
}

impl<B, S: Service<Request<B>>> Service<Request<B>> for TokenService<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        if let Some(value) = self.token.authorization() {
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        self.service.call(request)
    }
}

/// Checks that a token can be part of a header.
pub(super) fn check_token(token: &str) -> Result<(), &'static str> {
    let is_valid = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    if is_valid { Ok(()) } else { Err("invalid token: expected visible ASCII characters") }
}
