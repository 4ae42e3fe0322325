//! Changes as netlink messages, sent as one transaction.

use super::iptables;
use super::live::LiveRuleset;
use super::native::rule::chain_type;
use super::nfnetlink::attributes::Attributes;
use super::nfnetlink::{NfError, Message, NLM_F_APPEND, NLM_F_CREATE, NfSocket, Verb};
use super::plan::{BY_HANDLE, PlannedStep, Step};
use super::rule::{Family, Hook, Rule, Table};

/// Commits `changes`, all or nothing, on top of what `live` has read.
///
/// # Errors
/// The kernel refuses, another process changed the rules since, or more rules of a chain would be deleted
/// one by one than [`BY_HANDLE`].
pub(super) fn commit(socket: &mut NfSocket, live: &LiveRuleset, changes: &[PlannedStep]) -> Result<(), NfError> {
    let deletes_alike = |a: &PlannedStep, b: &PlannedStep| match (a, b) {
        ((a, Step::DeleteRule { chain: from, .. }), (b, Step::DeleteRule { chain, .. })) => (a, from) == (b, chain),
        _ => false,
    };
    if let Some(run) = changes.chunk_by(deletes_alike).find(|run| run.len() > BY_HANDLE) {
        return Err(NfError::TooManyDeletions { count: run.len(), limit: BY_HANDLE });
    }
    let messages: Vec<Message> = changes.iter().map(|((family, table), step)| message(*family, *table, step)).collect();
    socket.transact(&messages, live.generation)
}

fn message(family: Family, table: Table, step: &Step) -> Message {
    let named = || Attributes::new().text(1, table.name());
    let (verb, flags, attributes) = match step {
        Step::Table => (Verb::NewTable, NLM_F_CREATE, named()),
        Step::Hook(hook) => (Verb::NewChain, NLM_F_CREATE, built_in(named(), table, *hook)),
        Step::Chain(name) => (Verb::NewChain, NLM_F_CREATE, named().text(3, name)),
        Step::Rule { chain, before, rule } => {
            let attributes = with_rule(named().text(2, chain), rule, family);
            match before {
                Some(handle) => (Verb::NewRule, NLM_F_CREATE, attributes.be64(6, *handle)),
                None => (Verb::NewRule, NLM_F_CREATE | NLM_F_APPEND, attributes),
            }
        }
        Step::DeleteRule { chain, handle } => (Verb::DelRule, 0, named().text(2, chain).be64(3, *handle)),
        Step::Flush(chain) => (Verb::DelRule, 0, named().text(2, chain)),
        Step::DeleteChain(name) => (Verb::DelChain, 0, named().text(3, name)),
        Step::DeleteTable => (Verb::DelTable, 0, named()),
    };
    Message { verb, flags, family: family.number(), attributes }
}

/// What iptables-nft gives its built-in chains: hook, priority (linux/netfilter_ipv4.h), policy
/// and type.
fn built_in(attributes: Attributes, table: Table, hook: Hook) -> Attributes {
    const NF_ACCEPT: u32 = 1;
    let priority: i32 = match table {
        Table::Raw => -300,
        Table::Mangle => -150,
        Table::Nat => -100,
    };
    let kind = chain_type(table, hook);
    let where_to = Attributes::new().be32(1, hook.number()).bytes(2, &priority.to_be_bytes());
    attributes.text(3, hook.chain()).nested(4, &where_to).be32(5, NF_ACCEPT).text(7, kind)
}

fn with_rule(attributes: Attributes, rule: &Rule, family: Family) -> Attributes {
    let attributes = attributes.nested(4, &iptables::expressions(rule, family));
    match iptables::compat(rule) {
        Some(compat) => attributes.nested(5, &compat),
        None => attributes,
    }
}
