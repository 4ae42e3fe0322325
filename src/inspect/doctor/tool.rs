//! A program that is run for what it prints, and not for long.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

/// How long it may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How much of what it prints is looked at.
const MOST: u64 = 4 << 20;

/// What it prints to stdout.
///
/// # Errors
/// Why it prints nothing: it can't be started, fails, or takes too long.
pub(super) fn output(command: &mut Command) -> Result<String, String> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| format!("can't be started: {error}"))?;
    let (to, text) = sync_channel(1);
    let stdout = child.stdout.take();
    let read = move || {
        let mut text = Vec::new();
        let read = stdout.map(|pipe| pipe.take(MOST).read_to_end(&mut text));
        // Nobody may wait any more.
        let _ = to.send(read.map(|_| text).unwrap_or_default());
    };
    if let Err(error) = thread::Builder::new().spawn(read) {
        let _ = child.kill().and_then(|()| child.wait());
        return Err(format!("a thread can't be started: {error}"));
    }
    let text = text.recv_timeout(PATIENCE);
    if text.is_err() {
        // One that has ended by itself meanwhile is as good.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| format!("its end can't be waited for: {error}"))?;
    match text {
        Err(_) => Err(format!("took more than {} s", PATIENCE.as_secs())),
        Ok(_) if !status.success() => Err(format!("failed ({status})")),
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_prints_or_why_not() {
        assert_eq!(output(Command::new("echo").arg("a b")), Ok("a b\n".to_owned()));
        assert!(output(&mut Command::new("false")).is_err_and(|why| why.starts_with("failed (")));
        assert!(output(&mut Command::new("/no/such/program")).is_err_and(|why| why.starts_with("can't be started")));
    }
}
