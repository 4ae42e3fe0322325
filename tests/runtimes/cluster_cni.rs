//! A stand-in for the program of a cluster CNI that writes its configuration list again and again.

use crate::Random;
use crate::node::Node;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The longest pause between two versions of the list, in milliseconds.
const PAUSE: u32 = 400;
/// The longest time for which the list is missing or truncated while the program writes it, in milliseconds.
const TORN: u32 = 30;

/// It knows only its own list, as the programs of Calico, Cilium and AWS VPC CNI do: it never reads what is in the file.
pub(crate) struct ClusterCni {
    list: PathBuf,
    content: Value,
    version: u32,
}

impl ClusterCni {
    /// The program on this node.
    pub(crate) fn of(node: &Node) -> Self {
        let text = fs::read(node.path("list.json")).expect("node.sh has written it");
        let content = serde_json::from_slice(&text).expect("JSON");
        Self { list: node.path("net.d/10-net.conflist"), content, version: 0 }
    }

    /// Writes the list at random instants. With `withdrawn`, it removes the list first, as AWS VPC CNI does, and writes
    /// it after that time. In the end, the list is complete.
    pub(crate) fn run(&mut self, mut random: Random, withdrawn: Option<Duration>, ended: &AtomicBool) {
        if let Some(time) = withdrawn {
            let _ = fs::remove_file(&self.list);
            thread::park_timeout(time);
        }
        loop {
            self.write(&mut random);
            if ended.load(Ordering::Relaxed) {
                break;
            }
            thread::park_timeout(random.time(PAUSE));
        }
    }

    /// Writes the next version by renaming a new file, in place, or as a new file after it has deleted the old one.
    fn write(&mut self, random: &mut Random) {
        self.version += 1;
        self.content["x-version"] = json!(self.version);
        let text = format!("{:#}\n", self.content);
        match random.below(3) {
            0 => {
                let new = self.list.with_extension("tmp");
                fs::write(&new, text).expect("written");
                fs::rename(&new, &self.list).expect("renamed");
            }
            1 => {
                let half = text.len() / 2;
                for part in ["", &text[..half]] {
                    fs::write(&self.list, part).expect("written");
                    thread::park_timeout(random.time(TORN));
                }
                fs::write(&self.list, text).expect("written");
            }
            _ => {
                let _ = fs::remove_file(&self.list);
                thread::park_timeout(random.time(TORN));
                fs::write(&self.list, text).expect("written");
            }
        }
    }
}
