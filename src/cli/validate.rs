//! `detour validate`

use super::output::OutputArguments;
use super::subject;
use super::{CommandError, CommandOutput};
use clap::Args;
use detour_cni::inspect::validated;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  detour validate istio-cni.conf
  detour validate --bin-dir /opt/cni/bin /etc/cni/net.d/10-calico.conflist
  helm template detour manifests/chart | detour validate -
        the ConfigMap of the chart, and the definitions of networks among the objects

Nothing is changed, and neither root nor a cluster is needed. Names of groups are not looked up.
Exit codes: 0 the plugin accepts it, 1 the plugin would refuse it, 2 wrong usage or input.";

/// Check a configuration as the plugin does
///
/// FILE is a plugin's configuration or plugin list, the file of detour install --config, a node configuration,
/// or manifests (YAML or JSON).
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ValidateArguments {
    /// The file; - is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// A directory in which executables of a chain must be found. May be repeated
    #[arg(long = "bin-dir", value_name = "DIR")]
    bin_dirs: Vec<PathBuf>,
    #[command(flatten)]
    output: OutputArguments,
}

/// What is wrong with the file; exit code 1 if anything is.
pub(super) fn run(arguments: &ValidateArguments) -> Result<CommandOutput, CommandError> {
    let is_installed = |kind: &str| {
        let found = arguments.bin_dirs.iter().any(|directory| directory.join(kind).is_file());
        (!arguments.bin_dirs.is_empty()).then_some(found)
    };
    for directory in &arguments.bin_dirs {
        subject::present("--bin-dir", directory)?;
    }
    let text = subject::text(&arguments.file)?;
    let report =
        validated(&arguments.file, &text, &is_installed).map_err(|error| CommandError::Usage(error.to_string()))?;
    let answer = arguments.output.answer(&report)?;
    Ok(CommandOutput { code: if report.valid { ExitCode::SUCCESS } else { ExitCode::FAILURE }, ..answer })
}
