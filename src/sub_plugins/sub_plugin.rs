//! The sub-plugins by name, and the blocks of a chain sorted by them.

use super::context::ListAuthor;
use super::dns_exclude::{self, DnsExclude};
use super::settings::Settings;
use super::uid_exclude::{self, UidExclude};
use super::{ChainInput, settings};
use crate::cni::{Block, BlockReader, Code, Error, SUB_PLUGINS};
use serde_json::Value;

/// What runs in this process; a block of any other `type` is an executable's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SubPlugin {
    /// `istio-redirect`: sends a meshed pod's traffic to its sidecar.
    IstioRedirect,
    /// `uid-exclude`: sends around it what certain UIDs and GIDs send.
    UidExclude,
    /// `dns-exclude`: sends around it DNS that must not go there.
    DnsExclude,
}

impl SubPlugin {
    /// All of them, in the order of [`SUB_PLUGINS`].
    pub const ALL: [Self; 3] = [Self::IstioRedirect, Self::UidExclude, Self::DnsExclude];

    /// Its name: the `type` of its block, its key in `args.cni`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        SUB_PLUGINS[self as usize]
    }

    /// The one that `block` is for; `None` where it is an executable's, or has no `type`.
    #[must_use]
    pub fn of(block: &Block) -> Option<Self> {
        let kind = block.keys.get("type").and_then(Value::as_str)?;
        Self::ALL.into_iter().find(|own| own.name() == kind)
    }

    /// The annotations by which a pod speaks to it.
    pub(super) const fn annotations(self) -> &'static [&'static str] {
        match self {
            Self::IstioRedirect => &settings::ANNOTATIONS,
            Self::UidExclude => &uid_exclude::ANNOTATIONS,
            Self::DnsExclude => &dns_exclude::ANNOTATIONS,
        }
    }

    /// What the pod's `args.cni` has for it, where that is not `null`.
    pub(super) fn argument<'a>(self, input: &ChainInput<'a>) -> Option<(String, &'a Value)> {
        let value = input.args.get(self.name()).filter(|value| !value.is_null())?;
        Some((format!("args.cni.{}", self.name()), value))
    }
}

/// A chain's own blocks, understood as far as that goes without a pod.
#[derive(Debug, Default)]
pub(super) struct ParsedChain {
    pub redirects: Vec<ParsedBlock<Settings>>,
    pub uid_excludes: Vec<ParsedBlock<UidExclude>>,
    pub dns_excludes: Vec<ParsedBlock<DnsExclude>>,
}

/// One block of a chain.
#[derive(Debug)]
pub(super) struct ParsedBlock<T> {
    /// Where it stands.
    pub path: String,
    /// What it says.
    pub own: T,
    /// Whether the pod's wishes count.
    pub pod_overrides: bool,
}

impl ParsedChain {
    /// Understands every block that is not an executable's.
    pub(super) fn parse(blocks: &[Block], group_id: &dyn Fn(&str) -> Option<u32>) -> Result<Self, Error> {
        let author = ListAuthor::Administrator;
        let mut chain = Self::default();
        for block in blocks {
            match SubPlugin::of(block) {
                Some(SubPlugin::IstioRedirect) => {
                    chain.redirects.push(entry(block, |r| Settings::parse(r, group_id))?);
                }
                Some(SubPlugin::UidExclude) => chain.uid_excludes.push(entry(block, |r| UidExclude::parse(r, author))?),
                Some(SubPlugin::DnsExclude) => chain.dns_excludes.push(entry(block, |r| DnsExclude::parse(r, author))?),
                None if block.keys.get("type").is_some_and(Value::is_string) => {}
                None => {
                    let own = SubPlugin::ALL.map(SubPlugin::name).join(", ");
                    let msg = format!("{}.type is missing; accepted: {own}, or an executable's name", block.path);
                    return Err(Error::new(Code::InvalidConfig, msg));
                }
            }
        }
        Ok(chain)
    }

    /// The paths of a sub-plugin's blocks, each with its `pod_overrides`.
    pub(super) fn entries(&self, sub_plugin: SubPlugin) -> Vec<(&str, bool)> {
        fn of<T>(entries: &[ParsedBlock<T>]) -> Vec<(&str, bool)> {
            entries.iter().map(|entry| (entry.path.as_str(), entry.pod_overrides)).collect()
        }
        match sub_plugin {
            SubPlugin::IstioRedirect => of(&self.redirects),
            SubPlugin::UidExclude => of(&self.uid_excludes),
            SubPlugin::DnsExclude => of(&self.dns_excludes),
        }
    }
}

fn entry<T>(block: &Block, parse: impl Fn(&BlockReader<'_>) -> Result<T, Error>) -> Result<ParsedBlock<T>, Error> {
    let r = block.reader();
    r.string("type")?;
    let pod_overrides = r.boolean("pod_overrides")?.unwrap_or(true);
    let own = parse(&r)?;
    r.finish()?;
    Ok(ParsedBlock { path: block.path.clone(), own, pod_overrides })
}

/// The block for `sub_plugin` in `args.cni`: the same keys, less `pod_overrides`, which is the
/// administrator's.
pub(super) fn argument<T>(
    sub_plugin: SubPlugin,
    input: &ChainInput<'_>,
    parse: impl Fn(&BlockReader<'_>) -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    let Some((path, value)) = sub_plugin.argument(input) else { return Ok(None) };
    let block = Block::new(path, value)?;
    let r = block.reader();
    r.one_of("type", &[(sub_plugin.name(), ())])?;
    let own = parse(&r)?;
    r.finish()?;
    Ok(Some(own))
}
