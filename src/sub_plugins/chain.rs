//! A sub-plugin chain: its blocks, parsed as completely as possible without a pod, and the input of their evaluation.

use super::ambient::{EnrolledBy, enrolled_by, labeled_by};
use super::bounds::ParsedBounds;
use super::context::StartedWith;
use super::context::{ListAuthor, Resolvers};
use super::exclude::Exclude;
use super::mesh_guard::MeshGuard;
use super::settings::Settings;
use super::sub_plugin::SubPlugin;
use crate::cni::{ALLOW, Block, BlockReader, Bounds, Code, Error, REQUEST};
use crate::pod::Facts;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// The facts that a sub-plugin chain needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeededFacts {
    /// Whether it needs the pod.
    pub pod: bool,
    /// Whether it needs the pod's namespace.
    pub namespace: bool,
}

/// Returns which facts the sub-plugins in `chain` need.
#[must_use]
pub fn wants(chain: &[Block]) -> NeededFacts {
    let mut needed = NeededFacts { pod: false, namespace: false };
    for sub_plugin in chain.iter().filter_map(SubPlugin::of) {
        needed.pod = true;
        needed.namespace |= sub_plugin != SubPlugin::IstioRedirect;
    }
    needed
}

/// Returns the blocks of executables, each with its `type`, in order.
pub fn executables(chain: &[Block]) -> impl Iterator<Item = (&str, &Block)> {
    let blocks = chain.iter().filter(|block| SubPlugin::of(block).is_none());
    blocks.filter_map(|block| Some((block.keys.get("type")?.as_str()?, block)))
}

/// Everything that a sub-plugin chain knows of one pod.
#[derive(Clone, Copy)]
pub struct ChainInput<'a> {
    /// The pod and its namespace; `None` if the configuration has no source of facts.
    pub facts: Option<&'a Facts>,
    /// `args.cni`: the pod's blocks by sub-plugin.
    pub args: &'a Map<String, Value>,
    /// What the pod and its namespace may request.
    pub bounds: &'a Bounds,
    /// The possible meanings of `resolv-conf`.
    pub resolvers: Resolvers<'a>,
    /// Returns the GID of a group in the host's `/etc/group`.
    pub group_id: &'a dyn Fn(&str) -> Option<u32>,
}

impl<'a> ChainInput<'a> {
    /// Returns which label enrolls the pod in the ambient mesh.
    pub(super) fn enrolled_by(&self) -> Option<EnrolledBy> {
        let facts = self.facts?;
        enrolled_by(&facts.pod, facts.namespace.as_ref())
    }

    /// Returns whether the pod is in the ambient mesh. A running pod gets no sidecar: the annotation that claims one does not
    /// take a guarded pod out.
    pub(super) fn is_ambient(&self, running: Option<StartedWith>) -> bool {
        let is_guarded = running.is_some_and(|running| running.ambient_guard);
        let is_labeled = |facts: &Facts| labeled_by(&facts.pod, facts.namespace.as_ref()).is_some();
        self.enrolled_by().is_some() || (is_guarded && self.facts.is_some_and(is_labeled))
    }

    /// Returns the block of `sub_plugin` in `args.cni` with its path, unless it is `null`.
    pub(super) fn argument(&self, sub_plugin: SubPlugin) -> Option<(String, &'a Value)> {
        let value = self.args.get(sub_plugin.name()).filter(|value| !value.is_null())?;
        Some((format!("args.cni.{}", sub_plugin.name()), value))
    }

    /// Returns the settings of `istio-redirect` in `args.cni`.
    pub(super) fn settings(&self) -> Result<Option<Settings>, Error> {
        self.parsed_argument(SubPlugin::IstioRedirect, |r| Settings::of_block(r, self.group_id).map(Some))
    }

    /// Returns what the block of `sub_plugin` in `args.cni` requests.
    pub(super) fn excluded(&self, sub_plugin: SubPlugin) -> Result<Option<Exclude>, Error> {
        self.parsed_argument(sub_plugin, |r| Exclude::parse(sub_plugin, r, ListAuthor::Pod))
    }

