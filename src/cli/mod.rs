//! The command line: its subcommands; `validate`, `version` and `completion` are here.

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use cluster::read_text;
use detour_cni::cni::version::SUPPORTED;
use detour_cni::cni::{NODE_CONFIGURATION, NetConf};
use detour_cni::inspect::{Cell, Screen, TextReport, is_program, validate_text};
use detour_cni::plugin::node;
use detour_cni::printable::{Text, without_secrets};
use output::{CommandError, CommandOutput, OutputArguments};
use serde::Serialize;
use std::fmt::Display;
use std::io;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

mod agent;
mod cluster;
mod doctor;
mod explain;
mod install;
mod kubectl;
mod output;
mod rules;
mod subject;

pub(crate) use kubectl::run_as_plugin_of_kubectl;

/// Redirect the traffic of meshed pods to their Istio sidecars, and let excluded traffic bypass them
///
/// Container runtimes and Multus run this binary as a CNI plugin: they set CNI_COMMAND and write the
/// configuration to stdin. The binary then ignores all arguments.
///
/// Exit codes: 0 success, 1 failure or problem found, 2 invalid arguments or input.
#[derive(Debug, Parser)]
#[command(name = "detour", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  detour explain -f pod.yaml --config FILE              show what happens to the pod's traffic
  detour trace -f pod.yaml --config FILE --from container=vault-agent-init --to 10.96.0.10:53/udp
                                                        follow one packet through the rules
  detour doctor -n shop web-0                           find the cause of a problem with a pod
  detour install --dry-run --kubeconfig FILE            show what would change on this node
  CNI_COMMAND=VERSION detour                            print the CNI versions, as runtimes do";

#[derive(Debug, Subcommand)]
enum Command {
    Explain(explain::ExplainArguments),
    Trace(Box<explain::TraceArguments>),
    Rules(rules::RulesArguments),
    Doctor(Box<doctor::DoctorArguments>),
    Audit(Box<doctor::AuditArguments>),
    Install(Box<install::InstallArguments>),
    Agent(Box<agent::AgentArguments>),
    Uninstall(install::UninstallArguments),
    Validate(ValidateArguments),
    Version(VersionArguments),
    Completion(CompletionArguments),
}

/// Prints the help to stdout.
pub(crate) fn help() -> ExitCode {
    print_output(&Text::lines(&Cli::command().render_help().to_string()), ExitCode::SUCCESS)
}

/// Parses the arguments of the process and runs the command.
pub(crate) fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return print_usage(&error),
    };
    let (output, result) = match cli.command {
        Command::Explain(arguments) => (Some(arguments.output), explain::run_explain(&arguments)),
        Command::Trace(arguments) => (Some(arguments.output), explain::run_trace(&arguments)),
        Command::Rules(arguments) => (Some(arguments.output), rules::run(&arguments)),
        Command::Doctor(arguments) => (Some(arguments.output), doctor::run(&arguments)),
        Command::Audit(arguments) => (Some(arguments.output), doctor::run_audit(&arguments)),
        Command::Validate(arguments) => (Some(arguments.output), run_validate(&arguments)),
        Command::Version(arguments) => (Some(arguments.output), run_version(&arguments)),
        Command::Install(install) => (None, install.run().map_err(CommandError::from)),
        Command::Uninstall(uninstall) => (None, uninstall.run().map_err(CommandError::from)),
        Command::Completion(arguments) => (None, Ok(run_completion(&arguments))),
        Command::Agent(agent) => match agent.run() {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => (None, Err(error.into())),
        },
    };
    print_result(output, result)
}

/// Prints clap's error, which can also be the help or the version. An error quotes arguments: all lines but the first are
/// indented, so that no part of an argument can look like a separate message.
fn print_usage(error: &clap::Error) -> ExitCode {
    let (text, code) = (error.render().to_string(), ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2)));
    // Help and version go to stdout: failing to write them is a failure. The exit code of a usage error
    // does not depend on whether its text could be written.
    match error.use_stderr() {
        false => print_output(&Text::lines(&text), code),
        true => crate::print(io::stderr(), &Text::message(&text), code),
    }
}

/// Prints the output of a command, or its error, which a report in JSON or YAML has, too.
fn print_result(output: Option<OutputArguments>, result: Result<CommandOutput, CommandError>) -> ExitCode {
    match result {
        Ok(CommandOutput { text, code }) => print_output(&text, code),
        Err(error) => {
            if let Some(text) = output.and_then(|output| output.render_error(&error)) {
                // The command has failed anyway.
                print_output(&text, ExitCode::SUCCESS);
            }
            print_error(&error, ExitCode::from(error.code))
        }
    }
}

