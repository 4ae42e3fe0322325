//! Requests outside the bounds are Events of the pod, through the agent.

use crate::api::PODS;
use crate::scene::{Scene, UID, pod};
use serde_json::json;

#[test]
fn a_request_outside_the_bounds_is_an_event_of_the_pod() {
    Scene::run(|scene| {
        let mut excluding = pod(UID);
        excluding["metadata"]["annotations"]["detour.io/exclude-uids"] = json!("7,*");
        scene.api.put(PODS, &excluding);
        let _agent = scene.agent();
        let mut conf = scene.conf_of_agent_alone();
        let (code, text) = scene.call("ADD", &conf, Some(UID)).refused();
        let bound = "annotation \"detour.io/exclude-uids\" of pod shop/web-0: \"*\" is outside the bounds: \
                     not permitted by the default bounds";
        assert!(code == 7 && text.contains(bound), "{text}");
        assert!(!scene.is_redirected());
        conf["outside_bounds"] = json!("ignore");
        let called = scene.done("ADD", &conf, Some(UID));
        assert!(called.stderr.contains("is outside the bounds"), "{}", called.stderr);
        assert!(scene.is_redirected());
        assert_eq!(scene.api.requests(), ["POST /api/v1/namespaces/shop/events"; 2]);
        let bodies = scene.api.bodies();
        for (body, reason) in bodies.iter().zip(["DetourExclusionRejected", "DetourExclusionIgnored"]) {
            assert_eq!((&body["reason"], &body["type"]), (&json!(reason), &json!("Warning")));
            assert_eq!(body["involvedObject"]["uid"], UID);
            assert!(body["message"].as_str().is_some_and(|message| message.contains(bound)), "{body}");
        }
        assert_eq!(bodies.len(), 2);
    });
}
