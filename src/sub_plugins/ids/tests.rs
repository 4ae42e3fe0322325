//! Lists of UIDs and GIDs, form by form.

use super::super::context::tests::scene;
use super::super::note::Severity;
use super::super::scenario::{container, facts, meshed_pod};
use super::*;
use proptest::prelude::*;

fn of(text: &str, author: ListAuthor) -> IdList {
    ItemList::from_text("k", text).and_then(|list| IdList::parse(&list, author)).expect(text)
}

fn owners(text: &str, kind: IdKind, facts: &Facts) -> Result<Vec<TrafficOwner>, Error> {
    of(text, ListAuthor::Pod).owners(kind, &scene(Some(facts)), &mut Vec::new())
}

fn uids(ranges: &[(u32, u32)]) -> Vec<TrafficOwner> {
    ranges.iter().map(|&(first, last)| TrafficOwner::Uid(IdRange { first, last })).collect()
}

#[test]
fn forms_that_need_no_facts() {
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
        let owners = of(text, ListAuthor::Pod).owners(IdKind::User, &scene(None), &mut Vec::new()).expect(text);
        assert_eq!(owners, uids(ranges), "{text:?}");
    }
    let all = of("*", ListAuthor::Pod).owners(IdKind::Group, &scene(None), &mut Vec::new()).expect("all");
    assert_eq!(all, [TrafficOwner::Any]);
    let gid = of("7", ListAuthor::Pod).owners(IdKind::Group, &scene(None), &mut Vec::new()).expect("a GID");
    assert_eq!(gid, [TrafficOwner::Gid(IdRange::one(7))]);
}

#[test]
fn what_is_no_form_is_refused_by_place() {
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
        assert_eq!(error.msg, format!("chain[1].uids: invalid value {text:?}; expected {ACCEPTED}"));
        assert_eq!(error.code, Code::InvalidConfig);
    }
}

#[test]
fn the_namespaces_range_in_both_of_its_spellings() {
    for (annotation, whole, first, last) in [
        ("1000650000/10000", &[(1000650000, 1000659999)][..], 1000650000, 1000659999),
        ("1000650000-1000659999", &[(1000650000, 1000659999)], 1000650000, 1000659999),
        ("1/10, 100/10", &[(1, 10), (100, 109)], 1, 10),
    ] {
        let facts = facts(meshed_pod(), &[(UID_RANGE, annotation)]);
        let owners = |text| owners(text, IdKind::User, &facts).expect(text);
        assert_eq!(owners("namespace-range"), uids(whole), "{annotation}");
        assert_eq!(owners("namespace-range-first"), uids(&[(first, first)]), "{annotation}");
        assert_eq!(owners("namespace-range-last"), uids(&[(last, last)]), "{annotation}");
    }
}

#[test]
fn groups_have_an_annotation_of_their_own_and_fall_back_to_the_uids() {
    let both = facts(meshed_pod(), &[(UID_RANGE, "1/10"), (GROUP_RANGE, "50/10")]);
    let last = |facts| owners("namespace-range-last", IdKind::Group, facts).expect("a GID");
    assert_eq!(last(&both), [TrafficOwner::Gid(IdRange::one(59))]);
    assert_eq!(last(&facts(meshed_pod(), &[(UID_RANGE, "1/10")])), [TrafficOwner::Gid(IdRange::one(10))]);
}

#[test]
fn a_namespace_without_a_range_is_an_error_that_says_so() {
    let error = owners("namespace-range", IdKind::User, &facts(meshed_pod(), &[])).expect_err("no annotation");
    assert_eq!(
        error.msg,
        "k: \"namespace-range\": namespace shop has no annotation \"openshift.io/sa.scc.uid-range\"; \
         write down numbers"
    );
    for broken in ["", "1/0", "a-b", "9-1"] {
        let error = owners("namespace-range", IdKind::User, &facts(meshed_pod(), &[(UID_RANGE, broken)]));
        let msg = error.expect_err(broken).msg;
        assert!(msg.starts_with("annotation \"openshift.io/sa.scc.uid-range\" of namespace shop: "), "{msg}");
    }
    let unknown = Facts { namespace: None, pod: meshed_pod() };
    let msg = owners("namespace-range", IdKind::User, &unknown).expect_err("unknown").msg;
    assert!(msg.contains("namespace shop is not known"), "{msg}");
}

