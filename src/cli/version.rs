//! `detour version`

use super::output::Output;
use super::{Answer, Failure};
use clap::Args;
use detour_cni::cni::version::SUPPORTED;
use detour_cni::inspect::{Cell, Page, Sheet};
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  detour version
  detour version -o json

Exit codes: 0 printed, 1 not printed (stderr says why), 2 wrong usage or input.";

/// The version, and the CNI versions that are spoken
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    output: Output,
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
    cni_versions: Vec<&'static str>,
}

impl Sheet for Version {
    fn write(&self, page: &mut Page) {
        page.line(&[Cell::of(format!("detour {}", self.version))]);
        page.line(&[Cell::of(crate::protocols())]);
    }
}

/// What this is.
pub(super) fn run(arguments: &Arguments) -> Result<Answer, Failure> {
    arguments.output.answer(&Version { version: env!("CARGO_PKG_VERSION"), cni_versions: SUPPORTED.to_vec() })
}
