//! A shell plugin that inserts its own RETURN at the head of nat OUTPUT, as some clusters run with Istio today, works
//! before and after detour.

use crate::configuration::{exclude_1337, story};
use crate::expectations::*;
use crate::istio::Dns;
use crate::pod::{APP_PROCESS, VAULT_INIT};
use crate::world::*;

const BATCH: Process = Process { uid: 2000, gid: 2000 };
const RULE: &str = "-m owner --uid-owner 2000 -j RETURN";

fn insert_its_rule(world: &World) {
    for &family in world.families() {
        let arguments: Vec<&str> = ["-t", "nat", "-I", "OUTPUT"].into_iter().chain(RULE.split(' ')).collect();
        let (inserted, printed) = world.iptables(family, &arguments);
        assert!(inserted, "{printed}");
    }
}

#[track_caller]
fn its_rule_is_first_and_works(world: &World) {
    for &family in world.families() {
        let rules = world.iptables_save(family);
        assert_eq!(rules.chain("nat", "OUTPUT").first(), Some(&RULE), "{rules}");
    }
    tcp_is_direct(world, BATCH);
    tcp_is_captured(world, APP_PROCESS);
    tcp_is_direct(world, VAULT_INIT);
}

#[test]
fn a_shell_plugin_works_after_detour() {
    let world = World::new(Families::Both);
    world.add(&exclude_1337(&story(&world, Dns::Captured, &[])));
    insert_its_rule(&world);
    its_rule_is_first_and_works(&world);
}

#[test]
fn a_shell_plugin_works_before_detour() {
    let world = World::new(Families::Both);
    insert_its_rule(&world);
    world.add(&exclude_1337(&story(&world, Dns::Captured, &[])));
    its_rule_is_first_and_works(&world);
}
