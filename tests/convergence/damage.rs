//! Every change to detour's rules with iptables is detected by CHECK and repaired by ADD. `ALL_DAMAGES=1` tries each
//! kind of change on each rule.

use crate::attachment::{Attachment, Facts, Slot};
use crate::call::Answer;
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;

/// One change to the rules: `iptables` or `ip6tables` with these arguments, in this order.
struct Damage {
    what: &'static str,
    commands: Vec<String>,
    /// Texts that CHECK must report.
    named: Vec<String>,
}

/// A rule as iptables-save prints it, and its position.
struct Place {
    family: &'static str,
    table: String,
    chain: String,
    /// Starts at 1, as in iptables.
    number: usize,
    rule: String,
}

impl Place {
    fn damage(&self, what: &'static str, commands: &[String], named: &[String]) -> Damage {
        let table = format!("-t {} ", self.table);
        Damage { what, commands: commands.iter().map(|c| table.clone() + c).collect(), named: named.to_vec() }
    }

    /// Returns the text with which CHECK reports it.
    fn report(&self, word: &str, rule: &str) -> String {
        format!("{word}: {} {} -A {rule}", self.family, self.table)
    }

    fn conditions(&self) -> &str {
        self.rule.strip_prefix(&self.chain).expect("it stands in its chain").trim()
    }

    /// Returns the possible changes to one rule.
    fn damages(&self) -> Vec<Damage> {
        let Self { chain, number, rule, .. } = self;
        let conditions = self.conditions();
        let missing = self.report("missing", rule);
        let replaced =
            format!("{chain} -s {} -j RETURN", if self.family == "ip" { "192.0.2.1/32" } else { "2001:db8::1/128" });
        let in_place =
            |rule: &str| format!("-I {chain} {number}{}", rule.strip_prefix(chain.as_str()).expect("of its chain"));
        let mut all = vec![
            self.damage("deleted", &[format!("-D {rule}")], std::slice::from_ref(&missing)),
            self.damage("duplicated", &[format!("-A {rule}")], &[self.report("extra", rule)]),
        ];
        if chain.contains('_') {
            let extra = self.report("extra", &replaced);
            let changed =
                [format!("-R {chain} {number}{}", replaced.strip_prefix(chain.as_str()).expect("of its chain"))];
            all.push(self.damage("changed", &changed, &[missing, extra.clone()]));
            all.push(self.damage("inserted in front of it", &[in_place(&replaced)], &[extra]));
            let strange =
                format!("-I {chain} {number} -p tcp -m tcp --tcp-flags SYN SYN -m comment --comment strange -j ACCEPT");
            let extra = format!("extra: {} {} -A {chain} (a foreign rule", self.family, self.table);
            all.push(self.damage("a rule that is never ours inserted", &[strange], &[extra]));
        } else if conditions.starts_with("-j") || conditions.contains("-j ISTIO") {
            let narrowed =
                format!("{chain} -p tcp -m tcp --dport 1 {}", &conditions[conditions.find("-j").expect("a jump")..]);
            let commands = [format!("-D {rule}"), in_place(&narrowed).replace(&format!("{number} "), "1 ")];
            all.push(self.damage("jump narrowed", &commands, &[missing, self.report("extra", &narrowed)]));
        }
        all
    }
}

fn places(kernel: &Kernel) -> Vec<Place> {
    let mut found = Vec::new();
    for (place, rules) in &kernel.rules {
        let mut words = place.split(' ');
        let mut word = || words.next().expect("FAMILY TABLE CHAIN").to_owned();
        let family = if word() == "ip" { "ip" } else { "ip6" };
        let (table, chain) = (word(), word());
        for (index, rule) in rules.iter().enumerate() {
            found.push(Place {
                family,
                table: table.clone(),
                chain: chain.clone(),
                number: index + 1,
                rule: rule.clone(),
            });
        }
    }
    found
}

