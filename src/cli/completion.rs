//! `detour completion`

use super::{Answer, Cli, Failure};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use detour_cni::printable::Text;

const EXAMPLES: &str = "\
Examples:
  source <(detour completion bash)
  detour completion zsh > ~/.zfunc/_detour

Exit codes: 0 printed, 1 not printed (stderr says why), 2 wrong usage or input.";

/// A script that completes commands and options in a shell
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// The script.
pub(super) fn run(arguments: &Arguments) -> Result<Answer, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "detour", &mut script);
    Ok(Answer::fine(Text::lines(&String::from_utf8_lossy(&script))))
}
