//! Commands in the containers of agents, through the API server's exec (WebSocket).

use super::call::{ApiCall, causes};
use super::request::ApiRequest;
use super::retry::AttemptError;
use super::user::UserApi;
use crate::cluster::agent_pod::{AgentPod, CONTAINER};
use crate::cni::{Code, Error};
use futures_util::StreamExt;
use futures_util::stream::iter;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{Api as ObjectApi, AttachParams};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout as within;

/// The maximum size of a command's output; a report has a few KiB per pod.
const MAX_OUTPUT: u64 = 16 << 20;
/// The number of commands that run at a time. The API server proxies each of them to a kubelet.
const CONCURRENCY: usize = 16;

/// The output of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandOutput {
    /// What it wrote to stdout.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    pub stderr: Vec<u8>,
    /// Its exit code.
    pub code: u8,
}

impl UserApi {
    /// Runs a command in the container of each agent, several at a time, each of them for at most `timeout`. Calls
    /// `progress` with the number of those that ended. Returns the results in the order of `agents`.
    ///
    /// # Errors
    /// The API server can't be used.
    pub fn exec(
        &self,
        agents: &[&AgentPod],
        command: &[String],
        timeout: Duration,
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<Result<CommandOutput, Error>>, Error> {
        let session = self.api.session()?;
        session.run(async {
            let run = async |(position, agent)| (position, self.exec_in(agent, command, timeout).await);
            let mut results = iter(agents.iter().copied().enumerate()).map(run).buffer_unordered(CONCURRENCY);
            let mut ended = Vec::new();
            while let Some(result) = results.next().await {
                ended.push(result);
                progress(ended.len());
            }
            ended.sort_by_key(|(position, _)| *position);
            Ok(ended.into_iter().map(|(_, result)| result).collect())
        })
    }

    async fn exec_in(&self, agent: &AgentPod, command: &[String], timeout: Duration) -> Result<CommandOutput, Error> {
        let AgentPod { object, stopped, .. } = agent;
        let failed = |why: &str| Error::new(Code::TryAgain, format!("pod {object}: container {CONTAINER}: {why}"));
        if let Some(reason) = stopped {
            let next = format!("see kubectl describe pod -n {} {}", object.namespace, object.name);
            return Err(failed(&format!("not running: {reason}; {next}")));
        }
        let request = ApiRequest::exec(object, CONTAINER, command)?;
        let session = self.api.session()?;
        let call = ApiCall { retries: false, ..self.api.call(session, &request) };
        let rejected = |error: kube::Error| match error {
            kube::Error::Api(status) => {
                let body = serde_json::to_vec(&status).unwrap_or_default();
                match call.rejected(status.code, None, &body) {
                    AttemptError::Permanent(error) => error,
                    AttemptError::NotFound(cause) | AttemptError::Transient { cause, .. } => failed(&cause),
                }
            }
            other => failed(&causes(&other)),
        };
        let work = async {
            let pods = ObjectApi::<Pod>::namespaced(session.client().map_err(rejected)?, &object.namespace);
            let params = AttachParams::default().container(CONTAINER).stdin(false).stdout(true).stderr(true);
            let mut process = pods.exec(&object.name, command, &params).await.map_err(rejected)?;
            let status = process.take_status();
            let (stdout, stderr) = (process.stdout(), process.stderr());
            let (stdout, stderr) =
                tokio::try_join!(read(stdout), read(stderr)).map_err(|why| failed(&format!("output: {why}")))?;
            let status = match status {
                Some(status) => status.await,
                None => None,
            };
            let code = exit_code(status).map_err(|why| failed(&format!("can't run {}: {why}", command.join(" "))))?;
            Ok(CommandOutput { stdout, stderr, code })
        };
        let started = Instant::now();
        within(timeout, work).await.unwrap_or_else(|_| {
            Err(failed(&format!("no result of {} within {:.0} s", command.join(" "), started.elapsed().as_secs_f32())))
        })
    }
}

/// Reads a stream to its end.
async fn read(stream: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(MAX_OUTPUT + 1).read_to_end(&mut bytes).await.map_err(|error| error.to_string())?;
    }
    if bytes.len() as u64 > MAX_OUTPUT {
        return Err(format!("expected at most {MAX_OUTPUT} bytes, got more"));
    }
    Ok(bytes)
}

/// Returns the exit code in the status of a command (k8s.io/kubelet, `remotecommand.ServeExec`).
fn exit_code(status: Option<Status>) -> Result<u8, String> {
    let status = status.ok_or("the connection was closed before the command ended")?;
    if status.status.as_deref() == Some("Success") {
        return Ok(0);
    }
    let causes = status.details.and_then(|details| details.causes).unwrap_or_default();
    let code = causes.iter().find(|cause| cause.reason.as_deref() == Some("ExitCode"));
    let code = code.and_then(|cause| cause.message.as_deref()?.parse().ok());
    code.ok_or_else(|| status.message.unwrap_or_else(|| "unknown error".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_read_from_the_status() {
        let of = |text: &str| exit_code(serde_json::from_str(text).expect("a status"));
        let failed =
            |cause: &str| format!(r#"{{"status": "Failure", "message": "m", "details": {{"causes": [{cause}]}}}}"#);
        assert_eq!(of(r#"{"status": "Success"}"#), Ok(0));
        assert_eq!(of(&failed(r#"{"reason": "ExitCode", "message": "2"}"#)), Ok(2));
        assert_eq!(of(&failed(r#"{"reason": "ExitCode", "message": "x"}"#)), Err("m".to_owned()));
        assert_eq!(of(&failed("")), Err("m".to_owned()));
        assert!(exit_code(None).is_err_and(|why| why.contains("closed")));
    }

    #[test]
    fn a_large_output_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let large = vec![b'x'; MAX_OUTPUT as usize + 1];
        let result = runtime.block_on(read(Some(&large[..])));
        assert!(result.is_err_and(|why| why.contains("at most 16777216 bytes")));
        assert_eq!(runtime.block_on(read(Some(&large[1..]))).map(|bytes| bytes.len()), Ok(MAX_OUTPUT as usize));
    }
}
