//! The sub-plugins by name, the origin of each setting and exclusion, and notes for users.

use crate::cni::{Block, Code, Error, SUB_PLUGINS, excerpt};
use crate::policy::{ContainerExclusion, Exclusion};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::fmt;

/// A sub-plugin, which runs in this process. A block of any other `type` belongs to an executable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SubPlugin {
    /// `istio-redirect`: redirects a meshed pod's traffic to its sidecar.
    IstioRedirect,
    /// `uid-exclude`: lets traffic of certain UIDs and GIDs bypass the sidecar.
    UidExclude,
    /// `dns-exclude`: lets certain DNS queries bypass the sidecar.
    DnsExclude,
    /// `container-exclude`: lets traffic of certain containers bypass the sidecar.
    ContainerExclude,
    /// `destination-exclude`: lets traffic to certain ports or addresses bypass the sidecar.
    DestinationExclude,
    /// `mesh-guard`: rejects what neither the redirection nor an exclusion explains.
    MeshGuard,
}

impl SubPlugin {
    /// All sub-plugins, in the order of [`SUB_PLUGINS`].
    pub const ALL: [Self; SUB_PLUGINS.len()] = [
        Self::IstioRedirect,
        Self::UidExclude,
        Self::DnsExclude,
        Self::ContainerExclude,
        Self::DestinationExclude,
        Self::MeshGuard,
    ];

    /// Returns its name: the `type` of its block and its key in `args.cni`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        SUB_PLUGINS[self as usize]
    }

    /// Returns whether an ADD fails without a source of facts.
    #[must_use]
    pub const fn needs_facts(self) -> bool {
        matches!(self, Self::IstioRedirect | Self::MeshGuard)
    }

    /// Returns the sub-plugin that `block` configures; `None` if the `type` is missing or an executable's.
    #[must_use]
    pub fn of(block: &Block) -> Option<Self> {
        let kind = block.keys.get("type").and_then(Value::as_str)?;
        Self::ALL.into_iter().find(|sub_plugin| sub_plugin.name() == kind)
    }
}

/// Where a setting or an exclusion comes from, in ascending order of precedence.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SettingSource {
    /// Istio's default.
    Default,
    /// The configuration's block or key at this path.
    Configuration(String),
    /// The container istio-proxy: the key of its ID or an environment variable.
    Container(&'static str),
    /// `args.cni`: the block of this sub-plugin.
    Argument(SubPlugin),
    /// This annotation of the pod's namespace.
    Namespace(&'static str),
    /// This annotation of the pod.
    Pod(&'static str),
}

impl SettingSource {
    /// Returns an error about this source, whose message contains the source's place.
    pub(super) fn named_in(&self, error: Error) -> Error {
        match self {
            Self::Pod(_) => error,
            Self::Configuration(_) => error.naming_network(),
            Self::Default | Self::Container(_) | Self::Argument(_) | Self::Namespace(_) => error,
        }
    }
}

impl fmt::Display for SettingSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            // The path in an attachment's configuration starts with the attachment's name.
            Self::Configuration(path) if path.starts_with("network ") => f.write_str(path),
            Self::Configuration(path) => write!(f, "configuration, {path}"),
            Self::Container(key) => write!(f, "container istio-proxy, {key}"),
            Self::Argument(sub_plugin) => write!(f, "args.cni.{}", sub_plugin.name()),
            Self::Namespace(key) => write!(f, "namespace, {key}"),
            Self::Pod(key) => write!(f, "pod, {key}"),
        }
    }
}

impl Serialize for SettingSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The sources of everything in a [`super::ChainOutput`]'s policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins {
    /// The source of each key of `istio-redirect`; several if several blocks add to one list. Empty if the pod is not
    /// redirected.
    pub settings: Vec<(&'static str, SettingSource)>,
    /// The source of each requested exclusion, including those that another one covers.
    pub exclusions: Vec<(Exclusion, SettingSource)>,
    /// The source of each requested exclusion of a container.
    pub containers: Vec<(ContainerExclusion, SettingSource)>,
    /// The decisions about the requests of the pod and its namespace.
    pub requests: Vec<DecidedRequest>,
}

/// A request of a pod or its namespace, and the bound that decides about it. `Display` shows one line.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct DecidedRequest {
    /// The item.
    pub item: String,
    /// Who requests it.
    pub source: SettingSource,
    /// Whether it is within the bounds.
    #[serde(rename = "allowed")]
    pub permitted: bool,
    /// The bound that permits it, or those that do not.
    #[serde(rename = "by")]
    pub bound: String,
    /// The annotation or argument, for messages.
    #[serde(skip)]
    pub place: String,
}

impl DecidedRequest {
    /// The next step for the author of a request outside the bounds.
    pub const NEXT: &str = "remove it, or ask the administrator to permit it with \"allow\"";

    /// Returns why the request is outside the bounds, without the next step.
    #[must_use]
    pub fn reason(&self) -> String {
        format!("{}: {:?} is outside the bounds: not permitted by {}", self.place, excerpt(&self.item), self.bound)
    }

    /// Returns the error of an ADD.
    pub(super) fn error(&self) -> Error {
        self.source.named_in(Error::new(Code::InvalidConfig, format!("{}; {}", self.reason(), Self::NEXT)))
    }
}

impl fmt::Display for DecidedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.permitted { "allowed" } else { "refused" };
        write!(f, "{}: {:?}: {verdict} by {}", self.place, excerpt(&self.item), self.bound)
    }
}

/// A line for the log and for `explain`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Note {
    /// How important the note is.
    pub severity: Severity,
    /// The text, one line.
    pub text: String,
}

/// How important a [`Note`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Everything works as configured.
    Info,
    /// A requested setting has no effect.
    Warning,
}

impl Note {
    pub(super) fn info(text: impl Into<String>) -> Self {
        Self { severity: Severity::Info, text: text.into() }
    }

    pub(super) fn warning(text: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, text: text.into() }
    }
}
