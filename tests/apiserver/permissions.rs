//! The shipped permissions, their documented table and the requests that need them are equal.

use crate::control_plane::ControlPlane;
use crate::node::{SETTLED, events, meshed_pod, on_a_node};
use crate::repairs::watches;
use crate::shipped::{self, NAMESPACE, apply, base, chart, manifests, prepare};
use crate::support::netns_pod::Pod;
use detour_cni::pod::PodRef;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

/// A verb, a resource with its group, and the name that it is limited to.
type Permission = (String, String, String);

/// A row of the table of permissions in SECURITY.md.
struct Row {
    permission: BTreeSet<Permission>,
    who: String,
    everywhere: bool,
    when: String,
}

fn table() -> Vec<Row> {
    let text = fs::read_to_string(manifests().join("../SECURITY.md")).expect("readable");
    let rows = text.lines().skip_while(|line| !line.starts_with("| permission |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|')).map(|line| {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [permission, who, place, when, _, _] = cells[..] else { panic!("{line}") };
        let (verbs, rest) = permission.rsplit_once(' ').map_or((permission, ""), |_| {
            let last_verb = permission.split(' ').take_while(|word| word.ends_with(',')).count();
            let at = permission.match_indices(' ').nth(last_verb).expect("verbs, a resource").0;
            (&permission[..at], permission[at + 1..].trim())
        });
        let (resource, name) = rest.split_once(" called ").unwrap_or((rest, ""));
        assert!(["everywhere", "own namespace"].contains(&place), "{line}");
        Row {
            permission: verbs.split(", ").map(|verb| (verb.to_owned(), resource.to_owned(), name.to_owned())).collect(),
            who: who.to_owned(),
            everywhere: place == "everywhere",
            when: when.trim_matches('`').to_owned(),
        }
    });
    rows.collect()
}

/// The permissions of a service account in a namespace, as the API server sees them.
fn permissions(plane: &ControlPlane, account: &str, namespace: &str) -> BTreeSet<Permission> {
    let client = plane.with_token(&plane.admin().token(NAMESPACE, account));
    let review = client.create(&json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "metadata": {},
        "spec": {"namespace": namespace},
    }));
    let review = review.expect("allowed to everybody");
    assert_eq!(review["status"]["incomplete"], false);
    let strings = |value: &Value| -> Vec<String> {
        let list = value.as_array().cloned().unwrap_or_default();
        list.iter().map(|item| item.as_str().expect("text").to_owned()).collect()
    };
    let mut found = BTreeSet::new();
    for rule in review["status"]["resourceRules"].as_array().expect("rules") {
        let names = strings(&rule["resourceNames"]);
        let names = if names.is_empty() { vec![String::new()] } else { names };
        for (verb, group) in pairs(&strings(&rule["verbs"]), &strings(&rule["apiGroups"])) {
            for (resource, name) in pairs(&strings(&rule["resources"]), &names) {
                found.insert((verb.clone(), full(&resource, &group), name));
            }
        }
    }
    found
}

fn pairs(left: &[String], right: &[String]) -> Vec<(String, String)> {
    left.iter().flat_map(|l| right.iter().map(move |r| (l.clone(), r.clone()))).collect()
}

