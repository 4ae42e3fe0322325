//! `detour agent --repair …`: pods that bypass the mesh.

use clap::{Args, ValueEnum};
use detour_cni::agent::repair::{Criteria, RepairMode, Selector, RepairSettings};
use std::time::Duration;

/// How pods that bypass the mesh are repaired.
#[derive(Debug, Args)]
#[command(next_help_heading = "Repair of pods")]
pub(super) struct RepairArguments {
    /// What is done with a pod that raced the plugin, or lost its rules.
    #[arg(long, value_name = "HOW", value_enum, default_value = "repair")]
    repair: How,
    /// What is done where --repair repair has failed five times.
    #[arg(long, value_name = "HOW", value_enum, default_value = "off")]
    repair_otherwise: Otherwise,
    /// The label of --repair label.
    #[arg(long, value_name = "KEY=VALUE", value_parser = label, default_value = "cni.istio.io/uninitialized=true")]
    repair_label: (String, String),
    /// Which pods, by their labels, as for kubectl -l; all unless given.
    #[arg(long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    repair_selector: Selector,
    /// How often the rules of each pod are looked at besides when it changes, in seconds; 0: never.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(..=86_400))]
    repair_interval: u32,
    /// The annotation of pods that have been validated; if it is empty, any pod.
    #[arg(long, value_name = "KEY", default_value = "sidecar.istio.io/status")]
    repair_annotation: String,
    /// The init container that validates; if it is empty, any.
    #[arg(long, value_name = "NAME", default_value = "istio-validation")]
    repair_init_container: String,
    /// Its exit code where traffic is not redirected; 0: any but success.
    #[arg(long, value_name = "CODE", default_value_t = 126)]
    repair_exit_code: i32,
    /// Its termination message then; any unless given.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    repair_message: String,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum How {
    /// In place: the pod runs on, and gets the rules that it should have.
    Repair,
    /// It is deleted, where a controller makes a new one.
    Delete,
    /// It is labelled, for somebody else to act upon.
    Label,
    /// Nothing.
    Off,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Otherwise {
    /// As --repair delete.
    Delete,
    /// As --repair label.
    Label,
    /// Nothing more.
    Off,
}

fn label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = parts.ok_or("accepted: KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

impl RepairArguments {
    /// `None` where nothing is repaired.
    pub(super) fn settings(&self) -> Option<RepairSettings> {
        Some(RepairSettings {
            criteria: Criteria {
                selector: self.repair_selector.clone(),
                annotation: self.repair_annotation.clone(),
                container: self.repair_init_container.clone(),
                exit_code: self.repair_exit_code,
                message: self.repair_message.clone(),
            },
            mode: match self.repair {
                How::Repair => RepairMode::InPlace,
                How::Delete => RepairMode::Delete,
                How::Label => RepairMode::Label,
                How::Off => return None,
            },
            otherwise: match self.repair_otherwise {
                Otherwise::Delete => Some(RepairMode::Delete),
                Otherwise::Label => Some(RepairMode::Label),
                Otherwise::Off => None,
            },
            label: self.repair_label.clone(),
            interval: Duration::from_secs(self.repair_interval.into()),
        })
    }
}
