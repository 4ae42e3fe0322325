//! Documents, samples and the tools of the benchmark: they name what exists, and they are short.

mod configurations;
mod measure;
mod pages;
#[path = "../support/mod.rs"]
mod support;
