//! The socket passes from one agent to the next.

use crate::scene::{Scene, UID, is_private};
use nix::sys::signal::Signal;
use std::fs;
use std::os::unix::net::UnixListener;

#[test]
fn the_later_agent_has_the_socket_and_the_earlier_leaves_it() {
    Scene::run(|scene| {
        let first = scene.agent();
        assert!(is_private(&scene.socket()));
        let second = scene.agent_that_starts("second");
        second.says_all(&["watches pods", "watches namespaces", "answers the plugin's"]);
        scene.done("ADD", &scene.conf(), Some(UID));
        second.says("command=ADD");
        first.end(Signal::SIGTERM);
        scene.done("DEL", &scene.conf(), Some(UID));
        second.says("command=DEL");
        assert_eq!(scene.api.requests(), [""; 0]);
        second.end(Signal::SIGTERM);
        assert!(!scene.socket().exists());
        assert_eq!(fs::read_dir(scene.socket().parent().expect("one")).expect("readable").count(), 0);
    });
}

#[test]
fn the_earlier_agent_takes_over_when_the_later_is_gone() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        Scene::run(|scene| {
            let first = scene.agent();
            let second = scene.agent_that_starts("second");
            second.says("answers the plugin's");
            second.end(signal);
            first.says("answers the plugin's");
            scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
            first.says("command=ADD");
        });
    }
}

#[test]
fn what_stands_in_the_way_is_replaced_and_what_is_removed_comes_back() {
    Scene::run(|scene| {
        fs::create_dir_all(scene.socket().parent().expect("one")).expect("made");
        drop(UnixListener::bind(scene.socket()).expect("bound"));
        let agent = scene.agent();
        scene.done("ADD", &scene.conf_of_agent_alone(), Some(UID));
        fs::remove_file(scene.socket()).expect("removed");
        agent.says("answers the plugin's");
        assert!(is_private(&scene.socket()));
        assert!(!agent.said().iter().any(|line| line.contains("level=warn")));
    });
}
