//! `detour version`

use super::output::OutputArguments;
use super::{CommandOutput, CommandError};
use clap::Args;
use detour_cni::cni::version::SUPPORTED;
use detour_cni::inspect::{Cell, Screen, TextReport};
use serde::Serialize;

const VERSION_EXAMPLES: &str = "\
Examples:
  detour version
  detour version -o json

Exit codes: 0 printed, 1 not printed (stderr says why), 2 wrong usage or input.";

/// The version, and the CNI versions that are spoken
#[derive(Debug, Args)]
#[command(after_help = VERSION_EXAMPLES)]
pub(super) struct VersionArguments {
    #[command(flatten)]
    output: OutputArguments,
}

#[derive(Serialize)]
struct VersionReport {
    version: &'static str,
    cni_versions: Vec<&'static str>,
}

impl TextReport for VersionReport {
    fn write(&self, page: &mut Screen) {
        page.line(&[Cell::of(format!("detour {}", self.version))]);
        page.line(&[Cell::of(crate::protocols())]);
    }
}

/// What this is.
pub(super) fn run_version(arguments: &VersionArguments) -> Result<CommandOutput, CommandError> {
    arguments.output.answer(&VersionReport { version: env!("CARGO_PKG_VERSION"), cni_versions: SUPPORTED.to_vec() })
}
