//! Plugins get the same input from detour as from `cnitool` v1.3.0 of the reference library.
//! `hack/record-cnitool.sh` records the input with the same plugins.

use crate::delegates::recorders::{Recorders, Seen, add_prints};
use detour_cni::cni::{self, CniCommand, NetConf};
use detour_cni::delegate::{Call, Executables};
use detour_cni::networks::RunnableConfiguration;
use detour_cni::networks::resolve;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const RECORDED: &str = "tests/golden/cnitool.json";
/// The path need not exist: the plugins use only the name.
const NETNS: &str = "/run/netns/recorded";
/// `cnitool` derives the container ID from the path of the namespace.
const CONTAINER: &str = "cnitool-656b6df6fe87d106fa76";
const ARGS: &str = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0";

/// A network configuration, and the commands that are recorded.
#[derive(Deserialize)]
struct Scene {
    name: String,
    files: Vec<(String, Value)>,
    result: Value,
    commands: Vec<String>,
}

fn scenes() -> Vec<Scene> {
    serde_saphyr::from_str(include_str!("cnitool.yaml")).expect("scenes")
}

fn offered() -> Value {
    json!({"mac": "02:00:00:00:00:02", "ips": ["10.0.0.9/24"], "portMappings": [{"hostPort": 80, "containerPort": 8080}]})
}

/// Creates the plugins of a scene and its files.
fn set(scene: &Scene) -> (Recorders, PathBuf) {
    let second = scene.result.to_string().replace("10.0.0.1/24", "10.0.0.2/24");
    let second: Value = serde_json::from_str(&second).expect("JSON");
    let recorders = Recorders::new()
        .with("one", &add_prints(&scene.result))
        .with("two", &add_prints(&second))
        .with("three", &add_prints(&scene.result));
    let directory = recorders.bin().with_file_name("net.d");
    for (name, conf) in &scene.files {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().expect("it is below")).expect("a directory");
        fs::write(path, conf.to_string()).expect("writable");
    }
    (recorders, directory)
}

/// Returns the calls as they are recorded, without values that differ between runs.
fn recorded_calls(recorders: &Recorders) -> Value {
    let bin = recorders.bin().display().to_string();
    let variables = |seen: &Seen| -> Value {
        let own = seen.environment.iter().filter(|(name, _)| name.starts_with("CNI_"));
        own.map(|(name, value)| (name.clone(), Value::from(value.replace(&bin, "BIN")))).collect()
    };
    let recorded_calls =
        |seen: &Seen| json!({"plugin": seen.kind, "environment": variables(seen), "stdin": seen.stdin});
    recorders.seen().iter().map(recorded_calls).collect()
}

#[test]
fn plugins_get_the_input_of_the_reference_library() {
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        record();
    }
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORDED)).expect("it is recorded");
    let mut recorded: Value = serde_json::from_str(&text).expect("JSON");
    for scene in scenes() {
        let (recorders, directory) = set(&scene);
        let mut network = read(&directory.join(&scene.files[0].0));
        network.runtime_config = offered().as_object().expect("an object").clone();
        let mut result = None;
        for command in &scene.commands {
            perform(command, &network, &recorders.bin(), &mut result);
        }
        let wanted = recorded[&scene.name].as_array_mut().unwrap_or_else(|| panic!("{} is recorded", scene.name));
        // SPEC.md removes it; the reference library does not.
        wanted.iter_mut().for_each(|call| drop(call["stdin"].as_object_mut().map(|conf| conf.remove("capabilities"))));
        let seen = recorded_calls(&recorders);
        let seen = seen.as_array().expect("a list");
        for (seen, wanted) in seen.iter().zip(&*wanted) {
            assert_eq!(seen, wanted, "{}", scene.name);
        }
        assert_eq!(seen.len(), wanted.len(), "{}", scene.name);
    }
}

/// Reads the network in a file.
fn read(file: &Path) -> RunnableConfiguration {
    let conf = json!({"cniVersion": cni::version::NEWEST, "name": "p", "type": "detour", "clusterNetwork": file});
    let conf = NetConf::parse(conf.to_string().as_bytes(), CniCommand::Add, "detour").expect("accepted");
    let networks = resolve(&conf.primary.expect("it is"), None, None, "eth0", None).expect("accepted").networks;
    networks[0].configuration.clone()
}

/// Does what `cnitool` does for `command`; it saves the result of ADD for CHECK and DEL.
fn perform(command: &str, network: &RunnableConfiguration, bin: &Path, result: &mut Option<Value>) {
    let call = |command: CniCommand| {
        let for_a_container = !matches!(command, CniCommand::Gc | CniCommand::Status);
        let text = |text: &str| if for_a_container { text.to_owned() } else { String::new() };
        Call {
            command,
            container_id: text(CONTAINER),
            netns: text(NETNS).into(),
            ifname: text("eth0"),
            args: Some(text(ARGS)),
            bin_dir: None,
            path: vec![bin.to_owned()],
            timeout: Duration::from_secs(60),
        }
    };
    match command {
        "add" => *result = network.add(&Executables, &call(CniCommand::Add), None).expect("it succeeds"),
        "check" => network.check(&Executables, &call(CniCommand::Check), result.as_ref()).expect("it succeeds"),
        "del" => network.del(&Executables, &call(CniCommand::Del), result.as_ref()).expect("it succeeds"),
        "gc" => network.gc(&Executables, &call(CniCommand::Gc), None).expect("it succeeds"),
        "status" => network.status(&Executables, &call(CniCommand::Status)).expect("it succeeds"),
        other => panic!("{other}"),
    }
}

/// Records the input of the plugins under `cnitool`.
fn record() {
    let mut recorded = serde_json::Map::new();
    for scene in scenes() {
        let (recorders, directory) = set(&scene);
        for command in &scene.commands {
            let output = std::process::Command::new("cnitool")
                .args([command.as_str(), "recorded", NETNS])
                .envs([("CNI_ARGS", ARGS), ("CNI_IFNAME", "eth0"), ("CAP_ARGS", &offered().to_string())])
                .env("CNI_PATH", recorders.bin())
                .env("NETCONFPATH", &directory)
                .output()
                .expect("cnitool is in PATH");
            assert!(output.status.success(), "{}: {command}: {output:?}", scene.name);
        }
        recorded.insert(scene.name, recorded_calls(&recorders));
    }
    let text = serde_json::to_string_pretty(&recorded).expect("JSON") + "\n";
    fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORDED), text).expect("writable");
}
