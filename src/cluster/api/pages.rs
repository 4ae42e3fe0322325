//! Lists, page by page, for the agent and for commands. A page that exceeds the limit of a response is requested again
//! with half of the objects, down to one, so that no object hides the others. kube's lists and its watcher have pages of
//! a fixed size, and one object that is too large, or a few large ones, would end them.

use super::request::{ApiRequest, PAGE, Page};
use super::server::Api;
use crate::cni::{Code, Error};
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// The limit for the pages of a command's list, so that a server can't keep the command busy forever.
const MAX_PAGES: usize = 1000;

/// The number of objects of the next page.
#[derive(Debug, Clone, Copy)]
struct PageSize(u32);

impl PageSize {
    /// Returns the size of the first page.
    const fn first() -> Self {
        Self(PAGE)
    }

    /// Returns the number of objects.
    const fn get(self) -> u32 {
        self.0
    }

    /// Halves the page after one that was too large.
    const fn shrink(&mut self) {
        self.0 = if self.0 > 1 { self.0 / 2 } else { 1 };
    }

    /// Doubles the page after one that was not too large.
    fn grow(&mut self) {
        self.0 = (self.0 * 2).min(PAGE);
    }
}

/// `metadata` of a list (apimachinery, `ListMeta`).
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ListMetadata {
    resource_version: String,
    r#continue: String,
}

/// What a page was.
pub(super) enum PageRead {
    /// Larger than its limit.
    TooLarge,
    /// Read, with the metadata of its list.
    Done(ListMetadata),
}

/// Calls `read` for one page of a list after the other. Returns the version of the list; `None` if it has more than
/// `max` pages.
///
/// # Errors
/// That of `read`. A page of one object that is too large is its error, too.
pub(super) async fn read_pages<E>(
    max: usize,
    mut read: impl AsyncFnMut(Page<'_>) -> Result<PageRead, E>,
) -> Result<Option<String>, E> {
    let (mut continued, mut size) = (None::<String>, PageSize::first());
    for _ in 0..max {
        match read(Page { size: size.get(), continued: continued.as_deref() }).await? {
            PageRead::TooLarge => size.shrink(),
            PageRead::Done(list) if list.r#continue.is_empty() => return Ok(Some(list.resource_version)),
            PageRead::Done(list) => {
                size.grow();
                continued = Some(list.r#continue);
            }
        }
    }
    Ok(None)
}

impl Api {
    /// Returns what `take` takes from each object of a list, with one attempt per page.
    ///
    /// # Errors
    /// A request failed, an object is too large, or the list has more pages than the limit.
    pub(super) fn list<T>(
        &self,
        timeout: Duration,
        request: impl Fn(Page<'_>) -> Result<ApiRequest, Error>,
        take: impl Fn(Value) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let session = self.session()?;
        let (mut taken, mut subject) = (Vec::new(), String::new());
        let read = async |page: Page<'_>| {
            let request = request(page)?;
            let received = self.call(session, &request).get_page(timeout, page.can_shrink()).await?;
            let Some(mut list) = received else { return Ok(PageRead::TooLarge) };
            if let Value::Array(objects) = list["items"].take() {
                taken.extend(objects.into_iter().filter_map(&take));
            }
            subject = request.subject;
            Ok(PageRead::Done(ListMetadata::deserialize(&list["metadata"]).unwrap_or_default()))
        };
        match session.run(read_pages(MAX_PAGES, read))? {
            Some(_) => Ok(taken),
            None => {
                let msg =
                    format!("{subject}: expected at most {MAX_PAGES} pages, got more; select one namespace or node");
                Err(Error::new(Code::TryAgain, msg))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_shrink_to_one_object_and_grow_again() {
        let mut size = PageSize::first();
        let mut sizes = vec![size.get()];
        while size.get() > 1 {
            size.shrink();
            sizes.push(size.get());
        }
        assert_eq!(sizes, [250, 125, 62, 31, 15, 7, 3, 1]);
        for _ in 0..9 {
            size.grow();
        }
        assert_eq!(size.get(), PAGE);
    }
}
