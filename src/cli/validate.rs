//! `detour validate`: checks configuration files as the plugin does.

use super::cluster::{check_exists, read_text};
use super::output::{CommandError, CommandOutput, OutputArguments};

use clap::Args;
use detour_cni::cni::{NODE_CONFIGURATION, NetConf};
use detour_cni::inspect::{is_program, validate_text};
use detour_cni::plugin::node;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  detour validate istio-cni.conf
  detour validate --bin-dir /opt/cni/bin /etc/cni/net.d/10-calico.conflist
  helm template detour manifests/chart --set hub=registry.example | detour validate -
        check the chart's ConfigMap and the NetworkAttachmentDefinitions

The plugin reads only JSON; manifests can also be YAML. The command changes nothing, and needs
neither root nor a cluster. On a node, its node configuration applies.

Exit codes: 0 valid, 1 the plugin would reject the file, 2 invalid arguments or input.";

/// Check a configuration as the plugin does
///
/// FILE is a plugin configuration, a configuration list, a file for `detour install --config`, a node configuration,
/// or YAML or JSON manifests that contain any of them.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ValidateArguments {
    /// File to check; - is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Directory with executables of the sub-plugin chain, beside kubernetes.cni_bin_dir; may be repeated
    #[arg(long = "bin-dir", value_name = "DIR")]
    bin_dirs: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

pub(super) fn run(arguments: &ValidateArguments) -> Result<CommandOutput, CommandError> {
    let is_installed = |conf: &NetConf, kind: &str| {
        let own = conf.kubernetes.cni_bin_dir.as_ref();
        is_program(arguments.bin_dirs.iter().chain(own).cloned(), kind)
    };
    for directory in &arguments.bin_dirs {
        check_exists("--bin-dir", directory)?;
    }
    let text = read_text(&arguments.file)?;
    // A user who can't read it validates the file alone.
    let node = node::read(NODE_CONFIGURATION, Path::new(NODE_CONFIGURATION)).ok().flatten();
    let node = node.as_ref().map(|(node, _)| node);
    let report = validate_text(&arguments.file, &text, node, &is_installed)
        .map_err(|error| CommandError::Usage(error.to_string()))?;
    arguments.output.render_verdict(&report, report.valid)
}
