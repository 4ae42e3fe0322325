//! Scenarios for tests: an injected pod with changes, and the sub-plugin chain that runs for it.

use super::super::context::PodContext;
use super::super::run::run;
use super::super::{ChainInput, ChainOutput, Note, RepeatedOutput, Resolvers, StartedWith, run_again};
use crate::cni::{Block, BlockBounds, Bounds, Error, OutsideBounds};
use crate::pod::{Container, Facts, Namespace, Pod};
use crate::policy::{Exclusion, Redirect, TrafficOwner};
use serde_json::{Map, Value};
use std::net::IpAddr;

/// One pod and one sub-plugin chain.
#[derive(Debug, Clone)]
pub(in super::super) struct Scenario {
    facts: Option<Facts>,
    chain: Vec<Block>,
    args: Map<String, Value>,
    bounds: Bounds,
    cluster_dns: Vec<IpAddr>,
}

/// Returns a scenario in which these blocks run for an injected pod.
pub(in super::super) fn chain(blocks: Value) -> Scenario {
    let Value::Array(blocks) = blocks else { panic!("no array: {blocks}") };
    let block = |(i, value): (usize, &Value)| Block::new(format!("chain[{i}]"), value).expect("an object");
    Scenario {
        facts: Some(facts(meshed_pod(), &[])),
        chain: blocks.iter().enumerate().map(block).collect(),
        args: Map::new(),
        bounds: Bounds::default(),
        cluster_dns: Vec::new(),
    }
}

impl Scenario {
    pub(in super::super) fn pod(mut self, change: impl FnOnce(&mut Pod)) -> Self {
        change(&mut self.facts.as_mut().expect("facts").pod);
        self
    }

    pub(in super::super) fn proxy(self, change: impl FnOnce(&mut Container)) -> Self {
        self.pod(|pod| change(&mut pod.containers[1]))
    }

    pub(in super::super) fn env(self, name: &str, value: &str) -> Self {
        self.proxy(|proxy| proxy.env.push((name.to_owned(), value.to_owned())))
    }

    pub(in super::super) fn annotated(self, key: &str, value: &str) -> Self {
        self.pod(|pod| drop(pod.annotations.insert(key.to_owned(), value.to_owned())))
    }

    pub(in super::super) fn namespace(mut self, key: &str, value: &str) -> Self {
        let namespace = self.facts.as_mut().and_then(|facts| facts.namespace.as_mut()).expect("a namespace");
        namespace.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// A namespace of the ambient mesh, and a pod without a sidecar.
    pub(in super::super) fn ambient(mut self) -> Self {
        let namespace = self.facts.as_mut().and_then(|facts| facts.namespace.as_mut()).expect("a namespace");
        namespace.dataplane_mode = Some("ambient".to_owned());
        self.without_sidecar().pod(|pod| drop(pod.annotations.remove("sidecar.istio.io/status")))
    }

    pub(in super::super) fn args(mut self, args: Value) -> Self {
        let Value::Object(args) = args else { panic!("no object: {args}") };
        self.args = args;
        self
    }

    /// Bounds at the top level.
    pub(in super::super) fn allow(mut self, allow: Value) -> Self {
        self.bounds = Bounds { set_by: "c".into(), allow: Some(allow), ..self.bounds };
        self
    }

    /// Bounds in the block of a sub-plugin.
    pub(in super::super) fn allow_in(mut self, kind: &str, allow: Value) -> Self {
        let place = format!("chain[{}].allow", self.bounds.blocks.len());
        self.bounds.blocks.push(BlockBounds { kind: kind.to_owned(), place, allow });
        self
    }

    /// Ignores requests outside the bounds.
    pub(in super::super) fn ignoring(mut self) -> Self {
        self.bounds.outside = OutsideBounds::Ignore;
        self
    }

    pub(in super::super) fn facts(mut self, facts: Facts) -> Self {
        self.facts = Some(facts);
        self
    }

    pub(in super::super) fn cluster_dns(mut self, address: &str) -> Self {
        self.cluster_dns.push(address.parse().expect("an address"));
        self
    }

    pub(in super::super) fn without_facts(mut self) -> Self {
        self.facts = None;
        self
    }

    pub(in super::super) fn without_sidecar(self) -> Self {
        self.pod(|pod| pod.containers.truncate(1))
    }

    fn input(&self) -> ChainInput<'_> {
        ChainInput {
            facts: self.facts.as_ref(),
            args: &self.args,
            bounds: &self.bounds,
            resolvers: Resolvers { cluster_dns: &self.cluster_dns, ..Resolvers::default() },
            group_id: &|name| (name == "javausers").then_some(202),
        }
    }

