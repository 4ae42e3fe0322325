//! Lists of UIDs and GIDs, form by form.

use super::super::sub_plugin::Severity;
use super::super::tests::scenario::{container, context, facts, meshed_pod};
use super::*;
use proptest::prelude::*;

fn list(text: &str, author: ListAuthor) -> IdList {
    ItemList::from_text("k", text).and_then(|list| IdList::parse(&list, author)).expect(text)
}

fn owners(text: &str, kind: IdKind, facts: &Facts) -> Result<Vec<TrafficOwner>, Error> {
    list(text, ListAuthor::Pod).owners(kind, &context(Some(facts)), &mut Vec::new())
}

fn uids(ranges: &[(u32, u32)]) -> Vec<TrafficOwner> {
    ranges.iter().map(|&(first, last)| TrafficOwner::Uid(IdRange { first, last })).collect()
}

#[test]
fn numbers_ranges_and_the_wildcard_need_no_facts() {
    for (text, ranges) in [
        ("", &[][..]),
        ("0", &[(0, 0)]),
        ("1337, 1000650000", &[(1337, 1337), (1000650000, 1000650000)]),
        ("106-108", &[(106, 108)]),
        ("7-7", &[(7, 7)]),
        ("1000650000/10000", &[(1000650000, 1000659999)]),
        ("5/1", &[(5, 5)]),
        ("4294967294", &[(4294967294, 4294967294)]),
        ("4294967290/5", &[(4294967290, 4294967294)]),
    ] {
        let owners = list(text, ListAuthor::Pod).owners(IdKind::User, &context(None), &mut Vec::new()).expect(text);
        assert_eq!(owners, uids(ranges), "{text:?}");
    }
    let all = list("*", ListAuthor::Pod).owners(IdKind::Group, &context(None), &mut Vec::new()).expect("all");
    assert_eq!(all, [TrafficOwner::Any]);
    let gid = list("7", ListAuthor::Pod).owners(IdKind::Group, &context(None), &mut Vec::new()).expect("a GID");
    assert_eq!(gid, [TrafficOwner::Gid(IdRange::one(7))]);
}

#[test]
fn invalid_items_are_rejected_with_their_place() {
    for text in [
        "-1",
        "4294967295",
        "4294967296",
        "+5",
        "0x10",
        "root",
        "9-8",
        "1-",
        "-",
        "1-2-3",
        "1-4294967295",
        "5/0",
        "5/",
        "/5",
        "4294967290/6",
        "5/-1",
        "1/2/3",
        "container:",
        "container",
        "namespace-range-middle",
        "INIT-CONTAINERS",
    ] {
        let list = ItemList::from_text("chain[1].uids", text).expect("a list");
        let error = IdList::parse(&list, ListAuthor::Pod).expect_err(text);
        assert_eq!(error, list.reject(text, ACCEPTED));
    }
}

#[test]
fn both_spellings_of_the_namespaces_range_are_parsed() {
    for (annotation, whole, first, last) in [
        ("1000650000/10000", &[(1000650000, 1000659999)][..], 1000650000, 1000659999),
        ("1000650000-1000659999", &[(1000650000, 1000659999)], 1000650000, 1000659999),
        ("1/10, 100/10", &[(1, 10), (100, 109)], 1, 10),
    ] {
        let facts = facts(meshed_pod(), &[(OPENSHIFT_UID_RANGE, annotation)]);
        let owners = |text| owners(text, IdKind::User, &facts).expect(text);
        assert_eq!(owners("namespace-range"), uids(whole), "{annotation}");
        assert_eq!(owners("namespace-range-first"), uids(&[(first, first)]), "{annotation}");
        assert_eq!(owners("namespace-range-last"), uids(&[(last, last)]), "{annotation}");
    }
}

#[test]
fn groups_come_from_their_own_annotation_or_from_the_uids() {
    let both = facts(meshed_pod(), &[(OPENSHIFT_UID_RANGE, "1/10"), (OPENSHIFT_GROUP_RANGE, "50/10")]);
    let last = |facts| owners("namespace-range-last", IdKind::Group, facts).expect("a GID");
    assert_eq!(last(&both), [TrafficOwner::Gid(IdRange::one(59))]);
    assert_eq!(last(&facts(meshed_pod(), &[(OPENSHIFT_UID_RANGE, "1/10")])), [TrafficOwner::Gid(IdRange::one(10))]);
}

