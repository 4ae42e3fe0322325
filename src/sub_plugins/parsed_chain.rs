//! The blocks of a sub-plugin chain, parsed and sorted by sub-plugin, and the input that they are evaluated with.

use super::container_exclude::ContainerExclude;
use super::context::{ListAuthor, Resolvers};
use super::dns_exclude::DnsExclude;
use super::settings::Settings;
use super::sub_plugin::SubPlugin;
use super::uid_exclude::UidExclude;
use crate::cni::{Block, BlockReader, Code, Error};
use crate::pod::Facts;
use serde_json::{Map, Value};

/// Everything that a sub-plugin chain knows of one pod.
#[derive(Clone, Copy)]
pub struct ChainInput<'a> {
    /// The pod and its namespace; `None` if the configuration has no source of facts.
    pub facts: Option<&'a Facts>,
    /// `args.cni`: the pod's blocks by sub-plugin.
    pub args: &'a Map<String, Value>,
    /// The possible meanings of `resolv-conf`.
    pub resolvers: Resolvers<'a>,
    /// Returns the GID of a group in the host's `/etc/group`.
    pub group_id: &'a dyn Fn(&str) -> Option<u32>,
}

impl<'a> ChainInput<'a> {
    /// Returns the block of `sub_plugin` in `args.cni` with its path, unless it is `null`.
    pub(super) fn argument(&self, sub_plugin: SubPlugin) -> Option<(String, &'a Value)> {
        let value = self.args.get(sub_plugin.name()).filter(|value| !value.is_null())?;
        Some((format!("args.cni.{}", sub_plugin.name()), value))
    }

    /// Parses the block of `sub_plugin` in `args.cni`. It has the keys of a block in the chain except `pod_overrides`,
    /// which belongs to the administrator.
    pub(super) fn parsed_argument<T>(
        &self,
        sub_plugin: SubPlugin,
        parse: impl Fn(&BlockReader<'_>) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        let Some((path, value)) = self.argument(sub_plugin) else { return Ok(None) };
        let r = BlockReader::new(path, value)?;
        r.one_of("type", &[(sub_plugin.name(), ())])?;
        let parsed = parse(&r)?;
        r.finish()?;
        Ok(Some(parsed))
    }
}

/// A sub-plugin chain's blocks, parsed as completely as possible without a pod.
#[derive(Debug, Default)]
pub(super) struct ParsedChain {
    pub redirects: Vec<ParsedBlock<Settings>>,
    pub uid_excludes: Vec<ParsedBlock<UidExclude>>,
    pub dns_excludes: Vec<ParsedBlock<DnsExclude>>,
    pub container_excludes: Vec<ParsedBlock<ContainerExclude>>,
}

/// A parsed block.
#[derive(Debug)]
pub(super) struct ParsedBlock<T> {
    /// The path of the block, for messages.
    pub path: String,
    pub parsed: T,
    /// Whether the pod's annotations and arguments apply.
    pub pod_overrides: bool,
}

impl ParsedChain {
    /// Parses every block except those of executables.
    ///
    /// # Errors
    /// A block is invalid ([`Code::InvalidConfig`]).
    pub(super) fn parse(blocks: &[Block], group_id: &dyn Fn(&str) -> Option<u32>) -> Result<Self, Error> {
        let author = ListAuthor::Administrator;
        let mut chain = Self::default();
        for block in blocks {
            match SubPlugin::of(block) {
                Some(SubPlugin::IstioRedirect) => {
                    chain.redirects.push(ParsedBlock::parse(block, |r| Settings::of_block(r, group_id))?);
                }
                Some(SubPlugin::UidExclude) => {
                    chain.uid_excludes.push(ParsedBlock::parse(block, |r| UidExclude::parse(r, author))?);
                }
                Some(SubPlugin::DnsExclude) => {
                    chain.dns_excludes.push(ParsedBlock::parse(block, |r| DnsExclude::parse(r, author))?);
                }
                Some(SubPlugin::ContainerExclude) => {
                    let parsed = ParsedBlock::parse(block, |r| ContainerExclude::parse(r, author))?;
                    chain.container_excludes.push(parsed);
                }
                None if block.keys.get("type").is_some_and(Value::is_string) => {}
                None => {
                    let names = SubPlugin::ALL.map(SubPlugin::name).join(", ");
                    let msg = format!("{}.type: missing; expected {names}, or an executable's name", block.path);
                    return Err(Error::new(Code::InvalidConfig, msg));
                }
            }
        }
        Ok(chain)
    }

    /// Returns the paths of a sub-plugin's blocks, each with its `pod_overrides`.
    pub(super) fn paths(&self, sub_plugin: SubPlugin) -> Vec<(&str, bool)> {
        fn paths<T>(blocks: &[ParsedBlock<T>]) -> Vec<(&str, bool)> {
            blocks.iter().map(|block| (block.path.as_str(), block.pod_overrides)).collect()
        }
        match sub_plugin {
            SubPlugin::IstioRedirect => paths(&self.redirects),
            SubPlugin::UidExclude => paths(&self.uid_excludes),
            SubPlugin::DnsExclude => paths(&self.dns_excludes),
            SubPlugin::ContainerExclude => paths(&self.container_excludes),
        }
    }
}

impl<T> ParsedBlock<T> {
    fn parse(block: &Block, parse: impl Fn(&BlockReader<'_>) -> Result<T, Error>) -> Result<Self, Error> {
        let r = block.reader();
        r.string("type")?;
        let pod_overrides = r.boolean("pod_overrides")?.unwrap_or(true);
        let parsed = parse(&r)?;
        r.finish()?;
        Ok(Self { path: block.path.clone(), parsed, pod_overrides })
    }
}
