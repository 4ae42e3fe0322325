//! The traffic tool of the netns tests, the demo and the benchmark: answers in one network namespace, sends in another,
//! and prints where the traffic arrived.

mod api;
mod endpoint;
mod hold;
mod send;
mod serve;
mod user;

use clap::Parser;
use std::process::ExitCode;

#[derive(Parser)]
#[command(about, version)]
enum Probe {
    /// Answer every line and every datagram with one line of JSON, until stdin ends
    Serve(serve::Serve),
    /// Send one token as a user and print the answer
    Send(send::Send),
    /// Keep one TCP connection, and send a token over it for each line of stdin
    Hold(hold::Hold),
    /// Serve JSON files as a Kubernetes API over HTTP or HTTPS, until stdin ends
    Api(api::Api),
}

fn main() -> ExitCode {
    let done = match Probe::parse() {
        Probe::Serve(serve) => serve.run().map(|()| ExitCode::SUCCESS),
        Probe::Send(send) => send.run(),
        Probe::Hold(hold) => hold.run().map(|()| ExitCode::SUCCESS),
        Probe::Api(api) => api.run().map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        eprintln!("probe: {error:#}");
        ExitCode::from(2)
    })
}

/// Blocks until the parent process closes stdin, so that this process ends with its parent.
fn wait_for_end_of_stdin() -> anyhow::Result<()> {
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}
