//! Checks whether the interface with the pod's default route is captured, for a pod whose rules exclude interfaces.

use super::report::{Check, CheckGroup, CheckVerdict, Results};
use super::rules::{NETNS, RULES};
use crate::cni::Error;
use crate::netns::default_route_interfaces;
use crate::netns::find::FoundNetns;
use crate::policy::{Policy, Redirect};
use std::collections::BTreeSet;
use std::time::Duration;

const CAPTURED: Check =
    Check::of(CheckGroup::Sandbox, "default-route-captured", "the interface with the pod's default route is captured");

/// The timeout for the lock of the network namespace, which a call of the plugin may hold.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the check. `policy` is that of the pod's attachments.
pub(super) fn examine(found: Option<&FoundNetns>, policy: Option<&Policy>, results: &mut Results) {
    let redirect = policy.and_then(Policy::redirect).filter(|redirect| !redirect.exclude_interfaces.is_empty());
    let (Some(found), Some(redirect)) = (found, redirect) else { return };
    let default = || -> Result<BTreeSet<String>, Error> { found.open()?.enter(TIMEOUT, default_route_interfaces) };
    results.after(&[&NETNS, &RULES], &CAPTURED, || match default() {
        Ok(default) => captured(&default, redirect),
        Err(error) => CheckVerdict::not_checked(error.to_string()),
    });
}

fn captured(default: &BTreeSet<String>, redirect: &Redirect) -> CheckVerdict {
    let (excluded, captured): (Vec<&str>, Vec<&str>) =
        default.iter().map(String::as_str).partition(|name| redirect.exclude_interfaces.iter().any(|one| one == name));
    match (excluded.as_slice(), captured.as_slice()) {
        ([], []) => CheckVerdict::pass("the pod has no default route"),
        ([], _) => CheckVerdict::pass(captured.join(", ")),
        _ => CheckVerdict::fail(
            format!("the rules exclude {}: traffic over the default route bypasses the sidecar", excluded.join(", ")),
            "remove the interface from exclude_interfaces and from the annotation \
             traffic.sidecar.istio.io/excludeInterfaces; if neither names it, delete the pod: it started with an earlier \
             version, or the default route moved later",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excluded_interface_with_a_default_route_fails() {
        let redirect = Redirect { exclude_interfaces: vec!["net1".into(), "net2".into()], ..Redirect::default() };
        let verdict = |default: &[&str]| {
            let default = default.iter().map(|name| (*name).to_owned()).collect();
            captured(&default, &redirect)
        };
        assert_eq!(verdict(&[]), CheckVerdict::pass("the pod has no default route"));
        assert_eq!(verdict(&["eth0", "ovn-udn1"]), CheckVerdict::pass("eth0, ovn-udn1"));
        assert!(matches!(verdict(&["eth0", "net2"]), CheckVerdict::Fail(found, _) if found.contains("exclude net2:")));
    }
}
