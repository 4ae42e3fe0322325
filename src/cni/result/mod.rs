//! Results of ADD: parsed from and written in the format of each protocol version.

mod add_result;
mod read;
mod write;

pub use add_result::{AddResult, Dns, Interface, InterfaceAddress, Route};
pub use read::passed_through;