/// Writes `text` to stdout and returns `code`, or 1 if stdout can't be written.
fn print_output(text: &Text, code: ExitCode) -> ExitCode {
    match crate::write(io::stdout(), text) {
        Ok(()) => code,
        // The reader closed the pipe early, as `head` does.
        Err(why) if why.kind() == ErrorKind::BrokenPipe => ExitCode::FAILURE,
        Err(why) => print_error(format_args!("can't write the output: stdout: {why}"), ExitCode::FAILURE),
    }
}

/// Prints an error to stderr, and returns `code`.
fn print_error(message: impl Display, code: ExitCode) -> ExitCode {
    print_message("error", message);
    code
}

/// Prints a message of this kind to stderr, without credentials in URLs because users share such messages.
fn print_message(kind: &str, message: impl Display) {
    crate::print(io::stderr(), &Text::message(&without_secrets(&format!("{kind}: {message}"))), ExitCode::SUCCESS);
}

const VALIDATE_EXAMPLES: &str = "\
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
#[command(after_help = VALIDATE_EXAMPLES)]
struct ValidateArguments {
    /// File to check; - is stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Directory with executables of the sub-plugin chain, beside kubernetes.cni_bin_dir; may be repeated
    #[arg(long = "bin-dir", value_name = "DIR")]
    bin_dirs: Vec<PathBuf>,
    #[command(flatten)]
    output: OutputArguments,
}

fn run_validate(arguments: &ValidateArguments) -> Result<CommandOutput, CommandError> {
    let is_installed = |conf: &NetConf, kind: &str| {
        is_program(arguments.bin_dirs.iter().chain(&conf.kubernetes.cni_bin_dir).cloned(), kind)
    };
    for directory in &arguments.bin_dirs {
        let failed = |why| CommandError::usage(format!("--bin-dir {}: {why}", directory.display()));
        std::fs::metadata(directory).map_err(failed)?;
    }
    let text = read_text(&arguments.file)?;
    // A user who can't read it validates the file alone.
    let node = node::read(NODE_CONFIGURATION, Path::new(NODE_CONFIGURATION)).ok().flatten();
    let node = node.as_ref().map(|(node, _)| node);
    let report = validate_text(&arguments.file, &text, node, &is_installed)
        .map_err(|error| CommandError::usage(error.to_string()))?;
    arguments.output.render_verdict(&report, report.valid)
}

/// Print a shell completion script
///
/// Exit codes: 0 success, 1 the output can't be written, 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  source <(detour completion bash)")]
struct CompletionArguments {
    /// Generate the script for this shell
    #[arg(value_enum)]
    shell: Shell,
}

fn run_completion(arguments: &CompletionArguments) -> CommandOutput {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "detour", &mut script);
    CommandOutput { text: Text::lines(&String::from_utf8_lossy(&script)), code: ExitCode::SUCCESS }
}

/// Print the version of detour and the CNI versions that it supports
///
/// Exit codes: 0 success, 1 the output can't be written, 2 invalid arguments or input.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  detour version -o json")]
struct VersionArguments {
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

fn run_version(arguments: &VersionArguments) -> Result<CommandOutput, CommandError> {
    let report = VersionReport { version: env!("CARGO_PKG_VERSION"), cni_versions: SUPPORTED.to_vec() };
    arguments.output.render_verdict(&report, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn help_footer(command: &clap::Command) -> String {
        command.get_after_help().map(ToString::to_string).unwrap_or_default()
    }

    /// clap wraps wider lines, and a wrapped command can't be copied.
    #[test]
    fn help_footers_fit_into_100_columns() {
        let command = Cli::command();
        for own in command.get_subcommands().chain([&command]) {
            for line in help_footer(own).lines() {
                assert!(line.chars().count() <= 100, "{}: {line}", own.get_name());
            }
        }
    }

    #[test]
    fn every_command_has_a_summary_examples_and_exit_codes() {
        let command = Cli::command();
        command.clone().debug_assert();
        for own in command.get_subcommands() {
            let (name, footer) = (own.get_name(), help_footer(own));
            assert!(own.get_about().is_some(), "{name}");
            assert!(
                footer.starts_with("Examples:\n") && footer.contains(&format!("detour {name}")),
                "{name}: {footer}"
            );
            let help = own.clone().render_long_help().to_string();
            let codes = help.rsplit_once("\n\nExit codes: 0 ").map(|(_, codes)| codes).unwrap_or_default();
            let codes = codes.replace('\n', " ");
            assert!(codes.contains(", 1 ") && codes.contains(", 2 invalid arguments or input."), "{name}: {footer}");
        }
    }
}
