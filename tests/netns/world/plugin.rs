//! Plugin calls as Multus makes them for an attachment.

use super::World;
use crate::example::UID;
use crate::support::called::{Called, start};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The plugin under test.
const BUILT: &str = env!("CARGO_BIN_EXE_detour");

/// A call being built.
pub(crate) struct Call<'w> {
    world: &'w World,
    environment: BTreeMap<String, String>,
    configuration: String,
}

/// An ADD whose DEL runs when the world is dropped.
pub(super) struct Attachment {
    environment: BTreeMap<String, String>,
    configuration: String,
}

impl Attachment {
    pub(super) fn delete(&self) {
        let mut environment = self.environment.clone();
        environment.insert("CNI_COMMAND".to_owned(), "DEL".to_owned());
        let output = execute(BUILT.as_ref(), &environment, &self.configuration);
        if !output.success {
            eprintln!("DEL at the end of a world: {} {}", output.stdout, output.stderr);
        }
    }
}

impl World {
    /// Builds a call as Multus makes it for the first attachment of pod `web-0` in namespace `shop`: interface net1,
    /// every CNI argument doubled, prevResult only for CHECK.
    pub(crate) fn call(&self, command: &str, configuration: &Value) -> Call<'_> {
        let netns = self.netns().display().to_string();
        let pod = format!(
            "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID={};K8S_POD_UID={}",
            self.name, UID
        );
        let environment = [
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", &self.name),
            ("CNI_NETNS", &netns),
            ("CNI_IFNAME", "net1"),
            ("CNI_PATH", "/var/lib/cni/bin:/opt/cni/bin"),
            ("CNI_ARGS", &format!("IgnoreUnknown=true;{pod};IgnoreUnknown=1;{pod}")),
            ("PATH", ""),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let mut configuration = configuration.clone();
        if command == "CHECK" {
            configuration["prevResult"] = Value::Object(Map::new());
        }
        Call { world: self, environment: environment.into(), configuration: configuration.to_string() }
    }

    /// Runs an ADD built by [`Self::call`], which must succeed.
    #[track_caller]
    pub(crate) fn add(&self, configuration: &Value) {
        self.call("ADD", configuration).run().done();
    }
}

impl Call<'_> {
    pub(crate) fn env(mut self, key: &str, value: &str) -> Self {
        self.environment.insert(key.to_owned(), value.to_owned());
        self
    }

    pub(crate) fn interface(self, name: &str) -> Self {
        self.env("CNI_IFNAME", name)
    }

    pub(crate) fn run(self) -> Called {
        self.run_as(BUILT.as_ref())
    }

    /// Runs another program instead of the plugin under test.
    pub(crate) fn run_as(self, program: &Path) -> Called {
        let output = execute(program, &self.environment, &self.configuration);
        if self.environment["CNI_COMMAND"] == "ADD" {
            let attachment = Attachment { environment: self.environment, configuration: self.configuration };
            self.world.attachments.borrow_mut().push(attachment);
        }
        output
    }
}

fn execute(program: &Path, environment: &BTreeMap<String, String>, configuration: &str) -> Called {
    Called::ended(start(Command::new(program).env_clear().envs(environment), configuration))
}