#[test]
fn forms_of_facts_without_facts_say_where_facts_come_from() {
    for form in ["namespace-range", "namespace-range-first", "namespace-range-last", "container:a", "init-containers"] {
        let error = of(form, ListAuthor::Administrator).owners(IdKind::User, &scene(None), &mut Vec::new());
        let msg = error.expect_err(form).msg;
        assert!(msg.starts_with(&format!("k: {form:?} needs facts of the pod: ")), "{msg}");
        assert!(msg.contains("kubernetes.kubeconfig") && msg.contains("kubernetes.manifests_dir"), "{msg}");
    }
}

#[test]
fn a_container_runs_as_it_says_or_as_its_pod_does() {
    let mut pod = meshed_pod();
    pod.init_containers.push(container("vault", None));
    let missing = owners("container:vault", IdKind::User, &facts(pod.clone(), &[])).expect_err("nobody knows").msg;
    assert_eq!(
        missing,
        "k: \"container:vault\": pod shop/cart-1 does not say what it runs as; set its securityContext.runAsUser"
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
fn a_container_that_is_not_there_is_the_pods_mistake_but_not_the_administrators() {
    let facts = facts(meshed_pod(), &[]);
    let msg = owners("container:nope", IdKind::User, &facts).expect_err("no such container").msg;
    assert_eq!(msg, "k: \"container:nope\": pod shop/cart-1 has no such container; it has app, istio-proxy");
    let mut notes = Vec::new();
    let ids = of("container:nope,5", ListAuthor::Administrator);
    assert_eq!(ids.owners(IdKind::User, &scene(Some(&facts)), &mut notes).expect("the rest"), uids(&[(5, 5)]));
    assert_eq!(notes, [Note::info(msg)]);
}

#[test]
fn an_id_that_no_process_can_have_is_an_error() {
    for (said, shown) in [(-1, "-1"), (i64::from(u32::MAX), "4294967295"), (i64::MAX, "9223372036854775807")] {
        let mut pod = meshed_pod();
        pod.containers[0].run_as_user = Some(said);
        let msg = owners("container:app", IdKind::User, &facts(pod, &[])).expect_err(shown).msg;
        let expected = format!("runAsUser of container app of pod shop/cart-1: invalid value {shown}; ");
        assert!(msg.starts_with(&expected), "{msg}");
    }
}

#[test]
fn init_containers_are_those_that_end_and_share_no_uid_with_one_that_stays() {
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
        let ids = of("init-containers", author);
        let owners = ids.owners(IdKind::User, &scene(Some(&facts)), &mut notes).expect("UIDs");
        assert_eq!(owners, uids(&[(5, 5), (6, 6)]));
        let named: Vec<_> = ["like-app", "like-proxy", "like-native", "unknown"].into_iter().collect();
        assert_eq!(notes.len(), named.len(), "{notes:?}");
        for (note, name) in notes.iter().zip(named) {
            assert_eq!(note.severity, severity);
            assert!(note.text.contains(&format!("container {name}, which ")), "{note:?}");
        }
    }
}

#[test]
fn a_root_init_container_is_one_although_istio_init_is_root_too() {
    let mut pod = meshed_pod();
    pod.init_containers = vec![container("istio-init", Some(0)), container("sysctl", Some(0))];
    assert_eq!(owners("init-containers", IdKind::User, &facts(pod, &[])).expect("a UID"), uids(&[(0, 0)]));
}

#[test]
fn the_proxys_ids_are_plain_numbers() {
    let of = |text| numbers(&ItemList::from_text("k", text).expect("a list"));
    assert_eq!(of("1337, 5,1337").expect("numbers"), [1337, 5]);
    for text in ["1-2", "*", "4294967295", "container:a"] {
        assert!(of(text).expect_err(text).msg.contains("numbers from 0 to 4294967294"));
    }
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
    fn what_is_shown_is_read_again(form in form()) {
        prop_assert_eq!(IdForm::parse(&form.to_string()), Some(form));
    }

    #[test]
    fn no_text_makes_it_panic(text in "[0-9/*, a-z:-]{0,40}|.{0,20}") {
        let _ = ItemList::from_text("k", &text).and_then(|list| IdList::parse(&list, ListAuthor::Pod));
    }

    #[test]
    fn a_block_is_as_long_as_it_says(first in 0..u32::MAX, size in 1u32..) {
        let read = range(&format!("{first}/{size}"));
        let last = u64::from(first) + u64::from(size) - 1;
        match u32::try_from(last) {
            Ok(last) if last != u32::MAX => prop_assert_eq!(read, Some(IdRange { first, last })),
            _ => prop_assert_eq!(read, None),
        }
    }
}
