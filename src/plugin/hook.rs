//! The OCI hook `detour-hook`: the container runtime runs it before a container's first instruction (stage
//! `createRuntime`) and after its end (`poststop`), with the container's state on stdin (OCI runtime specification,
//! runtime.md, "State").

use super::containers::{ExcludedContainers, ObservedContainers, RunningContainer};
use crate::cgroup::CgroupHierarchy;
use crate::cni::{Code, Error};
use crate::host_path::HostRoot;
use crate::netns::NetNs;
use serde::Deserialize;
use std::io::Read;
use std::path::PathBuf;

/// The name under which the binary is the hook.
pub const HOOK_PROGRAM: &str = "detour-hook";

/// The maximum size of the state. Kubernetes limits a pod's annotations to 256 KiB; runtimes add copies of them.
const MAX_STATE: u64 = 4 << 20;

/// The state of a container; unknown fields are ignored.
#[derive(Debug, Default, Deserialize)]
struct ContainerState {
    id: String,
    status: String,
    #[serde(default)]
    pid: u32,
    #[serde(default)]
    annotations: Option<Annotations>,
}

/// The annotations that runtimes set last, so that a pod's annotations can't replace them. A runtime may pass on a
/// pod's annotations of the other runtime: those of CRI-O take precedence, because CRI-O passes on all, containerd only
/// those that its configuration lists.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Annotations {
    #[serde(rename = "io.kubernetes.cri-o.SandboxID")]
    crio_sandbox: Option<String>,
    #[serde(rename = "io.kubernetes.cri-o.ContainerType")]
    crio_type: Option<String>,
    #[serde(rename = "io.kubernetes.cri-o.Metadata")]
    crio_metadata: Option<String>,
    #[serde(rename = "io.kubernetes.cri.sandbox-id")]
    containerd_sandbox: Option<String>,
    #[serde(rename = "io.kubernetes.cri.container-type")]
    containerd_type: Option<String>,
    #[serde(rename = "io.kubernetes.cri.container-name")]
    containerd_name: Option<String>,
}

/// A container of a pod, as the runtime names it.
#[derive(Debug, PartialEq, Eq)]
struct PodContainer {
    sandbox_id: String,
    /// `None` if the runtime does not report the name.
    name: Option<String>,
}

/// The value of CRI-O's annotation `Metadata`.
#[derive(Deserialize)]
struct Metadata {
    name: String,
}

/// The container type of a pod sandbox, in the annotations of both runtimes.
const SANDBOX: &str = "sandbox";

impl Annotations {
    /// Returns the container; `None` for a pod sandbox and for a container that belongs to no pod.
    fn container(self) -> Option<PodContainer> {
        let (sandbox_id, kind, name) = match self.crio_sandbox {
            Some(sandbox_id) => {
                let metadata = self.crio_metadata.and_then(|text| serde_json::from_str::<Metadata>(&text).ok());
                (sandbox_id, self.crio_type, metadata.map(|metadata| metadata.name))
            }
            None => (self.containerd_sandbox?, self.containerd_type, self.containerd_name),
        };
        let name = name.filter(|name| !name.is_empty());
        (kind.as_deref() != Some(SANDBOX)).then_some(PodContainer { sandbox_id, name })
    }
}

/// Runs the hook: exempts an excluded container, or removes it from the sets. Does nothing for any other container.
///
/// # Errors
/// An excluded container can't be exempted, so it must not start; or the state is invalid.
pub fn run(stdin: impl Read) -> Result<(), Error> {
    let state = ContainerState::read(stdin)?;
    let Some(container) = state.annotations.unwrap_or_default().container() else { return Ok(()) };
    let failed = |error: Error| {
        let name = container.name.as_deref().unwrap_or("(unknown)");
        let msg = format!("container {name:?} ({}) of pod sandbox {:?}: {}", state.id, container.sandbox_id, error.msg);
        Error { msg, ..error }
    };
    let root = HostRoot::new("/");
    let excluded = match ExcludedContainers::find(&container.sandbox_id, &root) {
        Ok(None) => return Ok(()),
        // The kernel removed the sets with the pod's network namespace.
        Err(error) if state.status == "stopped" && error.code == Code::InvalidNetns => return Ok(()),
        found => found.map_err(|error| failed(unexempted(error)))?,
    };
    let Some(excluded) = excluded else { return Ok(()) };
    let Some(name) = &container.name else {
        let why = "expected the container's name in an annotation of CRI-O or containerd, got none; report this bug";
        return Err(failed(unexempted(Error::new(Code::Environment, why))));
    };
    if !excluded.policy().containers.iter().any(|exclusion| exclusion.name == *name) {
        return Ok(());
    }
    if state.status == "stopped" {
        let exited = [state.id.clone()];
        let observed = ObservedContainers { exited: &exited, ..ObservedContainers::default() };
        return match excluded.reconcile(observed) {
            // Without the sets, nothing is left to remove.
            Err(error) if error.code == Code::Drift => Ok(()),
            result => result.map(drop).map_err(failed),
        };
    }
    let exempt = || -> Result<(), Error> {
        let cgroup = control_group(&state.id, state.pid, &excluded, &root)?;
        let running = [RunningContainer { name: name.clone(), id: state.id.clone(), cgroup }];
        excluded.reconcile(ObservedContainers { running: &running, ..ObservedContainers::default() }).map(drop)
    };
    exempt().map_err(|error| failed(unexempted(error)))
}

