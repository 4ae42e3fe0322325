//! Completion of arguments. kubectl runs `kubectl_complete-detour` with the words of the command line and reads one
//! candidate per line, and then a directive (kubectl, "Extend kubectl with plugins"; cobra, `ShellCompDirective`).

use crate::cli::output::CommandOutput;
use clap::Command;
use clap_complete::Shell;
use detour_cni::printable::Text;

pub(super) const EXAMPLES: &str = "\
Examples:
  ln -s kubectl-detour /usr/local/bin/kubectl_complete-detour
        let kubectl complete the arguments of kubectl detour
  source <(kubectl-detour completion bash)
        complete the arguments of kubectl-detour itself

Exit codes: 0 success, 1 the output can't be written, 2 invalid arguments or input.";

/// The shell completes file names.
const FILES: &str = ":0";
/// The shell completes nothing else.
const NO_FILES: &str = ":4";
/// Options with the name of a file.
const FILE_OPTIONS: [&str; 6] = ["-f", "--file", "--config", "--kubeconfig", "--namespace-file", "--definitions"];

/// Returns the candidates for the last of `words`: the names of commands, or the options of the command before it.
pub(super) fn candidates(root: &Command, words: &[String]) -> Text {
    let (before, last) = words.split_last().map_or((&[][..], ""), |(last, before)| (before, last.as_str()));
    let command = before.iter().find_map(|word| root.find_subcommand(word));
    let mut found: Vec<String> = match command {
        None => root.get_subcommands().map(|own| own.get_name().to_owned()).collect(),
        Some(command) => {
            let shown = command.get_arguments().chain(root.get_arguments()).filter(|own| !own.is_hide_set());
            shown.filter_map(|own| own.get_long()).map(|long| format!("--{long}")).collect()
        }
    };
    found.retain(|candidate| candidate.starts_with(last) && (command.is_none() || last.starts_with('-')));
    found.sort();
    found.dedup();
    let names_file = before.last().is_some_and(|word| FILE_OPTIONS.contains(&word.as_str()));
    found.push(if names_file { FILES } else { NO_FILES }.to_owned());
    Text::lines(&found.join("\n"))
}

/// Returns the completion script of `HOST-detour` for a shell.
pub(super) fn script(host: &str, shell: Shell) -> CommandOutput {
    let mut script = Vec::new();
    let name = format!("{host}-detour");
    clap_complete::generate(shell, &mut super::command(host), name, &mut script);
    CommandOutput::success(Text::lines(&String::from_utf8_lossy(&script)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_options_are_completed() {
        let of = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            candidates(&super::super::command("kubectl"), &words).as_str().to_owned()
        };
        assert_eq!(of(&["ex"]), "explain\n:4");
        assert!(of(&[""]).starts_with("audit\ncheck\n"));
        assert_eq!(of(&["rules", "--al"]), "--all\n:4");
        assert_eq!(of(&["rules", "--pi"]), ":4");
        assert_eq!(of(&["rules", "we"]), ":4");
        assert_eq!(of(&["explain", "-f", ""]), ":0");
        assert!(of(&["check", "--con"]).contains("--context\n"));
    }
}