/// Returns the possible changes to a whole netfilter chain.
fn of_chains(kernel: &Kernel, places: &[Place]) -> Vec<(&'static str, Damage)> {
    let mut all = Vec::new();
    for rules in kernel.rules.values().filter(|rules| !rules.is_empty()) {
        let at = |rule: &String| {
            places
                .iter()
                .find(|p| p.rule == *rule && kernel.rules[&format!("{} {} {}", p.family, p.table, p.chain)] == *rules)
        };
        let in_chain: Vec<&Place> = rules.iter().filter_map(at).collect();
        let (first, last) = (in_chain[0], in_chain[in_chain.len() - 1]);
        let missing: Vec<String> = rules.iter().take(3).map(|rule| first.report("missing", rule)).collect();
        all.push((first.family, first.damage("flushed", &[format!("-F {}", first.chain)], &missing)));
        if rules.len() > 1 && first.rule != last.rule {
            let commands = [format!("-D {}", first.rule), format!("-A {}", first.rule)];
            all.push((first.family, first.damage("first moved to the end", &commands, &[first.report("moved", "")])));
        }
    }
    all
}

/// Makes one change after another; checks each time that CHECK detects it and ADD repairs it.
fn is_detected_and_repaired(attachments: &[Attachment]) {
    on_a_node(|| {
        let pod = Pod::new();
        attachments.iter().for_each(|attachment| pod.add(*attachment).done());
        let right = Kernel::of(&pod);
        let places = places(&right);
        let single = places.iter().flat_map(|place| place.damages().into_iter().map(|damage| (place.family, damage)));
        let all: Vec<_> = single.chain(of_chains(&right, &places)).step_by(every()).collect();
        let part = all.len().div_ceil(std::thread::available_parallelism().map_or(1, usize::from));
        std::thread::scope(|scope| {
            for part in all.chunks(part) {
                scope.spawn(|| each_in_its_own_pod(attachments, &right, part));
            }
        });
        println!("{attachments:?}: {} damages", all.len());
        attachments.iter().for_each(|attachment| pod.del(*attachment).done());
    });
}

/// Returns the sampling interval: 1 for all changes, otherwise a sample with each kind and each netfilter chain.
fn every() -> usize {
    if std::env::var_os("ALL_DAMAGES").is_some() { 1 } else { 7 }
}

fn each_in_its_own_pod(attachments: &[Attachment], right: &Kernel, damages: &[(&'static str, Damage)]) {
    let pod = Pod::new();
    attachments.iter().for_each(|attachment| pod.add(*attachment).done());
    let last = *attachments.last().expect("there is one");
    for (family, damage) in damages {
        let program = if *family == "ip" { "iptables" } else { "ip6tables" };
        let when = format!("{program} {:?} ({})", damage.commands, damage.what);
        for command in &damage.commands {
            pod.tool(program, &command.split(' ').collect::<Vec<_>>(), "");
        }
        let text = match pod.check(last) {
            Answer::Refused(103, text) => text,
            other => panic!("{when}: {other:?}"),
        };
        for named in &damage.named {
            assert!(text.contains(named), "{when}: {named:?} is not in {text:?}");
        }
        pod.add(last).done();
        Kernel::of(&pod).assert_is(right, &when);
        pod.check(last).done();
    }
    attachments.iter().for_each(|attachment| pod.del(*attachment).done());
}

#[test]
fn changes_to_an_attachment_with_dns_capture_are_repaired() {
    is_detected_and_repaired(&[Slot::Detour.with(Facts::DnsCaptured)]);
}

#[test]
fn changes_to_two_attachments_with_annotations_are_repaired() {
    is_detected_and_repaired(&[Slot::IstioCni.with(Facts::Annotated), Slot::ExcludeDns.with(Facts::Annotated)]);
}

/// Policy rules and routes of both families, in both dialects.
#[test]
fn changes_to_the_routing_of_tproxy_are_repaired() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    let damages = [
        ("route flush table 133", "missing: IPv4 route local default dev lo table 133"),
        ("-6 route flush table 133", "missing: IPv6 route local default dev lo table 133"),
        ("route replace unreachable default table 133", "missing: IPv4 route local default dev lo table 133"),
        ("route replace default dev eth0 table 133", "missing: IPv4 route local default dev lo table 133"),
        ("-6 route replace unreachable default table 133", "missing: IPv6 route local default dev lo table 133"),
        ("-6 route replace default dev eth0 table 133", "missing: IPv6 route local default dev lo table 133"),
        ("-6 route add unreachable default table 133 metric 10", "missing: IPv6 route local default dev lo table 133"),
        ("route add unreachable default table 133 tos 0x10", "missing: IPv4 route local default dev lo table 133"),
        ("rule del table 133", "missing: IPv4 policy rule fwmark 0x539 lookup 133"),
        ("-6 rule del table 133", "missing: IPv6 policy rule fwmark 0x539 lookup 133"),
    ];
    on_a_node(|| {
        for dialect in ["iptables", "nftables"] {
            let pod = Pod::new();
            let before = Kernel::of(&pod);
            let mut configuration = attachment.configuration();
            configuration["dialect"] = dialect.into();
            let netns = pod.netns().display().to_string();
            let call = |verb| pod.call_with(verb, attachment.slot.ifname(), &configuration, &netns);
            call("ADD").done();
            let right = Kernel::of(&pod);
            for (damage, named) in damages {
                pod.tool("ip", &damage.split(' ').collect::<Vec<_>>(), "");
                let text = call("CHECK").refused(103);
                assert!(text.contains(named), "{damage}: {text}");
                call("ADD").done();
                Kernel::of(&pod).assert_is(&right, damage);
                call("CHECK").done();
            }
            call("DEL").done();
            Kernel::of(&pod).assert_is(&before, "after DEL");
        }
    });
}

/// DEL removes the route that ADD added, and no other route of the table.
#[test]
fn del_leaves_a_foreign_route_in_the_table_of_tproxy() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(attachment).done();
        let foreign = ["-6", "route", "add", "unreachable", "default", "table", "133", "metric", "10"];
        pod.tool("ip", &foreign, "");
        pod.del(attachment).done();
        let left = pod.tool("ip", &["-6", "route", "show", "table", "133"], "");
        assert!(left.starts_with("unreachable default dev lo metric 10 ") && left.lines().count() == 1, "{left}");
    });
}

