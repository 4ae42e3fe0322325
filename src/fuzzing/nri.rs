//! A target for what the container runtime sends to the agent.

use super::check_printed;
use crate::agent::nri::session::{Failure, Session};
use crate::agent::nri::{NriContainer, NriHandler, NriPod};
use crate::printable;

/// Records what is reported.
#[derive(Debug, Default, PartialEq, Eq)]
struct Reported(Vec<(&'static str, Vec<NriPod>, Vec<NriContainer>)>);

impl Reported {
    fn add(&mut self, what: &'static str, pod: &NriPod, container: &NriContainer) {
        self.0.push((what, vec![pod.clone()], vec![container.clone()]));
    }
}

impl NriHandler for Reported {
    fn synchronize(&mut self, pods: Vec<NriPod>, containers: Vec<NriContainer>) {
        self.0.push(("synchronize", pods, containers));
    }

    fn start(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("start", pod, container);
    }

    fn started(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("started", pod, container);
    }

    fn stopped(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("stopped", pod, container);
    }

    fn removed(&mut self, pod: &NriPod, container: &NriContainer) {
        self.add("removed", pod, container);
    }
}

/// The bytes of a connection: what they mean does not depend on how they are split into reads.
pub(super) fn session(input: &[u8]) {
    let text = |failure: Failure| match failure {
        Failure::Cause(cause) => cause,
        other => format!("{other:?}"),
    };
    let receive = |size: usize| {
        let (mut session, mut reported, mut sent) = (Session::default(), Reported::default(), Vec::new());
        let mut send = |bytes: &[u8]| -> Result<(), Failure> {
            sent.extend_from_slice(bytes);
            Ok(())
        };
        let mut parts = input.chunks(size);
        let failure = parts.find_map(|part| session.receive(part, &mut reported, &mut send).err());
        let failure = failure.map(text);
        assert!(failure.as_ref().is_none_or(|text| text.len() < 4096), "{failure:?}");
        check_printed(&printable::line(&session.closed()));
        (reported, sent, failure)
    };
    let whole = receive(input.len().max(1));
    assert_eq!(receive(7), whole);
}
