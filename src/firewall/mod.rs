//! Firewall: a policy becomes rules as values, is compared with the live rules in the kernel, and the smallest
//! difference is committed as one netlink transaction. It starts no process and needs no tool on the host.
//!
//! * `rule`, with `set`: the rule model, shared by both rule formats; `ruleset`: all rules of a pod
//! * `istio`: a policy as rules; the redirection is that of Istio
//! * `live`: reads the live rules
//! * `foreign`: the live tables of other tools, and what rules of any tool do, without their conditions
//! * `redirections`: what other tools do with the pod's traffic, from live rules; those of istio-cni in the ambient mesh
//! * `plan`: the changes from live to desired rules, in iptables' tables
//! * `step`: the steps of a transaction, as messages and in words
//! * `drift`: how live rules differ from desired ones, in words
//! * `view`: live or desired rules in one form for both rule formats
//! * `evaluation`, with `packet`: where the first packet of a connection arrives
//! * `rule_format`: plan, commit and drift for either rule format, and removal without reading all rules
//! * `containers`: the sets of excluded containers
//! * `expression`: nf_tables expressions, shared by both rule formats
//! * `iptables`: the format `iptables`, as iptables-nft writes it
//! * `native`: tables of detour: the exclusions, and the format `nftables`
//! * `nfnetlink`: the netlink protocol of nf_tables and connection tracking

mod containers;
mod drift;
mod evaluation;
mod expression;
mod foreign;
mod iptables;
mod istio;
mod live;
pub mod native;
pub mod nfnetlink;
mod packet;
mod plan;
mod redirections;
pub mod rule;
mod rule_format;
mod ruleset;
mod set;
mod step;
mod view;

pub use crate::cni::RuleFormat;

pub use containers::{
    ContainerElement, ContainerLabel, change_container_elements, container_elements, required_container_elements,
    set_name,
};
pub use drift::{Drift, DriftKind, RuleAt, foreign_rules};
pub use evaluation::{Arrival, Evaluation, Hop, RulePlace};
pub use expression::Counter;
pub use foreign::{AttachedAt, LiveRule, Outline};
pub use iptables::{legacy_tables, restore_text};
pub use istio::{DNS_PROXY_PORT, MAX_RULES, max_rules};
pub use live::{LiveChain, LiveRuleset, failed};
pub use native::Rejected;
pub use native::rule::TableId;
pub use packet::{Destination, Packet, Sender};
pub use plan::CreatedTables;
pub use redirections::{AmbientRedirection, Diversion, DivertingChain, ForeignRedirection, NativeIstio};

pub use rule_format::{Transaction, remove};
pub use ruleset::{Ruleset, TableRules};
pub use step::{PlannedStep, Step};
pub use view::{ChainView, RuleView, RulesetView};
