//! What the excluding sub-plugins have in common: a block, the pod's argument and annotations request exclusions.

use super::container_exclude::{self, ContainerExclude};
use super::context::{AnnotationValue, ListAuthor, PodContext, RequestedExclusions};
use super::destination_exclude::{self, DestinationExclude};
use super::dns_exclude::{self, DnsExclude};
use super::sub_plugin::{Note, SettingSource, SubPlugin};
use super::uid_exclude::{self, UidExclude};
use crate::cni::{BlockReader, Error};
use crate::pod::Facts;

/// What one block, argument or annotation requests from an excluding sub-plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Exclude {
    Uid(UidExclude),
    Dns(DnsExclude),
    Container(ContainerExclude),
    Destination(DestinationExclude),
}

impl Exclude {
    /// The excluding sub-plugins, in the order of evaluation.
    pub(super) const SUB_PLUGINS: [SubPlugin; 4] =
        [SubPlugin::UidExclude, SubPlugin::DnsExclude, SubPlugin::ContainerExclude, SubPlugin::DestinationExclude];

    /// Parses the keys of a block; `None` if the sub-plugin excludes nothing.
    pub(super) fn parse(sub_plugin: SubPlugin, r: &BlockReader<'_>, author: ListAuthor) -> Result<Option<Self>, Error> {
        Ok(Some(match sub_plugin {
            SubPlugin::IstioRedirect | SubPlugin::MeshGuard => return Ok(None),
            SubPlugin::UidExclude => Self::Uid(UidExclude::parse(r, author)?),
            SubPlugin::DnsExclude => Self::Dns(DnsExclude::parse(r, author)?),
            SubPlugin::ContainerExclude => Self::Container(ContainerExclude::parse(r, author)?),
            SubPlugin::DestinationExclude => Self::Destination(DestinationExclude::parse(r, author)?),
        }))
    }

    pub(super) const fn sub_plugin(&self) -> SubPlugin {
        match self {
            Self::Uid(_) => SubPlugin::UidExclude,
            Self::Dns(_) => SubPlugin::DnsExclude,
            Self::Container(_) => SubPlugin::ContainerExclude,
            Self::Destination(_) => SubPlugin::DestinationExclude,
        }
    }

    /// Returns the annotations of a pod or namespace that the sub-plugin reads.
    pub(super) const fn annotations(sub_plugin: SubPlugin) -> &'static [&'static str] {
        match sub_plugin {
            SubPlugin::IstioRedirect | SubPlugin::MeshGuard => &[],
            SubPlugin::UidExclude => &uid_exclude::ANNOTATIONS,
            SubPlugin::DnsExclude => &dns_exclude::ANNOTATIONS,
            SubPlugin::ContainerExclude => &container_exclude::ANNOTATIONS,
            SubPlugin::DestinationExclude => &destination_exclude::ANNOTATIONS,
        }
    }

    /// Parses the annotations of the pod or its namespace, each on its own, in addition to this block.
    pub(super) fn annotated(&self, facts: &Facts) -> Vec<Result<(SettingSource, Self), Error>> {
        let annotated = |key: &&'static str| {
            let annotation = AnnotationValue::of_pod_or_namespace(facts, key)?;
            let parsed = match self {
                Self::Uid(_) => UidExclude::of_annotation(key, &annotation).map(Self::Uid),
                Self::Dns(block) => block.of_annotation(&annotation).map(Self::Dns),
                Self::Container(_) => ContainerExclude::of_annotation(&annotation).map(Self::Container),
                Self::Destination(_) => DestinationExclude::of_annotation(key, &annotation).map(Self::Destination),
            };
            let source = annotation.source(key);
            Some(parsed.map(|parsed| (source.clone(), parsed)).map_err(|error| source.named_in(error)))
        };
        Self::annotations(self.sub_plugin()).iter().filter_map(annotated).collect()
    }

    /// Returns the exclusions for one pod.
    pub(super) fn exclusions(
        &self,
        context: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<RequestedExclusions, Error> {
        match self {
            Self::Uid(block) => block.exclusions(context, notes),
            Self::Dns(block) => block.exclusions(context, notes),
            Self::Container(block) => block.exclusions(context, notes),
            Self::Destination(block) => block.exclusions(context, notes),
        }
    }
}
