//! Excluded containers in reports: the elements of their sets, and their bypasses in words.

use super::terminal::{Cell, Screen, Tone};
use crate::cgroup::CgroupHierarchy;
use crate::firewall::ContainerElement;
use crate::host_path::HostRoot;
use crate::policy::{ContainerScope, Policy};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;

/// The table of the sets, with its family.
pub(super) const TABLE: &str = "inet detour-exclusions";

/// The elements of the sets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ContainerSets {
    /// The elements.
    pub elements: Vec<ElementLine>,
}

/// An element: a control group whose traffic bypasses the sidecar.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ElementLine {
    /// The traffic that bypasses the sidecar; each scope has a set.
    pub scope: ContainerScope,
    /// The name of the container according to the element's comment; `None` without such a comment.
    pub container: Option<String>,
    /// The first characters of the container's ID, as `container`.
    pub id: Option<String>,
    /// The ID of the control group.
    pub cgroup: u64,
    /// The path of the control group on this node; `None` if it was not found, for example because the container exited.
    pub path: Option<String>,
    /// Whether the element is foreign: its comment names no container, or one that the policy does not exclude with this
    /// scope.
    pub foreign: bool,
}

impl ContainerSets {
    /// Returns the sets of a network namespace with the policy of its attachments; `None` if there is no element, and
    /// the policy excludes no container.
    pub(super) fn of(elements: &[ContainerElement], policy: Option<&Policy>) -> Option<Self> {
        let is_used = policy.is_some_and(|policy| !policy.containers.is_empty());
        let lines = elements.iter().map(|element| ElementLine::of(element, policy));
        (is_used || !elements.is_empty()).then(|| Self { elements: lines.collect() })
    }

    /// Adds the paths of the control groups that are found. The node's file system is mounted at `root`.
    pub fn add_paths(&mut self, root: &Path) {
        let Ok(hierarchy) = CgroupHierarchy::find(&HostRoot::new(root)) else { return };
        let ids: BTreeSet<u64> = self.elements.iter().map(|element| element.cgroup).collect();
        let (paths, _) = hierarchy.find_paths(ids);
        self.elements.iter_mut().for_each(|element| element.path = paths.get(&element.cgroup).cloned());
    }

    pub(super) fn write(&self, screen: &mut Screen) {
        screen.heading(&format!("Excluded containers (elements of the sets in {TABLE})"));
        let titles = ["", "scope", "container", "id", "cgroup", "path"];
        screen.titled_table(titles, self.elements.iter().map(ElementLine::row));
    }
}

impl ElementLine {
    fn of(element: &ContainerElement, policy: Option<&Policy>) -> Self {
        let ContainerElement { scope, cgroup, container } = element;
        let is_excluded = |name: &str| {
            policy.is_none_or(|policy| policy.containers.iter().any(|one| (&*one.name, one.scope) == (name, *scope)))
        };
        Self {
            scope: *scope,
            container: container.as_ref().map(|label| label.name.clone()),
            id: container.as_ref().map(|label| label.id.clone()),
            cgroup: *cgroup,
            path: None,
            foreign: container.as_ref().is_none_or(|label| !is_excluded(&label.name)),
        }
    }

    fn row(&self) -> Vec<Cell> {
        let (label, tone) = if self.foreign { ("foreign", Tone::Notable) } else { (" ", Tone::Plain) };
        let (scope, cgroup) = (self.scope.to_string(), self.cgroup.to_string());
        let [container, id, path] = [&self.container, &self.id, &self.path].map(|text| text.as_deref().unwrap_or("-"));
        [label, &scope, container, id, &cgroup, path].map(|text| Cell::of(text).tone(tone)).to_vec()
    }
}

/// The container that sends a packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ContainerSender {
    /// Its name.
    pub name: String,
    /// Whether the pod's policy excludes it.
    pub excluded: bool,
    /// The traffic that bypasses the sidecar now; `None` if none does.
    pub bypasses: Option<ContainerScope>,
}

impl ContainerSender {
    /// Returns one line: whether the container's traffic bypasses the sidecar.
    pub(super) fn text(&self) -> String {
        match (self.bypasses, self.excluded) {
            (Some(scope), _) => format!("{} bypasses the sidecar until the container exits", scope_text(scope)),
            (None, true) => "excluded, but it has no element: it does not run, or it started captured".to_owned(),
            (None, false) => "not excluded by its name".to_owned(),
        }
    }
}

/// Returns a scope in words.
pub(super) const fn scope_text(scope: ContainerScope) -> &'static str {
    match scope {
        ContainerScope::All => "all outbound traffic",
        ContainerScope::Dns => "DNS",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::firewall::ContainerLabel;
    use crate::policy::ContainerExclusion;

    fn element(scope: ContainerScope, name: Option<&str>) -> ContainerElement {
        let container = name.map(|name| ContainerLabel { name: name.to_owned(), id: "0123456789abcdef".to_owned() });
        ContainerElement { scope, cgroup: 7, container }
    }

    #[test]
    fn an_element_that_the_policy_does_not_request_is_foreign() {
        let exclusion = ContainerExclusion { name: "vault".to_owned(), scope: ContainerScope::Dns };
        let policy = Policy { containers: [exclusion].into(), ..Policy::default() };
        let of = |scope, name, policy| ElementLine::of(&element(scope, name), policy).foreign;
        assert!(!of(ContainerScope::Dns, Some("vault"), Some(&policy)));
        assert!(of(ContainerScope::All, Some("vault"), Some(&policy)), "a wider scope");
        assert!(of(ContainerScope::Dns, Some("other"), Some(&policy)));
        assert!(of(ContainerScope::Dns, None, Some(&policy)));
        assert!(!of(ContainerScope::Dns, Some("other"), None), "the policy is unknown");
        assert!(of(ContainerScope::Dns, None, None));
    }

    #[test]
    fn the_list_is_escaped_and_absent_without_the_feature() {
        assert_eq!(ContainerSets::of(&[], Some(&Policy::default())), None);
        let sets = ContainerSets::of(&[element(ContainerScope::All, Some("\u{1b}[2J"))], None).expect("elements");
        let mut screen = Screen::plain();
        sets.write(&mut screen);
        let text = screen.into_text();
        assert!(text.as_str().contains("\\u{1b}[2J"), "{text}");
    }
}