#[test]
fn a_namespace_without_a_range_is_an_error_that_names_the_annotation() {
    let error = owners("namespace-range", IdKind::User, &facts(meshed_pod(), &[])).expect_err("no annotation");
    assert_eq!(
        error.msg,
        "k: \"namespace-range\": namespace shop has no annotation \"openshift.io/sa.scc.uid-range\"; \
         list numbers instead"
    );
    for broken in ["", "1/0", "a-b", "9-1"] {
        let error = owners("namespace-range", IdKind::User, &facts(meshed_pod(), &[(OPENSHIFT_UID_RANGE, broken)]));
        let msg = error.expect_err(broken).msg;
        assert!(msg.starts_with("annotation \"openshift.io/sa.scc.uid-range\" of namespace shop: "), "{msg}");
    }
    let unknown = Facts { namespace: None, pod: meshed_pod() };
    let msg = owners("namespace-range", IdKind::User, &unknown).expect_err("unknown").msg;
    assert!(msg.contains("namespace shop is unknown"), "{msg}");
}

#[test]
fn items_that_need_facts_name_the_sources_of_facts() {
    for form in ["namespace-range", "namespace-range-first", "namespace-range-last", "container:a", "init-containers"] {
        let error = list(form, ListAuthor::Administrator).owners(IdKind::User, &context(None), &mut Vec::new());
        let msg = error.expect_err(form).msg;
        assert!(msg.starts_with(&format!("k: {form:?} needs facts of the pod: ")), "{msg}");
        assert!(msg.contains("kubernetes.kubeconfig") && msg.contains("kubernetes.manifests_dir"), "{msg}");
    }
}

#[test]
fn a_containers_id_is_its_own_or_its_pods() {
    let mut pod = meshed_pod();
    pod.init_containers.push(container("vault", None));
    let missing = owners("container:vault", IdKind::User, &facts(pod.clone(), &[])).expect_err("no UID").msg;
    assert_eq!(
        missing,
        "k: \"container:vault\": pod shop/cart-1 does not set runAsUser of this container; set its \
         securityContext.runAsUser"
    );
    pod.run_as_user = Some(77);
    let facts = facts(pod, &[]);
    assert_eq!(
        owners("container:vault, container: app", IdKind::User, &facts).expect("UIDs"),
        uids(&[(77, 77), (1000, 1000)])
    );
    assert_eq!(owners("container:app", IdKind::Group, &facts).expect("a GID"), [TrafficOwner::Gid(IdRange::one(1000))]);
}

#[test]
fn a_missing_container_is_an_error_for_the_pod_and_a_note_for_the_administrator() {
    let facts = facts(meshed_pod(), &[]);
    let msg = owners("container:nope", IdKind::User, &facts).expect_err("no such container").msg;
    assert_eq!(msg, "k: \"container:nope\": pod shop/cart-1 has no such container; it has app, istio-proxy");
    let mut notes = Vec::new();
    let ids = list("container:nope,5", ListAuthor::Administrator);
    assert_eq!(ids.owners(IdKind::User, &context(Some(&facts)), &mut notes).expect("the rest"), uids(&[(5, 5)]));
    assert_eq!(notes, [Note::info(msg)]);
}

#[test]
fn an_id_that_no_process_can_have_is_an_error() {
    for (configured, shown) in [(-1, "-1"), (i64::from(u32::MAX), "4294967295"), (i64::MAX, "9223372036854775807")] {
        let mut pod = meshed_pod();
        pod.containers[0].run_as_user = Some(configured);
        let msg = owners("container:app", IdKind::User, &facts(pod, &[])).expect_err(shown).msg;
        let expected = format!("runAsUser of container app of pod shop/cart-1: invalid value {shown}; expected ");
        assert!(msg.starts_with(&expected), "{msg}");
    }
}

#[test]
fn init_containers_that_share_a_uid_with_a_running_container_are_not_excluded() {
    let native = |name, user| Container { restarts_always: true, ..container(name, user) };
    let mut pod = meshed_pod();
    pod.init_containers = vec![
        container("migrate", Some(5)),
        container("vault", Some(6)),
        container("like-app", Some(1000)),
        container("like-proxy", Some(1337)),
        container("like-native", Some(8)),
        container("unknown", None),
        container("istio-init", Some(0)),
        container("istio-validation", Some(9)),
        native("log-shipper", Some(8)),
    ];
    let facts = facts(pod, &[]);
    for (author, severity) in [(ListAuthor::Administrator, Severity::Info), (ListAuthor::Pod, Severity::Warning)] {
        let mut notes = Vec::new();
        let ids = list("init-containers", author);
        let owners = ids.owners(IdKind::User, &context(Some(&facts)), &mut notes).expect("UIDs");
        assert_eq!(owners, uids(&[(5, 5), (6, 6)]));
        let named: Vec<_> = ["like-app", "like-proxy", "like-native", "unknown"].into_iter().collect();
        assert_eq!(notes.len(), named.len(), "{notes:?}");
        for (note, name) in notes.iter().zip(named) {
            assert_eq!(note.severity, severity);
            assert!(note.text.contains(&format!("container {name} is not excluded: ")), "{note:?}");
        }
    }
}

