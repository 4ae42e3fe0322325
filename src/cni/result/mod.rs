//! Results of ADD, in every version's shape.

mod add_result;
mod merge;
mod prev_result;
mod read;
mod write;

pub use add_result::{AddResult, InterfaceAddress, Dns, Interface, Route};
pub use prev_result::passed_through;
