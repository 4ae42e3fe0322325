//! Results of ADD, in every version's shape.

mod add_result;
mod merge;
mod passed_through;
mod read;
mod write;

pub use add_result::{AddResult, Address, Dns, Interface, Route};
pub use passed_through::passed_through;
