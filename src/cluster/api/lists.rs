//! Lists of the command line, page by page.

use super::pages::{Page, PageSize};
use super::request::ApiRequest;
use super::server::Api;
use crate::cni::{Code, Error};
use serde_json::Value;
use std::time::Duration;

/// The limit for the pages of a list, so that a server can't keep a command busy forever.
const MAX_PAGES: usize = 1000;

impl Api {
    /// Returns what `read` takes from each object of a list, with one attempt per page.
    ///
    /// # Errors
    /// A request failed, an object is too large, or the list has more pages than the limit.
    pub(super) fn list<T>(
        &self,
        timeout: Duration,
        request: impl Fn(Page<'_>) -> Result<ApiRequest, Error>,
        read: impl Fn(Value) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let session = self.session()?;
        let (mut read_objects, mut continued, mut size) = (Vec::new(), None::<String>, PageSize::first());
        let mut subject = String::new();
        for _ in 0..MAX_PAGES {
            let request = request(Page { size: size.get(), continued: continued.as_deref() })?;
            let page = session.run(self.call(session, &request).get_page(timeout, size.get() > 1))?;
            let Some(mut list) = page else {
                size.shrink();
                continue;
            };
            size.grow();
            if let Value::Array(objects) = list["items"].take() {
                read_objects.extend(objects.into_iter().filter_map(&read));
            }
            continued = list["metadata"]["continue"].as_str().filter(|token| !token.is_empty()).map(str::to_owned);
            if continued.is_none() {
                return Ok(read_objects);
            }
            subject = request.subject;
        }
        let msg = format!("{subject}: expected at most {MAX_PAGES} pages, got more; select one namespace or node");
        Err(Error::new(Code::TryAgain, msg))
    }
}
