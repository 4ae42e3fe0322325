//! A target for what other plugins print.

use super::{check_error, sections};
use crate::cni::{CniCommand, version};
use crate::delegate::answer::{convert, parse};
use crate::delegate::process::ChildExit;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

/// Stdout and the end of stderr of a plugin that succeeds, fails, or is killed. A result is converted to every version;
/// a second conversion changes nothing.
pub(super) fn answer(input: &[u8]) {
    let [stdout, stderr] = sections(input);
    for status in [0, 256, 9] {
        let exit = ChildExit {
            status: ExitStatus::from_raw(status),
            stdout: stdout.to_vec(),
            stderr_tail: String::from_utf8_lossy(stderr).into_owned(),
        };
        for command in [CniCommand::Add, CniCommand::Del] {
            let result = match parse(Path::new("/opt/cni/bin/x"), command, &exit) {
                Ok(result) => result,
                Err(error) => {
                    check_error(&error);
                    continue;
                }
            };
            for version in result.iter().flat_map(|_| version::SUPPORTED) {
                match convert(result.clone().unwrap_or_default(), version) {
                    Ok(converted) => assert_eq!(convert(converted.clone(), version), Ok(converted)),
                    Err(error) => check_error(&error),
                }
            }
        }
    }
}
