//! A pod's selection of a network.

use serde_json::{Map, Value, json};
use std::net::IpAddr;

/// One network that an annotation selects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Where it was written, for messages: annotation, pod, element, character.
    pub place: String,
    /// `namespace` of the definition.
    pub namespace: String,
    /// `name` of the definition.
    pub name: String,
    /// `interface`: the requested name of the interface.
    pub interface: Option<String>,
    /// `ips`: addresses, each with or without a prefix length.
    pub ips: Vec<String>,
    /// `mac`.
    pub mac: Option<String>,
    /// `infiniband-guid`.
    pub infiniband_guid: Option<String>,
    /// `portMappings`: objects as in the CNI conventions.
    pub port_mappings: Vec<Value>,
    /// `bandwidth`: an object as in the CNI conventions.
    pub bandwidth: Option<Value>,
    /// `deviceID`.
    pub device_id: Option<String>,
    /// `cni-args`: added to `args.cni` of every plugin of the network.
    pub cni_args: Map<String, Value>,
    /// `default-route`: the gateways of the pod's default route, which moves to this network. If it is set, even to an
    /// empty list, all networks lose their own default routes.
    pub default_route: Option<Vec<IpAddr>>,
}

impl Selection {
    /// Returns the requests to the network's plugins by capability (CONVENTIONS.md, "Dynamic Plugin specific fields").
    /// A plugin gets only those that its configuration declares.
    #[must_use]
    pub fn runtime_config(&self) -> Map<String, Value> {
        let capabilities = [
            ("portMappings", (!self.port_mappings.is_empty()).then(|| json!(self.port_mappings))),
            ("bandwidth", self.bandwidth.clone()),
            ("ips", (!self.ips.is_empty()).then(|| json!(self.ips))),
            ("mac", self.mac.as_ref().map(|mac| json!(mac))),
            ("infinibandGUID", self.infiniband_guid.as_ref().map(|guid| json!(guid))),
            ("deviceID", self.device_id.as_ref().map(|id| json!(id))),
        ];
        capabilities.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    }

    /// Returns the requests as `CNI_ARGS`, for plugins without capabilities.
    #[must_use]
    pub fn args(&self) -> Vec<(&'static str, String)> {
        let ips = (!self.ips.is_empty()).then(|| ("IP", self.ips.join(",")));
        self.mac.iter().map(|mac| ("MAC", mac.clone())).chain(ips).collect()
    }
}

/// The networks that an annotation selects, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selections {
    /// The elements.
    pub elements: Vec<Selection>,
    /// Ignored parts of the annotation, one line each.
    pub warnings: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_reach_plugins_by_capability_and_in_cni_args() {
        let selection = Selection {
            ips: vec!["10.0.0.9/24".into(), "fd::9".into()],
            mac: Some("02:00:00:00:00:01".into()),
            infiniband_guid: Some("11:22:33:44:55:66:77:88".into()),
            device_id: Some("0000:00:01.0".into()),
            bandwidth: Some(json!({"ingressRate": 1})),
            port_mappings: vec![json!({"hostPort": 1})],
            ..Selection::default()
        };
        let wanted = json!({
            "portMappings": [{"hostPort": 1}], "bandwidth": {"ingressRate": 1}, "ips": ["10.0.0.9/24", "fd::9"],
            "mac": "02:00:00:00:00:01", "infinibandGUID": "11:22:33:44:55:66:77:88", "deviceID": "0000:00:01.0",
        });
        assert_eq!(Value::Object(selection.runtime_config()), wanted);
        assert_eq!(selection.args(), [("MAC", "02:00:00:00:00:01".into()), ("IP", "10.0.0.9/24,fd::9".into())]);
        assert!(Selection::default().runtime_config().is_empty() && Selection::default().args().is_empty());
    }
}
