//! The elements of the sets of excluded containers, in the native table `detour-containers`: one element per running
//! excluded container, with its cgroup ID as the key and its name and ID as the comment.

use crate::cni::{Code, Error};
use crate::policy::ContainerScope;

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerElement {
    /// The set that has the element.
    pub scope: ContainerScope,
    /// The ID of the container's control group.
    pub cgroup: u64,
    /// The comment: the container's name and the beginning of its ID ([`ContainerElement::new`]); `None` if the
    /// comment is missing or has another form.
    pub container: Option<ContainerLabel>,
}

/// The container of an element.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ContainerLabel {
    /// The container's name.
    pub name: String,
    /// The first [`ContainerLabel::ID_LENGTH`] characters of the container's ID.
    pub id: String,
}

impl ContainerLabel {
    /// The number of characters of a container's ID in a comment, which the kernel limits to 128 bytes.
    pub const ID_LENGTH: usize = 16;
}

/// Lists the elements in the calling thread's network namespace; none if there is no such table.
///
/// # Errors
/// The kernel refuses, or there are too many elements.
pub fn container_elements() -> Result<Vec<ContainerElement>, Error> {
    Err(Error::new(Code::Internal, "not implemented"))
}

/// Removes and adds elements in one transaction in the calling thread's network namespace. Elements that are already
/// gone or present are no error.
///
/// # Errors
/// The kernel refuses, or a set is missing.
pub fn change_container_elements(_remove: &[ContainerElement], _add: &[ContainerElement]) -> Result<(), Error> {
    Err(Error::new(Code::Internal, "not implemented"))
}