fn full(resource: &str, group: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

#[test]
fn the_shipped_permissions_equal_the_documented_table() {
    const BASE: [&str; 3] = ["always", "onExit=auto", "cni.credentials"];
    let rows = table();
    let with = |more: &[&'static str]| -> BTreeSet<&str> { BASE.iter().chain(more).copied().collect() };
    let most = "global.platform=openshift,primaryPlugin.enabled=true,taint.enabled=true,repair.repairPods=false,repair.deletePods=true";
    let variants = [
        // First, because the objects of the others stay.
        ("least", chart(&["onExit=leave,repair.enabled=false,cni.credentials=false"]), ["always"].into()),
        ("kubernetes", base("kubernetes"), with(&[])),
        ("openshift", base("openshift"), with(&["OpenShift"])),
        (
            "containers",
            chart(&["onExit=leave,repair.enabled=false,containerExclusion.enabled=true"]),
            ["always", "cni.credentials"].into(),
        ),
        ("live", chart(&["onExit=leave,repair.enabled=false,livePolicy=true"]), ["always", "cni.credentials"].into()),
        ("repair", chart(&["onExit=leave,livePolicy=false"]), ["always", "cni.credentials"].into()),
        ("most", chart(&[most]), with(&["OpenShift", "primaryPlugin.enabled", "taint.enabled", "repair.deletePods"])),
    ];
    let covered: BTreeSet<&str> = variants.iter().flat_map(|(.., when)| when.clone()).collect();
    assert_eq!(rows.iter().map(|row| row.when.as_str()).collect::<BTreeSet<_>>(), covered);

    let plane = ControlPlane::start();
    let admin = plane.admin();
    prepare(&admin);
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": NAMESPACE, "name": "no-permissions"}});
    admin.apply(&account).expect("accepted");
    for (name, objects, when) in variants {
        apply(&admin, &objects);
        let is_account = |who: &&str| {
            let name = format!("detour-{who}");
            objects
                .iter()
                .any(|object| object["kind"] == "ServiceAccount" && object["metadata"]["name"] == name.as_str())
        };
        for who in ["agent", "plugin"].into_iter().filter(is_account) {
            for namespace in [NAMESPACE, "shop"] {
                let rows = rows.iter().filter(|row| row.who == who && when.contains(row.when.as_str()));
                let rows = rows.filter(|row| row.everywhere || namespace == NAMESPACE);
                let wanted: BTreeSet<_> = rows.flat_map(|row| row.permission.clone()).collect();
                let granted = || {
                    let by_default = permissions(&plane, "no-permissions", namespace);
                    let granted = permissions(&plane, &format!("detour-{who}"), namespace);
                    granted.difference(&by_default).cloned().collect::<BTreeSet<_>>()
                };
                // The API server applies changed permissions with a delay.
                let settled = Instant::now() + Duration::from_secs(60);
                plane.until(|| granted() == wanted || Instant::now() > settled);
                assert_eq!(granted(), wanted, "{name}: {who} in {namespace}");
            }
        }
    }
}

#[test]
fn each_permission_is_used_and_no_other_is_needed() {
    let plane = shipped::cluster();
    let admin = plane.admin();
    let (pod, bare) = (meshed_pod(&admin, "web-0"), meshed_pod(&admin, "web-1"));
    on_a_node(&plane, &base("kubernetes"), |node| {
        let raced = Pod::new();
        raced.pin(&bare);
        let agent = node.start_agent("a");
        agent.wait_for_logs(&[SETTLED, "watching pods", "watching namespaces"]);
        plane.until(|| !events(&admin).is_empty());
        plane.until(|| watches(&plane) > 0);
        // Objects that the watch does not report.
        let source = node.source();
        let missing = PodRef { namespace: "missing".into(), name: "missing".into(), uid: None };
        source.facts(&missing, true).expect_err("not there");
        assert!(agent.ended().0.success());
        // Without an agent, the plugin sends the requests itself.
        let sandbox = Pod::new();
        node.call("ADD", &sandbox, &pod).expect("added");
    });
    let rows = table();
    for who in ["agent", "plugin"] {
        let asked = asked(&plane, &format!("system:serviceaccount:{NAMESPACE}:detour-{who}"));
        let when = ["always", "onExit=auto", "cni.credentials"];
        let rows = rows.iter().filter(|row| row.who == who && when.contains(&row.when.as_str()));
        let wanted: BTreeSet<_> = rows.flat_map(|row| row.permission.clone()).collect();
        assert_eq!(asked, wanted, "{who}");
    }
}

/// Returns the permissions that a user's requests needed, with names where a permission is limited to them.
fn asked(plane: &ControlPlane, user: &str) -> BTreeSet<Permission> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of_user = plane.audit().into_iter().filter(|event| event["user"]["username"] == user);
    let asked = of_user.map(|event| {
        let object = &event["objectRef"];
        assert_ne!(event["responseStatus"]["code"], 403, "{event}");
        let subresource = text(&object["subresource"]);
        let slash = if subresource.is_empty() { "" } else { "/" };
        let resource = full(&format!("{}{slash}{subresource}", text(&object["resource"])), &text(&object["apiGroup"]));
        let limited = ["serviceaccounts/token", "daemonsets.apps"].contains(&resource.as_str());
        (text(&event["verb"]), resource, if limited { text(&object["name"]) } else { String::new() })
    });
    asked.collect()
}
