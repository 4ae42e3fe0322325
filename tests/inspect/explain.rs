//! The report of `explain` for each case of cases.yaml, compared with `tests/golden/explain.md`. Set `UPDATE_GOLDEN` to
//! write it, and read the differences before you commit it.

use crate::run::{Run, detour, file};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A pod as OpenShift and Istio's injector modify it.
pub(crate) fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web-0", "namespace": "shop",
            "annotations": { "sidecar.istio.io/status": "{}", "k8s.v1.cni.cncf.io/networks": "default/istio-cni" }
        },
        "spec": {
            "initContainers": [{ "name": "vault-agent-init", "securityContext": { "runAsUser": 1337 } }],
            "containers": [
                { "name": "web", "securityContext": { "runAsUser": 1000650000 } },
                {
                    "name": "istio-proxy", "args": ["proxy", "sidecar"],
                    "env": [{ "name": "ISTIO_META_DNS_CAPTURE", "value": "true" }],
                    "securityContext": { "runAsUser": 1000659999, "runAsGroup": 1000659999 }
                }
            ]
        }
    })
}

fn conf() -> Value {
    json!({
        "cniVersion": "1.1.0", "name": "istio-cni", "type": "detour",
        "kubernetes": { "kubeconfig": "/k", "exclude_namespaces": ["kube-system"], "agent_namespace": "mesh" },
        "chain": [
            { "type": "istio-redirect" },
            { "type": "uid-exclude", "uids": ["1337"] },
            { "type": "dns-exclude", "uids": ["1337"] }
        ]
    })
}

pub(crate) fn annotate(pod: &mut Value, key: &str, value: &str) {
    pod["metadata"]["annotations"][key] = value.into();
}

/// A case of cases.yaml, whose head explains the keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Changes {
    namespace: Value,
    annotations: BTreeMap<String, Value>,
    pod: BTreeMap<String, Value>,
    conf: BTreeMap<String, Value>,
    code: i32,
}

impl Default for Changes {
    fn default() -> Self {
        let namespace = json!({"openshift.io/sa.scc.uid-range": "1000650000/10000", "detour.io/exclude-gids": "55"});
        let none = BTreeMap::new;
        Self { namespace, annotations: none(), pod: none(), conf: none(), code: 0 }
    }
}

/// Sets the value at a JSON pointer.
fn set(object: &mut Value, pointer: &str, value: Value) {
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    match object.pointer_mut(parent).unwrap_or_else(|| panic!("{pointer}: no parent")) {
        Value::Array(list) if key == "-" => list.push(value),
        Value::Array(list) if value.is_null() => drop(list.remove(key.parse().expect("an index"))),
        Value::Array(list) => list[key.parse::<usize>().expect("an index")] = value,
        parent => parent[key] = value,
    }
}

/// A pod and the configuration that applies to it, in the file `NAME.conf`.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) pod: Value,
    pub(crate) conf: Value,
    /// The annotations of the pod's namespace.
    namespace: Value,
    /// The exit code of `explain`.
    code: i32,
}

impl Case {
    pub(crate) fn all() -> Vec<Self> {
        let cases: BTreeMap<String, Changes> = serde_saphyr::from_str(include_str!("cases.yaml")).expect("YAML");
        let case = |(name, changes): (String, Changes)| {
            let (mut pod, mut conf) = (pod(), conf());
            let annotations = pod["metadata"]["annotations"].as_object_mut().expect("annotations");
            annotations.extend(changes.annotations);
            annotations.retain(|_, value| !value.is_null());
            changes.pod.into_iter().for_each(|(pointer, value)| set(&mut pod, &pointer, value));
            changes.conf.into_iter().for_each(|(pointer, value)| set(&mut conf, &pointer, value));
            Self { name, pod, conf, namespace: changes.namespace, code: changes.code }
        };
        cases.into_iter().map(case).collect()
    }

    /// Returns a case of cases.yaml.
    pub(crate) fn named(name: &str) -> Self {
        Self::all().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"))
    }