/// The image of an application without `runAsUser` can have the UID of an init container.
#[test]
fn init_containers_are_refused_if_the_uid_of_an_application_is_unknown() {
    let mut pod = meshed_pod();
    pod.init_containers = vec![container("migrate", Some(5))];
    pod.containers.push(container("web", None));
    let msg = owners("init-containers", IdKind::User, &facts(pod.clone(), &[])).expect_err("refused").msg;
    let start = "k: \"init-containers\": container web of pod shop/cart-1 does not set runAsUser: ";
    assert!(msg.starts_with(start) && msg.contains("set its securityContext.runAsUser"), "{msg}");
    let (mut notes, known) = (Vec::new(), facts(pod.clone(), &[]));
    let ids = list("init-containers,7", ListAuthor::Administrator);
    assert_eq!(ids.owners(IdKind::User, &context(Some(&known)), &mut notes).expect("the rest"), uids(&[(7, 7)]));
    assert_eq!(notes, [Note::info(msg)]);
    pod.containers.pop();
    pod.containers[1].run_as_user = None;
    assert_eq!(owners("init-containers", IdKind::User, &facts(pod, &[])).expect("a UID"), uids(&[(5, 5)]), "the proxy");
}

#[test]
fn a_container_that_shares_its_uid_with_the_application_is_a_note_that_names_container_exclude() {
    let mut pod = meshed_pod();
    pod.init_containers = vec![container("vault", Some(1000)), container("alone", Some(7)), container("init", Some(7))];
    let notes = |pod: &Pod, text: &str, author| {
        let (mut notes, facts) = (Vec::new(), facts(pod.clone(), &[]));
        list(text, author).owners(IdKind::User, &context(Some(&facts)), &mut notes).expect("UIDs");
        notes
    };
    let wanted = |other: &str| {
        format!(
            "k: \"container:vault\": runAsUser 1000 is also that of container {other}, whose traffic bypasses the \
             sidecar, too; to exclude only vault, use the sub-plugin container-exclude (annotation \
             detour.io/exclude-containers: \"vault\")"
        )
    };
    assert_eq!(notes(&pod, "container:vault", ListAuthor::Pod), [Note::warning(wanted("app"))]);
    assert_eq!(notes(&pod, "container:vault", ListAuthor::Administrator), [Note::info(wanted("app"))]);
    for text in ["container:alone", "container:app", "container:istio-proxy"] {
        assert_eq!(notes(&pod, text, ListAuthor::Pod), [], "{text}");
    }
    pod.init_containers.push(Container { restarts_always: true, ..container("log", Some(1000)) });
    assert_eq!(notes(&pod, "container:vault", ListAuthor::Pod), [Note::warning(wanted("log and 1 more"))]);
}

#[test]
fn a_root_init_container_is_excluded_beside_istio_init() {
    let mut pod = meshed_pod();
    pod.init_containers = vec![container("istio-init", Some(0)), container("sysctl", Some(0))];
    assert_eq!(owners("init-containers", IdKind::User, &facts(pod, &[])).expect("a UID"), uids(&[(0, 0)]));
}

fn form() -> impl Strategy<Value = IdForm> {
    let id = 0..u32::MAX;
    prop_oneof![
        (id.clone(), id).prop_map(|(a, b)| IdForm::Range(IdRange { first: a.min(b), last: a.max(b) })),
        "[a-z0-9]([-a-z0-9]*[a-z0-9])?".prop_map(IdForm::Container),
        prop::sample::select(vec![RangePart::Whole, RangePart::First, RangePart::Last]).prop_map(IdForm::Namespace),
        Just(IdForm::All),
        Just(IdForm::InitContainers),
    ]
}

proptest! {
    #[test]
    fn displayed_items_parse_to_the_same_items(form in form()) {
        prop_assert_eq!(IdForm::parse(&form.to_string()), Some(form));
    }

    #[test]
    fn no_text_causes_a_panic(text in "[0-9/*, a-z:-]{0,40}|.{0,20}") {
        let _ = ItemList::from_text("k", &text).and_then(|list| IdList::parse(&list, ListAuthor::Pod));
    }
}
