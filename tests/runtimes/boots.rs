//! Boots: the runtime starts with an empty `/run` and the files of the node from before. At once, pods start all the
//! time, and the cluster CNI removes, writes and rewrites its configuration list. The agent starts at a random point,
//! is replaced, or is absent.
//!
//! Each pod is checked as soon as the runtime has started its sandbox. The agent repairs no pods here.

use crate::cluster::{Agent, Cluster};
use crate::cluster_cni::ClusterCni;
use crate::kubelet::{Counts, Expected, Kind, Kubelet, expected};
use crate::node::{Node, Runtime, until};
use crate::pod::Pod;
use crate::{Random, repetitions, result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The agent's flag: the plugin is in a configuration list of its own.
const OWN_LIST: &[&str] = &["--own-list=true"];

/// What happens in one boot, and when: the time since the runtime was ready.
struct Plan {
    what: &'static str,
    /// When the cluster CNI writes the list that it has removed at the start.
    withdrawn: Option<Duration>,
    api: ApiServer,
    /// Whether the token in the plugin's kubeconfig has expired.
    expired: bool,
    agent: Option<Duration>,
    /// How long after its start the agent gets a signal, and the next one starts.
    replaced: Option<(Duration, &'static str)>,
    /// How long after the agent's start all other pods are removed.
    drained: Option<Duration>,
}

/// The API server of a boot.
enum ApiServer {
    Reachable,
    /// Until then, it refuses connections.
    ClosedUntil(Duration),
    /// Until then, it answers no request.
    SilentUntil(Duration),
}

/// Shows the configuration lists and the processes of the node, and why the agent is not ready.
const SCENE: &str = "date; ls -l --time-style=full-iso /etc/cni/net.d; ps axo pid,etimes,stat,wchan:20,args | cut -c 1-200; \
                     curl --silent --max-time 5 127.0.0.1:8099/readyz; true";

enum Step {
    OpenApi,
    StartAgent,
    ReplaceAgent(&'static str),
    Drain,
}

impl Plan {
    /// The plan of boot `number` with an agent.
    fn with_agent(number: usize, random: &mut Random) -> Self {
        let second = Duration::from_secs(1);
        let mut plan = Self {
            what: "API server reachable",
            withdrawn: (!number.is_multiple_of(3)).then(|| random.time(3000)),
            api: ApiServer::Reachable,
            expired: false,
            agent: Some(random.time(4000)),
            replaced: None,
            drained: None,
        };
        match number % 5 {
            1 => {
                plan.what = "API server absent at first";
                let time = second / 2 + random.time(4000);
                let is_closed = (number / 5).is_multiple_of(2);
                plan.api = if is_closed { ApiServer::ClosedUntil(time) } else { ApiServer::SilentUntil(time) };
            }
            2 => {
                plan.what = "agent replaced";
                let signal = if (number / 5).is_multiple_of(2) { "-KILL" } else { "-TERM" };
                plan.replaced = Some((random.time(2000), signal));
            }
            3 => {
                plan.what = "token expired";
                plan.expired = true;
            }
            4 => {
                plan.what = "node drained";
                plan.drained = Some(second / 2 + random.time(2000));
            }
            _ => {}
        }
        plan
    }

    /// The plans of boots without an agent.
    fn without_agent(random: &mut Random) -> [Self; 4] {
        let until = Duration::from_secs(6);
        let mut plan = |what, api, expired| {
            let withdrawn = Some(random.time(3000));
            Self { what, withdrawn, api, expired, agent: None, replaced: None, drained: None }
        };
        [
            plan("no agent", ApiServer::Reachable, false),
            plan("no agent, API server closed for 6 s", ApiServer::ClosedUntil(until), false),
            plan("no agent, API server silent for 6 s", ApiServer::SilentUntil(until), false),
            plan("no agent, token expired", ApiServer::Reachable, true),
        ]
    }

    /// Whether pods with a sidecar can start at some time.
    fn has_facts(&self) -> bool {
        self.agent.is_some() || !self.expired
    }

    fn steps(&self) -> Vec<(Duration, Step)> {
        let mut steps = Vec::new();
        if let ApiServer::ClosedUntil(time) | ApiServer::SilentUntil(time) = self.api {
            steps.push((time, Step::OpenApi));
        }
        if let Some(start) = self.agent {
            steps.push((start, Step::StartAgent));
            steps.extend(self.replaced.map(|(time, signal)| (start + time, Step::ReplaceAgent(signal))));
            steps.extend(self.drained.map(|time| (start + time, Step::Drain)));
        }
        steps.sort_by_key(|(time, _)| *time);
        steps
    }
}

/// One boot and its outcome.
struct Boot {
    what: &'static str,
    counts: Counts,
    /// How long the agent's own pods took to start.
    agents: Vec<Duration>,
    /// Whether the last agent reported in time that it was ready.
    is_ready: bool,
}

/// Boots the node and lets it run until the plan is complete and pods start as they should.
fn boot(node: &mut Node, cluster: &Cluster, expected: &Expected, plan: &Plan, random: &mut Random) -> Boot {
    node.power_on();
    let node = &*node;
    let kubelet = Kubelet::new(node, cluster, expected);
    let before = kubelet.sandboxes();
    let mut entrance = (!matches!(plan.api, ApiServer::ClosedUntil(_))).then(|| cluster.open(node));
    if let (ApiServer::Reachable, Some(entrance)) = (&plan.api, &entrance) {
        cluster.answer(entrance);
    }
    let written = AtomicBool::new(false);
    let (mut agent, mut agents, mut is_ready) = (None, Vec::new(), true);
    thread::scope(|scope| {
        let rewrites = Random(random.below(u32::MAX));
        let cni = scope.spawn(|| ClusterCni::of(node).run(rewrites, plan.withdrawn, &written));
        let kinds = [Kind::Meshed, Kind::Excluding, Kind::Plain].map(|kind| {
            let kubelet = &kubelet;
            scope.spawn(move || kubelet.run(kind))
        });
        let removal = scope.spawn(|| kubelet.remove_all(&before));
        let mut start_agent = || {
            let begin = Instant::now();
            let pod = Pod::plain("detour-system", &format!("detour-agent-{}", random.below(1_000_000)));
            kubelet.retry(&pod).expect("the boot has not ended");
            agents.push(begin.elapsed());
            Agent::start_on_node(node, cluster, OWN_LIST)
        };
        for (time, step) in plan.steps() {
            thread::park_timeout(time.saturating_sub(kubelet.begin.elapsed()));
            match step {
                Step::OpenApi => {
                    let entrance = entrance.get_or_insert_with(|| cluster.open(node));
                    cluster.answer(entrance);
                }
                Step::StartAgent => agent = Some(start_agent()),
                Step::ReplaceAgent(signal) => {
                    agent.take().iter_mut().for_each(|agent: &mut Agent| agent.end(signal));
                    agent = Some(start_agent());
                }
                Step::Drain => kubelet.drain(),
            }
        }
        let (meshed, complete) = (kubelet.meshed(), Instant::now());
        let is_complete = || match plan.has_facts() {
            true => kubelet.meshed() >= meshed + 2 && kubelet.plain() > 0,
            // A pod with a sidecar that starts nevertheless needs some time.
            false => kubelet.plain() > 0 && complete.elapsed() > Duration::from_secs(6),
        };
        while !is_complete() && complete.elapsed() < Duration::from_secs(60) {
            thread::park_timeout(Duration::from_millis(20));
        }
        written.store(true, Ordering::Relaxed);
        cni.join().expect("it writes");
        if let Some(agent) = &agent {
            let stopped = Instant::now();
            while !agent.is_ready(node) && stopped.elapsed() < Duration::from_secs(60) {
                thread::park_timeout(Duration::from_millis(50));
            }
            is_ready = agent.is_ready(node);
            if !is_ready {
                println!("{}: the agent is not ready: {:#?}", plan.what, agent.logged());
                println!("{}", node.ok(&["sh", "-c", SCENE]));
            }
        }
        kubelet.ended.store(true, Ordering::Relaxed);
        kinds.into_iter().for_each(|starter| starter.join().expect("it starts pods"));
        removal.join().expect("it removes sandboxes");
    });
    Boot { what: plan.what, counts: kubelet.counts(), agents, is_ready }
}

/// A node on which an agent has installed the plugin, and the rules of its pods. The agent has ended.
fn installed(runtime: Runtime, token: &str) -> (Node, Cluster, Expected) {
    let node = Node::start(runtime, |_| ());
    let cluster = Cluster::new(&node);
    cluster.issue(&node, token);
    let entrance = cluster.open(&node);
    cluster.answer(&entrance);
    let agent = Agent::start_on_node(&node, &cluster, OWN_LIST);
    until("the agent is ready", || agent.is_ready(&node));
    node.wait_for_plugin();
    let expected = expected(&node, &cluster);
    (node, cluster, expected)
}

/// Boots a node `BOOTS` times with an agent, and a tenth of this for each case without one.
fn boots(runtime: Runtime) -> Vec<Boot> {
    let count = repetitions("BOOTS", 3);
    let mut random = Random(u32::try_from(repetitions("SEED", 1)).expect("a small number"));
    let mut token = 1;
    let name = |number: usize| format!("token-{number}");
    let (mut node, cluster, expected) = installed(runtime, &name(token));

    let mut plans: Vec<_> = (0..count).map(|number| Plan::with_agent(number, &mut random)).collect();
    plans.extend((0..count.div_ceil(10)).flat_map(|_| Plan::without_agent(&mut random)));
    let mut boots = Vec::new();
    for (number, plan) in plans.iter().enumerate() {
        node.power_off();
        if plan.expired && plan.agent.is_some() {
            token += 1;
            cluster.issue(&node, &name(token));
        } else {
            // The plugin has the current token unless it has expired.
            cluster.api.accept_only(&name(if plan.expired { 0 } else { token }));
        }
        let boot = boot(&mut node, &cluster, &expected, plan, &mut random);
        println!("boot {number} of {}: {boot}", runtime.name());
        boots.push(boot);
    }
    report(runtime, &boots);
    boots
}

/// Adds the row of these boots to the table.
fn report(runtime: Runtime, boots: &[Boot]) {
    let sum = |number: fn(&Boot) -> usize| boots.iter().map(number).sum::<usize>();
    let value = format!(
        "{} boots; started: {} meshed pods, {} others, {} agents; failed attempts: {}; meshed pods without rules: {}; with other rules: {}; agent not ready: {}",
        boots.len(),
        sum(|boot| boot.counts.meshed()),
        sum(|boot| boot.counts.plain()),
        sum(|boot| boot.agents.len()),
        sum(|boot| boot.counts.errors.len()),
        sum(|boot| boot.counts.without_rules.len()),
        sum(|boot| boot.counts.other_rules.len()),
        sum(|boot| usize::from(!boot.is_ready)),
    );
    result(runtime, "boots, own list", &value);
}

impl std::fmt::Display for Boot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, counts, agents, is_ready } = self;
        let (meshed, plain, failed) = (counts.meshed(), counts.plain(), counts.errors.len());
        write!(f, "{what}: {meshed} meshed pods, first after {:?}; {plain} others, ", counts.first(true))?;
        write!(f, "first after {:?}; agents: {agents:?}; ready: {is_ready}; {failed} failures", counts.first(false))?;
        for error in counts.errors.iter().take(3).chain(counts.errors.last()) {
            write!(f, "\n  {error}")?;
        }
        let (without, other) = (counts.without_rules.len(), counts.other_rules.len());
        write!(f, "\n  {without} meshed pods without rules, {other} pods with other rules")?;
        let wrong = counts.without_rules.first().into_iter().chain(counts.other_rules.first());
        wrong.into_iter().try_for_each(|wrong| write!(f, "\n  {wrong}"))
    }
}

fn own_list(runtime: Runtime) {
    for boot in boots(runtime) {
        assert_eq!((boot.counts.without_rules.len(), boot.counts.other_rules.len()), (0, 0), "{boot}");
        assert!(boot.counts.plain() > 0 && boot.is_ready, "{boot}");
        assert_eq!(boot.counts.meshed() > 0, boot.what != "no agent, token expired", "{boot}");
    }
}

#[test]
fn no_meshed_pod_starts_without_rules_after_a_boot_of_containerd() {
    own_list(Runtime::Containerd);
}

#[test]
fn no_meshed_pod_starts_without_rules_after_a_boot_of_cri_o() {
    own_list(Runtime::CriO);
}