    /// Returns another case, which differs from the first one by this change.
    pub(crate) fn new(change: impl FnOnce(&mut Value, &mut Value)) -> Self {
        let mut case = Self::named("redirected");
        change(&mut case.pod, &mut case.conf);
        case
    }

    /// Runs `explain` with these further arguments.
    pub(crate) fn explain(&self, more: &[&str]) -> Run {
        self.run("explain", more)
    }

    /// Returns the report, of a pod that starts.
    #[track_caller]
    pub(crate) fn report(&self) -> Value {
        self.explain(&["-o", "json"]).json()
    }

    #[track_caller]
    pub(crate) fn picture(&self) -> String {
        let run = self.explain(&["--format", "svg"]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
        run.stdout
    }

    /// Traces a packet.
    pub(crate) fn trace(&self, from: &str, to: &str, more: &[&str]) -> Run {
        self.run("trace", &[&["--from", from, "--to", to], more].concat())
    }

    fn run(&self, command: &str, more: &[&str]) -> Run {
        let metadata = json!({"name": self.pod["metadata"]["namespace"], "annotations": self.namespace});
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        let namespace = file("namespace.json", &namespace.to_string());
        let conf = file(&format!("{}.conf", self.name), &self.conf.to_string());
        let arguments = [command, "-f", "-", "--config", &conf, "--namespace-file", &namespace];
        detour(&[&arguments, more].concat(), &self.pod.to_string(), &[])
    }
}

#[track_caller]
pub(crate) fn compare(case: &str, found: &str) {
    crate::support::golden::compare("explain.md", "redirected", case, &without_directories(found));
}

/// Returns the text without the directories of temporary files.
fn without_directories(text: &str) -> String {
    let start = std::env::temp_dir().join("detour-inspect-").display().to_string();
    let mut parts = text.split(&start);
    let first = parts.next().unwrap_or_default().to_owned();
    first + &parts.map(|part| part.split_once('/').map_or(part, |(_, rest)| rest)).collect::<String>()
}

#[test]
fn every_decision_is_explained() {
    for case in Case::all() {
        let run = case.explain(&[]);
        assert_eq!((run.code, run.stderr.as_str()), (case.code, ""), "{}", case.name);
        compare(&case.name, &run.stdout);
    }
}

/// Programs that read the report depend on the codes.
#[test]
fn the_warnings_of_each_case_have_their_codes() {
    let line = |case: &Case| {
        let report = case.explain(&["-o", "json"]).parsed();
        let warnings = report["warnings"].as_array().expect("a list").iter();
        let codes: Vec<&str> = warnings.map(|warning| warning["code"].as_str().expect("a code")).collect();
        (!codes.is_empty()).then(|| format!("{}: {}\n", case.name, codes.join(", ")))
    };
    compare("warnings of each case", &Case::all().iter().filter_map(line).collect::<String>());
}

#[test]
fn json_and_yaml_have_the_same_content() {
    let case = Case::named("warnings");
    let json = case.explain(&["-o", "json"]);
    // The directory of the configuration differs in each run.
    let place = |report: &Value| report["configuration"]["places"][0].as_str().expect("a path").to_owned();
    let mut report = json.json();
    compare("warnings.json", &json.stdout.replace(&place(&report), "warnings.conf"));
    let read: Value = serde_saphyr::from_str(&case.explain(&["-o", "yaml"]).stdout).expect("YAML");
    report["configuration"]["places"][0] = place(&read).into();
    report["networks"][0]["leads_to"] = place(&read).into();
    assert_eq!(read, report);
}

#[test]
fn only_the_last_condition_can_be_unmet() {
    for case in Case::all().into_iter().filter(|case| case.code == 0) {
        let (name, report) = (&case.name, case.report());
        let holds: Vec<bool> =
            report["considered"].as_array().expect("rules").iter().map(|rule| rule["holds"] == true).collect();
        let (last, before) = holds.split_last().expect("a rule");
        assert!(before.iter().all(|holds| *holds), "{name}: {report}");
        assert_eq!(*last, report["redirected"] == true, "{name}: {report}");
        let settings = report["settings"].as_array().expect("settings");
        assert_eq!(settings.is_empty(), report["redirected"] == false, "{name}");
    }
}

#[test]
fn the_cause_of_a_failing_add_is_in_each_output() {
    for (name, redirected, cause) in [
        ("invalid-annotation", false, "annotation \"detour.io/exclude-uids\" of pod shop/web-0: "),
        ("lacks-a-source-of-facts", true, "the configuration has no source of pod facts"),
        ("own-users-with-iptables", true, "the pod has its own user namespace"),
    ] {
        let case = Case::named(name);
        let run = case.explain(&["-o", "json"]);
        let (report, code) = (run.parsed(), &run.parsed()["warnings"][0]["code"]);
        assert_eq!((run.code, run.stderr.as_str(), &report["redirected"]), (1, "", &json!(redirected)), "{run:?}");
        assert!(!redirected || code == "add-fails", "{report}");
        assert!(report["add_fails"].as_str().is_some_and(|why| why.starts_with(cause)), "{report}");
        let picture = case.explain(&["--format", "svg"]);
        assert!(picture.code == 1 && picture.stdout.contains(">an ADD fails: "), "{picture:?}");
        let rules = case.explain(&["--rules", "nft"]);
        assert!(rules.code == 1 && rules.stderr.contains(&format!("an ADD fails: {cause}")), "{rules:?}");
        assert_eq!(rules.stdout.contains("table inet detour-exclusions"), redirected, "{rules:?}");
        let trace = case.trace("uid=1", "1.2.3.4:5/tcp", &[]);
        assert!(trace.code == 1 && trace.stdout.starts_with(&format!("an ADD fails: {cause}")), "{trace:?}");
    }
    // The built-in defaults are not a configuration.
    let several = json!({ "kind": "List", "items": [pod(), pod()] }).to_string();
    let conf = file("none.conf", &json!({ "name": "istio-cni", "type": "detour" }).to_string());
    assert_eq!(detour(&["explain", "-f", "-", "--config", &conf], &several, &[]).code, 1);
    assert_eq!(detour(&["explain", "-f", "-"], &several, &[]).code, 0);
}

/// With ztunnel in place of the sidecar.
#[test]
fn the_picture_and_traces_of_an_ambient_pod_show_ztunnel() {
    let (ambient, without_inbound) = (Case::named("ambient"), Case::named("ambient-without-inbound"));
    let svg = ambient.picture();
    for text in [">ztunnel<", ">15001<", ">15053<", ">15006<", "port 3306"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    assert!(!svg.contains("istio-proxy"), "{svg}");
    let svg = without_inbound.picture();
    assert!(svg.contains(">15001<") && !svg.contains(">15006<"), "{svg}");
    for (case, from, to, expected) in [
        (&ambient, "uid=1000650000", "192.0.2.1:443/tcp", "ztunnel:15001"),
        (&ambient, "uid=1000650000", "10.96.0.10:53/udp", "ztunnel:15053"),
        (&ambient, "uid=1000650000", "192.0.2.1:3306/tcp", "direct"),
        (&ambient, "uid=0", "[2001:db8::1]:443/tcp", "direct"),
        (&ambient, "inbound", "10.88.0.2:8080/tcp", "ztunnel:15006"),
        (&without_inbound, "inbound", "10.88.0.2:8080/tcp", "direct"),
    ] {
        let trace = case.trace(from, to, &["-o", "json"]).json();
        assert_eq!(trace["arrives_at"], expected, "{from} {to}: {trace:#}");
    }
}

/// Multus runs a file in the directory of its network's name for every pod.
#[test]
fn a_file_of_multus_chain_applies_to_pods_that_select_no_network() {
    let mut case = Case::new(|pod, conf| {
        annotate(pod, "k8s.v1.cni.cncf.io/networks", "other/network");
        conf["name"] = json!("vendor-cni-chain");
    });
    for (place, redirected) in [("vendor-cni-chain/detour", true), ("elsewhere/detour", false)] {
        case.name = place.to_owned();
        let report = case.explain(&["-o", "json"]);
        assert_eq!(report.json()["redirected"], redirected, "{place}: {report:?}");
        assert_eq!(report.stdout.contains("--config vendor-cni-chain/FILE.conf"), !redirected, "{report:?}");
    }
}

/// The answer first, and no setting that has its default.
#[test]
fn the_report_about_a_pod_fits_on_a_screen_with_the_answer_first() {
    let conf = |name: &str| format!("{}/conf/{name}", env!("CARGO_MANIFEST_DIR"));
    let (pod, config) = (conf("openshift-vault-pod.yaml"), conf("openshift-vault.conf"));
    let of = |more: &[&str], columns: &str| {
        let run = detour(&[&["explain", "-f", &pod, "--config", &config], more].concat(), "", &[("COLUMNS", columns)]);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
        run.stdout
    };
    let text = of(&[], "80");
    assert!(text.lines().count() <= 25, "{text}");
    assert!(
        text.starts_with("Pod shop/web-0 is redirected: the pod has an injected sidecar\nConfiguration: "),
        "{text}"
    );
    assert!(!text.contains("  default\n") && !text.contains("Warnings") && text.contains("--all"), "{text}");
    // One of several containers with the same UID.
    let bypass =
        "\n\nBypasses the sidecar\n  vault-agent-init  all outbound traffic  pod, detour.io/exclude-containers\n\n";
    assert!(text.contains(bypass), "{text}");
    let place = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
    assert!(place("Bypasses the sidecar") < place("Init containers"), "{text}");
    assert!(place("Init containers") < place("Settings that differ"), "{text}");
    let all = of(&["--all"], "10000");
    assert!(all.contains("  proxy_port") && all.contains("\nWhy\n") && all.contains("\nRequests\n"), "{all}");
}

#[test]
fn many_exclusions_are_one_line_and_an_id_of_no_container_is_named() {
    let many = Case::new(|_, conf| {
        let uids: Vec<String> = (0..1500).map(|index| (2000 + 2 * index).to_string()).collect();
        conf["chain"][1]["uids"] = json!(uids);
    });
    let text = many.explain(&[]).stdout;
    assert!(text.contains("  1,500 UIDs: 2000, 2002, 2004, … (--all)"), "{text}");
    assert!(many.explain(&["--all"]).stdout.contains("uid 4998"));
    let unknown = Case::new(|_, conf| conf["chain"][1]["uids"] = json!(["4711", "1337", "5000-5009"]));
    let text = unknown.explain(&[]).stdout;
    let line = |who: &str| text.lines().find(|line| line.contains(who)).unwrap_or_else(|| panic!("{who}: {text}"));
    for who in ["uid 4711", "uid 5000-5009"] {
        assert!(line(who).contains("no container has this ID"), "{text}");
    }
    assert!(!line("uid 1337").contains("no container"), "{text}");
}

#[test]
fn a_trace_has_the_rules_of_the_pods_rule_format_up_to_the_deciding_one() {
    for (name, hop) in
        [("redirected", "-j ISTIO_OUTPUT"), ("nftables", "jump ISTIO_OUTPUT"), ("own-users", "jump ISTIO_OUTPUT")]
    {
        let trace = Case::named(name).trace("uid=7", "10.96.0.10:53/udp", &[]).stdout;
        assert!(trace.contains(hop), "{trace}");
        let last = trace.lines().rfind(|line| line.starts_with("  ") && !line.contains("zone")).expect("rules");
        assert!(last.contains("»"), "{trace}");
    }
}

#[test]
fn a_trace_gives_the_reason_of_a_direct_packet() {
    let reason = "→ direct\nReason: not redirected: no container is named istio-proxy\n";
    for (name, expected) in [("no-proxy", reason), ("host-network", " from uid 7, gid 0 → direct\n")] {
        let direct = Case::named(name).trace("uid=7", "10.96.0.10:53/udp", &[]).stdout;
        assert!(direct.starts_with("10.96.0.10:53/udp from uid 7") && direct.contains(expected), "{direct}");
    }
}
