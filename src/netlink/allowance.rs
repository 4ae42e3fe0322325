//! How much is read of what a network namespace holds: a process with `CAP_NET_ADMIN` in it decides that.

use nix::errno::Errno;
use std::fmt::{self, Display, Formatter};

/// The error of a dump that returns more than is allowed.
pub const TOO_MANY: Errno = Errno::E2BIG;

/// How much the dumps of a socket may return, all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Messages; each is about one object.
    pub objects: usize,
    /// Bytes.
    pub bytes: usize,
}

impl Allowance {
    /// Enough for any network namespace that is not meant to be costly. The kernel walks its lists from the
    /// start for each 32 KiB of a dump, so that the cost of more is quadratic.
    pub const USUAL: Self = Self { objects: 20_000, bytes: 16 << 20 };
    /// For what the kernel limits itself.
    pub const UNLIMITED: Self = Self { objects: usize::MAX, bytes: usize::MAX };

    /// What is left after this many objects and bytes; `None` if they are more.
    pub(super) fn less(self, objects: usize, bytes: usize) -> Option<Self> {
        Some(Self { objects: self.objects.checked_sub(objects)?, bytes: self.bytes.checked_sub(bytes)? })
    }
}

impl Display for Allowance {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} objects and {} MiB", self.objects, self.bytes >> 20)
    }
}