    /// Parses the block of `sub_plugin` in `args.cni`. It has the keys of a block in the chain except `pod_overrides`,
    /// which belongs to the administrator.
    fn parsed_argument<T>(
        &self,
        sub_plugin: SubPlugin,
        parse: impl Fn(&BlockReader<'_>) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        let Some((path, value)) = self.argument(sub_plugin) else { return Ok(None) };
        let r = BlockReader::new(path, value)?;
        r.one_of("type", &[(sub_plugin.name(), ())])?;
        let parsed = parse(&r)?;
        r.finish()?;
        Ok(parsed)
    }
}

/// The blocks of a sub-plugin chain, parsed as completely as possible without a pod.
#[derive(Debug, Default)]
pub(super) struct ParsedChain {
    pub redirects: Vec<ParsedBlock<Settings>>,
    pub excludes: Vec<ParsedBlock<Exclude>>,
    pub guards: Vec<ParsedBlock<MeshGuard>>,
    pub bounds: ParsedBounds,
}

/// A parsed block.
#[derive(Debug)]
pub(super) struct ParsedBlock<T> {
    /// The path of the block, for messages.
    pub path: String,
    pub parsed: T,
    /// Whether the pod's annotations and arguments apply.
    pub pod_overrides: bool,
    /// Whether the bounds limit it: it comes from the author of a definition, not from the node.
    pub is_request: bool,
}

impl ParsedChain {
    /// Parses every block except those of executables, and the bounds.
    ///
    /// # Errors
    /// A block or a bound is invalid ([`Code::InvalidConfig`]).
    pub(super) fn parse(
        blocks: &[Block],
        bounds: &Bounds,
        group_id: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<Self, Error> {
        let mut chain = Self { bounds: ParsedBounds::parse(bounds)?, ..Self::default() };
        for block in blocks {
            match SubPlugin::of(block) {
                Some(SubPlugin::IstioRedirect) => {
                    chain.redirects.extend(ParsedBlock::parse(block, |r| Settings::of_block(r, group_id).map(Some))?);
                }
                Some(SubPlugin::MeshGuard) => {
                    chain.guards.extend(ParsedBlock::parse(block, |r| MeshGuard::parse(r).map(Some))?);
                }
                Some(sub_plugin) => {
                    let parse = |r: &BlockReader<'_>| {
                        // Among the bounds.
                        r.value(ALLOW);
                        Exclude::parse(sub_plugin, r, ListAuthor::Administrator)
                    };
                    chain.excludes.extend(ParsedBlock::parse(block, parse)?);
                }
                None if block.keys.get("type").is_some_and(Value::is_string) => {}
                None => {
                    let names = SubPlugin::ALL.map(SubPlugin::name).join(", ");
                    let msg = format!("{}.type: missing; expected {names}, or an executable's name", block.path);
                    return Err(Error::new(Code::InvalidConfig, msg).naming_network());
                }
            }
        }
        Ok(chain)
    }

    /// Returns the blocks of an excluding sub-plugin.
    pub(super) fn excludes(&self, sub_plugin: SubPlugin) -> impl Iterator<Item = &ParsedBlock<Exclude>> {
        self.excludes.iter().filter(move |block| block.parsed.sub_plugin() == sub_plugin)
    }

    /// Returns the paths of a sub-plugin's blocks, each with its `pod_overrides`.
    pub(super) fn paths(&self, sub_plugin: SubPlugin) -> Vec<(&str, bool)> {
        let redirects = self.redirects.iter().filter(|_| sub_plugin == SubPlugin::IstioRedirect);
        let redirects = redirects.map(|block| (block.path.as_str(), block.pod_overrides));
        let excludes = self.excludes(sub_plugin).map(|block| (block.path.as_str(), block.pod_overrides));
        redirects.chain(excludes).collect()
    }
}

impl<T> ParsedBlock<T> {
    fn parse(
        block: &Block,
        parse: impl Fn(&BlockReader<'_>) -> Result<Option<T>, Error>,
    ) -> Result<Option<Self>, Error> {
        let path = block.path.clone();
        let parse = |r: BlockReader<'_>| {
            r.string("type")?;
            let pod_overrides = r.boolean("pod_overrides")?.unwrap_or(true);
            let parsed = parse(&r)?;
            r.finish()?;
            Ok(parsed.map(|parsed| Self { path, parsed, pod_overrides, is_request: false }))
        };
        let mut block = Cow::Borrowed(block);
        let is_request = block.keys.contains_key(REQUEST);
        if is_request {
            block.to_mut().keys.shift_remove(REQUEST);
        }
        let parsed = parse(block.reader()).map_err(Error::naming_network)?;
        Ok(parsed.map(|parsed| Self { is_request, ..parsed }))
    }
}
