//! `uid-exclude`: all outbound traffic of a UID or GID, or some of it, leaves untouched.

use super::asked::RequestedExclusions;
use super::context::{ListAuthor, PodContext};
use super::ids::{IdKind, IdList};
use super::rules::{self, Rule};
use super::values::AnnotationValue;
use super::{Note, SettingSource};
use crate::cni::{BlockReader, Error};
use crate::pod::Facts;

const UIDS: &str = "detour.io/exclude-uids";
const GIDS: &str = "detour.io/exclude-gids";
const RULES: &str = "detour.io/exclude-outbound-ports-for-uids";

/// Every annotation that counts here.
pub(super) const ANNOTATIONS: [&str; 3] = [UIDS, GIDS, RULES];

/// What one place asks for: a block, or the annotations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UidExclude {
    uids: Option<IdList>,
    gids: Option<IdList>,
    rules: Vec<Rule>,
}

impl UidExclude {
    /// A block's keys.
    pub(super) fn parse(r: &BlockReader<'_>, author: ListAuthor) -> Result<Self, Error> {
        let ids = |key| r.list(key)?.map(|list| IdList::parse(&list, author)).transpose();
        let rules = rules::from_block(r, "rules", author)?.unwrap_or_default();
        Ok(Self { uids: ids("uids")?, gids: ids("gids")?, rules })
    }

    /// The pod's and its namespace's annotations, one by one.
    pub(super) fn annotated(facts: &Facts) -> Result<Vec<(SettingSource, Self)>, Error> {
        let mut asked = Vec::new();
        for key in ANNOTATIONS {
            let Some(annotation) = AnnotationValue::of_pod_or_namespace(facts, key) else { continue };
            let ids = |of| (key == of).then(|| IdList::parse(&annotation.list()?, annotation.author)).transpose();
            let (uids, gids) = (ids(UIDS)?, ids(GIDS)?);
            let rules = match key {
                RULES => rules::from_text(annotation.place.clone(), annotation.value, annotation.author)?,
                _ => Vec::new(),
            };
            asked.push((annotation.source(key), Self { uids, gids, rules }));
        }
        Ok(asked)
    }

    /// What that exempts in one pod.
    pub(super) fn exclusions(
        &self,
        scene: &PodContext<'_>,
        notes: &mut Vec<Note>,
    ) -> Result<RequestedExclusions, Error> {
        let mut asked = RequestedExclusions::default();
        for (ids, kind) in [(&self.uids, IdKind::User), (&self.gids, IdKind::Group)] {
            let Some(ids) = ids else { continue };
            asked.add(ids.place(), &ids.owners(kind, scene, notes)?, &[None], &[None], &[])?;
        }
        for rule in &self.rules {
            rule.exclusions(scene, notes, &mut asked)?;
        }
        Ok(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::super::scenario::chain;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_block_that_names_nobody_excludes_nobody() {
        for block in [json!({}), json!({"uids": [], "gids": "", "rules": []})] {
            let mut block = block;
            block["type"] = "uid-exclude".into();
            assert!(chain(json!([block])).exclusions().is_empty());
        }
    }

    #[test]
    fn uids_gids_and_rules_of_a_block() {
        let scenario = chain(json!([{
            "type": "uid-exclude",
            "uids": [1337, "2000-2999", "1000650000/10"],
            "gids": "55",
            "rules": ["udp:53:7", "22:8"],
        }]));
        let all = ["uid 7 udp 53", "uid 8 22", "uid 1337", "uid 2000-2999", "uid 1000650000-1000650009", "gid 55"];
        assert_eq!(scenario.exclusions(), all);
    }

    #[test]
    fn what_another_exclusion_covers_is_left_out() {
        let scenario = chain(json!([{"type": "uid-exclude", "uids": "0-9,5", "rules": "udp:53:7"}]));
        assert_eq!(scenario.exclusions(), ["uid 0-9"]);
        let scenario = chain(json!([{"type": "uid-exclude", "uids": "*,5"}]));
        assert_eq!(scenario.exclusions(), ["any"]);
    }

    #[test]
    fn annotations_add_to_the_block_each_on_its_own() {
        let block = json!([{"type": "uid-exclude", "uids": [1], "gids": [1]}]);
        for (key, value, added) in [
            (UIDS, "container:app, 5", ["uid 5", "uid 1000"]),
            (GIDS, "6,8", ["gid 6", "gid 8"]),
            (RULES, "udp:53:5; 22:5", ["uid 5 22", "uid 5 udp 53"]),
        ] {
            let mut expected = vec!["gid 1".to_owned(), "uid 1".to_owned()];
            expected.extend(added.map(str::to_owned));
            expected.sort();
            let mut of_pod = chain(block.clone()).annotated(key, value).exclusions();
            of_pod.sort();
            assert_eq!(of_pod, expected, "{key} of the pod");
            let mut of_namespace = chain(block.clone()).namespace(key, value).exclusions();
            of_namespace.sort();
            assert_eq!(of_namespace, expected, "{key} of the namespace");
        }
    }

    #[test]
    fn the_pods_annotation_wins_over_its_namespaces_key_by_key() {
        let scenario = chain(json!([{"type": "uid-exclude"}])).namespace(UIDS, "1").namespace(GIDS, "2");
        assert_eq!(scenario.clone().annotated(UIDS, "3").exclusions(), ["uid 3", "gid 2"]);
        assert_eq!(scenario.annotated(UIDS, "").exclusions(), ["gid 2"]);
    }

    #[test]
    fn a_wrong_annotation_is_an_error_that_names_it_and_whose_it_is() {
        let scenario = chain(json!([{"type": "uid-exclude"}]));
        for key in ANNOTATIONS {
            let msg = scenario.clone().annotated(key, "root").error();
            let start = format!("annotation {key:?} of pod shop/cart-1: invalid value \"root\"; expected ");
            assert!(msg.starts_with(&start), "{msg}");
            let msg = scenario.clone().namespace(key, "root").error();
            assert!(msg.starts_with(&format!("annotation {key:?} of namespace shop: invalid value \"root\"")), "{msg}");
        }
    }

    #[test]
    fn a_container_that_only_some_pods_have_may_stand_on_the_namespace_but_not_on_the_pod() {
        let scenario = chain(json!([{"type": "uid-exclude"}]));
        assert!(scenario.clone().namespace(UIDS, "container:vault").exclusions().is_empty());
        assert!(scenario.annotated(UIDS, "container:vault").error().contains("no such container"));
    }

    #[test]
    fn the_pods_argument_is_a_block_without_the_administrators_keys() {
        let scenario = chain(json!([{"type": "uid-exclude", "uids": [1]}]));
        let args = |block| scenario.clone().args(json!({ "uid-exclude": block }));
        assert_eq!(args(json!({"uids": "2", "rules": ["22:3"]})).exclusions(), ["uid 1", "uid 2", "uid 3 22"]);
        assert_eq!(args(json!(null)).exclusions(), ["uid 1"]);
        assert_eq!(args(json!({"type": "uid-exclude", "uids": 2})).exclusions(), ["uid 1", "uid 2"]);
        assert!(args(json!({"type": "dns-exclude"})).error().starts_with("args.cni.uid-exclude.type: "));
        for key in ["pod_overrides", "uid"] {
            let start = format!("args.cni.uid-exclude.{key}: unknown key; ");
            assert!(args(json!({ key: "uid-exclude" })).error().starts_with(&start));
        }
        assert!(args(json!([])).error().starts_with("args.cni.uid-exclude: "));
    }
}
