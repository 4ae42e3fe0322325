//! All objects of a cluster.

use crate::client::Client;
use serde_json::Value;
use std::collections::BTreeMap;

/// Returns all objects of the cluster by their kind, namespace and name, except those that the API server itself writes
/// all the time.
pub(crate) fn inventory(admin: &Client) -> BTreeMap<String, Value> {
    let groups = admin.get_path("/apis").expect("allowed");
    let versions = groups["groups"].as_array().expect("groups").iter();
    let versions =
        versions.map(|group| format!("/apis/{}", group["preferredVersion"]["groupVersion"].as_str().expect("text")));
    let mut found = BTreeMap::new();
    for version in versions.chain(["/api/v1".to_owned()]) {
        let resources = admin.get_path(&version).expect("served");
        for resource in resources["resources"].as_array().expect("resources") {
            let (name, kind) = (resource["name"].as_str().expect("text"), resource["kind"].as_str().expect("text"));
            let is_listed = resource["verbs"].as_array().expect("verbs").iter().any(|verb| verb == "list");
            if !is_listed || ["Lease", "Event", "APIService", "ComponentStatus", "IPAddress"].contains(&kind) {
                continue;
            }
            let list = admin.get_path(&format!("{version}/{name}")).expect("allowed");
            for object in list["items"].as_array().expect("items") {
                let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default();
                let mut object = object.clone();
                object["kind"] = kind.into();
                found.insert(format!("{kind} {}/{}", text("namespace"), text("name")), object);
            }
        }
    }
    found
}

/// Returns the objects of a release, without those in which helm stores the release.
pub(crate) fn objects_of(admin: &Client, release: &str, namespace: &str) -> BTreeMap<String, Value> {
    let mut found = inventory(admin);
    found.retain(|_, object| {
        let annotations = &object["metadata"]["annotations"];
        annotations["meta.helm.sh/release-name"] == release
            && annotations["meta.helm.sh/release-namespace"] == namespace
    });
    found
}

/// Returns the names of the objects that exist in only one of the two inventories.
pub(crate) fn difference<'a>(one: &'a BTreeMap<String, Value>, other: &'a BTreeMap<String, Value>) -> Vec<&'a String> {
    let missing = |a: &'a BTreeMap<String, Value>, b: &'a BTreeMap<String, Value>| {
        a.keys().filter(|name| !b.contains_key(*name)).collect::<Vec<_>>()
    };
    [missing(one, other), missing(other, one)].concat()
}
