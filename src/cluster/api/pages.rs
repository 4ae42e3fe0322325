//! Lists page by page. A page that exceeds the limit of a response is requested again with half of the objects, down
//! to one, so that no object hides the others.

use super::request::ApiRequest;
use super::server::Api;
use crate::cni::{Code, Error};
use kube::api::ListParams;
use serde_json::Value;
use std::time::Duration;

/// The number of objects of a page of ordinary size.
const PAGE: u32 = 250;
/// The limit for the pages of a list, so that a server can't keep a command busy forever.
const MAX_PAGES: usize = 1000;

/// The number of objects of the next page.
#[derive(Debug, Clone, Copy)]
pub(super) struct PageSize(u32);

impl PageSize {
    /// Returns the size of the first page.
    pub(super) const fn first() -> Self {
        Self(PAGE)
    }

    /// Returns the number of objects.
    pub(super) const fn get(self) -> u32 {
        self.0
    }

    /// Halves the page after one that was too large. Returns false if it has one object already.
    pub(super) const fn shrink(&mut self) -> bool {
        let can_shrink = self.0 > 1;
        self.0 = if can_shrink { self.0 / 2 } else { 1 };
        can_shrink
    }

    /// Doubles the page after one that was not too large.
    pub(super) fn grow(&mut self) {
        self.0 = (self.0 * 2).min(PAGE);
    }
}

/// A page: the version of the list, and how it continues.
#[derive(Debug, Clone, Copy)]
pub(super) struct Page<'a> {
    /// The number of objects.
    pub(super) size: u32,
    /// The token of the page before; `None` for the first page.
    pub(super) continued: Option<&'a str>,
}

impl Page<'_> {
    /// Adds this page to the parameters of a list.
    pub(super) fn of(self, params: ListParams) -> ListParams {
        ListParams { limit: Some(self.size), continue_token: self.continued.map(str::to_owned), ..params }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_shrink_to_one_object_and_grow_again() {
        let mut size = PageSize::first();
        let mut sizes = vec![size.get()];
        while size.shrink() {
            sizes.push(size.get());
        }
        assert_eq!(sizes, [250, 125, 62, 31, 15, 7, 3, 1]);
        for _ in 0..9 {
            size.grow();
        }
        assert_eq!(size.get(), PAGE);
    }
}
