//! `detour validate`: checks configuration files as the plugin does.

use super::cluster::read_text;
use super::output::{CommandError, CommandOutput, OutputArguments};
use clap::Args;
use detour_cni::cni::{NODE_CONFIGURATION, NetConf};
use detour_cni::inspect::{is_program, validate_text};
use detour_cni::plugin::node;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  detour validate istio-cni.conf
  detour validate /etc/cni/net.d/10-calico.conflist
  helm template detour manifests/chart --set hub=registry.example | detour validate -";

/// Check a configuration as the plugin does
///
/// FILE is a plugin configuration, a configuration list, a file for `detour install --config`, a node configuration,
/// or YAML or JSON manifests with NetworkAttachmentDefinitions or the chart's ConfigMap. The plugin reads only JSON;
/// manifests can also be YAML.
///
/// The command changes nothing, and needs neither root nor a cluster. On a node, its node configuration applies.
///
/// Exit codes: 0 valid, 1 the plugin would reject the file, 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ValidateArguments {
    /// File to check; - is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    pub(super) output: OutputArguments,
}

pub(super) fn run(arguments: &ValidateArguments) -> Result<CommandOutput, CommandError> {
    let is_installed = |conf: &NetConf, kind: &str| is_program(conf.kubernetes.cni_bin_dir.iter().cloned(), kind);
    let text = read_text(&arguments.file)?;
    // A user who can't read it validates the file alone.
    let node = node::read(NODE_CONFIGURATION, Path::new(NODE_CONFIGURATION)).ok().flatten();
    let node = node.as_ref().map(|(node, _)| node);
    let report = validate_text(&arguments.file, &text, node, &is_installed)
        .map_err(|error| CommandError::usage(error.to_string()))?;
    arguments.output.render_verdict(&report, report.valid)
}
