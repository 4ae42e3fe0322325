//! Targets for files and messages of the cluster: kubeconfigs, answers of the API server, the agent's protocol.

use super::check_error;
use crate::cluster::agent::{AgentAnswer, AgentRequest, Hello, excluded_containers, pod_policies};
use crate::cluster::resources::{DefinitionObject, NamespaceObject, PodObject};
use crate::cluster::{Definition, DefinitionQuery, KubeconfigSummary, ObjectRef, source};
use crate::cni::{CniCommand, Document, Error, NetConf, PROGRAM};
use crate::pod::{Namespace, Pod, PodRef};
use rustix::fs::{Mode, OFlags, open};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;
use std::{fs, process, thread};

/// Enough for any answer that is not waited for.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the path of a file of this process.
fn scratch(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("detour-fuzzing-{}-{name}", process::id()))
}

/// Returns the credentials in a kubeconfig that occur nowhere else in it.
fn secrets(text: &str) -> Vec<String> {
    let file: Value = serde_saphyr::from_str(text).unwrap_or_default();
    let users = file["users"].as_array().cloned().unwrap_or_default();
    let keys = ["token", "client-key-data", "password"];
    let values =
        users.iter().flat_map(|user| keys.map(|key| user["user"][key].as_str().unwrap_or_default().to_owned()));
    values.filter(|secret| secret.len() >= 6 && text.matches(secret.as_str()).count() == 1).collect()
}

/// A kubeconfig. Errors contain no credentials.
pub(super) fn kubeconfig(input: &[u8]) {
    let secrets = secrets(&String::from_utf8_lossy(input));
    let check_error = |error: &Error| {
        check_error(error);
        let text = error.to_string();
        assert!(!secrets.iter().any(|secret| text.contains(secret)), "a secret in an error: {text}");
    };
    static FILE: Mutex<()> = Mutex::new(());
    let _lock = FILE.lock();
    let path = scratch("kubeconfig");
    fs::write(&path, input).expect("writable");
    match KubeconfigSummary::read(Path::new("/"), &path) {
        Ok(summary) => assert!(!summary.server.ends_with('/')),
        Err(error) => check_error(&error),
    }
    fs::remove_file(&path).expect("removable");
}

/// An answer of the API server.
pub(super) fn api(input: &[u8]) {
    if let Ok(pod) = serde_json::from_slice::<PodObject>(input) {
        same_again(&Pod::from(pod));
    }
    if let Ok(namespace) = serde_json::from_slice::<NamespaceObject>(input) {
        same_again(&Namespace::from(namespace));
    }
    let _ = serde_json::from_slice::<DefinitionObject>(input).map(Definition::from);
}

/// Checks that a value which plugin and agent exchange is read back as the same.
fn same_again<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T) {
    let text = serde_json::to_string(value).expect("JSON");
    assert_eq!(serde_json::from_str::<T>(&text).as_ref().map_err(ToString::to_string), Ok(value), "{text}");
}

/// A request to the agent.
pub(super) fn agent_request(input: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<AgentRequest>(input) {
        same_again(&request);
    }
    if let Ok(answer) = serde_json::from_slice::<AgentAnswer>(input) {
        same_again(&answer);
    }
    if let Ok(hello) = serde_json::from_slice::<Hello>(input) {
        same_again(&hello);
    }
}

/// What the process on the agent's socket sends, whatever the request is.
pub(super) fn agent_answer(input: &[u8]) {
    static AGENT: OnceLock<(PathBuf, OwnedFd)> = OnceLock::new();
    static ANSWER: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    static RUN: Mutex<()> = Mutex::new(());
    let _lock = RUN.lock();
    let (socket, _) = AGENT.get_or_init(|| {
        let path = scratch("agent.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        // The descriptor is the socket's only name, so that the process leaves no file.
        let descriptor = open(&path, OFlags::PATH, Mode::empty()).expect("a socket");
        fs::remove_file(&path).expect("removable");
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a connection");
                let _ = stream.read(&mut [0; 4096]);
                let answer = ANSWER.lock().map(|answer| answer.clone()).unwrap_or_default();
                let _ = stream.write_all(&answer);
            }
        });
        (format!("/proc/self/fd/{}", descriptor.as_raw_fd()).into(), descriptor)
    });
    *ANSWER.lock().expect("no panic") = input.to_vec();
    let kubernetes = json!({"agent_socket": socket, "timeout_seconds": TIMEOUT.as_secs()});
    let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": PROGRAM, "kubernetes": kubernetes}).to_string();
    let document = Document::parse(conf.as_bytes()).expect("JSON");
    let conf = NetConf::from_document(&document, CniCommand::Add, PROGRAM).expect("a configuration");
    let client = || source(&conf.kubernetes).expect("the agent");
    let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: None };
    let object = ObjectRef { namespace: "shop".into(), name: "a".into() };
    for with_namespace in [true, false] {
        match client().facts(&pod, with_namespace) {
            Ok(facts) => {
                assert_eq!((&*facts.pod.namespace, &*facts.pod.name), ("shop", "web-0"));
                assert_eq!(facts.namespace.is_some(), with_namespace);
            }
            Err(error) => check_error(&error),
        }
    }
    match client().definitions(&[DefinitionQuery { object, awaited: false }]) {
        Ok(found) => assert_eq!(found.len(), 1),
        Err(error) => check_error(&error),
    }
    let reported = client().report(&Pod::default(), None, &[]);
    let results = [client().namespace(&pod).map(drop), client().probe(), reported];
    results.into_iter().filter_map(Result::err).for_each(|error| check_error(&error));
    let _ = (pod_policies(socket, TIMEOUT), excluded_containers(socket, "c", TIMEOUT));
}
