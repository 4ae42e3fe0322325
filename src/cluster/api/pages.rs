//! The sizes of pages. A page that exceeds the limit of a response is requested again with half of the objects, down to
//! one, so that no object hides the others.

use kube::api::ListParams;

/// The number of objects of a page of ordinary size.
const PAGE: u32 = 250;

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