/// Returns the ID of the container's control group.
///
/// # Errors
/// The process is not in the sandbox's network namespace, or not in a control group of the container.
fn control_group(id: &str, pid: u32, excluded: &ExcludedContainers, root: &HostRoot) -> Result<u64, Error> {
    let path = PathBuf::from(format!("/proc/{pid}/ns/net"));
    let netns = NetNs::open(&path)?.map(|netns| netns.id());
    if netns != Some(excluded.netns_id()) {
        let msg = format!("{}: expected the network namespace of the pod sandbox, got another one", path.display());
        return Err(Error::new(Code::InvalidNetns, msg));
    }
    Ok(CgroupHierarchy::find(root)?.container_of_process(id, pid)?.id)
}

fn unexempted(error: Error) -> Error {
    let msg = format!(
        "can't be exempted, so it must not start: {}; see detour doctor --node, or remove container-exclude from the \
         pod's policy and recreate the pod",
        error.msg
    );
    Error { msg, ..error }
}

impl ContainerState {
    fn read(stdin: impl Read) -> Result<Self, Error> {
        let mut text = Vec::with_capacity(16 << 10);
        let read = stdin.take(MAX_STATE + 1).read_to_end(&mut text);
        read.map_err(|error| Error::new(Code::Io, format!("can't read the container's state from stdin: {error}")))?;
        if text.len() as u64 > MAX_STATE {
            let msg = format!("the container's state on stdin: expected at most {MAX_STATE} bytes, got more");
            return Err(Error::new(Code::Decode, msg));
        }
        serde_json::from_slice(&text).map_err(|error| {
            let msg = format!("invalid container state on stdin: {error}; an OCI runtime must run this hook");
            Error::new(Code::Decode, msg)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn container(annotations: Value) -> Option<PodContainer> {
        serde_json::from_value::<Annotations>(annotations).expect("annotations").container()
    }

    fn named(sandbox_id: &str, name: Option<&str>) -> Option<PodContainer> {
        Some(PodContainer { sandbox_id: sandbox_id.to_owned(), name: name.map(str::to_owned) })
    }

    #[test]
    fn the_annotations_of_both_runtimes_name_the_container() {
        let crio = json!({
            "io.kubernetes.cri-o.ContainerType": "container",
            "io.kubernetes.cri-o.Metadata": "{\"name\":\"vault\",\"attempt\":1}",
            "io.kubernetes.cri-o.SandboxID": "s",
            "io.kubernetes.cri.sandbox-id": "of the pod's author",
            "io.kubernetes.cri.container-name": "of the pod's author",
            "io.kubernetes.container.name": "of the pod's author",
        });
        assert_eq!(container(crio), named("s", Some("vault")));
        let containerd = json!({
            "io.kubernetes.cri.container-name": "app",
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-id": "s",
        });
        assert_eq!(container(containerd), named("s", Some("app")));
    }

    #[test]
    fn sandboxes_and_containers_without_a_pod_are_ignored() {
        for annotations in [
            json!({}),
            json!({"io.kubernetes.cri-o.ContainerType": "sandbox", "io.kubernetes.cri-o.SandboxID": "s"}),
            json!({"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "s"}),
        ] {
            assert_eq!(container(annotations), None);
        }
    }

    #[test]
    fn a_container_without_a_name_is_reported_as_such() {
        for metadata in ["", "{", "{\"name\":\"\"}"] {
            let annotations = json!({"io.kubernetes.cri-o.SandboxID": "s", "io.kubernetes.cri-o.Metadata": metadata});
            assert_eq!(container(annotations), named("s", None), "{metadata}");
        }
    }

    #[test]
    fn a_state_that_is_no_json_or_too_large_is_refused() {
        for text in ["", "{", "[]", "{\"id\": 7}", "{\"id\": \"c\", \"status\": \"creating\", \"pid\": -1}"] {
            let error = run(text.as_bytes()).expect_err("invalid");
            assert!(error.msg.starts_with("invalid container state on stdin: "), "{error}");
        }
        let error = run(std::io::repeat(b' ')).expect_err("too large");
        assert!(error.msg.contains("expected at most 4194304 bytes"), "{error}");
    }
}
