//! How the doctor is called, and what it does not do.

use crate::scene::{POD, Plan, scene};

#[test]
fn nothing_is_wrong_with_a_node_that_has_everything() {
    scene(Plan::new(), |scene| {
        let text = scene.printed(&[&POD[..], &["--probe"]].concat());
        println!("{text}");
        let report = scene.report(&[&POD[..], &["--probe"]].concat());
        assert_eq!(report["healthy"], true, "{report:#}");
    });
}
