//! Scenarios for tests: an injected pod, changed step by step, and a chain that runs for it.

use super::sample::{facts, meshed_pod};
use super::{ChainInput, ChainOutput, Resolvers, run};
use crate::cni::{Block, Error};
use crate::pod::{Container, Facts, Pod};
use crate::policy::{Exclusion, TrafficOwner, Redirect};
use serde_json::{Map, Value};
use std::net::IpAddr;

/// One pod and one chain.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    facts: Option<Facts>,
    chain: Vec<Block>,
    args: Map<String, Value>,
    cluster_dns: Vec<IpAddr>,
}

/// The chain runs for an injected pod.
pub(super) fn chain(blocks: Value) -> Scenario {
    let Value::Array(blocks) = blocks else { panic!("no array: {blocks}") };
    let block = |(i, value): (usize, &Value)| Block::new(format!("chain[{i}]"), value).expect("an object");
    Scenario {
        facts: Some(facts(meshed_pod(), &[])),
        chain: blocks.iter().enumerate().map(block).collect(),
        args: Map::new(),
        cluster_dns: Vec::new(),
    }
}

impl Scenario {
    pub(super) fn pod(mut self, change: impl FnOnce(&mut Pod)) -> Self {
        change(&mut self.facts.as_mut().expect("facts").pod);
        self
    }

    pub(super) fn proxy(self, change: impl FnOnce(&mut Container)) -> Self {
        self.pod(|pod| change(&mut pod.containers[1]))
    }

    pub(super) fn env(self, name: &str, value: &str) -> Self {
        self.proxy(|proxy| proxy.env.push((name.to_owned(), value.to_owned())))
    }

    pub(super) fn annotated(self, key: &str, value: &str) -> Self {
        self.pod(|pod| drop(pod.annotations.insert(key.to_owned(), value.to_owned())))
    }

    pub(super) fn namespace(mut self, key: &str, value: &str) -> Self {
        let namespace = self.facts.as_mut().and_then(|facts| facts.namespace.as_mut()).expect("a namespace");
        namespace.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    pub(super) fn args(mut self, args: Value) -> Self {
        let Value::Object(args) = args else { panic!("no object: {args}") };
        self.args = args;
        self
    }

    pub(super) fn cluster_dns(mut self, address: &str) -> Self {
        self.cluster_dns.push(address.parse().expect("an address"));
        self
    }

    pub(super) fn without_facts(mut self) -> Self {
        self.facts = None;
        self
    }

    pub(super) fn without_sidecar(self) -> Self {
        self.pod(|pod| pod.containers.truncate(1))
    }

    pub(super) fn run(&self) -> Result<ChainOutput, Error> {
        run(
            &self.chain,
            &ChainInput {
                facts: self.facts.as_ref(),
                args: &self.args,
                resolvers: Resolvers { cluster_dns: &self.cluster_dns, ..Resolvers::default() },
                group_id: &|name| (name == "javausers").then_some(202),
            },
        )
    }

    pub(super) fn output(&self) -> ChainOutput {
        self.run().expect("an output")
    }

    pub(super) fn error(&self) -> String {
        self.run().expect_err("an error").msg
    }

    pub(super) fn redirect(&self) -> Redirect {
        self.output().policy.redirect().expect("a redirection").clone()
    }

    /// One line each: whose, protocol, ports, where to.
    pub(super) fn exclusions(&self) -> Vec<String> {
        self.output().policy.exclusions_in_effect().iter().map(shown).collect()
    }
}

fn shown(exclusion: &Exclusion) -> String {
    let mut words = vec![match exclusion.owner {
        TrafficOwner::Any => "any".to_owned(),
        TrafficOwner::Uid(range) => format!("uid {range}"),
        TrafficOwner::Gid(range) => format!("gid {range}"),
    }];
    words.extend(exclusion.protocol.map(|protocol| protocol.to_string()));
    words.extend(exclusion.ports.iter().map(ToString::to_string));
    words.extend(exclusion.destination.map(|net| format!("to {net}")));
    words.join(" ")
}
