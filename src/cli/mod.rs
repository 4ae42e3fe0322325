//! The command line: one subcommand a file.
//!
//! `detour completion`
//!
//! `detour version`
//!
//! Why a command has no answer.

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use detour_cni::cni::Error;
use detour_cni::cni::version::SUPPORTED;
use detour_cni::inspect::{Cell, Screen, TextReport};
use detour_cni::printable::{Text, without_userinfo};
use output::OutputArguments;
use serde::Serialize;
use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::{fmt, io};

mod agent;
mod doctor;
mod explain;
mod install;
mod output;
mod rules;
mod subject;
mod trace;
mod validate;

/// Sends a meshed pod's traffic to its Istio sidecar, and around it what must not go there.
///
/// Container runtimes and Multus run this binary as a CNI plugin: then CNI_COMMAND is set, the
/// configuration comes on stdin, and no argument is looked at.
#[derive(Debug, Parser)]
#[command(name = "detour", version, after_help = EXAMPLES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  detour explain -f pod.yaml --config istio-cni.conf    what happens to this pod's traffic, and why
  detour trace -f pod.yaml --from uid=1337 --to 10.96.0.10:53/udp
                                                        where one packet arrives, rule by rule
  detour rules -n shop web-0                            a pod's live rules beside the desired ones
  detour doctor -n shop web-0                           what is wrong with a pod or its node
  detour validate istio-cni.conf                        whether the plugin accepts a configuration
  detour install --dry-run                              what it would change on this node
  CNI_COMMAND=VERSION detour                            the version, as a runtime asks for it

Exit codes: 0 fine, 1 something is wrong, 2 wrong usage or input.";

#[derive(Debug, Subcommand)]
enum Command {
    Explain(explain::ExplainArguments),
    Trace(trace::TraceArguments),
    Rules(rules::RulesArguments),
    Doctor(Box<doctor::DoctorArguments>),
    Install(Box<install::InstallArguments>),
    Agent(Box<agent::AgentArguments>),
    Uninstall(install::UninstallArguments),
    Validate(validate::ValidateArguments),
    Version(VersionArguments),
    Completion(CompletionArguments),
}

/// What a command has to say on stdout, and how it ended.
struct CommandOutput {
    text: Text,
    code: ExitCode,
}

impl CommandOutput {
    /// All is well.
    const fn fine(text: Text) -> Self {
        Self { text, code: ExitCode::SUCCESS }
    }
}

/// Prints the help.
pub(crate) fn help() -> ExitCode {
    say(&Text::lines(&Cli::command().render_help().to_string()), ExitCode::SUCCESS)
}

/// Runs the command that the arguments ask for.
pub(crate) fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let code = ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
            // Only help and version are an answer; the exit code of an error does not depend on its text.
            return match error.print().and_then(|()| io::stdout().flush()) {
                Err(why) if !error.use_stderr() => unwritten(&why),
                _ => code,
            };
        }
    };
    let answer = match cli.command {
        Command::Explain(arguments) => explain::run(arguments),
        Command::Trace(arguments) => trace::run(arguments),
        Command::Rules(arguments) => rules::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Install(install) => return install.run(),
        Command::Agent(agent) => return agent.run(),
        Command::Uninstall(uninstall) => return uninstall.run(),
        Command::Validate(arguments) => validate::run(&arguments),
        Command::Version(arguments) => run_version(&arguments),
        Command::Completion(arguments) => run_completion(&arguments),
    };
    match answer {
        Ok(CommandOutput { text, code }) => say(&text, code),
        Err(failure) => complain(&failure, failure.code()),
    }
}

/// The exit code of a command; what kept it from its end goes to stderr.
fn ended(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        let code = error.downcast_ref().map_or(ExitCode::FAILURE, CommandError::code);
        complain(format_args!("{error:#}"), code)
    })
}

/// Writes the answer to stdout; the exit code is `code` where that works.
fn say(text: &Text, code: ExitCode) -> ExitCode {
    crate::write(io::stdout(), text).map_or_else(|why| unwritten(&why), |()| code)
}

/// The answer could not be written. A reader that has seen enough, such as `head`, is no reason for a message.
fn unwritten(why: &io::Error) -> ExitCode {
    match why.kind() {
        ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => complain(format_args!("write the output: stdout: {why}"), ExitCode::FAILURE),
    }
}

/// Prints why a command failed; users share such messages.
fn complain(why: impl Display, code: ExitCode) -> ExitCode {
    crate::print(io::stderr(), &Text::message(&without_userinfo(&format!("detour: {why}"))), code)
}

const COMPLETION_EXAMPLES: &str = "\
Examples:
  source <(detour completion bash)
  detour completion zsh > ~/.zfunc/_detour

Exit codes: 0 printed, 1 not printed (stderr says why), 2 wrong usage or input.";

/// A script that completes commands and options in a shell
#[derive(Debug, Args)]
#[command(after_help = COMPLETION_EXAMPLES)]
struct CompletionArguments {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// The script.
fn run_completion(arguments: &CompletionArguments) -> Result<CommandOutput, CommandError> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "detour", &mut script);
    Ok(CommandOutput::fine(Text::lines(&String::from_utf8_lossy(&script))))
}

const VERSION_EXAMPLES: &str = "\
Examples:
  detour version
  detour version -o json

Exit codes: 0 printed, 1 not printed (stderr says why), 2 wrong usage or input.";

/// The version, and the CNI versions that are spoken
#[derive(Debug, Args)]
#[command(after_help = VERSION_EXAMPLES)]
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

/// What this is.
fn run_version(arguments: &VersionArguments) -> Result<CommandOutput, CommandError> {
    arguments.output.answer(&VersionReport { version: env!("CARGO_PKG_VERSION"), cni_versions: SUPPORTED.to_vec() })
}

/// Either the arguments, or what they speak of.
#[derive(Debug)]
enum CommandError {
    /// The arguments can't be used.
    Usage(String),
    /// A file or an object that the arguments name is missing, or can't be understood.
    Input(Error),
    /// Something is wrong with what was asked about.
    Wrong(Error),
}

impl CommandError {
    /// 2 for wrong arguments and wrong input, 1 for the rest.
    fn code(&self) -> ExitCode {
        match self {
            Self::Usage(_) | Self::Input(_) => ExitCode::from(2),
            Self::Wrong(_) => ExitCode::FAILURE,
        }
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        Self::Wrong(error)
    }
}

impl Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(what) => write!(f, "{what}; see --help"),
            Self::Input(error) | Self::Wrong(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CommandError {}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is wider is wrapped: prose becomes ragged, and a command that is broken in two can't be copied.
    #[test]
    fn examples_fit_into_the_help() {
        let command = Cli::command();
        for own in command.get_subcommands().chain([&command]) {
            let help = own.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in help.lines() {
                assert!(line.chars().count() <= 100, "{}: {line}", own.get_name());
            }
        }
    }

    #[test]
    fn the_definitions_hold_together_and_every_command_has_examples() {
        let command = Cli::command();
        command.clone().debug_assert();
        for own in command.get_subcommands() {
            let help = own.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(&format!("detour {}", own.get_name())), "{}: {help}", own.get_name());
            let codes = help.contains("Exit codes: 0 ") && help.contains("2 wrong usage or input");
            assert!(codes, "{}: {help}", own.get_name());
        }
    }
}
