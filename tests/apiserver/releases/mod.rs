//! Releases of the chart, installed with the real helm: upgrades, several releases in one cluster, and
//! NetworkAttachmentDefinitions that other owners have.

mod documented;
pub(crate) mod helm;
mod hook;
mod inventory;
mod notes;
mod ownership;
mod upgrade;
