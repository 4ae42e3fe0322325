//! Removal of rules from a network namespace that holds more than is read: by names, and by what each
//! built-in chain begins with.

use super::live::{Counter, LiveRule, LiveRuleset};
use super::native::rule::table_name;
use super::nfnetlink::attributes::{Attributes, find_text};
use super::nfnetlink::{Message, NfError, NfSocket, Verb};
use super::plan::CreatedTables;
use super::rule::Ruleset;
use super::rule::{Family, Hook, Table};
use super::rule_format::RuleFormat;
use crate::netlink::Allowance;
use nix::errno::Errno;

/// `NFPROTO_INET`.
const INET: u8 = 1;
/// How often a transaction is sent again because another process changed the rules meanwhile.
const TRIES: usize = 10;
/// How much of each built-in chain is read: the plugin's rules come first, unless a tool inserted others.
const BEGINNING: Allowance = Allowance { objects: 5000, bytes: 4 << 20 };

/// Removes the chains of `known`, the rules that go to them and what was `made` for them. If those rules
/// can't be found, the chains are emptied: then they have no effect.
///
/// # Errors
/// The kernel refuses that too.
pub fn remove(dialect: RuleFormat, known: &Ruleset, made: &CreatedTables) -> Result<(), NfError> {
    let mut socket = NfSocket::open()?;
    if dialect == RuleFormat::Iptables {
        let live = beginnings(&mut socket, known);
        let removed = live.and_then(|live| {
            let plan = dialect.plan(&live, known, &Ruleset::default(), made);
            plan.commit(&mut socket, &live)
        });
        match removed {
            Ok(()) => return Ok(()),
            Err(error) => tracing::debug!("the chains are only emptied: {error}"),
        }
    }
    // Each by itself: one that does not exist would take the others with it.
    emptying(dialect, known).iter().try_for_each(|message| send(&mut socket, message))
}

/// What the kernel holds, as far as removal needs it: of each built-in chain, the rules that are known or go to
/// chains of ours, and one in place of all others.
fn beginnings(socket: &mut NfSocket, known: &Ruleset) -> Result<LiveRuleset, NfError> {
    let mut live = LiveRuleset::without_rules(socket)?;
    for (key @ (family, table), chains) in &mut live.tables {
        let hooks = known.tables.get(key).map(|rules| &rules.hooks);
        for (name, chain) in chains.iter_mut().filter(|(_, chain)| chain.built_in) {
            let hook = Hook::ALL.into_iter().find(|hook| hook.chain() == name);
            let own = hook.and_then(|hook| hooks?.get(&hook)).map_or(&[][..], Vec::as_slice);
            let is_ours = |rule: &LiveRule| {
                let into_ours = |chain: &str| chain.starts_with("ISTIO_") || chain.starts_with("DETOUR_");
                rule.goes_to().is_some_and(into_ours) || rule.rule.as_ref().is_ok_and(|rule| own.contains(rule))
            };
            let mut others = false;
            let which = Attributes::new().text(1, table.name()).text(2, name);
            socket.allow(BEGINNING);
            let read = socket.dump_of(Verb::GetRule, family.number(), which, |_, body| {
                let of_chain = find_text(body, 2) == Some(name);
                match LiveRule::read(body, *family).filter(|_| of_chain) {
                    Some(rule) if is_ours(&rule) => chain.rules.push(rule),
                    _ => others = true,
                }
            });
            match read {
                Err(NfError::TooMany(_)) => others = true,
                other => other?,
            }
            if others {
                chain.rules.push(LiveRule { handle: 0, rule: Err(None), counter: Counter::default() });
            }
        }
        // What they hold does not matter, but that they may hold something.
        for chain in chains.values_mut().filter(|chain| !chain.built_in) {
            chain.rules.push(LiveRule { handle: 0, rule: Err(None), counter: Counter::default() });
        }
    }
    Ok(live)
}

/// Deletes the rules of each chain in `known`, or detour's native tables.
fn emptying(dialect: RuleFormat, known: &Ruleset) -> Vec<Message> {
    let message = |verb, family, attributes| Message { verb, flags: 0, family, attributes };
    match dialect {
        RuleFormat::Iptables => {
            let flush = |family: Family, table: Table, chain: &str| {
                message(Verb::DelRule, family.number(), Attributes::new().text(1, table.name()).text(2, chain))
            };
            let tables = known.tables.iter();
            tables.flat_map(|((f, t), rules)| rules.chains.iter().map(|(chain, _)| flush(*f, *t, chain))).collect()
        }
        RuleFormat::Nftables => {
            Table::ALL.map(|table| message(Verb::DelTable, INET, Attributes::new().text(1, table_name(table)))).into()
        }
    }
}

fn send(socket: &mut NfSocket, message: &Message) -> Result<(), NfError> {
    for _ in 0..TRIES {
        let generation = socket.generation()?;
        match socket.transact(std::slice::from_ref(message), generation) {
            Err(NfError::Changed) => {}
            Err(NfError::Refused { errno: Errno::ENOENT, .. }) => return Ok(()),
            other => return other,
        }
    }
    Err(NfError::Changed)
}
