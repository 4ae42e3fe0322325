//! Releases of the chart, installed with the real helm: upgrades, several releases in one cluster, and
//! NetworkAttachmentDefinitions that other owners have.

mod documented;
mod helm;
mod hook;
mod inventory;
mod ownership;
mod side_by_side;
mod upgrade;
