//! The command line: one subcommand a file.

mod agent;
mod completion;
mod doctor;
mod explain;
mod failure;
mod install;
mod live;
mod output;
mod repair;
mod rules;
mod subject;
mod trace;
mod uninstall;
mod validate;
mod version;

use clap::{CommandFactory, Parser, Subcommand};
use detour_cni::printable::{Text, without_userinfo};
use failure::Failure;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

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
    Explain(explain::Arguments),
    Trace(trace::Arguments),
    Rules(rules::Arguments),
    Doctor(Box<doctor::Arguments>),
    Install(Box<install::Install>),
    Agent(Box<agent::Agent>),
    Uninstall(uninstall::Uninstall),
    Validate(validate::Arguments),
    Version(version::Arguments),
    Completion(completion::Arguments),
}

/// What a command has to say on stdout, and how it ended.
struct Answer {
    text: Text,
    code: ExitCode,
}

impl Answer {
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
        Command::Version(arguments) => version::run(&arguments),
        Command::Completion(arguments) => completion::run(&arguments),
    };
    match answer {
        Ok(Answer { text, code }) => say(&text, code),
        Err(failure) => complain(&failure, failure.code()),
    }
}

/// The exit code of a command; what kept it from its end goes to stderr.
fn ended(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        let code = error.downcast_ref().map_or(ExitCode::FAILURE, Failure::code);
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
