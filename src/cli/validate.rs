//! `detour validate`: checks configuration files as the plugin does.

use super::cluster::{check_exists, read_text};
use super::output::{CommandError, CommandOutput, OutputArguments};

use clap::Args;
use detour_cni::inspect::validate_text;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  detour validate istio-cni.conf
  detour validate --bin-dir /opt/cni/bin /etc/cni/net.d/10-calico.conflist
  helm template detour manifests/chart | detour validate -
        check the chart's ConfigMap and the NetworkAttachmentDefinitions

The command changes nothing, and needs neither root nor a cluster. It does not resolve group names.

Exit codes: 0 valid, 1 the plugin would refuse the file, 2 invalid arguments or input.";

/// Check a configuration as the plugin does
///
/// FILE is a plugin configuration, a plugin list, a file for `detour install --config`, a node configuration,
/// or YAML or JSON manifests that contain any of them.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ValidateArguments {
    /// File to check; - is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Fail if an executable of the sub-plugin chain is in none of these directories; may be repeated
    #[arg(long = "bin-dir", value_name = "DIR")]
    bin_dirs: Vec<PathBuf>,
    #[command(flatten)]
    output: OutputArguments,
}

pub(super) fn run(arguments: &ValidateArguments) -> Result<CommandOutput, CommandError> {
    let is_installed = |kind: &str| {
        let found = arguments.bin_dirs.iter().any(|directory| directory.join(kind).is_file());
        (!arguments.bin_dirs.is_empty()).then_some(found)
    };
    for directory in &arguments.bin_dirs {
        check_exists("--bin-dir", directory)?;
    }
    let text = read_text(&arguments.file)?;
    let report =
        validate_text(&arguments.file, &text, &is_installed).map_err(|error| CommandError::Usage(error.to_string()))?;
    let output = arguments.output.render(&report)?;
    Ok(CommandOutput { code: if report.valid { ExitCode::SUCCESS } else { ExitCode::FAILURE }, ..output })
}
