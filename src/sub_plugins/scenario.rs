//! Scenarios for tests: an injected pod, changed step by step, and a chain that runs for it.
//!
//! Pods for tests.

use super::{ChainInput, ChainOutput, Resolvers, run};
use crate::cni::{Block, Error};
use crate::pod::{Container, Facts, Namespace, Pod};
use crate::policy::{Exclusion, Redirect, TrafficOwner};
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

/// An injected pod as Istio leaves it: `cart-1` of namespace `shop`, an application and a sidecar.
pub(super) fn meshed_pod() -> Pod {
    let proxy = Container { args: vec!["proxy".into(), "sidecar".into()], ..container("istio-proxy", Some(1337)) };
    Pod {
        namespace: "shop".into(),
        name: "cart-1".into(),
        annotations: [("sidecar.istio.io/status".to_owned(), "{}".to_owned())].into(),
        containers: vec![container("app", Some(1000)), proxy],
        ..Pod::default()
    }
}

/// A container that runs as `user`, and as a group of the same number.
pub(super) fn container(name: &str, user: Option<i64>) -> Container {
    Container { name: name.into(), run_as_user: user, run_as_group: user, ..Container::default() }
}

/// A pod, and its namespace with these annotations.
pub(super) fn facts(pod: Pod, annotations: &[(&str, &str)]) -> Facts {
    let annotations = annotations.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let namespace = Namespace { name: pod.namespace.clone(), annotations };
    Facts { pod, namespace: Some(namespace) }
}
