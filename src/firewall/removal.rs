//! Removes detour's rules from a network namespace that contains too many rules to be read: reads only the beginning
//! of each built-in chain, and otherwise flushes detour's chains by name.

use super::expression::Counter;
use super::live::{LiveRule, LiveRuleset};
use super::native::rule::NativeTable;
use super::nfnetlink::{NfError, NfSocket, Verb, nfta, retry_changed};
use super::outline::Outline;
use super::plan::CreatedTables;
use super::rule::{Hook, NFPROTO_INET, Ruleset, is_redirection_chain};
use crate::cni::RuleFormat;
use crate::netlink::DumpLimit;
use crate::netlink::attributes::{Attributes, find_text};
use nix::errno::Errno;

/// How much of each built-in chain is read. Detour's rules come first, unless another tool inserted rules.
const MAX_READ_PER_CHAIN: DumpLimit = DumpLimit { objects: 5000, bytes: 4 << 20 };

/// Removes the chains of `own`, the rules that jump to them, and the tables and chains that detour `made`. If those
/// rules can't be found, flushes the chains, which then have no effect.
///
/// # Errors
/// The kernel refuses to flush the chains or to delete the native tables.
pub fn remove(format: RuleFormat, own: &Ruleset, made: &CreatedTables) -> Result<(), NfError> {
    let mut socket = NfSocket::open()?;
    if format == RuleFormat::Iptables {
        let live = read_beginnings(&mut socket, own);
        let removed = live.and_then(|live| {
            let no_rules = Ruleset::default();
            let plan = format.plan(&live, own, &no_rules, made);
            plan.commit(&mut socket, &live)
        });
        match removed {
            Ok(()) => return Ok(()),
            Err(error) => tracing::debug!("can't remove the rules: {error}; flushing detour's chains instead"),
        }
    }
    // One transaction for each: a missing chain or table, or one of another owner, would fail all others with it.
    flushes(format, own).iter().map(|flush| send(&mut socket, flush)).fold(Ok(()), Result::and)
}

/// Reads the live rules that removal needs: of each built-in chain, the rules of `own` and those that jump to
/// detour's chains, and one placeholder for all others.
fn read_beginnings(socket: &mut NfSocket, own: &Ruleset) -> Result<LiveRuleset, NfError> {
    let mut live = LiveRuleset::without_rules(socket)?;
    for (key @ (family, table), chains) in &mut live.tables {
        let hooks = own.tables.get(key).map(|rules| &rules.hooks);
        for (name, chain) in chains.iter_mut().filter(|(_, chain)| chain.built_in) {
            let own_rules = Hook::of_chain(name).and_then(|hook| hooks?.get(&hook)).map_or(&[][..], Vec::as_slice);
            let is_ours = |rule: &LiveRule| {
                rule.jump_target().is_some_and(is_redirection_chain)
                    || rule.rule.as_ref().is_ok_and(|rule| own_rules.contains(rule))
            };
            let mut has_others = false;
            let which = Attributes::of(|list| list.text(nfta::TABLE, table.name()).text(nfta::RULE_CHAIN, name));
            socket.allow(MAX_READ_PER_CHAIN);
            let read = socket.dump_of(Verb::GetRule, family.number(), which, |_, body| {
                let of_chain = find_text(body, nfta::RULE_CHAIN) == Some(name);
                match LiveRule::read(body, *family).filter(|_| of_chain) {
                    Some(rule) if is_ours(&rule) => chain.rules.push(rule),
                    _ => has_others = true,
                }
            });
            match read {
                Err(NfError::TooMany(_)) => has_others = true,
                other => other?,
            }
            if has_others {
                chain.rules.push(placeholder());
            }
        }
        // Not read: with a placeholder, the plan flushes the chain before it deletes it.
        for chain in chains.values_mut().filter(|chain| !chain.built_in) {
            chain.rules.push(placeholder());
        }
    }
    Ok(live)
}

fn placeholder() -> LiveRule {
    LiveRule { handle: 0, rule: Err(Outline::default()), counter: Counter::default() }
}

/// Deletes a table (`NFTA_TABLE_…`) or flushes one of its chains (`NFTA_RULE_…`).
struct Flush<'a> {
    family: u8,
    table: &'static str,
    chain: Option<&'a str>,
}

/// Returns what deletes detour's native tables, and in the iptables format flushes each chain of `own`.
fn flushes(format: RuleFormat, own: &Ruleset) -> Vec<Flush<'_>> {
    let delete = |table: &NativeTable| Flush { family: NFPROTO_INET, table: table.name(), chain: None };
    let mut flushes: Vec<Flush<'_>> = NativeTable::ALL.iter().map(delete).collect();
    if format == RuleFormat::Iptables {
        flushes.extend(own.tables.iter().flat_map(|((family, table), rules)| {
            let (family, table) = (family.number(), table.name());
            rules.chains.iter().map(move |(chain, _)| Flush { family, table, chain: Some(chain) })
        }));
    }
    flushes
}

/// Sends one message as a transaction; a missing chain or table is no error.
fn send(socket: &mut NfSocket, Flush { family, table, chain }: &Flush<'_>) -> Result<(), NfError> {
    let sent = retry_changed(|| {
        let generation = socket.generation()?;
        socket.transact(generation, |batch| match chain {
            Some(chain) => batch
                .message(Verb::DelRule, 0, *family, |list| list.text(nfta::TABLE, table).text(nfta::RULE_CHAIN, chain)),
            None => batch.message(Verb::DelTable, 0, *family, |list| list.text(nfta::TABLE, table)),
        })
    });
    match sent {
        Err(NfError::Refused { errno: Errno::ENOENT, .. }) => Ok(()),
        other => other,
    }
}
