//! Empties chains by their names alone, for network namespaces that hold more than can be read.

use super::dialect::Dialect;
use super::native::rule::table_name;
use super::nfnetlink::attributes::Attributes;
use super::nfnetlink::{Error, Message, Socket, Verb};
use super::rule::Table;
use super::ruleset::Ruleset;
use nix::errno::Errno;

/// `NFPROTO_INET`.
const INET: u8 = 1;
/// How often a transaction is sent again because another process changed the rules meanwhile.
const TRIES: usize = 10;

/// Deletes the rules of each chain in `known`, or detour's native tables. Rules that go to the chains stay;
/// they have no effect then.
///
/// # Errors
/// The kernel refuses; that there is no such chain or table is no error.
pub fn empty(dialect: Dialect, known: &Ruleset) -> Result<(), Error> {
    let message = |verb, family, attributes| Message { verb, flags: 0, family, attributes };
    let messages: Vec<Message> = match dialect {
        Dialect::Iptables => {
            let chains =
                known.tables.iter().flat_map(|(key, rules)| rules.chains.iter().map(move |chain| (key, chain)));
            let flush = |((family, table), (name, _)): (&(super::rule::Family, Table), &(String, _))| {
                message(Verb::DelRule, family.number(), Attributes::new().text(1, table.name()).text(2, name))
            };
            chains.map(flush).collect()
        }
        Dialect::Nftables => {
            let delete = |table| message(Verb::DelTable, INET, Attributes::new().text(1, table_name(table)));
            Table::ALL.map(delete).into()
        }
    };
    let mut socket = Socket::open()?;
    // Each by itself: one that does not exist would take the others with it.
    messages.iter().try_for_each(|message| send(&mut socket, message))
}

fn send(socket: &mut Socket, message: &Message) -> Result<(), Error> {
    for _ in 0..TRIES {
        let generation = socket.generation()?;
        match socket.transact(std::slice::from_ref(message), generation) {
            Err(Error::Changed) => {}
            Err(Error::Refused { errno: Errno::ENOENT, .. }) => return Ok(()),
            other => return other,
        }
    }
    Err(Error::Changed)
}