    pub(in super::super) fn run(&self) -> Result<ChainOutput, Error> {
        run(&self.chain, &self.input())
    }

    pub(in super::super) fn run_again(&self, redirection: bool, with_requests: bool) -> RepeatedOutput {
        self.run_again_with(StartedWith { redirection, ..StartedWith::default() }, with_requests)
    }

    pub(in super::super) fn run_again_with(&self, started: StartedWith, with_requests: bool) -> RepeatedOutput {
        run_again(&self.chain, &self.input(), started, with_requests).expect("valid blocks")
    }

    pub(in super::super) fn output(&self) -> ChainOutput {
        self.run().expect("an output")
    }

    pub(in super::super) fn error(&self) -> String {
        self.run().expect_err("an error").msg
    }

    pub(in super::super) fn redirect(&self) -> Redirect {
        self.output().policy.redirect().expect("a redirection").clone()
    }

    /// Returns one line per excluded container: name, scope, end of the bypass.
    pub(in super::super) fn containers(&self) -> Vec<String> {
        let containers = self.output().policy.containers;
        containers.iter().map(|one| format!("{} {}", one.name, one.scope)).collect()
    }

    /// Returns the texts of the notes, each after its severity.
    pub(in super::super) fn notes(&self) -> Vec<String> {
        let shown = |note: &Note| format!("{:?}: {}", note.severity, note.text);
        self.output().notes.iter().map(shown).collect()
    }

    /// Returns one line per exclusion in effect: owner, protocol, ports, destination.
    pub(in super::super) fn exclusions(&self) -> Vec<String> {
        self.output().policy.exclusions_in_effect().iter().map(shown).collect()
    }
}

pub(in super::super) fn shown(exclusion: &Exclusion) -> String {
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

/// Returns an injected pod: `cart-1` of namespace `shop` with an application and a sidecar.
pub(in super::super) fn meshed_pod() -> Pod {
    let proxy = Container { args: vec!["proxy".into(), "sidecar".into()], ..container("istio-proxy", Some(1337)) };
    Pod {
        namespace: "shop".into(),
        name: "cart-1".into(),
        annotations: [("sidecar.istio.io/status".to_owned(), "{}".to_owned())].into(),
        containers: vec![container("app", Some(1000)), proxy],
        ..Pod::default()
    }
}

/// Returns a container that runs as UID and GID `user`.
pub(in super::super) fn container(name: &str, user: Option<i64>) -> Container {
    Container { name: name.into(), run_as_user: user, run_as_group: user, ..Container::default() }
}

/// Returns a pod's facts and those of its namespace, which has these annotations.
pub(in super::super) fn facts(pod: Pod, annotations: &[(&str, &str)]) -> Facts {
    let annotations = annotations.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    let namespace = Namespace { name: pod.namespace.clone(), annotations, ..Namespace::default() };
    Facts { pod, namespace: Some(namespace) }
}

/// Returns a context that has `facts` alone.
pub(in super::super) fn context(facts: Option<&Facts>) -> PodContext<'_> {
    PodContext { facts, resolvers: Resolvers::default(), redirect: None, reads_annotations: true }
}
