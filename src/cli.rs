//! The command line.

mod agent;
mod install;
mod uninstall;

use clap::{Parser, Subcommand};
use std::io;
use std::process::ExitCode;

/// Sends a meshed pod's traffic to its Istio sidecar, and around it what must not go there.
///
/// Container runtimes and Multus run this binary as a CNI plugin: then CNI_COMMAND is set, the
/// configuration comes on stdin, and no argument is looked at.
#[derive(Debug, Parser)]
#[command(name = "detour", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  detour version                     what this is, and which CNI versions it speaks
  detour install --dry-run           what it would change on this node to be called for each pod
  CNI_COMMAND=VERSION detour         the same, as a runtime asks for it

Exit codes: 0 fine, 1 something is wrong, 2 wrong usage.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the version, and the CNI versions that are spoken.
    Version,
    /// Put the plugin on a node: program, kubeconfig and configuration.
    Install(Box<install::Install>),
    /// Put the plugin on a node and keep it there.
    Agent(Box<agent::Agent>),
    /// Take away what `install` put on a node, as far as nobody changed it since.
    Uninstall(uninstall::Uninstall),
}

/// Runs the command that the arguments ask for.
pub(crate) fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Where the help can't be written, the exit code still tells.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match cli.command {
        Command::Version => {
            let text = format!("detour {}\n{}", env!("CARGO_PKG_VERSION"), crate::protocols());
            crate::print(io::stdout(), text, ExitCode::SUCCESS)
        }
        Command::Install(install) => install.run(),
        Command::Agent(agent) => agent.run(),
        Command::Uninstall(uninstall) => uninstall.run(),
    }
}

/// The exit code of a command; what kept it from its end goes to stderr.
fn ended(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| crate::print(io::stderr(), format!("detour: {error:#}"), ExitCode::FAILURE))
}
