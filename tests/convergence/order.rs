//! The order of ADDs does not matter.

use crate::attachment::{Attachment, Facts, Slot};
use crate::expect::{Foreign, from_scratch};
use crate::foreign;
use crate::kernel::Kernel;
use crate::node::on_a_node;
use crate::pod::Pod;

fn in_this_order(foreign: Foreign, attachments: &[Attachment]) -> Kernel {
    let pod = Pod::new();
    if let Some(load) = foreign {
        load(&pod);
    }
    attachments.iter().for_each(|attachment| pod.add(*attachment).done());
    let kernel = Kernel::of(&pod);
    attachments.iter().for_each(|attachment| pod.check(*attachment).done());
    attachments.iter().for_each(|attachment| pod.del(*attachment).done());
    kernel
}

fn equals_one_chain(foreign: Foreign, facts: Facts) {
    let (redirect, exclude, both) =
        (Slot::IstioCni.with(facts), Slot::ExcludeDns.with(facts), Slot::Detour.with(facts));
    on_a_node(|| {
        let one = in_this_order(foreign, &[both]);
        in_this_order(foreign, &[redirect, exclude]).assert_is(&one, "istio-cni, excludedns");
        in_this_order(foreign, &[exclude, redirect]).assert_is(&one, "excludedns, istio-cni");
    });
}

#[test]
fn two_attachments_equal_one_with_both_chains() {
    equals_one_chain(None, Facts::DnsCaptured);
    equals_one_chain(None, Facts::Annotated);
}

#[test]
fn two_attachments_equal_one_among_foreign_rules() {
    equals_one_chain(Some(foreign::load), Facts::DnsCaptured);
}

/// Beside another tool's redirection, only exclusions are added, in whatever order the attachments are added.
#[test]
fn two_attachments_equal_one_beside_a_foreign_redirection() {
    equals_one_chain(Some(foreign::redirect), Facts::DnsCaptured);
}

/// `NONE` means no rules, including exclusions of another attachment.
#[test]
fn interception_none_applies_to_all_attachments() {
    on_a_node(|| {
        let (none, exclude) = (Slot::IstioCni.with(Facts::InterceptionNone), Slot::ExcludeDns.with(Facts::Plain));
        assert!(!in_this_order(None, &[none, exclude]).has_rules());
        assert!(!in_this_order(None, &[exclude, none]).has_rules());
    });
}

#[test]
fn a_contradiction_names_both_attachments_and_the_second_leaves_nothing() {
    let (first, second) = (Slot::IstioCni.with(Facts::Plain), Slot::Detour.with(Facts::Tproxy));
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(first).done();
        let text = pod.add(second).refused(7);
        for part in
            ["istio-cni/net1", "detour/net4", &pod.container_id, "inbound_interception_mode", "redirect", "tproxy"]
        {
            assert!(text.to_lowercase().contains(part), "{part}: {text}");
        }
        Kernel::of(&pod).assert_is(&from_scratch(None, &[first].into()).expect("accepted"), "after the refusal");
        pod.check(first).done();
        pod.check(second).refused(104);
        pod.del(first).done();
    });
}

/// The change is refused; the rules before it remain and can be removed.
#[test]
fn a_change_that_contradicts_another_attachment_has_no_effect() {
    let (first, second) = (Slot::IstioCni.with(Facts::DnsCaptured), Slot::Detour.with(Facts::Plain));
    on_a_node(|| {
        let pod = Pod::new();
        pod.add(first).done();
        pod.add(second).done();
        pod.add(Slot::Detour.with(Facts::Tproxy)).refused(7);
        Kernel::of(&pod)
            .assert_is(&from_scratch(None, &[first, second].into()).expect("accepted"), "after the refusal");
        pod.del(second).done();
        Kernel::of(&pod).assert_is(&from_scratch(None, &[first].into()).expect("accepted"), "after the other's DEL");
        pod.del(first).done();
    });
}