/// A pod can disable IPv6 after ADD. Its IPv4 traffic still needs the IPv4 routing.
#[test]
fn disabling_ipv6_leaves_the_ipv4_routing_of_tproxy() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    on_a_node(|| {
        for dialect in ["iptables", "nftables"] {
            let pod = Pod::new();
            let mut configuration = attachment.configuration();
            configuration["dialect"] = dialect.into();
            let netns = pod.netns().display().to_string();
            let call = |verb| pod.call_with(verb, attachment.slot.ifname(), &configuration, &netns);
            call("ADD").done();
            pod.tool("sysctl", &["-qw", "net.ipv6.conf.all.disable_ipv6=1"], "");
            let before = Kernel::of(&pod);
            for verb in ["CHECK", "ADD", "CHECK"] {
                call(verb).done();
                Kernel::of(&pod).assert_is(&before, &format!("{dialect}: {verb}"));
            }
            call("DEL").done();
            assert!(!Kernel::of(&pod).has_rules());
        }
    });
}

/// Undoing a failed ADD removes only what that ADD added.
#[test]
fn a_failed_add_keeps_the_routing_of_an_earlier_one() {
    let attachment = Slot::Detour.with(Facts::Tproxy);
    let damages = [
        ("sysctl", "-qw net.ipv6.conf.lo.disable_ipv6=1", "sysctl", "-qw net.ipv6.conf.lo.disable_ipv6=0"),
        ("ip", "link set lo down", "ip", "link set lo up"),
    ];
    let words = |text: &'static str| text.split(' ').collect::<Vec<_>>();
    on_a_node(|| {
        for (program, damage, repair_program, repair) in damages {
            let pod = Pod::new();
            pod.add(attachment).done();
            let right = Kernel::of(&pod);
            pod.tool(program, &words(damage), "");
            let before = Kernel::of(&pod);
            pod.check(attachment).refused(103);
            let error = pod.add(attachment).refused(102);
            assert!(error.contains("disable IPv6 on lo") || error.contains("check that lo is up"), "{error}");
            Kernel::of(&pod).assert_is(&before, damage);
            pod.tool(repair_program, &words(repair), "");
            pod.add(attachment).done();
            pod.check(attachment).done();
            assert!(Kernel::of(&pod).has_same_rules(&right), "{damage}");
            pod.del(attachment).done();
            assert!(!Kernel::of(&pod).has_rules());
        }
    });
}
