//! Runs programs of this machine for their output: `journalctl`, the installed program and `kubectl`.

use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// Runs a program until `timeout`, and reads at most `limit` bytes and one more of each stream. If its output was cut, it
/// may have ended with SIGPIPE.
///
/// # Errors
/// The program can't be started, its output can't be read, or it does not end in time.
pub fn run_program(command: &mut Command, limit: u64, timeout: Duration) -> Result<Output, String> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|why| format!("can't start the program: {why}"))?;
    let (sender, receiver) = channel();
    let pipes: [Option<Box<dyn Read + Send>>; 2] =
        [child.stdout.take().map(|pipe| Box::new(pipe) as _), child.stderr.take().map(|pipe| Box::new(pipe) as _)];
    for (index, pipe) in pipes.into_iter().enumerate() {
        let sender = sender.clone();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = pipe.map_or(Ok(0), |pipe| pipe.take(limit + 1).read_to_end(&mut bytes));
            // The receiver may be gone after the timeout.
            let _ = sender.send((index, read.map(|_| bytes)));
        });
    }
    let deadline = Instant::now() + timeout;
    let mut streams = [Vec::new(), Vec::new()];
    let read = (0..streams.len()).try_for_each(|_| {
        let received = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        let (index, bytes) = received.map_err(|_| format!("timeout after {} s", timeout.as_secs()))?;
        streams[index] = bytes.map_err(|why| format!("can't read its output: {why}"))?;
        Ok::<_, String>(())
    });
    if read.is_err() {
        // It may have ended already.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|why| format!("can't wait for the program: {why}"))?;
    read?;
    let [stdout, stderr] = streams;
    Ok(Output { status, stdout, stderr })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_time_are_limited() {
        let long = Duration::from_secs(60);
        let output = run_program(Command::new("sh").args(["-c", "printf a; printf b >&2"]), 9, long).expect("it ran");
        assert_eq!((&*output.stdout, &*output.stderr, output.status.code()), (&b"a"[..], &b"b"[..], Some(0)));
        let cut = run_program(Command::new("head").args(["-c", "99999999", "/dev/zero"]), 9, long).expect("it ran");
        assert_eq!(cut.stdout.len(), 10);
        let started = Instant::now();
        let late = run_program(Command::new("sleep").arg("600"), 9, Duration::from_millis(50));
        assert_eq!(late.map(|_| ()), Err("timeout after 0 s".to_owned()));
        assert!(started.elapsed() < Duration::from_secs(300));
        let missing = run_program(&mut Command::new("/no/such/program"), 9, long).expect_err("missing");
        assert!(missing.starts_with("can't start the program: "), "{missing}");
    }
}
